"""`kv_retention` and `cache_control` in HTTP bodies: what reaches the engine, and what is a bad request."""

from pathlib import Path
from typing import Any

import pytest

from tests.helpers.engine_configs import engine_config
from tests.helpers.http_app import App, says
from vllm.exceptions import VLLMValidationError
from vllm.kv_retention import RetentionLevel, parse_retention
from vllm.sampling_params import SamplingParams
from vllm.v1.engine.input_processor import InputProcessor

PATHS = {
    "/v1/completions": {"prompt": "hello"},
    "/v1/chat/completions": {"messages": [{"role": "user", "content": "hi"}]},
}


@pytest.fixture
def app(tmp_path: Path) -> App:
    return App(tmp_path, says("foo", " bar"))


@pytest.mark.parametrize("path", list(PATHS))
async def test_the_hint_travels_with_the_request(app: App, path: str) -> None:
    hint = {"pin": True, "ttl": "10m", "id": "agent/1", "superseded_by": "agent/2"}
    reply = await app.post(path, {**PATHS[path], "kv_retention": hint, "vllm_xargs": {"a": 1}})
    assert reply.status_code == 200, reply.text
    assert app.call.params.extra_args == {"a": 1, "kv_retention": hint}


@pytest.mark.parametrize("path", list(PATHS))
async def test_the_short_form_is_high_priority_for_a_time(app: App, path: str) -> None:
    control = {"type": "ephemeral", "ttl": "1h"}
    assert (await app.post(path, {**PATHS[path], "cache_control": control})).status_code == 200
    hint = parse_retention(app.call.params.extra_args["kv_retention"])
    assert (hint.level, hint.ttl_s) == (RetentionLevel.HIGH, 3600.0)


async def test_marks_within_messages_count_for_the_request(app: App) -> None:
    parts = [
        {"type": "text", "text": "a", "cache_control": {"type": "ephemeral", "ttl": "1h"}},
        {"type": "text", "text": "b"},
    ]
    messages = [
        {"role": "system", "content": parts},
        {"role": "user", "content": "hi", "cache_control": None},
    ]
    await app.chat(messages=messages)
    assert app.call.params.extra_args == {"kv_retention": {"priority": "high", "ttl": 3600.0}}
    # The last mark, and before it the fields of the request, decide.
    messages[1]["cache_control"] = {"type": "ephemeral"}
    await app.chat(messages=messages)
    assert app.call.params.extra_args["kv_retention"]["ttl"] == 300.0
    await app.chat(messages=messages, kv_retention={"pin": True})
    assert app.call.params.extra_args == {"kv_retention": {"pin": True}}
    messages[1]["cache_control"] = {"type": "ephemeral", "ttl": "never"}
    error = await app.error("/v1/chat/completions", {"messages": messages})
    assert (error["code"], error["param"]) == (400, "cache_control")


async def test_without_a_hint_nothing_is_added(app: App) -> None:
    await app.complete(kv_retention=None, cache_control=None)
    assert app.call.params.extra_args is None


BAD: dict[str, tuple[dict[str, Any], str, str]] = {
    "unknown field": ({"kv_retention": {"pinned": True}}, "kv_retention", "did you mean 'pin'"),
    "no mapping": ({"kv_retention": "pin"}, "kv_retention", "must be a mapping, got 'pin'"),
    "ttl": ({"kv_retention": {"ttl": -1}}, "kv_retention", "kv_retention.ttl"),
    "control": ({"cache_control": {"type": "forever"}}, "cache_control", "ephemeral"),
    "control ttl": ({"cache_control": {"type": "ephemeral", "ttl": 0}}, "cache_control", "cache_control.ttl"),
    "both": (
        {"cache_control": {"type": "ephemeral"}, "kv_retention": {}},
        "cache_control",
        "exclude each other",
    ),
}


@pytest.mark.parametrize("path", list(PATHS))
@pytest.mark.parametrize("name", list(BAD))
async def test_wrong_hints_are_bad_requests(app: App, path: str, name: str) -> None:
    fields, param, message = BAD[name]
    error = await app.error(path, {**PATHS[path], **fields})
    assert (error["code"], error["param"]) == (400, param)
    assert message in error["message"]
    assert not app.engine.calls


def test_the_offline_way_is_checked_too() -> None:
    processor = InputProcessor(engine_config(), None)
    params = SamplingParams(
        max_tokens=1, extra_args={"kv_retention": {"priority": "highest"}}, detokenize=False
    )
    with pytest.raises(VLLMValidationError, match="kv_retention.priority must be one of"):
        processor.process_inputs("r", {"prompt_token_ids": [1, 2, 3]}, params)
