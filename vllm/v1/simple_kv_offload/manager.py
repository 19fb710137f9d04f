"""The scheduler half of the CPU offload: joins lookup, loads and stores behind the public contract.

Owns the order in which the parts are asked. The parts decide: `lookup` what can be loaded,
`store_policy` what is worth a copy, `transfer` when blocks are let go. It must not move bytes, read
clocks or keep a policy of its own. Layer L4.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import replace
from typing import ClassVar

from vllm.config import VllmConfig
from vllm.distributed.kv_event_types import MEDIUM_CPU, MEDIUM_STORAGE, KVCacheEvent
from vllm.logger import init_logger
from vllm.utils.checks import check
from vllm.utils.clock import Clock, MonotonicClock
from vllm.v1.core.block_pool import BlockPool
from vllm.v1.core.kv_cache_blocks import KVCacheBlocks
from vllm.v1.core.kv_cache_view import device_block_bytes
from vllm.v1.core.sched.output import SchedulerOutput
from vllm.v1.kv_cache_interface import KVCacheConfig
from vllm.v1.kv_cache_report import TierReport
from vllm.v1.metrics.cache_hit_source import CacheHitSource
from vllm.v1.outputs import KVConnectorOutput
from vllm.v1.request import Request, RequestStatus
from vllm.v1.simple_kv_offload.capacity import choose_num_blocks
from vllm.v1.simple_kv_offload.chain_index import chain_finder
from vllm.v1.simple_kv_offload.disk_kept import KeptIndex
from vllm.v1.simple_kv_offload.disk_tier import DiskChain, DiskSettings
from vllm.v1.simple_kv_offload.load_side import LoadSide
from vllm.v1.simple_kv_offload.lookup import Promises
from vllm.v1.simple_kv_offload.metadata import (
    KeptInventory,
    KeptOrder,
    SimpleCPUOffloadMetadata,
    SimpleCPUOffloadWorkerMetadata,
)
from vllm.v1.simple_kv_offload.metrics import SimpleCPUOffloadStats
from vllm.v1.simple_kv_offload.options import DEFAULT_DISK_WAIT_S, check_num_cpu_blocks
from vllm.v1.simple_kv_offload.policy_options import DEFAULT_POLICY, OffloadPolicy
from vllm.v1.simple_kv_offload.records import (
    BlockStoreMeta,
    BoundaryStoreStats,
    LoadRequestState,
    TransferMeta,
)
from vllm.v1.simple_kv_offload.reporting import StatsReporter
from vllm.v1.simple_kv_offload.resets import TierResets
from vllm.v1.simple_kv_offload.retention import retain_in_tier
from vllm.v1.simple_kv_offload.shared_pool import SlotTable
from vllm.v1.simple_kv_offload.speed import speed_check
from vllm.v1.simple_kv_offload.store_policy import (
    StoreRequestState,
    keys_between,
    select_endangered,
)
from vllm.v1.simple_kv_offload.store_side import StoreSettings, StoreSide
from vllm.v1.simple_kv_offload.tier import Tier, TierGeometry, in_turn
from vllm.v1.simple_kv_offload.tier_plan import (
    blocks_in,
    estimate_lazy_target_blocks,
    find_full_attention_group,
    geometry,
)

logger = init_logger(__name__)
PREFILL_TOKENS_MIN = 16
"""Prompt tokens of a step below which its time says little about computing prompts."""


class SimpleCPUOffloadScheduler(TierResets):
    """Keeps a best-effort copy of the device's prefix cache in one lower tier.

    ``cpu_capacity_bytes`` are per rank; ``disk_capacity_bytes > 0`` selects the disk instead.
    ``num_cpu_blocks`` replaces sizing by bytes, ``aligned_num_cpu_blocks`` is what the ranks agreed on.
    ``disk_tier_bytes > 0`` puts a disk of so many bytes per rank below host memory. With ``disk_persist`` the disk, there
    or in place of host memory, is kept for the next start.
    ``shared_table``: the slots are those of a pool that other engines use too.
    ``prompt_only`` copies no generated tokens; ``any_cacheable_group`` serves models without full attention too.
    Raises ``ValueError`` for capacities or models it cannot work with.
    """

    host_source: ClassVar[CacheHitSource] = CacheHitSource.HOST

    def __init__(
        self,
        vllm_config: VllmConfig,
        kv_cache_config: KVCacheConfig,
        cpu_capacity_bytes: int,
        scheduler_block_size: int,
        hash_block_size: int,
        lazy_offload: bool = False,
        disk_capacity_bytes: int = 0,
        use_page_cache: bool = False,
        num_cpu_blocks: int | None = None,
        aligned_num_cpu_blocks: int | None = None,
        *,
        disk_tier_bytes: int = 0,
        disk_wait_s: float = DEFAULT_DISK_WAIT_S,
        disk_persist: bool = False,
        prompt_only: bool = False,
        any_cacheable_group: bool = False,
        policy: OffloadPolicy = DEFAULT_POLICY,
        shared_table: SlotTable | None = None,
        clock: Clock | None = None,
    ) -> None:
        self.lazy_offload, self.prompt_only = lazy_offload, prompt_only
        self.policy = policy
        self.fa_gidx = find_full_attention_group(kv_cache_config, or_any=any_cacheable_group)
        is_disk = disk_capacity_bytes > 0
        capacity = blocks_in(kv_cache_config, disk_capacity_bytes if is_disk else cpu_capacity_bytes)
        num_blocks = choose_num_blocks(capacity, check_num_cpu_blocks(num_cpu_blocks), aligned_num_cpu_blocks)
        plan = geometry(
            vllm_config,
            num_blocks=num_blocks,
            medium=MEDIUM_STORAGE if is_disk else MEDIUM_CPU,
            block_sizes=(scheduler_block_size, hash_block_size),
            allow_partial_hits=not lazy_offload,
            eviction_policy=policy.eviction_policy,
            shared_config=None if shared_table is None else kv_cache_config,
        )
        self.tier = self.make_tier(kv_cache_config, plan, shared_table)
        self.hash_block_size = hash_block_size
        self.promises = Promises(self.tier, scheduler_block_size, hash_block_size)
        self.expected_worker_count: int = vllm_config.parallel_config.world_size
        self.max_steps_in_flight: int = vllm_config.max_concurrent_batches
        self.target_free = estimate_lazy_target_blocks(
            kv_cache_config,
            vllm_config.scheduler_config.max_num_batched_tokens,
            vllm_config.parallel_config.decode_context_parallel_size,
        )
        self.lazy_cursor_id: int | None = None
        self.clock: Clock = clock or MonotonicClock()
        self._cache_config = vllm_config.cache_config
        self.source = CacheHitSource.DISK if is_disk else self.host_source
        self.speed = speed_check(policy.decline_slow_tier, self.source, has_disk_below=disk_tier_bytes > 0)
        # Tokens that requests which are not admitted yet have asked for last.
        self._asked: dict[str, int] = {}
        self.chain = self._make_chain(kv_cache_config, disk_tier_bytes, disk_wait_s, disk_persist, self.clock)
        self.kept = KeptIndex(self.tier if self.chain is None else self.chain.disk) if disk_persist else None
        self.reporter = StatsReporter(
            self.source,
            use_page_cache,
            lazy_offload,
            num_blocks,
            device_block_bytes(
                kv_cache_config, self.expected_worker_count if shared_table is None else self.tier.num_parts
            ),
        )
        self.max_pending_blocks = blocks_in(kv_cache_config, policy.max_pending_store_bytes)
        # Both sides need the device's pool, which exists only after the manager: see bind_gpu_block_pool.
        self._store_side: StoreSide | None = None
        self._load_side: LoadSide | None = None
        logger.info("KV offload: %d %s blocks per rank, %s mode", num_blocks, self.tier.medium, self._mode)

    def make_tier(
        self, kv_cache_config: KVCacheConfig, geometry: TierGeometry, shared_table: SlotTable | None
    ) -> Tier:
        """What keeps the copies."""
        return Tier(kv_cache_config, geometry, shared_table)

    def _make_chain(
        self, kv_cache_config: KVCacheConfig, capacity_bytes: int, wait_s: float, is_kept: bool, clock: Clock
    ) -> DiskChain | None:
        if capacity_bytes <= 0:
            return None
        num_blocks = blocks_in(kv_cache_config, capacity_bytes)
        disk = Tier(
            kv_cache_config, replace(self.tier.geometry, num_blocks=num_blocks, medium=MEDIUM_STORAGE)
        )
        depth = max(self.target_free, self.tier.num_blocks // 8)
        settings = DiskSettings(self.hash_block_size, self.expected_worker_count, depth, wait_s, is_kept)
        logger.info("KV offload: %d disk blocks per rank below them", num_blocks)
        return DiskChain(self.tier, disk, chain_finder(self.tier, disk), settings, clock, self.speed)

    def bind_gpu_block_pool(self, gpu_block_pool: BlockPool) -> None:
        """Called once, before any request: the pool whose blocks are copied."""
        check(self._store_side is None, "the device block pool is already bound")
        self._store_side = StoreSide(
            self.tier,
            gpu_block_pool,
            StoreSettings(
                self.hash_block_size,
                self.expected_worker_count,
                self.max_steps_in_flight,
                is_eager=not self.lazy_offload,
                prompt_only=self.prompt_only,
                store_threshold=self.policy.store_threshold,
                max_tracker_size=self.policy.max_tracker_size,
                max_pending_blocks=self.max_pending_blocks,
            ),
        )
        self._load_side = LoadSide(self.tier, gpu_block_pool, self.promises)

    @property
    def store_side(self) -> StoreSide:
        """The store half."""
        assert self._store_side is not None, "bind_gpu_block_pool was not called"
        return self._store_side

    @property
    def load_side(self) -> LoadSide:
        """The load half."""
        assert self._load_side is not None, "bind_gpu_block_pool was not called"
        return self._load_side

    # -- loads --------------------------------------------------------------------------------

    @in_turn
    def get_num_new_matched_tokens(
        self, request: Request, num_computed_tokens: int
    ) -> tuple[int | None, bool]:
        """Tokens the tier holds behind the local prefix, promised to this request; loads are asynchronous.

        ``None`` while an earlier load under the same id has not ended, or blocks come up from the disk.
        """
        if self.load_side.owns(request.request_id):
            return None, False
        if (chain := self.chain) is not None and self._must_wait(chain, request, num_computed_tokens):
            return None, False
        request_id = request.request_id
        num_tokens = self.promises.lookup(request, num_computed_tokens)
        if chain is not None:
            chain.promised(request_id)
        num_blocks = self.promises.num_blocks(request_id)
        if num_tokens and self.speed.declines_hit(request_id, self.source, num_blocks, num_tokens):
            self.promises.withdraw(request_id)
            num_tokens = 0
        self._asked[request_id] = max(0, request.num_tokens - 1 - num_computed_tokens)
        return num_tokens, num_tokens > 0

    def _must_wait(self, chain: DiskChain, request: Request, num_computed_tokens: int) -> bool:
        if not request.load_tiers.allows(chain.disk.medium):
            return False
        searchable = self.promises.searchable(request, num_computed_tokens)
        return searchable is not None and chain.must_wait(request.request_id, *searchable)

    def peek_matched_tokens(self, request: Request, num_computed_tokens: int) -> int:
        """What the tier holds behind the local prefix; nothing is promised, held or counted."""
        return self.promises.peek(request, num_computed_tokens)

    def peek_disk_tokens(self, request: Request, num_computed_tokens: int) -> tuple[int, int] | None:
        """What the disk below holds by itself, and what both tiers hold together; None without one."""
        if self.chain is None:
            return None
        searchable = self.promises.searchable(request, num_computed_tokens)
        return (0, 0) if searchable is None else self.chain.peek(*searchable)

    @in_turn
    def update_state_after_alloc(
        self, request: Request, blocks: KVCacheBlocks, num_external_tokens: int
    ) -> None:
        """The request was admitted with so many of the promised tokens; called again with 0 later."""
        request_id = request.request_id
        self.store_side.track(request)
        num_asked = self._asked.pop(request_id, None)
        if num_asked is not None:  # the first call of this admission
            self.reporter.looked_up(num_asked, is_resumed=request.num_preemptions > 0)
            self._tell_missed(request)
        if num_external_tokens > 0:
            from_disk = 0
            if self.chain is not None and num_asked is not None:
                from_disk = self.chain.tokens_from_disk(request_id, num_asked, num_external_tokens)
            self.load_side.accept(request, blocks, num_external_tokens)
            taken = self.tokens_by_source(request_id, num_external_tokens, from_disk)
            self.reporter.accepted(request, taken)
        else:
            self.promises.withdraw(request_id)
        self._forget_asked(request_id)

    def tokens_by_source(
        self, request_id: str, num_tokens: int, num_from_disk: int
    ) -> dict[CacheHitSource, int]:
        """Where the tokens of the load that was accepted just now come from; some came up from the disk below for it."""
        from_disk = {CacheHitSource.DISK: num_from_disk} if num_from_disk else {}
        return {self.source: num_tokens - num_from_disk, **from_disk}

    def peek_by_source(self, request: Request, num_computed_tokens: int) -> dict[CacheHitSource, int]:
        """`peek_matched_tokens` by the tier that each token would come from."""
        return {self.source: self.peek_matched_tokens(request, num_computed_tokens)}

    @property
    def hit_sources(self) -> tuple[CacheHitSource, ...]:
        """The tiers that hits come from, from the inner one outwards."""
        return (self.source,) if self.chain is None else (self.source, CacheHitSource.DISK)

    def _forget_asked(self, request_id: str) -> None:
        """The request was admitted or ended: what was found out for it while it asked is of no use any more."""
        self._asked.pop(request_id, None)
        self.speed.forget_request(request_id)
        if self.chain is not None:
            self.chain.forget_request(request_id)

    def _tell_missed(self, request: Request) -> None:
        """What an admitted request wants and the tiers lack; its own work after a preemption is no new demand."""
        if not self.tier.queue.hears_misses or request.num_preemptions:
            return
        for tier in (self.tier,) if self.chain is None else (self.tier, self.chain.disk):
            tier.missed(keys_between(self.store_side.stores, request, 0, request.num_tokens))

    # -- one step -----------------------------------------------------------------------------

    @in_turn
    def build_connector_meta(self, scheduler_output: SchedulerOutput) -> SimpleCPUOffloadMetadata:
        """The orders of this step."""
        metadata = SimpleCPUOffloadMetadata()
        if self.tier.pool.placer is not None:
            self.tier.pool.placer.expire()
        self.load_side.order(metadata)
        self.plan_stores(scheduler_output)
        submitted = self.store_side.submit()
        metadata.issued_store_event = self.store_side.table.last_event
        if submitted is not None:
            metadata.store_event, transfers = submitted
            for transfer in transfers:
                metadata.add_stores(transfer.device_blocks, transfer.tier_blocks)
                if self.tier.has_parts:
                    metadata.store_groups += self.tier.groups_of(transfer.tier_blocks, transfer.keys)
                    metadata.companions |= self.tier.companions(transfer.tier_blocks)
        if self.chain is not None:
            self.chain.plan()
            metadata.move_down = self.chain.down.submit()
            metadata.move_up = self.chain.up.submit()
        if self.kept is not None:
            metadata.kept = self.kept.order()
        if self.speed.checked:
            metadata.measures = True
            metadata.prefill_tokens = self._prefill_tokens(scheduler_output)
        return metadata

    def _prefill_tokens(self, scheduler_output: SchedulerOutput) -> int:
        """The step's tokens if most of them belong to prompts and they are worth timing, else 0."""
        prompt_tokens = 0
        for request_id, count in scheduler_output.num_scheduled_tokens.items():
            request = self.store_side.requests.get(request_id)
            if request is not None and request.num_computed_tokens < request.num_prompt_tokens:
                prompt_tokens += count
        total = scheduler_output.total_num_scheduled_tokens
        return total if prompt_tokens >= PREFILL_TOKENS_MIN and 2 * prompt_tokens > total else 0

    @in_turn
    def plan_stores(self, scheduler_output: SchedulerOutput) -> None:
        """Plan what the policy wants copied in this step."""
        self.store_side.begin_step(scheduler_output)
        self.store_side.settle(scheduler_output.num_scheduled_tokens)
        self.store_side.plan_preempted()
        if self.lazy_offload:
            self._plan_endangered()
        else:
            self.store_side.plan_step(scheduler_output)

    def _plan_endangered(self) -> None:
        """Copy cached blocks before they are handed out; they stay out of reach until that is done.

        At most half of the free blocks at a time, so that the scheduler is not left without any.
        """
        side = self.store_side
        endangered = side.find_endangered(max(0, self.target_free - side.num_returning_blocks))
        self.lazy_cursor_id = None if endangered.last is None else endangered.last.block_id
        if side.stores.reuse.is_on:
            side.count_unwanted(endangered)
        if not endangered.keys:
            return  # most steps
        half = max(1, side.stores.device.get_num_free_blocks() // 2)
        chosen = select_endangered(
            side.stores, endangered, half, side.max_new_blocks, side.copied_by_others()
        )
        side.declines.cut_plans += chosen.was_cut and chosen.is_bounded
        side.plan(chosen.candidates, None, to_front=True)

    @in_turn
    def update_connector_output(self, connector_output: KVConnectorOutput) -> None:
        """The workers' combined report of a processed step."""
        report = connector_output.kv_connector_worker_meta
        bad_slots: set[int] = set()
        if isinstance(report, SimpleCPUOffloadWorkerMetadata):
            bad_slots = self.tier.first_slots(report.bad_cpu_blocks)
            self.load_side.lost_events |= report.lost_load_events
            self.store_side.report(report.failed_store_events, ok=False)
            self.store_side.report(report.completed_store_events, ok=True)
            self._update_chain(report)
            self.speed.observe(report.timings)
            self.reporter.timed(report.timings)
            if report.kept_lost and self.kept is not None:
                self.kept.resend()
        if connector_output.finished_recving or bad_slots:
            self.load_side.report(
                connector_output.finished_recving or (), connector_output.failed_recving or (), bad_slots
            )

    def _update_chain(self, report: SimpleCPUOffloadWorkerMetadata) -> None:
        if (chain := self.chain) is None:
            return
        chain.writes_off |= report.disk_missing
        chain.report_bad(report.bad_disk_blocks)
        chain.report_down(report.failed_moves_down, ok=False)
        chain.report_down(report.completed_moves_down, ok=True)
        chain.report_up(report.failed_moves_up, ok=False)
        chain.report_up(report.completed_moves_up, ok=True)

    def take_withdrawal(self) -> KeptOrder | None:
        """What the ranks' disks must forget before anybody is told that it is gone; None if there is nothing such."""
        return None if self.kept is None else self.kept.take_withdrawal()

    def restore_kept(self, inventories: Sequence[KeptInventory]) -> int:
        """What all ranks found on their disks is findable from now on; returns the blocks. Call before any request."""
        if self.kept is None or len(inventories) != self.expected_worker_count:
            return 0
        return self.kept.restore(inventories)

    def take_events(self) -> Iterable[KVCacheEvent]:
        """Events of the tiers since the last call."""
        below = [] if self.chain is None else self.chain.disk.take_events()
        return [*self.tier.take_events(), *below]

    # -- ends ---------------------------------------------------------------------------------

    def request_finished(
        self, request: Request, block_ids: list[int]
    ) -> tuple[bool, dict[str, object] | None]:
        """`request_finished_all_groups` of a model with one group."""
        return self.request_finished_all_groups(request, (block_ids,))

    @in_turn
    def request_finished_all_groups(
        self, request: Request, block_ids: tuple[list[int], ...]
    ) -> tuple[bool, dict[str, object] | None]:
        """The request ended; never delays the release of its blocks, leases keep what is needed.

        After an error nothing of it is stored, and what it may have read or stored is forgotten.
        """
        request_id = request.request_id
        self.promises.withdraw(request_id)
        self.load_side.finish_request(request_id)
        self._forget_asked(request_id)
        if request.status is RequestStatus.FINISHED_ERROR and request.has_read_nothing:
            self.store_side.forget_request(request_id)
        elif request.status is RequestStatus.FINISHED_ERROR:
            poisoned = self.store_side.fail_request(request)
            if self.chain is not None:
                self.chain.disk.forget(poisoned)
        else:
            self.store_side.finish_request(request, block_ids)
            if request.retention is not None:
                share = self._cache_config.kv_retention_share
                retain_in_tier(self.store_side.stores, request, share, self.clock)
        return False, None

    # -- figures ------------------------------------------------------------------------------

    def has_pending_stores(self) -> bool:
        """Whether a store is planned, running, or abandoned but not over."""
        return self.store_side.has_work

    def has_pending_work(self) -> bool:
        """Whether only further steps can collect a copy."""
        moves = self.chain is not None and self.chain.has_work
        untold = self.kept is not None and self.kept.has_work
        return self.store_side.has_work or self.load_side.has_orphans or moves or untold

    def has_pending_block_frees(self) -> bool:
        """Whether a running store will give blocks back to the device's free list."""
        return self.store_side.holds_idle_device_blocks()

    def get_stats(self, *, only_news: bool = False) -> SimpleCPUOffloadStats | None:
        """Figures since the last call; with ``only_news`` None if nothing has changed since the last such call."""
        if self._store_side is None:
            return None
        parts = (self.tier, self.store_side, self.load_side, self.speed, self.chain)
        if only_news and not self.reporter.has_news(*parts):
            return None
        return self.reporter.report(*parts)

    def describe_disk(self) -> TierReport | None:
        """The disk below the tier; None without one."""
        return None if self.chain is None else self.reporter.describe_disk(self.chain)

    def describe(self, source: CacheHitSource) -> TierReport:
        """The tier and its transfers, from counters; ``source`` is the name under which hits are booked."""
        return self.reporter.describe(self.tier, self.store_side, self.load_side, source)

    def get_boundary_store_stats(self) -> BoundaryStoreStats:
        """The tally of the state hand-offs since the start."""
        return self.store_side.boundary.stats

    @property
    def _mode(self) -> str:
        return "lazy" if self.lazy_offload else "eager"


__all__ = [
    "BlockStoreMeta",
    "BoundaryStoreStats",
    "LoadRequestState",
    "SimpleCPUOffloadScheduler",
    "StoreRequestState",
    "TransferMeta",
]
