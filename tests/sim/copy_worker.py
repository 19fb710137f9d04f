"""The half of the workers that copies, for one connector: orders to lanes, lanes to reports, on every rank.

Copies submitted by a step may start once its forward has run. It knows nothing of requests but their ids.
"""

from __future__ import annotations

import random
from collections.abc import Callable
from dataclasses import dataclass, field

from tests.sim.copies import CopyJob, Lanes
from tests.sim.device import Memory
from tests.sim.failure import require
from tests.sim.kept_rows import KeptRows
from tests.sim.marks import Marks
from tests.sim.params import SimParams
from tests.sim.policies import times_of
from tests.sim.rank_memory import (
    check_writers_below,
    host_memories,
    load_pairs,
    slot_of,
    store_pairs,
)
from vllm.v1.core.sched.output import SchedulerOutput
from vllm.v1.outputs import KVConnectorOutput
from vllm.v1.simple_kv_offload.metadata import (
    INVALID_JOB_ID,
    KeptOrder,
    SimpleCPUOffloadMetadata,
    SimpleCPUOffloadWorkerMetadata,
    Timings,
)

FaultDraw = Callable[[str, random.Random], bool]


@dataclass
class Step:
    """One scheduled step on its way through the workers. `version`: the weights when it was scheduled."""

    output: SchedulerOutput
    version: int
    fails: bool = False
    shadowed: bool = False
    """A step that fails was ahead of it when it was scheduled."""
    executed: bool = False
    load_sent: bool = False
    """Its load was started when it was sent, before its forward."""
    sampled: dict[str, list[int]] = field(default_factory=dict)
    drafts: dict[str, list[int]] = field(default_factory=dict)
    reports: list[KVConnectorOutput | None] = field(default_factory=list)
    parts: list[Step] = field(default_factory=list)
    """The step as the worker of each connector sees it, where there are several."""


