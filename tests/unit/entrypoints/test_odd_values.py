"""Odd and hostile values of request fields: each is served for what it says, or refused by the name of its field."""

import json

import pytest

from tests.helpers.http_app import App, says
from vllm.entrypoints.openai.errors import describe_validation

COMPLETIONS, CHAT, TOKENS = "/v1/completions", "/v1/chat/completions", "/inference/v1/generate"
MESSAGES = [{"role": "user", "content": "hi"}]
GIVEN = {COMPLETIONS: {"prompt": "hi"}, CHAT: {"messages": MESSAGES}, TOKENS: {"token_ids": [5]}}


@pytest.fixture
def app(tmp_path):
    return App(tmp_path, says("x"))


async def refused(app, path, extra):
    """The error of a body whose further fields are JSON text."""
    body = json.dumps(GIVEN[path])[:-1] + f", {extra}}}"
    reply = await app.client.post(path, content=body, headers={"Content-Type": "application/json"})
    error = reply.json()["error"]
    assert error["code"] == reply.status_code
    assert app.engine.calls == []
    return error


@pytest.mark.parametrize(
    ("extra", "param"),
    [
        ('"n": 99999999999999999999', "n"),
        ('"temperature": NaN', "temperature"),
        ('"temperature": -Infinity', "temperature"),
        ('"logit_bias": {"5": NaN}', "logit_bias.5"),
        ('"logit_bias": {"5": 1e400}', "logit_bias.5"),
        ('"stop": ["a", "\\ud800"]', "stop.1"),
        ('"kv_transfer_params": {"a": [0, 1e999]}', "kv_transfer_params.a.1"),
        ('"vllm_xargs": {"a": 1E+400}', "vllm_xargs.a"),
        ('"vllm_xargs": {"\\udc00": 1}', "vllm_xargs"),
    ],
)
async def test_what_json_cannot_carry_is_told_with_its_place(app, extra, param):
    for filler in ("", ', "user": "' + "u" * 70_000 + '"'):
        error = await refused(app, COMPLETIONS, extra + filler)
        assert (error["code"], error["param"]) == (400, param)


@pytest.mark.parametrize("path", [COMPLETIONS, CHAT])
@pytest.mark.parametrize(
    "field",
    [
        "n",
        "temperature",
        "top_p",
        "top_k",
        "seed",
        "max_tokens",
        "min_tokens",
        "priority",
        "prompt_logprobs",
        "stream_interval",
    ],
)
async def test_a_boolean_is_no_number(app, path, field):
    error = await refused(app, path, f'"{field}": true')
    assert (error["code"], error["param"]) == (400, field)


@pytest.mark.parametrize(
    ("path", "extra", "param"),
    [
        (COMPLETIONS, '"logprobs": true', "logprobs"),
        (CHAT, '"logprobs": true, "top_logprobs": true', "top_logprobs"),
        (COMPLETIONS, '"stop_token_ids": [true]', "stop_token_ids"),
        (COMPLETIONS, '"allowed_token_ids": [5, false]', "allowed_token_ids"),
        (COMPLETIONS, '"prompt": [true, 5]', "prompt"),
        (COMPLETIONS, '"prompt": [[5], [true]]', "prompt"),
    ],
)
async def test_a_boolean_is_no_token_and_no_count(app, path, extra, param):
    error = await refused(app, path, extra)
    assert (error["code"], error["param"]) == (400, param)


@pytest.mark.parametrize(
    ("path", "extra", "param"),
    [
        (COMPLETIONS, '"stop": [1]', "stop"),
        (COMPLETIONS, '"stop": {}', "stop"),
        (COMPLETIONS, '"prompt": 5', "prompt"),
        (COMPLETIONS, '"prompt": [null]', "prompt"),
        (CHAT, '"tool_choice": "bogus"', "tool_choice"),
        (CHAT, '"tool_choice": {"type": "function", "function": {"name": 5}}', "tool_choice"),
    ],
)
async def test_a_field_of_several_forms_is_told_by_its_own_name(app, path, extra, param):
    error = await refused(app, path, extra)
    assert (error["code"], error["param"]) == (400, param)
    assert "list[" not in error["message"]
    assert ".str" not in error["message"]


async def test_a_query_parameter_is_told_by_its_own_name(app, monkeypatch, tmp_path):
    monkeypatch.setenv("VLLM_SERVER_DEV_MODE", "1")
    error = await App(tmp_path / "dev", says("x")).error("/sleep?level=x", {})
    assert (error["code"], error["param"]) == (400, "level")


def test_names_of_fields_that_look_like_forms_of_none_are_kept():
    entry = {"type": "x", "loc": ("body", "logit_bias", "5"), "msg": "bad", "input": 1}
    assert describe_validation([entry]).startswith("logit_bias.5: bad")


@pytest.mark.parametrize(
    ("path", "extra", "param"),
    [
        (COMPLETIONS, '"guided_json": {"type": "object"}', "guided_json"),
        (COMPLETIONS, '"guided_regex": "a"', "guided_regex"),
        (CHAT, '"guided_choice": ["a"]', "guided_choice"),
        (CHAT, '"guided_grammar": "root ::= 1"', "guided_grammar"),
        (CHAT, '"functions": [{"name": "f"}]', "functions"),
        (CHAT, '"function_call": "auto"', "function_call"),
        (CHAT, '"modalities": ["text", "audio"]', "modalities"),
        (CHAT, '"audio": {"voice": "x"}', "audio"),
        (CHAT, '"web_search_options": {"a": 1}', "web_search_options"),
        (CHAT, '"media_io_kwargs": {"a": 1}', "media_io_kwargs"),
        (CHAT, '"mm_processor_kwargs": {"a": 1}', "mm_processor_kwargs"),
        (COMPLETIONS, '"length_penalty": 2.0', "length_penalty"),
        (TOKENS, '"sampling_params": {"temprature": 0.5}', "sampling_params.temprature"),
        (TOKENS, '"sampling_params": {"top_k": "x"}', "sampling_params.top_k"),
    ],
)
async def test_what_would_change_the_answer_is_not_ignored(app, path, extra, param):
    error = await refused(app, path, extra)
    assert (error["code"], error["param"]) == (400, param)


async def test_a_part_that_is_no_text_is_told_with_its_field(app):
    body = {"messages": [{"role": "user", "content": [{"type": "image_url", "image_url": {"url": "x"}}]}]}
    error = await app.error(CHAT, body)
    assert (error["code"], error["param"]) == (422, "messages")


@pytest.mark.parametrize(
    "body",
    [
        {"n": None, "stream": None},
        {"guided_json": None, "functions": [], "audio": None, "unknown": 1},
        {"modalities": ["text"], "media_io_kwargs": {}},
        {"length_penalty": 1.0},
        {"user": "NaN \\ud800 1e400 99999999999999999999"},
    ],
)
@pytest.mark.parametrize("path", [COMPLETIONS, CHAT])
async def test_what_says_nothing_is_served(app, path, body):
    reply = await app.post(path, {**GIVEN[path], **body})
    assert reply.status_code == 200, reply.text
    assert app.call.params.n == 1
