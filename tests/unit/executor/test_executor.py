"""Executors: which class, the life cycle, blocking and overlapping steps, failures, connector reports."""

from __future__ import annotations

import pytest

from tests.helpers.fake_worker_cls import FakeWorker
from vllm.config import ParallelConfig, SchedulerConfig, VllmConfig
from vllm.distributed.kv_transfer.kv_connector.utils import KVOutputAggregator
from vllm.v1.executor.abstract import Executor
from vllm.v1.executor.uniproc_executor import UniProcExecutor
from vllm.v1.outputs import KVConnectorOutput
from vllm.v1.worker.worker_base import WorkerWrapperBase

FAKE = "tests.helpers.fake_worker_cls."


def config_for(overlapping: bool = False, **parallel) -> VllmConfig:
    return VllmConfig(
        parallel_config=ParallelConfig(**{"worker_cls": FAKE + "FakeWorker", **parallel}),
        scheduler_config=SchedulerConfig.default_factory(async_scheduling=overlapping),
    )


@pytest.fixture(params=[False, True], ids=["inline", "thread"])
def executor(request):
    executor = UniProcExecutor(config_for(request.param))
    yield executor
    executor.shutdown()


def test_a_replica_takes_the_devices_behind_those_of_the_replicas_before_it() -> None:
    config = config_for(data_parallel_size=3)
    config.parallel_config.become_replica(2)
    executor = UniProcExecutor(config)
    assert (worker_of(executor).local_rank, worker_of(executor).rank) == (2, 0)
    executor.shutdown()


def worker_of(executor: UniProcExecutor) -> FakeWorker:
    worker = executor.driver_worker.worker
    assert isinstance(worker, FakeWorker)
    return worker


@pytest.mark.parametrize(
    "backend", [None, "uni", UniProcExecutor, "vllm.v1.executor.uniproc_executor.UniProcExecutor"]
)
def test_one_worker_runs_in_process(backend) -> None:
    assert Executor.get_class(config_for(distributed_executor_backend=backend)) is UniProcExecutor


@pytest.mark.parametrize(
    ("parallel", "message"),
    [
        (
            {"pipeline_parallel_size": 2},
            "pipeline_parallel_size=2 is not supported: only tensor_parallel_size",
        ),
        ({"prefill_context_parallel_size": 2}, "prefill_context_parallel_size=2 is not supported"),
        (
            {"tensor_parallel_size": 2, "decode_context_parallel_size": 2},
            "decode_context_parallel_size=2 is not supported",
        ),
        ({"tensor_parallel_size": 2, "distributed_executor_backend": "uni"}, "'uni' runs one rank, not 2"),
        ({"distributed_executor_backend": "ray"}, "no Ray executor"),
        ({"distributed_executor_backend": "external_launcher"}, "external launcher"),
    ],
)
def test_what_is_not_offered_is_said(parallel, message) -> None:
    with pytest.raises(ValueError, match=message):
        Executor.get_class(config_for(**parallel))


def test_wrong_types_and_names_are_refused() -> None:
    config = config_for()
    config.parallel_config.distributed_executor_backend = 3
    with pytest.raises(TypeError, match="subclass of Executor, got 3"):
        Executor.get_class(config)
    config.parallel_config.distributed_executor_backend = "unknown"
    with pytest.raises(ValueError, match="Unknown distributed_executor_backend 'unknown'"):
        Executor.get_class(config)


@pytest.mark.parametrize(
    ("told", "blocks"),
    [([5], 5), ([5, 4], 4), ([None, None], None), ([5, None], "some"), ([None, 5], "some")],
)
def test_all_ranks_must_say_how_many_host_blocks_they_have(executor, monkeypatch, told, blocks) -> None:
    monkeypatch.setattr(executor, "collective_rpc", lambda *_: told)
    if blocks == "some":
        with pytest.raises(RuntimeError, match="only some workers report a number of host blocks"):
            executor.get_simple_cpu_offload_num_blocks()
        return
    assert executor.get_simple_cpu_offload_num_blocks() == blocks


def test_start_up_goes_through_the_worker(executor) -> None:
    worker = worker_of(executor)
    assert worker.calls == ["init_device", "load_model"]
    assert executor.get_kv_cache_specs() == [{"layer": "spec"}]
    assert executor.determine_available_memory() == [123]
    assert [layout.name for layout in executor.get_supported_kv_cache_layouts()] == ["BLHNC"]
    executor.set_kv_cache_layout("BLHNC", 1)
    with pytest.raises(ValueError, match="LBHNC is not supported here; supported: BLHNC"):
        executor.set_kv_cache_layout("LBHNC", 1)
    executor.initialize_from_config(["config"])
    assert worker.calls[2:] == ["initialize:config", "warm_up"]
    assert executor.get_simple_cpu_offload_num_blocks() is None
    assert executor.get_kv_connector_handshake_metadata() == [None]
    assert executor.take_draft_token_ids() is None
    assert executor.list_loras() == set()


