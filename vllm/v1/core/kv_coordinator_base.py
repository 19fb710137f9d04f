"""Several KV cache groups as one: the longest common hit, and allocation in two phases. Layer: L3.

Owns the managers of all groups and the pools they draw from. Must not know requests' schedules, budgets or connectors.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Collection, Sequence
from math import lcm

from vllm.distributed.kv_event_types import MEDIUM_CPU, AnyKVCacheEvent, BlockStored
from vllm.logger import init_logger
from vllm.utils.checks import check
from vllm.v1.core.block_hash import BlockHash
from vllm.v1.core.block_pool import BlockObserver, BlockPool
from vllm.v1.core.kv_cache_block import KVCacheBlock
from vllm.v1.core.kv_cache_sizes import partial_hash_hits_enabled
from vllm.v1.core.kv_hit_search import HitGeometry, make_batches
from vllm.v1.core.kv_kinds.base import CacheableRequest, SingleTypeKVCacheManager
from vllm.v1.core.kv_kinds.factory import get_manager_for_kv_cache_spec
from vllm.v1.kv_cache_interface import (
    KVCacheConfig,
    get_kv_cache_spec_kind,
    get_kv_cache_spec_sliding_window,
    get_mamba_prefill_checkpoint_position,
    iter_layer_specs,
)

logger = init_logger(__name__)

GroupBlocks = tuple[Sequence[KVCacheBlock], ...]


def replay_boundaries(num_prompt_tokens: int, scheduler_block_size: int, use_eagle: bool) -> tuple[int, ...]:
    """Prefix lengths at which a request is likely to be continued from the cache.

    Sent again, it computes its last token, so the boundary is one token before the end. With the EAGLE drop, the
    prompt end and that resend point are aligned and each backed off by one scheduler block.
    """
    if not use_eagle:
        return (max(0, num_prompt_tokens - 1),)
    ends = (num_prompt_tokens, num_prompt_tokens - 1)
    boundaries = [max(0, (end // scheduler_block_size - 1) * scheduler_block_size) for end in ends]
    return tuple(dict.fromkeys(boundaries))


class KVCacheCoordinator(ABC):
    """One manager per KV cache group, in group order. Counts are tokens of the request.

    `eagle_group_ids`: groups of the drafter; `drop_eagle_group_ids`: those that give their last matched block back.
    """

    def __init__(
        self,
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
    ) -> None:
        groups = kv_cache_config.kv_cache_groups
        self.kv_cache_config = kv_cache_config
        self.enable_caching = enable_caching
        self.use_eagle = use_eagle
        self.scheduler_block_size = scheduler_block_size
        self.num_hash_lookahead_tokens = num_hash_lookahead_tokens
        self.num_prefill_lookahead = num_prefill_lookahead
        self.retention_interval = kv_cache_config.prefix_cache_retention_interval
        self.block_pool = block_pool or BlockPool(
            kv_cache_config.num_blocks,
            enable_caching,
            hash_block_size,
            enable_kv_cache_events,
            metrics_collector,
            num_hash_lookahead_tokens,
        )
        host_pool = None if block_pool else make_host_pool(kv_cache_config, self.block_pool)
        self.single_type_managers: tuple[SingleTypeKVCacheManager, ...] = tuple(
            get_manager_for_kv_cache_spec(
                group.kv_cache_spec,
                max_in_flight_tokens,
                max_model_len,
                role=group.role,
                block_pool=(host_pool if group.host_resident else None) or self.block_pool,
                enable_caching=enable_caching,
                kv_cache_group_id=group_id,
                scheduler_block_size=scheduler_block_size,
                dcp_world_size=dcp_world_size,
                pcp_world_size=pcp_world_size,
                needs_kv_cache_zeroing=kv_cache_config.needs_kv_cache_zeroing,
            )
            for group_id, group in enumerate(groups)
        )
        self.group_block_sizes = tuple(manager.block_size for manager in self.single_type_managers)
        self.pools: tuple[BlockPool, ...] = (self.block_pool, *([host_pool] if host_pool else []))
        shared = self._shared_state_tokens()
        self.enable_partial_hash_hits = (
            enable_caching
            and allow_partial_hash_hits
            and hash_block_size < scheduler_block_size
            and hash_block_size % shared == 0
            and partial_hash_hits_enabled(groups, hash_block_size, dcp_world_size)
        )
        alignment = hash_block_size if self.enable_partial_hash_hits else lcm(scheduler_block_size, shared)
        self._load_targets: set[int] = set()
        self._geometry = HitGeometry(hash_block_size, alignment, dcp_world_size, pcp_world_size)
        self._check_sizes(hash_block_size)
        self._flag_eagle_groups()
        self._batches = [] if self._replay_is_impossible() else make_batches(self.single_type_managers)

    def _shared_state_tokens(self) -> int:
        """Tokens on whose multiples no state is cut that several tokens share."""
        return lcm(
            *(
                int(spec.tokens_per_state)
                for group in self.kv_cache_config.kv_cache_groups
                for spec in iter_layer_specs(group.kv_cache_spec)
                if spec.tokens_per_state > 1 and spec.tokens_per_state == int(spec.tokens_per_state)
            )
        )

    def _check_sizes(self, hash_block_size: int) -> None:
        size = self.scheduler_block_size
        if self.enable_caching:
            check(
                size % hash_block_size == 0,
                f"scheduler block of {size} tokens is no multiple of the hash block of {hash_block_size}",
            )
        for manager in self.single_type_managers:
            # Scratch never ends a hit, so that its size is free.
            check(
                not manager.caches or size % manager.block_size == 0,
                f"scheduler block of {size} tokens is no multiple of group {manager.kv_cache_group_id}'s block "
                f"of {manager.block_size}",
            )
        interval = self.retention_interval
        if interval is not None and interval < 0:
            raise ValueError(f"prefix_cache_retention_interval must not be negative, got {interval}")
        if interval and interval % size:
            raise ValueError(
                f"prefix_cache_retention_interval={interval} is no multiple of the scheduler block of {size} tokens"
            )
        if interval and not any(manager.supports_retention for manager in self.single_type_managers):
            raise ValueError(
                f"prefix_cache_retention_interval={interval} needs a sliding-window or recurrent-state group"
            )

    def _flag_eagle_groups(self) -> None:
        flagged = {i for i, g in enumerate(self.kv_cache_config.kv_cache_groups) if g.is_eagle_group}
        everyone = set(range(len(self.single_type_managers)))
        self.eagle_group_ids: set[int] = (flagged or everyone) if self.use_eagle else set()
        # With lookahead hashes a block is only found together with the tokens its last slot depends on.
        self.drop_eagle_group_ids: set[int] = (
            set() if self.num_hash_lookahead_tokens else self.eagle_group_ids
        )
        for manager in self.single_type_managers:
            manager.use_eagle = manager.kv_cache_group_id in self.drop_eagle_group_ids
            manager.hits_are_dropped = bool(self.drop_eagle_group_ids)
            manager.cache_hit_alignment_tokens = self._geometry.alignment_tokens

    def _replay_is_impossible(self) -> bool:
        """A window is replayed from before the hit's end, where kinds that keep only a tail have nothing to read."""
        replays = any(manager.kv_cache_spec.prefix_replay_tokens for manager in self.single_type_managers)
        sparse = any(m.caches and not m.retains_longer_hit for m in self.single_type_managers)
        if replays and sparse:
            logger.warning(
                "No prefix hits: windows that are replayed do not go with other kinds that keep a tail"
            )
        return replays and sparse

    @property
    def cache_hit_alignment_tokens(self) -> int:
        """Tokens on whose multiples hits end."""
        return self._geometry.alignment_tokens

    @property
    def _cache_hit_alignment_tokens(self) -> int:
        """The name under which outside code reads the alignment."""
        return self._geometry.alignment_tokens

    # Hits

    @abstractmethod
    def find_longest_cache_hit(
        self, block_hashes: Sequence[BlockHash], max_cache_hit_length: int
    ) -> tuple[GroupBlocks, int, int]:
        """(blocks per group, hit tokens, further tokens that some group has cached but not all).

        At most `max_cache_hit_length` tokens. Groups that cannot be hit have an empty slot. Nothing is touched.
        """

    def find_longest_cache_hit_per_group(
        self, block_hashes: Sequence[BlockHash], max_cache_hit_length: int
    ) -> tuple[tuple[Sequence[KVCacheBlock], int], ...]:
        """Each group's own longest hit, as (blocks, tokens); groups that cannot be hit have ([], 0)."""
        found: list[tuple[Sequence[KVCacheBlock], int]] = [([], 0)] * len(self.single_type_managers)
        for batch in self._batches:
            blocks, length = batch.find(block_hashes, max_cache_hit_length, self._geometry)
            for group_id, group_blocks in zip(batch.group_ids, blocks, strict=True):
                found[group_id] = (group_blocks, length)
        return tuple(found)

    def _no_hit(self) -> GroupBlocks:
        return tuple([] for _ in self.single_type_managers)

    # Allocation

    def get_num_blocks_to_allocate(
        self,
        request_id: str,
        num_tokens: int,
        new_computed_blocks: GroupBlocks,
        num_encoder_tokens: int,
        total_computed_tokens: int,
        num_local_computed_tokens: int,
        num_tokens_main_model: int,
        apply_admission_cap: bool = False,
        prefill_end: int = 0,
    ) -> int:
        """Blocks that leave the device pool's free queue when the request grows to `num_tokens`.

        More than the pool has if a host pool lacks room, or a hit cannot be used in this step.
        """
        needed = {id(pool): 0 for pool in self.pools}
        for manager, adopted in zip(self.single_type_managers, new_computed_blocks, strict=True):
            encoder = manager.counts_encoder_tokens
            needed[id(manager.block_pool)] += manager.get_num_blocks_to_allocate(
                request_id,
                num_encoder_tokens if encoder else num_tokens,
                adopted,
                0 if encoder else total_computed_tokens,
                0 if encoder else num_local_computed_tokens,
                num_encoder_tokens if encoder else num_tokens_main_model,
                apply_admission_cap,
                prefill_end,
            )
        for pool in self.pools[1:]:
            if needed[id(pool)] > pool.get_num_free_blocks():
                return self.block_pool.num_gpu_blocks + 1
        return needed[id(self.block_pool)]

    def allocate_new_computed_blocks(
        self,
        request_id: str,
        new_computed_blocks: GroupBlocks,
        num_local_computed_tokens: int,
        num_external_computed_tokens: int,
        skip_zeroing_group_ids: Collection[int] = (),
    ) -> None:
        """Adopt local hits and allocate blocks for external tokens, in two passes.

        Every group touches its hits before any group allocates: an allocation could evict a hit of another group.
        Blocks of `skip_zeroing_group_ids` are filled by a load, so that they must not be zeroed.
        """
        for manager, adopted in zip(self.single_type_managers, new_computed_blocks, strict=True):
            manager.add_local_computed_blocks(
                request_id, adopted, num_local_computed_tokens, num_external_computed_tokens
            )
        for manager in self.single_type_managers:
            loads = manager.kv_cache_group_id in skip_zeroing_group_ids
            fresh = manager.allocate_external_computed_blocks(
                request_id, num_local_computed_tokens, num_external_computed_tokens, not loads
            )
            if loads:
                self._load_targets.update(block.block_id for block in fresh)

    def allocate_new_blocks(
        self,
        request_id: str,
        num_tokens: int,
        num_tokens_main_model: int,
        num_encoder_tokens: int = 0,
        total_computed_tokens: int = 0,
        prefill_end: int = 0,
    ) -> tuple[list[KVCacheBlock], ...]:
        """Per group, the columns appended so that the table covers `num_tokens` tokens."""
        return tuple(
            manager.allocate_new_blocks(request_id, num_encoder_tokens, num_encoder_tokens)
            if manager.counts_encoder_tokens
            else manager.allocate_new_blocks(
                request_id, num_tokens, num_tokens_main_model, total_computed_tokens, prefill_end
            )
            for manager in self.single_type_managers
        )

    # Caching

    def get_num_cacheable_tokens(self, num_tokens: int, kv_cache_group_id: int) -> int:
        """How many of the tokens are worth hashing in this group."""
        return num_tokens

    def cache_blocks(self, request: CacheableRequest, num_computed_tokens: int) -> None:
        """Hash the request's blocks that are full with `num_computed_tokens` tokens."""
        boundaries: tuple[int, ...] | None = None
        for manager in self.single_type_managers:
            num_tokens = self.get_num_cacheable_tokens(num_computed_tokens, manager.kv_cache_group_id)
            if not manager.has_blocks_to_cache(request, num_tokens):
                continue
            if boundaries is None:
                boundaries = self._replay_boundaries(request)
            manager.cache_blocks(request, num_tokens, self.retention_interval, replay_boundaries=boundaries)

    def cache_frontier(self, request: CacheableRequest, num_computed_tokens: int) -> None:
        """The request ends inside its prompt: also hash what one needs that goes on from there.

        Windows and states are kept where requests are likely to go on, which for a whole prompt is its end.
        """
        if self.retention_interval is None:
            return
        drops = bool(self.drop_eagle_group_ids)
        boundaries = replay_boundaries(num_computed_tokens + 1, self.scheduler_block_size, drops)
        for manager in self.single_type_managers:
            if manager.supports_retention:
                manager.num_cached_block.pop(request.request_id, None)
                num_tokens = self.get_num_cacheable_tokens(num_computed_tokens, manager.kv_cache_group_id)
                manager.cache_blocks(request, num_tokens, 0, replay_boundaries=boundaries)

    def _replay_boundaries(self, request: CacheableRequest) -> tuple[int, ...]:
        lookahead = self.num_hash_lookahead_tokens
        drops = bool(self.drop_eagle_group_ids)
        num_prompt = request.num_prompt_tokens
        usable = num_prompt - max(0, lookahead - 1)
        boundaries = replay_boundaries(usable, self.scheduler_block_size, drops)
        if self.enable_partial_hash_hits:
            hash_size = self._geometry.hash_block_size
            tail = get_mamba_prefill_checkpoint_position(num_prompt, hash_size, drops, lookahead)
            boundaries = (*boundaries, tail)
        return boundaries

    # Release

    def free(self, request_id: str) -> None:
        """Forget the request; its blocks are freed in reverse, so that the tail of its chain is evicted first."""
        for manager in self.single_type_managers:
            manager.free(request_id)

    def pop_blocks_for_free(self, request_id: str) -> tuple[Sequence[KVCacheBlock], ...]:
        """Forget the request without freeing: per group its blocks in table order, leading null ones left out."""
        return tuple(manager.pop_blocks_for_free(request_id) for manager in self.single_type_managers)

    def remove_skipped_blocks(
        self, request_id: str, total_computed_tokens: int, num_prompt_tokens: int | None = None
    ) -> None:
        """Free the blocks that no position after `total_computed_tokens` reads."""
        for manager in self.single_type_managers:
            manager.remove_skipped_blocks(request_id, total_computed_tokens, num_prompt_tokens)

    def get_blocks(self, request_id: str) -> tuple[list[KVCacheBlock], ...]:
        """The request's block tables, per group; the live lists, empty for an unknown request."""
        return tuple(manager.req_to_blocks.get(request_id, []) for manager in self.single_type_managers)

    def reset_prefix_cache(self) -> bool:
        """Drop all hashes of every pool; False, and no change, if any block is held."""
        if any(pool.num_gpu_blocks - 1 != pool.get_num_free_blocks() for pool in self.pools[1:]):
            return False
        if not self.block_pool.reset_prefix_cache():
            return False
        for pool in self.pools[1:]:
            pool.reset_prefix_cache()
        return True

    # Steps

    def new_step_starts(self) -> None:
        """A scheduling step begins."""
        for manager in self.single_type_managers:
            manager.new_step_starts()

    def take_new_block_ids(self) -> list[int]:
        """Blocks handed out since the last call that the worker must zero; targets of loads are left out."""
        ids: dict[int, None] = {}
        for manager in self.single_type_managers:
            ids.update(dict.fromkeys(manager.take_new_block_ids()))
        targets, self._load_targets = self._load_targets, set()
        return [block_id for block_id in ids if block_id not in targets]

    def take_events(self) -> list[AnyKVCacheEvent]:
        """Events of all pools since the last call; stores carry kind and window of their group."""
        events = [event for pool in self.pools for event in pool.take_events()]
        self._name_groups(events)
        return events

    def present_events(self) -> list[BlockStored]:
        """All that events of these pools have told of and that is there still."""
        events = [event for pool in self.pools for event in pool.present_events()]
        self._name_groups(events)
        return events

    def _name_groups(self, events: Sequence[AnyKVCacheEvent]) -> None:
        groups = self.kv_cache_config.kv_cache_groups
        for event in events:
            if isinstance(event, BlockStored) and event.group_idx is not None:
                spec = groups[event.group_idx].kv_cache_spec
                event.kv_cache_spec_kind = get_kv_cache_spec_kind(spec).value
                event.kv_cache_spec_sliding_window = get_kv_cache_spec_sliding_window(spec)


def make_host_pool(kv_cache_config: KVCacheConfig, device_pool: BlockPool) -> BlockPool | None:
    """The pool of host-resident groups, or None without such groups. ValueError if its size is unknown."""
    if not kv_cache_config.host_group_ids:
        return None
    host_blocks = kv_cache_config.hisparse_host_num_blocks
    if host_blocks is None:
        raise ValueError("host-resident KV cache groups need hisparse_host_num_blocks")
    return BlockPool(
        host_blocks,
        device_pool.enable_caching,
        device_pool.hash_block_size,
        device_pool.enable_kv_cache_events,
        num_hash_lookahead_tokens=device_pool.num_hash_lookahead_tokens,
        medium=MEDIUM_CPU,
    )
