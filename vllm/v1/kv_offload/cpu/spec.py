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
from vllm.v1.simple_kv_offload.copy_backends.base import CopyResult, EventsList, WaitEvent
from vllm.v1.simple_kv_offload.cuda_mem_ops import pin_tensor, unpin_tensor
from vllm.v1.simple_kv_offload.host_buffer import HostBuffer
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
    """Copies between the device's tensors and host memory of ``num_chunks`` blocks, on the copy lanes of this machine."""

    def __init__(self, kv_caches: CanonicalKVCaches, num_chunks: int) -> None:
        tensors: list[torch.Tensor] = list(kv_caches.tensors)
        refs = {str(ref.tensor_idx): ref for ref in kv_caches.group_data_refs[0]}
        device = tensors[0].device
        is_cuda = device.type == "cuda"
        # A tensor of its own for each of the device's: their order in a block is nobody else's business.
        self._host = HostBuffer(
            {name: ref.page_size_bytes for name, ref in refs.items()},
            num_chunks,
            pin_tensor if is_cuda else None,
            unpin_tensor if is_cuda else None,
        )
        self._block_bytes = sum(ref.page_size_bytes for ref in refs.values())
        self._device = device if is_cuda else None
        self._backend = create_copy_backend(
            "cuda_dma" if is_cuda else "threaded", MonotonicClock(), DEFAULT_TRANSFER_TIMEOUT_S
        )
        streams = [torch.cuda.Stream(device) for _ in range(2)] if is_cuda else []
        device_regions = {name: tensors[ref.tensor_idx] for name, ref in refs.items()}
        self._backend.init(device_regions, self._host.regions, device, *streams)
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
        mark: WaitEvent | None = None
        if self._device is not None and not is_store:
            # Forwards that the device was given may still read the blocks' old content.
            event = torch.cuda.Event()
            event.record(torch.cuda.current_stream(self._device))
            mark = event
        if is_store:
            self._host.use(targets)
        self._backend.launch_copy(sources, targets, is_store, job_id, events, mark)
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
        self._host.close()
