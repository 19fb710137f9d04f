"""The public CPU offload connector: joins the scheduler half and the worker half behind the contract.

Owns the options and which half an instance is. It must not decide anything about blocks. Layer L6.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import replace
from typing import Any, ClassVar

from vllm import envs
from vllm.config import VllmConfig
from vllm.distributed.kv_event_types import KVCacheEvent
from vllm.distributed.kv_transfer.kv_connector.v1.base import (
    KVConnectorBase_V1,
    KVConnectorMetadata,
    KVConnectorRole,
    KVConnectorTransferResults,
    SupportsHMA,
)
from vllm.logger import init_logger
from vllm.v1.core.block_pool import BlockPool
from vllm.v1.core.kv_cache_blocks import KVCacheBlocks
from vllm.v1.core.kv_cache_sizes import resolve_kv_cache_block_sizes
from vllm.v1.core.sched.output import SchedulerOutput
from vllm.v1.kv_cache_interface import KVCacheConfig
from vllm.v1.kv_cache_layout import KVCacheLayout
from vllm.v1.kv_cache_report import ExternalHit, TierReport
from vllm.v1.kv_connector_types import (
    HostPool,
    KVConnectorHandshakeMetadata,
    KVConnectorStats,
    KVConnectorWorkerMetadata,
)
from vllm.v1.metrics.cache_hit_source import CacheHitSource
from vllm.v1.outputs import KVConnectorOutput
from vllm.v1.request import Request
from vllm.v1.simple_kv_offload.copy_backends.shared_host import (
    bytes_there,
    check_shareable,
    join_shared_pool,
    remove_unused_segments,
)
from vllm.v1.simple_kv_offload.copy_backends.shared_segment import SharedSegment
from vllm.v1.simple_kv_offload.disk_backend import check_disk_path, remove_own_files
from vllm.v1.simple_kv_offload.host_buffer import check_reservable
from vllm.v1.simple_kv_offload.manager import SimpleCPUOffloadScheduler
from vllm.v1.simple_kv_offload.metadata import KeptInventory, KeptOrder, SimpleCPUOffloadMetadata
from vllm.v1.simple_kv_offload.metrics import SimpleCPUOffloadPromMetrics, SimpleCPUOffloadStats
from vllm.v1.simple_kv_offload.options import (
    DEFAULT_CPU_CAPACITY_BYTES,
    VALID_KV_OFFLOAD_BACKENDS,
    OffloadOptions,
    parse_options,
)
from vllm.v1.simple_kv_offload.records import BoundaryStoreStats
from vllm.v1.simple_kv_offload.sizing import cpu_bytes_for_copies, disk_bytes_for_copies
from vllm.v1.simple_kv_offload.worker import SimpleCPUOffloadWorker

logger = init_logger(__name__)


class SimpleCPUOffloadConnector(KVConnectorBase_V1, SupportsHMA):
    """A best-effort copy of the device's prefix cache in host memory or in a file.

    Without prefix caching there is nothing to copy: one warning, and every method does nothing.
    ``scheduler_manager`` exists in the scheduler half, ``worker_handler`` in the worker half.
    """

    _stats_class: ClassVar[type[SimpleCPUOffloadStats]] = SimpleCPUOffloadStats
    _metrics_class: ClassVar[type[SimpleCPUOffloadPromMetrics]] = SimpleCPUOffloadPromMetrics

    def __init__(
        self, vllm_config: VllmConfig, role: KVConnectorRole, kv_cache_config: KVCacheConfig | None = None
    ) -> None:
        super().__init__(vllm_config, role, kv_cache_config)
        self.scheduler_manager: SimpleCPUOffloadScheduler | None = None
        self.worker_handler: SimpleCPUOffloadWorker | None = None
        self._table: SharedSegment | None = None
        world_size = vllm_config.parallel_config.world_size
        options = self._read_options(
            self._kv_transfer_config.kv_connector_extra_config, world_size, kv_cache_config
        )
        self._cache_hit_source = CacheHitSource.DISK if options.is_disk else CacheHitSource.HOST
        if not vllm_config.cache_config.enable_prefix_caching:
            logger.warning_once(
                "%s is inactive: it copies the prefix cache, and prefix caching is "
                "off. Pass --enable-prefix-caching to use it.",
                type(self).__name__,
            )
            return
        if kv_cache_config is None:
            raise ValueError(f"{type(self).__name__} needs the kv_cache_config")
        options = replace(
            options,
            cpu_bytes=cpu_bytes_for_copies(vllm_config, kv_cache_config, options),
            disk_capacity_bytes=disk_bytes_for_copies(kv_cache_config, options),
        )
        if role is KVConnectorRole.SCHEDULER:
            if options.shared_pool is not None:
                self._table = join_shared_pool(vllm_config, options.shared_pool)
            try:
                self.scheduler_manager = self._make_scheduler_half(vllm_config, kv_cache_config, options)
                self._cache_hit_source = self.scheduler_manager.source
            except BaseException:
                self.shutdown()
                raise
        else:
            self.worker_handler = self._make_worker_half(vllm_config, kv_cache_config, options)

    def _make_scheduler_half(
        self, vllm_config: VllmConfig, kv_cache_config: KVCacheConfig, options: OffloadOptions
    ) -> SimpleCPUOffloadScheduler:
        _log_options(options, vllm_config.parallel_config.world_size)
        return _make_manager(vllm_config, kv_cache_config, options, self._table)

    def _make_worker_half(
        self, vllm_config: VllmConfig, kv_cache_config: KVCacheConfig, options: OffloadOptions
    ) -> SimpleCPUOffloadWorker:
        return _make_worker(vllm_config, kv_cache_config, options)

    # The values come from the user's JSON, so anything may be in them.
    @classmethod
    def _read_options(
        cls, extra: Mapping[str, Any], world_size: int, kv_cache_config: KVCacheConfig | None
    ) -> OffloadOptions:
        """The connector's own settings, checked."""
        return parse_options(extra, world_size)

    @classmethod
    def check_config(cls, vllm_config: VllmConfig) -> None:
        transfer_config = vllm_config.kv_transfer_config
        if transfer_config is not None:
            extra = transfer_config.kv_connector_extra_config
            options = cls._read_options(extra, vllm_config.parallel_config.world_size, None)
            if options.disk_path is not None:
                check_disk_path(options.disk_path, is_only_tier=options.is_disk)
            if not vllm_config.cache_config.enable_prefix_caching:
                return
            if options.shared_pool is not None:
                # With a number of blocks, the bytes are known only when the cache has been laid out.
                num_bytes = options.cpu_bytes_server_wide if options.num_cpu_blocks is None else None
                check_shareable(vllm_config, options.shared_pool, num_bytes)
            elif not options.is_disk and options.num_cpu_blocks is None:
                check_reservable(_bytes_of_a_region(vllm_config, options.cpu_bytes))

    @classmethod
    def host_pools(cls, vllm_config: VllmConfig) -> Sequence[HostPool]:
        transfer_config = vllm_config.kv_transfer_config
        if transfer_config is None or not vllm_config.cache_config.enable_prefix_caching:
            return ()
        extra = transfer_config.kv_connector_extra_config
        options = cls._read_options(extra, vllm_config.parallel_config.world_size, None)
        # With a number of blocks, the bytes are known only when the cache has been laid out.
        if options.is_disk or options.num_cpu_blocks is not None:
            return ()
        name = options.shared_pool
        there = 0 if name is None else bytes_there(name)
        return [HostPool("cpu_bytes_to_use", options.cpu_bytes_server_wide, name, there)]

    @classmethod
    def remove_leftovers(cls, vllm_config: VllmConfig) -> None:
        transfer_config = vllm_config.kv_transfer_config
        if transfer_config is None or not vllm_config.cache_config.enable_prefix_caching:
            return
        extra = transfer_config.kv_connector_extra_config
        options = cls._read_options(extra, vllm_config.parallel_config.world_size, None)
        if options.shared_pool is not None:
            remove_unused_segments(options.shared_pool)
        if options.disk_path is not None:
            remove_own_files(options.disk_path, vllm_config)

    @property
    def requires_kv_delivery(self) -> bool:
        """Nobody depends on the copies."""
        return False

    # -- worker half --------------------------------------------------------------------------

    # Tensors and forward contexts belong to the device side of the contract, where they are opaque.
    def register_kv_caches(self, kv_caches: dict[str, Any]) -> None:
        if self.worker_handler is not None:
            self.worker_handler.register_kv_caches(kv_caches)

    def get_aligned_num_cpu_blocks(self) -> int | None:
        """The number of blocks all ranks agreed on; None without a registered worker half."""
        if self.worker_handler is None or self.worker_handler.num_cpu_blocks == 0:
            return None
        return self.worker_handler.num_cpu_blocks

    def get_handshake_metadata(self) -> KVConnectorHandshakeMetadata | None:
        return None if self.worker_handler is None else self.worker_handler.kept_inventory

    def apply_withdrawal(self, withdrawal: KVConnectorMetadata) -> str | None:
        if self.worker_handler is None or not isinstance(withdrawal, KeptOrder):
            return None
        return self.worker_handler.withdraw(withdrawal)

    def unregister_kv_caches(self) -> None:
        if self.worker_handler is not None:
            self.worker_handler.unregister_kv_caches()

    def handle_preemptions(self, kv_connector_metadata: KVConnectorMetadata) -> None:
        if self.worker_handler is not None:
            self.worker_handler.handle_preemptions(kv_connector_metadata)

    def bind_connector_metadata(self, connector_metadata: KVConnectorMetadata) -> None:
        super().bind_connector_metadata(connector_metadata)
        if self.worker_handler is not None:
            self.worker_handler.bind_connector_metadata(connector_metadata)

    def clear_connector_metadata(self) -> None:
        super().clear_connector_metadata()
        if self.worker_handler is not None:
            self.worker_handler.clear_connector_metadata()

    def start_load_kv(self, forward_context: Any, **kwargs: Any) -> None:
        if self.worker_handler is not None:
            self.worker_handler.start_load_kv()

    @property
    def has_layer_calls(self) -> bool:
        return False

    def wait_for_layer_load(self, layer_name: str) -> None:
        """Loads are never synchronous."""

    def save_kv_layer(self, layer_name: str, kv_layer: Any, attn_metadata: Any, **kwargs: Any) -> None:
        """Blocks are stored whole, after the step."""

    def wait_for_save(self) -> None:
        if self.worker_handler is not None:
            self.worker_handler.wait_for_save()

    def get_finished(self, finished_req_ids: set[str]) -> tuple[set[str] | None, set[str] | None]:
        if self.worker_handler is None:
            return None, None
        return self.worker_handler.get_finished(finished_req_ids)

    def get_transfer_results(self, finished_req_ids: set[str]) -> KVConnectorTransferResults:
        if self.worker_handler is None:
            return KVConnectorTransferResults()
        return self.worker_handler.get_transfer_results(finished_req_ids)

    def build_connector_worker_meta(self) -> KVConnectorWorkerMetadata | None:
        return None if self.worker_handler is None else self.worker_handler.build_connector_worker_meta()

    # -- scheduler half -----------------------------------------------------------------------

    def set_xfer_handshake_metadata(self, metadata: dict[int, KVConnectorHandshakeMetadata]) -> None:
        """What the ranks found on their disks is used again, if all ranks have one that is kept."""
        found = [metadata[rank] for rank in sorted(metadata)]
        if self.scheduler_manager is not None:
            self.scheduler_manager.restore_kept([each for each in found if isinstance(each, KeptInventory)])

    def bind_gpu_block_pool(self, gpu_block_pool: BlockPool) -> None:
        if self.scheduler_manager is not None:
            self.scheduler_manager.bind_gpu_block_pool(gpu_block_pool)

    def get_num_new_matched_tokens(
        self, request: Request, num_computed_tokens: int
    ) -> tuple[int | None, bool]:
        if self.scheduler_manager is None:
            return 0, False
        return self.scheduler_manager.get_num_new_matched_tokens(request, num_computed_tokens)

    def peek_matched_tokens(self, request: Request, num_computed_tokens: int) -> ExternalHit | None:
        manager = self.scheduler_manager
        if manager is None:
            nothing = {self._cache_hit_source: 0}
            return ExternalHit(nothing, nothing, False)
        held = manager.peek_by_source(request, num_computed_tokens)
        offered = dict(held)
        below = manager.peek_disk_tokens(request, num_computed_tokens)
        if below is not None:
            held[CacheHitSource.DISK], on_both = below
            # It comes up first, and is loaded from host memory.
            offered[CacheHitSource.DISK] = max(0, on_both - held[self._cache_hit_source])
        return ExternalHit(offered, held, any(offered.values()))

    def get_external_cache_hit_sources(
        self, request: Request, num_external_tokens: int
    ) -> dict[CacheHitSource, int]:
        manager = self.scheduler_manager
        taken = {} if manager is None else manager.reporter.accepted_by_tier(request.request_id)
        if num_external_tokens and sum(taken.values()) == num_external_tokens:
            return taken
        return super().get_external_cache_hit_sources(request, num_external_tokens)

    def get_cache_hit_sources(self) -> tuple[CacheHitSource, ...]:
        manager = self.scheduler_manager
        return (self._cache_hit_source,) if manager is None else manager.hit_sources

    def get_tier_reports(self) -> Sequence[TierReport]:
        manager = self.scheduler_manager
        if manager is None:
            return ()
        disk = manager.describe_disk()
        return (manager.describe(self._cache_hit_source), *(() if disk is None else (disk,)))

    def update_state_after_alloc(
        self, request: Request, blocks: KVCacheBlocks, num_external_tokens: int
    ) -> None:
        if self.scheduler_manager is not None:
            self.scheduler_manager.update_state_after_alloc(request, blocks, num_external_tokens)

    def build_connector_meta(self, scheduler_output: SchedulerOutput) -> KVConnectorMetadata:
        if self.scheduler_manager is None:
            return SimpleCPUOffloadMetadata()
        return self.scheduler_manager.build_connector_meta(scheduler_output)

    def update_connector_output(self, connector_output: KVConnectorOutput) -> None:
        if self.scheduler_manager is not None:
            self.scheduler_manager.update_connector_output(connector_output)

    def request_finished(self, request: Request, block_ids: list[int]) -> tuple[bool, dict[str, Any] | None]:
        return self.request_finished_all_groups(request, (block_ids,))

    def request_finished_all_groups(
        self, request: Request, block_ids: tuple[list[int], ...]
    ) -> tuple[bool, dict[str, Any] | None]:
        if self.scheduler_manager is None:
            return False, None
        return self.scheduler_manager.request_finished_all_groups(request, block_ids)

    def take_events(self) -> Iterable[KVCacheEvent]:
        return () if self.scheduler_manager is None else self.scheduler_manager.take_events()

    def present_events(self) -> Iterable[KVCacheEvent]:
        manager = self.scheduler_manager
        if manager is None:
            return ()
        below = [] if manager.chain is None else manager.chain.disk.present_events()
        return [*manager.tier.present_events(), *below]

    def has_pending_block_frees(self) -> bool:
        return self.scheduler_manager is not None and self.scheduler_manager.has_pending_block_frees()

    def has_pending_push_work(self) -> bool:
        return self.scheduler_manager is not None and self.scheduler_manager.has_pending_work()

    def reset_cache(self) -> bool | None:
        return None if self.scheduler_manager is None else self.scheduler_manager.reset()

    def reset_tiers(self, tiers: Collection[CacheHitSource]) -> bool | None:
        return None if self.scheduler_manager is None else self.scheduler_manager.reset_tiers(tiers)

    def take_withdrawal(self) -> KVConnectorMetadata | None:
        return None if self.scheduler_manager is None else self.scheduler_manager.take_withdrawal()

    def get_loaded_kv_cache_group_ids(self, request: Request) -> Sequence[int]:
        return () if self.scheduler_manager is None else self.scheduler_manager.prefix_cacheable_group_ids

    def get_boundary_store_stats(self) -> BoundaryStoreStats | None:
        """The tally of the state hand-offs; None in the worker half or without prefix caching."""
        return None if self.scheduler_manager is None else self.scheduler_manager.get_boundary_store_stats()

    # -- both ---------------------------------------------------------------------------------

    def get_kv_connector_stats(self) -> KVConnectorStats | None:
        """Figures since the last call; None in a step in which nothing happened."""
        return None if self.scheduler_manager is None else self.scheduler_manager.get_stats(only_news=True)

    def shutdown(self) -> None:
        if self.worker_handler is not None:
            self.worker_handler.shutdown()
        table, self._table = self._table, None
        if table is not None:
            table.close()

    @classmethod
    def build_kv_connector_stats(cls, data: dict[str, Any] | None = None) -> KVConnectorStats | None:
        return cls._stats_class() if data is None else cls._stats_class(data)

    @classmethod
    def build_prom_metrics(
        cls,
        vllm_config: VllmConfig,
        metric_types: Mapping[Any, Any],
        labelnames: list[str],
        per_engine_labelvalues: dict[int, list[object]],
    ) -> SimpleCPUOffloadPromMetrics:
        return cls._metrics_class(vllm_config, metric_types, labelnames, per_engine_labelvalues)


