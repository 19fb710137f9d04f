"""A connector as outsiders write them: only the public base class, one group, asynchronous both ways.

Finished requests leave their whole blocks on a shelf of the workers: the scheduler is asked to keep the blocks until
that is done. Later requests with the same prefix load them. A page that is gone fails the load.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import torch

from vllm.distributed.kv_transfer.kv_connector.v1 import (
    KVConnectorBase_V1,
    KVConnectorMetadata,
    KVConnectorRole,
    KVConnectorTransferResults,
)
from vllm.v1.metrics.cache_hit_source import CacheHitSource
from vllm.v1.outputs import KVConnectorOutput
from vllm.v1.request import Request, RequestStatus

Prefix = tuple[int, ...]
STORED_ENDS = (RequestStatus.FINISHED_STOPPED, RequestStatus.FINISHED_LENGTH_CAPPED)


@dataclass
class ShelfOrders(KVConnectorMetadata):
    """Per request the pairs (prefix that ends with the block, block id)."""

    loads: dict[str, list[tuple[Prefix, int]]] = field(default_factory=dict)
    stores: dict[str, list[tuple[Prefix, int]]] = field(default_factory=dict)


class ShelfConnector(KVConnectorBase_V1):
    """See the module."""

    def __init__(self, vllm_config: Any, role: KVConnectorRole, kv_cache_config: Any = None) -> None:
        super().__init__(vllm_config, role, kv_cache_config)
        self._cache_hit_source = CacheHitSource.P2P
        self._block_size: int = vllm_config.cache_config.block_size
        self._orders = ShelfOrders()
        self._known: set[Prefix] = set()
        self._local_tokens: dict[str, int] = {}
        self._sending: dict[str, tuple[int, list[Prefix]]] = {}
        self._epoch = 0
        self._caches: dict[str, torch.Tensor] = {}
        self._pages: dict[Prefix, dict[str, torch.Tensor]] = {}
        self._results = KVConnectorTransferResults()

    @property
    def requires_kv_delivery(self) -> bool:
        return False

    # -- worker half --------------------------------------------------------------------------

    def register_kv_caches(self, kv_caches: dict[str, torch.Tensor]) -> None:
        self._caches = kv_caches

    def start_load_kv(self, forward_context: Any, **kwargs: Any) -> None:
        received, failed = set(), set()
        for req_id, pairs in self._bound().loads.items():
            received.add(req_id)
            if any(prefix not in self._pages for prefix, _ in pairs):
                failed.add(req_id)
                continue
            for prefix, block in pairs:
                for name, page in self._pages[prefix].items():
                    self._caches[name][block] = page
        self._results = KVConnectorTransferResults(finished_recving=received, failed_recving=failed)

    def wait_for_layer_load(self, layer_name: str) -> None: ...

    def save_kv_layer(self, layer_name: str, kv_layer: Any, attn_metadata: Any, **kwargs: Any) -> None: ...

    def wait_for_save(self) -> None:
        for pairs in self._bound().stores.values():
            for prefix, block in pairs:
                self._pages[prefix] = {name: cache[block].clone() for name, cache in self._caches.items()}
        self._results.finished_sending = set(self._bound().stores)

    def get_transfer_results(self, finished_req_ids: set[str]) -> KVConnectorTransferResults:
        results, self._results = self._results, KVConnectorTransferResults()
        return results

    def _bound(self) -> ShelfOrders:
        metadata = self._get_connector_metadata()
        assert isinstance(metadata, ShelfOrders)
        return metadata

    # -- scheduler half -----------------------------------------------------------------------

    def get_num_new_matched_tokens(self, request: Request, num_computed_tokens: int) -> tuple[int, bool]:
        tokens, size = request.all_token_ids, self._block_size
        end = num_computed_tokens
        while end + size < len(tokens) and tuple(tokens[: end + size]) in self._known:
            end += size
        self._local_tokens[request.request_id] = num_computed_tokens
        return end - num_computed_tokens, end > num_computed_tokens

    def update_state_after_alloc(self, request: Request, blocks: Any, num_external_tokens: int) -> None:
        start = self._local_tokens.pop(request.request_id, 0)
        if num_external_tokens > 0:
            ids = blocks.get_block_ids()[0]
            self._orders.loads[request.request_id] = self._pairs(
                request, ids, start, start + num_external_tokens
            )

    def _pairs(self, request: Request, ids: list[int], start: int, end: int) -> list[tuple[Prefix, int]]:
        size = self._block_size
        ends = range(start + size, end + 1, size)
        return [(tuple(request.all_token_ids[:stop]), ids[stop // size - 1]) for stop in ends]

    def build_connector_meta(self, scheduler_output: Any) -> KVConnectorMetadata:
        orders, self._orders = self._orders, ShelfOrders()
        return orders

    def request_finished(self, request: Request, block_ids: list[int]) -> tuple[bool, None]:
        self._local_tokens.pop(request.request_id, None)
        pairs = self._pairs(request, block_ids, 0, request.num_confirmed_tokens)
        if request.status not in STORED_ENDS or not pairs:
            return False, None
        self._orders.stores[request.request_id] = pairs
        self._sending[request.request_id] = (self._epoch, [prefix for prefix, _ in pairs])
        return True, None

    def update_connector_output(self, connector_output: KVConnectorOutput) -> None:
        for req_id in connector_output.finished_sending or ():
            epoch, prefixes = self._sending.pop(req_id)
            if epoch == self._epoch:
                self._known.update(prefixes)

    def has_pending_push_work(self) -> bool:
        return bool(self._sending)

    def reset_cache(self) -> bool:
        self._known.clear()
        self._epoch += 1
        return not self._sending
