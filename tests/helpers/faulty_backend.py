"""Any copy backend with faults that a seed decides: what the offload has to live with, whatever moves its bytes."""

from __future__ import annotations

import random
from collections import Counter
from collections.abc import Sequence

from vllm.v1.simple_kv_offload.copy_backends.base import (
    CopyBackend,
    CopyError,
    CopyResult,
    EventsList,
    WaitEvent,
)

FAULTS = ("refused", "torn", "told late", "failed after all", "bad source")
POLLS_LATE = 3


class _Told(CopyResult):
    """The inner result as the fault lets it be told."""

    __slots__ = ("_fault_error", "_inner", "_polls_left")

    def __init__(self, inner: CopyResult, error: CopyError | None, polls_late: int) -> None:
        super().__init__()
        self._inner = inner
        self._fault_error = error
        self._polls_left = polls_late

    def query(self) -> bool:
        if self._done.is_set():
            return True
        if not self._inner.query():
            return False
        if self._polls_left > 0:
            self._polls_left -= 1
            return False
        self.seconds = self._inner.seconds
        self.resolve(self._fault_error or self._inner.error)
        return True

    def synchronize(self, timeout_s: float | None = None) -> bool:
        return self._inner.synchronize(timeout_s) and self.query()


class FaultyBackend(CopyBackend):
    """``rate`` of the copies of ``inner`` get a fault; ``met`` counts them. Without faults it changes nothing.

    A copy is refused, fails half way, is told of some polls late, fails after its bytes have arrived, or comes with a
    source block that is said to be unusable. No fault changes bytes outside the targets, none is told as a success.
    """

    def __init__(self, inner: CopyBackend, seed: int, rate: float = 0.3) -> None:
        self.inner = inner
        self.met: Counter[str] = Counter()
        self._chance = random.Random(seed)
        self._rate = rate

    def launch_copy(
        self,
        src_blocks: Sequence[int],
        dst_blocks: Sequence[int],
        is_store: bool,
        event_idx: int,
        events_list: EventsList,
        wait_event: WaitEvent | None = None,
    ) -> None:
        fault = self._chance.choice(FAULTS) if self._chance.random() < self._rate else None
        error: CopyError | None = None
        if fault is not None:
            self.met[fault] += 1
        if fault not in (None, "told late"):
            bad = frozenset(src_blocks[:1]) if fault == "bad source" and not is_store else frozenset[int]()
            error = CopyError(f"planted: {fault}", bad)
        count = len(src_blocks)
        if fault == "torn":
            count //= 2
        if fault == "refused":
            count = 0
        inner: EventsList = []
        self.inner.launch_copy(src_blocks[:count], dst_blocks[:count], is_store, event_idx, inner, wait_event)
        ((_, result),) = inner
        assert isinstance(result, CopyResult)
        events_list.append((event_idx, _Told(result, error, POLLS_LATE if fault == "told late" else 0)))

    def check_health(self) -> None:
        self.inner.check_health()

    def shutdown(self) -> None:
        self.inner.shutdown()
