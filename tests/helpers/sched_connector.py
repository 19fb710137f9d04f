"""A fake KV connector for scheduler tests: an external store of token prefixes, and the worker half that fills blocks."""

from __future__ import annotations

import random
from dataclasses import dataclass, field
from types import SimpleNamespace
from typing import Any

from tests.helpers.sched import Driver, full, make_scheduler
from tests.helpers.sched_worker import FakeWorker
from vllm.distributed.kv_transfer.kv_connector.v1.base import KVConnectorBase_V1, SupportsHMA
from vllm.v1.core.kv_cache_blocks import KVCacheBlocks
from vllm.v1.core.sched.output import SchedulerOutput
from vllm.v1.kv_connector_types import KVConnectorMetadata
from vllm.v1.outputs import KVConnectorOutput
from vllm.v1.request import Request, RequestStatus


@dataclass
class Load:
    """One ordered load: positions `[first, len(tokens))` of these groups."""

    request_id: str
    tables: tuple[list[int], ...]
    groups: tuple[int, ...]
    tokens: list[int]
    first: int


@dataclass
class Orders(KVConnectorMetadata):
    loads: list[Load] = field(default_factory=list)


class FakeConnector(KVConnectorBase_V1, SupportsHMA):
    """Scheduler half: stores every aligned prefix of what finished, and offers the longest one it has."""

    def __init__(self, block_size: int, groups: tuple[int, ...] = (0,), load_async: bool = True) -> None:
        self.block_size = block_size
        self.groups = groups
        self.load_async = load_async
        self.store: set[tuple[int, ...]] = set()
        self.delivers = False
        self.delay_finish = False
        self.stores_on_finish = True
        self.offers_all = False
        self.not_ready: set[str] = set()
        self.pending_frees = False
        self.push_work = False
        self.reset_result: bool | None = None
        self.asked: list[str] = []
        self.local_hits: dict[str, int] = {}
        self.finished: dict[str, tuple[RequestStatus, tuple[list[int], ...]]] = {}
        self.allocations: list[tuple[str, int]] = []
        self._orders = Orders()

    # --- scheduler half ---------------------------------------------------------------------------------------------

    @property
    def requires_kv_delivery(self) -> bool:
        return self.delivers

    def remember(self, tokens: list[int]) -> None:
        for length in range(self.block_size, len(tokens) + 1, self.block_size):
            self.store.add(tuple(tokens[:length]))

    def get_num_new_matched_tokens(
        self, request: Request, num_computed_tokens: int
    ) -> tuple[int | None, bool]:
        self.asked.append(request.request_id)
        self.local_hits[request.request_id] = num_computed_tokens
        assert num_computed_tokens % self.block_size == 0
        if request.request_id in self.not_ready:
            return None, False
        tokens = list(request.all_token_ids)
        length = (len(tokens) - (not self.offers_all)) // self.block_size * self.block_size
        while length > num_computed_tokens and tuple(tokens[:length]) not in self.store:
            length -= self.block_size
        found = max(0, length - num_computed_tokens)
        return found, self.load_async and found > 0

    def get_loaded_kv_cache_group_ids(self, request: Request) -> tuple[int, ...]:
        return self.groups

    def update_state_after_alloc(
        self, request: Request, blocks: KVCacheBlocks, num_external_tokens: int
    ) -> None:
        self.allocations.append((request.request_id, num_external_tokens))
        if num_external_tokens == 0:
            return
        first = self.local_hits[request.request_id]
        tokens = list(request.all_token_ids)[: first + num_external_tokens]
        self._orders.loads.append(
            Load(request.request_id, blocks.get_block_ids(), self.groups, tokens, first)
        )

    def build_connector_meta(self, scheduler_output: SchedulerOutput) -> KVConnectorMetadata:
        state = scheduler_output.kv_connector_block_state
        assert state is not None
        for request_id in scheduler_output.num_scheduled_tokens:
            assert state.get_block_ids(request_id) is not None
        orders, self._orders = self._orders, Orders()
        return orders

    def request_finished(self, request: Request, block_ids: list[int]) -> tuple[bool, dict[str, Any] | None]:
        raise AssertionError("all groups are handed over")

    def request_finished_all_groups(
        self, request: Request, block_ids: tuple[list[int], ...]
    ) -> tuple[bool, dict[str, Any] | None]:
        assert request.request_id not in self.finished, f"{request.request_id} finished twice"
        self.finished[request.request_id] = (request.status, block_ids)
        if self.stores_on_finish and request.status is not RequestStatus.FINISHED_ERROR:
            self.remember(list(request.all_token_ids)[: request.num_computed_tokens])
        return self.delay_finish, None

    def has_pending_block_frees(self) -> bool:
        return self.pending_frees

    def has_pending_push_work(self) -> bool:
        return self.push_work

    def reset_cache(self) -> bool | None:
        self.store.clear()
        return self.reset_result

    # --- worker half (driven by the test) ---------------------------------------------------------------------------

    def start_load_kv(self, forward_context: Any, **kwargs: Any) -> None:
        raise AssertionError("the fake worker does not call this")

    def wait_for_layer_load(self, layer_name: str) -> None:
        raise AssertionError("the fake worker does not call this")

    def save_kv_layer(self, layer_name: str, kv_layer: Any, attn_metadata: Any, **kwargs: Any) -> None:
        raise AssertionError("the fake worker does not call this")

    def wait_for_save(self) -> None:
        raise AssertionError("the fake worker does not call this")


