"""Turns the state of the offload into the statistics of an interval, and into a description. Layer L4."""

from __future__ import annotations

from vllm.v1.core.kv_cache_view import describe_pool
from vllm.v1.kv_cache_report import TierReport, TransferReport
from vllm.v1.metrics.cache_hit_source import CacheHitSource
from vllm.v1.request import Request
from vllm.v1.simple_kv_offload.disk_tier import DiskChain
from vllm.v1.simple_kv_offload.load_side import LoadSide
from vllm.v1.simple_kv_offload.metadata import Timings
from vllm.v1.simple_kv_offload.metrics import (
    MODE_BELOW_HOST,
    OUTCOME_TO_FIELD,
    MetricName,
    SimpleCPUOffloadStats,
)
from vllm.v1.simple_kv_offload.records import Ledger
from vllm.v1.simple_kv_offload.speed import SpeedCheck
from vllm.v1.simple_kv_offload.store_side import StoreSide
from vllm.v1.simple_kv_offload.tier import Tier


class StatsReporter:
    """Counts lookups, and reports running totals of the parts as increases since the last report.

    ``source``: the tier under the device. ``block_bytes`` are those of one block on all ranks together.
    """

    def __init__(
        self,
        source: CacheHitSource,
        use_page_cache: bool,
        lazy_offload: bool,
        num_blocks: int,
        block_bytes: int = 0,
    ) -> None:
        self._block_bytes = block_bytes
        self._mode = "lazy" if lazy_offload else "eager"
        self.info_labelvalues = (
            "disk" if source is CacheHitSource.DISK else "cpu",
            str(use_page_cache).lower(),
            str(lazy_offload).lower(),
            str(num_blocks),
        )
        self._source = source
        self._lookup_tokens = 0
        self._resumed_tokens = 0
        self._accepted_tokens = {self._source: 0}
        self._last_accepted: tuple[str, dict[CacheHitSource, int]] = ("", {})
        self._timings = Timings()
        self._reported: dict[tuple[str, tuple[str, ...]], float] = {}
        self._state: list[float] = []

    def looked_up(self, num_tokens: int, *, is_resumed: bool = False) -> None:
        """A request asked for so many tokens; one that goes on after a preemption says nothing about reuse."""
        if not is_resumed:
            self._lookup_tokens += num_tokens

    def accepted(self, request: Request, by_tier: dict[CacheHitSource, int]) -> None:
        """The request takes so many promised tokens from each tier."""
        self._last_accepted = (request.request_id, by_tier)
        if request.num_preemptions:
            self._resumed_tokens += sum(by_tier.values())
            return
        for tier, tokens in by_tier.items():
            self._accepted_tokens[tier] = self._accepted_tokens.get(tier, 0) + tokens

    def accepted_by_tier(self, request_id: str) -> dict[CacheHitSource, int]:
        """What the request, the last one that took anything, took from which tier; empty for any other."""
        last_id, by_tier = self._last_accepted
        return {tier: tokens for tier, tokens in by_tier.items() if tokens} if last_id == request_id else {}

    def timed(self, timings: Timings) -> None:
        """What the workers measured."""
        self._timings = self._timings.plus(timings)

    def report(
        self, tier: Tier, stores: StoreSide, loads: LoadSide, speed: SpeedCheck, chain: DiskChain | None
    ) -> SimpleCPUOffloadStats:
        """Figures since the last call."""
        stats = SimpleCPUOffloadStats()
        self._report_host(stats, tier, stores, loads)
        self._report_speed(stats, speed)
        if chain is not None:
            self._report_disk(stats, chain)
        return stats

    def has_news(
        self, tier: Tier, stores: StoreSide, loads: LoadSide, speed: SpeedCheck, chain: DiskChain | None
    ) -> bool:
        """Whether anything that `report` tells is different from when this was asked last.

        Asked in every step, and in most of them nothing is: this must cost next to nothing.
        """
        ledger, given, boundary, declines = (
            stores.ledger,
            loads.ledger,
            stores.boundary.stats,
            stores.declines,
        )
        state: list[float] = [
            *(ledger.scheduled, ledger.done, ledger.failed, ledger.dropped),
            *(given.done, given.failed, loads.num_loads, loads.failures, self._lookup_tokens),
            *(
                boundary.published,
                boundary.stored,
                boundary.skipped_already_cached,
                boundary.skipped_in_flight,
            ),
            *(boundary.dropped_cpu_full, boundary.dropped_request_gone, boundary.dropped_null_block),
            *(boundary.dropped_not_hashed, declines.reuse, declines.queue, declines.full, declines.cut_plans),
            *(stores.num_preempted_blocks, tier.evictions, tier.num_held),
            len(tier.pool.cached_block_hash_to_block),
            speed.prefill.samples,
            self._resumed_tokens,
        ]
        state += self._accepted_tokens.values()
        for source, rate in speed.loads.items():
            state += (rate.samples, speed.declines[source], speed.is_slow[source])
        if tier.shared is not None:
            state.append(tier.shared.is_off)
        if chain is not None:
            counts, down, up = chain.counts, chain.down.ledger, chain.up.ledger
            state += (counts.waits, counts.timeouts, counts.failed_reads, counts.bad_blocks, chain.writes_off)
            state += (down.done, down.failed, down.dropped, up.done, up.failed, up.dropped)
            state += (chain.disk.evictions, chain.disk.num_held)
            state.append(len(chain.disk.pool.cached_block_hash_to_block))
        before, self._state = self._state, state
        return state != before

    def _report_host(
        self, stats: SimpleCPUOffloadStats, tier: Tier, stores: StoreSide, loads: LoadSide
    ) -> None:
        boundary = vars(stores.boundary.stats)
        for outcome, field in OUTCOME_TO_FIELD.items():
            self._add(stats, MetricName.SAVE_OUTCOMES, boundary[field], (outcome,))
        ledger = stores.ledger
        for result, total in (
            ("stored", ledger.done),
            ("failed", ledger.failed),
            ("dropped", ledger.dropped),
        ):
            self._add(stats, MetricName.STORE_BLOCKS, total, (result,))
        self._add(stats, MetricName.LOAD_BLOCKS, loads.blocks_loaded)
        self._add(stats, MetricName.LOAD_FAILURES, loads.failures)
        self._add(stats, MetricName.LOOKUP_TOKENS, self._lookup_tokens)
        self._add(stats, MetricName.RESUMED_HIT_TOKENS, self._resumed_tokens)
        declines = stores.declines
        for reason, total in (
            ("reuse", declines.reuse),
            ("queue", declines.queue),
            ("full", declines.full),
        ):
            self._add(stats, MetricName.DECLINED_STORE_BLOCKS, total, (reason,))
        self._add(stats, MetricName.CUT_STORE_PLANS, declines.cut_plans)
        self._add(stats, MetricName.PREEMPTED_STORE_BLOCKS, stores.num_preempted_blocks)
        self._report_tier(stats, self._source, loads.num_loads, (ledger, loads.ledger))
        for source, tokens in self._accepted_tokens.items():
            self._add(stats, MetricName.ACCEPTED_TOKENS, tokens, (source.value,))
        self._add(stats, MetricName.EVICTED_BLOCKS, tier.evictions)
        stats.set_gauge(MetricName.USED_BLOCKS, tier.num_held)
        stats.set_gauge(MetricName.PENDING_STORE_BLOCKS, stores.num_pending_blocks)
        stats.set_gauge(MetricName.CACHED_ENTRIES, len(tier.pool.cached_block_hash_to_block))
        stats.set_gauge(MetricName.INFO, 1, self.info_labelvalues)
        if tier.shared is not None:
            stats.set_gauge(MetricName.SHARED_POOL_ACTIVE, int(not tier.shared.is_off))

    def _report_speed(self, stats: SimpleCPUOffloadStats, speed: SpeedCheck) -> None:
        """Add what is known of the tiers whose speed is watched."""
        for source, rate in speed.loads.items():
            self._add(stats, MetricName.TIER_DECLINED_HITS, speed.declines[source], (source.value,))
            stats.set_gauge(MetricName.TIER_SLOW, int(speed.is_slow[source]), (source.value,))
            if rate.samples:
                stats.set_gauge(MetricName.TIER_LOAD_SECONDS, rate.value, (source.value,))
        if speed.prefill.samples:
            stats.set_gauge(MetricName.PREFILL_SECONDS, speed.prefill.value)

    def _report_tier(
        self, stats: SimpleCPUOffloadStats, source: CacheHitSource, waits: int, ledgers: tuple[Ledger, Ledger]
    ) -> None:
        """What one tier did; ``ledgers`` of what it took in and of what it gave towards the device."""
        tier = source.value
        self._add(stats, MetricName.ACCEPTED_TOKENS, self._accepted_tokens.get(source, 0), (tier,))
        self._add(stats, MetricName.TIER_WAITS, waits, (tier,))
        times = self._timings
        if source is self._source:
            seconds = (times.store_seconds, times.load_seconds)
        else:
            seconds = (times.disk_store_seconds, times.disk_seconds)
        for direction, ledger, took in zip(("store", "load"), ledgers, seconds, strict=True):
            labels = (tier, direction)
            self._add(stats, MetricName.TIER_SECONDS, took, labels)
            self._add(stats, MetricName.TIER_BYTES, ledger.done * self._block_bytes, labels)
            self._add(stats, MetricName.TIER_FAILED_BLOCKS, ledger.failed, labels)

    def _report_disk(self, stats: SimpleCPUOffloadStats, chain: DiskChain) -> None:
        """Add the figures of the disk below the tier."""
        for direction, moves in (("down", chain.down), ("up", chain.up)):
            ledger = moves.ledger
            for result, total in (
                ("done", ledger.done),
                ("failed", ledger.failed),
                ("dropped", ledger.dropped),
            ):
                self._add(stats, MetricName.DISK_MOVED_BLOCKS, total, (direction, result))
        counts = chain.counts
        self._report_tier(stats, CacheHitSource.DISK, counts.waits, (chain.down.ledger, chain.up.ledger))
        for fault, total in (
            ("timeout", counts.timeouts),
            ("read", counts.failed_reads),
            ("bad_block", counts.bad_blocks),
        ):
            self._add(stats, MetricName.DISK_FAULTS, total, (fault,))
        self._add(stats, MetricName.DISK_EVICTED_BLOCKS, chain.disk.evictions)
        stats.set_gauge(MetricName.DISK_USED_BLOCKS, chain.disk.num_held)
        stats.set_gauge(MetricName.DISK_CACHED_ENTRIES, len(chain.disk.pool.cached_block_hash_to_block))
        stats.set_gauge(MetricName.DISK_ACTIVE, 0 if chain.writes_off else 1)

    def describe_disk(self, chain: DiskChain) -> TierReport:
        """The disk and the moves to and from it since the start; changes nothing. O(1)."""
        source = CacheHitSource.DISK
        return TierReport(
            pool=describe_pool(chain.disk.pool, source, self._block_bytes),
            mode=MODE_BELOW_HOST,
            pending_store_blocks=chain.down.ledger.in_flight,
            transfers=(
                self._transfer_report(source, "store", chain.down.ledger),
                self._transfer_report(source, "load", chain.up.ledger),
            ),
        )

    def describe(self, tier: Tier, stores: StoreSide, loads: LoadSide, source: CacheHitSource) -> TierReport:
        """The tier and its transfers since the start; changes nothing. O(1), and what other engines have changed."""
        with tier.turn:
            pool = describe_pool(tier.pool, source, self._block_bytes)
        return TierReport(
            pool=pool,
            mode=self._mode,
            pending_store_blocks=stores.ledger.in_flight,
            transfers=(
                self._transfer_report(source, "store", stores.ledger),
                self._transfer_report(source, "load", loads.ledger),
            ),
        )

    def _transfer_report(self, tier: CacheHitSource, direction: str, ledger: Ledger) -> TransferReport:
        return TransferReport(
            tier=tier,
            direction=direction,
            blocks_scheduled=ledger.scheduled,
            blocks_in_flight=ledger.in_flight,
            blocks_done=ledger.done,
            blocks_failed=ledger.failed,
            blocks_dropped=ledger.dropped,
            bytes_done=ledger.done * self._block_bytes,
        )

    def _add(
        self, stats: SimpleCPUOffloadStats, name: str, total: float, labels: tuple[str, ...] = ()
    ) -> None:
        key = (name, labels)
        stats.increase_counter(name, total - self._reported.get(key, 0), labels)
        self._reported[key] = total
