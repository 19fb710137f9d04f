import copy
import pickle
from types import SimpleNamespace

import msgspec
import pytest

from vllm.exceptions import VLLMClientError, VLLMValidationError
from vllm.sampling_params import (
    BeamSearchParams,
    RepetitionDetectionParams,
    RequestOutputKind,
    SamplingParams,
    SamplingType,
    StructuredOutputsParams,
    validate_thinking_token_budget,
)


class Words:
    """A tokenizer of one token per character, with another id for a leading space."""

    def encode(self, text, add_special_tokens=True):
        if text.startswith(" "):
            return [1000 + ord(text[1])] + [ord(c) for c in text[2:]]
        return [ord(c) for c in text]


def model(vocab=256, max_logprobs=20, replay=False):
    return SimpleNamespace(
        get_vocab_size=lambda: vocab, max_logprobs=max_logprobs, enable_trace_replay=replay
    )


def test_defaults():
    params = SamplingParams()
    assert (params.n, params.temperature, params.top_p, params.top_k, params.min_p, params.max_tokens) == (
        1,
        1.0,
        1.0,
        0,
        0.0,
        16,
    )
    assert (params.stop, params.stop_token_ids, params.output_kind) == ([], [], RequestOutputKind.CUMULATIVE)
    assert params.skip_reading_prefix_cache is False


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("n", 0), ("n", True), ("n", 16385), ("presence_penalty", 2.1), ("frequency_penalty", -2.1), ("repetition_penalty", 0),
        ("repetition_penalty", float("inf")), ("repetition_penalty", 1e300), ("repetition_penalty", 1e-300),
        ("temperature", -0.1), ("temperature", 2.1), ("temperature", float("nan")),
        ("temperature", "hot"), ("top_p", 0.0), ("top_p", 1.1), ("top_k", -2), ("top_k", 1.5), ("min_p", -0.1), ("min_p", 1.1),
        ("seed", 2**63), ("seed", 1.5), ("stop", [""]), ("stop", [3]), ("stop_token_ids", ["a"]), ("max_tokens", 0), ("min_tokens", -1),
        ("min_tokens", 17), ("logprobs", -2), ("prompt_logprobs", -2), ("stream_interval", 0), ("logit_bias", {"AI": -100}),
        ("logit_bias", {3: "x"}), ("logit_bias", [1]), ("allowed_token_ids", []), ("bad_words", [" "]), ("extra_args", [1]),
        ("ignore_eos", "yes"), ("flat_logprobs", 1), ("detokenize", "false"), ("skip_special_tokens", 0),
        ("spaces_between_special_tokens", None), ("include_stop_str_in_output", "x"), ("skip_clone", 1),
        ("skip_reading_prefix_cache", "no"), ("output_kind", 2),
        ("prompt_logprob_start", "x"), ("prompt_logprob_start", -1), ("trace_decode_token_ids", ["x"]),
    ],
)  # fmt: skip
def test_bad_value_is_refused_naming_the_field(field, value):
    with pytest.raises(VLLMValidationError) as error:
        SamplingParams(**{field: value})
    assert error.value.parameter == field
    assert field in str(error.value)


def test_validation_error_is_a_client_error_and_no_value_error():
    assert issubclass(VLLMValidationError, VLLMClientError)
    assert not issubclass(VLLMValidationError, ValueError)


def test_greedy_has_neutral_sampling_fields_and_one_sample():
    params = SamplingParams(temperature=0, top_p=0.5, top_k=5, min_p=0.1)
    assert (params.top_p, params.top_k, params.min_p, params.sampling_type) == (
        1.0,
        0,
        0.0,
        SamplingType.GREEDY,
    )
    with pytest.raises(VLLMValidationError, match="greedy"):
        SamplingParams(temperature=0, n=2)


def test_val_10_tiny_temperature_is_raised_so_that_logits_stay_finite():
    raised = SamplingParams(temperature=1e-4, top_k=7)
    assert (raised.temperature, raised.top_k) == (0.01, 1)
    assert SamplingParams(temperature=0.01, top_k=7).top_k == 7
    assert SamplingParams(temperature=1e-6).sampling_type is SamplingType.GREEDY


def test_seed_decides_the_sampling_type_and_minus_one_is_none():
    assert SamplingParams(seed=3).sampling_type is SamplingType.RANDOM_SEED
    assert SamplingParams(seed=-1).seed is None
    assert SamplingParams().sampling_type is SamplingType.RANDOM


