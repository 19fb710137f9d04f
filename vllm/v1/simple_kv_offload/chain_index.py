"""The index of two tiers seen as one: what is in the upper tier, else what is in the lower one.

Owns nothing: it answers lookups from the pools below it, which alone hold blocks and keys. It must not know
requests or copies. Layer L4.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

from vllm.v1.core.block_hash import BlockHash, BlockHashWithGroupId, make_block_hash_with_group_id
from vllm.v1.core.block_pool import BlockPool
from vllm.v1.core.kv_cache_block import KVCacheBlock
from vllm.v1.simple_kv_offload.tier import Tier

Found = tuple[tuple[Sequence[KVCacheBlock], ...], int]
Find = Callable[[Sequence[BlockHash], int], Found]


class ChainIndex(BlockPool):
    """A pool for searching only. Blocks that it returns belong to ``upper`` or ``lower`` (`KVCacheBlock.pool`)."""

    def __init__(self, upper: BlockPool, lower: BlockPool) -> None:
        super().__init__(1, enable_caching=True, hash_block_size=upper.hash_block_size)
        self._maps = (upper.cached_block_hash_to_block, lower.cached_block_hash_to_block)

    def _get(self, key: BlockHashWithGroupId) -> KVCacheBlock | None:
        upper, lower = self._maps
        return upper.get_one_block(key) or lower.get_one_block(key)

    def get_cached_block(
        self, block_hash: BlockHash, kv_cache_group_ids: Sequence[int]
    ) -> list[KVCacheBlock] | None:
        """As `BlockPool.get_cached_block`, over both tiers."""
        found: list[KVCacheBlock] = []
        for group_id in kv_cache_group_ids:
            block = self._get(make_block_hash_with_group_id(block_hash, group_id))
            if block is None:
                return None
            found.append(block)
        return found

    def find_run(
        self, block_hashes: Sequence[BlockHash], kv_cache_group_ids: Sequence[int]
    ) -> tuple[list[KVCacheBlock], ...]:
        """As `BlockPool.find_run`, over both tiers."""
        runs: tuple[list[KVCacheBlock], ...] = tuple([] for _ in kv_cache_group_ids)
        for block_hash in block_hashes:
            found = self.get_cached_block(block_hash, kv_cache_group_ids)
            if found is None:
                break
            for run, block in zip(runs, found, strict=True):
                run.append(block)
        return runs


def chain_finder(host: Tier, disk: Tier) -> Find:
    """The search for the longest prefix over both tiers, by the kinds' own rules."""
    coordinator = host.make_coordinator(ChainIndex(host.pool, disk.pool))

    def find(block_hashes: Sequence[BlockHash], max_tokens: int) -> Found:
        blocks, num_tokens, _ = coordinator.find_longest_cache_hit(list(block_hashes), max_tokens)
        return tuple(blocks), num_tokens

    return find
