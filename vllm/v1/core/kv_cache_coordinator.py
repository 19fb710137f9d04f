"""The coordinators: nothing cached, one group, several groups. Layer: L3.

Owns how hits of several groups are combined; everything else is in `kv_coordinator_base.py`.
"""

from __future__ import annotations

from collections.abc import Sequence

from vllm.utils.checks import check
from vllm.utils.math_utils import round_down
from vllm.v1.core.block_hash import BlockHash
from vllm.v1.core.block_pool import BlockObserver, BlockPool
from vllm.v1.core.kv_coordinator_base import GroupBlocks, KVCacheCoordinator, replay_boundaries
from vllm.v1.core.kv_hit_search import find_common_hit
from vllm.v1.kv_cache_interface import KVCacheConfig

__all__ = [
    "HybridKVCacheCoordinator",
    "KVCacheCoordinator",
    "KVCacheCoordinatorNoPrefixCache",
    "UnitaryKVCacheCoordinator",
    "get_kv_cache_coordinator",
    "replay_boundaries",
]


class KVCacheCoordinatorNoPrefixCache(KVCacheCoordinator):
    """Any number of groups, nothing is ever hit."""

    def __init__(
        self,
        kv_cache_config: KVCacheConfig,
        max_model_len: int,
        max_in_flight_tokens: int | None,
        use_eagle: bool,
        enable_kv_cache_events: bool,
        dcp_world_size: int,
        pcp_world_size: int,
        scheduler_block_size: int,
        hash_block_size: int,
        metrics_collector: BlockObserver | None = None,
        num_hash_lookahead_tokens: int = 0,
        num_prefill_lookahead: int = 0,
        allow_partial_hash_hits: bool = True,
        *,
        block_pool: BlockPool | None = None,
    ) -> None:
        super().__init__(
            kv_cache_config,
            max_model_len,
            max_in_flight_tokens,
            use_eagle,
            False,
            enable_kv_cache_events,
            dcp_world_size,
            pcp_world_size,
            scheduler_block_size,
            hash_block_size,
            metrics_collector,
            num_hash_lookahead_tokens,
            num_prefill_lookahead,
            allow_partial_hash_hits,
            block_pool=block_pool,
        )

    def find_longest_cache_hit(
        self, block_hashes: Sequence[BlockHash], max_cache_hit_length: int
    ) -> tuple[GroupBlocks, int, int]:
        return self._no_hit(), 0, 0


class UnitaryKVCacheCoordinator(KVCacheCoordinator):
    """One group; its blocks are hash blocks."""

    def _check_sizes(self, hash_block_size: int) -> None:
        super()._check_sizes(hash_block_size)
        check(len(self.single_type_managers) == 1, f"{len(self.single_type_managers)} groups instead of one")
        check(
            self.group_block_sizes[0] == hash_block_size,
            f"hash block of {hash_block_size} tokens differs from the block of {self.group_block_sizes[0]}",
        )

    def find_longest_cache_hit(
        self, block_hashes: Sequence[BlockHash], max_cache_hit_length: int
    ) -> tuple[GroupBlocks, int, int]:
        if not self._batches:
            return self._no_hit(), 0, 0
        blocks, length = self._batches[0].find(block_hashes, max_cache_hit_length, self._geometry)
        return blocks, length, 0


class HybridKVCacheCoordinator(KVCacheCoordinator):
    """Several groups of possibly different kinds; a hit must suit all that can be hit."""

    def find_longest_cache_hit(
        self, block_hashes: Sequence[BlockHash], max_cache_hit_length: int
    ) -> tuple[GroupBlocks, int, int]:
        if not self._batches:
            return self._no_hit(), 0, 0
        found, length, beyond = find_common_hit(
            self._batches, block_hashes, max_cache_hit_length, self._geometry
        )
        blocks = tuple(found.get(group_id, []) for group_id in range(len(self.single_type_managers)))
        return blocks, length, beyond

    def get_num_cacheable_tokens(self, num_tokens: int, kv_cache_group_id: int) -> int:
        """Whole scheduler blocks only, unless hits end on hash blocks: no hit could end on anything further."""
        if self.enable_partial_hash_hits:
            return num_tokens
        return round_down(num_tokens, self.scheduler_block_size)


def get_kv_cache_coordinator(
    kv_cache_config: KVCacheConfig,
    max_model_len: int,
    max_in_flight_tokens: int | None,
    use_eagle: bool,
    enable_caching: bool,
    enable_kv_cache_events: bool,
    dcp_world_size: int,
    pcp_world_size: int,
    scheduler_block_size: int,
    hash_block_size: int,
    metrics_collector: BlockObserver | None = None,
    num_hash_lookahead_tokens: int = 0,
    num_prefill_lookahead: int = 0,
    allow_partial_hash_hits: bool = True,
    *,
    block_pool: BlockPool | None = None,
) -> KVCacheCoordinator:
    """The coordinator that the configuration asks for. `block_pool`: a pool of the caller's, such as a lower tier's."""
    num_groups = len(kv_cache_config.kv_cache_groups)
    further = (metrics_collector, num_hash_lookahead_tokens, num_prefill_lookahead, allow_partial_hash_hits)
    if not enable_caching or num_groups == 0:
        return KVCacheCoordinatorNoPrefixCache(
            kv_cache_config,
            max_model_len,
            max_in_flight_tokens,
            use_eagle,
            enable_kv_cache_events,
            dcp_world_size,
            pcp_world_size,
            scheduler_block_size,
            hash_block_size,
            *further,
            block_pool=block_pool,
        )
    coordinator_class = UnitaryKVCacheCoordinator if num_groups == 1 else HybridKVCacheCoordinator
    return coordinator_class(
        kv_cache_config,
        max_model_len,
        max_in_flight_tokens,
        use_eagle,
        enable_caching,
        enable_kv_cache_events,
        dcp_world_size,
        pcp_world_size,
        scheduler_block_size,
        hash_block_size,
        *further,
        block_pool=block_pool,
    )
