"""The event path's far end: a publisher that keeps batches, and a consumer that rebuilds every index from them."""

from __future__ import annotations

from collections.abc import Sequence

from tests.sim.failure import SimFailure, require
from vllm.config import KVEventsConfig
from vllm.distributed.kv_event_publisher import EventPublisher
from vllm.distributed.kv_event_types import (
    MEDIUM_GPU,
    AllBlocksCleared,
    AnyKVCacheEvent,
    BlockRemoved,
    BlockStored,
    EventBatch,
)

Residency = tuple[str, int, object]
"""(medium, group, hash as published)"""


class CapturingPublisher(EventPublisher):
    """Keeps what is published until the consumer takes it."""

    def __init__(self) -> None:
        super().__init__(0)
        self.batches: list[EventBatch] = []
        self.closed = False

    def publish(self, events: EventBatch) -> None:
        require(not self.closed, "I7", "publish after shutdown")
        self.batches.append(events)

    def shutdown(self) -> None:
        self.closed = True

    def get_publisher_config(self) -> KVEventsConfig | None:
        return None


class Consumer:
    """Counts residencies: equal content may lie in several blocks, so one key may be stored more than once."""

    def __init__(self, publisher: CapturingPublisher) -> None:
        self._publisher = publisher
        self.counts: dict[Residency, int] = {}
        self.stored: list[BlockStored] = []
        """Announcements not checked against the requests' tokens yet."""

    def take(self) -> None:
        """Apply everything published so far."""
        batches, self._publisher.batches = self._publisher.batches, []
        for batch in batches:
            require(bool(batch.events), "I7", "an empty batch was published")
            for event in batch.events:
                if isinstance(event, BlockStored):
                    self.stored.append(event)
                self.apply(self.counts, event)

    def with_pending(self, pending: Sequence[AnyKVCacheEvent]) -> dict[Residency, int]:
        """What the consumer will know once the events still queued have arrived."""
        if not pending:
            return self.counts
        counts = dict(self.counts)
        for event in pending:
            self.apply(counts, event)
        return counts

    @staticmethod
    def apply(counts: dict[Residency, int], event: object) -> None:
        """Count what one event tells."""
        if isinstance(event, BlockStored):
            require(bool(event.block_hashes), "I7", "BlockStored without a hash")
            for block_hash in event.block_hashes:
                key = (str(event.medium), event.group_idx or 0, block_hash)
                counts[key] = counts.get(key, 0) + 1
        elif isinstance(event, BlockRemoved):
            for block_hash in event.block_hashes:
                key = (str(event.medium), event.group_idx or 0, block_hash)
                if counts.get(key, 0) <= 0:
                    raise SimFailure("I7", f"BlockRemoved of {key}, which was never stored")
                counts[key] -= 1
                if counts[key] == 0:
                    del counts[key]
        elif isinstance(event, AllBlocksCleared):
            medium = getattr(event, "medium", None) or MEDIUM_GPU
            for key in [key for key in counts if key[0] == medium]:
                del counts[key]
