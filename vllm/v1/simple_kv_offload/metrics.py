"""Figures of the offload as data, and their sink.

Owns metric names, label names and the payload's layout. It must not import a metrics library. Layer L4.
"""

from __future__ import annotations

import operator
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

from vllm.config import VllmConfig
from vllm.distributed.kv_transfer.kv_connector.v1.prom_metrics import KVConnectorPromMetrics
from vllm.v1.kv_connector_types import KVConnectorStats
from vllm.v1.metrics.cache_hit_source import CacheHitSource

MODE_BELOW_HOST = "below host"
"""Of a disk that takes what leaves host memory; see `TierReport`."""
# Label values of a metric, in the order of its own label names.
Labels = tuple[str, ...]


class MetricName:
    """Names as they appear on the metrics page."""

    SAVE_OUTCOMES = "vllm:simple_kv_offload_save_outcomes_total"
    LOAD_BLOCKS = "vllm:simple_kv_offload_load_blocks_total"
    USED_BLOCKS = "vllm:simple_kv_offload_used_blocks"
    PENDING_STORE_BLOCKS = "vllm:simple_kv_offload_pending_store_blocks"
    INFO = "vllm:simple_kv_offload_info"
    LOOKUP_TOKENS = "vllm:simple_kv_offload_lookup_tokens_total"
    RESUMED_HIT_TOKENS = "vllm:simple_kv_offload_resumed_hit_tokens_total"
    HIT_TOKENS = "vllm:simple_kv_offload_hit_tokens_total"
    ACCEPTED_TOKENS = "vllm:simple_kv_offload_accepted_tokens_total"
    STORE_BLOCKS = "vllm:simple_kv_offload_store_blocks_total"
    LOAD_FAILURES = "vllm:simple_kv_offload_load_failures_total"
    EVICTED_BLOCKS = "vllm:simple_kv_offload_evicted_blocks_total"
    CACHED_ENTRIES = "vllm:simple_kv_offload_cached_entries"
    DISK_MOVED_BLOCKS = "vllm:simple_kv_offload_disk_moved_blocks_total"
    DISK_CACHED_ENTRIES = "vllm:simple_kv_offload_disk_cached_entries"
    DISK_USED_BLOCKS = "vllm:simple_kv_offload_disk_used_blocks"
    DISK_EVICTED_BLOCKS = "vllm:simple_kv_offload_disk_evicted_blocks_total"
    DISK_FAULTS = "vllm:simple_kv_offload_disk_faults_total"
    DISK_ACTIVE = "vllm:simple_kv_offload_disk_active"
    SHARED_POOL_ACTIVE = "vllm:simple_kv_offload_shared_pool_active"
    TIER_HIT_TOKENS = "vllm:simple_kv_offload_tier_hit_tokens_total"
    TIER_BYTES = "vllm:simple_kv_offload_tier_bytes_total"
    TIER_SECONDS = "vllm:simple_kv_offload_tier_seconds_total"
    TIER_WAITS = "vllm:simple_kv_offload_tier_waits_total"
    TIER_FAILED_BLOCKS = "vllm:simple_kv_offload_tier_failed_blocks_total"
    TIER_DECLINED_HITS = "vllm:simple_kv_offload_tier_declined_hits_total"
    TIER_SLOW = "vllm:simple_kv_offload_tier_slow"
    TIER_LOAD_SECONDS = "vllm:simple_kv_offload_tier_load_seconds_per_block"
    PREFILL_SECONDS = "vllm:simple_kv_offload_prefill_seconds_per_token"
    DECLINED_STORE_BLOCKS = "vllm:simple_kv_offload_declined_store_blocks_total"
    PREEMPTED_STORE_BLOCKS = "vllm:simple_kv_offload_preempted_store_blocks_total"
    CUT_STORE_PLANS = "vllm:simple_kv_offload_cut_store_plans_total"


SAVE_OUTCOMES = (
    "stored",
    "dropped_cpu_full",
    "dropped_request_gone",
    "skipped_already_cached",
    "skipped_in_flight",
    "dropped_null_block",
    "dropped_not_hashed",
)
# Outcome label → field of BoundaryStoreStats.
OUTCOME_TO_FIELD = {outcome: outcome for outcome in SAVE_OUTCOMES}
INFO_LABELS = ["backend", "page_cache", "lazy_offload", "capacity_blocks"]