def test_stop_strings_are_a_list_and_need_text():
    params = SamplingParams(stop="END")
    assert (params.stop, params.output_text_buffer_length) == (["END"], 2)
    assert SamplingParams(stop=["END"], include_stop_str_in_output=True).output_text_buffer_length == 0
    with pytest.raises(VLLMValidationError, match="detokenize"):
        SamplingParams(stop="END", detokenize=False)


def test_end_tokens_from_the_generation_config():
    params = SamplingParams(stop_token_ids=[9])
    params.update_from_generation_config({"eos_token_id": [1, 2]}, 1)
    assert (params.eos_token_id, params.all_stop_token_ids, params.stop_token_ids) == (1, {1, 2, 9}, [2, 9])
    params = SamplingParams()
    params.update_from_generation_config({"eos_token_id": 5}, 5)
    assert (params.eos_token_id, params.stop_token_ids) == (5, [])


def test_ignored_end_token_is_still_masked_by_min_tokens():
    params = SamplingParams(ignore_eos=True)
    params.update_from_generation_config({"eos_token_id": [1, 2]}, 1)
    assert (params.eos_token_id, params.stop_token_ids, params.all_stop_token_ids) == (None, [], {1, 2})


def test_prompt_logprobs_need_a_full_prefill():
    assert SamplingParams(prompt_logprobs=1).skip_reading_prefix_cache is True
    assert SamplingParams(prompt_logprob_token_ids=[3]).skip_reading_prefix_cache is True
    assert (
        SamplingParams(prompt_logprobs=1, skip_reading_prefix_cache=False).skip_reading_prefix_cache is False
    )


def test_logprobs_may_be_given_as_true():
    params = SamplingParams(logprobs=True, prompt_logprobs=True)
    assert (params.logprobs, params.prompt_logprobs, params.num_logprobs) == (1, 1, 1)
    assert SamplingParams(logprob_token_ids=[4, 5]).num_logprobs == 2


def test_val_01_bias_is_normalised_and_checked_against_the_vocabulary():
    params = SamplingParams(logit_bias={"3": 500, 4: -500})
    assert params.logit_bias == {3: 100.0, 4: -100.0}
    params.verify(model(), None, None, None)
    for bad in ("256", "-1"):
        with pytest.raises(VLLMValidationError, match=rf"outside the vocabulary of 256: \[{bad}\]"):
            SamplingParams(logit_bias={bad: 1}).verify(model(), None, None, None)


@pytest.mark.parametrize(
    "field", ["allowed_token_ids", "stop_token_ids", "logprob_token_ids", "prompt_logprob_token_ids"]
)
def test_ids_outside_the_vocabulary_are_refused(field):
    with pytest.raises(VLLMValidationError) as error:
        SamplingParams(**{field: [1, 300]}).verify(model(), None, None, None)
    assert error.value.parameter == field


def test_val_05_log_probabilities_are_limited():
    for field in ("logprobs", "prompt_logprobs"):
        SamplingParams(**{field: 20}).verify(model(), None, None, None)
        SamplingParams(**{field: -1}).verify(model(max_logprobs=-1), None, None, None)
        for bad in (21, -1):
            with pytest.raises(VLLMValidationError, match="--max-logprobs"):
                SamplingParams(**{field: bad}).verify(model(), None, None, None)


def test_features_that_do_not_exist_are_refused():
    for field, value in (
        ("watermarking", {"key": 1}),
        ("routed_experts_prompt_start", 1),
        ("thinking_token_budget", 5),
        ("trace_decode_token_ids", [1]),
    ):
        with pytest.raises(VLLMValidationError) as error:
            SamplingParams(**{field: value}).verify(model(), None, None, None)
        assert error.value.parameter == field
    SamplingParams(trace_decode_token_ids=[1]).verify(model(replay=True), None, None, None)
    with pytest.raises(VLLMValidationError, match="tokenizer"):
        SamplingParams(bad_words=["x"]).verify(model(), None, None, None)
    with pytest.raises(VLLMValidationError, match="speculative"):
        SamplingParams(min_p=0.1).verify(model(), object(), None, None)


def test_bad_words_with_and_without_leading_space():
    params = SamplingParams(bad_words=["ab"])
    assert params.bad_words_token_ids is None
    params.update_from_tokenizer(Words())
    assert params.bad_words_token_ids == [[97, 98], [1097, 98]]


