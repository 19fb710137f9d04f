"""A request: its tokens, its states, its order."""

from __future__ import annotations

from typing import Any

import pytest

from vllm.pooling_params import PoolingParams
from vllm.sampling_params import SamplingParams, StructuredOutputsParams
from vllm.utils.checks import InvariantError
from vllm.v1.message_types import EngineCoreEventType
from vllm.v1.messages import EngineCoreRequest
from vllm.v1.request import FinishReason, Request, RequestStatus


def make(request_id: str = "r", **fields: Any) -> Request:
    fields.setdefault("arrival_time", 0.0)
    return Request(
        request_id, fields.pop("prompt", [1, 2, 3]), fields.pop("params", SamplingParams()), None, **fields
    )


def test_one_parameter_object_and_a_prompt_are_needed() -> None:
    with pytest.raises(ValueError, match="cannot both be None"):
        Request("r", [1], None, None)
    with pytest.raises(ValueError, match="prompt_token_ids and prompt_embeds"):
        Request("r", None, SamplingParams(), None)


def test_a_pooling_request_has_one_output() -> None:
    request = Request("r", [1], None, PoolingParams(), arrival_time=0.0)
    assert request.max_tokens == 1
    assert not request.plain_output


def test_embeddings_stand_for_tokens() -> None:
    request = Request("r", None, SamplingParams(), None, prompt_embeds=[[0.0], [1.0]], arrival_time=0.0)
    assert request.num_prompt_tokens == request.num_tokens == 2


def test_tokens_grow_and_are_seen_through_read_only_views() -> None:
    request = make()
    view = request.output_token_ids
    request.append_output_token_ids(7)
    request.append_output_token_ids([8, 9])
    request.spec_token_ids = [1]
    assert view == [7, 8, 9]
    assert request.all_token_ids == [1, 2, 3, 7, 8, 9]
    assert (request.num_prompt_tokens, request.num_output_tokens, request.num_tokens) == (3, 3, 6)
    assert request.num_tokens_with_spec == 7
    assert request.prompt_token_ids == [1, 2, 3]
    with pytest.raises(TypeError):
        request.all_token_ids.append(1)


