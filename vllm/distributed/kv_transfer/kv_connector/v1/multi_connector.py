"""Several connectors behind one: loads come from the first that offers, stores go to all.

Owns the choice of a child per request and the count of saves still under way. Every child sees every
allocation. It must not know any concrete child. Layer L4.
"""

from __future__ import annotations

import copy
import dataclasses
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import AbstractContextManager
from typing import Any, TypeVar

from vllm.config import KVTransferConfig, VllmConfig
from vllm.distributed.kv_event_types import KVCacheEvent, KVConnectorKVEvents
from vllm.distributed.kv_transfer.kv_connector.factory import ConnectorClass, KVConnectorFactory
from vllm.distributed.kv_transfer.kv_connector.v1.base import (
    CopyBlocksOp,
    KVConnectorBase_V1,
    KVConnectorHandshakeMetadata,
    KVConnectorMetadata,
    KVConnectorRole,
    KVConnectorStats,
    KVConnectorTransferResults,
    KVConnectorWorkerMetadata,
    SupportsHMA,
)
from vllm.distributed.kv_transfer.kv_connector.v1.multi_records import (
    MultiKVConnectorHandshakeMetadata,
    MultiKVConnectorMetadata,
    MultiKVConnectorPromMetrics,
    MultiKVConnectorStats,
    MultiKVConnectorWorkerMetadata,
    child_payload,
    in_common_order,
)
from vllm.distributed.kv_transfer.kv_connector.v1.prom_metrics import share_metrics
from vllm.utils.checks import check
from vllm.v1.core.kv_cache_blocks import KVCacheBlocks
from vllm.v1.core.kv_cache_manager import KVCacheManager
from vllm.v1.core.sched.output import SchedulerOutput
from vllm.v1.kv_cache_interface import KVCacheConfig
from vllm.v1.kv_cache_report import ExternalHit, TierReport
from vllm.v1.metrics.cache_hit_source import CacheHitSource
from vllm.v1.outputs import KVConnectorOutput
from vllm.v1.request import Request

FinishResult = tuple[bool, dict[str, Any] | None]
_Value = TypeVar("_Value")


