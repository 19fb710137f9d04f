"""The order of a connector's worker calls, also on empty and failed steps, and the public facades over it."""

from __future__ import annotations

from unittest.mock import MagicMock

import pytest

from tests.helpers.recording_connector import RecordingConnector, StepOrders
from tests.helpers.steps import step_output
from vllm.distributed.kv_transfer.kv_connector.v1.base import KVConnectorBase_V1
from vllm.forward_context import ForwardContext, set_forward_context
from vllm.v1.kv_connector_types import KVConnectorTransferResults
from vllm.v1.outputs import EMPTY_MODEL_RUNNER_OUTPUT
from vllm.v1.worker import kv_connector_model_runner_mixin as mixin_module
from vllm.v1.worker.gpu.kv_connector import ActiveKVConnector
from vllm.v1.worker.kv_connector_model_runner_mixin import KVConnectorModelRunnerMixin
from vllm.v1.worker.kv_connector_step import StepConnector

BEFORE = ["handle_preemptions", "bind"]
REPORT = ["results", "errors", "stats", "events", "worker_meta"]
CONTEXT = ForwardContext({}, None)


def orders(**changes):
    return step_output({}, kv_connector_metadata=StepOrders(), **changes)


@pytest.fixture
def connector() -> RecordingConnector:
    return RecordingConnector()


@pytest.fixture
def step(connector) -> StepConnector:
    return StepConnector(ActiveKVConnector(connector))


def run(step: StepConnector, output) -> None:
    step.begin(output)
    step.pre_forward(output, CONTEXT, {"num_tokens": 3})
    step.active.wait_for_loads(["l0", "l1"])
    step.active.save_layers({"l0": None, "l1": None}, {})
    step.active.end_forward()
    step.finish()
    step.deliver()


def test_asynchronous_loads_start_when_the_forward_was_launched(step, connector) -> None:
    run(step, orders())
    layers = ["wait:l0", "wait:l1", "save:l0", "save:l1"]
    assert connector.calls == [
        *BEFORE, *layers, "finish_forward", "start_load_kv", "wait_for_save", *REPORT, "clear",
    ]  # fmt: skip
    assert connector.load_arguments == {"forward_context": CONTEXT, "num_tokens": 3}


def test_a_connector_without_layer_calls_gets_none() -> None:
    quiet = MagicMock(spec=KVConnectorBase_V1, has_layer_calls=False)
    quiet.get_transfer_results.return_value = KVConnectorTransferResults()
    run(StepConnector(ActiveKVConnector(quiet)), orders())
    quiet.wait_for_layer_load.assert_not_called()
    quiet.save_kv_layer.assert_not_called()
    quiet.wait_for_save.assert_called_once()


def test_synchronous_loads_start_before_the_forward(step, connector) -> None:
    run(step, orders(has_sync_kv_loads=True))
    layers = ["wait:l0", "wait:l1", "save:l0", "save:l1"]
    assert connector.calls == [
        *BEFORE, "start_load_kv", *layers, "finish_forward", "wait_for_save", *REPORT, "clear",
    ]  # fmt: skip


def test_empty_steps_make_the_same_calls_and_share_the_empty_output(connector) -> None:
    active = ActiveKVConnector(connector)
    assert active.no_forward(orders(finished_req_ids={"gone"})) is EMPTY_MODEL_RUNNER_OUTPUT
    assert connector.calls == [*BEFORE, "finish_forward", "start_load_kv", "wait_for_save", *REPORT, "clear"]
    assert connector.finished_seen == {"gone"}
    assert connector.load_arguments["request_ids"] == []
    assert "attn_metadata" not in connector.load_arguments


def test_a_report_travels_in_an_output_without_requests(connector) -> None:
    connector.results = KVConnectorTransferResults(None, {"r"}, {"r"})
    output = ActiveKVConnector(connector).no_forward(orders())
    assert output is not EMPTY_MODEL_RUNNER_OUTPUT
    assert output.kv_connector_output.finished_recving == {"r"}
    assert output.kv_connector_output.failed_recving == {"r"}


def test_the_facade_works_with_nothing_but_its_named_attributes(connector) -> None:
    bare = object.__new__(ActiveKVConnector)
    bare.kv_connector, bare._disabled, bare._pending_load_kwargs = connector, False, None
    assert bare.no_forward(orders()) is EMPTY_MODEL_RUNNER_OUTPUT
    assert connector.take_calls()[-1] == "clear"
    bare._disabled = True
    assert bare.no_forward(orders()) is EMPTY_MODEL_RUNNER_OUTPUT
    assert connector.calls == []


def test_while_disabled_nothing_is_called(connector) -> None:
    active = ActiveKVConnector(connector)
    active.set_disabled(True)
    active.begin(orders())
    active.pre_forward(orders(), CONTEXT, {})
    active.wait_for_loads(["l0"])
    active.save_layers({"l0": None}, {})
    active.end_forward()
    assert active.finish(set()) is None
    assert connector.calls == []