def test_a_step_in_two_calls(executor) -> None:
    assert executor.execute_model("ab") is None
    assert executor.sample_tokens(None).sampled_token_ids == [[2]]
    assert executor.sample_tokens(None) is None


def test_futures_complete_in_the_order_of_the_calls(executor) -> None:
    executed = executor.execute_model("abc", non_block=True)
    sampled = executor.sample_tokens(None, non_block=True)
    assert executed.result(5) is None
    assert sampled.result(5).sampled_token_ids == [[3]]


def test_a_failed_step_raises_from_its_future_alone(executor) -> None:
    failed = executor.execute_model("fail", non_block=True)
    with pytest.raises(RuntimeError, match="step failed"):
        failed.result(5)
    with pytest.raises(RuntimeError, match="step failed"):
        executor.execute_model("fail")
    executor.check_health()
    assert executor.execute_model("a", non_block=True).result(5) is None
    assert not executor.is_failed


def test_overlapping_steps_share_one_thread_and_inline_ones_the_callers() -> None:
    for overlapping in (False, True):
        executor = UniProcExecutor(config_for(overlapping))
        executor.execute_model("a", non_block=True)
        executor.sample_tokens(None, non_block=True).result(5)
        (thread,) = worker_of(executor).threads
        assert (thread == "worker_0") == overlapping
        executor.shutdown()


def test_shutdown_is_idempotent_and_ends_health(executor) -> None:
    worker = worker_of(executor)
    executor.shutdown()
    executor.shutdown()
    assert worker.calls.count("shutdown") == 1
    with pytest.raises(RuntimeError, match="shut down"):
        executor.check_health()


def test_connector_reports_are_combined(executor, monkeypatch) -> None:
    executor.kv_output_aggregator = KVOutputAggregator(2)
    worker = worker_of(executor)
    plain = FakeWorker.sample_tokens

    def with_report(grammar):
        output = plain(worker, grammar)
        output.kv_connector_output = KVConnectorOutput(finished_recving={"r"})
        return output

    monkeypatch.setattr(worker, "sample_tokens", with_report)
    seen = []
    for _ in range(2):
        assert executor.execute_model("a") is None
        seen.append(executor.sample_tokens(None).kv_connector_output.finished_recving)
    assert seen == [None, {"r"}]


def test_functions_run_with_the_worker(executor) -> None:
    assert executor.collective_rpc(lambda worker, x: (worker.rank, x), args=(5,)) == [(0, 5)]
    assert executor.collective_rpc("apply_model", args=(lambda model: model.in_features,)) == [1]


def test_sleep_is_refused_by_workers_that_cannot(executor) -> None:
    with pytest.raises(RuntimeError, match="FakeWorker cannot sleep"):
        executor.sleep()
    with pytest.raises(RuntimeError, match="LoRA"):
        executor.add_lora(None)


def init(**parallel) -> WorkerWrapperBase:
    wrapper = WorkerWrapperBase(config_for(**parallel))
    wrapper.init_worker(
        {"vllm_config": wrapper.vllm_config, "local_rank": 0, "rank": 3, "distributed_init_method": ""}
    )
    return wrapper


def test_worker_classes_can_be_extended() -> None:
    wrapper = init(worker_extension_cls=FAKE + "Extension")
    assert wrapper.execute_method("extra") == "extra of rank 3"
    assert isinstance(wrapper.worker, FakeWorker)


def test_wrong_worker_classes_are_refused() -> None:
    with pytest.raises(TypeError, match="must name a subclass of WorkerBase"):
        init(worker_cls=FAKE + "Extension")
    with pytest.raises(TypeError, match="must name a class, got 7"):
        init(worker_extension_cls=FAKE + "NOT_A_WORKER")
    with pytest.raises(TypeError, match="redefines load_model"):
        init(worker_extension_cls=FAKE + "Clashing")


def test_a_wrapper_without_a_worker_says_so() -> None:
    wrapper = WorkerWrapperBase(config_for())
    wrapper.shutdown()
    with pytest.raises(RuntimeError, match="init_worker"):
        wrapper.execute_method("load_model")
