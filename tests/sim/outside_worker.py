"""Workers of a spec from outside, on every rank: the real mover of jobs over lanes of the simulator."""

from __future__ import annotations

import random
from collections.abc import Collection
from dataclasses import dataclass

from tests.sim.clock import SimClock
from tests.sim.copy_worker import FaultDraw
from tests.sim.device import Memory
from tests.sim.failure import require
from tests.sim.marks import Marks
from tests.sim.multi_worker import MultiWorker
from tests.sim.outside import ShelfPlaces
from tests.sim.params import SimParams
from tests.sim.worker import SimWorker
from vllm.distributed.kv_transfer.kv_connector.v1.offloading.common import (
    OffloadingConnectorMetadata,
    OffloadingWorkerMetadata,
)
from vllm.distributed.kv_transfer.kv_connector.v1.offloading.worker import JobMover
from vllm.v1.core.sched.output import SchedulerOutput
from vllm.v1.kv_offload.base import GPULoadStoreSpec, LoadStoreSpec, OffloadingWorker, TransferResult
from vllm.v1.outputs import KVConnectorOutput
from vllm.v1.simple_kv_offload.copy_backends.base import CopyResult, EventsList
from vllm.v1.simple_kv_offload.metadata import SimpleCPUOffloadMetadata, SimpleCPUOffloadWorkerMetadata


@dataclass
class DeviceMark:
    """A point that the device reaches some time after the step, or an error on the way."""

    owner: OutsideWorker
    is_broken: bool

    def query(self) -> bool:
        if self.owner.rng.random() < 0.5:
            return False
        self.synchronize()
        return True

    def synchronize(self) -> None:
        if self.is_broken:
            raise RuntimeError("the device has failed")


class OwnersClock:
    """The clock of the engine that the workers belong to, which is built after them."""

    def __init__(self, owner: OutsideWorker) -> None:
        self._owner = owner

    def monotonic(self) -> float:
        return self._owner.clock.monotonic()

    def time(self) -> float:
        return self._owner.clock.time()


@dataclass
class OpenCopy:
    """An order that a rank was given, whose end it has not told: of an event, for these requests if it is a load."""

    event: int
    req_ids: list[str]
    results: EventsList

    @property
    def result(self) -> CopyResult:
        """How it went."""
        ((_, result),) = self.results
        assert isinstance(result, CopyResult)
        return result


class ShelfWorker(OffloadingWorker):
    """One rank's half: every job becomes one of its lanes."""

    def __init__(self, owner: OutsideWorker, rank: int) -> None:
        self._owner = owner
        self._lanes = owner.lanes[rank]

    def submit_store(self, job_id: int, src: GPULoadStoreSpec, dst: LoadStoreSpec) -> bool:
        return self._submit(job_id, True, src, dst)

    def submit_load(
        self, job_id: int, src: LoadStoreSpec, dst: GPULoadStoreSpec, expedited: bool = False
    ) -> bool:
        return self._submit(job_id, False, dst, src)

    def _submit(self, job_id: int, is_store: bool, blocks: GPULoadStoreSpec, places: LoadStoreSpec) -> bool:
        assert isinstance(places, ShelfPlaces)
        owner = self._owner
        if owner.fault("job refused", owner.rng):
            owner.marks.hit("job refused")
            if owner.rng.random() < 0.5:
                raise RuntimeError("the job was drawn to be refused")
            return False
        sources, targets = (blocks, places) if is_store else (places, blocks)
        pairs = list(zip(sources.block_ids, targets.block_ids, strict=True))
        job = owner._job(job_id, is_store, pairs, [], owner.rng)
        if owner.is_impatient and not is_store:
            job.stalled |= owner.fault("stall", owner.rng)
        self._lanes.submit(job)
        return True

    def get_finished(self) -> list[TransferResult]:
        owner, lanes = self._owner, self._lanes
        told = [job for job in lanes.unreported if not owner.fault("report late", owner.rng)]
        lanes.unreported = [job for job in lanes.unreported if job not in told]
        for job in told:
            if job.failed and job.bad_source:
                lanes.host.page(job.pairs[job.done_pairs][0]).spoil()
        return [TransferResult(job.event, not job.failed, len(job.pairs), 0.5) for job in told]

    def wait(self, job_ids: Collection[int]) -> None:
        self._lanes.finish_all()


