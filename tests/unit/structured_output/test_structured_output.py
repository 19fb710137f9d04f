"""Grammars: compiling, masks, advancing, and failures that end one request only."""

from __future__ import annotations

import json
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from tests.helpers.sched import Driver, expected_output, full, make_request, make_scheduler
from tests.helpers.tiny_tokenizers import make_tokenizer
from vllm.exceptions import VLLMValidationError
from vllm.sampling_params import StructuredOutputsParams
from vllm.v1.outputs import ModelRunnerOutput
from vllm.v1.structured_output import StructuredOutputManager, validate_structured_outputs

TOKENIZER = make_tokenizer("byte_level")
VOCAB = len(TOKENIZER) + 5
EOS = TOKENIZER.eos_token_id


def manager(tokenizer: Any = TOKENIZER) -> StructuredOutputManager:
    config = SimpleNamespace(
        model_config=SimpleNamespace(get_vocab_size=lambda: VOCAB, hf_config={"eos_token_id": [EOS]}),
        structured_outputs_config=SimpleNamespace(backend="auto"),
    )
    return StructuredOutputManager(config, tokenizer_factory=lambda: tokenizer)  # type: ignore[arg-type]


def scheduler_with_grammars(**config: Any) -> Driver:
    scheduler = make_scheduler([full(4)], 40, structured=manager(), **config)
    return Driver(scheduler, depth=2 if config.get("looks_ahead") else 1)


def allowed(row: Any) -> set[int]:
    bits = np.unpackbits(row.view(np.uint8), bitorder="little")
    return set(np.nonzero(bits[:VOCAB])[0].tolist())


def generate(driver: Driver, request_id: str, pick: Any = min) -> str:
    """Let a model that always takes an allowed token answer."""
    scheduler = driver.scheduler
    tokens: list[int] = []
    for _ in range(60):
        output = scheduler.schedule()
        grammar = scheduler.get_grammar_bitmask(output)
        if request_id not in output.num_scheduled_tokens:
            break
        assert output.has_structured_output_requests
        if grammar is None:
            sampled: list[int] = []
        else:
            assert grammar.structured_output_request_ids == [request_id]
            sampled = [pick(allowed(grammar.grammar_bitmask[0]))]
        tokens += sampled
        messages = scheduler.update_from_output(
            output, ModelRunnerOutput([request_id], {request_id: 0}, [sampled])
        )
        driver.collect(messages)
    return str(TOKENIZER.decode([token for token in tokens if token != EOS]))


def eos_or_first(tokens: set[int]) -> int:
    return EOS if EOS in tokens else min(tokens)


@pytest.mark.parametrize(
    ("constraint", "accepts"),
    [
        ({"choice": ["yes", 'n"o']}, {"yes", 'n"o'}),
        ({"regex": "ab(cd)?"}, {"ab", "abcd"}),
        ({"grammar": 'root ::= "x" | "yy"'}, {"x", "yy"}),
        ({"grammar": 'start: "x" | "yy"'}, {"x", "yy"}),
        ({"json": {"const": "k"}}, {'"k"'}),
        ({"json": json.dumps({"type": "boolean"})}, {"true", "false"}),
    ],
)
def test_every_kind_of_constraint_shapes_the_output(constraint: dict[str, Any], accepts: set[str]) -> None:
    driver = scheduler_with_grammars()
    driver.add("a", [1, 2, 3], max_tokens=40, structured_outputs=StructuredOutputsParams(**constraint))
    driver.scheduler.requests["a"].sampling_params.update_from_generation_config({}, EOS)  # type: ignore[union-attr]
    assert generate(driver, "a", eos_or_first) in accepts
    assert driver.ends["a"].error is None
    driver.run()
    driver.assert_at_rest()


def test_a_schema_without_free_space_or_further_properties() -> None:
    schema = {"type": "object", "properties": {"n": {"type": "null"}}, "required": ["n"]}
    constraint = StructuredOutputsParams(
        json=schema, disable_any_whitespace=True, disable_additional_properties=True
    )
    driver = scheduler_with_grammars()
    driver.add("a", [1, 2, 3], max_tokens=40, structured_outputs=constraint)
    driver.scheduler.requests["a"].sampling_params.update_from_generation_config({}, EOS)  # type: ignore[union-attr]
    assert generate(driver, "a", eos_or_first) == '{"n":null}'


