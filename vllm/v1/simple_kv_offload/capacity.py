"""Bytes ⇄ blocks of a tier, as pure arithmetic.

Owns how a byte budget becomes a number of blocks. It must not talk to other ranks. Layer L4.
"""

from __future__ import annotations

from vllm.v1.core.kv_cache_view import gpu_total_bytes, group_bytes_per_block

__all__ = ["blocks_for_bytes", "choose_num_blocks", "gpu_total_bytes", "group_bytes_per_block"]


def blocks_for_bytes(capacity_bytes: int, num_gpu_blocks: int, total_gpu_bytes: int) -> int:
    """Blocks that fit, at least 1; ``ValueError`` for no capacity or an empty device cache."""
    if capacity_bytes <= 0:
        raise ValueError(f"the offload capacity must be positive, got {capacity_bytes} bytes")
    if total_gpu_bytes <= 0:
        raise ValueError(f"the device KV cache has {total_gpu_bytes} bytes; there is nothing to offload")
    return max(1, num_gpu_blocks * capacity_bytes // total_gpu_bytes)


def choose_num_blocks(capacity_blocks: int, configured: int | None, aligned: int | None = None) -> int:
    """The configured count (``ValueError`` above the capacity), else what the ranks agreed on, else the capacity."""
    if configured is not None:
        if configured > capacity_blocks:
            raise ValueError(
                f"num_cpu_blocks={configured} exceeds the capacity of this rank, {capacity_blocks} blocks"
            )
        return configured
    return capacity_blocks if aligned is None else aligned
