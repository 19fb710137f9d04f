"""The figures of `OffloadingConnector`: those of the machinery, and the names of its own interface beside them.

Owns the names ``vllm:kv_offload_*`` and how they follow from the machinery's figures. Layer L4.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from vllm.config import VllmConfig
from vllm.v1.metrics.cache_hit_source import CacheHitSource
from vllm.v1.simple_kv_offload.manager import SimpleCPUOffloadScheduler
from vllm.v1.simple_kv_offload.metrics import (
    MetricName,
    SimpleCPUOffloadPromMetrics,
    SimpleCPUOffloadStats,
)

_PREFIX = "vllm:kv_offload_"
LOAD_BYTES = f"{_PREFIX}load_bytes_total"
STORE_BYTES = f"{_PREFIX}store_bytes_total"
TOTAL_BYTES = f"{_PREFIX}total_bytes_total"
ALLOCATION_FAILURES = f"{_PREFIX}allocation_failure_total"
STORES_SKIPPED = f"{_PREFIX}stores_skipped_total"
CACHE_USAGE = f"{_PREFIX}cpu_cache_usage_perc"
WRITE_USAGE = f"{_PREFIX}cpu_cache_write_usage_perc"
READ_USAGE = f"{_PREFIX}cpu_cache_read_usage_perc"

# (name, library class, own labels, documentation), as in the machinery's table.
_DEFINITIONS: tuple[tuple[str, str, list[str], str], ...] = (
    (LOAD_BYTES, "Counter", [], "Bytes loaded into device memory, over all ranks."),
    (STORE_BYTES, "Counter", [], "Bytes stored below the device, over all ranks."),
    (TOTAL_BYTES, "Counter", ["transfer_type"], "Old name of both: CPU_to_GPU and GPU_to_CPU."),
    (ALLOCATION_FAILURES, "Counter", [], "Block stores put off since no host block was free."),
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
)


class OffloadingConnectorStats(SimpleCPUOffloadStats):
    """Figures of one interval under both families of names; the payload's layout is the machinery's."""

    def reduce(self) -> dict[str, int | float]:
        """Figures by short name; what both families say is said once."""
        flat = super().reduce()
        return {name: value for name, value in flat.items() if not name.startswith(_PREFIX)}


class OffloadPromMetrics(SimpleCPUOffloadPromMetrics):
    """The machinery's metrics and the ``vllm:kv_offload_*`` ones."""

    # Metric classes and their instances belong to the metrics library, hence opaque.
    def __init__(
        self,
        vllm_config: VllmConfig,
        metric_types: Mapping[Any, Any],
        labelnames: list[str],
        per_engine_labelvalues: dict[int, list[object]],
    ) -> None:
        super().__init__(vllm_config, metric_types, labelnames, per_engine_labelvalues)
        for name, kind, own_labels, documentation in _DEFINITIONS:
            self._defs[name] = self.make_metric(kind, name, documentation, [*labelnames, *own_labels])


def native_stats(
    manager: SimpleCPUOffloadScheduler, base: SimpleCPUOffloadStats, block_bytes: int
) -> OffloadingConnectorStats:
    """The figures of an interval with the native names added; ``block_bytes`` are those of all ranks together."""
    stats = OffloadingConnectorStats(base.data)
    loaded = _of(base, MetricName.LOAD_BLOCKS, ()) * block_bytes
    stored = _of(base, MetricName.STORE_BLOCKS, ("stored",)) * block_bytes
    stats.increase_counter(LOAD_BYTES, loaded)
    stats.increase_counter(STORE_BYTES, stored)
    stats.increase_counter(TOTAL_BYTES, loaded, ("CPU_to_GPU",))
    stats.increase_counter(TOTAL_BYTES, stored, ("GPU_to_CPU",))
    stats.increase_counter(ALLOCATION_FAILURES, _of(base, MetricName.DECLINED_STORE_BLOCKS, ("full",)))
    stats.increase_counter(STORES_SKIPPED, _of(base, MetricName.DECLINED_STORE_BLOCKS, ("reuse",)))
    # The null block is nobody's.
    usable = max(1, manager.tier.num_blocks - 1)
    writing = manager.store_side.num_pending_blocks
    held = manager.tier.num_held - 1
    stats.set_gauge(CACHE_USAGE, manager.describe(CacheHitSource.HOST).pool.blocks_cached / usable)
    stats.set_gauge(WRITE_USAGE, writing / usable)
    stats.set_gauge(READ_USAGE, max(0, held - writing) / usable)
    return stats


def _of(stats: SimpleCPUOffloadStats, name: str, labels: tuple[str, ...]) -> float:
    values: dict[tuple[str, ...], float] = stats.data["data"][name]
    return values[labels]
