"""The current metrics as plain records, for `LLM.get_metrics`.  Layer L7.

Owns the record types. Must not know what the metrics mean.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field

from prometheus_client import REGISTRY, CollectorRegistry
from prometheus_client.metrics_core import Metric as Family
from prometheus_client.samples import Sample

from vllm.v1.metrics.prometheus import PREFIX


@dataclass
class Metric:
    """One metric with one set of labels."""

    name: str
    labels: dict[str, str]


@dataclass
class Counter(Metric):
    """Only ever grows."""

    value: int


@dataclass
class Vector(Metric):
    """Counters by position."""

    values: list[int] = field(default_factory=list)


@dataclass
class Gauge(Metric):
    """A current value."""

    value: float


@dataclass
class Histogram(Metric):
    """`buckets`: upper bound as text → number of values up to it."""

    count: int
    sum: float
    buckets: dict[str, int]


def get_metrics_snapshot(registry: CollectorRegistry = REGISTRY) -> list[Metric]:
    """All metrics of the engine, in the order of their registration."""
    metrics: list[Metric] = []
    for family in registry.collect():
        if not family.name.startswith(PREFIX):
            continue
        if family.type == "counter" and family.name.endswith("_per_pos"):
            metrics += _vectors(family)
        elif family.type == "counter":
            metrics += [
                Counter(family.name, sample.labels, int(sample.value))
                for sample in family.samples
                if sample.name.endswith("_total")
            ]
        elif family.type == "gauge":
            metrics += [Gauge(family.name, sample.labels, sample.value) for sample in family.samples]
        elif family.type == "histogram":
            metrics += _histograms(family)
    return metrics


def _grouped(samples: Iterable[Sample], without: str) -> dict[tuple[tuple[str, str], ...], list[Sample]]:
    groups: dict[tuple[tuple[str, str], ...], list[Sample]] = {}
    for sample in samples:
        key = tuple((name, value) for name, value in sample.labels.items() if name != without)
        groups.setdefault(key, []).append(sample)
    return groups


def _vectors(family: Family) -> list[Metric]:
    totals = [sample for sample in family.samples if sample.name.endswith("_total")]
    return [
        Vector(
            family.name,
            dict(labels),
            [int(s.value) for s in sorted(samples, key=lambda sample: int(sample.labels["position"]))],
        )
        for labels, samples in _grouped(totals, "position").items()
    ]


def _histograms(family: Family) -> list[Metric]:
    result: list[Metric] = []
    for labels, samples in _grouped(family.samples, "le").items():
        buckets = {s.labels["le"]: int(s.value) for s in samples if s.name.endswith("_bucket")}
        count = next(int(s.value) for s in samples if s.name.endswith("_count"))
        total = next(s.value for s in samples if s.name.endswith("_sum"))
        result.append(Histogram(family.name, dict(labels), count, total, buckets))
    return result
