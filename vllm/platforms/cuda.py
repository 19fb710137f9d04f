"""NVIDIA GPUs. Layer: L6, imports only L0; torch is loaded when a device fact is asked for.

Owns: facts about CUDA devices. Must not know: workers, models, caches. Nothing here opens a device except the
functions that say so.
"""

from __future__ import annotations

import importlib
from typing import Any, ClassVar

from vllm.platforms.interface import Platform, PlatformEnum


def _torch_cuda() -> Any:  # the torch.cuda module; loaded late so that choosing a platform stays cheap
    return importlib.import_module("torch").cuda


class CudaPlatform(Platform):
    """NVIDIA GPUs through torch."""

    _enum: ClassVar[PlatformEnum] = PlatformEnum.CUDA
    device_name: ClassVar[str] = "cuda"
    device_type: ClassVar[str] = "cuda"
    dist_backend: ClassVar[str] = "nccl"
    worker_cls: ClassVar[str] = "vllm.v1.worker.gpu_worker.Worker"
    default_block_size: ClassVar[int] = 16
    hybrid_block_alignment: ClassVar[int] = 128
    supported_dtype_names: ClassVar[tuple[str, ...]] = ("bfloat16", "float16", "float32")

    @classmethod
    def get_device_name(cls, device_id: int = 0) -> str:
        """The product name; opens the driver."""
        return str(_torch_cuda().get_device_name(device_id))

    @classmethod
    def get_device_total_memory(cls, device_id: int = 0) -> int:
        """Bytes of device memory; opens the driver."""
        return int(_torch_cuda().get_device_properties(device_id).total_memory)

    @classmethod
    def get_device_capability(cls, device_id: int = 0) -> tuple[int, int]:
        """Compute capability (major, minor); opens the driver."""
        major, minor = _torch_cuda().get_device_capability(device_id)
        return int(major), int(minor)

    @classmethod
    def get_device_count(cls) -> int:
        """Visible GPUs."""
        return int(_torch_cuda().device_count())

    @classmethod
    def check_replicas(cls, num_replicas: int, ranks_each: int) -> None:
        """Each rank needs a GPU of its own. Does not open the driver where NVML counts the devices."""
        devices = cls.get_device_count()
        if num_replicas * ranks_each > devices:
            raise ValueError(
                f"data_parallel_size={num_replicas}, tensor_parallel_size={ranks_each}: each rank of each replica needs a "
                f"GPU of its own, and this process sees {devices}"
            )

    @classmethod
    def is_pin_memory_available(cls) -> bool:
        """Pinned host memory is what asynchronous copies need."""
        return True
