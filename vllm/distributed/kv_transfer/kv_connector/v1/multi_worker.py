"""The worker's half of several connectors behind one: every child gets every call, with its own part of the orders.

Owns the count of saves that are still to be reported. It must not know any concrete child. Layer L4.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from contextlib import AbstractContextManager
from typing import Any, TypeVar

from vllm.distributed.kv_event_types import KVConnectorKVEvents
from vllm.distributed.kv_transfer.kv_connector.v1.base import (
    CopyBlocksOp,
    KVConnectorBase_V1,
    KVConnectorHandshakeMetadata,
    KVConnectorMetadata,
    KVConnectorTransferResults,
    KVConnectorWorkerMetadata,
    WorkerHalf,
)
from vllm.distributed.kv_transfer.kv_connector.v1.multi_records import (
    MultiKVConnectorHandshakeMetadata,
    MultiKVConnectorMetadata,
    MultiKVConnectorWithdrawal,
    MultiKVConnectorWorkerMetadata,
)

_Value = TypeVar("_Value")


class MultiWorkerHalf(WorkerHalf):
    """Hands each call of the worker to all children."""

    _connectors: Sequence[KVConnectorBase_V1]
    # Completions still to be swallowed, by request.
    _extra_async_saves: dict[str, int]

    def _children(
        self, metadata: KVConnectorMetadata
    ) -> Iterable[tuple[KVConnectorBase_V1, KVConnectorMetadata]]:
        if not isinstance(metadata, MultiKVConnectorMetadata):
            raise TypeError(f"expected MultiKVConnectorMetadata, got {type(metadata).__name__}")
        return zip(self._connectors, metadata.metadata, strict=True)

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

    def apply_withdrawal(self, withdrawal: KVConnectorMetadata) -> str | None:
        if not isinstance(withdrawal, MultiKVConnectorWithdrawal):
            raise TypeError(f"expected MultiKVConnectorWithdrawal, got {type(withdrawal).__name__}")
        parts = zip(self._connectors, withdrawal.metadata, strict=True)
        problems = [child.apply_withdrawal(part) for child, part in parts if part is not None]
        return "; ".join(problem for problem in problems if problem is not None) or None

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

    @property
    def has_layer_calls(self) -> bool:
        return any(child.has_layer_calls for child in self._connectors)

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


def _first(values: Iterable[_Value | None]) -> _Value | None:
    return next((value for value in values if value is not None), None)
