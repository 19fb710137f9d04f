"""The scheduler's view of the KV cache: hits, slots, release, reset, events. Layer: L3.

Owns the admission arithmetic and the holds of block copies in flight. Must not know queues, budgets or connectors.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Collection, Iterable, Sequence
from dataclasses import dataclass

from vllm.distributed.kv_event_types import AnyKVCacheEvent, BlockStored
from vllm.utils.checks import check
from vllm.utils.math_utils import cdiv, round_down
from vllm.v1.core.block_hash import make_block_hash_with_group_id
from vllm.v1.core.block_lease import Lease
from vllm.v1.core.block_pool import BlockPool
from vllm.v1.core.kv_cache_block import KVCacheBlock, KVCacheBlockCopy
from vllm.v1.core.kv_cache_blocks import KVCacheBlocks
from vllm.v1.core.kv_cache_coordinator import get_kv_cache_coordinator
from vllm.v1.core.kv_cache_metrics import KVCacheMetricsCollector
from vllm.v1.core.kv_kinds.base import BoundaryState
from vllm.v1.kv_cache_interface import KVCacheConfig
from vllm.v1.metrics.cache_hit_source import CacheHitSource
from vllm.v1.metrics.stats import PrefixCacheStats
from vllm.v1.request import Request, RequestStatus

REPORT_WHOLE_HITS = "full"
"""Value of `request.kv_cache_report_mode` that asks for an event per reuse."""


@dataclass(frozen=True, slots=True)
class _Growth:
    """What one call of `allocate_slots` is to cover, in tokens."""

    hit: tuple[Sequence[KVCacheBlock], ...]
    num_local: int
    total_computed: int
    main_model: int
    with_lookahead: int
    encoder: int
    prefill_end: int


class KVCacheManager:
    """KV slots of all requests, over all KV cache groups. Block 0 is the null block.

    A request's blocks are found with `get_computed_blocks` (which holds nothing), taken with `allocate_slots` and given
    back with `free`; the scheduler calls both in one go, so that nothing can take a hit in between.
    """

    def __init__(
        self,
        kv_cache_config: KVCacheConfig,
        max_model_len: int,
        scheduler_block_size: int,
        hash_block_size: int,
        max_in_flight_tokens: int | None = None,
        enable_caching: bool = True,
        use_eagle: bool = False,
        num_hash_lookahead_tokens: int = 0,
        num_prefill_lookahead: int = 0,
        log_stats: bool = False,
        enable_kv_cache_events: bool = False,
        dcp_world_size: int = 1,
        pcp_world_size: int = 1,
        metrics_collector: KVCacheMetricsCollector | None = None,
        watermark: float = 0.0,
        enable_mamba_shared_prefix_checkpoint: bool = False,
    ) -> None:
        if not 0.0 <= watermark < 1.0:
            raise ValueError(f"watermark must be in [0, 1), got {watermark}")
        self.kv_cache_config = kv_cache_config
        self.max_model_len = max_model_len
        self.enable_caching = enable_caching
        self.use_eagle = use_eagle
        self.log_stats = log_stats
        self.metrics_collector = metrics_collector
        self.num_hash_lookahead_tokens = num_hash_lookahead_tokens
        self.prefix_cache_stats: PrefixCacheStats | None = PrefixCacheStats() if log_stats else None
        self.watermark_blocks = int(watermark * kv_cache_config.num_blocks)
        self.coordinator = get_kv_cache_coordinator(
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
            metrics_collector,
            num_hash_lookahead_tokens,
            num_prefill_lookahead,
        )
        managers = self.coordinator.single_type_managers
        self.num_kv_cache_groups = len(managers)
        self.counts_encoder_tokens = any(manager.counts_encoder_tokens for manager in managers)
        self.empty_kv_cache_blocks = KVCacheBlocks(tuple(() for _ in managers))
        # Keeping a state at a junction costs a chunk boundary, so that it is asked for; keeping a window costs nothing.
        self._finds_junctions = enable_mamba_shared_prefix_checkpoint or all(
            manager.has_positionally_stable_blocks for manager in managers
        )
        self._blocks_to_zero: list[int] = []
        self._copies: list[Lease] = []
        self._copies_in_flight: deque[list[Lease]] = deque()

    @property
    def block_pool(self) -> BlockPool:
        """The device pool."""
        return self.coordinator.block_pool

    @property
    def usage(self) -> float:
        """Share of device blocks held, 0 … 1."""
        return self.block_pool.get_usage()

    # Hits

    def get_computed_blocks(
        self, request: Request, max_cache_hit_length: int | None = None
    ) -> tuple[KVCacheBlocks, int, int]:
        """(blocks, tokens, shared-prefix boundary) of the longest local hit. Holds nothing.

        At most `max_cache_hit_length` tokens, by default all but the last, so that a fully cached prompt still
        computes something. The boundary, 0 if there is none, is the end of a longer prefix that other requests share
        but some group has not kept: worth keeping this time.
        """
        if not self.enable_caching or request.skip_reading_prefix_cache:
            return self.empty_kv_cache_blocks, 0, 0
        limit = request.num_tokens - 1 if max_cache_hit_length is None else max_cache_hit_length
        limit = min(limit, request.num_tokens - max(1, self.num_hash_lookahead_tokens))
        blocks, num_hit, num_beyond = self.coordinator.find_longest_cache_hit(
            request.block_hashes, max(0, limit)
        )
        junction = 0
        if num_beyond and self._finds_junctions:
            junction = round_down(num_hit + num_beyond, self.coordinator.cache_hit_alignment_tokens)
            junction = junction if junction > num_hit else 0
        return self.create_kv_cache_blocks(blocks), num_hit, junction

    def get_computed_blocks_for_connector(
        self, request: Request, max_cache_hit_length: int | None = None
    ) -> tuple[KVCacheBlocks, int, int, bool]:
        """As `get_computed_blocks`, and whether token groups hit deeper than recurrent-state groups could follow."""
        blocks, num_hit, junction = self.get_computed_blocks(request, max_cache_hit_length)
        if not self.enable_caching or request.skip_reading_prefix_cache:
            return blocks, num_hit, junction, False
        limit = request.num_tokens - 1 if max_cache_hit_length is None else max_cache_hit_length
        hits = self.coordinator.find_longest_cache_hit_per_group(request.block_hashes, max(0, limit))
        tokens, states = [], []
        for manager, (_, length) in zip(self.coordinator.single_type_managers, hits, strict=True):
            if manager.caches and manager.retains_longer_hit:
                tokens.append(length)
            elif manager.caches and not manager.has_positionally_stable_blocks:
                states.append(length)
        diverged = bool(tokens and states) and min(tokens) > min(states)
        return blocks, num_hit, junction, diverged

    def estimate_cached_tokens(self, request: Request) -> int:
        """Tokens of the request's own prefix that every cacheable group has hashed by now."""
        prefixes = [
            manager.largest_hashed_prefix(request.request_id)
            for manager in self.coordinator.single_type_managers
            if manager.caches
        ]
        return min(prefixes, default=0)

    def truncate_computed_blocks(self, blocks: KVCacheBlocks, num_tokens: int) -> KVCacheBlocks:
        """The blocks of a hit cut to `num_tokens`, a possible end of a hit; empty slots stay empty."""
        sizes = self.coordinator.group_block_sizes
        return self.create_kv_cache_blocks(
            tuple(group[: cdiv(num_tokens, size)] for group, size in zip(blocks.blocks, sizes, strict=True))
        )

    def make_prefix_cache_stats(self) -> PrefixCacheStats | None:
        """Counters since the last call; None with statistics off."""
        stats = self.prefix_cache_stats
        if stats is not None:
            self.prefix_cache_stats = PrefixCacheStats()
        return stats

    def record_prefix_cache_stats(
        self,
        request: Request,
        num_hit_tokens: int,
        hits_by_source: dict[CacheHitSource, int] | None = None,
    ) -> None:
        """Count the look-up of a request once it is admitted, so that retries do not count."""
        if self.prefix_cache_stats is not None and not request.skip_reading_prefix_cache:
            self.prefix_cache_stats.record(
                request.num_tokens, num_hit_tokens, request.num_preemptions > 0, hits_by_source
            )

    # Slots

    def allocate_slots(
        self,
        request: Request,
        num_new_tokens: int,
        num_new_computed_tokens: int = 0,
        new_computed_blocks: KVCacheBlocks | None = None,
        num_lookahead_tokens: int = 0,
        num_external_computed_tokens: int = 0,
        delay_cache_blocks: bool = False,
        num_encoder_tokens: int = 0,
        full_sequence_must_fit: bool = False,
        reserved_blocks: int = 0,
        has_scheduled_reqs: bool = True,
        skip_zeroing_group_ids: Collection[int] = (),
    ) -> KVCacheBlocks | None:
        """Slots for `num_new_tokens` after a local hit of `num_new_computed_tokens` and external tokens to be loaded.

        Returns the columns appended to each block table, or None, with nothing taken, if the blocks do not suffice.
        `num_lookahead_tokens`: further slots for drafts, never hashed. `delay_cache_blocks`: the caller hashes later.
        `full_sequence_must_fit`: there must be room for all tokens known. `reserved_blocks`: free blocks not to use.
        `skip_zeroing_group_ids`: groups whose external blocks a load fills.
        """
        if num_new_tokens < 0 or num_new_tokens + num_external_computed_tokens + num_new_computed_tokens <= 0:
            raise ValueError(
                f"request {request.request_id}: nothing to allocate (num_new_tokens={num_new_tokens}, "
                f"num_external_computed_tokens={num_external_computed_tokens})"
            )
        growth = self._growth(
            request,
            num_new_tokens,
            (new_computed_blocks or self.empty_kv_cache_blocks, num_new_computed_tokens),
            num_external_computed_tokens,
            num_lookahead_tokens,
            num_encoder_tokens,
        )
        spare = reserved_blocks + self._watermark(request, has_scheduled_reqs)
        if full_sequence_must_fit and not self._whole_sequence_fits(request, growth, spare):
            return None
        request_id = request.request_id
        self.coordinator.remove_skipped_blocks(
            request_id, growth.total_computed - request.num_in_flight_tokens, request.num_prompt_tokens
        )
        if self._need(request_id, growth) > self.block_pool.get_num_free_blocks() - spare:
            return None
        if num_new_computed_tokens or num_external_computed_tokens:
            self.coordinator.allocate_new_computed_blocks(
                request_id,
                growth.hit,
                num_new_computed_tokens,
                num_external_computed_tokens,
                skip_zeroing_group_ids,
            )
            self._report_reuse(request, growth)
        fresh = self.coordinator.allocate_new_blocks(
            request_id,
            growth.with_lookahead,
            growth.main_model,
            num_encoder_tokens,
            growth.total_computed,
            growth.prefill_end,
        )
        if self.enable_caching and not delay_cache_blocks:
            self.coordinator.cache_blocks(request, min(growth.main_model, request.num_tokens))
        return self.create_kv_cache_blocks(fresh)

    def num_slots(self, request_id: str) -> int:
        """Tokens up to which a decoding request grows, token by token, without a call of `allocate_slots`.

        To be asked after the request has been given slots for a decode; blocks out of a window are freed at the next
        call.
        """
        return min(
            (manager.num_slots(request_id) for manager in self.coordinator.single_type_managers), default=0
        )

    def _growth(
        self,
        request: Request,
        num_new_tokens: int,
        local_hit: tuple[KVCacheBlocks, int],
        num_external: int,
        num_lookahead: int,
        num_encoder: int,
    ) -> _Growth:
        blocks, num_local = local_hit
        num_groups = self.num_kv_cache_groups
        check(
            len(blocks.blocks) == num_groups, f"{len(blocks.blocks)} groups hit, the model has {num_groups}"
        )
        total_computed = min(request.num_computed_tokens + num_local + num_external, self.max_model_len)
        main_model = min(total_computed + num_new_tokens, self.max_model_len)
        return _Growth(
            hit=blocks.blocks,
            num_local=num_local,
            total_computed=total_computed,
            main_model=main_model,
            with_lookahead=min(main_model + num_lookahead, self.max_model_len),
            encoder=num_encoder,
            prefill_end=max(request.num_prompt_tokens, request.num_tokens - 1),
        )

    def _watermark(self, request: Request, has_scheduled_reqs: bool) -> int:
        """Blocks that a newcomer must leave free while others run."""
        newcomer = request.status in (RequestStatus.WAITING, RequestStatus.PREEMPTED)
        return self.watermark_blocks if newcomer and has_scheduled_reqs else 0

    def _need(self, request_id: str, growth: _Growth, num_tokens: int | None = None) -> int:
        """Device blocks that `growth` takes; with `num_tokens`, those of the whole sequence, capped per kind."""
        return self.coordinator.get_num_blocks_to_allocate(
            request_id,
            growth.with_lookahead if num_tokens is None else num_tokens,
            growth.hit,
            growth.encoder,
            growth.total_computed,
            growth.num_local,
            growth.main_model if num_tokens is None else num_tokens,
            apply_admission_cap=num_tokens is not None,
            prefill_end=growth.prefill_end,
        )

    def _whole_sequence_fits(self, request: Request, growth: _Growth, spare: int) -> bool:
        num_tokens = max(growth.main_model, min(request.num_tokens, self.max_model_len))
        need = self._need(request.request_id, growth, num_tokens)
        return need <= self.block_pool.get_num_free_blocks() - spare

    def _report_reuse(self, request: Request, growth: _Growth) -> None:
        if request.kv_cache_report_mode != REPORT_WHOLE_HITS or not growth.num_local:
            return
        for manager, blocks in zip(self.coordinator.single_type_managers, growth.hit, strict=True):
            if manager.caches:
                manager.block_pool.emit_cached_block_events(
                    request, blocks, growth.num_local, manager.block_size, manager.kv_cache_group_id
                )

    def cache_blocks(self, request: Request, num_computed_tokens: int) -> None:
        """Hash the request's blocks that are full with `num_computed_tokens` tokens."""
        if self.enable_caching:
            self.coordinator.cache_blocks(request, num_computed_tokens)

    def cache_frontier(self, request: Request) -> None:
        """The request ends before its prompt is computed: make what is computed of it usable from its last token on."""
        if self.enable_caching:
            self.coordinator.cache_frontier(request, request.num_confirmed_tokens)

    def evict_unconfirmed(self, request: Request, num_confirmed_tokens: int) -> None:
        """Drop the hashes of the request's blocks that cover more than that many tokens: their bytes are not valid.

        Blocks are hashed at allocation, before their KV exists; a failed step has to take that back.
        """
        for manager in self.coordinator.single_type_managers:
            if manager.caches:
                manager.evict_after(request.request_id, num_confirmed_tokens)

    def forget_content(self, request: Request) -> None:
        """Make everything that is cached of the request's tokens unfindable, whoever holds it: it is not to be trusted.

        That includes what is not in its tables any more: states and windows that it has left behind, and all of a
        request that was preempted.
        """
        for group, manager in enumerate(self.coordinator.single_type_managers):
            if manager.caches:
                pool = manager.block_pool
                keys = [make_block_hash_with_group_id(one, group) for one in request.block_hashes]
                pool.evict_blocks(pool.cached_block_hash_to_block.ids_under(keys))

    # Release

    def free(self, request: Request) -> None:
        """Free all blocks of the request, the tail of its chain first. Harmless for a request that holds none."""
        self.coordinator.free(request.request_id)

    def truncate(self, request: Request, num_tokens: int) -> None:
        """Let go of the request's blocks that hold no token before `num_tokens`: it will get others for what follows.

        Only for models all of whose groups keep every token of a request.
        """
        for manager in self.coordinator.single_type_managers:
            manager.truncate(request.request_id, num_tokens)

    def pop_blocks_for_free(self, request_id: str) -> list[KVCacheBlock]:
        """Forget the request and return its blocks in eviction order; the caller frees them later."""
        return [
            block for group in self.coordinator.pop_blocks_for_free(request_id) for block in reversed(group)
        ]

    def remove_skipped_blocks(
        self, request_id: str, num_processed_tokens: int, num_prompt_tokens: int | None = None
    ) -> None:
        """Free the blocks that no position after the processed tokens reads."""
        self.coordinator.remove_skipped_blocks(request_id, num_processed_tokens, num_prompt_tokens)

    def evict_blocks(self, block_ids: Iterable[int]) -> None:
        """Drop the hashes of these device blocks; who holds them keeps them."""
        self.block_pool.evict_blocks(block_ids)

    def reset_prefix_cache(self) -> bool:
        """Drop all hashes; False, and no change, while any block is held."""
        if not self.coordinator.reset_prefix_cache():
            return False
        if self.prefix_cache_stats is not None:
            self.prefix_cache_stats.reset = True
        return True

    # Block tables

    def get_blocks(self, request_id: str) -> KVCacheBlocks:
        """The request's blocks per group; empty for an unknown request."""
        return self.create_kv_cache_blocks(self.coordinator.get_blocks(request_id))

    def get_block_ids(self, request_id: str) -> tuple[list[int], ...]:
        """The request's block tables as ids."""
        return self.get_blocks(request_id).get_block_ids()

    def get_block_ids_for_computed_tokens(
        self, request_id: str, num_computed_tokens: int
    ) -> tuple[list[int], ...]:
        """The block tables cut to the columns that hold computed tokens; other kinds than attention stay whole."""
        ids = self.get_block_ids(request_id)
        return tuple(
            group_ids[: cdiv(num_computed_tokens, manager.block_size)]
            if manager.kv_cache_spec.uses_slot_mapping and not manager.counts_encoder_tokens
            else group_ids
            for manager, group_ids in zip(self.coordinator.single_type_managers, ids, strict=True)
        )

    def create_kv_cache_blocks(self, blocks: tuple[Sequence[KVCacheBlock], ...]) -> KVCacheBlocks:
        """The record of these blocks; the shared empty one if there are none."""
        return KVCacheBlocks(blocks) if any(blocks) else self.empty_kv_cache_blocks

    # Steps

    def new_step_starts(self, num_steps_in_flight: int = 0) -> None:
        """A scheduling step begins; `num_steps_in_flight` earlier ones have not been processed yet.

        Sources and targets of block copies are held until their step is no longer in flight.
        """
        self._copies_in_flight.append(self._copies)
        self._copies = []
        while len(self._copies_in_flight) > num_steps_in_flight:
            for lease in self._copies_in_flight.popleft():
                lease.release()
        placer = self.block_pool.placer
        if placer is not None:
            placer.expire()
        self.coordinator.new_step_starts()

    def take_kv_cache_block_copies(self) -> list[KVCacheBlockCopy]:
        """Block copies that the worker must run, in order, after zeroing and before the forward of this step."""
        leases = [
            lease
            for manager in self.coordinator.single_type_managers
            for lease in manager.take_pending_cow_copies()
        ]
        self._copies += leases
        return [KVCacheBlockCopy(lease.blocks[0].block_id, lease.blocks[1].block_id) for lease in leases]

    def record_blocks_for_zeroing(self, block_ids: Iterable[int]) -> None:
        """Have the worker zero these blocks too, such as those of a load that failed."""
        self._blocks_to_zero += block_ids

    def take_new_block_ids(self) -> list[int]:
        """Blocks that the worker must zero before this step."""
        recorded, self._blocks_to_zero = self._blocks_to_zero, []
        return [*self.coordinator.take_new_block_ids(), *recorded]

    def take_boundary_state_offloads(self) -> dict[str, list[BoundaryState]]:
        """Cached states that other tiers may take, by request, as (group, block id, tokens)."""
        taken: dict[str, list[BoundaryState]] = {}
        for manager in self.coordinator.single_type_managers:
            for request_id, states in manager.take_pending_boundary_state_offloads().items():
                taken.setdefault(request_id, []).extend(states)
        return taken

    def finalize_partial_tail_offloads(self, request: Request) -> list[BoundaryState]:
        """At finish: the request's cache entries that end inside a block, as (group, block id, tokens)."""
        return [
            tail
            for manager in self.coordinator.single_type_managers
            for tail in manager.finalize_partial_tail_offload(request)
        ]

    def take_events(self) -> list[AnyKVCacheEvent]:
        """Events since the last call; stores carry kind and window of their group."""
        return self.coordinator.take_events()

    def present_events(self) -> list[BlockStored]:
        """All that events have told of and that is there still, as a consumer needs it that comes late."""
        return self.coordinator.present_events()
