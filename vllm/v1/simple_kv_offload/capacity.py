"""Bytes ⇄ blocks of a tier, as pure arithmetic.

Owns how a byte budget becomes a number of blocks, and what their records take of it. It must not talk to other ranks.
Layer L4.
"""

from __future__ import annotations

from vllm.v1.core.kv_cache_view import gpu_total_bytes, group_bytes_per_block

__all__ = [
    "blocks_for_bytes",
    "choose_num_blocks",
    "default_disk_bytes",
    "fit_blocks",
    "gpu_total_bytes",
    "group_bytes_per_block",
    "record_bytes",
]

RECORD_BYTES = 256
"""What the scheduler keeps of a block in a full tier: its place in the order of eviction, its key, the key's entry."""
TOLD_BYTES, TOLD_TOKEN_BYTES = 384, 40
"""The same of what events told of it, and of each of its tokens: a number of the interpreter and a pointer."""
OVER_BUDGET = 0.02
"""So much more than its budget a tier may take, records included."""
DISK_BLOCKS_MAX = 1_000_000
"""Blocks of a disk whose size nobody has chosen: their records, in memory and in a kept table, are for all of them at once."""
SMALL_RECORDS_BYTES = 1 << 20
"""Records that nobody notices: a budget is not cut for them. A tier has other objects of about this size."""


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


def record_bytes(block_tokens: int, *, has_events: bool) -> int:
    """What the records of one block of so many tokens take at most."""
    return RECORD_BYTES + has_events * (TOLD_BYTES + TOLD_TOKEN_BYTES * block_tokens)


def default_disk_bytes(num_bytes: int, num_gpu_blocks: int, total_gpu_bytes: int) -> int:
    """The part of so many bytes that `DISK_BLOCKS_MAX` blocks take, if that is less."""
    return min(num_bytes, max(1, DISK_BLOCKS_MAX * total_gpu_bytes // max(1, num_gpu_blocks)))


def fit_blocks(num_bytes: int, block_bytes: int, bytes_per_record: int, fixed_bytes: int = 0) -> int:
    """Blocks that fit into the budget such that they and their records exceed it by `OVER_BUDGET` at most.

    ``fixed_bytes``: what comes with them, however many they are.
    """
    fitting = num_bytes // block_bytes
    with_records = (int(num_bytes * (1 + OVER_BUDGET)) - fixed_bytes) // (block_bytes + bytes_per_record)
    return min(fitting, max(with_records, SMALL_RECORDS_BYTES // bytes_per_record))
