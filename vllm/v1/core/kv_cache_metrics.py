"""Residency and reuse of a sample of blocks, as an observer of the pool. Layer: L3.

Owns the samples. Must not know the pool's policy, nor who reads the figures.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from itertools import pairwise

from vllm.utils.clock import monotonic_ns
from vllm.v1.core.kv_cache_block import KVCacheBlock
from vllm.v1.metrics.stats import KVCacheEvictionEvent

NS_PER_SECOND = 1_000_000_000
ACCESSES_MAX = 4
"""Accesses remembered per block; reuse gaps lie between them."""


class BlockMetricsState:
    """Life of one sampled block: when it was allocated and used. Times in nanoseconds of a monotonic clock."""

    __slots__ = ("_now_ns", "access_history", "birth_time_ns", "last_access_ns")

    def __init__(self, *, now_ns: Callable[[], int] = monotonic_ns) -> None:
        self._now_ns = now_ns
        self.birth_time_ns = now_ns()
        self.last_access_ns = self.birth_time_ns
        self.access_history: deque[int] = deque(maxlen=ACCESSES_MAX)

    def record_access(self) -> None:
        """The block was used now."""
        self.last_access_ns = self._now_ns()
        self.access_history.append(self.last_access_ns)

    def get_lifetime_seconds(self) -> float:
        """Time since allocation."""
        return (self._now_ns() - self.birth_time_ns) / NS_PER_SECOND

    def get_idle_time_seconds(self) -> float:
        """Time since the last use."""
        return (self._now_ns() - self.last_access_ns) / NS_PER_SECOND

    def get_reuse_gaps_seconds(self) -> list[float]:
        """Times between the remembered uses, oldest first."""
        times = list(self.access_history)
        return [(later - earlier) / NS_PER_SECOND for earlier, later in pairwise(times)]


class KVCacheMetricsCollector:
    """Follows `sample_rate` of all allocated blocks until they are evicted. ValueError unless 0 < rate <= 1.

    Sampling takes every n-th block rather than drawing lots, so that a run can be repeated exactly.
    """

    def __init__(self, sample_rate: float = 0.01, *, now_ns: Callable[[], int] = monotonic_ns) -> None:
        if not 0.0 < sample_rate <= 1.0:
            raise ValueError(f"sample_rate must be in (0, 1], got {sample_rate}")
        self.sample_rate = sample_rate
        self.block_metrics: dict[int, BlockMetricsState] = {}
        self._now_ns = now_ns
        self._due = 0.0
        self._events: list[KVCacheEvictionEvent] = []

    def should_sample_block(self) -> bool:
        """Whether the next allocated block is followed."""
        self._due += self.sample_rate
        if self._due < 1.0:
            return False
        self._due -= 1.0
        return True

    def on_block_allocated(self, block: KVCacheBlock) -> None:
        """A block was handed out."""
        if self.should_sample_block():
            self.block_metrics[block.block_id] = BlockMetricsState(now_ns=self._now_ns)
        else:
            self.block_metrics.pop(block.block_id, None)  # an earlier life that ended without cached content

    def on_block_accessed(self, block: KVCacheBlock) -> None:
        """A cached block was hit."""
        state = self.block_metrics.get(block.block_id)
        if state is not None:
            state.record_access()

    def on_block_evicted(self, block: KVCacheBlock) -> None:
        """A cached block lost its content."""
        state = self.block_metrics.pop(block.block_id, None)
        if state is not None:
            self._events.append(
                KVCacheEvictionEvent(
                    state.get_lifetime_seconds(),
                    state.get_idle_time_seconds(),
                    tuple(state.get_reuse_gaps_seconds()),
                )
            )

    def reset(self) -> None:
        """Forget the blocks followed; their content was dropped, which is no eviction."""
        self.block_metrics.clear()

    def drain_events(self) -> list[KVCacheEvictionEvent]:
        """Evictions of followed blocks since the last call."""
        events, self._events = self._events, []
        return events
