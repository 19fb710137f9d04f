"""Sinks of connector statistics: the periodic log line and the bridge to a metrics library.

Owns the plumbing that all connectors share; what a payload means stays with its connector. Layer L4.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from typing import Any

from vllm.config import KVTransferConfig, VllmConfig
from vllm.distributed.kv_transfer.kv_connector.factory import KVConnectorFactory
from vllm.distributed.kv_transfer.kv_connector.v1.prom_metrics import KVConnectorPromMetrics
from vllm.logger import init_logger
from vllm.v1.kv_connector_types import KVConnectorStats
from vllm.v1.metrics.cache_hit_source import CacheHitSource

logger = init_logger(__name__)


class KVConnectorLogging:
    """Collects payloads and logs ``KV Transfer metrics: k=v, …`` once per interval."""

    def __init__(self, kv_transfer_config: KVTransferConfig | None) -> None:
        self.connector_cls = None
        if kv_transfer_config is not None and kv_transfer_config.kv_connector is not None:
            self.connector_cls = KVConnectorFactory.get_connector_class(kv_transfer_config)
        self.transfer_stats_accumulator: KVConnectorStats | None = None
        self.reset()

    def reset(self) -> None:
        """Start a new interval."""
        self.transfer_stats_accumulator = None

    def observe(self, transfer_stats_data: dict[str, Any]) -> None:
        """Add one payload. Without a connector there must be none."""
        if self.connector_cls is None:
            raise ValueError("connector statistics arrived although no connector is configured")
        stats = self.connector_cls.build_kv_connector_stats(transfer_stats_data)
        if stats is None:
            logger.warning_once(
                "The connector sent statistics but implements no class for them; they are not logged."
            )
            return
        if self.transfer_stats_accumulator is None:
            self.transfer_stats_accumulator = stats
        else:
            self.transfer_stats_accumulator = self.transfer_stats_accumulator.aggregate(stats)

    def log(self, log_fn: Callable[..., object] = logger.info) -> None:
        """Log what is not zero and reset, if anything happened."""
        stats = self.transfer_stats_accumulator
        if stats is not None and not stats.is_empty():
            summary = ", ".join(f"{key}={value}" for key, value in _flat(stats.reduce()) if value)
            log_fn("KV Transfer metrics: %s", summary)
        self.reset()


class KVConnectorPrometheus:
    """Feeds payloads to the sink that the configured connector brings, if it brings one."""

    def __init__(
        self,
        vllm_config: VllmConfig,
        metric_types: Mapping[Any, Any],
        labelnames: list[str],
        per_engine_labelvalues: dict[int, list[object]],
    ) -> None:
        self.prom_metrics: KVConnectorPromMetrics | None = None
        transfer_config = vllm_config.kv_transfer_config
        if transfer_config is not None and transfer_config.kv_connector is not None:
            connector_cls = KVConnectorFactory.get_connector_class(transfer_config)
            self.prom_metrics = connector_cls.build_prom_metrics(
                vllm_config, metric_types, labelnames, per_engine_labelvalues
            )

    def observe(self, transfer_stats_data: dict[str, Any], engine_idx: int = 0) -> None:
        """Add one payload."""
        if self.prom_metrics is not None:
            self.prom_metrics.observe(transfer_stats_data, engine_idx)

    def observe_hits(self, tokens_by_source: Mapping[CacheHitSource, int], engine_idx: int = 0) -> None:
        """What requests report of the tiers that the connector's sink shows; the rest is left out."""
        if self.prom_metrics is not None:
            shown = {tier: n for tier, n in tokens_by_source.items() if tier in self.prom_metrics.hit_tiers}
            self.prom_metrics.observe_hits(shown, engine_idx)

    @property
    def wants_reports(self) -> bool:
        """See `KVConnectorPromMetrics.wants_reports`."""
        return self.prom_metrics is not None and self.prom_metrics.wants_reports

    def observe_report(self, report: Mapping[str, Any], engine_idx: int = 0) -> None:
        """See `KVConnectorPromMetrics.observe_report`."""
        if self.prom_metrics is not None:
            self.prom_metrics.observe_report(report, engine_idx)


# What a connector says is its own; of several behind one, each says so many things by its name.
def _flat(summary: Mapping[str, Any]) -> Iterator[tuple[str, Any]]:
    for key, value in summary.items():
        if isinstance(value, Mapping):
            yield from ((f"{key}.{inner}", found) for inner, found in _flat(value))
        else:
            yield key, value


__all__ = ["KVConnectorLogging", "KVConnectorPromMetrics", "KVConnectorPrometheus", "KVConnectorStats"]
