"""Orders, reports and statistics of several connectors, child by child.

Owns records only; which child gets what is the business of `multi_connector`. Layer L4.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from vllm.config import VllmConfig
from vllm.distributed.kv_event_types import AllBlocksCleared, KVCacheEvent
from vllm.distributed.kv_transfer.kv_connector.v1.prom_metrics import KVConnectorPromMetrics
from vllm.v1.kv_connector_types import (
    KVConnectorHandshakeMetadata,
    KVConnectorMetadata,
    KVConnectorStats,
    KVConnectorWorkerMetadata,
    merge_worker_meta,
)
from vllm.v1.metrics.cache_hit_source import CacheHitSource


@dataclass
class MultiKVConnectorMetadata(KVConnectorMetadata):
    """``metadata[i]`` is for child i; ``extra_async_saves``: completions beyond the first, per request."""

    metadata: tuple[KVConnectorMetadata, ...]
    extra_async_saves: dict[str, int] | None = None


@dataclass
class MultiKVConnectorWithdrawal(KVConnectorMetadata):
    """``metadata[i]`` is for the worker half of child i; None: it has nothing to take back."""

    metadata: tuple[KVConnectorMetadata | None, ...]


@dataclass
class MultiKVConnectorHandshakeMetadata(KVConnectorHandshakeMetadata):
    """``metadata[i]`` is from the worker half of child i, for its scheduler half."""

    metadata: tuple[KVConnectorHandshakeMetadata | None, ...]


@dataclass
class MultiKVConnectorWorkerMetadata(KVConnectorWorkerMetadata):
    """``metadata[i]`` is from child i."""

    metadata: tuple[KVConnectorWorkerMetadata | None, ...]

    def aggregate(self, other: KVConnectorWorkerMetadata) -> MultiKVConnectorWorkerMetadata:
        """Aggregate child by child, as a new record."""
        if not isinstance(other, MultiKVConnectorWorkerMetadata):
            raise TypeError(f"cannot aggregate {type(other).__name__} into a MultiConnector report")
        return MultiKVConnectorWorkerMetadata(
            tuple(
                merge_worker_meta(mine, theirs)
                for mine, theirs in zip(self.metadata, other.metadata, strict=True)
            )
        )


class MultiKVConnectorStats(KVConnectorStats):
    """``data[class name]``: statistics of the children of that class."""

    def __getitem__(self, child_name: str) -> KVConnectorStats:
        stats: KVConnectorStats = self.data[child_name]
        return stats

    def __setitem__(self, child_name: str, stats: KVConnectorStats) -> None:
        self.data[child_name] = stats

    def add(self, child_name: str, stats: KVConnectorStats) -> None:
        """Add one child's statistics to those of its class."""
        self.data[child_name] = self[child_name].aggregate(stats) if child_name in self.data else stats

    def to_dict(self) -> dict[str, Any]:
        """Plain payloads by child name."""
        return {name: stats.to_dict() for name, stats in self.data.items()}

    def aggregate(self, other: KVConnectorStats) -> KVConnectorStats:
        """Add child by child and return self."""
        for name, stats in other.data.items():
            self.add(name, stats)
        return self

    def reset(self) -> None:
        for stats in self.data.values():
            stats.reset()

    def reduce(self) -> dict[str, Any]:
        """Each child's summary by its name."""
        return {name: stats.reduce() for name, stats in self.data.items()}

    def is_empty(self) -> bool:
        return all(stats.is_empty() for stats in self.data.values())


class MultiKVConnectorPromMetrics(KVConnectorPromMetrics):
    """Hands each child's payload to that child's sink."""

    # The metric classes belong to the metrics library, hence opaque.
    def __init__(
        self,
        vllm_config: VllmConfig,
        metric_types: Mapping[Any, Any],
        labelnames: list[str],
        per_engine_labelvalues: dict[int, list[object]],
        prom_metrics: Mapping[str, KVConnectorPromMetrics],
    ) -> None:
        super().__init__(vllm_config, metric_types, labelnames, per_engine_labelvalues)
        self._prom_metrics = dict(prom_metrics)
        self.wants_reports = any(sink.wants_reports for sink in self._prom_metrics.values())

        self.hit_tiers = frozenset(tier for sink in self._prom_metrics.values() for tier in sink.hit_tiers)

    def observe_hits(self, tokens_by_source: Mapping[CacheHitSource, int], engine_idx: int = 0) -> None:
        # Requests do not say which connector had a tier's tokens, and sinks that show the same tier share its figure.
        left = dict(tokens_by_source)
        for sink in self._prom_metrics.values():
            own = {
                tier: left.pop(tier) for tier in tokens_by_source if tier in left and tier in sink.hit_tiers
            }
            sink.observe_hits(own, engine_idx)

    def observe_report(self, report: Mapping[str, Any], engine_idx: int = 0) -> None:
        for sink in self._prom_metrics.values():
            sink.observe_report(report, engine_idx)

    def observe(self, transfer_stats_data: dict[str, Any], engine_idx: int = 0) -> None:
        for name, payload in transfer_stats_data.items():
            if name in self._prom_metrics:
                self._prom_metrics[name].observe(child_payload(payload), engine_idx)


def in_common_order(streams: Sequence[Sequence[KVCacheEvent]]) -> list[KVCacheEvent]:
    """The children's events as one stream. A reset clears all children, and tiers of one medium share their clearing:
    what a child told before its n-th one comes before every child's n-th one.
    """
    rounds: list[tuple[list[KVCacheEvent], list[KVCacheEvent]]] = []
    for stream in streams:
        place = 0
        for event in stream:
            if place == len(rounds):
                rounds.append(([], []))
            rounds[place][isinstance(event, AllBlocksCleared)].append(event)
            place += isinstance(event, AllBlocksCleared)
    return [event for told, cleared in rounds for event in (*told, *cleared)]


def child_payload(value: Any) -> dict[str, Any]:
    """A child's payload, whether it comes as the object, as its fields, or bare."""
    if isinstance(value, KVConnectorStats):
        return value.to_dict()
    payload: dict[str, Any] = value["data"] if set(value) == {"data"} else value
    return payload
