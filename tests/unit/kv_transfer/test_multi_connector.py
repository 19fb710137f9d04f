"""MultiConnector as a whole: every call reaches every child, and answers of children are joined by their meaning."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

from tests.helpers.offload_rig import Rig, full, prompt, rig_config
from vllm.config import KVTransferConfig
from vllm.distributed.kv_event_types import MEDIUM_CPU, AllBlocksCleared, BlockRemoved
from vllm.distributed.kv_transfer.kv_connector.factory import KVConnectorFactory
from vllm.distributed.kv_transfer.kv_connector.v1.base import (
    KVConnectorBase_V1,
    KVConnectorHandshakeMetadata,
    KVConnectorMetadata,
    KVConnectorPromMetrics,
    KVConnectorRole,
    KVConnectorTransferResults,
)
from vllm.distributed.kv_transfer.kv_connector.v1.metrics import KVConnectorLogging, KVConnectorPrometheus
from vllm.distributed.kv_transfer.kv_connector.v1.multi_connector import (
    MultiConnector,
    MultiKVConnectorMetadata,
    MultiKVConnectorWorkerMetadata,
)
from vllm.distributed.kv_transfer.kv_connector.v1.multi_records import in_common_order
from vllm.v1.kv_cache_interface import KVCacheConfig, KVCacheGroupSpec
from vllm.v1.kv_cache_report import ExternalHit
from vllm.v1.kv_connector_types import KVConnectorStats, KVConnectorWorkerMetadata
from vllm.v1.metrics.cache_hit_source import CacheHitSource
from vllm.v1.outputs import KVConnectorOutput

DEVICE_BLOCKS = 16


class Sum(KVConnectorWorkerMetadata):
    """A report that is a number."""

    def __init__(self, number: int) -> None:
        self.number = number

    def aggregate(self, other: KVConnectorWorkerMetadata) -> Sum:
        assert isinstance(other, Sum)
        return Sum(self.number + other.number)


class Sink(KVConnectorPromMetrics):
    """Remembers what it was given."""

    def __init__(self, *args: Any) -> None:
        super().__init__(*args)
        self.seen: list[tuple[dict[str, Any], int]] = []

    def observe(self, transfer_stats_data: dict[str, Any], engine_idx: int = 0) -> None:
        self.seen.append((transfer_stats_data, engine_idx))


class Child(KVConnectorBase_V1):
    """Notes the calls it gets; answers are set by the test."""

    layout: str | None = None

    def __init__(self, *args: Any) -> None:
        super().__init__(*args)
        self.calls: list[str] = []
        self.results = KVConnectorTransferResults()

    def start_load_kv(self, forward_context: Any, **kwargs: Any) -> None:
        self.calls.append("load")

    def wait_for_layer_load(self, layer_name: str) -> None:
        self.calls.append(f"wait {layer_name}")

    def save_kv_layer(self, layer_name: str, kv_layer: Any, attn_metadata: Any, **kwargs: Any) -> None:
        self.calls.append(f"save {layer_name}")

    def wait_for_save(self) -> None:
        self.calls.append("saved")

    def set_xfer_handshake_metadata(self, metadata: dict[int, KVConnectorHandshakeMetadata]) -> None:
        self.calls.append(f"handshake {sorted(metadata)}")

    def get_transfer_results(self, finished_req_ids: set[str]) -> KVConnectorTransferResults:
        return self.results

    def get_num_new_matched_tokens(self, request: Any, num_computed_tokens: int) -> tuple[int | None, bool]:
        return 0, False

    def update_state_after_alloc(self, request: Any, blocks: Any, num_external_tokens: int) -> None:
        self.calls.append(f"alloc {num_external_tokens}")

    def build_connector_meta(self, scheduler_output: Any) -> KVConnectorMetadata:
        return KVConnectorMetadata()

    @classmethod
    def get_required_kvcache_layout(cls, vllm_config: Any) -> str | None:
        return cls.layout

    @classmethod
    def supports_sleep_mode(cls, kv_transfer_config: KVTransferConfig) -> bool:
        return cls.layout is None

    @classmethod
    def requires_piecewise_for_cudagraph(cls, extra_config: dict[str, Any]) -> bool:
        return bool(extra_config.get("piecewise"))

    @classmethod
    def build_prom_metrics(cls, *args: Any) -> Sink:
        return Sink(*args)


class Laid(Child):
    """A child that insists on a layout."""

    layout = "HND"


class LaidOtherwise(Child):
    """A child that insists on another one, and builds no metrics."""

    layout = "NHD"

    @classmethod
    def build_prom_metrics(cls, *args: Any) -> None:
        return None


@pytest.fixture(autouse=True)
def children_are_known(monkeypatch: pytest.MonkeyPatch) -> None:
    known: dict[str, Callable[[], Any]] = dict(KVConnectorFactory._registry)
    for child in (Child, Laid, LaidOtherwise):
        known[child.__name__] = lambda child=child: child
    monkeypatch.setattr(KVConnectorFactory, "_registry", known)


def config_of(*names: str, **extra: Any) -> Any:
    config = rig_config()
    children = [
        {"kv_connector": name, "kv_role": "kv_both", "kv_connector_extra_config": extra} for name in names
    ]
    config.kv_transfer_config = KVTransferConfig(
        kv_connector="MultiConnector",
        kv_role="kv_both",
        kv_connector_extra_config={"connectors": children},
    )
    return config


def without_connector() -> Any:
    config = rig_config()
    config.kv_transfer_config = None
    return config


def pair(role: KVConnectorRole = KVConnectorRole.WORKER) -> tuple[MultiConnector, Child, Child]:
    plan = KVCacheConfig(DEVICE_BLOCKS, [], [KVCacheGroupSpec(["layer0"], full())])
    connector = MultiConnector(config_of("Child", "Child"), role, plan)
    first, second = connector.sub_connectors
    assert isinstance(first, Child)
    assert isinstance(second, Child)
    return connector, first, second


def test_every_step_of_a_forward_reaches_every_child_with_its_own_orders() -> None:
    connector, *children = pair()
    orders = (KVConnectorMetadata(), KVConnectorMetadata())
    metadata = MultiKVConnectorMetadata(orders, {"r": 1})
    connector.handle_preemptions(metadata)
    connector.bind_connector_metadata(metadata)
    assert [child._connector_metadata for child in children] == list(orders)
    connector.start_load_kv(None)
    connector.wait_for_layer_load("a")
    connector.save_kv_layer("a", None, None)
    connector.finish_forward()
    connector.wait_for_save()
    connector.clear_connector_metadata()
    for child in children:
        assert child.calls == ["load", "wait a", "save a", "saved"]
        assert not child.has_connector_metadata()
    with pytest.raises(TypeError, match="MultiKVConnectorMetadata, got KVConnectorMetadata"):
        connector.bind_connector_metadata(KVConnectorMetadata())


def test_a_save_is_over_when_the_last_child_that_saves_has_said_so() -> None:
    connector, first, second = pair()
    connector._extra_async_saves = {"r": 2}
    first.results = KVConnectorTransferResults({"r"}, {"l"}, {"l"})
    second.results = KVConnectorTransferResults({"r"}, None)
    both = connector.get_transfer_results(set())
    assert (both.finished_sending, both.finished_recving, both.failed_recving) == (None, {"l"}, {"l"})
    assert connector.get_finished(set()) == ({"r"}, {"l"}), "the third report of three"
    assert connector._extra_async_saves == {}


def test_life_cycle_calls_reach_every_child() -> None:
    connector, *children = pair()
    told: list[str] = []
    names = ("register_kv_caches", "set_host_xfer_buffer_ops", "unregister_kv_caches", "restore_kv_caches")
    names = (*names, "reset_capture_state", "bind_kv_cache_manager", "on_new_request", "shutdown")
    takes_argument = {
        "register_kv_caches",
        "set_host_xfer_buffer_ops",
        "bind_kv_cache_manager",
        "on_new_request",
    }
    for name in names:
        for index, child in enumerate(children):
            setattr(child, name, lambda *args, note=f"{name} {index}": told.append(note))
        getattr(connector, name)(*([None] if name in takes_argument else []))
        assert told == [f"{name} 0", f"{name} 1"]
        told.clear()
    connector.set_xfer_handshake_metadata({1: KVConnectorHandshakeMetadata()})
    connector.set_xfer_handshake_metadata_pp_aware({0: {2: KVConnectorHandshakeMetadata()}})
    assert all(child.calls == ["handshake [1]", "handshake [2]"] for child in children)
    with pytest.raises(ValueError, match="pipeline ranks"):
        connector.set_xfer_handshake_metadata_pp_aware({1: {}})


def test_each_scheduler_half_hears_its_own_worker_halves_only() -> None:
    connector, first, second = pair()
    told: dict[str, Any] = {}
    own = KVConnectorHandshakeMetadata()
    second.get_handshake_metadata = lambda: own  # type: ignore[method-assign]
    first.set_xfer_handshake_metadata = lambda entries: told.update(first=entries)  # type: ignore[method-assign]
    second.set_xfer_handshake_metadata = lambda entries: told.update(second=entries)  # type: ignore[method-assign]
    said = connector.get_handshake_metadata()
    assert said is not None
    connector.set_xfer_handshake_metadata({0: said, 1: said})
    assert told == {"first": {}, "second": {0: own, 1: own}}
    told.clear()
    connector.set_xfer_handshake_metadata_pp_aware({0: {3: said}})
    assert told == {"first": {}, "second": {3: own}}


def test_a_child_that_cannot_shut_down_does_not_keep_the_others_open() -> None:
    connector, first, second = pair()
    closed: list[str] = []

    def fail() -> None:
        raise OSError("disk gone")

    first.shutdown = fail  # type: ignore[method-assign]
    second.shutdown = lambda: closed.append("second")  # type: ignore[method-assign]
    with pytest.raises(OSError, match="disk gone"):
        connector.shutdown()
    assert closed == ["second"]


def test_answers_are_joined_by_their_meaning() -> None:
    connector, first, second = pair(KVConnectorRole.SCHEDULER)
    request = Rig().make_request(prompt(9))
    assert connector.get_mem_pool_context() is None
    assert connector.get_handshake_metadata() is None
    assert connector.get_kv_connector_kv_cache_events() is None
    assert connector.get_block_ids_with_load_errors() == set()
    assert list(connector.take_events()) == []
    assert connector.reset_cache() is True, "None counts as success"
    second.reset_cache = lambda: False  # type: ignore[method-assign]
    assert connector.reset_cache() is False
    assert not connector.has_pending_push_work()
    assert not connector.has_pending_block_frees()
    assert not connector.supports_divergent_local_hybrid_hits
    assert connector.requires_kv_delivery, "kv_both produces"
    assert not connector.register_finished_partial_tail(request, ([],), [])
    second.register_finished_partial_tail = lambda *args: True  # type: ignore[method-assign]
    assert connector.register_finished_partial_tail(request, ([],), [])
    assert connector.get_finished_count() is None
    first.get_finished_count = lambda: 3  # type: ignore[method-assign]
    with pytest.raises(ValueError, match="different completions"):
        connector.get_finished_count()


def test_a_request_without_a_chosen_child_loads_nothing() -> None:
    connector, first, second = pair(KVConnectorRole.SCHEDULER)
    request = Rig().make_request(prompt(9))
    assert connector.get_num_new_matched_tokens(request, 0) == (0, False)
    assert connector.get_loaded_kv_cache_group_ids(request) == ()
    assert connector.get_external_cache_hit_sources(request, 0) == {}
    second.get_num_new_matched_tokens = lambda request, n: (4, True)  # type: ignore[method-assign]
    assert connector.get_num_new_matched_tokens(request, 0) == (4, True)
    assert connector.get_loaded_kv_cache_group_ids(request) == (0,)
    assert sum(connector.get_external_cache_hit_sources(request, 4).values()) == 4
    connector.update_state_after_alloc(request, None, 4)  # type: ignore[arg-type]
    assert (first.calls, second.calls) == (["alloc 0"], ["alloc 4"])
    assert connector.request_finished(request, []) == (False, None)
    assert connector.get_num_new_matched_tokens(request, 0) == (4, True)
    assert connector.request_finished_all_groups(request, ([1],)) == (False, None)
    with pytest.raises(Exception, match="got 2 KV cache groups but handles one"):
        connector.request_finished_all_groups(request, ([1], [2]))


def test_a_look_names_what_the_first_offers_and_the_most_that_any_holds() -> None:
    connector, first, second = pair(KVConnectorRole.SCHEDULER)
    request = Rig().make_request(prompt(9))
    assert connector.peek_matched_tokens(request, 0) is None, "a child that cannot tell"
    (source,) = connector.get_cache_hit_sources()
    nothing = ExternalHit({source: 0}, {source: 2}, False)
    first.peek_matched_tokens = lambda request, n: nothing  # type: ignore[method-assign]
    second.peek_matched_tokens = lambda request, n: ExternalHit(  # type: ignore[method-assign]
        {source: 8}, {source: 8}, True
    )
    hit = connector.peek_matched_tokens(request, 0)
    assert hit == ExternalHit({source: 8}, {source: 8}, True)
    assert source in CacheHitSource
    assert connector.get_tier_reports() == []


def test_reports_of_workers_are_added_child_by_child() -> None:
    connector, first, second = pair()
    assert connector.build_connector_worker_meta() is None
    first.build_connector_worker_meta = lambda: Sum(1)  # type: ignore[method-assign]
    mine = connector.build_connector_worker_meta()
    assert mine is not None
    total = mine.aggregate(MultiKVConnectorWorkerMetadata((Sum(2), Sum(5))))
    assert isinstance(total, MultiKVConnectorWorkerMetadata)
    assert [report.number for report in total.metadata if isinstance(report, Sum)] == [3, 5]
    with pytest.raises(TypeError, match="cannot aggregate Sum"):
        total.aggregate(Sum(1))
    given: list[object] = []
    for child in (first, second):
        child.update_connector_output = (  # type: ignore[method-assign]
            lambda output: given.append(output.kv_connector_worker_meta)
        )
    connector.update_connector_output(KVConnectorOutput(kv_connector_worker_meta=total))
    connector.update_connector_output(KVConnectorOutput())
    assert given == [*total.metadata, None, None]


def test_a_withdrawal_reaches_the_children_that_it_is_for() -> None:
    connector, first, second = pair()
    assert connector.take_withdrawal() is None
    gone, seen = KVConnectorMetadata(), []
    second.take_withdrawal = lambda: gone  # type: ignore[method-assign]
    first.apply_withdrawal = lambda part: pytest.fail("nothing of this child was withdrawn")  # type: ignore[method-assign]
    second.apply_withdrawal = lambda part: seen.append(part) or "disk full"  # type: ignore[method-assign, func-returns-value]
    withdrawal = connector.take_withdrawal()
    assert withdrawal is not None
    assert connector.apply_withdrawal(withdrawal) == "disk full"
    assert seen == [gone]
    first.take_withdrawal = second.take_withdrawal  # type: ignore[method-assign]
    first.apply_withdrawal = lambda part: None  # type: ignore[method-assign]
    second.apply_withdrawal = first.apply_withdrawal  # type: ignore[method-assign]
    both = connector.take_withdrawal()
    assert both is not None
    assert connector.apply_withdrawal(both) is None
    with pytest.raises(TypeError, match="MultiKVConnectorWithdrawal"):
        connector.apply_withdrawal(gone)


def test_what_the_engine_asks_before_it_builds_a_connector() -> None:
    plain, laid = config_of("Child"), config_of("Child", "Laid")
    assert MultiConnector.supports_sleep_mode(plain.kv_transfer_config)
    assert not MultiConnector.supports_sleep_mode(laid.kv_transfer_config)
    assert MultiConnector.get_required_kvcache_layout(without_connector()) is None
    assert MultiConnector.get_required_kvcache_layout(plain) is None
    assert MultiConnector.get_required_kvcache_layout(laid) == "HND"
    with pytest.raises(ValueError, match="different KV cache layouts"):
        MultiConnector.get_required_kvcache_layout(config_of("Laid", "LaidOtherwise"))
    extra = laid.kv_transfer_config.kv_connector_extra_config
    assert not MultiConnector.requires_piecewise_for_cudagraph(extra)
    extra = config_of("Child", piecewise=True).kv_transfer_config.kv_connector_extra_config
    assert MultiConnector.requires_piecewise_for_cudagraph(extra)


def test_statistics_reach_the_sink_of_their_class() -> None:
    connector, first, second = pair()
    assert connector.get_kv_connector_stats() is None
    first.get_kv_connector_stats = lambda: KVConnectorStats({"n": 1})  # type: ignore[method-assign]
    stats = connector.get_kv_connector_stats()
    assert stats is not None
    prometheus = KVConnectorPrometheus(config_of("Child", "Child", "LaidOtherwise"), {}, [], {})
    prometheus.observe({**stats.to_dict(), "LaidOtherwise": {"n": 2}, "Gone": {"n": 3}}, 1)
    sinks: dict[str, Sink] = prometheus.prom_metrics._prom_metrics  # type: ignore[union-attr]
    assert list(sinks) == ["Child"], "one sink per class, none for a class without metrics"
    assert sinks["Child"].seen == [({"n": 1}, 1)]
    stats.reset()
    assert stats.is_empty()
    KVConnectorPrometheus(without_connector(), {}, [], {}).observe({"n": 1})


def test_statistics_without_a_connector_or_without_a_class_are_not_lost_silently() -> None:
    with pytest.raises(ValueError, match="no connector is configured"):
        KVConnectorLogging(None).observe({"n": 1})
    logging = KVConnectorLogging(KVTransferConfig(kv_connector="Child", kv_role="kv_both"))
    logging.observe({"n": 1})
    assert logging.transfer_stats_accumulator is None, "a warning says so"


def test_events_of_tiers_that_share_a_medium_are_told_before_the_medium_is_cleared() -> None:
    cleared = [AllBlocksCleared(medium=MEDIUM_CPU) for _ in range(3)]
    removed = [BlockRemoved(block_hashes=[n], medium=MEDIUM_CPU) for n in range(4)]
    first = [removed[0], cleared[0], removed[1]]
    second = [removed[2], cleared[1], removed[3], cleared[2]]
    told = in_common_order([first, second])
    assert [told.index(event) for event in (removed[0], removed[2])] == [0, 1]
    assert told[4:] == [removed[1], removed[3], cleared[2]]
    assert sorted(map(id, told)) == sorted(map(id, first + second))
    assert in_common_order([[], []]) == []
