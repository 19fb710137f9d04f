"""Pools and groups described for people: sizes, counts and what a group is for. Layer: L3.

Reads counters, scans nothing and changes nothing. Must not know requests, tiers below the device or who asks.
"""

from __future__ import annotations

from vllm.v1.core.block_pool import BlockPool
from vllm.v1.kv_cache_interface import (
    KVCacheConfig,
    KVCacheGroupSpec,
    UniformTypeKVCacheSpecs,
    get_kv_cache_spec_kind,
    get_kv_cache_spec_sliding_window,
)
from vllm.v1.kv_cache_report import GroupReport, PoolReport
from vllm.v1.metrics.cache_hit_source import CacheHitSource

USE_CACHE = "cache"
USE_SCRATCH = "scratch"


def group_bytes_per_block(group: KVCacheGroupSpec) -> int:
    """Bytes that one block of this group occupies over all its layers, on one rank."""
    if group.bytes_per_block is not None:
        return group.bytes_per_block
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


def device_block_bytes(kv_cache_config: KVCacheConfig, world_size: int) -> int:
    """Bytes of one device block on all ranks together."""
    return gpu_total_bytes(kv_cache_config) // max(1, kv_cache_config.num_blocks) * world_size


def host_block_bytes(kv_cache_config: KVCacheConfig, world_size: int) -> int:
    """Bytes of one block of the host-resident groups on all ranks together; 0 without such groups."""
    groups = [group for group in kv_cache_config.kv_cache_groups if group.host_resident]
    return max((group_bytes_per_block(group) for group in groups), default=0) * world_size


def describe_pool(pool: BlockPool, tier: CacheHitSource, block_bytes: int) -> PoolReport:
    """The pool's counts now; O(1)."""
    total, free = pool.num_gpu_blocks - 1, pool.get_num_free_blocks()
    placer = pool.placer
    return PoolReport(
        tier=tier,
        medium=pool.medium,
        blocks_total=total,
        blocks_free=free,
        blocks_held=total - free,
        blocks_cached=pool.index.num_blocks,
        entries_cached=len(pool.cached_block_hash_to_block),
        blocks_evicted=pool.num_evicted,
        block_bytes=block_bytes,
        entries_protected=0 if placer is None else placer.num_protected,
        entries_protected_max=0 if placer is None else placer.limit,
        protections_refused=0 if placer is None else placer.num_refused,
    )


def describe_groups(kv_cache_config: KVCacheConfig, world_size: int) -> tuple[GroupReport, ...]:
    """Every group, scratch ones too; O(groups)."""
    return tuple(
        GroupReport(
            group=index,
            kind=str(get_kv_cache_spec_kind(group.kv_cache_spec).value),
            spec=type(group.kv_cache_spec).__name__,
            block_size=group.kv_cache_spec.block_size,
            use=USE_CACHE if group.kv_cache_spec.prefix_cacheable else USE_SCRATCH,
            sliding_window=get_kv_cache_spec_sliding_window(group.kv_cache_spec),
            num_layers=len(group.layer_names),
            num_sharing_layers=group.num_sharing_layers,
            block_bytes=group_bytes_per_block(group) * world_size,
        )
        for index, group in enumerate(kv_cache_config.kv_cache_groups)
    )
