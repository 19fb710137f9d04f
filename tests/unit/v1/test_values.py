"""Messages, runner outputs, step data and the read-only list: fields, order, wire form."""

from __future__ import annotations

from typing import Any

import msgspec
import numpy as np
import pytest

from vllm.sampling_params import SamplingParams
from vllm.v1.core.sched.output import (
    CachedRequestData,
    KVConnectorBlockState,
    NewRequestData,
    SchedulerOutput,
)
from vllm.v1.messages import (
    EngineCoreEvent,
    EngineCoreEventType,
    EngineCoreOutput,
    EngineCoreOutputs,
    EngineCoreReadyResponse,
    EngineCoreRequest,
    EngineCoreRequestType,
    FinishReason,
    UtilityOutput,
)
from vllm.v1.outputs import (
    EMPTY_MODEL_RUNNER_OUTPUT,
    KVConnectorOutput,
    LogprobsLists,
    LogprobsTensors,
    ModelRunnerOutput,
    SamplingMaskLists,
    with_ec_conn_output,
    with_ec_conn_output_only,
    with_kv_conn_output_only,
)
from vllm.v1.request import Request
from vllm.v1.utils import ConstantList, tensor_data


def fields(struct: type[msgspec.Struct]) -> list[str]:
    return list(struct.__struct_fields__)


def test_wire_order_of_the_messages() -> None:
    assert fields(EngineCoreRequest) == [
        "request_id",
        "prompt_token_ids",
        "mm_features",
        "sampling_params",
        "pooling_params",
        "arrival_time",
        "lora_request",
        "cache_salt",
        "data_parallel_rank",
        "prompt_embeds",
        "prompt_is_token_ids",
        "client_index",
        "current_wave",
        "priority",
        "trace_headers",
        "resumable",
        "external_req_id",
        "reasoning_ended",
        "reasoning_parser_kwargs",
        "abort_immediately",
        "session_id",
        "kv_hints",
    ]
    assert fields(EngineCoreOutput) == [
        "request_id",
        "new_token_ids",
        "new_logprobs",
        "new_prompt_logprobs_tensors",
        "pooling_output",
        "finish_reason",
        "stop_reason",
        "events",
        "kv_transfer_params",
        "ec_transfer_params",
        "trace_headers",
        "prefill_stats",
        "routed_experts",
        "num_nans_in_logits",
        "mm_cache_miss_hashes",
        "new_sampling_mask",
        "spec_decode_metrics",
        "prompt_token_id_logprobs",
        "error",
    ]
    assert fields(EngineCoreOutputs) == [
        "engine_index",
        "outputs",
        "scheduler_stats",
        "timestamp",
        "utility_output",
        "finished_requests",
        "wave_complete",
        "start_wave",
        "weight_version",
    ]
    assert fields(UtilityOutput) == ["call_id", "failure_message", "result"]
    assert fields(EngineCoreReadyResponse)[:4] == [
        "max_model_len",
        "num_gpu_blocks",
        "block_size",
        "dp_stats_address",
    ]
    assert fields(EngineCoreReadyResponse)[-3:] == [
        "coord_store_port",
        "coordinator_input_address",
        "coordinator_output_address",
    ]
    assert [kind.value for kind in EngineCoreRequestType] == [bytes([n]) for n in range(6)]


def test_messages_are_positional_arrays() -> None:
    raw = msgspec.msgpack.decode(msgspec.msgpack.encode(EngineCoreOutput("r", [1, 2])))
    assert raw[:3] == ["r", [1, 2], None]
    assert len(raw) == len(fields(EngineCoreOutput))
    output = EngineCoreOutput("r", [1], finish_reason=FinishReason.LENGTH, stop_reason="x")
    back = msgspec.msgpack.decode(msgspec.msgpack.encode(output), type=EngineCoreOutput)
    assert back == output
    assert back.finished
    assert not EngineCoreOutput("r", [1]).finished
    utility = msgspec.msgpack.decode(msgspec.msgpack.encode(UtilityOutput(3)))
    assert utility == [3, None, None]


def test_a_batch_is_stamped_unless_it_has_a_time() -> None:
    assert EngineCoreOutputs().timestamp > 0
    assert EngineCoreOutputs(timestamp=2.5).timestamp == 2.5
    assert EngineCoreEvent.new_event(EngineCoreEventType.PREEMPTED, 3.0).timestamp == 3.0


def test_log_probabilities_are_sliced_by_request() -> None:
    lists = LogprobsLists(
        np.arange(8, dtype=np.int32).reshape(4, 2),
        np.zeros((4, 2), dtype=np.float32),
        np.arange(4, dtype=np.int32),
        [0, 1, 3],
    )
    part = lists.slice_request(1, 2)
    assert part.sampled_token_ranks.tolist() == [1, 2]
    assert part.logprob_token_ids.tolist() == [[2, 3], [4, 5]]
    plain = lists._replace(cu_num_generated_tokens=None).slice_request(2, 1)
    assert plain.sampled_token_ranks.tolist() == [2]


class FakeTensor:
    """As much of a tensor as the records touch."""

    def __init__(self, data: Any) -> None:
        self.data = np.asarray(data)

    def cpu(self) -> FakeTensor:
        return self

    def numpy(self) -> Any:
        return self.data

    def to(self, device: str, non_blocking: bool) -> FakeTensor:
        assert (device, non_blocking) == ("cpu", True)
        return FakeTensor(self.data)

    def __getitem__(self, mask: Any) -> FakeTensor:
        return FakeTensor(self.data[mask])


