"""How KV event batches leave the engine: the publisher contract, the silent one, and the table.

Owns the choice of a publisher from its config. It must not know any transport. Layer L4.
"""

from __future__ import annotations

import dataclasses
from abc import ABC, abstractmethod
from collections.abc import Callable
from dataclasses import dataclass
from typing import cast

from vllm.config import KVEventsConfig
from vllm.distributed.kv_event_types import EventBatch
from vllm.utils.registry import resolve_object


@dataclass(frozen=True, slots=True)
class PublisherCounters:
    """What a publisher did so far; ``queue_depth`` is the present one."""

    batches_sent: int = 0
    batches_dropped: int = 0
    events_sent: dict[str, int] = dataclasses.field(default_factory=dict)
    replay_requests: int = 0
    queue_depth: int = 0


class EventPublisher(ABC):
    """Takes one batch per processed step. ``publish`` never blocks the caller.

    A batch that cannot be queued is dropped as a whole; it uses up its sequence number, so that
    consumers see a gap.
    """

    def __init__(self, data_parallel_rank: int = 0) -> None:
        self._data_parallel_rank = data_parallel_rank
        self.wake_core: Callable[[], None] | None = None
        """To be called, from any thread, when a snapshot is wanted: an idle core would not see it."""

    @abstractmethod
    def publish(self, events: EventBatch) -> None:
        """Queue one batch; fills in the rank if the batch has none."""

    @abstractmethod
    def shutdown(self) -> None:
        """Send what is queued (briefly), then close. Idempotent."""

    @property
    def wants_snapshot(self) -> bool:
        """Some consumer has asked what is cached now; the caller then answers with ``publish_snapshot``."""
        return False

    def publish_snapshot(self, events: EventBatch) -> None:  # noqa: B027 (who never wants one needs none)
        """Queue the present state, as stores, for those who asked. It stands behind all batches published so far."""

    def get_publisher_config(self) -> KVEventsConfig | None:
        """The config with resolved addresses, or None if nothing is published."""
        return None

    def get_counters(self) -> PublisherCounters:
        """Counters since the start."""
        return PublisherCounters()


class NullEventPublisher(EventPublisher):
    """Drops everything."""

    def publish(self, events: EventBatch) -> None:
        return

    def shutdown(self) -> None:
        return


def _lazy(target: str) -> Callable[..., EventPublisher]:
    def construct(**options: object) -> EventPublisher:
        return cast("Callable[..., EventPublisher]", resolve_object(target))(**options)

    return construct


class EventPublisherFactory:
    """Publisher name → constructor; the constructor takes the config's fields as keywords."""

    _registry: dict[str, Callable[..., EventPublisher]] = {
        "null": lambda **options: NullEventPublisher(),
        "zmq": _lazy("vllm.distributed.kv_event_zmq:ZmqEventPublisher"),
    }

    @classmethod
    def register_publisher(cls, name: str, ctor: Callable[..., EventPublisher]) -> None:
        """Add a publisher kind; ``KeyError`` if the name is taken."""
        if name in cls._registry:
            raise KeyError(f"publisher '{name}' already registered")
        cls._registry[name] = ctor

    @classmethod
    def create(cls, config: KVEventsConfig | None, data_parallel_rank: int = 0) -> EventPublisher:
        """The publisher a config asks for; the silent one without config or with events off.

        Raises ``ValueError`` for an unknown kind.
        """
        if config is None or not config.enable_kv_cache_events:
            return NullEventPublisher(data_parallel_rank)
        kind = config.publisher or "zmq"
        if kind not in cls._registry:
            raise ValueError(f"Unknown event publisher '{kind}'; known: {', '.join(sorted(cls._registry))}")
        return cls._registry[kind](
            data_parallel_rank=data_parallel_rank,
            endpoint=config.endpoint,
            replay_endpoint=config.replay_endpoint,
            buffer_steps=config.buffer_steps,
            hwm=config.hwm,
            max_queue_size=config.max_queue_size,
            topic=config.topic,
            **({} if config.bind is None else {"bind": config.bind}),
        )
