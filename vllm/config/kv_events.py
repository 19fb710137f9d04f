"""Whether and where KV cache events are published. Layer: L1."""

from __future__ import annotations

from typing import Annotated

from pydantic import Field

from vllm.config.setting import config, setting


@config
class KVEventsConfig:
    """Event publishing (`--kv-events-config`)."""

    enable_kv_cache_events: bool = setting(default=False, doc="Produce events at all.")
    publisher: str | None = setting(
        default=None, doc="Registered publisher name; zmq when events are on, null when they are off."
    )
    endpoint: str = setting(default="tcp://*:5557", doc="Address of the PUB socket.")
    replay_endpoint: str | None = setting(
        default=None, doc="Address of the replay socket; no replay when not given."
    )
    buffer_steps: Annotated[int, Field(ge=0)] = setting(default=10_000, doc="Batches kept for replay.")
    hwm: Annotated[int, Field(ge=0)] = setting(
        default=100_000, doc="High-water mark of the PUB socket; 0 = none."
    )
    max_queue_size: Annotated[int, Field(ge=0)] = setting(
        default=100_000, doc="Batches queued inside the process; a full queue drops whole batches."
    )
    topic: str = setting(default="", doc="First frame of every message.")

    def __post_init__(self) -> None:
        if self.publisher is None:
            self.publisher = "zmq" if self.enable_kv_cache_events else "null"
