"""The figures of `OffloadingConnector`: those of the machinery, and the names of its own interface beside them.

Owns the names ``vllm:kv_offload_*`` and how they follow from the machinery's figures. Layer L4.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping, Sequence
from typing import Any

from vllm.config import VllmConfig
from vllm.distributed.kv_transfer.kv_connector.v1.offloading.options import has_outside_spec
from vllm.distributed.kv_transfer.kv_connector.v1.offloading.spec_metrics import spec_definitions
from vllm.v1.kv_offload.factory import OffloadingSpecFactory
from vllm.v1.metrics.cache_hit_source import CacheHitSource
from vllm.v1.simple_kv_offload.manager import SimpleCPUOffloadScheduler
from vllm.v1.simple_kv_offload.metadata import INVALID_JOB_ID, SimpleCPUOffloadMetadata
from vllm.v1.simple_kv_offload.metrics import (
    DEFINITIONS,
    Definition,
    MetricName,
    SimpleCPUOffloadPromMetrics,
    SimpleCPUOffloadStats,
)

_PREFIX = "vllm:kv_offload_"
LOAD_BYTES = f"{_PREFIX}load_bytes_total"
STORE_BYTES = f"{_PREFIX}store_bytes_total"
LOAD_TIME = f"{_PREFIX}load_time_total"
STORE_TIME = f"{_PREFIX}store_time_total"
LOAD_SIZE = f"{_PREFIX}load_size"
STORE_SIZE = f"{_PREFIX}store_size"
TOTAL_BYTES = f"{_PREFIX}total_bytes_total"
TOTAL_TIME = f"{_PREFIX}total_time_total"
SIZE = f"{_PREFIX}size"
LOOKUP_SYNC_DELAY = f"{_PREFIX}lookup_sync_delay_seconds"
LOOKUP_ASYNC_DELAY = f"{_PREFIX}lookup_async_delay_seconds"
ALLOCATION_FAILURES = f"{_PREFIX}allocation_failure_total"
ALLOCATION_SIZE = f"{_PREFIX}cpu_allocation_size"
STORES_SKIPPED = f"{_PREFIX}stores_skipped_total"
CACHE_USAGE = f"{_PREFIX}cpu_cache_usage_perc"
WRITE_USAGE = f"{_PREFIX}cpu_cache_write_usage_perc"
READ_USAGE = f"{_PREFIX}cpu_cache_read_usage_perc"
TIERING_BYTES = f"{_PREFIX}tiering_bytes_total"
TIERING_TIME = f"{_PREFIX}tiering_time_total"
TIERING_FAILED_BLOCKS = f"{_PREFIX}tiering_failed_blocks_total"
TIERING_WAITS = f"{_PREFIX}tiering_waits_total"
TIERING_CACHE_USAGE = f"{_PREFIX}tiering_cache_usage_perc"
KV_OFFLOAD_CONFIG_INFO = f"{_PREFIX}config_info"

_LOADED, _STORED = ("CPU_to_GPU",), ("GPU_to_CPU",)
_TIERING = ["tier", "direction"]
_OWN: tuple[Definition, ...] = (
    (LOAD_BYTES, "Counter", [], "Bytes loaded into device memory, over all ranks."),
    (STORE_BYTES, "Counter", [], "Bytes stored below the device, over all ranks."),
    (LOAD_TIME, "Counter", [], "Seconds that loads took, added up over loads and ranks."),
    (STORE_TIME, "Counter", [], "Seconds that stores took, added up over stores and ranks."),
    (LOAD_SIZE, "Histogram", [], "Bytes of each load that was started, over all ranks."),
    (STORE_SIZE, "Histogram", [], "Bytes of each store that was started, over all ranks."),
    (TOTAL_BYTES, "Counter", ["transfer_type"], "Old name of both: CPU_to_GPU and GPU_to_CPU."),
    (TOTAL_TIME, "Counter", ["transfer_type"], "Old name of both times."),
    (SIZE, "Histogram", ["transfer_type"], "Old name of both sizes."),
    (LOOKUP_SYNC_DELAY, "Histogram", [], "Seconds that the scheduler spent in a look-up."),
    (
        LOOKUP_ASYNC_DELAY,
        "Histogram",
        [],
        "Seconds from a look-up that was put off, since blocks come up from a slower tier, to its answer.",
    ),
    (ALLOCATION_FAILURES, "Counter", [], "Block stores put off since no host block was free."),
    (ALLOCATION_SIZE, "Histogram", [], "Host blocks taken at once for what a step stores."),
    (
        STORES_SKIPPED,
        "Counter",
        [],
        "Block stores put off since too few requests had the block (store_threshold).",
    ),
    (CACHE_USAGE, "Gauge", [], "Share of the host blocks that hold findable content (0 to 1)."),
    (WRITE_USAGE, "Gauge", [], "Share of the host blocks that stores under way write to (0 to 1)."),
    (
        READ_USAGE,
        "Gauge",
        [],
        "Share of the host blocks held for reading: promises, loads, moves to disk (0 to 1).",
    ),
    (TIERING_BYTES, "Counter", _TIERING, "Bytes moved into a secondary tier and out of it, over all ranks."),
    (TIERING_TIME, "Counter", _TIERING, "Seconds that those moves took, added up over moves and ranks."),
    (TIERING_FAILED_BLOCKS, "Counter", _TIERING, "Blocks whose move failed."),
    (TIERING_WAITS, "Counter", ["tier"], "Requests that waited for blocks of a secondary tier."),
    (TIERING_CACHE_USAGE, "Gauge", ["tier"], "Share of its blocks that hold findable content (0 to 1)."),
    (
        KV_OFFLOAD_CONFIG_INFO,
        "Gauge",
        ["eviction_policy", "store_threshold", "cpu_blocks", "secondary_blocks"],
        "Always 1; the labels describe the tiers.",
    ),
)

_BYTES = [float(1 << exponent) for exponent in range(14, 36, 3)]
_SECONDS = [10.0**exponent * step for exponent in range(-5, 2) for step in (1, 3)]
_BLOCKS = [float(1 << exponent) for exponent in range(11)]
OBSERVED_MAX = 1024
"""So many are told even if no other figure has changed: a request that cannot be admitted is looked up in every step."""


class OffloadingConnectorStats(SimpleCPUOffloadStats):
    """Figures of one interval under both families of names; the payload's layout is the machinery's."""

    def reduce(self) -> dict[str, int | float]:
        """Figures by short name; what both families say is said once."""
        flat = super().reduce()
        return {name: value for name, value in flat.items() if not name.startswith(_PREFIX)}


class OffloadPromMetrics(SimpleCPUOffloadPromMetrics):
    """The machinery's metrics and the ``vllm:kv_offload_*`` ones."""

    definitions: tuple[Definition, ...] = (*DEFINITIONS, *_OWN)
    buckets: Mapping[str, Sequence[float]] = {
        **dict.fromkeys((LOAD_SIZE, STORE_SIZE, SIZE), _BYTES),
        **dict.fromkeys((LOOKUP_SYNC_DELAY, LOOKUP_ASYNC_DELAY), _SECONDS),
        ALLOCATION_SIZE: _BLOCKS,
    }

    def __init__(
        self,
        vllm_config: VllmConfig,
        metric_types: Mapping[Any, Any],
        labelnames: list[str],
        per_engine_labelvalues: dict[int, list[object]],
    ) -> None:
        transfer_config = vllm_config.kv_transfer_config
        extra = {} if transfer_config is None else transfer_config.kv_connector_extra_config
        if has_outside_spec(extra):
            definitions, buckets = spec_definitions(OffloadingSpecFactory.get_spec_cls(extra), extra)
            self.definitions = (*self.definitions, *definitions)
            self.buckets = {**self.buckets, **buckets}
            self.hit_tiers = frozenset(CacheHitSource) - {CacheHitSource.DEVICE}
        super().__init__(vllm_config, metric_types, labelnames, per_engine_labelvalues)

    @staticmethod
    def changes_without_steps(extra: Mapping[str, Any]) -> bool:
        return not has_outside_spec(extra) and any(
            tier.get("disk_persist") for tier in extra.get("secondary_tiers", ())
        )


