"""How many blocks the ranks agree on.

Owns the one exchange between ranks at start-up; the arithmetic is in `capacity`. Layer L6.
"""

from __future__ import annotations

import torch
import torch.distributed as dist

from vllm.v1.simple_kv_offload.capacity import gpu_total_bytes


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


__all__ = ["dist", "gpu_total_bytes", "sync_num_offload_blocks_across_workers"]
