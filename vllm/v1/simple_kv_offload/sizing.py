"""How many blocks a budget makes, and the ranks agree on.

Owns the one exchange between ranks at start-up, and which sizes of an engine count; the arithmetic is in `capacity`.
Layer L6.
"""

from __future__ import annotations

import torch
import torch.distributed as dist

from vllm.config import VllmConfig
from vllm.logger import init_logger
from vllm.utils.math_utils import cdiv
from vllm.v1.core.kv_cache_view import device_block_bytes
from vllm.v1.kv_cache_interface import KVCacheConfig
from vllm.v1.simple_kv_offload.capacity import (
    DISK_BLOCKS_MAX,
    SMALL_RECORDS_BYTES,
    default_disk_bytes,
    fit_blocks,
    gpu_total_bytes,
    record_bytes,
)
from vllm.v1.simple_kv_offload.copy_backends.shared_format import HEAD_BYTES, PAGE, SegmentShape
from vllm.v1.simple_kv_offload.copy_backends.shared_host import keys_per_slot
from vllm.v1.simple_kv_offload.options import OffloadOptions
from vllm.v1.simple_kv_offload.rank_parts import count_parts, slot_widths

logger = init_logger(__name__)

VIEW_BYTES = 768
"""What one engine keeps of a slot of a shared pool, beside the pool's own record."""


def sync_num_offload_blocks_across_workers(num_blocks: int) -> int:
    """The minimum over all ranks; ``num_blocks`` itself in a single process.

    Ranks may hold different numbers of layers, but a block id must mean a slot on every rank.
    """
    if not (dist.is_available() and dist.is_initialized()) or dist.get_world_size() <= 1:
        return num_blocks
    # Every process of the world takes part through a group that works on host memory.
    group = dist.new_group(backend="gloo")
    value = torch.tensor([num_blocks], dtype=torch.int64)
    dist.all_reduce(value, op=dist.ReduceOp.MIN, group=group)
    dist.destroy_process_group(group)
    return int(value.item())


def cpu_bytes_for_copies(
    vllm_config: VllmConfig, kv_cache_config: KVCacheConfig, options: OffloadOptions
) -> int:
    """Bytes per rank of a host tier's blocks: less than the budget where the blocks are so small that their records count.

    The budget itself for a number of blocks that the user has chosen.
    """
    parallel, world_size = vllm_config.parallel_config, vllm_config.parallel_config.world_size
    if options.num_cpu_blocks is not None or options.is_disk:
        return options.cpu_bytes
    parts, fixed, record = world_size, SMALL_RECORDS_BYTES, 0
    if options.shared_pool is None:
        events = vllm_config.kv_events_config
        groups = kv_cache_config.prefix_cacheable_groups
        tokens = max((group.kv_cache_spec.block_size for group in groups), default=0)
        record = record_bytes(tokens, has_events=events is not None and events.enable_kv_cache_events)
    else:  # with or without events, engines must come to the same size
        dcp_size = parallel.decode_context_parallel_size
        parts = count_parts(kv_cache_config, parallel.tensor_parallel_size, dcp_size)
        width = max(slot_widths(kv_cache_config, parallel.tensor_parallel_size, dcp_size))
        table = SegmentShape(b"", 1, keys_per_slot(vllm_config, kv_cache_config), (), max_width=width)
        num_regions = sum(len(group.layer_names) for group in kv_cache_config.kv_cache_groups)
        fixed, record = HEAD_BYTES + PAGE * (1 + num_regions), VIEW_BYTES + table.record_bytes
    slot_bytes = device_block_bytes(kv_cache_config, parts)
    if slot_bytes <= 0:
        return options.cpu_bytes
    num_slots = fit_blocks(options.cpu_bytes * world_size, slot_bytes, record, fixed)
    return min(options.cpu_bytes, max(1, cdiv(num_slots * slot_bytes, world_size)))


def disk_bytes_for_copies(kv_cache_config: KVCacheConfig, options: OffloadOptions) -> int:
    """Bytes per rank of a disk: what the user has chosen, else no more than so many blocks take."""
    if not options.has_default_disk_bytes or not (options.is_disk or options.disk_tier):
        return options.disk_capacity_bytes
    num_bytes = default_disk_bytes(
        options.disk_capacity_bytes, kv_cache_config.num_blocks, gpu_total_bytes(kv_cache_config)
    )
    if num_bytes < options.disk_capacity_bytes:
        logger.info_once(
            "KV offload: blocks are so small that the disk is %.2f GiB per rank instead of %.0f: %d blocks of which records "
            "are kept in memory. disk_capacity_bytes chooses another size.",
            num_bytes / 1024**3,
            options.disk_capacity_bytes / 1024**3,
            DISK_BLOCKS_MAX,
        )
    return num_bytes


__all__ = [
    "cpu_bytes_for_copies",
    "disk_bytes_for_copies",
    "dist",
    "gpu_total_bytes",
    "sync_num_offload_blocks_across_workers",
]