class MultiConnector(KVConnectorBase_V1, SupportsHMA):
    """``kv_connector_extra_config["connectors"]`` lists the children as `KVTransferConfig` fields."""

    def __init__(
        self, vllm_config: VllmConfig, role: KVConnectorRole, kv_cache_config: KVCacheConfig | None = None
    ) -> None:
        super().__init__(vllm_config, role, kv_cache_config)
        self._connectors: list[KVConnectorBase_V1] = []
        for child_config in child_transfer_configs(self._kv_transfer_config):
            child_vllm_config = copy.copy(vllm_config)
            child_vllm_config.kv_transfer_config = child_config
            child_class = KVConnectorFactory.get_connector_class(child_config)
            self._connectors.append(child_class(child_vllm_config, role, kv_cache_config))
        self._all_support_hma = self.all_children_support_hma(self._kv_transfer_config)
        # Scheduler half: the child that offered tokens to a request, until the request ends.
        self._requests_to_connector: dict[str, int] = {}
        # Scheduler half: reports of the next step; worker half: completions still to be swallowed.
        self._extra_async_saves: dict[str, int] = {}

    @property
    def sub_connectors(self) -> list[KVConnectorBase_V1]:
        """The children, in order."""
        return self._connectors

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

    def _children(
        self, metadata: KVConnectorMetadata
    ) -> Iterable[tuple[KVConnectorBase_V1, KVConnectorMetadata]]:
        if not isinstance(metadata, MultiKVConnectorMetadata):
            raise TypeError(f"expected MultiKVConnectorMetadata, got {type(metadata).__name__}")
        return zip(self._connectors, metadata.metadata, strict=True)

    # -- worker half --------------------------------------------------------------------------

    # Tensors, forward contexts and attention metadata are opaque in the connector contract.
    def get_mem_pool_context(self) -> AbstractContextManager[Any] | None:
        return _first(child.get_mem_pool_context() for child in self._connectors)

    def register_kv_caches(self, kv_caches: dict[str, Any]) -> None:
        for child in self._connectors:
            child.register_kv_caches(kv_caches)

    def set_host_xfer_buffer_ops(self, copy_operation: CopyBlocksOp) -> None:
        for child in self._connectors:
            child.set_host_xfer_buffer_ops(copy_operation)

    def unregister_kv_caches(self) -> None:
        for child in self._connectors:
            child.unregister_kv_caches()

    def restore_kv_caches(self) -> None:
        for child in self._connectors:
            child.restore_kv_caches()

    def get_handshake_metadata(self) -> KVConnectorHandshakeMetadata | None:
        parts = tuple(child.get_handshake_metadata() for child in self._connectors)
        return None if all(part is None for part in parts) else MultiKVConnectorHandshakeMetadata(parts)

    def reset_capture_state(self) -> None:
        for child in self._connectors:
            child.reset_capture_state()

    def handle_preemptions(self, kv_connector_metadata: KVConnectorMetadata) -> None:
        for child, metadata in self._children(kv_connector_metadata):
            child.handle_preemptions(metadata)

    def bind_connector_metadata(self, connector_metadata: KVConnectorMetadata) -> None:
        super().bind_connector_metadata(connector_metadata)
        for child, metadata in self._children(connector_metadata):
            child.bind_connector_metadata(metadata)
        if isinstance(connector_metadata, MultiKVConnectorMetadata):
            self._extra_async_saves.update(connector_metadata.extra_async_saves or {})

    def clear_connector_metadata(self) -> None:
        super().clear_connector_metadata()
        for child in self._connectors:
            child.clear_connector_metadata()

    def start_load_kv(self, forward_context: Any, **kwargs: Any) -> None:
        for child in self._connectors:
            child.start_load_kv(forward_context, **kwargs)

    def wait_for_layer_load(self, layer_name: str) -> None:
        for child in self._connectors:
            child.wait_for_layer_load(layer_name)

    def save_kv_layer(self, layer_name: str, kv_layer: Any, attn_metadata: Any, **kwargs: Any) -> None:
        for child in self._connectors:
            child.save_kv_layer(layer_name, kv_layer, attn_metadata, **kwargs)

    def finish_forward(self) -> None:
        for child in self._connectors:
            child.finish_forward()

    def wait_for_save(self) -> None:
        for child in self._connectors:
            child.wait_for_save()

    def get_finished(self, finished_req_ids: set[str]) -> tuple[set[str] | None, set[str] | None]:
        results = self.get_transfer_results(finished_req_ids)
        return results.finished_sending, results.finished_recving

    def get_transfer_results(self, finished_req_ids: set[str]) -> KVConnectorTransferResults:
        sent: set[str] = set()
        received: set[str] = set()
        failed: set[str] = set()
        for child in self._connectors:
            results = child.get_transfer_results(finished_req_ids)
            for req_id in sorted(results.finished_sending or ()):
                # Every child that saves reports the request once; the last report counts.
                left = self._extra_async_saves.get(req_id, 0)
                if left == 0:
                    sent.add(req_id)
                elif left == 1:
                    del self._extra_async_saves[req_id]
                else:
                    self._extra_async_saves[req_id] = left - 1
            received |= results.finished_recving or set()
            failed |= results.failed_recving or set()
        return KVConnectorTransferResults(sent or None, received or None, failed)

    def get_block_ids_with_load_errors(self) -> set[int]:
        return set().union(*(child.get_block_ids_with_load_errors() for child in self._connectors))

    def get_kv_connector_kv_cache_events(self) -> KVConnectorKVEvents | None:
        total: KVConnectorKVEvents | None = None
        for child in self._connectors:
            events = child.get_kv_connector_kv_cache_events()
            if events is not None:
                total = events if total is None else total.merge(events)
        return total

    def build_connector_worker_meta(self) -> KVConnectorWorkerMetadata | None:
        metas = tuple(child.build_connector_worker_meta() for child in self._connectors)
        return MultiKVConnectorWorkerMetadata(metas) if any(m is not None for m in metas) else None

    # -- scheduler half -----------------------------------------------------------------------

    @property
    def supports_divergent_local_hybrid_hits(self) -> bool:
        return all(child.supports_divergent_local_hybrid_hits for child in self._connectors)

    @property
    def requires_kv_delivery(self) -> bool:
        return any(child.requires_kv_delivery for child in self._connectors)

    def bind_kv_cache_manager(self, kv_cache_manager: KVCacheManager) -> None:
        for child in self._connectors:
            child.bind_kv_cache_manager(kv_cache_manager)

    def on_new_request(self, request: Request) -> None:
        for child in self._connectors:
            child.on_new_request(request)

    def get_num_new_matched_tokens(
        self, request: Request, num_computed_tokens: int
    ) -> tuple[int | None, bool]:
        # An earlier choice belongs to an earlier lookup.
        self._requests_to_connector.pop(request.request_id, None)
        offers = [
            child.get_num_new_matched_tokens(request, num_computed_tokens) for child in self._connectors
        ]
        if any(num_tokens is None for num_tokens, _ in offers):
            return None, False
        for index, (num_tokens, is_async) in enumerate(offers):
            if num_tokens:
                self._requests_to_connector[request.request_id] = index
                return num_tokens, is_async
        return 0, False

    def get_loaded_kv_cache_group_ids(self, request: Request) -> Sequence[int]:
        child = self._chosen(request)
        return () if child is None else child.get_loaded_kv_cache_group_ids(request)

    def update_state_after_alloc(
        self, request: Request, blocks: KVCacheBlocks, num_external_tokens: int
    ) -> None:
        chosen = self._chosen(request)
        check(
            num_external_tokens == 0 or chosen is not None,
            f"{num_external_tokens} tokens accepted for {request.request_id}, but no child offered any",
        )
        for child in self._connectors:
            child.update_state_after_alloc(request, blocks, num_external_tokens if child is chosen else 0)

    def get_external_cache_hit_sources(
        self, request: Request, num_external_tokens: int
    ) -> dict[CacheHitSource, int]:
        child = self._chosen(request)
        if child is None:
            return super().get_external_cache_hit_sources(request, num_external_tokens)
        return child.get_external_cache_hit_sources(request, num_external_tokens)

    def get_cache_hit_sources(self) -> tuple[CacheHitSource, ...]:
        found = {source for child in self._connectors for source in child.get_cache_hit_sources()}
        return tuple(source for source in CacheHitSource if source in found)

    def peek_matched_tokens(self, request: Request, num_computed_tokens: int) -> ExternalHit | None:
        offered = dict.fromkeys(self.get_cache_hit_sources(), 0)
        held, loads_async = dict(offered), False
        for child in self._connectors:
            hit = child.peek_matched_tokens(request, num_computed_tokens)
            if hit is None:
                return None
            held.update({source: max(held[source], tokens) for source, tokens in hit.held.items()})
            if hit.num_tokens and not any(offered.values()):
                offered.update(hit.offered)
                loads_async = hit.loads_async
        return ExternalHit(offered, held, loads_async)

    def get_tier_reports(self) -> Sequence[TierReport]:
        return [report for child in self._connectors for report in child.get_tier_reports()]

    def _chosen(self, request: Request) -> KVConnectorBase_V1 | None:
        index = self._requests_to_connector.get(request.request_id)
        return None if index is None else self._connectors[index]

    def build_connector_meta(self, scheduler_output: SchedulerOutput) -> MultiKVConnectorMetadata:
        extra, self._extra_async_saves = self._extra_async_saves, {}
        metas = tuple(child.build_connector_meta(scheduler_output) for child in self._connectors)
        return MultiKVConnectorMetadata(metas, extra or None)

    def update_connector_output(self, connector_output: KVConnectorOutput) -> None:
        report = connector_output.kv_connector_worker_meta
        metas: Sequence[KVConnectorWorkerMetadata | None] = [None] * len(self._connectors)
        if isinstance(report, MultiKVConnectorWorkerMetadata):
            metas = report.metadata
        for child, meta in zip(self._connectors, metas, strict=True):
            child.update_connector_output(
                dataclasses.replace(connector_output, kv_connector_worker_meta=meta)
            )

    def request_finished(self, request: Request, block_ids: list[int]) -> FinishResult:
        return self._finish(request, lambda child: child.request_finished(request, block_ids))

    def request_finished_all_groups(self, request: Request, block_ids: tuple[list[int], ...]) -> FinishResult:
        def finish(child: KVConnectorBase_V1) -> FinishResult:
            if isinstance(child, SupportsHMA):
                return child.request_finished_all_groups(request, block_ids)
            check(
                len(block_ids) <= 1,
                f"{type(child).__name__} got {len(block_ids)} KV cache groups but handles one",
            )
            return child.request_finished(request, block_ids[0] if block_ids else [])

        return self._finish(request, finish)

    def _finish(self, request: Request, finish: Callable[[KVConnectorBase_V1], FinishResult]) -> FinishResult:
        num_saves = 0
        merged: dict[str, Any] | None = None
        for child in self._connectors:
            delays, params = finish(child)
            num_saves += delays
            if params is None:
                continue
            clash = set(params) & set(merged or {})
            if clash:
                raise RuntimeError(
                    f"several connectors return kv_transfer_params {sorted(clash)} for {request.request_id}"
                )
            merged = {**(merged or {}), **params}
        if num_saves > 1:
            self._extra_async_saves[request.request_id] = num_saves - 1
        self._requests_to_connector.pop(request.request_id, None)
        return num_saves > 0, merged

    def register_finished_partial_tail(
        self, request: Request, block_ids: tuple[list[int], ...], tails: Sequence[tuple[int, int, int]]
    ) -> bool:
        taken = [
            child.register_finished_partial_tail(request, block_ids, tails) for child in self._connectors
        ]
        return any(taken)

    def take_events(self) -> Iterable[KVCacheEvent]:
        return in_common_order([list(child.take_events()) for child in self._connectors])

    def has_pending_block_frees(self) -> bool:
        return any(child.has_pending_block_frees() for child in self._connectors)

    def has_pending_push_work(self) -> bool:
        return any(child.has_pending_push_work() for child in self._connectors)

    def reset_cache(self) -> bool | None:
        results = [child.reset_cache() for child in self._connectors]
        return all(result is not False for result in results)

    def get_finished_count(self) -> int | None:
        counts = {child.get_finished_count() for child in self._connectors}
        if len(counts) > 1:
            raise ValueError(f"the connectors of a MultiConnector expect different completions: {counts}")
        return counts.pop() if counts else None

    def set_xfer_handshake_metadata(self, metadata: dict[int, KVConnectorHandshakeMetadata]) -> None:
        for index, child in enumerate(self._connectors):
            child.set_xfer_handshake_metadata(_parts_for(metadata, index))

    def set_xfer_handshake_metadata_pp_aware(
        self, metadata: dict[int, dict[int, KVConnectorHandshakeMetadata]]
    ) -> None:
        for index, child in enumerate(self._connectors):
            child.set_xfer_handshake_metadata_pp_aware(
                {stage: _parts_for(entries, index) for stage, entries in metadata.items()}
            )

    # -- both ---------------------------------------------------------------------------------

    def get_kv_connector_stats(self) -> KVConnectorStats | None:
        total = MultiKVConnectorStats()
        for child in self._connectors:
            stats = child.get_kv_connector_stats()
            if stats is not None:
                total.add(type(child).__name__, stats)
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
            child_vllm_config = copy.copy(vllm_config)
            child_vllm_config.kv_transfer_config = child
            layout = child_class.get_required_kvcache_layout(child_vllm_config)
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
            child_class = KVConnectorFactory.get_connector_class_by_name(name)
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
        sinks = {}
        # Two children of one family of connectors have figures of the same names.
        shared = share_metrics(metric_types)
        assert vllm_config.kv_transfer_config is not None
        for child_class, _ in child_classes(vllm_config.kv_transfer_config):
            if child_class.__name__ not in sinks:
                sink = child_class.build_prom_metrics(vllm_config, shared, labelnames, per_engine_labelvalues)
                if sink is not None:
                    sinks[child_class.__name__] = sink
        return MultiKVConnectorPromMetrics(
            vllm_config, metric_types, labelnames, per_engine_labelvalues, sinks
        )


