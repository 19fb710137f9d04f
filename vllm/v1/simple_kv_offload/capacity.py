"""Bytes ⇄ blocks of a tier, as pure arithmetic.

Owns how a byte budget becomes a number of blocks. It must not talk to other ranks. Layer L4.
"""

from __future__ import annotations

from vllm.v1.kv_cache_interface import KVCacheConfig, KVCacheGroupSpec, UniformTypeKVCacheSpecs


def group_bytes_per_block(group: KVCacheGroupSpec) -> int:
    """Bytes that one block of this group occupies over all its layers."""
    spec = group.kv_cache_spec
    if isinstance(spec, UniformTypeKVCacheSpecs):
        return sum(spec.kv_cache_specs[name].page_size_bytes for name in group.layer_names)
    return spec.page_size_bytes * len(group.layer_names)


def gpu_total_bytes(kv_cache_config: KVCacheConfig) -> int:
    """Bytes of this rank's device KV cache.

    All device groups alias one allocation, whose size every tensor repeats; with tensors in
    allocations of their own, or with no tensors at all, the widest group decides.
    """
    device = [tensor.size for tensor in kv_cache_config.kv_cache_tensors if not tensor.host_resident]
    groups = [
        group_bytes_per_block(group) * kv_cache_config.num_blocks
        for group in kv_cache_config.kv_cache_groups
        if not group.host_resident
    ]
    return max([*device, *groups], default=0)


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
