"""The native offload connector: the options and figures of its own interface on the CPU offload's machinery.

Owns the choice of groups and of names. It must not decide anything about blocks, nor move them. Layer L6.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from typing import Any

from vllm.config import VllmConfig
from vllm.distributed.kv_transfer.kv_connector.v1.base import KVConnectorMetadata, KVConnectorRole
from vllm.distributed.kv_transfer.kv_connector.v1.offloading.config import build_offloading_config
from vllm.distributed.kv_transfer.kv_connector.v1.offloading.metrics import (
    Observed,
    OffloadingConnectorStats,
    OffloadPromMetrics,
    native_stats,
)
from vllm.distributed.kv_transfer.kv_connector.v1.offloading.options import (
    check_chunk,
    check_outside_chunk,
    has_outside_spec,
    parse_native_options,
    parse_outside_options,
)
from vllm.distributed.kv_transfer.kv_connector.v1.offloading.scheduler import OffloadingConnectorScheduler
from vllm.distributed.kv_transfer.kv_connector.v1.offloading.worker import OffloadingConnectorWorker
from vllm.distributed.kv_transfer.kv_connector.v1.simple_cpu_offload_connector import (
    SimpleCPUOffloadConnector,
)
from vllm.v1.core.kv_cache_view import device_block_bytes
from vllm.v1.core.sched.output import SchedulerOutput
from vllm.v1.kv_cache_interface import KVCacheConfig
from vllm.v1.kv_connector_types import KVConnectorStats
from vllm.v1.kv_offload.factory import OffloadingSpecFactory
from vllm.v1.request import Request
from vllm.v1.simple_kv_offload.manager import SimpleCPUOffloadScheduler
from vllm.v1.simple_kv_offload.metadata import SimpleCPUOffloadMetadata
from vllm.v1.simple_kv_offload.options import OffloadOptions
from vllm.v1.simple_kv_offload.worker import SimpleCPUOffloadWorker


class OffloadingConnector(SimpleCPUOffloadConnector):
    """Copies the cacheable groups of the device's prefix cache to host memory, and from there to a file.

    Loads are asynchronous. Scratch groups are never touched. ``ValueError`` if no group can be offloaded.
    """

    _stats_class = OffloadingConnectorStats
    _metrics_class = OffloadPromMetrics

    def __init__(
        self, vllm_config: VllmConfig, role: KVConnectorRole, kv_cache_config: KVCacheConfig | None = None
    ) -> None:
        self._outside: OffloadingConnectorScheduler | None = None
        super().__init__(vllm_config, role, kv_cache_config)
        self._block_bytes = 0
        if kv_cache_config is not None:
            self._block_bytes = device_block_bytes(kv_cache_config, vllm_config.parallel_config.world_size)
        self._observed = Observed(self._block_bytes)

    def _make_scheduler_half(
        self, vllm_config: VllmConfig, kv_cache_config: KVCacheConfig, options: OffloadOptions
    ) -> SimpleCPUOffloadScheduler:
        if not has_outside_spec(self._kv_transfer_config.kv_connector_extra_config):
            return super()._make_scheduler_half(vllm_config, kv_cache_config, options)
        spec = OffloadingSpecFactory.create_spec(build_offloading_config(vllm_config, kv_cache_config))
        self._outside = OffloadingConnectorScheduler(spec, vllm_config, kv_cache_config)
        return self._outside

    def _make_worker_half(
        self, vllm_config: VllmConfig, kv_cache_config: KVCacheConfig, options: OffloadOptions
    ) -> SimpleCPUOffloadWorker:
        if not has_outside_spec(self._kv_transfer_config.kv_connector_extra_config):
            return super()._make_worker_half(vllm_config, kv_cache_config, options)
        spec = OffloadingSpecFactory.create_spec(build_offloading_config(vllm_config, kv_cache_config))
        return OffloadingConnectorWorker(
            spec=spec,
            vllm_config=vllm_config,
            kv_cache_config=kv_cache_config,
            transfer_timeout_s=options.transfer_timeout_s,
        )

    # The values come from the user's JSON, so anything may be in them.
    @classmethod
    def _read_options(
        cls, extra: Mapping[str, Any], world_size: int, kv_cache_config: KVCacheConfig | None
    ) -> OffloadOptions:
        if has_outside_spec(extra):
            if kv_cache_config is not None:
                groups = kv_cache_config.prefix_cacheable_groups
                check_outside_chunk(extra, [group.kv_cache_spec.block_size for group in groups])
            return parse_outside_options(extra, world_size)
        options = parse_native_options(extra, world_size)
        if kv_cache_config is not None:
            groups = kv_cache_config.prefix_cacheable_groups
            if not groups:
                raise ValueError("KV offloading found no eligible cache groups.")
            check_chunk(options, [group.kv_cache_spec.block_size for group in groups])
        return options.machine

    def get_num_new_matched_tokens(
        self, request: Request, num_computed_tokens: int
    ) -> tuple[int | None, bool]:
        manager = self.scheduler_manager
        if manager is None:
            return 0, False
        began = manager.clock.monotonic()
        found = manager.get_num_new_matched_tokens(request, num_computed_tokens)
        now = manager.clock.monotonic()
        self._observed.looked_up(request.request_id, began, now, is_answered=found[0] is not None)
        return found

    def build_connector_meta(self, scheduler_output: SchedulerOutput) -> KVConnectorMetadata:
        orders = super().build_connector_meta(scheduler_output)
        if isinstance(orders, SimpleCPUOffloadMetadata):
            self._observed.ordered(orders)
        return orders

    def request_finished_all_groups(
        self, request: Request, block_ids: tuple[list[int], ...]
    ) -> tuple[bool, dict[str, Any] | None]:
        self._observed.forget_request(request.request_id)
        return super().request_finished_all_groups(request, block_ids)

    def get_kv_connector_stats(self) -> KVConnectorStats | None:
        manager = self.scheduler_manager
        base = None if manager is None else manager.get_stats(only_news=not self._observed.is_due)
        if manager is None or base is None:
            return None
        stats = native_stats(manager, base, self._block_bytes)
        self._observed.report(stats)
        if self._outside is not None:
            self._outside.add_figures(stats)
        return stats

    def given_up_blocks(self) -> Collection[int]:
        return () if self._outside is None else self._outside.given_up.device_blocks

    def awaits_late_ends(self) -> bool:
        given_up = None if self._outside is None else self._outside.given_up
        return given_up is not None and (given_up.has_load or given_up.has_store)

    def shutdown(self) -> None:
        super().shutdown()
        if self._outside is not None:
            self._outside.shutdown()


__all__ = ["OffloadingConnector"]
