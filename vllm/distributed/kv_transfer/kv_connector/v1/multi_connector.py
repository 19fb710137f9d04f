"""Several connectors behind one: loads come from the first that offers, stores go to all.

Owns the list of children and what is asked of it as a whole: support, layout, statistics, the end; `multi_scheduler` and
`multi_worker` are its halves. It must not know any concrete child. Layer L4.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from vllm.config import KVTransferConfig, VllmConfig
from vllm.distributed.kv_transfer.kv_connector.factory import KVConnectorFactory
from vllm.distributed.kv_transfer.kv_connector.v1.base import (
    KVConnectorBase_V1,
    KVConnectorRole,
    KVConnectorStats,
    SupportsHMA,
)
from vllm.distributed.kv_transfer.kv_connector.v1.multi_children import (
    check_children,
    child_classes,
    child_transfer_configs,
    child_vllm_config,
)
from vllm.distributed.kv_transfer.kv_connector.v1.multi_records import (
    MultiKVConnectorMetadata,
    MultiKVConnectorPromMetrics,
    MultiKVConnectorStats,
    MultiKVConnectorWorkerMetadata,
    child_payload,
)
from vllm.distributed.kv_transfer.kv_connector.v1.multi_scheduler import MultiSchedulerHalf
from vllm.distributed.kv_transfer.kv_connector.v1.multi_worker import MultiWorkerHalf
from vllm.distributed.kv_transfer.kv_connector.v1.prom_metrics import KVConnectorPromMetrics, share_metrics
from vllm.v1.kv_cache_interface import KVCacheConfig
from vllm.v1.kv_connector_types import HostPool


class MultiConnector(MultiSchedulerHalf, MultiWorkerHalf, KVConnectorBase_V1, SupportsHMA):
    """``kv_connector_extra_config["connectors"]`` lists the children as `KVTransferConfig` fields."""

    def __init__(
        self, vllm_config: VllmConfig, role: KVConnectorRole, kv_cache_config: KVCacheConfig | None = None
    ) -> None:
        super().__init__(vllm_config, role, kv_cache_config)
        self._connectors: list[KVConnectorBase_V1] = [
            child_class(child_vllm_config(vllm_config, child), role, kv_cache_config)
            for child_class, child in child_classes(self._kv_transfer_config)
        ]
        self._all_support_hma = self.all_children_support_hma(self._kv_transfer_config)
        self._requests_to_connector: dict[str, int] = {}
        # By child, how it stood when it told of it last.
        self._levels: dict[int, KVConnectorStats] = {}
        self._extra_async_saves: dict[str, int] = {}

    @property
    def sub_connectors(self) -> list[KVConnectorBase_V1]:
        """The children, in order."""
        return self._connectors

    @property
    def supports_divergent_local_hybrid_hits(self) -> bool:
        return all(child.supports_divergent_local_hybrid_hits for child in self._connectors)

    @property
    def requires_kv_delivery(self) -> bool:
        return any(child.requires_kv_delivery for child in self._connectors)

    @classmethod
    def check_config(cls, vllm_config: VllmConfig) -> None:
        check_children(vllm_config)

    @classmethod
    def host_pools(cls, vllm_config: VllmConfig) -> Sequence[HostPool]:
        if vllm_config.kv_transfer_config is None:
            return ()
        children = child_transfer_configs(vllm_config.kv_transfer_config)
        return [
            pool
            for child in children
            for pool in KVConnectorFactory.host_pools(child_vllm_config(vllm_config, child))
        ]

    @classmethod
    def remove_leftovers(cls, vllm_config: VllmConfig) -> None:
        if vllm_config.kv_transfer_config is not None:
            for child in child_transfer_configs(vllm_config.kv_transfer_config):
                KVConnectorFactory.remove_leftovers(child_vllm_config(vllm_config, child))

    @classmethod
    def all_children_support_hma(cls, kv_transfer_config: KVTransferConfig) -> bool:
        """Whether every child handles several KV cache groups."""
        return all(
            KVConnectorFactory.supports_hma_config(child)
            for child in child_transfer_configs(kv_transfer_config)
        )

    @classmethod
    def supports_hma_config(cls, kv_transfer_config: KVTransferConfig) -> bool:
        return cls.all_children_support_hma(kv_transfer_config)

    def get_kv_connector_stats(self) -> KVConnectorStats | None:
        told = {}
        for index, child in enumerate(self._connectors):
            stats = child.get_kv_connector_stats()
            if stats is not None:
                told[index] = stats
                levels = stats.levels()
                if levels is not None:
                    self._levels[index] = levels
        total = MultiKVConnectorStats()
        for index, stats in told.items():
            # Children have the names of their figures in common: a level is that of all, also of those without news.
            for other, levels in self._levels.items():
                if other != index:
                    stats.add_levels(levels)
            total.add(type(self._connectors[index]).__name__, stats)
        return total if total.data else None

    def shutdown(self) -> None:
        errors: list[Exception] = []
        for child in self._connectors:
            try:
                child.shutdown()
            except Exception as error:  # the others must still be shut down
                errors.append(error)
        if errors:
            raise errors[0]

    @classmethod
    def supports_sleep_mode(cls, kv_transfer_config: KVTransferConfig) -> bool:
        return all(
            child_class.supports_sleep_mode(child) for child_class, child in child_classes(kv_transfer_config)
        )

    @classmethod
    def get_required_kvcache_layout(cls, vllm_config: VllmConfig) -> str | None:
        transfer_config = vllm_config.kv_transfer_config
        if transfer_config is None:
            return None
        layouts: dict[str, str] = {}
        for child_class, child in child_classes(transfer_config):
            layout = child_class.get_required_kvcache_layout(child_vllm_config(vllm_config, child))
            if layout is not None:
                layouts[child_class.__name__] = layout
        if len(set(layouts.values())) > 1:
            raise ValueError(f"the connectors of a MultiConnector need different KV cache layouts: {layouts}")
        return next(iter(layouts.values()), None)

    @classmethod
    def requires_piecewise_for_cudagraph(cls, extra_config: dict[str, Any]) -> bool:
        config = KVTransferConfig(kv_connector_extra_config=extra_config)
        return any(
            child_class.requires_piecewise_for_cudagraph(child.kv_connector_extra_config)
            for child_class, child in child_classes(config)
        )

    @classmethod
    def build_kv_connector_stats(cls, data: dict[str, Any] | None = None) -> KVConnectorStats | None:
        total = MultiKVConnectorStats()
        for name, value in (data or {}).items():
            try:
                child_class = KVConnectorFactory.get_connector_class_by_name(name)
            except ValueError:
                continue  # a class that only a module path leads to: its figures are for its own sink
            stats = child_class.build_kv_connector_stats(child_payload(value))
            if stats is not None:
                total.add(name, stats)
        return total

    @classmethod
    def build_prom_metrics(
        cls,
        vllm_config: VllmConfig,
        metric_types: Mapping[Any, Any],
        labelnames: list[str],
        per_engine_labelvalues: dict[int, list[object]],
    ) -> MultiKVConnectorPromMetrics:
        sinks: dict[str, KVConnectorPromMetrics] = {}
        # Two children of one family of connectors have figures of the same names.
        shared = share_metrics(metric_types)
        assert vllm_config.kv_transfer_config is not None
        for child_class, child in child_classes(vllm_config.kv_transfer_config):
            seen = child_vllm_config(vllm_config, child)
            sink = child_class.build_prom_metrics(seen, shared, labelnames, per_engine_labelvalues)
            if sink is not None:
                first = sinks.setdefault(child_class.__name__, sink)
                first.wants_reports |= sink.wants_reports
        return MultiKVConnectorPromMetrics(
            vllm_config, metric_types, labelnames, per_engine_labelvalues, sinks
        )


__all__ = [
    "MultiConnector",
    "MultiKVConnectorMetadata",
    "MultiKVConnectorPromMetrics",
    "MultiKVConnectorStats",
    "MultiKVConnectorWorkerMetadata",
    "child_transfer_configs",
]