class OutsideWorker(SimWorker):
    """All ranks; memory of places is that of the host tier in other worlds."""

    def __init__(self, params: SimParams, marks: Marks, fault: FaultDraw) -> None:
        super().__init__(params, marks, fault)
        self.rng = random.Random(0)
        """Of the action under way."""
        self.clock = SimClock()
        assert params.outside is not None
        clock, limit = OwnersClock(self), params.outside.deadline_s
        self.is_impatient = limit < 100
        self._hangs = params.outside.hangs
        self.movers = [JobMover(ShelfWorker(self, rank), clock, limit) for rank in range(params.ranks)]
        self._loads: list[list[OpenCopy]] = [[] for _ in self.movers]
        self._stores: list[list[OpenCopy]] = [[] for _ in self.movers]

    @property
    def places(self) -> list[Memory]:
        """Memory of the manager's places, by rank."""
        return self.hosts

    def tables(self) -> dict[str, object]:
        """Empty at rest."""
        names = ("_loads", "_stores", "_waiting", "_open", "_given_up", "_missing", "_failed")
        return {
            f"{name} of rank {rank}": vars(mover)[name]
            for rank, mover in enumerate(self.movers)
            for name in names
        }

    @property
    def is_stuck(self) -> bool:
        return self.is_impatient and any(job.stalled for lanes in self.lanes for job in lanes.running)

    @property
    def has_late_news(self) -> bool:
        """A job that was given up has ended: the engine hears of it with its next step, whenever that is."""
        return any(
            mover.has_given_up_any and lanes.unreported
            for mover, lanes in zip(self.movers, self.lanes, strict=True)
        )

    @property
    def hangs(self) -> bool:
        return self._hangs

    @property
    def is_waited_for(self) -> bool:
        # What was given up is nobody's hope.
        return any(self._loads) or any(self._stores) or any(lanes.unreported for lanes in self.lanes)

    def finish_copies(self, *, are_requests_there: bool) -> None:
        if self.hangs and are_requests_there:
            self.clock.advance(5.0)
        for lanes in self.lanes:
            lanes.finish_all(but_stalled=self.hangs and are_requests_there)

    def device_targets(self) -> dict[int, str]:
        """Of all ranks: one may have given a load up that another one has ended."""
        targets: dict[int, str] = {}
        for lanes in self.lanes:
            for job in lanes.running:
                for _, target in () if job.is_store else job.pairs:
                    writer = targets.setdefault(target, f"load {job.event}")
                    require(writer == f"load {job.event}", "I3", f"two loads write device block {target}")
        return targets

    def copying(self) -> bool:
        return super().copying() or any(self._loads) or any(self._stores)

    # --- orders ---------------------------------------------------------------------------------------------------

    def _order_moves(
        self, rank: int, meta: SimpleCPUOffloadMetadata, never_started: bool, rng: random.Random
    ) -> None:
        """There are none; but the step's jobs are known from here on."""
        self.rng = rng
        assert isinstance(meta, OffloadingConnectorMetadata)
        self.movers[rank].bind(meta)

    def _order_load(
        self, rank: int, meta: SimpleCPUOffloadMetadata, never_started: bool, rng: random.Random
    ) -> None:
        if never_started:
            self._failed_loads[rank] |= set(meta.load_event_to_reqs[meta.load_event])
            return
        for req_ids, part in meta.loads_by_request():
            if req_ids:
                copy = OpenCopy(meta.load_event, list(req_ids), [])
                self._loads[rank].append(copy)
                sources, targets = meta.load_cpu_blocks[part], meta.load_gpu_blocks[part]
                self.movers[rank].launch_copy(sources, targets, False, meta.load_event, copy.results)

    def _order_store(self, rank: int, meta: SimpleCPUOffloadMetadata, rng: random.Random) -> None:
        copy = OpenCopy(meta.store_event, [], [])
        self._stores[rank].append(copy)
        mark = None
        if rng.random() < 0.5:
            mark = DeviceMark(self, is_broken=self.fault("store fails", rng) and rng.random() < 0.3)
        self.movers[rank].launch_copy(
            meta.store_gpu_blocks, meta.store_cpu_blocks, True, meta.store_event, copy.results, mark
        )

    # --- reports --------------------------------------------------------------------------------------------------

    def reports(self, rng: random.Random, output: SchedulerOutput) -> list[KVConnectorOutput | None]:
        self.rng = rng
        return [self._report_of(rank) for rank in range(len(self.movers))]

    def _report_of(self, rank: int) -> KVConnectorOutput | None:
        mover = self.movers[rank]
        mover.check_health()
        failed, self._failed_loads[rank] = self._failed_loads[rank], set()
        meta, self._lost[rank] = self._lost[rank], SimpleCPUOffloadWorkerMetadata()
        received = set(failed)
        for copy in _ended(self._loads[rank]):
            received.update(copy.req_ids)
            if copy.result.error is not None:
                failed.update(copy.req_ids)
                self.marks.hit("failed load")
        for copy in _ended(self._stores[rank]):
            counts = meta.completed_store_events if copy.result.error is None else meta.failed_store_events
            counts[copy.event] = 1
            if copy.result.error is not None:
                self.marks.hit("failed store")
        jobs = mover.take_report()
        if jobs is not None and (jobs.given_up_loads or jobs.given_up_stores):
            self.marks.hit("load given up" if jobs.given_up_loads else "store given up")
        if jobs is not None and jobs.ended_late:
            self.marks.hit("job ends that was given up")
        if jobs is None and not failed and not received and meta == SimpleCPUOffloadWorkerMetadata():
            return None
        report = (jobs or OffloadingWorkerMetadata()).with_orders(meta)
        return KVConnectorOutput(
            finished_recving=received or None, failed_recving=failed, kv_connector_worker_meta=report
        )


def worker_class(params: SimParams) -> type[SimWorker]:
    """The workers that this world's connectors need."""
    if params.outside is not None:
        return OutsideWorker
    return MultiWorker if params.second_host_blocks else SimWorker


def _ended(copies: list[OpenCopy]) -> list[OpenCopy]:
    """Take out those that are over."""
    over = [copy for copy in copies if copy.result.query()]
    copies[:] = [copy for copy in copies if copy not in over]
    return over


__all__ = ["OutsideWorker", "worker_class"]