Definition = tuple[str, str, list[str], str]
"""Name, library class, own labels, documentation."""

DEFINITIONS: tuple[Definition, ...] = (
    (MetricName.SAVE_OUTCOMES, "Counter", ["outcome"], "State hand-offs by what became of them."),
    (MetricName.LOAD_BLOCKS, "Counter", [], "Blocks loaded into device memory."),
    (
        MetricName.USED_BLOCKS,
        "Gauge",
        [],
        "Slots held by transfers and promises, of all engines of a shared pool, and the null slot.",
    ),
    (MetricName.PENDING_STORE_BLOCKS, "Gauge", [], "Blocks whose store is planned or under way."),
    (MetricName.INFO, "Gauge", INFO_LABELS, "Always 1; the labels describe the tier."),
    (MetricName.LOOKUP_TOKENS, "Counter", [], "Tokens looked up behind the device's prefix."),
    (MetricName.HIT_TOKENS, "Counter", [], "Cached tokens of these tiers, as requests report them."),
    (
        MetricName.ACCEPTED_TOKENS,
        "Counter",
        ["tier"],
        "Tokens ordered from the tier, for every sample, also by loads that fail or are of no use any more.",
    ),
    (
        MetricName.RESUMED_HIT_TOKENS,
        "Counter",
        [],
        "Tokens ordered for requests that go on after a preemption; no other figure of hits or orders has them.",
    ),
    (MetricName.STORE_BLOCKS, "Counter", ["result"], "Ended block stores: stored, failed or dropped."),
    (MetricName.LOAD_FAILURES, "Counter", [], "Requests whose load failed."),
    (MetricName.EVICTED_BLOCKS, "Counter", [], "Cached slots taken for new content."),
    (MetricName.CACHED_ENTRIES, "Gauge", [], "Hashes that can be found in the tier."),
    (
        MetricName.DISK_MOVED_BLOCKS,
        "Counter",
        ["direction", "result"],
        "Ended moves between host memory and the disk below it: done, failed or dropped.",
    ),
    (MetricName.DISK_CACHED_ENTRIES, "Gauge", [], "Hashes that can be found on the disk below host memory."),
    (MetricName.DISK_USED_BLOCKS, "Gauge", [], "Disk slots held by moves, and the null slot."),
    (MetricName.DISK_EVICTED_BLOCKS, "Counter", [], "Cached disk slots taken for new content."),
    (
        MetricName.DISK_FAULTS,
        "Counter",
        ["fault"],
        "Requests that waited for the disk in vain (timeout), failed reads (read), slots with wrong bytes (bad_block).",
    ),
    (
        MetricName.DISK_ACTIVE,
        "Gauge",
        [],
        "1 while blocks are written to the disk tier, 0 once it is switched off.",
    ),
    (
        MetricName.SHARED_POOL_ACTIVE,
        "Gauge",
        [],
        "1 while the pool shared with other engines is used, 0 once this engine goes on without it.",
    ),
    (
        MetricName.TIER_HIT_TOKENS,
        "Counter",
        ["tier"],
        "Cached tokens, as requests report them, by the tier that had them.",
    ),
    (
        MetricName.TIER_BYTES,
        "Counter",
        ["tier", "direction"],
        "Bytes stored in a tier and loaded from it, over all ranks.",
    ),
    (
        MetricName.TIER_SECONDS,
        "Counter",
        ["tier", "direction"],
        "Seconds that copies into a tier and out of it took, added up over copies and ranks.",
    ),
    (MetricName.TIER_WAITS, "Counter", ["tier"], "Requests that waited for blocks of the tier."),
    (
        MetricName.TIER_FAILED_BLOCKS,
        "Counter",
        ["tier", "direction"],
        "Blocks whose copy to or from the tier failed.",
    ),
    (MetricName.TIER_DECLINED_HITS, "Counter", ["tier"], "Hits not used because computing is faster."),
    (
        MetricName.TIER_SLOW,
        "Gauge",
        ["tier"],
        "1 if the last hit in the tier was slower to load than to compute.",
    ),
    (
        MetricName.TIER_LOAD_SECONDS,
        "Gauge",
        ["tier"],
        "Running mean of the seconds that a block takes towards the device.",
    ),
    (
        MetricName.PREFILL_SECONDS,
        "Gauge",
        [],
        "Running mean of the seconds that a prompt token takes to compute.",
    ),
    (
        MetricName.DECLINED_STORE_BLOCKS,
        "Counter",
        ["reason"],
        "Blocks left without a copy: offered too seldom (reuse), too many stores under way (queue), no slot (full).",
    ),
    (
        MetricName.PREEMPTED_STORE_BLOCKS,
        "Counter",
        [],
        "Blocks of preempted requests that were stored first.",
    ),
    (MetricName.CUT_STORE_PLANS, "Counter", [], "Store plans cut short by the bound on stores under way."),
)