def test_log_probability_tensors_come_to_the_host() -> None:
    tensors = LogprobsTensors(FakeTensor([[1], [2]]), FakeTensor([[0.5], [0.25]]), FakeTensor([1, 2]), [0, 1])
    assert tensors.tolists().logprobs.tolist() == [[0.5], [0.25]]
    assert tensors.tolists([0, 2]).cu_num_generated_tokens == [0, 2]
    assert tensors.to_cpu_nonblocking().cu_num_generated_tokens == [0, 1]
    assert tensors.filter(np.array([False, True])).tolists().sampled_token_ranks.tolist() == [2]


def test_sampling_masks_are_sliced_by_request() -> None:
    masks = SamplingMaskLists(np.arange(6, dtype=np.int32), np.array([0, 2, 3, 6]), [0, 1])
    part = masks.slice_request(1, 2)
    assert part.token_ids.tolist() == [2, 3, 4, 5]
    assert part.offsets is not None
    assert part.offsets.tolist() == [0, 1, 4]
    whole = SamplingMaskLists(np.arange(2, dtype=np.int32))
    assert whole.slice_request(0, 1) is whole


def test_connector_outputs_and_the_shared_empty_output() -> None:
    assert KVConnectorOutput().is_empty()
    report = KVConnectorOutput(invalid_block_ids={1})
    assert not report.is_empty()
    assert with_kv_conn_output_only(None) is EMPTY_MODEL_RUNNER_OUTPUT
    assert ModelRunnerOutput.with_kv_conn_output_only(report).kv_connector_output is report
    assert with_ec_conn_output_only(None) is EMPTY_MODEL_RUNNER_OUTPUT
    assert with_ec_conn_output(EMPTY_MODEL_RUNNER_OUTPUT, "x").ec_connector_output == "x"
    assert EMPTY_MODEL_RUNNER_OUTPUT.ec_connector_output is None
    own = ModelRunnerOutput(["a"], {"a": 0})
    assert with_ec_conn_output(own, "y") is own
    assert with_ec_conn_output(own, None).ec_connector_output == "y"


def test_new_request_data_hides_token_values_in_logs() -> None:
    request = Request("r", [424242, 7], SamplingParams(), None, arrival_time=0.0)
    data = NewRequestData.from_request(request, ([1, 2],), [424242, 7, 99])
    assert data.prompt_len == 2
    assert data.prefill_token_ids == [424242, 7, 99]
    assert "424242" not in data.anon_repr()
    assert "prefill_token_ids_len=3" in data.anon_repr()
    embeds = Request("e", None, SamplingParams(), None, arrival_time=0.0, prompt_embeds=[[0.0]] * 3)
    assert NewRequestData.from_request(embeds, ([],)).prompt_len == 3


def test_cached_request_data() -> None:
    data = CachedRequestData(
        ["a", "b"], {"b"}, [[424242]], {"b": [424242, 1]}, [None, ([3],)], [4, 5], [0, 2]
    )
    assert data.num_reqs == 2
    assert data.is_context_phase("a")
    assert not data.is_context_phase("b")
    assert not data.is_context_phase("nobody")
    assert "424242" not in data.anon_repr()
    assert CachedRequestData.make_empty().num_reqs == 0


def test_step_output_field_order_and_block_state() -> None:
    import dataclasses

    names = [field.name for field in dataclasses.fields(SchedulerOutput)]
    assert names[8:] == [
        "encoder_input_updates",
        "scheduled_encoder_input_stats",
        "preempted_req_ids",
        "has_structured_output_requests",
        "pending_structured_output_tokens",
        "num_invalid_spec_tokens",
        "kv_connector_metadata",
        "has_sync_kv_loads",
        "aux_output_connector_metadata",
        "ec_connector_metadata",
        "ec_manager_metadata",
        "new_block_ids_to_zero",
        "kv_cache_block_copies",
        "kv_connector_block_state",
        "num_spec_tokens_to_schedule",
        "num_common_prefix_blocks",
        "skip_drafts",
    ]
    assert SchedulerOutput.make_empty().total_num_scheduled_tokens == 0
    state = KVConnectorBlockState({"a"}, lambda request_id: ([1],), {})
    assert state.get_block_ids("a") == ([1],)
    assert state.get_block_ids("b") is None


def test_constant_list_is_a_live_view_that_refuses_changes() -> None:
    data = [1, 2, 3]
    view = ConstantList(data)
    data.append(2)
    assert list(view) == [1, 2, 3, 2]
    assert (view[0], view[-1], view[1:3], len(view)) == (1, 2, [2, 3], 4)
    assert (view.index(2), view.index(2, 2), 3 in view) == (1, 3, True)
    assert view == [1, 2, 3, 2] == ConstantList(data)
    assert view.copy() is not data
    assert "1, 2, 3" in repr(view)
    refused: list[Any] = [
        lambda: view.append(1),
        lambda: view.extend([1]),
        lambda: view.insert(1),
        lambda: view.pop(0),
        lambda: view.remove(1),
        lambda: view.clear(),
        lambda: view.__setitem__(0, 1),
        lambda: view.__delitem__(0),
    ]
    for change in refused:
        with pytest.raises(TypeError):
            change()
    with pytest.raises(TypeError):
        hash(view)


def test_tensor_data_gives_the_bytes() -> None:
    torch = pytest.importorskip("torch")
    values = torch.tensor([[1.0, 2.0]], dtype=torch.bfloat16)
    assert bytes(tensor_data(values)) == b"\x80\x3f\x00\x40"
