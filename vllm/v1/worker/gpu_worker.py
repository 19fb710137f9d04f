"""The worker on an NVIDIA GPU. Layer: L6.

Owns: taking the device, and how much of its memory the KV cache gets. Must not know: steps, pages, models.
"""

from __future__ import annotations

import torch

from vllm.config import VllmConfig
from vllm.distributed.parallel_state import init_distributed
from vllm.logger import init_logger
from vllm.platforms.cuda import CudaPlatform
from vllm.utils.torch_utils import set_random_seed
from vllm.v1.worker.gpu_model_runner import GPUModelRunner
from vllm.v1.worker.model_worker import ModelWorker
from vllm.v1.worker.worker_base import refuse_unsupported

logger = init_logger(__name__)


def bytes_left_for_cache(total: int, share: float, peak: int, foreign: int) -> int:
    """Bytes of a device that remain for the KV cache (0 if none).

    `total`: the device's memory; `share`: the part the engine may use; `peak`: most bytes torch held during a full
    step, weights included; `foreign`: bytes taken by others and by libraries outside of torch.
    """
    return max(0, int(total * share) - peak - foreign)


def check_start_memory(total: int, free: int, share: float) -> None:
    """`ValueError` unless the engine's share of the device is free."""
    if free < total * share:
        raise ValueError(
            f"only {free / 2**30:.2f} of {total / 2**30:.2f} GiB are free on the device, less than "
            f"gpu_memory_utilization={share} asks for; lower it or end other users of the device"
        )


class Worker(ModelWorker):
    """One model and its KV cache on one GPU."""

    model_runner: GPUModelRunner

    def __init__(
        self,
        vllm_config: VllmConfig,
        local_rank: int,
        rank: int,
        distributed_init_method: str,
        is_driver_worker: bool = False,
    ) -> None:
        super().__init__(vllm_config, local_rank, rank, distributed_init_method, is_driver_worker)
        refuse_unsupported(vllm_config)
        self.device = torch.device("cuda", local_rank)

    def init_device(self) -> None:
        """Take the GPU of this rank. `RuntimeError` if there is none, `ValueError` if too little of it is free."""
        if not torch.cuda.is_available():
            raise RuntimeError(
                "no usable CUDA device; set VLLM_TARGET_DEVICE=cpu to run on the host processor"
            )
        if self.local_rank >= torch.cuda.device_count():
            parallel = self.vllm_config.parallel_config
            raise ValueError(
                f"tensor_parallel_size={parallel.tensor_parallel_size}, data_parallel_size={parallel.replicas_on_node}: "
                f"rank {self.rank} of replica {parallel.data_parallel_index} needs a GPU of its own ({self.device}), and "
                f"this process sees {torch.cuda.device_count()}"
            )
        torch.cuda.set_device(self.device)
        free, total = torch.cuda.mem_get_info(self.device)
        if self.vllm_config.cache_config.kv_cache_memory_bytes is None:
            check_start_memory(total, free, self.vllm_config.cache_config.gpu_memory_utilization)
        assert self.vllm_config.model_config is not None
        set_random_seed(self.vllm_config.model_config.seed)
        init_distributed(
            self.rank,
            self.vllm_config.parallel_config.world_size,
            self.local_rank,
            self.distributed_init_method,
            CudaPlatform.dist_backend,
        )
        self.model_runner = GPUModelRunner(self.vllm_config, self.device)
        logger.info("GPU worker: %s, %.1f GiB free", torch.cuda.get_device_name(self.device), free / 2**30)

    def determine_available_memory(self) -> int:
        """Bytes for the KV cache: `kv_cache_memory_bytes`, or what a full prefill leaves of the engine's share."""
        cache_config = self.vllm_config.cache_config
        if cache_config.kv_cache_memory_bytes is not None:
            return cache_config.kv_cache_memory_bytes
        torch.cuda.empty_cache()
        torch.cuda.reset_peak_memory_stats(self.device)
        self.model_runner.profile_run(self.model_runner.max_num_tokens)
        torch.cuda.synchronize(self.device)
        free, total = torch.cuda.mem_get_info(self.device)
        foreign = total - free - torch.cuda.memory_reserved(self.device)
        peak = torch.cuda.max_memory_allocated(self.device)
        torch.cuda.empty_cache()
        left = bytes_left_for_cache(total, cache_config.gpu_memory_utilization, peak, foreign)
        logger.info(
            "A full step needs %.2f GiB; %.2f GiB are left for the KV cache", peak / 2**30, left / 2**30
        )
        return left

    def compile_or_warm_up_model(self) -> None:
        """One tiny forward, then the graphs."""
        super().compile_or_warm_up_model()
        self.model_runner.capture_graphs()

    def check_sleep(self, level: int = 1) -> None:
        raise ValueError(
            f"{type(self).__name__} cannot sleep: its memory cannot be given back and taken again"
        )

    def check_health(self) -> None:
        """Raise if the device has failed."""
        torch.cuda.synchronize(self.device)