def test_the_hasher_is_asked_at_creation_and_for_every_new_token() -> None:
    def hasher(request: Request) -> list[bytes]:
        return [bytes([n]) for n in range(len(request.block_hashes), request.num_tokens // 2)]

    request = make(block_hasher=hasher)
    assert request.block_hashes == [b"\x00"]
    request.append_output_token_ids(4)
    assert request.block_hashes == [b"\x00", b"\x01"]
    assert request._block_hasher is hasher


def test_order_is_priority_arrival_id() -> None:
    requests = [
        make("b", priority=1, arrival_time=1.0),
        make("a", priority=1, arrival_time=1.0),
        make("c", priority=1, arrival_time=0.5),
        make("z", priority=0, arrival_time=9.0),
    ]
    assert [request.request_id for request in sorted(requests)] == ["z", "c", "a", "b"]


def test_status_order_and_reasons() -> None:
    assert [status.name for status in RequestStatus] == [
        "WAITING",
        "WAITING_FOR_STRUCTURED_OUTPUT_GRAMMAR",
        "WAITING_FOR_REMOTE_KVS",
        "WAITING_FOR_STREAMING_REQ",
        "RUNNING",
        "PREEMPTED",
        "FINISHED_STOPPED",
        "FINISHED_LENGTH_CAPPED",
        "FINISHED_ABORTED",
        "FINISHED_IGNORED",
        "FINISHED_ERROR",
        "FINISHED_REPETITION",
    ]
    assert not RequestStatus.is_finished(RequestStatus.PREEMPTED)
    assert RequestStatus.is_finished(RequestStatus.FINISHED_STOPPED)
    reasons = {status: RequestStatus.get_finished_reason(status) for status in RequestStatus}
    assert reasons[RequestStatus.FINISHED_IGNORED] is FinishReason.LENGTH
    assert reasons[RequestStatus.FINISHED_ERROR] is FinishReason.ERROR
    assert reasons[RequestStatus.WAITING_FOR_STREAMING_REQ] is FinishReason.STOP
    assert reasons[RequestStatus.RUNNING] is None
    assert [str(reason) for reason in FinishReason] == ["stop", "length", "abort", "error", "repetition"]


def test_only_legal_moves_are_made() -> None:
    request = make()
    request.move_to(RequestStatus.RUNNING)
    request.move_to(RequestStatus.PREEMPTED)
    request.move_to(RequestStatus.WAITING_FOR_REMOTE_KVS)
    request.move_to(RequestStatus.PREEMPTED)
    request.move_to(RequestStatus.FINISHED_ABORTED)
    with pytest.raises(InvariantError, match="FINISHED_ABORTED to FINISHED_STOPPED"):
        request.move_to(RequestStatus.FINISHED_STOPPED)
    with pytest.raises(InvariantError):
        make().move_to(RequestStatus.WAITING_FOR_STREAMING_REQ)


def test_extra_arguments_carry_transfer_parameters() -> None:
    params = SamplingParams(extra_args={"kv_transfer_params": {"x": 1}, "kv_cache_report_mode": "full"})
    request = make(params=params)
    assert request.kv_transfer_params == {"x": 1}
    assert request.ec_transfer_params is None
    assert request.kv_cache_report_mode == "full"
    for name in ("kv_transfer_params", "ec_transfer_params"):
        with pytest.raises(ValueError, match=f"{name} must be a mapping, got 'x'"):
            make(params=SamplingParams(extra_args={name: "x"}))


def test_a_structured_request_waits_for_its_grammar() -> None:
    request = make(params=SamplingParams(structured_outputs=StructuredOutputsParams(regex="a")))
    assert request.status is RequestStatus.WAITING_FOR_STRUCTURED_OUTPUT_GRAMMAR
    assert request.use_structured_output
    assert request.structured_output_request is not None
    assert not request.structured_output_request.is_grammar_ready


def test_a_message_becomes_the_same_request() -> None:
    message = EngineCoreRequest(
        request_id="m",
        prompt_token_ids=[5, 6],
        mm_features=None,
        sampling_params=SamplingParams(max_tokens=3),
        pooling_params=None,
        arrival_time=12.5,
        lora_request=None,
        cache_salt="salt",
        data_parallel_rank=None,
        client_index=2,
        priority=4,
        resumable=True,
        session_id="s",
    )
    request = Request.from_engine_core_request(message, None)
    assert (request.request_id, request.arrival_time, request.cache_salt) == ("m", 12.5, "salt")
    assert (request.client_index, request.priority, request.max_tokens) == (2, 4, 3)
    assert (request.resumable, request.session_id) == (True, "s")
    assert message.params is message.sampling_params
    empty = EngineCoreRequest("x", [1], None, None, None, 0.0, None, None, None)
    with pytest.raises(ValueError, match="neither"):
        _ = empty.params


def test_events_and_prefill_figures_are_taken_once() -> None:
    request = make()
    assert request.take_events() is None
    request.record_event(EngineCoreEventType.QUEUED, 1.5)
    request.record_event(EngineCoreEventType.SCHEDULED)
    events = request.take_events()
    assert events is not None
    assert events[0].timestamp == 1.5
    assert events[1].timestamp > 0
    assert request.take_events() is None
    assert request.take_prefill_stats() is not None
    assert request.take_prefill_stats() is None


def test_media_are_counted_by_their_own_positions() -> None:
    from types import SimpleNamespace

    item = SimpleNamespace(mm_position=SimpleNamespace(get_num_embeds=lambda: 4))
    request = make(mm_features=[item])
    assert request.has_encoder_inputs
    assert request.get_num_encoder_embeds(0) == 4
    assert "prompt=3" in repr(request)