def test_any_json_object_and_a_structural_tag_compile() -> None:
    tag = {"structures": [{"begin": "<f>", "schema": {"type": "null"}, "end": "</f>"}], "triggers": ["<f"]}
    for constraint in ({"json_object": True}, {"structural_tag": json.dumps(tag)}):
        validate_structured_outputs(StructuredOutputsParams(**constraint), TOKENIZER)  # type: ignore[arg-type]


@pytest.mark.parametrize(
    "constraint",
    [
        {"regex": "["},
        {"json": "{"},
        {"json": '{"type": "objec"}'},
        {"grammar": "root := nonsense ("},
        {"structural_tag": "{}"},
        {
            "structural_tag": '{"structures": [{"begin": "<f>", "schema": "x", "end": ""}], "triggers": ["<f"]}'
        },
        {"structural_tag": '{"structures": [{"begin": 5, "schema": {}, "end": ""}], "triggers": ["<f"]}'},
        {"structural_tag": '{"structures": [], "triggers": []}'},
        {"structural_tag": '{"structures": [{"begin": "<f>", "schema": {}, "end": ""}], "triggers": ["<g"]}'},
    ],
)
def test_val_03_a_bad_constraint_is_refused_before_the_core_with_the_parsers_message(
    constraint: dict[str, Any],
) -> None:
    with pytest.raises(VLLMValidationError, match="structured_outputs"):
        validate_structured_outputs(StructuredOutputsParams(**constraint), TOKENIZER)


def test_val_03_a_grammar_that_fails_inside_the_core_ends_only_its_request() -> None:
    driver = scheduler_with_grammars()
    driver.add("bad", [1, 2, 3], structured_outputs=StructuredOutputsParams(regex="["))
    driver.add("good", [1, 2, 3], max_tokens=4)
    driver.run()
    error = driver.ends["bad"].error
    assert error is not None
    assert error.code == "invalid_grammar"
    assert "unclosed" in error.message
    assert driver.outputs["good"] == expected_output([1, 2, 3], 4)
    driver.assert_at_rest()


def test_tokens_outside_the_grammar_end_the_request_with_an_error() -> None:
    driver = scheduler_with_grammars()
    driver.add("a", [1, 2, 3], structured_outputs=StructuredOutputsParams(choice=["yes"]))
    output = driver.scheduler.schedule()
    wrong = TOKENIZER.encode("z", add_special_tokens=False)
    driver.collect(driver.scheduler.update_from_output(output, ModelRunnerOutput(["a"], {"a": 0}, [wrong])))
    assert driver.ends["a"].error is not None
    assert driver.ends["a"].error.code == "grammar_violated"


def test_no_tokenizer_no_grammar_but_no_crash() -> None:
    without = manager(None)
    scheduler = make_scheduler([full(4)], 40, structured=without)
    request = make_request(scheduler, "a", [1], structured_outputs=StructuredOutputsParams(choice=["x"]))
    without.grammar_init(request)
    structured = request.structured_output_request
    assert structured is not None
    assert structured.error is not None
    assert "skip_tokenizer_init" in structured.error


