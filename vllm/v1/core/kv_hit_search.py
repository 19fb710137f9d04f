"""The longest prefix from which every KV cache group can go on. Layer: L3.

Owns the fixed point over kinds; each kind only answers for itself. Must not know requests, and touches nothing.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from vllm.utils.math_utils import cdiv
from vllm.v1.core.block_hash import BlockHash, resolve_block_hashes
from vllm.v1.core.block_pool import BlockPool
from vllm.v1.core.kv_cache_block import KVCacheBlock
from vllm.v1.core.kv_kinds.base import SingleTypeKVCacheManager
from vllm.v1.kv_cache_interface import KVCacheSpec

GroupHits = tuple[list[KVCacheBlock], ...]


@dataclass(frozen=True, slots=True)
class HitGeometry:
    """Sizes that all groups share, in tokens. Hits end on multiples of `alignment_tokens`."""

    hash_block_size: int
    alignment_tokens: int
    dcp_world_size: int = 1
    pcp_world_size: int = 1


@dataclass(frozen=True, slots=True)
class HitBatch:
    """Groups that are searched together, because spec, manager class, pool and EAGLE drop are the same."""

    manager_class: type[SingleTypeKVCacheManager]
    spec: KVCacheSpec
    pool: BlockPool
    drop: bool
    block_size: int
    group_ids: tuple[int, ...]

    def find(
        self, block_hashes: Sequence[BlockHash], max_length: int, geometry: HitGeometry
    ) -> tuple[GroupHits, int]:
        """The batch's own longest hit of at most `max_length` tokens."""
        hashes = resolve_block_hashes(
            block_hashes,
            geometry.hash_block_size,
            self.block_size,
            supports_fine_grained_hash_lookup=self.manager_class.supports_fine_grained_hash_lookup,
            alignment_tokens=geometry.alignment_tokens,
        )
        return self.manager_class.find_longest_cache_hit(
            hashes,
            max_length,
            self.group_ids,
            self.pool,
            self.spec,
            self.drop,
            geometry.alignment_tokens,
            geometry.dcp_world_size,
            geometry.pcp_world_size,
        )

    def drop_unit(self, geometry: HitGeometry) -> int:
        """Tokens that the EAGLE drop gives back: 0 for groups that do not drop."""
        if not self.drop or not self.manager_class.can_give_back_a_block:
            return 0
        fine = self.manager_class.supports_fine_grained_hash_lookup
        return min(self.block_size, geometry.alignment_tokens) if fine else self.block_size


def make_batches(managers: Sequence[SingleTypeKVCacheManager]) -> list[HitBatch]:
    """Batches of the groups that can be hit; kinds that can be trimmed without searching again come first."""
    batches: dict[tuple[object, ...], HitBatch] = {}
    for manager in managers:
        if not manager.caches:
            continue
        key = (type(manager), manager.kv_cache_spec, id(manager.block_pool), manager.use_eagle)
        known = batches.get(key)
        ids = (*known.group_ids, manager.kv_cache_group_id) if known else (manager.kv_cache_group_id,)
        batches[key] = HitBatch(
            type(manager),
            manager.kv_cache_spec,
            manager.block_pool,
            manager.use_eagle,
            manager.block_size,
            ids,
        )
    return sorted(batches.values(), key=lambda batch: not batch.manager_class.retains_longer_hit)


def find_common_hit(
    batches: Sequence[HitBatch], block_hashes: Sequence[BlockHash], max_length: int, geometry: HitGeometry
) -> tuple[dict[int, list[KVCacheBlock]], int, int]:
    """(blocks by group id, hit tokens, tokens some batch could have hit beyond it).

    Starts from `max_length` and lets each batch shorten the candidate until none does. A batch that gives its last
    block back looks one unit past the candidate, so that it does not shorten it again and again.
    """
    candidate = max_length
    longest = 0
    hits: dict[int, tuple[GroupHits, int]] = {}
    num_searched_again = sum(not batch.manager_class.retains_longer_hit for batch in batches)
    while True:
        before = candidate
        for number, batch in enumerate(batches):
            if number in hits and (batch.manager_class.retains_longer_hit or hits[number][1] == candidate):
                continue
            limit = min(candidate + batch.drop_unit(geometry), max_length)
            hits[number] = batch.find(block_hashes, limit, geometry)
            longest = max(longest, hits[number][1])
            candidate = min(candidate, hits[number][1])
            if candidate == 0:
                return {}, 0, longest
        if candidate == before or num_searched_again <= 1:
            break
    found: dict[int, list[KVCacheBlock]] = {}
    for number, batch in enumerate(batches):
        for group_id, blocks in zip(batch.group_ids, hits[number][0], strict=True):
            del blocks[cdiv(candidate, batch.block_size) :]
            found[group_id] = blocks
    return found, candidate, longest - candidate
