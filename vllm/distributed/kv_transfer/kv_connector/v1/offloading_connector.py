"""The native offload connector: the options and figures of its own interface on the CPU offload's machinery.

Owns the choice of groups and of names. It must not decide anything about blocks, nor move them. Layer L6.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from vllm.config import VllmConfig
from vllm.distributed.kv_transfer.kv_connector.v1.base import KVConnectorRole
from vllm.distributed.kv_transfer.kv_connector.v1.offloading.metrics import (
    OffloadingConnectorStats,
    OffloadPromMetrics,
    native_stats,
)
from vllm.distributed.kv_transfer.kv_connector.v1.offloading.options import check_chunk, parse_native_options
from vllm.distributed.kv_transfer.kv_connector.v1.simple_cpu_offload_connector import (
    SimpleCPUOffloadConnector,
)
from vllm.v1.core.kv_cache_view import device_block_bytes
from vllm.v1.kv_cache_interface import KVCacheConfig
from vllm.v1.kv_connector_types import KVConnectorStats
from vllm.v1.simple_kv_offload.options import OffloadOptions


class OffloadingConnector(SimpleCPUOffloadConnector):
    """Copies the cacheable groups of the device's prefix cache to host memory, and from there to a file.

    Loads are asynchronous. Scratch groups are never touched. ``ValueError`` if no group can be offloaded.
    """

    def __init__(
        self, vllm_config: VllmConfig, role: KVConnectorRole, kv_cache_config: KVCacheConfig | None = None
    ) -> None:
        super().__init__(vllm_config, role, kv_cache_config)
        self._block_bytes = 0
        if kv_cache_config is not None:
            self._block_bytes = device_block_bytes(kv_cache_config, vllm_config.parallel_config.world_size)

    # The values come from the user's JSON, so anything may be in them.
    @classmethod
    def _read_options(
        cls, extra: Mapping[str, Any], world_size: int, kv_cache_config: KVCacheConfig | None
    ) -> OffloadOptions:
        options = parse_native_options(extra, world_size)
        if kv_cache_config is not None:
            groups = kv_cache_config.prefix_cacheable_groups
            if not groups:
                raise ValueError("KV offloading found no eligible cache groups.")
            check_chunk(options, [group.kv_cache_spec.block_size for group in groups])
        return options.machine

    def get_kv_connector_stats(self) -> KVConnectorStats | None:
        manager = self.scheduler_manager
        base = None if manager is None else manager.get_stats(only_news=True)
        if manager is None or base is None:
            return None
        return native_stats(manager, base, self._block_bytes)

    @classmethod
    def build_kv_connector_stats(cls, data: dict[str, Any] | None = None) -> KVConnectorStats | None:
        return OffloadingConnectorStats() if data is None else OffloadingConnectorStats(data)

    @classmethod
    def build_prom_metrics(
        cls,
        vllm_config: VllmConfig,
        metric_types: Mapping[Any, Any],
        labelnames: list[str],
        per_engine_labelvalues: dict[int, list[object]],
    ) -> OffloadPromMetrics:
        return OffloadPromMetrics(vllm_config, metric_types, labelnames, per_engine_labelvalues)


__all__ = ["OffloadingConnector"]
