"""Whether and where KV cache events are published. Layer: L1."""

from __future__ import annotations

from typing import Annotated

from pydantic import Field

from vllm.config.setting import config, setting

PORT_MAX = 65_535


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
    bind: bool | None = setting(
        default=None,
        doc="Whether the PUB socket is bound (true) or connected (false); by the form of its address when not given.",
    )

    def __post_init__(self) -> None:
        if self.publisher is None:
            self.publisher = "zmq" if self.enable_kv_cache_events else "null"


def check_port_ranges(endpoint: str, replay_endpoint: str | None, data_parallel_rank: int) -> None:
    """Refuse ports that do not exist, and addresses of which one rank's is another rank's: ``ValueError`` naming them.

    Rank r uses port + r for both sockets, so the two ranges collide from the rank on that equals
    the distance of the two base ports.
    """
    for name, address in (("endpoint", endpoint), ("replay_endpoint", replay_endpoint)):
        last = (tcp_port(address) or 0) + data_parallel_rank if address else 0
        if last > PORT_MAX:
            raise ValueError(f"{name}={address!r} needs port {last}, the largest is {PORT_MAX}")
    if replay_endpoint is None:
        return
    if not endpoint.startswith("tcp") and endpoint == replay_endpoint:
        raise ValueError(f"endpoint and replay_endpoint must differ, both are {endpoint!r}")
    port, replay_port = tcp_port(endpoint), tcp_port(replay_endpoint)
    if not port or not replay_port:
        return
    if abs(port - replay_port) <= data_parallel_rank:
        raise ValueError(
            f"The port ranges of endpoint {endpoint!r} and replay_endpoint {replay_endpoint!r} overlap: "
            f"data-parallel rank {data_parallel_rank} needs them at least {data_parallel_rank + 1} apart"
        )


def tcp_port(endpoint: str) -> int | None:
    """The port of a tcp address; None where there is none."""
    if not endpoint.startswith("tcp"):
        return None
    port = endpoint.rpartition(":")[2]
    return int(port) if port.isascii() and port.isdecimal() else None