class SimpleCPUOffloadStats(KVConnectorStats):
    """Counters, gauges and observations of one interval.

    ``data`` is empty, or ``{"types": {name: "counter" | "gauge" | "histogram"}, "data": {name: {labels: value}}}``;
    the value of a histogram is the list of what was observed.
    """

    def increase_counter(self, name: str, value: float = 1, labelvalues: Labels = ()) -> None:
        """Add to a counter; adding 0 makes it visible."""
        values = self._values(name, "counter")
        values[tuple(labelvalues)] = values.get(tuple(labelvalues), 0) + value

    def set_gauge(self, name: str, value: float, labelvalues: Labels = ()) -> None:
        """Set a gauge."""
        self._values(name, "gauge")[tuple(labelvalues)] = value

    def observe(self, name: str, values: Iterable[float], labelvalues: Labels = ()) -> None:
        """Add observations to a histogram."""
        self._values(name, "histogram").setdefault(tuple(labelvalues), []).extend(values)

    def aggregate(self, other: KVConnectorStats) -> KVConnectorStats:
        """Add the counters of ``other``, take over its gauges, and return self."""
        if other.is_empty():
            return self
        types: dict[str, str] = other.data["types"]
        for name, values in other.data["data"].items():
            for labels, value in values.items():
                # A payload that crossed processes may carry its labels as lists.
                _ADDERS[types[name]](self, name, value, tuple(labels))
        return self

    def levels(self) -> SimpleCPUOffloadStats | None:
        types, values = self.data.get("types", {}), self.data.get("data", {})
        gauges = {name: kind for name, kind in types.items() if kind == "gauge"}
        return type(self)({"types": gauges, "data": {name: dict(values[name]) for name in gauges}})

    def add_levels(self, levels: KVConnectorStats) -> None:
        """Counts are added up; of what is on or off, off is told; else the highest value."""
        own: dict[str, dict[Labels, Any]] = self.data.get("data", {})
        for name, values in levels.data["data"].items():
            if name not in own:
                continue  # a name of the other connector only
            for labels, value in values.items():
                present = own[name].get(labels)
                own[name][labels] = value if present is None else _JOINED.get(name, max)(present, value)

    def reduce(self) -> dict[str, int | float]:
        """Figures by short name, labels appended; the constant info is left out, of a histogram there is the sum."""
        flat: dict[str, int | float] = {}
        for name, values in self.data.get("data", {}).items():
            if name == MetricName.INFO:
                continue
            short = name.removeprefix("vllm:simple_kv_offload_")
            for labels, value in values.items():
                flat[".".join([short, *labels])] = sum(value) if isinstance(value, list) else value
        return flat

    # Numbers, or lists of them.
    def _values(self, name: str, kind: str) -> dict[Labels, Any]:
        self.data.setdefault("types", {})[name] = kind
        values: dict[Labels, Any] = self.data.setdefault("data", {}).setdefault(name, {})
        return values


_ADDERS: dict[str, Callable[[SimpleCPUOffloadStats, str, Any, Labels], None]] = {
    "counter": SimpleCPUOffloadStats.increase_counter,
    "gauge": SimpleCPUOffloadStats.set_gauge,
    "histogram": SimpleCPUOffloadStats.observe,
}