def get_connector_metric_definitions() -> tuple[Definition, ...]:
    """The metrics that this connector adds to those of the machinery."""
    return _OWN


class Observed:
    """What happened one by one since the last report, for histograms. Only while somebody asks for reports.

    ``block_bytes`` are those of all ranks together.
    """

    def __init__(self, block_bytes: int) -> None:
        self._block_bytes = block_bytes
        self._values: dict[str, list[float]] = defaultdict(list)
        self._num_values = 0
        self._is_wanted = False
        self._put_off: dict[str, float] = {}

    def looked_up(self, request_id: str, began: float, now: float, *, is_answered: bool) -> None:
        """A look-up took from ``began`` to ``now`` (seconds), and was answered or put off."""
        self._note(LOOKUP_SYNC_DELAY, now - began)
        if not is_answered:
            self._put_off.setdefault(request_id, began)
        elif request_id in self._put_off:
            self._note(LOOKUP_ASYNC_DELAY, now - self._put_off.pop(request_id))

    def forget_request(self, request_id: str) -> None:
        """It ended, answered or not."""
        self._put_off.pop(request_id, None)

    def ordered(self, orders: SimpleCPUOffloadMetadata) -> None:
        """These copies are started."""
        stored = len(orders.store_cpu_blocks)
        if orders.store_event != INVALID_JOB_ID and stored:
            self._note(ALLOCATION_SIZE, stored)
            self._note(STORE_SIZE, stored * self._block_bytes)
        for count in orders.load_block_counts:
            self._note(LOAD_SIZE, count * self._block_bytes)

    def _note(self, name: str, value: float) -> None:
        if self._is_wanted:
            self._values[name].append(value)
            self._num_values += 1

    @property
    def is_due(self) -> bool:
        """Whether so much was observed that it should be told now."""
        return self._num_values >= OBSERVED_MAX

    def report(self, stats: OffloadingConnectorStats) -> None:
        """Add what was observed since the last call."""
        self._is_wanted = True
        values, self._values = self._values, defaultdict(list)
        self._num_values = 0
        for name in (LOAD_SIZE, STORE_SIZE, LOOKUP_SYNC_DELAY, LOOKUP_ASYNC_DELAY, ALLOCATION_SIZE):
            stats.observe(name, values[name])
        stats.observe(SIZE, values[LOAD_SIZE], _LOADED)
        stats.observe(SIZE, values[STORE_SIZE], _STORED)

    @property
    def num_put_off(self) -> int:
        """Requests whose look-up is put off."""
        return len(self._put_off)


