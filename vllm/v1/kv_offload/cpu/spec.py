"""Host memory as an offloading spec: the worked example of the contract, and its reference. Layer L6."""

from __future__ import annotations

from collections.abc import Collection

import torch

from vllm.utils.clock import MonotonicClock
from vllm.v1.kv_offload.base import (
    CanonicalKVCaches,
    GPULoadStoreSpec,
    LoadStoreSpec,
    OffloadingManager,
    OffloadingSpec,
    OffloadingWorker,
    TransferResult,
)
from vllm.v1.kv_offload.config import OffloadingConfig
from vllm.v1.kv_offload.cpu.common import CPULoadStoreSpec
from vllm.v1.kv_offload.cpu.manager import CPUOffloadingManager
from vllm.v1.simple_kv_offload.copy_backend import create_copy_backend
from vllm.v1.simple_kv_offload.copy_backends.base import CopyResult, EventsList
from vllm.v1.simple_kv_offload.host_buffer import aligned_zeros
from vllm.v1.simple_kv_offload.options import DEFAULT_TRANSFER_TIMEOUT_S


class CPUOffloadingSpec(OffloadingSpec):
    """``cpu_bytes_to_use`` bytes of host memory over all ranks."""

    def __init__(self, config: OffloadingConfig) -> None:
        super().__init__(config)
        num_bytes = config.extra_config.get("cpu_bytes_to_use")
        if type(num_bytes) is not int or num_bytes <= 0:
            raise ValueError(f"cpu_bytes_to_use must be a positive whole number, got {num_bytes!r}")
        per_rank = num_bytes // config.parallel.world_size
        self.num_chunks = per_rank // (config.worker_kv_bytes_per_block * config.cache.blocks_per_chunk)
        if self.num_chunks <= 0:
            raise ValueError(f"cpu_bytes_to_use={num_bytes} is less than one block of each rank")

    def get_manager(self) -> OffloadingManager:
        return CPUOffloadingManager(
            num_chunks=self.num_chunks, enable_events=self.config.enable_kv_cache_events
        )

    def get_worker(self, kv_caches: CanonicalKVCaches) -> OffloadingWorker:
        return CPUOffloadingWorker(kv_caches, self.num_chunks)


class CPUOffloadingWorker(OffloadingWorker):
    """Copies between the device's tensors and one host tensor ``[num_chunks, bytes]``, on the copy lanes of this machine."""

    def __init__(self, kv_caches: CanonicalKVCaches, num_chunks: int) -> None:
        tensors: list[torch.Tensor] = list(kv_caches.tensors)
        refs = kv_caches.group_data_refs[0]
        host = aligned_zeros(num_chunks, sum(ref.page_size_bytes for ref in refs))
        self._device_regions, self._host_regions = {}, {}
        for ref in refs:
            (run,) = ref.mapping.runs
            self._device_regions[str(ref.tensor_idx)] = tensors[ref.tensor_idx]
            self._host_regions[str(ref.tensor_idx)] = host[:, run.dst_offset : run.dst_offset + run.num_bytes]
        self._block_bytes = host.shape[1]
        device = tensors[0].device
        self._backend = create_copy_backend(
            "cuda_dma" if device.type == "cuda" else "threaded", MonotonicClock(), DEFAULT_TRANSFER_TIMEOUT_S
        )
        self._backend.init(self._device_regions, self._host_regions, device)
        self._open: dict[int, tuple[EventsList, int]] = {}

    def submit_store(self, job_id: int, src: GPULoadStoreSpec, dst: LoadStoreSpec) -> bool:
        return isinstance(dst, CPULoadStoreSpec) and self._launch(
            job_id, src.block_ids, dst.block_ids, is_store=True
        )

    def submit_load(
        self, job_id: int, src: LoadStoreSpec, dst: GPULoadStoreSpec, expedited: bool = False
    ) -> bool:
        return isinstance(src, CPULoadStoreSpec) and self._launch(
            job_id, src.block_ids, dst.block_ids, is_store=False
        )

    def _launch(self, job_id: int, sources: list[int], targets: list[int], *, is_store: bool) -> bool:
        events: EventsList = []
        self._backend.launch_copy(sources, targets, is_store, job_id, events)
        self._open[job_id] = (events, len(sources) * self._block_bytes)
        return True

    def get_finished(self) -> list[TransferResult]:
        self._backend.check_health()
        ended = []
        for job_id, (events, size) in list(self._open.items()):
            if not events or not events[0][1].query():
                continue
            del self._open[job_id]
            result = events[0][1]
            ok = not isinstance(result, CopyResult) or result.error is None
            seconds = result.seconds if isinstance(result, CopyResult) else None
            ended.append(TransferResult(job_id, ok, size, seconds))
        return ended

    def wait(self, job_ids: Collection[int]) -> None:
        for job_id in job_ids:
            events, _ = self._open.get(job_id, ([], 0))
            for _, result in events:
                while isinstance(result, CopyResult) and not result.synchronize(0.05):
                    self._backend.check_health()

    def shutdown(self) -> None:
        self._backend.shutdown()
        self._open.clear()