def child_transfer_configs(kv_transfer_config: KVTransferConfig) -> list[KVTransferConfig]:
    """The children's configs; one without an engine id takes its parent's. ``ValueError`` if there are none."""
    children = kv_transfer_config.get_from_extra_config("connectors", None)
    if not isinstance(children, list) or not children:
        raise ValueError(
            "MultiConnector needs kv_connector_extra_config['connectors'], a list of connector configs, "
            f"got {children!r}"
        )
    return [KVTransferConfig(**{"engine_id": kv_transfer_config.engine_id, **child}) for child in children]


def child_classes(kv_transfer_config: KVTransferConfig) -> list[tuple[ConnectorClass, KVTransferConfig]]:
    """The children's classes with their configs."""
    return [
        (KVConnectorFactory.get_connector_class(child), child)
        for child in child_transfer_configs(kv_transfer_config)
    ]


def _parts_for(
    metadata: dict[int, KVConnectorHandshakeMetadata], index: int
) -> dict[int, KVConnectorHandshakeMetadata]:
    """By rank, what the worker half of this child said; what is of no child in particular is for all."""
    parts = {
        rank: entry.metadata[index] if isinstance(entry, MultiKVConnectorHandshakeMetadata) else entry
        for rank, entry in metadata.items()
    }
    return {rank: part for rank, part in parts.items() if part is not None}


def _first(values: Iterable[_Value | None]) -> _Value | None:
    return next((value for value in values if value is not None), None)


__all__ = [
    "MultiConnector",
    "MultiKVConnectorMetadata",
    "MultiKVConnectorPromMetrics",
    "MultiKVConnectorStats",
    "MultiKVConnectorWorkerMetadata",
]