# How the gauges of two connectors become one, where that is not the higher of them.
_JOINED: dict[str, Callable[[float, float], float]] = {
    **dict.fromkeys(
        (
            MetricName.USED_BLOCKS,
            MetricName.PENDING_STORE_BLOCKS,
            MetricName.CACHED_ENTRIES,
            MetricName.DISK_USED_BLOCKS,
            MetricName.DISK_CACHED_ENTRIES,
        ),
        operator.add,
    ),
    **dict.fromkeys((MetricName.DISK_ACTIVE, MetricName.SHARED_POOL_ACTIVE), min),
}


class SimpleCPUOffloadPromMetrics(KVConnectorPromMetrics):
    """One metric per name, one child per engine and label values, made when first seen."""

    definitions: tuple[Definition, ...] = DEFINITIONS
    buckets: Mapping[str, Sequence[float]] = {}
    """Of the histograms, by name."""
    hit_tiers = frozenset({CacheHitSource.HOST, CacheHitSource.DISK})

    # Metric classes and their instances belong to the metrics library, hence opaque.
    def __init__(
        self,
        vllm_config: VllmConfig,
        metric_types: Mapping[Any, Any],
        labelnames: list[str],
        per_engine_labelvalues: dict[int, list[object]],
    ) -> None:
        super().__init__(vllm_config, metric_types, labelnames, per_engine_labelvalues)
        self._defs: dict[str, Any] = {
            name: self.make_metric(
                kind,
                name,
                documentation,
                [*labelnames, *own_labels],
                **({"buckets": self.buckets[name]} if name in self.buckets else {}),
            )
            for name, kind, own_labels, documentation in self.definitions
        }
        self._metrics: dict[tuple[int, str, Labels], Any] = {}
        transfer_config = vllm_config.kv_transfer_config
        extra = {} if transfer_config is None else transfer_config.kv_connector_extra_config
        self.wants_reports = self.changes_without_steps(extra)

    # The values come from the user's JSON, so anything may be in them.
    @staticmethod
    def changes_without_steps(extra: Mapping[str, Any]) -> bool:
        """Others fill a shared pool; what a disk has kept is there before the first step."""
        return extra.get("shared_pool") is not None or bool(extra.get("disk_persist"))

    def observe_hits(self, tokens_by_source: Mapping[CacheHitSource, int], engine_idx: int = 0) -> None:
        for tier, tokens in tokens_by_source.items():
            self._child(engine_idx, MetricName.HIT_TOKENS, ()).inc(tokens)
            self._child(engine_idx, MetricName.TIER_HIT_TOKENS, (tier.value,)).inc(tokens)

    def observe_report(self, report: Mapping[str, Any], engine_idx: int = 0) -> None:
        totals: dict[str, int] = {}
        for pool in report["pools"]:
            if pool["tier"] not in (CacheHitSource.HOST, CacheHitSource.DISK):
                continue
            names = (MetricName.USED_BLOCKS, MetricName.CACHED_ENTRIES)
            if report["modes"].get(pool["tier"]) == MODE_BELOW_HOST:
                names = (MetricName.DISK_USED_BLOCKS, MetricName.DISK_CACHED_ENTRIES)
            # The null block counts as used.
            for name, value in zip(names, (pool["blocks_held"] + 1, pool["entries_cached"]), strict=True):
                totals[name] = totals.get(name, 0) + value
        for name, total in totals.items():
            self._child(engine_idx, name, ()).set(total)

    def observe(self, transfer_stats_data: dict[str, Any], engine_idx: int = 0) -> None:
        types: dict[str, str] = transfer_stats_data.get("types", {})
        for name, values in transfer_stats_data.get("data", {}).items():
            for labels, value in values.items():
                child = self._child(engine_idx, name, tuple(labels))
                if types[name] == "histogram":
                    for observed in value:
                        child.observe(observed)
                elif types[name] == "gauge":
                    child.set(value)
                elif value:  # most counters stand still
                    child.inc(value)

    def _child(self, engine_idx: int, name: str, labels: Labels) -> Any:
        key = (engine_idx, name, labels)
        if key not in self._metrics:
            engine_values = self.per_engine_labelvalues[engine_idx]
            self._metrics[key] = self._defs[name].labels(*engine_values, *labels)
        return self._metrics[key]
