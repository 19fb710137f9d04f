"""A connector's worker half inside real steps of a CPU worker."""

from __future__ import annotations

import pytest

from tests.helpers.engine_configs import engine_config
from tests.helpers.hand_scheduler import HandScheduler, start_worker
from tests.helpers.recording_connector import RecordingConnector, StepOrders
from vllm.v1.kv_connector_types import KVConnectorTransferResults
from vllm.v1.worker.kv_connector_step import ActiveKVConnector, StepConnector

PROMPT = [7, 8, 9, 10, 11]
BEFORE = ["handle_preemptions", "bind"]
REPORT = ["wait_for_save", "results", "errors", "stats", "events", "worker_meta", "clear"]


@pytest.fixture(scope="module")
def started():
    return start_worker(engine_config("llama"))


@pytest.fixture
def connector(started) -> RecordingConnector:
    connector = RecordingConnector()
    started[0].model_runner.connector = StepConnector(ActiveKVConnector(connector))
    yield connector
    started[0].model_runner.connector = None


@pytest.fixture
def hand(started, connector):
    scheduler = HandScheduler(*started)
    yield scheduler
    connector.failing = None
    for req_id in list(scheduler.requests):
        scheduler.finish(req_id)
    step(scheduler, {})


def step(hand: HandScheduler, scheduled: dict[str, int], **changes):
    return hand.step(scheduled, kv_connector_metadata=StepOrders(), **changes)


def layers(hand: HandScheduler, what: str) -> list[str]:
    return [f"{what}:{name}" for name in hand.raw]


@pytest.mark.parametrize("sync", [False, True])
def test_the_calls_surround_the_forward_in_order(hand, connector, sync) -> None:
    hand.add("a", PROMPT)
    step(hand, {"a": 5}, has_sync_kv_loads=sync)
    early, late = (["start_load_kv"], []) if sync else ([], ["start_load_kv"])
    waits, saves = layers(hand, "wait"), layers(hand, "save")
    assert connector.calls == [*BEFORE, *early, *waits, *saves, "finish_forward", *late, *REPORT]
    assert connector.load_arguments["request_ids"] == ["a"]
    assert connector.load_arguments["num_tokens"] == 5
    assert connector.load_arguments["attn_metadata"].num_tokens == 5


def test_a_report_travels_with_the_tokens_of_its_step(hand, connector) -> None:
    hand.add("a", PROMPT)
    connector.results = KVConnectorTransferResults({"s"}, None)
    assert "a" in step(hand, {"a": 5})
    assert hand.last_output.kv_connector_output.finished_sending == {"s"}
    step(hand, {"a": 1})
    assert not hand.last_output.kv_connector_output.finished_sending


def test_preemptions_are_told_before_any_block_is_written(hand, connector, monkeypatch) -> None:
    pages = hand.worker.model_runner.pages
    monkeypatch.setattr(pages, "zero_blocks", lambda ids: connector.calls.append("zero"))
    monkeypatch.setattr(pages, "copy_blocks", lambda pairs: connector.calls.append("copy"))
    step(hand, {}, new_block_ids_to_zero=[1], kv_cache_block_copies=[(1, 2)])
    assert connector.calls[:4] == [*BEFORE, "zero", "copy"]
    assert connector.calls[4:] == ["finish_forward", "start_load_kv", *REPORT]


@pytest.mark.parametrize("where", ["forward", "sampling", "request data"])
def test_a_report_of_a_failed_step_arrives_with_the_next_one(hand, connector, monkeypatch, where) -> None:
    runner = hand.worker.model_runner

    def broken(*_: object) -> None:
        raise RuntimeError("step failed")

    hand.add("a", PROMPT)
    hand.add("b", PROMPT)
    step(hand, {"b": 5})
    connector.take_calls()
    connector.results = KVConnectorTransferResults(None, {"loaded"})
    hand.finished.add("gone")
    orders = hand.build({"a": 5}, kv_connector_metadata=StepOrders())
    with monkeypatch.context() as patch:
        if where == "forward":
            patch.setattr(runner.model, "forward", broken)
        elif where == "sampling":
            patch.setattr(runner.row_sampler, "sample", broken)
        else:
            patch.setattr(runner.states, "apply", broken)
        second_half = where == "sampling"
        if second_half:
            hand.worker.execute_model(orders)
        run, argument = (
            (hand.worker.sample_tokens, None) if second_half else (hand.worker.execute_model, orders)
        )
        with pytest.raises(RuntimeError, match="step failed"):
            run(argument)
    assert connector.calls[-7:] == REPORT
    assert connector.calls.count("start_load_kv") == 1
    assert connector.finished_seen == {"gone"}
    hand.finish("a")
    step(hand, {"b": 1})
    assert hand.last_output.kv_connector_output.finished_recving == {"loaded"}
    step(hand, {"b": 1})
    assert not hand.last_output.kv_connector_output.finished_recving
    assert len(hand.requests["b"].outputs) == 3


def test_a_connector_that_raises_fails_the_step_and_the_next_one_works(hand, connector) -> None:
    hand.add("a", PROMPT)
    hand.add("b", PROMPT)
    step(hand, {"b": 5})
    connector.failing = "wait_for_save"
    with pytest.raises(RuntimeError, match="wait_for_save failed"):
        hand.worker.execute_model(hand.build({"a": 5}, kv_connector_metadata=StepOrders()))
    connector.failing = None
    hand.finish("a")
    assert set(step(hand, {"b": 1})) == {"b"}


def test_sleep_takes_the_caches_from_the_connector_and_gives_them_back(hand, connector, monkeypatch) -> None:
    for name in ("unregister_kv_caches", "restore_kv_caches"):
        monkeypatch.setattr(connector, name, lambda name=name: connector.calls.append(name), raising=False)
    hand.worker.sleep(1)
    hand.worker.wake_up()
    assert connector.calls == ["unregister_kv_caches", "restore_kv_caches"]


def test_recurrent_layers_work_without_prefix_caching() -> None:
    answers = []
    for caching in (True, False):
        hand = HandScheduler(*start_worker(engine_config("glm5_next", enable_prefix_caching=caching)))
        hand.add("a", [*PROMPT, *range(20, 90)])
        answers.append(list(hand.run_alone("a", 8, chunk=32)))
    assert answers[0] == answers[1]