def native_stats(
    manager: SimpleCPUOffloadScheduler, base: SimpleCPUOffloadStats, block_bytes: int
) -> OffloadingConnectorStats:
    """The figures of an interval with the native names added; ``block_bytes`` are those of all ranks together."""
    stats = OffloadingConnectorStats(base.data)
    loaded = _of(base, MetricName.LOAD_BLOCKS, ()) * block_bytes
    stored = _of(base, MetricName.STORE_BLOCKS, ("stored",)) * block_bytes
    host = manager.source.value
    load_time = _of(base, MetricName.TIER_SECONDS, (host, "load"))
    store_time = _of(base, MetricName.TIER_SECONDS, (host, "store"))
    for name, value in (
        (LOAD_BYTES, loaded),
        (STORE_BYTES, stored),
        (LOAD_TIME, load_time),
        (STORE_TIME, store_time),
    ):
        stats.increase_counter(name, value)
    for name, up, down in ((TOTAL_BYTES, loaded, stored), (TOTAL_TIME, load_time, store_time)):
        stats.increase_counter(name, up, _LOADED)
        stats.increase_counter(name, down, _STORED)
    stats.increase_counter(ALLOCATION_FAILURES, _of(base, MetricName.DECLINED_STORE_BLOCKS, ("full",)))
    stats.increase_counter(STORES_SKIPPED, _of(base, MetricName.DECLINED_STORE_BLOCKS, ("reuse",)))
    _add_gauges(stats, manager)
    if manager.chain is not None:
        _add_tiering(stats, base, manager)
    return stats


def _add_gauges(stats: OffloadingConnectorStats, manager: SimpleCPUOffloadScheduler) -> None:
    # The null block is nobody's.
    usable = max(1, manager.tier.num_blocks - 1)
    writing = manager.store_side.num_pending_blocks
    held = manager.tier.num_held - 1
    stats.set_gauge(CACHE_USAGE, manager.describe(manager.source).pool.blocks_cached / usable)
    stats.set_gauge(WRITE_USAGE, writing / usable)
    stats.set_gauge(READ_USAGE, max(0, held - writing) / usable)
    secondary = 0 if manager.chain is None else manager.chain.disk.num_blocks
    policy = manager.policy
    labels = (
        policy.eviction_policy,
        str(policy.store_threshold),
        str(manager.tier.num_blocks),
        str(secondary),
    )
    stats.set_gauge(KV_OFFLOAD_CONFIG_INFO, 1, labels)


def _add_tiering(
    stats: OffloadingConnectorStats, base: SimpleCPUOffloadStats, manager: SimpleCPUOffloadScheduler
) -> None:
    """The one secondary tier there can be."""
    tier = CacheHitSource.DISK.value
    for own, name in (
        (TIERING_BYTES, MetricName.TIER_BYTES),
        (TIERING_TIME, MetricName.TIER_SECONDS),
        (TIERING_FAILED_BLOCKS, MetricName.TIER_FAILED_BLOCKS),
    ):
        for direction in ("store", "load"):
            stats.increase_counter(own, _of(base, name, (tier, direction)), (tier, direction))
    stats.increase_counter(TIERING_WAITS, _of(base, MetricName.TIER_WAITS, (tier,)), (tier,))
    disk = manager.describe_disk()
    assert disk is not None
    stats.set_gauge(TIERING_CACHE_USAGE, disk.pool.blocks_cached / max(1, disk.pool.blocks_total), (tier,))


def _of(stats: SimpleCPUOffloadStats, name: str, labels: tuple[str, ...]) -> float:
    values: dict[tuple[str, ...], float] = stats.data["data"][name]
    return values[labels]
