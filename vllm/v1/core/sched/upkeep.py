"""What keeps the scheduler clean between passes: resets, events, statistics, views, drafts and token masks.

Owns the result of the last reset.  Must not decide who is scheduled.  Layer: L5 (scheduler).
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable
from dataclasses import asdict, dataclass, replace
from itertools import chain
from typing import Any, cast

from vllm.distributed.kv_event_types import AnyKVCacheEvent, KVCacheEvent, KVEventBatch
from vllm.logger import init_logger
from vllm.v1.core.sched.admission import LookupContext, peek
from vllm.v1.core.sched.cache_report import build_report, resets_by_tier, tier_pools
from vllm.v1.core.sched.connector_calls import load_source, tier_reports, tiers_below
from vllm.v1.core.sched.lifecycle import RequestLifecycle
from vllm.v1.core.sched.output import GrammarOutput, SchedulerOutput
from vllm.v1.kv_cache_report import CacheLookup, KVCacheReport, RequestsReport, TierReset
from vllm.v1.metrics.cache_hit_source import CacheHitSource
from vllm.v1.metrics.stats import KVEventStats, PrefixCacheStats, SchedulerStats, SpecDecodingStats
from vllm.v1.outputs import DraftTokenIds
from vllm.v1.request import Request, RequestStatus

logger = init_logger(__name__)


@dataclass(frozen=True, slots=True)
class ResetReport:
    """What a reset of the prefix cache did.

    Whatever ``success`` says, no entry from before the reset can be hit any more.  ``connector_reset`` is None where
    the connector was not asked.
    """

    success: bool
    connector_reset: bool | None
    blocks_held: int
    """Device blocks that requests or transfers still hold; they are recycled when those end."""
    requests_running: int
    requests_waiting_with_blocks: int
    reason: str
    """Empty on success, else what kept the reset from being complete."""
    tiers: tuple[TierReset, ...] = ()
    """What became of each tier, from the device outwards."""


class Upkeep(RequestLifecycle):
    """Resets, events, statistics, drafts and masks."""

    last_reset: ResetReport | None = None
    """The report of the last :meth:`reset_prefix_cache`."""
    _spec_stats: SpecDecodingStats | None = None

    # --- reset ------------------------------------------------------------------------------------------------------

    def reset_prefix_cache(self, reset_running_requests: bool = False, reset_connector: bool = False) -> bool:
        """Make every cached entry unreachable on the device, and beyond it with ``reset_connector``.

        The connector comes first: its transfers hold device blocks.  ``reset_running_requests`` makes all running
        requests start again from nothing; otherwise they go on, and what they compute from now on is cached again.
        Loads under way bring old entries, so where either is asked for their requests start again when they end.  True if afterwards also
        all memory is free; :attr:`last_reset` tells the rest.
        """
        if not reset_connector:
            return self._reset((CacheHitSource.DEVICE,), reset_running_requests, None)
        return self._reset(
            self.cache_tiers, reset_running_requests, self.reset_connector_cache, voids_loads=True
        )

    def reset_tiers(self, tiers: Collection[CacheHitSource], reset_running_requests: bool = False) -> bool:
        """As :meth:`reset_prefix_cache` for these of :attr:`cache_tiers` alone; what the others hold stays findable.

        Requests whose loads under way read one of them start again when those end.
        """
        connector = self.connector
        below = [tier for tier in self.cache_tiers if tier in tiers and tier is not CacheHitSource.DEVICE]
        if connector is None or not below:
            return self._reset(tiers, reset_running_requests, None)
        return self._reset(tiers, reset_running_requests, lambda: connector.reset_tiers(below) is not False)

    @property
    def cache_tiers(self) -> tuple[CacheHitSource, ...]:
        told = {report.pool.tier for report in tier_reports(self.connector)}
        there = {CacheHitSource.DEVICE, *tiers_below(self.connector), *told}
        return tuple(tier for tier in CacheHitSource if tier in there)

    def _reset(
        self,
        tiers: Collection[CacheHitSource],
        reset_running_requests: bool,
        reset_connector: Callable[[], bool] | None,
        *,
        voids_loads: bool = False,
    ) -> bool:
        before = tier_pools(self.kv_cache_manager, self.connector)
        connector_reset = None if reset_connector is None else reset_connector()
        if reset_running_requests:
            self._preempt_everything()
        self._void_loads(tiers, all_of_them=reset_running_requests or voids_loads)
        pool = self.kv_cache_manager.block_pool
        blocks_held = pool.num_gpu_blocks - 1 - pool.get_num_free_blocks()
        device_reset = self._reset_device(blocks_held) if CacheHitSource.DEVICE in tiers else None
        after = tier_pools(self.kv_cache_manager, self.connector)
        uncounted = dict.fromkeys(self.cache_tiers, connector_reset is not False)
        self.last_reset = replace(
            self._report_reset(device_reset, connector_reset, blocks_held),
            tiers=resets_by_tier(before, after, tiers, uncounted),
        )
        self.flush_events()
        return self.last_reset.success

    def _void_loads(self, tiers: Collection[CacheHitSource], *, all_of_them: bool) -> None:
        """Loads under way that bring what was in an emptied tier are of no use: their requests start again."""
        loading = self._remote.loading
        if not all_of_them and (connector := self.connector) is not None:
            loading = {
                i: request for i, request in loading.items() if load_source(connector, request) in tiers
            }
        self._remote.unwanted.update(loading)

    def _reset_device(self, blocks_held: int) -> bool:
        # The public call clears only an unused pool; otherwise the index is dropped at once and memory follows later.
        if blocks_held == 0:
            return self.kv_cache_manager.reset_prefix_cache()
        self.kv_cache_manager.block_pool.invalidate_prefix_cache()
        logger.warning("Prefix cache entries dropped, but %d blocks are still held", blocks_held)
        return False

    def _preempt_everything(self) -> None:
        """Restart all requests that hold blocks; from the last one on, so that the waiting front keeps their order."""
        timestamp = self.clock.monotonic()
        for request in reversed(self.running.copy()):
            self._preempt_request(request, timestamp, drop_stale=True)
        for request in reversed(list(self.kv_holding_waiting)):
            if request.status in (RequestStatus.WAITING, RequestStatus.PREEMPTED):
                self._release_holder(request)
            elif request.status is RequestStatus.WAITING_FOR_STREAMING_REQ:
                self._start_over(request)

    def _report_reset(
        self, device_reset: bool | None, connector_reset: bool | None, blocks_held: int
    ) -> ResetReport:
        reasons = []
        if connector_reset is False:
            reasons.append("the connector still has transfers under way or could not reset its cache")
        if device_reset is False:
            reasons.append(f"{blocks_held} device blocks are held by requests or transfers")
        return ResetReport(
            success=not reasons,
            connector_reset=connector_reset,
            blocks_held=blocks_held,
            requests_running=len(self.running),
            requests_waiting_with_blocks=len(self.kv_holding_waiting),
            reason="; ".join(reasons),
        )

    def reset_connector_cache(self) -> bool:
        """Drop what the connector has cached.  True without a connector, False only where it says that it failed."""
        if self.connector is None:
            return True
        return self.connector.reset_cache() is not False

    def reset_encoder_cache(self) -> None:
        return

    @property
    def reset_prefix_cache_report(self) -> dict[str, Any] | None:  # plain values, merged into a reply
        report = self.last_reset
        if report is None:
            return None
        return {
            "success": report.success,
            "reason": report.reason,
            "held_blocks": report.blocks_held,
            "connector_reset": report.connector_reset,
            "requests_running": report.requests_running,
            "requests_waiting_with_blocks": report.requests_waiting_with_blocks,
            "tiers": [asdict(tier) for tier in report.tiers],
        }

    # --- events -----------------------------------------------------------------------------------------------------

    def flush_events(self) -> None:
        """Publish the KV events that have come up, and what is cached now to who asked for it; also when idle."""
        events: list[KVCacheEvent] = list(self.kv_cache_manager.take_events())
        if self.connector is not None:
            events.extend(self.connector.take_events())
        if events:
            self.kv_event_publisher.publish(self._event_batch(events))
        if self.kv_event_publisher.wants_snapshot:
            self.kv_event_publisher.publish_snapshot(self._event_batch(self.present_events()))

    def present_events(self) -> list[KVCacheEvent]:
        """What events have told so far and is true still, of all tiers of this engine, as one BlockStored per run."""
        below = () if self.connector is None else self.connector.present_events()
        return [*self.kv_cache_manager.present_events(), *below]

    def _event_batch(self, events: list[KVCacheEvent]) -> KVEventBatch:
        return KVEventBatch(ts=self.clock.time(), events=cast("list[AnyKVCacheEvent]", events))

    def wake_for_events(self, wake: Callable[[], None]) -> None:
        self.kv_event_publisher.wake_core = wake

    def shutdown(self) -> None:
        self.flush_events()
        self.kv_event_publisher.shutdown()
        if self.connector is not None:
            self.connector.shutdown()

    # --- statistics -------------------------------------------------------------------------------------------------

    def get_kv_cache_usage(self) -> float:
        return self.kv_cache_manager.usage

    def make_stats(self) -> SchedulerStats | None:
        """Counters since the last call and the present state; None (and nothing is computed) without ``log_stats``."""
        if not self.log_stats:
            return None
        num_running, num_waiting = self.get_request_counts()
        collector = self.kv_cache_manager.metrics_collector
        connector_stats = self.connector_prefix_cache_stats
        if connector_stats is not None:
            self.connector_prefix_cache_stats = PrefixCacheStats()
        spec_stats, self._spec_stats = self._spec_stats, None
        placer = self.kv_cache_manager.block_pool.placer
        num_refused = 0 if placer is None else placer.num_refused
        stats = SchedulerStats(
            num_running_reqs=num_running,
            num_waiting_reqs=num_waiting,
            num_skipped_waiting_reqs=len(self.deferred_waiting),
            num_kv_fetch_reqs_by_stage=dict(self._remote.counts),
            kv_cache_usage=self.kv_cache_manager.usage,
            prefix_cache_stats=self.kv_cache_manager.make_prefix_cache_stats() or PrefixCacheStats(),
            connector_prefix_cache_stats=connector_stats,
            kv_cache_eviction_events=[] if collector is None else collector.drain_events(),
            spec_decoding_stats=spec_stats,
            waiting_lora_adapters=self._count_adapters(self.waiting, self.deferred_waiting),
            running_lora_adapters=self._count_adapters(self.running),
            num_corrupted_reqs=self._num_corrupted,
            num_preempted_reqs=self._num_preempted,
            num_stalled_reqs=self._num_stalled,
            num_protected_contents=0 if placer is None else placer.num_protected,
            num_protections_refused=num_refused - self._num_refused_told,
            kv_event_stats=self._event_stats(),
        )
        self._num_refused_told = num_refused
        self._num_corrupted = self._num_preempted = self._num_stalled = 0
        return stats

    def _event_stats(self) -> KVEventStats | None:
        """What the publisher has done since the last call."""
        publisher = self.kv_event_publisher
        if publisher.get_publisher_config() is None:
            return None
        now, told = publisher.get_counters(), self._event_counters
        self._event_counters = now
        return KVEventStats(
            batches_sent=now.batches_sent - told.batches_sent,
            batches_dropped=now.batches_dropped - told.batches_dropped,
            replay_requests=now.replay_requests - told.replay_requests,
            events_by_type={
                kind: count - told.events_sent.get(kind, 0) for kind, count in now.events_sent.items()
            },
            queue_depth=now.queue_depth,
        )

    # --- views ------------------------------------------------------------------------------------------------------

    def peek_kv_cache(self, request: Request) -> CacheLookup:
        manager, cache = self.kv_cache_manager, self.params.cache
        return peek(request, LookupContext(manager, self.connector, self.block_size, cache))

    def get_kv_cache_report(self) -> KVCacheReport:
        running, waiting = self.get_request_counts()
        return build_report(
            self.kv_cache_manager,
            self.connector,
            self.cache_use,
            RequestsReport(running, waiting, len(self._remote.loading), self.cache_use.requests),
            self.block_size,
            self.vllm_config.parallel_config.world_size,
        )

    def _count_adapters(self, *queues: Iterable[Request]) -> dict[str, int]:
        counts: dict[str, int] = {}
        if self.params.max_loras == 0:
            return counts  # every step asks, and a queue may be long
        for request in chain(*queues):
            if request.lora_request is not None:
                name = request.lora_request.lora_name
                counts[name] = counts.get(name, 0) + 1
        return counts

    # --- drafts and token masks -------------------------------------------------------------------------------------

    def get_grammar_bitmask(self, scheduler_output: SchedulerOutput) -> GrammarOutput | None:
        if not scheduler_output.has_structured_output_requests:
            return None
        partial = self._in_flight.partial_prefills(scheduler_output)
        sampled = [
            request
            for request_id in scheduler_output.num_scheduled_tokens
            if request_id not in partial and (request := self.requests.get(request_id)) is not None
        ]
        return self.structured_output_manager.grammar_bitmask(
            sampled, scheduler_output.scheduled_spec_decode_tokens
        )

    def update_draft_token_ids(self, draft_token_ids: DraftTokenIds) -> None:
        for request_id, drafts in zip(draft_token_ids.req_ids, draft_token_ids.draft_token_ids, strict=True):
            request = self.requests.get(request_id)
            if request is None or request.is_finished() or request.status is not RequestStatus.RUNNING:
                continue
            if request.is_prefill_chunk or request.num_in_flight_tokens:
                # Part of the prompt is still to be computed, or the request has started again since they were made:
                # drafts for what follows something else are void.
                request.spec_token_ids = []
                continue
            request.spec_token_ids = self.structured_output_manager.allowed_drafts(request, drafts)

    def update_draft_token_ids_in_output(
        self, draft_token_ids: DraftTokenIds, scheduler_output: SchedulerOutput
    ) -> None:
        """Refused drafts stay in the step as −1, so that its shape does not change."""
        invalid: dict[str, int] = {}
        scheduled = scheduler_output.scheduled_spec_decode_tokens
        for request_id, drafts in zip(draft_token_ids.req_ids, draft_token_ids.draft_token_ids, strict=True):
            request = self.requests.get(request_id)
            placeholders = scheduled.get(request_id)
            if request is None or placeholders is None:
                continue
            allowed = self.structured_output_manager.allowed_drafts(request, drafts[: len(placeholders)])
            missing = len(placeholders) - len(allowed)
            scheduled[request_id] = allowed + [-1] * missing
            if missing:
                invalid[request_id] = missing
        scheduler_output.num_invalid_spec_tokens = invalid or None


__all__ = ["ResetReport", "Upkeep"]
