"""The rare situations that can be seen when a step has been scheduled."""

from __future__ import annotations

from tests.sim.marks import Marks
from tests.sim.policies import PolicyMarks
from tests.sim.retention import mark_retention
from tests.sim.views import RunViews
from vllm.v1.core.sched.interface import PauseState
from vllm.v1.core.sched.output import SchedulerOutput
from vllm.v1.request import RequestStatus
from vllm.v1.simple_kv_offload.manager import SimpleCPUOffloadScheduler


class StepMarks(RunViews):
    """What of a run they concern, besides its views."""

    marks: Marks
    policy_marks: PolicyMarks
    full_tiers: set[int]
    asked: dict[str, int]
    """How often each request with a hit below was asked for it."""

    def mark_step(self, output: SchedulerOutput) -> None:
        """After a step was scheduled."""
        scheduler = self.scheduler
        counts = scheduler.get_request_counts()
        if counts[1] and len(scheduler.running) < self.params.max_num_seqs and output.num_scheduled_tokens:
            self.marks.hit("request waits for memory")
        for request in scheduler.requests.values():
            if request.status is RequestStatus.WAITING_FOR_STRUCTURED_OUTPUT_GRAMMAR:
                self.marks.hit("waits for its grammar")
            if request.num_overtaken:
                self.marks.hit("overtaken")
        self._mark_hit_without_room(bool(output.num_scheduled_tokens))
        for pool in (self.device_pool, *(pool for _, pool, _ in self.lower_pools())):
            mark_retention(self.marks, pool)
        offload = self.offload
        if offload is None:
            return
        for request in scheduler.requests.values():
            if request.status is RequestStatus.WAITING_FOR_REMOTE_KVS:
                self.marks.hit("external hit")
        if offload.store_side.planned or len(offload.store_side.table):
            self.marks.hit("lazy store" if self.params.lazy else "eager store")
        for index, each in enumerate(self.offloads):
            # A store may also stop at slots whose content its own request counts on: nothing is evicted then.
            if each.tier.evictions or not any(
                slot.ref_cnt == 0 and slot.block_hash is None for slot in each.tier.pool.blocks[1:]
            ):
                self.full_tiers.add(index)
        if offload.tier.num_stageable == 0:
            self.marks.hit("host full")
        if offload.tier.evictions:
            self.marks.hit("host eviction")
        self._mark_chain()
        self.policy_marks.look(offload)
        if len(self.offloads) > 1:
            self._mark_second(self.offloads[1])
        for request_id in offload._pending_cpu_hits:
            self.asked[request_id] = self.asked.get(request_id, 0) + 1
            if self.asked[request_id] > 1:
                self.marks.hit("repeated ask")

    def _mark_chain(self) -> None:
        chain = self.chain
        if chain is None:
            return
        if chain.waiting:
            self.marks.hit("wait for the disk")
        if chain.counts.timeouts:
            self.marks.hit("wait for the disk in vain")
        if chain.disk.evictions:
            self.marks.hit("disk eviction")
        if chain.writes_off:
            self.marks.hit("disk written to no more")

    def _mark_second(self, second: SimpleCPUOffloadScheduler) -> None:
        if len(second.store_side.table):
            self.marks.hit("store to a second connector")
        if second.load_side.loads:
            self.marks.hit("load from a second connector")
        if second.tier.evictions:
            self.marks.hit("second host eviction")

    def _mark_hit_without_room(self, busy: bool) -> None:
        """The first waiting request has a hit, and what stands in its way can only be memory."""
        scheduler = self.scheduler
        if not busy or not scheduler.waiting or len(scheduler.running) >= self.params.max_num_seqs:
            return
        request = scheduler.waiting.peek_request()
        coordinator = scheduler.kv_cache_manager.coordinator
        _, tokens, _ = coordinator.find_longest_cache_hit(request.block_hashes, request.num_tokens - 1)
        if tokens and len(self.params.specs) > 1 and scheduler.pause_state is PauseState.UNPAUSED:
            self.marks.hit("hit in one group without room in another")