def _bytes_of_a_region(vllm_config: VllmConfig, num_bytes: int) -> int:
    """What the host memory of a rank is reserved in at least: in one piece where blocks are outermost in the cache.

    Otherwise there is one per layer and head, and the system may grant pieces whose sum it would not.
    """
    name = vllm_config.cache_config.kv_cache_layout or envs.VLLM_KV_CACHE_LAYOUT
    if name is None or KVCacheLayout.from_name(str(name)).is_block_outermost:
        return num_bytes
    return 0


def _make_manager(
    vllm_config: VllmConfig,
    kv_cache_config: KVCacheConfig,
    options: OffloadOptions,
    shared_table: SharedSegment | None,
) -> SimpleCPUOffloadScheduler:
    scheduler_block_size, hash_block_size = resolve_kv_cache_block_sizes(kv_cache_config, vllm_config)
    return SimpleCPUOffloadScheduler(
        vllm_config,
        kv_cache_config,
        options.cpu_bytes,
        scheduler_block_size,
        hash_block_size,
        lazy_offload=options.lazy_offload,
        disk_capacity_bytes=options.disk_capacity_bytes if options.is_disk else 0,
        use_page_cache=options.use_page_cache,
        # The ranks have made a shared pool, and have checked its size against their bytes.
        num_cpu_blocks=options.num_cpu_blocks if shared_table is None else None,
        aligned_num_cpu_blocks=(
            vllm_config.cache_config.simple_cpu_offload_num_blocks
            if shared_table is None
            else shared_table.num_slots
        ),
        disk_tier_bytes=options.disk_capacity_bytes if options.disk_tier else 0,
        disk_wait_s=options.disk_wait_s,
        policy=options.policy,
        disk_persist=options.disk_persist,
        prompt_only=options.prompt_only,
        any_cacheable_group=options.any_cacheable_group,
        shared_table=shared_table,
    )