def test_a_step_without_orders_is_refused(step, connector) -> None:
    with pytest.raises(RuntimeError, match="carries no metadata"):
        step.begin(step_output({}))
    assert not connector.has_connector_metadata()


@pytest.mark.parametrize("failing", ["handle_preemptions", "start_load_kv", "wait_for_save", "results"])
def test_a_connector_that_raises_leaves_no_orders_behind(connector, failing) -> None:
    connector.failing = failing
    with pytest.raises(RuntimeError, match=failing):
        ActiveKVConnector(connector).no_forward(orders())
    assert not connector.has_connector_metadata()


def test_orders_of_a_failed_forward_are_carried_out_and_reported_with_the_next_step(step, connector) -> None:
    first = orders(finished_req_ids={"x"})
    step.begin(first)
    step.pre_forward(first, CONTEXT, {})
    connector.results = KVConnectorTransferResults({"sent"}, {"loaded"})
    connector.take_calls()
    step.salvage(first)
    assert connector.take_calls() == ["finish_forward", "start_load_kv", "wait_for_save", *REPORT, "clear"]
    assert connector.finished_seen == {"x"}
    connector.results = KVConnectorTransferResults(None, {"later"})
    output = step_after(step)
    assert output.kv_connector_output.finished_sending == {"sent"}
    assert output.kv_connector_output.finished_recving == {"loaded", "later"}
    assert output.kv_connector_output.expected_finished_count == 0
    assert step_after(step) is EMPTY_MODEL_RUNNER_OUTPUT


def step_after(step: StepConnector):
    output = orders()
    step.begin(output)
    return step.finish_without_forward(output)


def test_a_load_that_was_due_is_started_even_if_the_step_failed_before_it(step, connector) -> None:
    output = orders(has_sync_kv_loads=True)
    step.begin(output)
    step.salvage(output)
    assert connector.calls.count("start_load_kv") == 1
    assert connector.calls[-1] == "clear"


def test_ends_of_requests_are_told_again_if_their_step_broke_off(step, connector) -> None:
    connector.failing = "wait_for_save"
    first = orders(finished_req_ids={"x"})
    step.begin(first)
    step.salvage(first)
    assert not connector.has_connector_metadata()
    connector.failing = None
    step.begin(orders(finished_req_ids={"y"}))
    step.finish_without_forward(orders())
    assert connector.finished_seen == {"x", "y"}


def test_salvage_does_nothing_when_the_connector_is_done(step, connector) -> None:
    run(step, orders())
    connector.take_calls()
    step.salvage(orders())
    assert connector.calls == []


@pytest.fixture
def patched(connector, monkeypatch) -> RecordingConnector:
    monkeypatch.setattr(mixin_module, "get_kv_transfer_group", lambda: connector)
    monkeypatch.setattr(mixin_module, "has_kv_transfer_group", lambda: True)
    return connector


def test_the_mixin_wraps_a_forward(patched) -> None:
    patched.results = KVConnectorTransferResults({"s"}, None)
    with (
        set_forward_context(None, None),
        KVConnectorModelRunnerMixin.maybe_get_kv_connector_output(orders()) as output,
    ):
        assert patched.take_calls() == BEFORE
    assert output.finished_sending == {"s"}
    assert patched.calls[-1] == "clear"


def test_the_mixin_defers_the_end(patched) -> None:
    with (
        set_forward_context(None, None),
        KVConnectorModelRunnerMixin.maybe_get_kv_connector_output(orders(), defer_finalize=True),
    ):
        pass
    assert "wait_for_save" not in patched.calls
    assert patched.has_connector_metadata()
    patched.take_calls()
    KVConnectorModelRunnerMixin.finalize_kv_connector()
    assert patched.calls == ["wait_for_save", "clear"]


def test_the_mixin_runs_steps_without_a_forward(patched) -> None:
    assert KVConnectorModelRunnerMixin.kv_connector_no_forward(orders(), None) is EMPTY_MODEL_RUNNER_OUTPUT
    patched.results = KVConnectorTransferResults(None, {"r"})
    output = KVConnectorModelRunnerMixin.kv_connector_no_forward(orders(), None)
    assert output.kv_connector_output.finished_recving == {"r"}


def test_the_mixin_abandons_a_step_whose_forward_fails(patched) -> None:
    def fail() -> None:
        with (
            set_forward_context(None, None),
            KVConnectorModelRunnerMixin.maybe_get_kv_connector_output(orders()),
        ):
            raise RuntimeError("boom")

    with pytest.raises(RuntimeError, match="boom"):
        fail()
    assert not patched.has_connector_metadata()


def test_the_mixin_without_a_connector_does_nothing(monkeypatch) -> None:
    monkeypatch.setattr(mixin_module, "has_kv_transfer_group", lambda: False)
    with KVConnectorModelRunnerMixin.maybe_get_kv_connector_output(orders()) as output:
        assert output is None
    KVConnectorModelRunnerMixin.finalize_kv_connector()
