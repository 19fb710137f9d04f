"""The worker half of an offload whose workers come from outside.

Owns the way from orders to jobs, and from the ends of jobs to reports. It must not know where the bytes go. Layer L6.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Sequence

import torch

from vllm.config import VllmConfig
from vllm.distributed.kv_transfer.kv_connector.v1.offloading.common import (
    OffloadingConnectorMetadata,
    OffloadingWorkerMetadata,
    TransferJob,
    TransferStats,
)
from vllm.logger import init_logger
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


class JobMover(CopyBackend):
    """Hands the copies of a step to the worker as jobs; a copy has ended when all its jobs have, well if all did.

    A store whose bytes the device may still be writing waits for the next step.
    """

    def __init__(self, worker: OffloadingWorker) -> None:
        self._worker = worker
        self._loads: deque[tuple[int, TransferJob]] = deque()
        self._stores: dict[int, TransferJob] = {}
        self._waiting: list[tuple[WaitEvent, dict[int, TransferJob], CopyResult]] = []
        self._open: dict[int, tuple[bool, CopyResult]] = {}
        self._missing: dict[CopyResult, int] = {}
        self._failed: set[CopyResult] = set()
        self._completed: list[int] = []
        self._stats = TransferStats()

    def bind(self, metadata: OffloadingConnectorMetadata) -> None:
        """The jobs of the step that begins."""
        self._submit_waiting()
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
            self._waiting.append((wait_event, jobs, result))
        else:
            self._submit(jobs, result, is_store=is_store)

    def _submit_waiting(self) -> None:
        waiting, self._waiting = self._waiting, []
        for event, jobs, result in waiting:
            try:
                event.synchronize()
            except RuntimeError as error:  # of the device: what it was to compute did not come about
                logger.error("KV offload: the device did not get as far as a store's blocks: %s", error)
                jobs = {job_id: TransferJob(job.req_id, None, None) for job_id, job in jobs.items()}
            self._submit(jobs, result, is_store=True)

    def _submit(self, jobs: dict[int, TransferJob], result: CopyResult, *, is_store: bool) -> None:
        for job_id in jobs:
            self._open[job_id] = (is_store, result)
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
        """Hear of what has ended."""
        try:
            told = list(self._worker.get_finished())
        except Exception:  # of a module from outside; what it has not told may be told later
            logger.exception("KV offload: the worker could not say which jobs have ended")
            return
        for result in told:
            try:
                ended = TransferResult(*_plain(result))
            except Exception:  # each is told once: one that says nothing must not take others with it
                logger.exception("KV offload: the worker reports %r", result)
                continue
            self._finish(ended)

    def _finish(self, ended: TransferResult) -> None:
        known = self._open.pop(ended.job_id, None)
        if known is None:
            logger.warning("KV offload: the worker reports job %d, which is not under way", ended.job_id)
            return
        is_store, result = known
        self._completed.append(ended.job_id)
        if ended.success and ended.transfer_size is not None:
            direction = self._stats.store if is_store else self._stats.load
            direction.record(ended.transfer_size, ended.transfer_time or 0.0)
        if not ended.success:
            self._failed.add(result)
        self._missing[result] -= 1
        if not self._missing[result]:
            self._end(result)

    def _end(self, result: CopyResult) -> None:
        del self._missing[result]
        failed = result in self._failed
        self._failed.discard(result)
        result.resolve(CopyError("a job of the offloading worker failed") if failed else None)

    def take_report(self) -> OffloadingWorkerMetadata | None:
        """Jobs that have ended since the last call; None if there are none."""
        if not self._completed:
            return None
        report = OffloadingWorkerMetadata(transfer_stats=self._stats)
        for job_id in self._completed:
            report.mark_completed(job_id)
        self._completed, self._stats = [], TransferStats()
        return report

    def flush(self) -> None:
        """Wait for all jobs; what is not told as ended `FLUSH_TIMEOUT_S` after the wait ends as failed."""
        self._submit_waiting()
        if not self._open:
            return
        try:
            self._worker.wait(tuple(self._open))
        except Exception:  # of a module from outside
            logger.exception("KV offload: the worker could not wait for its jobs")
        end = time.monotonic() + FLUSH_TIMEOUT_S
        self.check_health()
        while self._open and time.monotonic() < end:
            time.sleep(DRAIN_POLL_S)
            self.check_health()
        for job_id in list(self._open):
            logger.error("KV offload: job %d has not ended although it was waited for", job_id)
            self._finish(TransferResult(job_id, success=False))

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
        self._waiting.clear()


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
        self, *, spec: OffloadingSpec, vllm_config: VllmConfig | None, kv_cache_config: KVCacheConfig
    ) -> None:
        super().__init__(vllm_config, kv_cache_config, 0)
        self._spec = spec
        self._config = kv_cache_config
        self._mover: JobMover | None = None

    def register_kv_caches(self, kv_caches: dict[str, LayerCache]) -> None:
        """Show the spec the device's memory, and let it make its worker."""
        self.gpu_kv_caches = device_regions(self._config, kv_caches)
        self.device = next(iter(self.gpu_kv_caches.values())).device
        self._timer = StepTimer(self._clock, self.device)
        num_groups = len(self._config.prefix_cacheable_group_ids)
        self._mover = JobMover(self._spec.get_worker(canonical_caches(self.gpu_kv_caches, num_groups)))
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
        return OffloadingWorkerMetadata(jobs.completed_jobs, jobs.transfer_stats, report=report)

    def drain(self) -> None:
        if self._mover is not None:
            self._mover.flush()
        super().drain()

    def shutdown(self) -> None:
        self._mover = None
        super().shutdown()
