"""Chunked local attention: a token reads its own chunk, so a prefix needs only the chunk it ends in. Layer: L3."""

from __future__ import annotations

from collections.abc import Sequence

from vllm.utils.math_utils import round_down
from vllm.v1.core.block_hash import BlockHash
from vllm.v1.core.block_pool import BlockPool
from vllm.v1.core.kv_cache_block import KVCacheBlock
from vllm.v1.core.kv_kinds.base import SingleTypeKVCacheManager
from vllm.v1.core.kv_kinds.tails import effective_block_size
from vllm.v1.kv_cache_interface import ChunkedLocalAttentionSpec, KVCacheSpec


def chunk_spec_of(kv_cache_spec: KVCacheSpec) -> ChunkedLocalAttentionSpec:
    """The chunk spec, also from inside a uniform group. TypeError for another kind."""
    spec = kv_cache_spec.kind_spec
    if not isinstance(spec, ChunkedLocalAttentionSpec):
        raise TypeError(
            f"a chunked-local manager needs a ChunkedLocalAttentionSpec, got {type(spec).__name__}"
        )
    return spec


class ChunkedLocalAttentionManager(SingleTypeKVCacheManager):
    """Blocks of finished chunks are null; a hit needs the blocks of the chunk in which it ends."""

    @classmethod
    def admission_cap(
        cls, kv_cache_spec: KVCacheSpec, max_in_flight_tokens: int, max_model_len: int
    ) -> int | None:
        return chunk_spec_of(kv_cache_spec).max_admission_blocks_per_request(
            max_in_flight_tokens, max_model_len
        )

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
        """Blocks before the chunk count as hits, null; from the chunk's start left to right until the first miss.

        Where alignment or the EAGLE drop take the end back into an earlier chunk, that chunk is searched instead.
        """
        block_size = effective_block_size(kv_cache_spec, dcp_world_size)
        chunk = chunk_spec_of(kv_cache_spec).attention_chunk_size
        extra = 1 if drop_eagle_block else 0
        limit = min(max_length // block_size, len(block_hashes))
        while limit > extra:
            chunk_start = round_down((limit - extra) * block_size, chunk)
            first = chunk_start // block_size
            runs = block_pool.find_run(block_hashes[first:limit], kv_cache_group_ids)
            matched = first + len(runs[0])
            length = round_down((matched - extra) * block_size, alignment_tokens)
            if length >= chunk_start and length > 0:
                end = length // block_size
                return tuple(
                    [*[block_pool.null_block] * min(first, end), *run[: max(0, end - first)]] for run in runs
                ), length
            limit = length // block_size + extra  # every end in this chunk is ruled out
        return tuple([] for _ in kv_cache_group_ids), 0

    def get_num_skipped_tokens(self, num_computed_tokens: int) -> int:
        """Everything before the chunk of the next token."""
        return round_down(num_computed_tokens, chunk_spec_of(self.kv_cache_spec).attention_chunk_size)
