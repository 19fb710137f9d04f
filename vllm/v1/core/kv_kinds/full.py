"""Full attention (also latent rows, sinks, reasoning windows): every block of the prefix is needed. Layer: L3.

Must not know other kinds; the alignment that other groups ask for arrives as a number.
"""

from __future__ import annotations

from collections.abc import Sequence

from vllm.utils.checks import check
from vllm.utils.math_utils import cdiv, round_down
from vllm.v1.core.block_hash import BlockHash, BlockHashListWithBlockSize
from vllm.v1.core.block_pool import BlockPool
from vllm.v1.core.kv_cache_block import KVCacheBlock
from vllm.v1.core.kv_kinds.base import CacheableRequest, SingleTypeKVCacheManager
from vllm.v1.core.kv_kinds.tails import effective_block_size, partial_boundaries
from vllm.v1.kv_cache_interface import KVCacheSpec, RSWASpec


class FullAttentionManager(SingleTypeKVCacheManager):
    """Blocks from the first token on; a hit is the longest run from block 0, and any prefix of it is a hit too."""

    supports_fine_grained_hash_lookup = True
    retains_longer_hit = True

    @classmethod
    def find_longest_cache_hit(
        cls,
        block_hashes: Sequence[BlockHash],
        max_length: int,
        kv_cache_group_ids: Sequence[int],
        block_pool: BlockPool,
        kv_cache_spec: KVCacheSpec,
        drop_eagle_block: bool,
        alignment_tokens: int,
        dcp_world_size: int = 1,
        pcp_world_size: int = 1,
    ) -> tuple[tuple[list[KVCacheBlock], ...], int]:
        """From the left until the first miss; where hits end inside blocks, on into the next block."""
        block_size = effective_block_size(kv_cache_spec, dcp_world_size)
        if alignment_tokens < block_size:
            unit = block_pool.hash_block_size
            columns, length = _fine_run(block_hashes, max_length, kv_cache_group_ids, block_pool, block_size)
        else:
            unit = block_size
            columns = block_pool.find_run(block_hashes[: max_length // block_size], kv_cache_group_ids)
            length = len(columns[0]) * block_size
        if drop_eagle_block:
            length = max(0, length - unit)
        length = round_down(length, alignment_tokens)
        for blocks in columns:
            del blocks[cdiv(length, block_size) :]
        return columns, length

    def _cache_partial(self, request: CacheableRequest, num_tokens: int, boundaries: Sequence[int]) -> None:
        """Tokens are never overwritten, so that a prefix ending in the growing tail block stays readable."""
        blocks = self.req_to_blocks[request.request_id]
        hash_size = self.block_pool.hash_block_size
        for position in partial_boundaries(boundaries, hash_size, self.block_size):
            column = position // self.block_size
            if position > num_tokens or column != num_tokens // self.block_size or column >= len(blocks):
                continue
            block = blocks[column]
            if self.block_pool.cache_partial_block(
                request, block, position, self.kv_cache_group_id, self.block_size
            ):
                self._mark_fresh((block,))


def _fine_run(
    block_hashes: Sequence[BlockHash],
    max_length: int,
    group_ids: Sequence[int],
    pool: BlockPool,
    block_size: int,
) -> tuple[tuple[list[KVCacheBlock], ...], int]:
    """The longest run whose last block may be used in part, and its length in tokens.

    `block_hashes` has one hash per hash unit. A cached block, whole or in part, also serves any shorter end.
    """
    length = round_down(max_length, pool.hash_block_size)
    columns: list[list[KVCacheBlock]] = []
    for group_id in group_ids:
        blocks, reach = _fine_run_of_group(block_hashes, length, group_id, pool, block_size)
        columns.append(blocks)
        length = min(length, reach)
    return tuple(columns), length


def _fine_run_of_group(
    block_hashes: Sequence[BlockHash], length: int, group_id: int, pool: BlockPool, block_size: int
) -> tuple[list[KVCacheBlock], int]:
    """One group's run up to the block in which `length` lies, and how far it reaches, perhaps beyond `length`."""
    unit = pool.hash_block_size
    by_block = BlockHashListWithBlockSize(block_hashes, unit, block_size)
    (blocks,) = pool.find_run(by_block[: cdiv(length, block_size)], (group_id,))
    start = len(blocks) * block_size
    if start >= length:
        return blocks, start
    last = min(start + block_size - unit, len(block_hashes) * unit)
    for position in range(last, start, -unit):
        tail = pool.get_cached_block(block_hashes[position // unit - 1], (group_id,))
        if tail is not None:
            blocks += tail
            return blocks, position
    return blocks, start


class SinkFullAttentionManager(FullAttentionManager):
    """Full attention whose first tokens are always visible: the table does not differ."""


class RSWAManager(FullAttentionManager):
    """Prompt kept in full, generated tokens through a window: blocks between prompt and window are freed."""

    def remove_skipped_blocks(
        self, request_id: str, total_computed_tokens: int, num_prompt_tokens: int | None = None
    ) -> None:
        """Free the blocks that lie wholly behind the prompt and before the window; none if the prompt is not known."""
        if num_prompt_tokens is None:
            return
        spec = self.kv_cache_spec.kind_spec
        check(isinstance(spec, RSWASpec), f"RSWAManager got a {type(spec).__name__}")
        assert isinstance(spec, RSWASpec)
        window_start = (total_computed_tokens - spec.rswa_window + 1) // self.block_size
        prompt_end = cdiv(num_prompt_tokens, self.block_size)
        start = max(prompt_end, self._num_skipped.get(request_id, 0))
        self._null_columns(request_id, start, window_start)