def _make_worker(
    vllm_config: VllmConfig, kv_cache_config: KVCacheConfig, options: OffloadOptions
) -> SimpleCPUOffloadWorker:
    return SimpleCPUOffloadWorker(
        vllm_config,
        kv_cache_config,
        options.cpu_bytes,
        kv_offload_backend=options.backend,
        disk_path=options.disk_path,
        disk_capacity_bytes=options.disk_capacity_bytes,
        disk_buffer_slots=options.disk_buffer_slots,
        use_page_cache=options.use_page_cache,
        num_cpu_blocks=options.num_cpu_blocks,
        transfer_timeout_s=options.transfer_timeout_s,
        disk_tier=options.disk_tier,
        disk_persist=options.disk_persist,
        shared_pool=options.shared_pool,
    )


def _log_options(options: OffloadOptions, world_size: int) -> None:
    if options.is_disk:
        logger.info("KV offload to disk: %.2f GiB per rank", options.disk_capacity_bytes / 1024**3)
        return
    logger.info(
        "KV offload to host memory: %.2f GiB in total, %.2f GiB for each of %d ranks%s",
        options.cpu_bytes_server_wide / 1024**3,
        options.cpu_bytes / 1024**3,
        world_size,
        "" if options.num_cpu_blocks is None else f"; num_cpu_blocks={options.num_cpu_blocks} of it are used",
    )
    if options.disk_tier:
        logger.info("KV offload to disk below it: %.2f GiB per rank", options.disk_capacity_bytes / 1024**3)


__all__ = ["DEFAULT_CPU_CAPACITY_BYTES", "VALID_KV_OFFLOAD_BACKENDS", "SimpleCPUOffloadConnector"]