class CopyWorker:
    """Memory, lanes and the table of what is kept, per rank."""

    def __init__(self, params: SimParams, marks: Marks, fault: FaultDraw) -> None:
        self.params = params
        self.marks = marks
        self.fault = fault
        self.devices = [Memory(params.device_blocks) for _ in range(params.ranks)]
        self.hosts = host_memories(params)
        self.disks = [Memory(max(1, params.disk_blocks)) for _ in range(params.ranks)]
        memories = zip(self.devices, self.hosts, self.disks, strict=True)
        self.lanes = [Lanes(device, host, disk) for device, host, disk in memories]
        self.kept = [KeptRows() for _ in range(params.ranks)]
        """What each rank keeps of its disk for the next start."""
        self._failed_loads: list[set[str]] = [set() for _ in range(params.ranks)]
        self._seen = [(INVALID_JOB_ID, INVALID_JOB_ID)] * params.ranks
        self._seen_moves = [(INVALID_JOB_ID, INVALID_JOB_ID)] * params.ranks
        self._lost = [SimpleCPUOffloadWorkerMetadata() for _ in range(params.ranks)]
        self._lost_loads: list[set[int]] = [set() for _ in range(params.ranks)]
        self._load_order: list[int] = []
        self._num_reports = 0

    @property
    def all_lanes(self) -> list[Lanes]:
        """The lanes of all ranks, for every connector."""
        return self.lanes

    @property
    def is_stuck(self) -> bool:
        """Time alone changes something: jobs are given up."""
        return False

    @property
    def hangs(self) -> bool:
        """Stalled copies never go on while requests are there."""
        return False

    @property
    def is_waited_for(self) -> bool:
        """Some copy will end, or be given up, by itself: who lacks its memory may wait."""
        return self.copying()

    def finish_copies(self, *, are_requests_there: bool) -> None:
        """The run comes to rest: what can end, ends."""
        for lanes in self.all_lanes:
            lanes.finish_all()

    @property
    def has_late_news(self) -> bool:
        """Something ended of which the engine hears when it steps, and for which it need not step."""
        return False

    def memories_below(self, connector: int) -> tuple[list[Memory], list[Memory]]:
        """Host and disk memory by rank, of one connector."""
        assert connector == 0
        return self.hosts, self.disks

    # --- orders ---------------------------------------------------------------------------------------------------

    def submit_copies(self, step: Step, rng: random.Random) -> None:
        """Hand the step's orders to the lanes; ranks on which the step fails may never have got them."""
        meta = step.output.kv_connector_metadata
        if not isinstance(meta, SimpleCPUOffloadMetadata):
            return
        for rank in range(len(self.lanes)):
            if step.fails and rng.random() < 0.5:
                continue
            self._notice_lost(rank, meta)
            self._order_moves(rank, meta, step.fails and rng.random() < 0.5, rng)
            self._failed_loads[rank] |= set(meta.failed_load_reqs)
            if meta.load_event != INVALID_JOB_ID and not step.load_sent:
                self._order_load(rank, meta, step.fails and rng.random() < 0.5, rng)
            if meta.store_event != INVALID_JOB_ID:
                if step.fails:  # nothing was computed that could be stored
                    self._lost[rank].failed_store_events[meta.store_event] = 1
                    continue
                self._order_store(rank, meta, rng)
        if meta.load_event != INVALID_JOB_ID and not step.load_sent:
            self._load_order.append(meta.load_event)

    def send_load(self, step: Step, rng: random.Random) -> None:
        """Start the step's load now, beside the steps that still run."""
        meta = step.output.kv_connector_metadata
        if step.fails or not isinstance(meta, SimpleCPUOffloadMetadata) or meta.load_event == INVALID_JOB_ID:
            return
        step.load_sent = True
        for rank in range(len(self.lanes)):
            self._order_load(rank, meta, False, rng)
        self._load_order.append(meta.load_event)

    def _order_load(
        self, rank: int, meta: SimpleCPUOffloadMetadata, never_started: bool, rng: random.Random
    ) -> None:
        pairs = load_pairs(self.hosts[rank], meta)
        if meta.load_groups and pairs:
            self.marks.hit("load from the rank's own part")
        ids = meta.load_event_to_reqs[meta.load_event]
        counts = meta.load_block_counts or [len(pairs)] * len(ids)
        if never_started:
            self._failed_loads[rank] |= set(ids)
            return
        requests = list(zip(ids, counts, strict=True))
        self.lanes[rank].submit(self._job(meta.load_event, False, pairs, requests, rng))

    def _order_store(self, rank: int, meta: SimpleCPUOffloadMetadata, rng: random.Random) -> None:
        lanes = self.lanes[rank]
        pairs = store_pairs(lanes.host, meta)
        if len(pairs) < len(meta.store_cpu_blocks):
            self.marks.hit("replicas take turns")
        if self.params.disk:
            self.kept[rank].check_absent(rank, pairs)
        lanes.submit(self._job(meta.store_event, True, pairs, [], rng))

    def _order_moves(
        self, rank: int, meta: SimpleCPUOffloadMetadata, never_started: bool, rng: random.Random
    ) -> None:
        """Start the step's moves between host and disk; those of steps that were lost on this rank have failed."""
        lost = self._lost[rank]
        table = self.kept[rank]
        if table.bind(meta.kept, fails=bool(meta.kept.slots) and self.fault("table fails", rng)):
            lost.kept_lost = True
            self.marks.hit("kept order missed")
        for order, failed, is_store, seen in (
            (meta.move_down, lost.failed_moves_down, True, self._seen_moves[rank][0]),
            (meta.move_up, lost.failed_moves_up, False, self._seen_moves[rank][1]),
        ):
            for event in range(seen + 1, order.issued + 1):
                if event != order.event or never_started:
                    failed[event] = 1
            if order.event == INVALID_JOB_ID or never_started:
                continue
            pairs = list(zip(order.src_blocks, order.dst_blocks, strict=True))
            job = self._job(order.event, is_store, pairs, [], rng)
            job.is_move = True
            if is_store:
                table.check_absent(rank, pairs)
            self.lanes[rank].submit(job)
        self._seen_moves[rank] = (meta.move_down.issued, meta.move_up.issued)

    def apply_withdrawal(self, withdrawal: KeptOrder, rng: random.Random) -> None:
        """What was withdrawn reaches all ranks at once, behind the steps that were sent."""
        for table, lost in zip(self.kept, self._lost, strict=True):
            lost.kept_lost |= table.bind(withdrawal, fails=self.fault("table fails", rng))
        self.marks.hit("withdrawn for good")

    def _notice_lost(self, rank: int, meta: SimpleCPUOffloadMetadata) -> None:
        """Orders of earlier steps that never reached this rank are reported, stores as failed, loads as lost."""
        loads, stores = self._seen[rank]
        self._lost[rank].lost_load_events |= set(range(loads + 1, meta.issued_load_event + 1)) - {
            meta.load_event
        }
        for event in set(range(stores + 1, meta.issued_store_event + 1)) - {meta.store_event}:
            self._lost[rank].failed_store_events[event] = 1
        self._lost_loads[rank] |= self._lost[rank].lost_load_events
        self._seen[rank] = (meta.issued_load_event, meta.issued_store_event)
        for event, request_ids in meta.failed_load_events.items():
            if event in self._lost_loads[rank]:
                self._lost_loads[rank].discard(event)
                self._failed_loads[rank] |= set(request_ids)

    def _job(
        self,
        event: int,
        is_store: bool,
        pairs: list[tuple[int, int]],
        requests: list[tuple[str, int]],
        rng: random.Random,
    ) -> CopyJob:
        job = CopyJob(event, is_store, pairs, requests)
        if pairs and self.fault("store fails" if is_store else "load fails", rng):
            job.fails_at = rng.randrange(len(pairs))
            job.bad_source = not is_store and self.fault("bad source", rng)
        if self.fault("stall", rng):
            job.stalled = True
            self.marks.hit("stall")
        return job

    def copying(self) -> bool:
        """Some rank has a copy that runs or is not reported."""
        return any(lanes.busy for lanes in self.lanes)

    def device_targets(self) -> dict[int, str]:
        """Device blocks that running loads write, with who writes them."""
        targets = {}
        for lanes in self.lanes[:1]:
            for job in lanes.running:
                if not job.is_store and not job.is_move:
                    for _, target in job.pairs:
                        require(target not in targets, "I3", f"two loads write device block {target}")
                        targets[target] = f"load {job.event}"
        return targets

    def check_host_targets(self) -> None:
        """No page below the device has two writers, nor a reader while somebody writes it."""
        check_writers_below(self.lanes)

    # --- reports --------------------------------------------------------------------------------------------------

    def reports(self, rng: random.Random, output: SchedulerOutput) -> list[KVConnectorOutput | None]:
        """What each rank has to say with its next output; ranks may keep finished jobs back for later."""
        reports: list[KVConnectorOutput | None] = []
        self._num_reports += 1
        orders = output.kv_connector_metadata
        measures = isinstance(orders, SimpleCPUOffloadMetadata) and orders.measures
        for rank, lanes in enumerate(self.lanes):
            told = [job for job in lanes.unreported if not self.fault("report late", rng)]
            lanes.unreported = [job for job in lanes.unreported if job not in told]
            times = Timings()
            if measures:
                times = times_of(told, output.total_num_scheduled_tokens, self._num_reports)
            reports.append(self._report(rank, told, times))
        open_events = [
            {j.event for j in lanes.running + lanes.unreported if j.is_store and not j.is_move}
            for lanes in self.lanes
        ]
        if any(events != open_events[0] for events in open_events):
            self.marks.hit("rank skew")
        return reports

    def _report(self, rank: int, jobs: list[CopyJob], times: Timings) -> KVConnectorOutput | None:
        failed, self._failed_loads[rank] = self._failed_loads[rank], set()
        meta, self._lost[rank] = self._lost[rank], SimpleCPUOffloadWorkerMetadata()
        meta.timings = times
        if not jobs and not failed and meta == SimpleCPUOffloadWorkerMetadata():
            return None
        received = set(failed)
        for job in jobs:
            if job.is_move:
                self._report_move(rank, meta, job)
                continue
            if job.is_store:
                counts = meta.failed_store_events if job.failed else meta.completed_store_events
                counts[job.event] = 1
                if job.failed:
                    self.marks.hit("failed store")
                continue
            lost = job.failed_requests()
            received |= {request_id for request_id, _ in job.requests}
            failed |= lost
            if lost:
                self.marks.hit("failed load")
            if lost and job.bad_source:
                meta.bad_cpu_blocks.add(slot_of(self.hosts[rank], job.pairs[job.done_pairs][0]))
                # From now on: what was read before it was told of may still have been right.
                self.hosts[rank].page(job.pairs[job.done_pairs][0]).spoil()
                self.marks.hit("lost block reported")
            if job.event in self._load_order:
                if self._load_order[0] != job.event:
                    self.marks.hit("loads finish out of order")
                self._load_order.remove(job.event)
        return KVConnectorOutput(
            finished_recving=received or None, failed_recving=failed, kv_connector_worker_meta=meta
        )

    def _report_move(self, rank: int, meta: SimpleCPUOffloadWorkerMetadata, job: CopyJob) -> None:
        if job.is_store:
            counts = meta.failed_moves_down if job.failed else meta.completed_moves_down
            self.marks.hit("move down failed" if job.failed else "move down")
        else:
            counts = meta.failed_moves_up if job.failed else meta.completed_moves_up
            self.marks.hit("move up failed" if job.failed else "move up")
            if job.failed and job.bad_source:
                meta.bad_disk_blocks.add(job.pairs[job.done_pairs][0])
                self.disks[rank].page(job.pairs[job.done_pairs][0]).spoil()
        counts[job.event] = 1
