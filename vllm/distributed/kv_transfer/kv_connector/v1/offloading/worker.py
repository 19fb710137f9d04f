"""The worker half of an offload whose workers come from outside.

Owns the way from orders to jobs, and from the ends of jobs to reports. It must not know where the bytes go. Layer L6.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass

import torch

from vllm.config import VllmConfig
from vllm.distributed.kv_transfer.kv_connector.v1.offloading.common import (
    OffloadingConnectorMetadata,
    OffloadingWorkerMetadata,
    TransferJob,
)
from vllm.logger import init_logger
from vllm.utils.clock import Clock, MonotonicClock
from vllm.v1.kv_cache_interface import KVCacheConfig
from vllm.v1.kv_connector_types import KVConnectorMetadata
from vllm.v1.kv_offload.base import (
    CanonicalKVCacheRef,
    CanonicalKVCaches,
    CanonicalPageMapping,
    CopyRun,
    GPULoadStoreSpec,
    OffloadingSpec,
    OffloadingWorker,
    TransferResult,
)
from vllm.v1.simple_kv_offload.copy_backends.base import (
    CopyBackend,
    CopyError,
    CopyResult,
    EventsList,
    WaitEvent,
)
from vllm.v1.simple_kv_offload.metadata import SimpleCPUOffloadWorkerMetadata
from vllm.v1.simple_kv_offload.options import DEFAULT_TRANSFER_TIMEOUT_S
from vllm.v1.simple_kv_offload.regions import LayerCache, device_regions
from vllm.v1.simple_kv_offload.timing import StepTimer
from vllm.v1.simple_kv_offload.worker import DRAIN_POLL_S, SimpleCPUOffloadWorker

logger = init_logger(__name__)
FLUSH_TIMEOUT_S = 5.0
"""How long a worker that has waited for its jobs may take to tell that they have ended."""


def canonical_caches(regions: dict[str, torch.Tensor], num_groups: int) -> CanonicalKVCaches:
    """All regions for every group, one behind the other in a block of the lower tier."""
    refs, offset = [], 0
    for index, region in enumerate(regions.values()):
        size = region.shape[1]
        refs.append(CanonicalKVCacheRef(index, size, CanonicalPageMapping((CopyRun(0, offset, size),))))
        offset += size
    return CanonicalKVCaches(tuple(regions.values()), (tuple(refs),) * num_groups)


@dataclass(slots=True)
class _Waiting:
    """A store that the device has not got as far as."""

    event: WaitEvent
    jobs: dict[int, TransferJob]
    result: CopyResult
    since: float


@dataclass(slots=True)
class _OpenJob:
    """A job that was started. ``since``: when a job before it was seen to end last, or it was started (seconds)."""

    is_store: bool
    result: CopyResult
    since: float


class JobMover(CopyBackend):
    """Hands the copies of a step to the worker as jobs; a copy has ended when all its jobs have, well if all did.

    A store is handed over when the device has written its bytes, which is asked for, not waited for. A job whose end is
    not told within ``deadline_s`` is given up: its copy fails, but the job may still copy, so that its blocks and its place
    below stay held until the worker tells its end after all.
    """

    def __init__(
        self,
        worker: OffloadingWorker,
        clock: Clock | None = None,
        deadline_s: float = DEFAULT_TRANSFER_TIMEOUT_S,
    ) -> None:
        self._worker = worker
        self._clock = clock or MonotonicClock()
        self._deadline_s = deadline_s
        self._loads: deque[tuple[int, TransferJob]] = deque()
        self._stores: dict[int, TransferJob] = {}
        self._waiting: deque[_Waiting] = deque()
        self._open: dict[int, _OpenJob] = {}
        self._given_up: dict[int, bool] = {}
        self._missing: dict[CopyResult, int] = {}
        self._failed: set[CopyResult] = set()
        self._report = OffloadingWorkerMetadata()

    @property
    def has_given_up_any(self) -> bool:
        """Whether jobs that were given up may still copy."""
        return bool(self._given_up)

    def bind(self, metadata: OffloadingConnectorMetadata) -> None:
        """The jobs of the step that begins."""
        self._submit_ready()
        self._loads = deque(metadata.load_jobs.items())
        self._stores = dict(metadata.store_jobs)

    def launch_copy(
        self,
        src_blocks: Sequence[int],
        dst_blocks: Sequence[int],
        is_store: bool,
        event_idx: int,
        events_list: EventsList,
        wait_event: WaitEvent | None = None,
    ) -> None:
        result = CopyResult()
        events_list.append((event_idx, result))
        jobs: dict[int, TransferJob] = {}
        if is_store:
            jobs, self._stores = self._stores, jobs
        elif src_blocks:
            jobs = dict([self._loads.popleft()])
        result.begin()
        self._missing[result] = len(jobs)
        if not jobs:
            self._end(result)
        elif is_store and wait_event is not None:
            self._waiting.append(_Waiting(wait_event, jobs, result, self._clock.monotonic()))
        else:
            self._submit(jobs, result, is_store=is_store)

    def _submit_ready(self, *, must_wait: bool = False) -> None:
        """Start the stores that the device has got as far as; with ``must_wait`` all of them, when it has."""
        while self._waiting:
            store = self._waiting[0]
            try:
                if must_wait:
                    store.event.synchronize()
                elif not store.event.query():
                    return
            except RuntimeError as error:  # of the device: what it was to compute did not come about
                logger.error("KV offload: the device did not get as far as a store's blocks: %s", error)
                store.jobs = _undoable(store.jobs)
            self._waiting.popleft()
            self._submit(store.jobs, store.result, is_store=True)

    def _submit(self, jobs: dict[int, TransferJob], result: CopyResult, *, is_store: bool) -> None:
        now = self._clock.monotonic()
        for job_id in jobs:
            self._open[job_id] = _OpenJob(is_store, result, now)
        for job_id, job in jobs.items():
            if not self._start(job_id, job, is_store=is_store):
                self._finish(TransferResult(job_id, success=False))

    def _start(self, job_id: int, job: TransferJob, *, is_store: bool) -> bool:
        source, target = job.src_spec, job.dst_spec
        if source is None or target is None:
            return False
        try:
            if isinstance(source, GPULoadStoreSpec) and is_store:
                return bool(self._worker.submit_store(job_id, source, target))
            if isinstance(target, GPULoadStoreSpec):
                return bool(self._worker.submit_load(job_id, source, target, job.sync))
        except Exception:  # of a module from outside
            logger.exception("KV offload: job %d of request %s could not be started", job_id, job.req_id)
        return False

    def check_health(self) -> None:
        """Hear of what has ended, start what the device has got as far as, give up what is past the deadline."""
        self._submit_ready()
        self._hear()
        self._watch_deadline()

    def _hear(self) -> None:
        try:
            told = list(self._worker.get_finished())
        except Exception:  # of a module from outside; what it has not told may be told later
            logger.exception("KV offload: the worker could not say which jobs have ended")
            return
        first: dict[bool, int] = {}
        for result in told:
            try:
                ended = TransferResult(*_plain(result))
            except Exception:  # each is told once: one that says nothing must not take others with it
                logger.exception("KV offload: the worker reports %r", result)
                continue
            job = self._open.get(ended.job_id)
            if job is not None:
                first[job.is_store] = min(ended.job_id, first.get(job.is_store, ended.job_id))
            self._finish(ended)
        if first:
            # What was started later may have stood behind it.
            now = self._clock.monotonic()
            for job_id, job in self._open.items():
                if job_id > first.get(job.is_store, job_id):
                    job.since = now

    def _watch_deadline(self) -> None:
        limit = self._clock.monotonic() - self._deadline_s
        if self._waiting and self._waiting[0].since < limit:
            store = self._waiting.popleft()
            logger.error("KV offload: the device did not get as far as a store's blocks in time")
            self._submit(_undoable(store.jobs), store.result, is_store=True)
        for job_id in [job_id for job_id, job in self._open.items() if job.since < limit]:
            self._give_up(job_id, f"within {self._deadline_s:g} s")

    def _give_up(self, job_id: int, when: str) -> None:
        job = self._open.pop(job_id)
        logger.error(
            "KV offload: the worker has not told the end of job %d %s; the %s fails, its blocks stay held",
            job_id,
            when,
            "store" if job.is_store else "load",
        )
        self._given_up[job_id] = job.is_store
        given_up = self._report.given_up_stores if job.is_store else self._report.given_up_loads
        given_up[job_id] = 1
        self._failed.add(job.result)
        self._leave(job.result)

    def _finish(self, ended: TransferResult) -> None:
        job_id = ended.job_id
        if self._given_up.pop(job_id, None) is not None:
            logger.warning("KV offload: job %d, which was given up, has ended after all", job_id)
            self._report.ended_late[job_id] = 1
            self._report.mark_completed(job_id)
            return
        job = self._open.pop(job_id, None)
        if job is None:
            logger.warning("KV offload: the worker reports job %d, which is not under way", job_id)
            return
        self._report.mark_completed(job_id)
        if ended.success and ended.transfer_size is not None:
            stats = self._report.transfer_stats
            direction = stats.store if job.is_store else stats.load
            direction.record(ended.transfer_size, ended.transfer_time or 0.0)
        if not ended.success:
            self._failed.add(job.result)
        self._leave(job.result)

    def _leave(self, result: CopyResult) -> None:
        self._missing[result] -= 1
        if not self._missing[result]:
            self._end(result)

    def _end(self, result: CopyResult) -> None:
        del self._missing[result]
        failed = result in self._failed
        self._failed.discard(result)
        result.resolve(CopyError("a job of the offloading worker failed") if failed else None)

    def take_report(self) -> OffloadingWorkerMetadata | None:
        """Jobs that have ended or were given up since the last call; None if there are none."""
        report = self._report
        if not (report.completed_jobs or report.given_up_loads or report.given_up_stores):
            return None
        self._report = OffloadingWorkerMetadata()
        return report

    def flush(self) -> None:
        """Wait for all jobs; what is not told as ended `FLUSH_TIMEOUT_S` after the wait is given up."""
        self._submit_ready(must_wait=True)
        if not self._open:
            return
        try:
            self._worker.wait(tuple(self._open))
        except Exception:  # of a module from outside
            logger.exception("KV offload: the worker could not wait for its jobs")
        end = time.monotonic() + FLUSH_TIMEOUT_S
        self._hear()
        while self._open and time.monotonic() < end:
            time.sleep(DRAIN_POLL_S)
            self._hear()
        for job_id in list(self._open):
            self._give_up(job_id, "although it was waited for")

    def shutdown(self) -> None:
        try:
            self._worker.shutdown()
        except Exception:  # of a module from outside
            logger.exception("KV offload: the worker could not be shut down")
        for result in list(self._missing):
            result.resolve(CopyError("the offloading worker was shut down"))
        self._missing.clear()
        self._failed.clear()
        self._open.clear()
        self._given_up.clear()
        self._waiting.clear()


def _undoable(jobs: dict[int, TransferJob]) -> dict[int, TransferJob]:
    return {job_id: TransferJob(job.req_id, None, None) for job_id, job in jobs.items()}


# Whatever a module from outside has handed over.
def _plain(result: TransferResult) -> tuple[int, bool, int | None, float | None]:
    size, seconds = result.transfer_size, result.transfer_time
    return (
        int(result.job_id),
        bool(result.success),
        None if size is None else int(size),
        None if seconds is None else float(seconds),
    )


class OffloadingConnectorWorker(SimpleCPUOffloadWorker):
    """Runs the jobs of one rank on the spec's worker."""

    def __init__(
        self,
        *,
        spec: OffloadingSpec,
        vllm_config: VllmConfig | None,
        kv_cache_config: KVCacheConfig,
        transfer_timeout_s: float = DEFAULT_TRANSFER_TIMEOUT_S,
        clock: Clock | None = None,
    ) -> None:
        super().__init__(vllm_config, kv_cache_config, 0, transfer_timeout_s=transfer_timeout_s, clock=clock)
        self._spec = spec
        self._config = kv_cache_config
        self._mover: JobMover | None = None

    def register_kv_caches(self, kv_caches: dict[str, LayerCache]) -> None:
        """Show the spec the device's memory, and let it make its worker."""
        self.gpu_kv_caches = device_regions(self._config, kv_caches)
        self.device = next(iter(self.gpu_kv_caches.values())).device
        self._timer = StepTimer(self._clock, self.device)
        num_groups = len(self._config.prefix_cacheable_group_ids)
        worker = self._spec.get_worker(canonical_caches(self.gpu_kv_caches, num_groups))
        self._mover = JobMover(worker, self._clock, self._transfer_timeout_s)
        self._backend = self._mover

    def bind_connector_metadata(self, metadata: KVConnectorMetadata) -> None:
        super().bind_connector_metadata(metadata)
        if self._mover is not None and isinstance(metadata, OffloadingConnectorMetadata):
            self._mover.bind(metadata)

    def build_connector_worker_meta(self) -> SimpleCPUOffloadWorkerMetadata | None:
        report = super().build_connector_worker_meta()
        jobs = None if self._mover is None else self._mover.take_report()
        if report is None and jobs is None:
            return None
        jobs = jobs or OffloadingWorkerMetadata()
        return jobs if report is None else jobs.with_orders(report)

    @property
    def _is_at_work(self) -> bool:
        # What was given up may end after all: somebody has to ask.
        return super()._is_at_work or (self._mover is not None and self._mover.has_given_up_any)

    def drain(self) -> None:
        if self._mover is not None:
            self._mover.flush()
        super().drain()

    def shutdown(self) -> None:
        self._mover = None
        super().shutdown()
