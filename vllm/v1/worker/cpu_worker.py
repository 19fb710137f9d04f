"""The worker on the host processor. Layer: L6.

Owns: how much host memory the KV cache takes. Must not know: steps, pages, models.
"""

from __future__ import annotations

import torch

from vllm.config import VllmConfig
from vllm.distributed.parallel_state import init_distributed
from vllm.logger import init_logger
from vllm.platforms.cpu import CpuPlatform
from vllm.utils.torch_utils import set_random_seed
from vllm.v1.worker.cpu_model_runner import CPUModelRunner
from vllm.v1.worker.model_worker import ModelWorker
from vllm.v1.worker.worker_base import refuse_unsupported

logger = init_logger(__name__)

DEFAULT_KV_CACHE_BYTES = 4 * 2**30


def kv_cache_bytes(chosen: int | None, available: int, num_ranks: int = 1) -> int:
    """Bytes for a rank's KV cache: what was chosen, else 4 GiB, but of all ranks never more than half of what is free."""
    if chosen is None:
        return min(DEFAULT_KV_CACHE_BYTES, available // 2 // num_ranks)
    if chosen * num_ranks > available:
        logger.warning(
            "The KV cache may grow to %.2f GiB, but only %.2f GiB of memory are free",
            chosen * num_ranks / 2**30,
            available / 2**30,
        )
    return chosen


class CPUWorker(ModelWorker):
    """One model and its KV cache in host memory."""

    model_runner: CPUModelRunner

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
        self.device = torch.device("cpu")
        self.model_runner = CPUModelRunner(vllm_config, self.device)

    def init_device(self) -> None:
        """Seed the generators and, for fp32, make results independent of the batch; keep what steps allocate.

        With several ranks, meet the others.
        """
        assert self.vllm_config.model_config is not None
        CpuPlatform.keep_freed_memory()
        if self.vllm_config.model_config.dtype == torch.float32:
            CpuPlatform.fix_order_of_sums()
        set_random_seed(self.vllm_config.model_config.seed)
        init_distributed(
            self.rank,
            self.vllm_config.parallel_config.world_size,
            self.local_rank,
            self.distributed_init_method,
            CpuPlatform.dist_backend,
        )
        logger.info("CPU worker: %d threads", torch.get_num_threads())

    def determine_available_memory(self) -> int:
        """Bytes for this rank's KV cache: `kv_cache_memory_bytes`, or 4 GiB; all ranks get half of the free memory at most."""
        chosen = self.vllm_config.cache_config.kv_cache_memory_bytes
        parallel = self.vllm_config.parallel_config
        num_ranks = parallel.world_size * parallel.replicas_on_node
        return kv_cache_bytes(chosen, CpuPlatform.get_available_memory(), num_ranks)

    def check_sleep(self, level: int = 1) -> None:
        if level not in (1, 2):
            raise ValueError(f"sleep level must be 1 or 2, got {level}")
        if level == 2:
            raise ValueError(
                "sleep level 2 is not supported on the CPU: weights cannot be dropped and read again"
            )

    def sleep(self, level: int = 1) -> None:
        """Give the memory of the KV cache back. Weights stay: host memory is where they would be parked."""
        self.check_sleep(level)
        self.model_runner.drop_kv_cache()
        CpuPlatform.release_freed_memory()

    def wake_up(self, tags: list[str] | None = None) -> None:
        """Use the KV cache again; its pages fill up as they are written."""
        if tags is None or "kv_cache" in tags:
            self.model_runner.restore_kv_cache()
