"""The figures that a spec from outside brings along.

Owns how its definitions become metrics, and its numbers statistics. It must not know what they count. Layer L4.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from vllm.logger import init_logger
from vllm.v1.kv_offload.base import (
    Figures,
    OffloadingCounterMetadata,
    OffloadingGaugeMetadata,
    OffloadingHistogramMetadata,
    OffloadingMetricMetadata,
    OffloadingSpec,
)
from vllm.v1.simple_kv_offload.metrics import Definition, SimpleCPUOffloadStats

logger = init_logger(__name__)

SPEC_INFO = "vllm:kv_offload_spec_info"
_KINDS: dict[type[OffloadingMetricMetadata], str] = {
    OffloadingCounterMetadata: "Counter",
    OffloadingGaugeMetadata: "Gauge",
    OffloadingHistogramMetadata: "Histogram",
}


# The user's JSON.
def spec_definitions(
    spec: type[OffloadingSpec], extra: Mapping[str, Any]
) -> tuple[tuple[Definition, ...], dict[str, Sequence[float]]]:
    """The spec's metrics, one that is always 1 and describes it among them, and the buckets of its histograms."""
    definitions: list[Definition] = [
        (
            SPEC_INFO,
            "Gauge",
            ["spec_name", *spec.config_info_keys(extra)],
            "Always 1; the labels describe the offloading spec.",
        )
    ]
    buckets: dict[str, Sequence[float]] = {}
    for name, about in spec.build_metric_definitions(extra).items():
        definitions.append((name, _KINDS[type(about)], list(about.labelnames), about.documentation))
        if isinstance(about, OffloadingHistogramMetadata) and about.buckets:
            buckets[name] = about.buckets
    return tuple(definitions), buckets


def add_figures(
    stats: SimpleCPUOffloadStats, figures: Figures, kinds: Mapping[str, OffloadingMetricMetadata]
) -> None:
    """Add what a manager has counted. A metric that its spec has not defined, or not with such labels, is left out."""
    for name, values in figures.items():
        about = kinds.get(name)
        if about is None:
            logger.warning_once("KV offload: the offloading spec has not defined the metric %s", name)
            continue
        for labels, value in values.items():
            if len(labels) != len(about.labelnames):
                logger.warning_once("KV offload: metric %s has the labels %s", name, about.labelnames)
            elif isinstance(about, OffloadingHistogramMetadata):
                observed = [value] if isinstance(value, int | float) else value
                stats.observe(name, map(float, observed), tuple(map(str, labels)))
            elif isinstance(value, int | float):
                add = (
                    stats.set_gauge if isinstance(about, OffloadingGaugeMetadata) else stats.increase_counter
                )
                add(name, value, tuple(map(str, labels)))
