import pytest
import torch

from vllm.exceptions import GenerationError, RetryableRequestError, VLLMValidationError
from vllm.logprobs import Logprob
from vllm.outputs import (
    ClassificationRequestOutput,
    CompletionOutput,
    EmbeddingRequestOutput,
    PoolingOutput,
    PoolingRequestOutput,
    RequestError,
    RequestOutput,
    ScoringRequestOutput,
)


def completion(index=0, text="a", ids=(1,), **more):
    return CompletionOutput(index, text, list(ids), None, None, **more)


def output(*completions, finished=False, **more):
    return RequestOutput("r", "p", [1, 2], None, list(completions), finished, **more)


def test_deltas_are_joined_per_sample():
    total = output(completion(0, "a", (1,)), num_cached_tokens=4)
    total.outputs[0].logprobs = [{1: Logprob(-1.0)}]
    following = completion(0, "b", (2, 3), finish_reason="stop", stop_reason=3)
    following.logprobs = [{2: Logprob(-2.0)}, {3: Logprob(-3.0)}]
    total.add(
        output(
            following,
            completion(1, "z", (9,)),
            finished=True,
            num_cached_tokens=7,
            kv_transfer_params={"a": 1},
        ),
        aggregate=True,
    )
    assert (total.outputs[0].text, total.outputs[0].token_ids) == ("ab", [1, 2, 3])
    assert len(total.outputs[0].logprobs) == 3
    assert (total.outputs[0].finish_reason, total.outputs[0].stop_reason, total.outputs[1].text) == (
        "stop",
        3,
        "z",
    )
    assert (total.finished, total.num_cached_tokens, total.kv_transfer_params) == (True, 4, {"a": 1})
    assert total.outputs[0].finished()


def test_cumulative_outputs_replace_each_other():
    total = output(completion(0, "a", (1,)))
    total.add(output(completion(0, "ab", (1, 2))), aggregate=False)
    assert total.outputs[0].text == "ab"
    assert "request_id='r'" in repr(total)


def test_joining_into_a_read_only_sequence_makes_a_list():
    first = CompletionOutput(0, "", (1,), None, None)
    total = output(first)
    total.add(output(completion(0, "", (2,))), aggregate=True)
    assert total.outputs[0].token_ids == [1, 2]


def test_unknown_arguments_are_ignored():
    made = output(completion(), brand_new_field=3)
    assert not hasattr(made, "brand_new_field")


@pytest.mark.parametrize(
    ("error", "kind"),
    [
        (RequestError("kv_load_failed", "m"), GenerationError),
        (RequestError("engine_paused", "m", True), RetryableRequestError),
        (RequestError("invalid_grammar", "m"), VLLMValidationError),
        (RequestError("kv_cache_too_small", "m"), VLLMValidationError),
    ],
)
def test_request_error_becomes_the_right_exception(error, kind):
    made = error.to_exception()
    assert type(made) is kind
    assert "m" in str(made)


def test_a_request_error_names_the_field_at_fault_where_its_code_tells():
    assert RequestError("grammar_too_complex", "m").to_exception().parameter == "structured_outputs"
    assert RequestError("invalid_request", "m").to_exception().parameter is None


def test_request_error_is_frozen():
    with pytest.raises(AttributeError):
        RequestError("a", "b").code = "c"


def pooled(data, error=None):
    return PoolingRequestOutput("r", PoolingOutput(torch.tensor(data)), [1], 0, True, error=error)


def test_pooling_kinds_are_read_from_tensors():
    assert EmbeddingRequestOutput.from_base(pooled([1.0, 2.0])).outputs.embedding == [1.0, 2.0]
    assert ClassificationRequestOutput.from_base(pooled([0.5, 0.5])).outputs.num_classes == 2
    assert ScoringRequestOutput.from_base(pooled([0.25])).outputs.score == 0.25
    assert EmbeddingRequestOutput.from_base(pooled([1.0, 2.0])).outputs.hidden_size == 2
    assert PoolingOutput(torch.tensor([1])) == PoolingOutput(torch.tensor([1]))
    assert PoolingOutput(torch.tensor([1])) != PoolingOutput(torch.tensor([2]))


def test_wrong_pooling_shapes_are_refused():
    for kind in (EmbeddingRequestOutput, ClassificationRequestOutput, ScoringRequestOutput):
        with pytest.raises(ValueError, match="shape"):
            kind.from_base(pooled([[1.0], [2.0]]))


def test_a_pooling_error_is_kept():
    error = RequestError("x", "y")
    for kind in (EmbeddingRequestOutput, ClassificationRequestOutput, ScoringRequestOutput):
        made = kind.from_base(pooled([[1.0]], error))
        assert made.error is error
        assert made.outputs is None
        assert "error=" in repr(made)
