"""The scheduler half of an offload whose manager comes from outside.

Owns the translation between the machinery's transfers and the manager's calls: every key that was prepared is completed
once. What is stored, loaded, held and given back when is the machinery's business. Layer L4.
"""

from __future__ import annotations

import sys
from collections.abc import Collection, Iterable, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import ClassVar

from vllm.config import VllmConfig
from vllm.distributed.kv_event_types import KVCacheEvent
from vllm.distributed.kv_transfer.kv_connector.v1.offloading.common import (
    OffloadingConnectorMetadata,
    OffloadingWorkerMetadata,
    TransferJob,
)
from vllm.distributed.kv_transfer.kv_connector.v1.offloading.config import (
    GroupOffloadConfig,
    SchedulerOffloadConfig,
)
from vllm.distributed.kv_transfer.kv_connector.v1.offloading.events import OffloadingEventsTracker
from vllm.distributed.kv_transfer.kv_connector.v1.offloading.given_up import GivenUpJobs, Prepared
from vllm.distributed.kv_transfer.kv_connector.v1.offloading.guarded_manager import GuardedManager
from vllm.distributed.kv_transfer.kv_connector.v1.offloading.load_sources import UNKNOWN, LoadSources
from vllm.distributed.kv_transfer.kv_connector.v1.offloading.plugin_tier import PluginTier
from vllm.distributed.kv_transfer.kv_connector.v1.offloading.spec_metrics import SPEC_INFO, add_figures
from vllm.logger import init_logger
from vllm.utils.clock import Clock
from vllm.utils.math_utils import cdiv
from vllm.v1.core.block_lease import Lease
from vllm.v1.core.kv_cache_blocks import KVCacheBlocks
from vllm.v1.core.kv_cache_view import gpu_total_bytes
from vllm.v1.core.sched.output import SchedulerOutput
from vllm.v1.kv_cache_interface import KVCacheConfig
from vllm.v1.kv_offload.base import (
    GPULoadStoreSpec,
    LoadStoreSpec,
    OffloadingSpec,
    OffloadKey,
    OffloadPolicy,
    ReqContext,
    ScheduleEndContext,
    get_offload_block_hash,
    get_offload_group_idx,
)
from vllm.v1.metrics.cache_hit_source import CacheHitSource
from vllm.v1.outputs import KVConnectorOutput
from vllm.v1.request import Request
from vllm.v1.simple_kv_offload.manager import SimpleCPUOffloadScheduler
from vllm.v1.simple_kv_offload.metrics import SimpleCPUOffloadStats
from vllm.v1.simple_kv_offload.shared_pool import SlotTable
from vllm.v1.simple_kv_offload.tier import Tier, TierGeometry, in_turn
from vllm.v1.simple_kv_offload.transfer import Transfer, TransferState

logger = init_logger(__name__)

WAIT_MAX_S = 5.0
"""How long a request waits for a manager that puts off its answer; then the answer is no."""


@dataclass(slots=True)
class RequestOffloadState:
    """A request from its first look-up to its end. ``put_off_since``: when its look-up was put off first (seconds)."""

    ctx: ReqContext
    policy: OffloadPolicy
    request: Request
    put_off_since: float | None = None