def test_masks_follow_the_drafts_and_refused_drafts_are_cut() -> None:
    grammars = manager()
    scheduler = make_scheduler([full(4)], 40, structured=grammars)
    request = make_request(scheduler, "a", [1], structured_outputs=StructuredOutputsParams(regex="abc"))
    grammars.grammar_init(request)
    a, b, c, z = (TOKENIZER.encode(text, add_special_tokens=False)[0] for text in "abcz")
    assert grammars.allowed_drafts(request, [a, b, z, c]) == [a, b]
    masks = grammars.grammar_bitmask([request], {"a": [a, b]})
    assert masks is not None
    rows = [allowed(row) for row in masks.grammar_bitmask]
    assert [a in rows[0], b in rows[1], c in rows[2]] == [True, True, True]
    assert z not in rows[0] | rows[1] | rows[2]
    assert masks.grammar_bitmask.shape == (3, -(-VOCAB // 32))
    again = grammars.grammar_bitmask([request], {})
    assert again is not None
    assert allowed(again.grammar_bitmask[0]) == rows[0], "making masks must not advance the grammar"
    cut = grammars.grammar_bitmask([request], {"a": [z, b]})
    assert cut is not None
    assert (cut.grammar_bitmask[1] == -1).all()


def test_end_of_sequence_after_a_finished_grammar_can_be_taken_back() -> None:
    grammars = manager()
    scheduler = make_scheduler([full(4)], 40, structured=grammars)
    request = make_request(scheduler, "a", [1], structured_outputs=StructuredOutputsParams(regex="a"))
    grammars.grammar_init(request)
    (a,) = TOKENIZER.encode("a", add_special_tokens=False)
    grammar = request.structured_output_request.grammar  # type: ignore[union-attr]
    assert grammar is not None
    assert grammar.accept_tokens([a, EOS, EOS])
    assert grammar.is_terminated()
    assert not grammar.accept_tokens([a])
    grammar.rollback(3)
    assert not grammar.is_terminated()
    assert grammar.accept_tokens([a])
    grammar.reset()
    assert grammar.validate_tokens([a, EOS, a]) == [a, EOS]


def test_requests_share_compiled_grammars_but_no_state() -> None:
    grammars = manager()
    scheduler = make_scheduler([full(4)], 40, structured=grammars)
    requests = [
        make_request(scheduler, name, [1], structured_outputs=StructuredOutputsParams(regex="ab"))
        for name in ("x", "y")
    ]
    for request in requests:
        grammars.grammar_init(request)
    (a,) = TOKENIZER.encode("a", add_special_tokens=False)
    assert grammars.accept_tokens(requests[0], [a])
    assert grammars.accept_tokens(requests[1], [a])
    assert not grammars.accept_tokens(requests[1], [a])


def test_look_ahead_says_when_a_mask_has_to_wait_for_a_token() -> None:
    driver = scheduler_with_grammars(looks_ahead=True)
    driver.add("a", [1, 2, 3], structured_outputs=StructuredOutputsParams(regex="[ab]*"))
    first = driver.scheduler.schedule()
    assert first.has_structured_output_requests
    assert not first.pending_structured_output_tokens
    assert driver.scheduler.schedule().pending_structured_output_tokens


def test_an_unconstrained_step_has_no_mask() -> None:
    driver = scheduler_with_grammars()
    driver.add("a", [1, 2, 3])
    output = driver.scheduler.schedule()
    assert not output.has_structured_output_requests
    assert driver.scheduler.get_grammar_bitmask(output) is None


def test_a_request_without_a_grammar_may_say_anything() -> None:
    grammars = manager()
    scheduler = make_scheduler([full(4)], 40, structured=grammars)
    free = make_request(scheduler, "a", [1])
    grammars.grammar_init(free)
    assert free.structured_output_request is None
    assert not grammars.should_constrain(free)
    assert grammars.accept_tokens(free, [3, 4])
    assert grammars.allowed_drafts(free, [3, 4]) == [3, 4]
    assert grammars.failure(free) is None
    assert grammars.grammar_bitmask([free], {}) is None
    assert grammars._backend is None, "no library is loaded for it"


def test_a_model_without_an_end_token_is_held_to_its_grammar() -> None:
    grammars = manager()
    grammars._vllm_config.model_config.hf_config = {}  # type: ignore[union-attr, assignment]
    scheduler = make_scheduler([full(4)], 40, structured=grammars)
    request = make_request(scheduler, "a", [1], structured_outputs=StructuredOutputsParams(choice=["x"]))
    grammars.grammar_init(request)
    masks = grammars.grammar_bitmask([request], {})
    assert masks is not None
    (token,) = allowed(masks.grammar_bitmask[0])
    assert TOKENIZER.decode([token]) == "x"
    assert grammars.accept_tokens(request, [token])
    assert not grammars.accept_tokens(request, [token])


def test_an_unknown_library_ends_only_the_request_that_asked() -> None:
    grammars = manager()
    grammars._vllm_config.structured_outputs_config.backend = "none-such"
    scheduler = make_scheduler([full(4)], 40, structured=grammars)
    request = make_request(scheduler, "a", [1], structured_outputs=StructuredOutputsParams(choice=["x"]))
    grammars.grammar_init(request)
    assert request.structured_output_request is not None
    assert "unknown structured output backend 'none-such'" in str(request.structured_output_request.error)


@pytest.mark.parametrize("eos", [EOS, [EOS]])
def test_the_end_may_be_one_token_or_several(eos: object) -> None:
    grammars = manager()
    grammars._vllm_config.model_config.hf_config = {"eos_token_id": eos}  # type: ignore[union-attr, assignment]
    scheduler = make_scheduler([full(4)], 40, structured=grammars)
    request = make_request(scheduler, "a", [1], structured_outputs=StructuredOutputsParams(choice=["x"]))
    grammars.grammar_init(request)
    compiled = request.structured_output_request
    grammars.grammar_init(request)
    assert request.structured_output_request is compiled
    (x,) = TOKENIZER.encode("x", add_special_tokens=False)
    assert grammars.accept_tokens(request, [x])
    masks = grammars.grammar_bitmask([request], {})
    assert masks is not None
    assert allowed(masks.grammar_bitmask[0]) == {EOS}
    grammars.clear()
    assert grammars._backend is None


def test_thousands_of_choices_are_one_grammar() -> None:
    driver = scheduler_with_grammars()
    choices = [f"word {number}: a.b*c (d) # é\n" for number in range(1500)]
    driver.add("a", [1, 2, 3], max_tokens=40, structured_outputs=StructuredOutputsParams(choice=choices))
    driver.scheduler.requests["a"].sampling_params.update_from_generation_config({}, EOS)  # type: ignore[union-attr]
    assert generate(driver, "a", eos_or_first) in choices


PROPERTIES = {f"p{number}": {"type": "string"} for number in range(5000)}
TOO_MUCH = [
    {"json": {"type": "object", "properties": PROPERTIES, "additionalProperties": False}},
    {"json": {"enum": ["x" * 200_000]}},
    {"regex": "a" * 200_000},
    {"grammar": "start: " + " | ".join(f'"{number}" s{number}' for number in range(10_000))},
    {"choice": ["x" * 100] * 2000},
]


@pytest.mark.parametrize("constraint", TOO_MUCH, ids=lambda value: next(iter(value)))
def test_a_constraint_that_is_too_large_is_refused_before_the_core(constraint: dict[str, Any]) -> None:
    with pytest.raises(VLLMValidationError, match=r"characters as a grammar|too big"):
        validate_structured_outputs(StructuredOutputsParams(**constraint), TOKENIZER)


@pytest.mark.parametrize("regex", ["((((a{100}){100}){100}){100})", "(a?){500}a{500}"])
def test_a_grammar_too_complex_to_be_followed_is_refused_by_its_compilation(regex: str) -> None:
    driver = scheduler_with_grammars()
    driver.add("hard", [1, 2, 3], structured_outputs=StructuredOutputsParams(regex=regex))
    driver.add("good", [1, 2, 3], max_tokens=4)
    driver.run()
    error = driver.ends["hard"].error
    assert error is not None
    assert error.code == "invalid_grammar"
    assert "too complex" in error.message
    assert "<" not in error.message
    assert driver.outputs["good"] == expected_output([1, 2, 3], 4)


def test_a_grammar_that_gets_too_complex_on_the_way_ends_its_request_as_a_bad_request() -> None:
    driver = scheduler_with_grammars()
    grammar = "start: s\ns: " + " | ".join(" ".join(["s"] * many) for many in range(2, 9)) + ' | "a" |'
    driver.add("a", [1, 2, 3], max_tokens=60, structured_outputs=StructuredOutputsParams(grammar=grammar))
    generate(driver, "a", lambda tokens: min(tokens - {EOS}))
    error = driver.ends["a"].error
    assert error is not None
    assert error.code == "grammar_too_complex"
    assert isinstance(error.to_exception(), VLLMValidationError)
    driver.run()
    driver.assert_at_rest()


def test_a_request_waits_for_its_grammar_while_others_go_on() -> None:
    jobs: list[Any] = []
    grammars = manager()
    grammars._run = jobs.append
    driver = Driver(make_scheduler([full(4)], 40, structured=grammars), depth=1)
    driver.add("hard", [1, 2, 3], max_tokens=4, structured_outputs=StructuredOutputsParams(regex="ab"))
    driver.add("good", [1, 2, 3], max_tokens=4)
    hard = driver.scheduler.requests["hard"]
    grammars.grammar_init(hard)
    assert len(jobs) == 1, "asking twice compiles once"
    for _ in range(10):
        driver.step()
    assert driver.outputs["good"] == expected_output([1, 2, 3], 4)
    assert not hard.structured_output_request.is_grammar_ready  # type: ignore[union-attr]
    assert "hard" not in driver.ends
    jobs.pop()()
    assert generate(driver, "hard", eos_or_first) == "ab"


def test_whatever_a_compilation_raises_ends_its_request() -> None:
    def broken() -> Any:
        raise OSError("the tokenizer's file is gone")

    grammars = manager()
    grammars._tokenizer_factory = broken
    driver = Driver(make_scheduler([full(4)], 40, structured=grammars), depth=1)
    driver.add("a", [1, 2, 3], structured_outputs=StructuredOutputsParams(regex="ab"))
    driver.run()
    assert "file is gone" in str(driver.ends["a"].error)
