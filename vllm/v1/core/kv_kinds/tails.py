"""Which blocks the ends of possible hits need: arithmetic that several kinds share. Layer: L3."""

from __future__ import annotations

from collections.abc import Sequence
from math import lcm

from vllm.utils.math_utils import round_down
from vllm.v1.kv_cache_interface import KVCacheSpec


def effective_block_size(kv_cache_spec: KVCacheSpec, dcp_world_size: int) -> int:
    """Tokens per block over all ranks of decode context parallelism."""
    return kv_cache_spec.block_size * (dcp_world_size if kv_cache_spec.dcp_sharded else 1)


def partial_boundaries(boundaries: Sequence[int], hash_block_size: int, block_size: int) -> list[int]:
    """The ends of hash units at or before the boundaries that lie inside a block, ascending, each once."""
    ends = {round_down(boundary, hash_block_size) for boundary in boundaries}
    return sorted(end for end in ends if end > 0 and end % block_size)


def tail_mask(
    blocks: range,
    block_size: int,
    alignment_tokens: int,
    before: int,
    after: int,
    retention: tuple[int | None, Sequence[int], int | None],
) -> list[bool] | None:
    """Which of the blocks lie among the `before` blocks before, or the `after` blocks after, an end of a hit.

    `retention`: (interval, boundaries in tokens, further end in blocks). Without an interval every aligned end counts;
    None, meaning all blocks, where that leaves nothing out.
    """
    interval, boundaries, final_end = retention
    step = lcm(alignment_tokens, block_size) // block_size
    if interval is None and before + after >= step:
        return None
    ends = {round_down(boundary, alignment_tokens) // block_size for boundary in boundaries}
    if interval != 0:
        every = step if interval is None else max(1, round_down(interval, alignment_tokens) // block_size)
        first = max(0, blocks.start - after) // every * every
        ends.update(range(first, blocks.stop + before + every, every))
    if final_end is not None:
        ends.add(final_end)
    mask = [False] * len(blocks)
    for end in ends:
        if end <= 0:
            continue
        for i in range(max(blocks.start, end - before), min(blocks.stop, end + after)):
            mask[i - blocks.start] = True
    return mask