class OffloadingConnectorScheduler(SimpleCPUOffloadScheduler):
    """Offloads to wherever the spec's manager keeps blocks."""

    # Where bytes lie is known of loads only, block by block.
    host_source: ClassVar[CacheHitSource] = UNKNOWN

    def __init__(
        self,
        spec: OffloadingSpec,
        vllm_config: VllmConfig,
        kv_cache_config: KVCacheConfig,
        *,
        clock: Clock | None = None,
    ) -> None:
        self.spec = spec
        self.config = SchedulerOffloadConfig.from_spec(spec, vllm_config, kv_cache_config)
        extra = spec.config.extra_config
        self._metrics = spec.build_metric_definitions(extra)
        self._info_keys = tuple(spec.config_info_keys(extra))
        self.manager = GuardedManager(spec.get_manager())
        self.tracker = OffloadingEventsTracker(
            {group.group_id: group.event_spec for group in self.config.groups},
            self_describing=self.config.self_describing_kv_events,
            is_enabled=spec.config.enable_kv_cache_events,
        )
        super().__init__(
            vllm_config,
            kv_cache_config,
            # Slots are names: their number is given below, and no bytes are behind it.
            gpu_total_bytes(kv_cache_config),
            self.config.scheduler_block_size,
            self.config.hash_block_size,
            aligned_num_cpu_blocks=self.config.num_slots,
            prompt_only=self.config.offload_prompt_only,
            any_cacheable_group=True,
            clock=clock,
        )
        self._places = {group.group_id: place for place, group in enumerate(self.config.groups)}
        self._tokens = {group.group_id: group.tokens_per_block for group in self.config.groups}
        self._sources = LoadSources(self.manager, self.fa_gidx, self._tokens[self.fa_gidx])
        self._requests: dict[str, RequestOffloadState] = {}
        # Ended ones whose last stores have not left yet.
        self._ended: dict[str, RequestOffloadState] = {}
        # Those that are stored as a whole.
        self._whole: dict[str, None] = {}
        self._next_job = 0
        self._open_stores: dict[int, list[Prepared]] = {}
        # Blocks of stores under way that the manager did not take: nobody copies them.
        self._refused: dict[int, list[tuple[Transfer, int]]] = {}
        self._open_loads: dict[str, Prepared] = {}
        self._load_jobs: dict[str, int] = {}
        self.given_up = GivenUpJobs()
        # What was under way at a reset and is not over: store events and requests that load. The manager hears no more of it.
        self._flushed_stores: set[int] = set()
        self._flushed_loads: set[str] = set()
        self._is_flushing = False
        # Jobs with lower numbers are from before the reset.
        self._first_since_reset = 0

    def make_tier(
        self, kv_cache_config: KVCacheConfig, geometry: TierGeometry, shared_table: SlotTable | None
    ) -> Tier:
        """The manager as a tier. A key stands for a whole block: nothing ends inside one."""
        whole_blocks = replace(geometry, allow_partial_hits=False)
        self.plugin_tier = PluginTier(kv_cache_config, whole_blocks, self.manager, self.tracker)
        return self.plugin_tier

    # -- loads --------------------------------------------------------------------------------

    @in_turn
    def get_num_new_matched_tokens(
        self, request: Request, num_computed_tokens: int
    ) -> tuple[int | None, bool]:
        """As for every tier; ``None`` also while the manager puts off its answer, for `WAIT_MAX_S` at most."""
        state = self._follow(request)
        self.plugin_tier.mirror.is_stuck = self.given_up.has_load
        with self.plugin_tier.mirror.asking(state.ctx, self.clock.monotonic()):
            found = super().get_num_new_matched_tokens(request, num_computed_tokens)
            if found[0] is None or not self.plugin_tier.mirror.is_put_off:
                return found
        now = self.clock.monotonic()
        if state.put_off_since is None:
            state.put_off_since = now
        if now - state.put_off_since >= WAIT_MAX_S:
            return found
        self.promises.withdraw(request.request_id)
        return None, False

    @in_turn
    def peek_matched_tokens(self, request: Request, num_computed_tokens: int) -> int:
        """What the manager says to have; nothing is promised."""
        return sum(self.peek_by_source(request, num_computed_tokens).values())

    def _peek_context(self, request: Request) -> ReqContext:
        state = self._requests.get(request.request_id)
        self.plugin_tier.mirror.is_stuck = self.given_up.has_load
        return _context(request) if state is None else state.ctx

    @in_turn
    def update_state_after_alloc(
        self, request: Request, blocks: KVCacheBlocks, num_external_tokens: int
    ) -> None:
        """The request was admitted."""
        state = self._follow(request)
        state.put_off_since = None
        with self.plugin_tier.mirror.asking(state.ctx, self.clock.monotonic()):
            super().update_state_after_alloc(request, blocks, num_external_tokens)

    @in_turn
    def peek_by_source(self, request: Request, num_computed_tokens: int) -> dict[CacheHitSource, int]:
        """What the manager says to have, by the tier that it would be loaded from."""
        ctx = self._peek_context(request)
        with self.plugin_tier.mirror.asking(ctx, self.clock.monotonic()):
            slots, num_tokens = self.promises.peek_blocks(request, num_computed_tokens)
            keys = [slot.block_hash for slot in slots if slot.block_hash is not None]
        return self._sources.split(keys, num_tokens, ctx)

    @property
    def hit_sources(self) -> tuple[CacheHitSource, ...]:
        """Those that the manager has named so far, and that of bytes of which nothing is known."""
        return self._sources.named

    def tokens_by_source(
        self, request_id: str, num_tokens: int, num_from_disk: int
    ) -> dict[CacheHitSource, int]:
        """As the manager says of each block."""
        load = self.load_side.loads[request_id]
        keys = [slot.block_hash for slot in load.transfer.tier_blocks if slot.block_hash is not None]
        return self._sources.split(keys, num_tokens, self._context_of(request_id))

    @in_turn
    def reset_tiers(self, tiers: Collection[CacheHitSource]) -> bool:
        """A manager can only be reset as a whole: False, and no change, if just some of what it has named is meant."""
        own = self.hit_sources
        if all(source in tiers for source in own):
            return self.reset()
        return not any(source in tiers for source in own)

    def _follow(self, request: Request) -> RequestOffloadState:
        state = self._requests.get(request.request_id)
        if state is None:
            ctx = _context(request)
            state = RequestOffloadState(ctx, self.manager.on_new_request(ctx).policy, request)
            self._requests[request.request_id] = state
            if state.policy is OffloadPolicy.REQUEST_LEVEL:
                self._whole[request.request_id] = None
        return state

    # -- one step -----------------------------------------------------------------------------

    @in_turn
    def build_connector_meta(self, scheduler_output: SchedulerOutput) -> OffloadingConnectorMetadata:
        """The machinery's orders, and the jobs that they are."""
        self._hold_back_whole_requests()
        orders = super().build_connector_meta(scheduler_output)
        metadata = OffloadingConnectorMetadata({}, {}, orders=orders)
        self._add_load_jobs(metadata)
        self._add_store_jobs(metadata)
        self._ended.clear()
        self.manager.on_schedule_end(
            ScheduleEndContext(
                [new.req_id for new in scheduler_output.scheduled_new_reqs],
                sorted(scheduler_output.preempted_req_ids or ()),
            )
        )
        return metadata

    def _hold_back_whole_requests(self) -> None:
        """Those that are stored as a whole have nothing to store before their end."""
        for request_id in self._whole:
            state = self.store_side.states.get(request_id)
            if state is not None:
                state.quiet_below = sys.maxsize
                self.store_side.patrol.skip(self.store_side.stores, state)

    def _add_load_jobs(self, metadata: OffloadingConnectorMetadata) -> None:
        for req_ids, part in metadata.loads_by_request():
            for req_id in req_ids:
                request, ctx = self.load_side.loads[req_id].request, self._context_of(req_id)
                slots = metadata.load_cpu_blocks[part]
                if not slots:
                    continue  # it needs nothing of what it was promised
                keys = [key for slot in slots if (key := self.tier.pool.blocks[slot].block_hash) is not None]
                job = self._load_jobs[req_id] = self._new_job()
                source = self._source(keys, len(slots), ctx)
                if source is not None:
                    self._open_loads[req_id] = Prepared(job, ctx, keys)
                target = self._device_spec(keys, metadata.load_gpu_blocks[part][: len(keys)], request)
                metadata.load_jobs[job] = TransferJob(req_id, source, target)

    def _source(self, keys: list[OffloadKey], num_wanted: int, ctx: ReqContext) -> LoadStoreSpec | None:
        if len(keys) < num_wanted:
            return None  # it was given up meanwhile
        try:
            return self.manager.prepare_load(keys, ctx)
        except Exception:  # of a module from outside
            logger.exception("KV offload: the load of request %s cannot be prepared", ctx.req_id)
            return None

    def _add_store_jobs(self, metadata: OffloadingConnectorMetadata) -> None:
        event = metadata.store_event
        for transfer in self.store_side.table.transfers_of(event):
            req_id = transfer.request_id or ""
            # Its last stores leave when it has ended, and another one may have its name by then.
            state = self._ended.get(req_id) or self._requests.get(req_id)
            ctx = ReqContext(req_id) if state is None else state.ctx
            job = self._store_job(transfer, ctx, None if state is None else state.request)
            self._give_up_rest(event, transfer, () if job is None else frozenset(job[1]))
            if job is not None:
                number = self._new_job()
                metadata.store_jobs[number] = job[0]
                self.plugin_tier.taken.update(job[1])
                self._open_stores.setdefault(event, []).append(Prepared(number, ctx, job[1]))

    def _give_up_rest(self, event: int, transfer: Transfer, taken: Collection[OffloadKey]) -> None:
        """Of a transfer the manager took these keys: its targets get no other."""
        num_refused = sum(key not in taken for key in transfer.keys.primary_keys)
        if num_refused:
            self._refused.setdefault(event, []).append((transfer, num_refused))
        rest = {key for key in transfer.keys.all_keys() if key not in taken}
        if rest:
            transfer.strip(rest)
            self.store_side.in_flight.difference_update(rest)

    def _store_job(
        self, transfer: Transfer, ctx: ReqContext, request: Request | None
    ) -> tuple[TransferJob, list[OffloadKey]] | None:
        """The job, and the keys that the manager took; None if it took none."""
        if self.given_up.has_store:
            return None  # it would not end either
        sources: dict[OffloadKey, int] = {}
        for block, key, row in zip(
            transfer.device_blocks, transfer.keys.primary_keys, transfer.keys, strict=True
        ):
            if key is not None and key not in self.plugin_tier.taken:
                sources[key] = block.block_id
                self.tracker.describe(key, row[0].info)
        if not sources:
            return None
        offered = sorted(sources, key=lambda key: self._places[get_offload_group_idx(key)])
        prepared = self.manager.prepare_store(offered, ctx)
        if prepared is None:
            self.tracker.forget(offered)
            return None
        self.plugin_tier.let_go(prepared.evicted_keys)
        chosen = list(prepared.keys_to_store)
        wanted = set(chosen)
        self.tracker.forget(key for key in offered if key not in wanted)
        if chosen != [key for key in offered if key in wanted]:
            logger.error(
                "KV offload: the manager wants to store keys that were not offered, or in another order"
            )
            self.manager.complete_store(chosen, ctx, success=False)
            return None
        if not chosen:
            return None
        target = self._device_spec(chosen, [sources[key] for key in chosen], request)
        return TransferJob(ctx.req_id, target, prepared.store_spec), chosen

    def _device_spec(
        self, keys: Sequence[OffloadKey], block_ids: Sequence[int], request: Request | None
    ) -> GPULoadStoreSpec:
        """The blocks as a worker sees them; positions are 0 where the request is gone."""
        sizes, firsts = [0] * len(self._places), [0] * len(self._places)
        for key in keys:
            group = get_offload_group_idx(key)
            place = self._places[group]
            if not sizes[place] and request is not None:
                firsts[place] = self._position(key, request)
            sizes[place] += 1
        return GPULoadStoreSpec(block_ids, sizes, firsts)

    def _position(self, key: OffloadKey, request: Request) -> int:
        try:
            units = request.block_hashes.index(get_offload_block_hash(key)) + 1
        except ValueError:  # its tokens have changed since
            return 0
        return cdiv(units * self.hash_block_size, self._tokens[get_offload_group_idx(key)]) - 1

    def _context_of(self, req_id: str) -> ReqContext:
        state = self._requests.get(req_id)
        return ReqContext(req_id) if state is None else state.ctx

    def _new_job(self) -> int:
        job, self._next_job = self._next_job, self._next_job + 1
        return job

    # -- ends ---------------------------------------------------------------------------------

    @in_turn
    def update_connector_output(self, connector_output: KVConnectorOutput) -> None:
        """The workers' report; what has ended is told to the manager."""
        self.plugin_tier.mirror.now = self.clock.monotonic()
        report = connector_output.kv_connector_worker_meta
        if isinstance(report, OffloadingWorkerMetadata):
            self.given_up.report(report)
            self._hold_given_up(connector_output.finished_recving or ())
        super().update_connector_output(connector_output)
        self._complete()

    def _hold_given_up(self, received: Iterable[str]) -> None:
        """The loads of these requests end; what a job that was given up may still write stays out of use."""
        for req_id in sorted(received):
            job = self._load_jobs.get(req_id)
            load = self.load_side.loads.get(req_id) or self.load_side.abandoned.get(req_id)
            if job is not None and job in self.given_up and load is not None:
                blocks = load.transfer.device_blocks
                self.given_up.hold(
                    job, Lease(self.store_side.stores.device, blocks, f"given up load of {req_id}")
                )

    def _complete(self) -> None:
        ended = [event for event in self._open_stores if not self.store_side.table.is_open(event)]
        for event in ended:
            for store in self._open_stores.pop(event):
                if store.job in self.given_up:
                    self.given_up.when_over(store.job, partial(self._complete_store, store, is_late=True))
                else:
                    self._complete_store(store)
        self.plugin_tier.stored.clear()
        for event in [event for event in self._refused if not self.store_side.table.is_open(event)]:
            for transfer, num_refused in self._refused.pop(event):
                if transfer.state is TransferState.DONE:
                    self.store_side.ledger.done -= num_refused
                    self.store_side.ledger.dropped += num_refused
        for req_id in [req_id for req_id in self._open_loads if not self.load_side.owns(req_id)]:
            read = self._open_loads.pop(req_id)
            complete = partial(self.manager.complete_load, read.keys, read.ctx)
            if read.job in self.given_up:
                self.given_up.when_over(read.job, complete)
            else:
                complete()
        for req_id in [req_id for req_id in self._load_jobs if not self.load_side.owns(req_id)]:
            del self._load_jobs[req_id]
        if self._is_flushing:
            self._flushed_stores = set(filter(self.store_side.table.is_open, self._flushed_stores))
            self._flushed_loads = set(filter(self.load_side.owns, self._flushed_loads))
            is_over = not self.given_up.has_before(self._first_since_reset)
            if is_over and not (self._flushed_stores or self._flushed_loads):
                self._is_flushing = False
                self.manager.on_reset_flushed()

    def _complete_store(self, store: Prepared, *, is_late: bool = False) -> None:
        # What is late has read its blocks when they were somebody else's already.
        stored = () if is_late else self.plugin_tier.stored
        for ok in (True, False):
            part = [key for key in store.keys if (key in stored) == ok]
            if part:
                self.manager.complete_store(part, store.ctx, success=ok)
        self.plugin_tier.taken.difference_update(store.keys)

    @in_turn
    def request_finished_all_groups(
        self, request: Request, block_ids: tuple[list[int], ...]
    ) -> tuple[bool, dict[str, object] | None]:
        """The request ended; its last stores leave with the next step."""
        answer = super().request_finished_all_groups(request, block_ids)
        state = self._requests.pop(request.request_id, None)
        self._whole.pop(request.request_id, None)
        if state is not None:
            self._ended[request.request_id] = state
            self.manager.on_request_finished(state.ctx)
        return answer

    @in_turn
    def reset(self) -> bool:
        """Nothing of what is stored is found any more; False if copies were under way."""
        done = super().reset()
        self._flushed_stores |= self._open_stores.keys()
        self._flushed_loads |= self._open_loads.keys()
        self._open_stores.clear()
        self._open_loads.clear()
        self.given_up.forget_calls()
        self._first_since_reset = self._next_job
        self.plugin_tier.taken.clear()
        self.manager.reset_cache()
        self._is_flushing = True
        self._complete()
        for request_id in self._whole:
            # Known again at once: else the next step would store what is full of them.
            if request_id in self.store_side.requests:
                self.store_side.track(self.store_side.requests[request_id])
        is_idle = not (self.given_up.has_load or self.given_up.has_store)
        return done and is_idle and not self.manager.resets_failed

    @in_turn
    def take_events(self) -> Iterable[KVCacheEvent]:
        """What the manager says has come and gone. The tier's own events are of names only."""
        self.tier.take_events()
        events = self.tracker.convert(self.manager.take_events())
        self.tracker.keep_only(self.plugin_tier.taken)
        return events

    @in_turn
    def add_figures(self, stats: SimpleCPUOffloadStats) -> None:
        """Add the manager's own figures since the last call."""
        info = self.manager.config_info()
        labels = [str(info.get(key, "")) for key in self._info_keys]
        stats.set_gauge(SPEC_INFO, 1, (type(self.spec).__name__, *labels))
        try:
            add_figures(stats, self.manager.get_stats() or {}, self._metrics)
        except Exception:  # what a module from outside has handed over
            logger.exception("KV offload: figures of the offloading manager cannot be read")

    @in_turn
    def has_pending_work(self) -> bool:
        """Also what the manager has to do."""
        return super().has_pending_work() or self.manager.has_pending_work()

    def shutdown(self) -> None:
        """End the manager, outside its lock: threads of its own that it waits for may want that. Idempotent."""
        self.manager.shutdown()


def _context(request: Request) -> ReqContext:
    return ReqContext(request.request_id, request.kv_transfer_params, request.kv_hints, request.load_tiers)


__all__ = [
    "GroupOffloadConfig",
    "OffloadingConnectorScheduler",
    "RequestOffloadState",
    "SchedulerOffloadConfig",
]
