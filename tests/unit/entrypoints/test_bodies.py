"""Bodies that JSON can spell but nothing behind the routes could carry, and values that only look like the right type."""

import json

import pytest

from tests.helpers.http_app import App, says
from vllm.entrypoints.openai.bodies import DEPTH_MAX, parse_body
from vllm.entrypoints.openai.errors import MESSAGE_CHARACTERS_MAX

PATHS = {
    "/v1/completions": {"prompt": "a"},
    "/v1/chat/completions": {"messages": [{"role": "user", "content": "a"}]},
    "/v1/chat/completions/batch": {"messages": [[{"role": "user", "content": "a"}]]},
    "/tokenize": {"prompt": "a"},
    "/detokenize": {"tokens": [5]},
    "/inference/v1/generate": {"token_ids": [5]},
    "/inference/v1/abort_requests": {"request_ids": ["a"]},
    "/abort_requests": {"request_ids": ["a"]},
    "/collective_rpc": {"method": "a"},
    "/kv_cache/lookup": {"prompt": "a"},
}
HARMFUL = {
    "surrogate": ('"\\ud83d"', "unpaired surrogate \\ud83d"),
    "surrogate in a key": ('{"\\udE00": 1}', "unpaired surrogate"),
    "wide integer": (str(2**64), "64 bits"),
    "wide negative integer": (f"[{-(2**63) - 1}]", "64 bits"),
    "endless integer": ("1" * 5000, "digits"),
    "deep lists": ("[" * 500 + "]" * 500, "deep"),
    "endless lists": ("[" * 100_000, "deep"),
    "nan": ("NaN", "NaN"),
    "infinity": ("[-Infinity]", "Infinity"),
}


@pytest.fixture
def app(tmp_path, monkeypatch):
    monkeypatch.setenv("VLLM_SERVER_DEV_MODE", "1")
    return App(tmp_path, says("foo"))


@pytest.mark.parametrize("case", HARMFUL)
async def test_what_cannot_be_carried_is_400_on_every_route(app, case):
    text, word = HARMFUL[case]
    for path, body in PATHS.items():
        raw = json.dumps(body)[:-1] + f', "model": {text}}}'
        reply = await app.client.post(path, content=raw, headers={"Content-Type": "application/json"})
        assert reply.status_code == 400, path
        assert word in reply.json()["error"]["message"]
    assert app.engine.calls == []


def test_no_route_with_a_body_is_missing_above(app):
    operations = app.app.openapi()["paths"].items()
    assert {path for path, methods in operations if "requestBody" in methods.get("post", {})} == set(PATHS)


def test_what_can_be_carried_is_read_as_json_reads_it():
    value = {"a": ["\U0001f389", "\\ud83d", 2**64 - 1, -(2**63), 1e300], "b": [[1]] * 300}
    for raw in (json.dumps(value).encode(), json.dumps(value, ensure_ascii=False).encode("utf-16")):
        assert parse_body(raw) == value
    nested = "[" * DEPTH_MAX + "]" * DEPTH_MAX
    assert parse_body(nested.encode()) == json.loads(nested)


async def test_a_long_value_does_not_come_back_whole(app):
    error = await app.error("/v1/completions", {"prompt": "a", "thinking_token_budget": "x" * 100_000})
    assert len(error["message"]) <= MESSAGE_CHARACTERS_MAX + 2


@pytest.mark.parametrize("calls", [1, True, "x", {"a": 1}])
async def test_tool_calls_of_a_message_are_a_list(app, calls):
    messages = [{"role": "user", "content": "a"}, {"role": "assistant", "content": "b", "tool_calls": calls}]
    error = await app.error("/v1/chat/completions", {"messages": messages})
    assert (error["code"], error["param"]) == (400, "messages")


@pytest.mark.parametrize("name", ["ignore_eos", "skip_special_tokens", "include_stop_str_in_output"])
async def test_flags_among_the_parameters_are_booleans(app, name):
    error = await app.error("/inference/v1/generate", {"token_ids": [5], "sampling_params": {name: "yes"}})
    assert (error["code"], error["param"]) == (400, f"sampling_params.{name}")
    assert app.engine.calls == []


@pytest.mark.parametrize(
    ("name", "value"),
    [("_bad_words_token_ids", [[]]), ("_eos_token_id", 5), ("output_text_buffer_length", 9)],
)
async def test_computed_parameters_cannot_be_sent(app, name, value):
    error = await app.error("/inference/v1/generate", {"token_ids": [5], "sampling_params": {name: value}})
    assert (error["code"], error["param"]) == (400, f"sampling_params.{name}")
    assert app.engine.calls == []


@pytest.mark.parametrize(
    ("path", "body"),
    [
        ("/v1/completions", {"prompt": "a" * 1_000_000}),
        ("/v1/chat/completions", {"messages": [{"role": "user", "content": "a" * 1_000_000}]}),
    ],
)
async def test_a_text_that_cannot_fit_is_refused_by_its_length(app, monkeypatch, path, body):
    monkeypatch.setattr(app.engine.tokenizer, "encode", None)
    error = await app.error(path, body)
    assert error["code"] == 400
    assert "1000000 characters" in error["message"]


@pytest.mark.parametrize("kind", ["text/plain", "application/x-www-form-urlencoded", "application/xml"])
async def test_a_wrong_content_type_is_named(app, kind):
    for path, body in PATHS.items():
        reply = await app.client.post(path, content=json.dumps(body), headers={"Content-Type": kind})
        assert reply.status_code == 400, path
        assert "Content-Type: application/json" in reply.json()["error"]["message"]
    assert app.engine.calls == []
