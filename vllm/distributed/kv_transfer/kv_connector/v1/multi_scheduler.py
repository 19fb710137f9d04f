"""The scheduler's half of several connectors behind one: loads come from the first that offers, stores go to all.

Owns the choice of a child per request and the count of saves under way. It must not know any concrete child. Layer L4.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Collection, Iterable, Sequence
from typing import Any

from vllm.distributed.kv_event_types import KVCacheEvent
from vllm.distributed.kv_transfer.kv_connector.v1.base import (
    KVConnectorBase_V1,
    KVConnectorHandshakeMetadata,
    KVConnectorWorkerMetadata,
    SchedulerHalf,
    SupportsHMA,
)
from vllm.distributed.kv_transfer.kv_connector.v1.multi_records import (
    MultiKVConnectorHandshakeMetadata,
    MultiKVConnectorMetadata,
    MultiKVConnectorWithdrawal,
    MultiKVConnectorWorkerMetadata,
    in_common_order,
)
from vllm.utils.checks import check
from vllm.v1.core.kv_cache_blocks import KVCacheBlocks
from vllm.v1.core.kv_cache_manager import KVCacheManager
from vllm.v1.core.sched.output import SchedulerOutput
from vllm.v1.kv_cache_report import ExternalHit, TierReport
from vllm.v1.metrics.cache_hit_source import CacheHitSource
from vllm.v1.outputs import KVConnectorOutput
from vllm.v1.request import Request

FinishResult = tuple[bool, dict[str, Any] | None]


class MultiSchedulerHalf(SchedulerHalf):
    """Every child sees every request and every allocation; one of them loads."""

    _connectors: Sequence[KVConnectorBase_V1]
    # The child that offered tokens to a request, until the request ends.
    _requests_to_connector: dict[str, int]
    # Reports of the next step.
    _extra_async_saves: dict[str, int]

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

    def present_events(self) -> Iterable[KVCacheEvent]:
        return [event for child in self._connectors for event in child.present_events()]

    def has_pending_block_frees(self) -> bool:
        return any(child.has_pending_block_frees() for child in self._connectors)

    def given_up_blocks(self) -> Collection[int]:
        return {block for child in self._connectors for block in child.given_up_blocks()}

    def awaits_late_ends(self) -> bool:
        return any(child.awaits_late_ends() for child in self._connectors)

    def has_pending_push_work(self) -> bool:
        return any(child.has_pending_push_work() for child in self._connectors)

    def reset_cache(self) -> bool | None:
        results = [child.reset_cache() for child in self._connectors]
        return all(result is not False for result in results)

    def reset_tiers(self, tiers: Collection[CacheHitSource]) -> bool | None:
        results = [child.reset_tiers(tiers) for child in self._connectors]
        return all(result is not False for result in results)

    def load_source(self, request: Request) -> CacheHitSource:
        child = self._chosen(request)
        return super().load_source(request) if child is None else child.load_source(request)

    def take_withdrawal(self) -> MultiKVConnectorWithdrawal | None:
        parts = tuple(child.take_withdrawal() for child in self._connectors)
        return None if all(part is None for part in parts) else MultiKVConnectorWithdrawal(parts)

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


def _parts_for(
    metadata: dict[int, KVConnectorHandshakeMetadata], index: int
) -> dict[int, KVConnectorHandshakeMetadata]:
    """By rank, what the worker half of this child said; what is of no child in particular is for all."""
    parts = {
        rank: entry.metadata[index] if isinstance(entry, MultiKVConnectorHandshakeMetadata) else entry
        for rank, entry in metadata.items()
    }
    return {rank: part for rank, part in parts.items() if part is not None}
