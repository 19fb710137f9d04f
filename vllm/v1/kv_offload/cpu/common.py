"""Where a block lies in host memory. Layer L2."""

from __future__ import annotations

from vllm.v1.kv_offload.base import BlockIDsLoadStoreSpec, Medium


class CPULoadStoreSpec(BlockIDsLoadStoreSpec):
    """Chunks of host memory, by number."""

    @staticmethod
    def medium() -> str:
        return Medium.CPU
