"""What enters the core has been checked; every refusal names the field and the values."""

from typing import Any

import numpy as np
import pytest

from tests.helpers.engine_configs import engine_config
from vllm.exceptions import (
    MaxQueuedTokensError,
    QueueOverflowError,
    VLLMError,
    VLLMNotImplementedError,
    VLLMValidationError,
)
from vllm.lora.request import LoRARequest
from vllm.pooling_params import PoolingParams
from vllm.sampling_params import SamplingParams, StructuredOutputsParams
from vllm.transformers_utils.tokenizer import tokenizer_from_config
from vllm.v1.engine.input_processor import PROMPT_LOGPROB_ENTRIES_MAX, InputProcessor
from vllm.v1.engine.intake import FOLLOW_SLICE, RequestIntake
from vllm.v1.engine.output_collector import RequestOutputCollector

LIMIT = 256


@pytest.fixture(scope="module")
def processor() -> InputProcessor:
    config = engine_config(max_model_len=LIMIT)
    return InputProcessor(config, tokenizer_from_config(config.model_config))


def make(processor: InputProcessor, prompt: Any = "hello", params: Any = None, **options: Any) -> Any:
    return processor.process_inputs("r", prompt, params or SamplingParams(), **options)


def test_forms_of_prompts_give_the_same_request(processor: InputProcessor) -> None:
    ids = processor.tokenizer.encode("hello")
    for prompt in ("hello", ids, tuple(ids), {"prompt": "hello"}, {"prompt_token_ids": ids}, np.array(ids)):
        if isinstance(prompt, np.ndarray):
            prompt = {"prompt_token_ids": prompt}
        _, request = make(processor, prompt)
        assert request.prompt_token_ids == ids
        assert all(type(i) is int for i in request.prompt_token_ids)
    text, request = make(processor, {"prompt": "text", "prompt_token_ids": ids, "cache_salt": "s"})
    assert (text, request.prompt_token_ids, request.cache_salt) == ("text", ids, "s")


def test_request_carries_its_envelope(processor: InputProcessor) -> None:
    _, request = make(
        processor,
        arrival_time=5.0,
        priority=-2,
        data_parallel_rank=0,
        trace_headers={"a": "b"},
        session_id="s",
    )
    assert (request.arrival_time, request.priority, request.data_parallel_rank) == (5.0, -2, 0)
    assert (request.trace_headers, request.session_id) == ({"a": "b"}, "s")


def test_ids_are_unique_inside_and_kept_outside(
    processor: InputProcessor, monkeypatch: pytest.MonkeyPatch
) -> None:
    requests = [make(processor)[1] for _ in range(2)]
    for request in requests:
        processor.assign_request_id(request)
    assert requests[0].request_id != requests[1].request_id
    assert {request.external_req_id for request in requests} == {"r"}
    monkeypatch.setenv("VLLM_DISABLE_REQUEST_ID_RANDOMIZATION", "1")
    _, request = make(processor)
    processor.assign_request_id(request)
    assert request.request_id == "r"


def test_parameters_are_completed_on_a_copy(processor: InputProcessor) -> None:
    params = SamplingParams(max_tokens=None)
    _, request = make(processor, [5] * 10, params)
    assert params.max_tokens is None
    assert request.sampling_params.max_tokens == LIMIT - 10
    assert request.sampling_params.eos_token_id == processor.tokenizer.eos_token_id
    assert params.eos_token_id is None


@pytest.mark.parametrize("length", [LIMIT - 2, LIMIT - 1])
def test_val_07_prompts_with_room_for_a_token_pass(processor: InputProcessor, length: int) -> None:
    assert len(make(processor, [5] * length)[1].prompt_token_ids) == length


REFUSALS: dict[str, tuple[Any, dict[str, Any], str, list[str]]] = {
    "exact length": ([5] * LIMIT, {}, "prompt", [f"{LIMIT} tokens", f"max_model_len is {LIMIT}"]),
    "too long": ([5] * (LIMIT + 1), {}, "prompt", [f"{LIMIT + 1} tokens"]),
    "too long a text": ("x" * 5000, {}, "prompt", ["5000 tokens"]),
    "empty text": ("", {}, "prompt", ["empty"]),
    "empty ids": ([], {}, "prompt", ["empty"]),
    "no prompt": ({}, {}, "prompt", ["prompt_token_ids"]),
    "wrong type": (5, {}, "prompt", ["int"]),
    "ids no list": ({"prompt_token_ids": 5}, {}, "prompt_token_ids", ["int"]),
    "text ids": (["a"], {}, "prompt", ["integers"]),
    "float ids": ([1.5], {}, "prompt", ["integers"]),
    "huge id": ([2**70], {}, "prompt", ["integers"]),
    "id outside": ([5, 264], {}, "prompt", ["264", "vocabulary"]),
    "negative id": ([5, -1], {}, "prompt", ["-1", "vocabulary"]),
    "salt": ("x", {"cache_salt": ""}, "cache_salt", ["non-empty"]),
    "salt type": ("x", {"cache_salt": 5}, "cache_salt", ["5"]),
    "priority": ("x", {"priority": 1.5}, "priority", ["1.5"]),
    "huge priority": ("x", {"priority": 2**70}, "priority", ["64-bit"]),
    "rank": ("x", {"data_parallel_rank": 1}, "data_parallel_rank", ["[0, 1)", "1"]),
    "lora": ("x", {"lora_request": LoRARequest("n", 1, "/p")}, "lora_request", ["adapters"]),
    "options": ("x", {"tokenization_kwargs": {"padding": 1}}, "tokenization_kwargs", ["padding"]),
}


