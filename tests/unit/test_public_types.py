import pytest

import vllm
from vllm import exceptions
from vllm.inputs import embeds_input
from vllm.lora.request import LoRARequest
from vllm.pooling_params import PoolingParams
from vllm.usage.usage_lib import UsageContext


def test_version():
    assert vllm.__version__ == "0.33.0"


@pytest.mark.parametrize(
    "name",
    [
        "SamplingParams",
        "PoolingParams",
        "TokensPrompt",
        "TextPrompt",
        "CompletionOutput",
        "RequestOutput",
        "EngineArgs",
    ],
)
def test_top_level_names(name):
    assert name in dir(vllm)
    assert getattr(vllm, name) is not None


def test_unknown_top_level_name():
    with pytest.raises(AttributeError, match="no_such"):
        _ = vllm.no_such


def test_prompts_are_plain_dicts():
    assert vllm.TokensPrompt(prompt_token_ids=[1]) == {"prompt_token_ids": [1]}
    assert vllm.TextPrompt(prompt="x", cache_salt="s") == {"prompt": "x", "cache_salt": "s"}
    assert embeds_input("E") == {"type": "embeds", "prompt_embeds": "E"}
    assert embeds_input("E", prompt_token_ids=[1], is_token_ids=[True])["is_token_ids"] == [True]


def test_lora_request_is_identified_by_name():
    first, second = LoRARequest("a", 1, "/x"), LoRARequest("a", 2, "/y")
    assert first == second
    assert hash(first) == hash(second)
    assert (first.adapter_id, first.name, first.path) == (1, "a", "/x")
    with pytest.raises(ValueError, match="at least 1"):
        LoRARequest("a", 0)


def test_pooling_params_clone():
    params = PoolingParams(task="embed")
    assert params.clone() == params
    assert params.clone() is not params


def test_errors_know_their_http_status():
    assert exceptions.VLLMNotFoundError("x").http_status == 404
    assert exceptions.GenerationError().http_status == 500
    assert exceptions.RetryableRequestError("x").retryable
    refused = exceptions.QueueOverflowError("full")
    assert (refused.http_status, refused.message, refused.retryable) == (503, "full", True)
    error = exceptions.VLLMValidationError("bad", parameter="p", value=3)
    assert str(error) == "bad (parameter=p, value=3)"
    assert str(exceptions.VLLMValidationError("bad")) == "bad"


def test_usage_context_is_text():
    assert UsageContext.LLM_CLASS == "LLM_CLASS"
