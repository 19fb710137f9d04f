"""The offload's policies in the simulator: injected times, marks of rare choices."""

from __future__ import annotations

from collections.abc import Sequence

from tests.sim.copies import CopyJob
from tests.sim.marks import Marks
from tests.sim.params import SimParams
from vllm.v1.simple_kv_offload.arc import ArcQueue
from vllm.v1.simple_kv_offload.manager import SimpleCPUOffloadScheduler
from vllm.v1.simple_kv_offload.metadata import Timings

SLOW_FOR = 10
"""Reports for which the tiers are slow, then fast, then slow again."""


def times_of(jobs: Sequence[CopyJob], num_tokens: int, num_reports: int) -> Timings:
    """What a rank claims to have measured: loads cost nothing, or more than anything computed."""
    seconds = 0.015 if num_reports // SLOW_FOR % 2 == 0 else 0.0
    times = Timings(prefill_seconds=0.001 * num_tokens, prefill_tokens=num_tokens)
    for job in jobs:
        if job.is_store or job.failed:
            continue
        if job.is_move:
            times.disk_blocks += len(job.pairs)
            times.disk_seconds += seconds * len(job.pairs)
        else:
            times.load_blocks += len(job.pairs)
            times.load_seconds += seconds * len(job.pairs)
    return times


class PolicyMarks:
    """Notices what the policies did since the last step."""

    def __init__(self, params: SimParams, marks: Marks) -> None:
        self._params = params
        self._marks = marks
        self._was_slow = False

    def look(self, offload: SimpleCPUOffloadScheduler) -> None:
        """After a step was scheduled."""
        side = offload.store_side
        queue = offload.tier.queue
        if isinstance(queue, ArcQueue):
            once, again, *_ = queue.sizes
            self._hit("ARC adapts", queue.target > 0)
            self._hit("ARC has both lists", once > 0 and again > 0 and offload.tier.evictions > 0)
        self._hit("declined for reuse", side.declines.reuse > 0)
        self._hit("stored for reuse", self._params.store_threshold > 1 and side.ledger.done > 0)
        self._hit("offers forgotten", len(side.stores.reuse) >= self._params.max_tracker_size)
        self._hit("store plan cut", side.declines.cut_plans > 0)
        self._hit("preempted work stored first", side.num_preempted_blocks > 0)
        slow = any(offload.speed.is_slow.values())
        self._hit("slow tier declined", any(offload.speed.declines.values()))
        self._hit("slow tier read again", self._was_slow and not slow)
        self._was_slow = slow

    def _hit(self, name: str, happened: bool) -> None:
        if happened:
            self._marks.hit(name)