@pytest.mark.parametrize("case", REFUSALS)
def test_refused_inputs(processor: InputProcessor, case: str) -> None:
    prompt, options, parameter, words = REFUSALS[case]
    with pytest.raises(VLLMValidationError) as caught:
        make(processor, prompt, **options)
    assert caught.value.parameter == parameter
    for word in words:
        assert word in str(caught.value)


@pytest.mark.parametrize(
    ("params", "parameter", "word"),
    [
        (SamplingParams(logit_bias={191222: -100}), "logit_bias", "191222"),
        (SamplingParams(logit_bias={-1: 1}), "logit_bias", "-1"),
        (SamplingParams(allowed_token_ids=[264]), "allowed_token_ids", "264"),
        (SamplingParams(stop_token_ids=[999]), "stop_token_ids", "999"),
        (SamplingParams(logprobs=21), "logprobs", "21"),
        (SamplingParams(logprob_token_ids=[5] * 21), "logprob_token_ids", "21"),
        (SamplingParams(prompt_logprob_token_ids=[5] * 21), "prompt_logprob_token_ids", "21"),
        (
            SamplingParams(structured_outputs=StructuredOutputsParams(json="[" * 99_000)),
            "structured_outputs",
            "deep",
        ),
        (SamplingParams(max_tokens=None, min_tokens=LIMIT), "min_tokens", str(LIMIT - 1)),
        (SamplingParams(extra_args={"kv_transfer_params": "x"}), "kv_transfer_params", "mapping"),
        (
            SamplingParams(extra_args={"kv_transfer_params": {"load_tier_filter": [{"medium": "TAPE"}]}}),
            "kv_transfer_params",
            "medium must be CPU or STORAGE, got 'TAPE'",
        ),
        (SamplingParams(extra_args={"ec_transfer_params": [1]}), "ec_transfer_params", "mapping"),
        (SamplingParams(extra_args={"kv_retention": "x"}), "kv_retention", "x"),
        (SamplingParams(structured_outputs=StructuredOutputsParams(regex="[")), "structured_outputs", "["),
        (SamplingParams(structured_outputs=StructuredOutputsParams(json="{")), "structured_outputs", "JSON"),
    ],
)
def test_val_01_and_03_parameters_are_checked_against_the_model(
    processor: InputProcessor, params: SamplingParams, parameter: str, word: str
) -> None:
    with pytest.raises(VLLMValidationError, match=r".") as caught:
        make(processor, "x", params)
    assert caught.value.parameter == parameter
    assert word in str(caught.value)


def test_val_05_prompt_logprobs_are_bounded() -> None:
    config = engine_config(max_model_len=4096, max_logprobs=-1)
    processor = InputProcessor(config, tokenizer_from_config(config.model_config))
    processor.vocab_size = PROMPT_LOGPROB_ENTRIES_MAX // 100
    make(processor, [5] * 100, SamplingParams(prompt_logprobs=-1))
    entries = {"prompt_logprobs": -1, "prompt_logprob_token_ids": [5] * processor.vocab_size}
    for name, value in entries.items():
        processor.model_config.max_logprobs = 10**9
        with pytest.raises(VLLMValidationError, match="each of 101 prompt tokens") as caught:
            make(processor, [5] * 101, SamplingParams(**{name: value}))
        assert caught.value.parameter == name


def test_kinds_of_requests_that_are_not_offered(processor: InputProcessor) -> None:
    refused: list[tuple[Any, Any]] = [
        ("x", PoolingParams(task="embed")),
        ({"prompt": "x", "multi_modal_data": {"image": 1}}, SamplingParams()),
        ({"prompt_embeds": [1]}, SamplingParams()),
    ]
    for prompt, params in refused:
        with pytest.raises(VLLMNotImplementedError):
            make(processor, prompt, params)
    with pytest.raises(VLLMValidationError, match="SamplingParams"):
        make(processor, "x", {"max_tokens": 5})
    with pytest.raises(VLLMValidationError, match="request_id"):
        processor.process_inputs("", "x", SamplingParams())