class LoadRunner:
    """The worker half: performs loads, late and sometimes badly, and reports what has ended.

    `hold` keeps all loads open; `fail_ids` and `fail_rate` make loads fail; `by_block` reports failures by block.
    """

    def __init__(
        self, worker: FakeWorker, connector: FakeConnector, rng: random.Random | None = None
    ) -> None:
        self.worker = worker
        self.connector = connector
        self.rng = rng
        self.hold = False
        self.fail_ids: set[str] = set()
        self.fail_rate = 0.0
        self.by_block = False
        self.open: list[Load] = []
        self.sends: list[str] = []
        self._report = KVConnectorOutput()
        worker.before_forward = self.before_forward
        worker.connector_report = self.report

    def before_forward(self, output: SchedulerOutput) -> None:
        orders = output.kv_connector_metadata
        assert isinstance(orders, Orders)
        for load in orders.loads:
            if self.connector.load_async:
                self.open.append(load)
            else:
                assert output.has_sync_kv_loads
                self._perform(load)

    def report(self, output: SchedulerOutput) -> KVConnectorOutput | None:
        if self.connector.delay_finish:
            self.sends += sorted(output.finished_req_ids & set(self.connector.finished))
        for load in list(self.open):
            if self.hold or (self.rng is not None and self.rng.random() < 0.5):
                continue
            self.open.remove(load)
            self._perform(load)
            self._report.finished_recving = (self._report.finished_recving or set()) | {load.request_id}
        if self.sends and not self.hold:
            self._report.finished_sending = set(self.sends)
            self.sends = []
        report, self._report = self._report, KVConnectorOutput()
        return None if report.is_empty() else report

    def _perform(self, load: Load) -> None:
        fails = load.request_id in self.fail_ids
        if self.rng is not None and self.fail_rate:
            fails = fails or self.rng.random() < self.fail_rate
        if not fails:
            self.worker.load(load.tables, load.groups, load.tokens, load.first)
            return
        self.fail_ids.discard(load.request_id)
        bad = self.worker.spoil(load.tables, load.groups, len(load.tokens), load.first)
        if self.by_block or not self.connector.load_async:
            self._report.invalid_block_ids |= bad
        else:
            self._report.failed_recving |= {load.request_id}


def prompt(length: int, seed: int = 0) -> list[int]:
    return [(seed * 7 + i * 3) % 50 for i in range(length)]


def with_connector(
    num_blocks: int, *, load_async: bool = True, policy: str = "recompute", **config: Any
) -> tuple[Driver, FakeConnector, LoadRunner]:
    """A scheduler of one full-attention group with an external store."""
    connector = FakeConnector(4, load_async=load_async)
    transfer = SimpleNamespace(kv_connector=None, is_kv_consumer=True, kv_load_failure_policy=policy)
    depth = 2 if config.get("looks_ahead") else 1
    scheduler = make_scheduler(
        [full(4)], num_blocks, connector=connector, kv_transfer_config=transfer, **config
    )
    driver = Driver(scheduler, depth=depth)
    return driver, connector, LoadRunner(driver.worker, connector)
