"""The rare situations that can be seen when a step has been scheduled, or a reset is about to come."""

from __future__ import annotations

from tests.sim.encoder import mark_encoder
from tests.sim.marks import Marks
from tests.sim.policies import PolicyMarks
from tests.sim.retention import mark_retention
from tests.sim.views import RunViews
from vllm.distributed.kv_transfer.kv_connector.v1.offloading.scheduler import WAIT_MAX_S
from vllm.v1.core.sched.interface import PauseState
from vllm.v1.core.sched.output import NewRequestData, SchedulerOutput
from vllm.v1.messages import EngineCoreOutput
from vllm.v1.request import RequestStatus
from vllm.v1.simple_kv_offload.manager import SimpleCPUOffloadScheduler
from vllm.v1.simple_kv_offload.transfer import TransferState


class StepMarks(RunViews):
    """What of a run they concern, besides its views."""

    marks: Marks
    policy_marks: PolicyMarks
    full_tiers: set[int]
    asked: dict[str, int]
    """How often each request with a hit below was asked for it."""
    _evictions: int = 0
    """Of the first host tier, up to the last step."""

    def mark_connector_reset(self) -> None:
        """Before the tiers below are reset."""
        running = [t for t in self.store_transfers() if t.state is TransferState.SUBMITTED]
        if any(transfer.request_id is None for transfer in running):
            self.marks.hit("reset while a lazy copy runs")
        if self.moves():
            self.marks.hit("reset while blocks move between tiers")
        placers = (pool.placer for _, pool, _ in self.lower_pools())
        if any(placer is not None and placer.num_protected for placer in placers):
            self.marks.hit("reset with content protected")

    def mark_failed_load(self, is_behind_a_step: bool) -> None:
        """A load has failed; a step was scheduled since its request was admitted to it."""
        if is_behind_a_step:
            self.marks.hit("failed load behind a look-ahead step")
        if len(self.params.specs) > 1:
            self.marks.hit("failed load of several groups")

    def mark_admission(self, new: NewRequestData, num_tokens: int, num_preemptions: int) -> None:
        """A request starts, for the first time or again, with that many tokens known."""
        mark_encoder(self.marks, new, num_preemptions)
        if new.num_computed_tokens == 0:
            return
        self.marks.hit("local hit")
        if self.params.dcp > 1:
            self.marks.hit("hit with a split context")
        if num_preemptions:
            self.marks.hit("resumed with a hit")
        if new.num_computed_tokens == num_tokens - 1:
            self.marks.hit("full prompt cached")

    def is_held_up(self, output: EngineCoreOutput) -> bool:
        """The request ends because copies that were given up hold what it needs: right if there have been any."""
        given_up = self.marks.counts["load given up"] + self.marks.counts["store given up"]
        if output.error is None or output.error.code != "kv_cache_blocked" or not given_up:
            return False
        self.marks.hit("copies given up hold what a request needs")
        return True

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
                if any(group.num_layers > 1 and group.cacheable for group in self.worker.groups):
                    self.marks.hit("page of several layers loaded")
        self._mark_copies(output)
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
        self._mark_outside()
        self.policy_marks.look(offload)
        if len(self.offloads) > 1:
            self._mark_second(self.offloads[1])
        for request_id in offload._pending_cpu_hits:
            self.asked[request_id] = self.asked.get(request_id, 0) + 1
            if self.asked[request_id] > 1:
                self.marks.hit("repeated ask")

    def _mark_copies(self, output: SchedulerOutput) -> None:
        """What a step does while copies run that have nothing to do with it."""
        transfers = self.store_transfers()
        abandoned = {id(b) for t in transfers if t.state is TransferState.ABANDONED for b in t.device_blocks}
        live = [t for t in transfers if t.state in (TransferState.PLANNED, TransferState.SUBMITTED)]
        if any(id(block) in abandoned for transfer in live for block in transfer.device_blocks):
            self.marks.hit("stored again while the abandoned copy runs")
        loads = [load for offload in self.offloads for load in offload.load_side.loads.values()]
        has_scratch = any(not spec.transferable for spec in self.params.specs)
        if has_scratch and output.preempted_req_ids and (transfers or loads):
            self.marks.hit("scratch preempted with a copy in flight")
        for offload in self.offloads:
            if offload.store_side.boundary.stats.dropped_request_gone:
                self.marks.hit("hand-off of a request that is gone")
        evictions = self.offloads[0].tier.evictions
        if self.chain is not None and self.chain.up.live and evictions > self._evictions:
            self.marks.hit("host evicts while blocks come up")
        self._evictions = evictions

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

    def _mark_outside(self) -> None:
        now = self.world.clock.monotonic()
        if any(now - since >= WAIT_MAX_S for since in self.put_off_since):
            self.marks.hit("waits for a manager in vain")

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