def test_without_a_tokenizer_only_token_ids_are_accepted() -> None:
    config = engine_config(skip_tokenizer_init=True)
    assert tokenizer_from_config(config.model_config) is None
    processor = InputProcessor(config, None)
    assert make(processor, [5, 6])[1].sampling_params.eos_token_id == 2
    for prompt, params, word in [
        ("text", SamplingParams(), "skip_tokenizer_init"),
        ([5], SamplingParams(stop=["x"]), "stop"),
        ([5], SamplingParams(bad_words=["x"]), "bad_words"),
        ([5], SamplingParams(structured_outputs=StructuredOutputsParams(regex="a")), "structured"),
    ]:
        with pytest.raises(VLLMValidationError, match=word):
            make(processor, prompt, params)


# -- intake ----------------------------------------------------------------------------------------------------------


def make_intake(**limits: Any) -> RequestIntake:
    config = engine_config(**limits)
    return RequestIntake(config, tokenizer_from_config(config.model_config), log_stats=False)


def follow(intake: RequestIntake, request_id: str, prompt: Any = "hello", **params: Any) -> list[Any]:
    text, request = intake.prepare(request_id, prompt, SamplingParams(**params))
    kind = SamplingParams(**params).output_kind
    return intake.follow(text, request, RequestOutputCollector(kind, request.request_id))


def test_sch_09_the_same_id_twice(monkeypatch: pytest.MonkeyPatch) -> None:
    intake = make_intake()
    assert follow(intake, "test-0")[0].request_id != follow(intake, "test-0")[0].request_id
    monkeypatch.setenv("VLLM_DISABLE_REQUEST_ID_RANDOMIZATION", "1")
    follow(intake, "test-1")
    with pytest.raises(VLLMValidationError, match="'test-1' is in use"):
        follow(intake, "test-1")
    intake.output_processor.abort_requests(["test-1"], internal=False)
    follow(intake, "test-1")


def test_sch_13_admission_is_all_or_nothing() -> None:
    intake = make_intake(max_num_queued_reqs=4)
    assert len(follow(intake, "a", n=4, temperature=1.0)) == 4
    with pytest.raises(
        QueueOverflowError, match="4 requests wait and 4 more would exceed max_num_queued_reqs=4"
    ):
        follow(intake, "b", n=4)
    assert intake.output_processor.get_num_unfinished_requests() == 4
    assert intake.admission.rejections == {"max_num_queued_reqs": 1, "max_num_queued_tokens": 0}
    intake.output_processor.abort_requests(["a"], internal=False)
    assert len(follow(intake, "b", n=4)) == 4


def test_children_aborted_while_they_are_followed_end_the_following() -> None:
    intake = make_intake()
    params = SamplingParams(n=FOLLOW_SLICE * 3, temperature=1.0)
    text, request = intake.prepare("a", "hello", params)
    collector = RequestOutputCollector(params.output_kind, request.request_id)
    slices = intake.follow_in_slices(text, request, collector)
    assert [len(next(slices)), len(next(slices))] == [FOLLOW_SLICE, FOLLOW_SLICE]
    assert intake.output_processor.is_followed(request.request_id)
    aborted = intake.output_processor.abort_requests(["a"], internal=False)
    assert len(aborted) == FOLLOW_SLICE * 2
    assert list(slices) == []
    assert not intake.output_processor.has_unfinished_requests()
    assert not intake.output_processor.parent_requests


def test_waiting_prompt_tokens_are_bounded_but_an_empty_queue_takes_any_prompt() -> None:
    intake = make_intake(max_num_queued_tokens=20)
    follow(intake, "a", [5] * 30)
    with pytest.raises(MaxQueuedTokensError, match="30 prompt tokens wait and 1 more"):
        follow(intake, "b", [5])
    assert issubclass(MaxQueuedTokensError, VLLMError)


def test_children_share_the_prompt_and_differ_in_id_and_seed() -> None:
    intake = make_intake()
    children = follow(intake, "a", n=3, seed=1)
    assert len({child.request_id for child in children}) == 3
    assert [child.sampling_params.seed for child in children] == [1, 2, 3]
    assert {id(child.prompt_token_ids) for child in children} == {id(children[0].prompt_token_ids)}
    assert {child.external_req_id for child in children} == {"a"}


@pytest.mark.parametrize(("seed", "others"), [(2**63 - 1, [-(2**63), -(2**63) + 1]), (-3, [-2, 0])])
def test_seeds_of_children_stay_seeds(seed: int, others: list[int]) -> None:
    children = follow(make_intake(), "a", n=3, seed=seed)
    assert [child.sampling_params.seed for child in children] == [seed, *others]


def test_a_finished_request_message_is_taken_as_it_is() -> None:
    intake = make_intake()
    _, request = intake.input_processor.process_inputs("a", "hello", SamplingParams())
    assert intake.prepare("a", request, SamplingParams())[1] is request
    _, request = intake.input_processor.process_inputs("a", "hello", SamplingParams())
    with pytest.raises(VLLMValidationError, match="differs"):
        intake.prepare("b", request, SamplingParams())