def test_structured_defaults_of_the_server_are_taken_over():
    params = SamplingParams(structured_outputs=StructuredOutputsParams(json={}))
    defaults = SimpleNamespace(disable_any_whitespace=True, disable_additional_properties=False)
    params.verify(model(), None, defaults, Words())
    assert params.structured_outputs.disable_any_whitespace is True


@pytest.mark.parametrize(
    "given",
    [
        {},
        {"json": {}, "regex": "a"},
        {"json": ""},
        {"json_object": False},
        {"choice": []},
        {"regex": ""},
        {"json": {}, "disable_any_whitespace": "yes"},
        {"json": {}, "disable_additional_properties": 1},
    ],
)
def test_val_03_one_non_empty_constraint(given):
    with pytest.raises(VLLMValidationError, match="structured_outputs"):
        StructuredOutputsParams(**given)


@pytest.mark.parametrize("given", [(1, 2, 2), (-1, 0, 0), (3, 1, 1)])
def test_repetition_detection_is_checked(given):
    with pytest.raises(VLLMValidationError, match="repetition_detection"):
        RepetitionDetectionParams(*given)


def test_repetition_detection_off_by_default():
    assert RepetitionDetectionParams().min_count == 0


@pytest.mark.parametrize(("value", "expected"), [(None, None), (-1, None), (0, 0), (7, 7)])
def test_thinking_budget(value, expected):
    assert validate_thinking_token_budget(value) == expected
    assert SamplingParams(thinking_token_budget=value).thinking_token_budget == expected


@pytest.mark.parametrize("value", [True, 1.0, -1.0, -2, "3"])
def test_bad_thinking_budget(value):
    with pytest.raises(VLLMValidationError) as error:
        validate_thinking_token_budget(value)
    assert error.value.parameter == "thinking_token_budget"


def full_params():
    params = SamplingParams(
        temperature=0.7, stop=["a", "b"], logit_bias={"1": 2}, seed=4, stop_token_ids=[3], bad_words=["x"],
        structured_outputs=StructuredOutputsParams(choice=["p", "q"]), extra_args={"k": [1]},
        repetition_detection=RepetitionDetectionParams(4, 1, 3), output_kind=RequestOutputKind.DELTA,
    )  # fmt: skip
    params.update_from_generation_config({"eos_token_id": [1, 2]}, 1)
    params.update_from_tokenizer(Words())
    return params


def test_survives_the_wire_pickle_and_copy_with_its_computed_parts():
    params = full_params()
    wire = msgspec.msgpack.encode(params)
    assert msgspec.msgpack.decode(wire, type=SamplingParams) == params
    assert pickle.loads(pickle.dumps(params)) == copy.deepcopy(params) == params
    decoded = msgspec.msgpack.decode(wire, type=SamplingParams)
    assert decoded.all_stop_token_ids == {1, 2, 3}
    assert decoded.bad_words_token_ids == params.bad_words_token_ids


def test_defaults_cost_no_bytes_on_the_wire():
    assert msgspec.msgpack.decode(msgspec.msgpack.encode(SamplingParams())) == {
        "stop": [], "stop_token_ids": [], "skip_reading_prefix_cache": False,
    }  # fmt: skip


def test_clone_is_independent_unless_declared_unshared():
    params = full_params()
    copied = params.clone()
    copied.all_stop_token_ids.add(77)
    assert 77 not in params.all_stop_token_ids
    params.skip_clone = True
    assert params.clone() is params


def test_from_optional_takes_none_for_the_default():
    assert SamplingParams.from_optional(temperature=None, top_k=None, max_tokens=3) == SamplingParams(
        max_tokens=3
    )
    with pytest.raises(TypeError):
        SamplingParams.from_optional(no_such_field=1)
    with pytest.raises(TypeError):
        SamplingParams(no_such_field=1)


def test_beam_search_params():
    params = BeamSearchParams(4, 8)
    assert (params.beam_width, params.max_tokens, params.length_penalty, params.temperature) == (
        4,
        8,
        1.0,
        0.0,
    )


@pytest.mark.parametrize(
    "wrong", [{"stop": 5}, {"stop": {"a": 1}}, {"bad_words": "x"}, {"structured_outputs": {"regex": "a"}}]
)
def test_fields_of_wrong_types_are_named(wrong):
    with pytest.raises(VLLMValidationError) as raised:
        SamplingParams(**wrong)
    assert raised.value.parameter == next(iter(wrong))
