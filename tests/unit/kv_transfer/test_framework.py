"""Factory, aggregation over workers, metrics, and MultiConnector's choices."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

from tests.helpers.offload_rig import Rig, full, prompt, rig_config, window
from vllm.config import KVTransferConfig
from vllm.distributed.kv_transfer import kv_transfer_state
from vllm.distributed.kv_transfer.kv_connector.factory import KVConnectorFactory
from vllm.distributed.kv_transfer.kv_connector.utils import KVOutputAggregator
from vllm.distributed.kv_transfer.kv_connector.v1 import supports_hma
from vllm.distributed.kv_transfer.kv_connector.v1.base import KVConnectorRole
from vllm.distributed.kv_transfer.kv_connector.v1.example_connector import ExampleConnector
from vllm.distributed.kv_transfer.kv_connector.v1.metrics import KVConnectorLogging
from vllm.distributed.kv_transfer.kv_connector.v1.multi_connector import (
    MultiConnector,
    MultiKVConnectorStats,
    child_transfer_configs,
)
from vllm.v1.kv_cache_interface import KVCacheConfig, KVCacheGroupSpec
from vllm.v1.kv_connector_types import KVConnectorStats
from vllm.v1.metrics.cache_hit_source import CacheHitSource
from vllm.v1.outputs import EMPTY_MODEL_RUNNER_OUTPUT, KVConnectorOutput, ModelRunnerOutput
from vllm.v1.simple_kv_offload.metadata import SimpleCPUOffloadWorkerMetadata
from vllm.v1.simple_kv_offload.metrics import (
    INFO_LABELS,
    MetricName,
    SimpleCPUOffloadPromMetrics,
    SimpleCPUOffloadStats,
)

OFFLOAD = {
    "kv_connector": "SimpleCPUOffloadConnector",
    "kv_role": "kv_both",
    "kv_connector_extra_config": {"num_cpu_blocks": 4},
}


def transfer(name: str, **extra: Any) -> KVTransferConfig:
    return KVTransferConfig(kv_connector=name, kv_role="kv_both", kv_connector_extra_config=extra)


def groups(*specs: Any) -> KVCacheConfig:
    return KVCacheConfig(16, [], [KVCacheGroupSpec([f"layer{i}"], spec) for i, spec in enumerate(specs)])


class Outside(ExampleConnector):
    """A connector that an outside module brings along."""


def test_outside_connectors_register_and_are_created(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(KVConnectorFactory, "_registry", dict(KVConnectorFactory._registry))
    KVConnectorFactory.register_connector("Outside", __name__, "Outside")
    with pytest.raises(ValueError, match="'Outside' is already registered"):
        KVConnectorFactory.register_connector("Outside", __name__, "Outside")
    KVConnectorFactory._registry["Outside"] = lambda: Outside
    config = rig_config()
    config.kv_transfer_config = transfer("Outside")
    made = KVConnectorFactory.create_connector(config, KVConnectorRole.SCHEDULER, groups(full()))
    assert isinstance(made, Outside)
    assert made.role is KVConnectorRole.SCHEDULER


def test_unknown_names_are_told_what_there_is() -> None:
    with pytest.raises(ValueError, match="'NixlConnector' is not registered; known: Example"):
        KVConnectorFactory.get_connector_class(transfer("NixlConnector"))


def test_a_connector_for_one_group_refuses_several() -> None:
    config = rig_config()
    config.kv_transfer_config = transfer("ExampleConnector")
    with pytest.raises(ValueError, match="--disable-hybrid-kv-cache-manager"):
        KVConnectorFactory.create_connector(config, KVConnectorRole.SCHEDULER, groups(full(), window()))
    config.scheduler_config.disable_hybrid_kv_cache_manager = True
    KVConnectorFactory.create_connector(config, KVConnectorRole.SCHEDULER, groups(full(), window()))
    assert not supports_hma(ExampleConnector)
    assert supports_hma(MultiConnector)


def test_several_connectors_of_which_one_handles_one_group_refuse_several_groups() -> None:
    config = rig_config()
    children = [OFFLOAD, {"kv_connector": "ExampleConnector", "kv_role": "kv_both"}]
    config.kv_transfer_config = transfer("MultiConnector", connectors=children)
    with pytest.raises(ValueError, match="MultiConnector does not support HMA"):
        KVConnectorFactory.create_connector(config, KVConnectorRole.SCHEDULER, groups(full(), window()))
    KVConnectorFactory.create_connector(config, KVConnectorRole.SCHEDULER, groups(full()))
    config.kv_transfer_config = transfer("MultiConnector", connectors=[OFFLOAD])
    KVConnectorFactory.create_connector(config, KVConnectorRole.SCHEDULER, groups(full(), window()))


def test_the_workers_connector_is_one_per_process() -> None:
    config = rig_config(extra={"num_cpu_blocks": 4})
    kv_transfer_state.ensure_kv_transfer_shutdown()
    with pytest.raises(RuntimeError, match="not initialised"):
        kv_transfer_state.get_kv_transfer_group()
    kv_transfer_state.ensure_kv_transfer_initialized(config, groups(full()))
    first = kv_transfer_state.get_kv_transfer_group()
    kv_transfer_state.ensure_kv_transfer_initialized(config, groups(full()))
    assert kv_transfer_state.get_kv_transfer_group() is first
    assert kv_transfer_state.is_v1_kv_transfer_group()
    # Another engine of the process gets none of these blocks, and its end is not this one's.
    other = rig_config(extra={"num_cpu_blocks": 8})
    with pytest.raises(RuntimeError, match="already has the KV connector of another engine"):
        kv_transfer_state.ensure_kv_transfer_initialized(other, groups(full()))
    kv_transfer_state.ensure_kv_transfer_shutdown(other)
    assert kv_transfer_state.get_kv_transfer_group() is first
    kv_transfer_state.ensure_kv_transfer_shutdown(config)
    assert not kv_transfer_state.has_kv_transfer_group()


def output(**report: Any) -> ModelRunnerOutput:
    return ModelRunnerOutput([], {}, kv_connector_output=KVConnectorOutput(**report))


def test_xfer_06_ids_pass_once_all_expected_reports_are_in() -> None:
    aggregator = KVOutputAggregator(3)
    first = aggregator.aggregate([output(finished_recving={"a"}), output(finished_recving={"a"}), output()])
    assert first is not None
    assert first.kv_connector_output is not None
    assert first.kv_connector_output.finished_recving is None
    assert aggregator._recv_remaining_count == {"a": 1}
    last = aggregator.aggregate([output(), output(finished_recving={"a"}, failed_recving={"a"}), output()])
    assert last is not None
    assert last.kv_connector_output is not None
    assert last.kv_connector_output.finished_recving == last.kv_connector_output.failed_recving == {"a"}
    assert aggregator._recv_remaining_count == {}


def test_xfer_06_the_connector_says_how_many_ranks_report() -> None:
    declaring = SimpleNamespace(get_finished_count=lambda: 2)
    aggregator = KVOutputAggregator.from_connector(declaring, 4)  # type: ignore[arg-type]
    ended: set[str] = set()
    for number in range(35):  # two of four ranks take part
        silent = [output(), output()]
        told = aggregator.aggregate([output(finished_sending={f"r{number}"}) for _ in range(2)] + silent)
        assert told is not None
        assert told.kv_connector_output is not None
        ended |= told.kv_connector_output.finished_sending or set()
    assert len(ended) == 35
    assert aggregator._send_remaining_count == {}


def test_a_failure_is_told_with_the_last_report() -> None:
    aggregator = KVOutputAggregator(2)
    early = aggregator.aggregate([output(finished_recving={"a"}, failed_recving={"a"}), output()])
    assert early is not None
    assert early.kv_connector_output is not None
    assert early.kv_connector_output.failed_recving == set()
    late = aggregator.aggregate([output(), output(finished_recving={"a"})])
    assert late is not None
    assert late.kv_connector_output is not None
    assert late.kv_connector_output.failed_recving == {"a"}


def test_reports_of_failed_steps_join_the_next_ones() -> None:
    aggregator = KVOutputAggregator(2)
    aggregator.ft_defer_kv_connector_outputs([output(finished_sending={"s"}), None])
    mine = output(finished_sending={"s"}, invalid_block_ids={4})
    combined = aggregator.aggregate([mine, output(invalid_block_ids={5})])
    assert combined is mine
    report = combined.kv_connector_output
    assert report is not None
    assert (report.finished_sending, report.invalid_block_ids) == ({"s"}, {4, 5})


def test_nothing_is_consumed_without_the_output_rank() -> None:
    aggregator = KVOutputAggregator(1)
    assert aggregator.aggregate([output(finished_recving={"a"}), None], output_rank=1) is None
    with pytest.raises(AssertionError, match="worker 1 returned no output"):
        aggregator.aggregate([output(), None])


def test_the_shared_empty_output_is_never_changed() -> None:
    meta = SimpleCPUOffloadWorkerMetadata({0: 1})
    combined = KVOutputAggregator(2).aggregate(
        [EMPTY_MODEL_RUNNER_OUTPUT, output(kv_connector_worker_meta=meta)]
    )
    assert combined is not EMPTY_MODEL_RUNNER_OUTPUT
    assert EMPTY_MODEL_RUNNER_OUTPUT.kv_connector_output is None
    assert KVOutputAggregator(1).aggregate([EMPTY_MODEL_RUNNER_OUTPUT]) is EMPTY_MODEL_RUNNER_OUTPUT


class Metric:
    """Stands for a class of the metrics library."""

    made: dict[str, Any]

    def __init__(self, name: str, documentation: str, labelnames: list[str]) -> None:
        self.labelnames = labelnames
        self.values: dict[tuple[Any, ...], float] = {}

    def labels(self, *values: Any) -> Any:
        assert len(values) == len(self.labelnames)
        metric = self

        class Child:
            def inc(self, value: float) -> None:
                metric.values[values] = metric.values.get(values, 0) + value

            def set(self, value: float) -> None:
                metric.values[values] = value

        return Child()


class Counter(Metric):
    pass


class Gauge(Metric):
    pass


def test_stats_of_a_run_reach_the_sinks() -> None:
    rig = Rig()
    rig.generate(prompt(16), max_tokens=1)
    rig.evict_device()
    rig.generate(prompt(17), max_tokens=1)
    stats = rig.manager.get_stats()
    assert stats is not None
    data = stats.to_dict()
    assert data["types"][MetricName.LOAD_BLOCKS] == "counter"
    assert data["data"][MetricName.LOAD_BLOCKS] == {(): 4}
    assert data["data"][MetricName.INFO] == {("cpu", "false", "false", "32"): 1}
    assert data["data"][MetricName.STORE_BLOCKS][("stored",)] == 4
    assert data["data"][MetricName.ACCEPTED_TOKENS] == {("host",): 16}
    sink = SimpleCPUOffloadPromMetrics(
        rig.config, {Counter: Counter, Gauge: Gauge}, ["model_name", "engine"], {0: ["m", "0"]}
    )
    sink.observe(data)
    sink.observe(data)
    assert sink._defs[MetricName.LOAD_BLOCKS].values == {("m", "0"): 8}
    assert sink._defs[MetricName.INFO].labelnames == ["model_name", "engine", *INFO_LABELS]
    assert (0, MetricName.LOAD_BLOCKS, ()) in sink._metrics
    sink.observe_hits({CacheHitSource.HOST: 8, CacheHitSource.DISK: 0})
    sink.observe_hits({CacheHitSource.HOST: 4, CacheHitSource.DISK: 3})
    assert sink._defs[MetricName.HIT_TOKENS].values == {("m", "0"): 15}
    assert sink._defs[MetricName.TIER_HIT_TOKENS].values == {("m", "0", "host"): 12, ("m", "0", "disk"): 3}
    again = rig.manager.get_stats()
    assert again is not None
    assert again.data["data"][MetricName.LOAD_BLOCKS] == {(): 0}, "increases since the last call"


def test_a_step_in_which_nothing_happened_has_no_stats() -> None:
    rig = Rig()
    first = rig.connector.get_kv_connector_stats()
    assert first is not None, "all figures become visible at the start"
    assert MetricName.INFO in first.data["data"]
    assert rig.connector.get_kv_connector_stats() is None
    rig.generate(prompt(16), max_tokens=1)
    stats = rig.connector.get_kv_connector_stats()
    assert stats is not None
    assert stats.data["data"][MetricName.STORE_BLOCKS][("stored",)] == 4
    assert rig.connector.get_kv_connector_stats() is None
    rig.evict_device()
    rig.generate(prompt(17), max_tokens=1)
    stats = rig.connector.get_kv_connector_stats()
    assert stats is not None
    assert stats.data["data"][MetricName.LOAD_BLOCKS] == {(): 4}


def test_stats_add_up_and_are_logged() -> None:
    stats = SimpleCPUOffloadStats()
    assert stats.is_empty()
    stats.increase_counter(MetricName.LOAD_BLOCKS, 2)
    stats.set_gauge(MetricName.USED_BLOCKS, 5)
    stats.set_gauge(MetricName.PENDING_STORE_BLOCKS, 0)
    other = SimpleCPUOffloadStats()
    other.increase_counter(MetricName.LOAD_BLOCKS, 3)
    other.set_gauge(MetricName.USED_BLOCKS, 7)
    stats.aggregate(other)
    assert stats.reduce() == {"load_blocks_total": 5, "used_blocks": 7, "pending_store_blocks": 0}
    logging = KVConnectorLogging(transfer("SimpleCPUOffloadConnector"))
    logging.observe(stats.to_dict())
    lines: list[str] = []
    logging.log(lambda text, *values: lines.append(text % values))
    assert lines == ["KV Transfer metrics: load_blocks_total=5, used_blocks=7"]
    logging.log(lambda text, *values: lines.append(text % values))
    assert len(lines) == 1
    stats.reset()
    assert stats.is_empty()


def multi(*children: dict[str, Any]) -> MultiConnector:
    config = rig_config()
    config.kv_transfer_config = transfer("MultiConnector", connectors=list(children))
    return MultiConnector(config, KVConnectorRole.SCHEDULER, groups(full()))


def test_children_take_their_parents_engine_id_or_their_own() -> None:
    parent = transfer("MultiConnector", connectors=[OFFLOAD, {**OFFLOAD, "engine_id": "mine"}])
    assert [c.engine_id for c in child_transfer_configs(parent)] == [parent.engine_id, "mine"]
    with pytest.raises(ValueError, match="connectors"):
        child_transfer_configs(transfer("MultiConnector"))


def test_loads_come_from_the_first_child_that_offers(monkeypatch: pytest.MonkeyPatch) -> None:
    connector = multi(OFFLOAD, OFFLOAD)
    request = Rig().make_request(prompt(9))
    first, second = connector.sub_connectors
    monkeypatch.setattr(first, "get_num_new_matched_tokens", lambda r, n: (0, False))
    monkeypatch.setattr(second, "get_num_new_matched_tokens", lambda r, n: (8, True))
    told: list[tuple[int, int]] = []
    for index, child in enumerate(connector.sub_connectors):
        monkeypatch.setattr(
            child, "update_state_after_alloc", lambda r, b, n, index=index: told.append((index, n))
        )
    assert connector.get_num_new_matched_tokens(request, 0) == (8, True)
    assert connector._requests_to_connector == {request.request_id: 1}
    connector.update_state_after_alloc(request, "blocks", 8)  # type: ignore[arg-type]
    assert told == [(0, 0), (1, 8)], "every child sees every allocation"
    monkeypatch.setattr(first, "get_num_new_matched_tokens", lambda r, n: (None, False))
    assert connector.get_num_new_matched_tokens(request, 0) == (None, False)
    assert connector._requests_to_connector == {}, "no stale choice survives"


def test_delays_and_parameters_of_children_are_combined(monkeypatch: pytest.MonkeyPatch) -> None:
    connector = multi(OFFLOAD, OFFLOAD)
    request = Rig().make_request(prompt(9))
    answers: list[Any] = [(True, {"a": 1}), (True, {"b": 2})]
    for child, answer in zip(connector.sub_connectors, answers, strict=True):
        monkeypatch.setattr(child, "request_finished_all_groups", lambda r, b, answer=answer: answer)
    assert connector.request_finished_all_groups(request, ([],)) == (True, {"a": 1, "b": 2})
    assert connector._extra_async_saves == {request.request_id: 1}
    monkeypatch.setattr(
        connector.sub_connectors[1], "request_finished_all_groups", lambda r, b: (False, {"a": 3})
    )
    with pytest.raises(RuntimeError, match="kv_transfer_params"):
        connector.request_finished_all_groups(request, ([],))


def test_stats_of_children_are_kept_by_name() -> None:
    one = MultiKVConnectorStats({"X": KVConnectorStats({"n": 1})})
    one.aggregate(MultiKVConnectorStats({"X": KVConnectorStats({"n": 2}), "Y": KVConnectorStats({"m": 5})}))
    assert one.to_dict() == {"X": {"n": 3}, "Y": {"m": 5}}
    assert one["X"].data == {"n": 3}
    assert not one.is_empty()
    payload = SimpleCPUOffloadStats()
    payload.increase_counter(MetricName.LOAD_BLOCKS, 2)
    for form in (payload, {"data": payload.to_dict()}, payload.to_dict()):
        rebuilt = MultiConnector.build_kv_connector_stats({"SimpleCPUOffloadConnector": form})
        assert rebuilt is not None
        assert rebuilt.reduce() == {"SimpleCPUOffloadConnector": {"load_blocks_total": 2}}
    # A child of a module path is not in the table; that must not cost the others their figures.
    mixed = MultiConnector.build_kv_connector_stats(
        {"FromAModule": {"n": 1}, **one.to_dict(), **rebuilt.data}
    )
    assert mixed is not None
    assert mixed.reduce() == {"SimpleCPUOffloadConnector": {"load_blocks_total": 2}}
