"""Bodies of megabytes: refused by their size, read beside the event loop, and never walked item by item."""

import json
import threading

import pytest

from tests.helpers.http_app import App, says
from vllm.entrypoints.openai import bodies, render
from vllm.entrypoints.openai.bodies import (
    CONTAINERS_MAX,
    INLINE_BODY_MAX,
    body_bytes_default,
    parse_body,
    parse_large_body,
)
from vllm.entrypoints.openai.field_types import CONVERTED_ITEMS_MAX, LOGIT_BIASES_MAX, XARGS_MAX

COMPLETIONS, CHAT = "/v1/completions", "/v1/chat/completions"
JSON = {"Content-Type": "application/json"}
MILLION = 1_000_000


@pytest.fixture
def app(tmp_path, monkeypatch):
    monkeypatch.setenv("VLLM_SERVER_DEV_MODE", "1")
    return App(tmp_path, says("foo"))


# --- size ---------------------------------------------------------------------------------------------------------


def test_the_largest_body_grows_with_the_model_up_to_the_documented_default():
    assert body_bytes_default(2048) == (4 << 20) + (2048 * 128)
    assert body_bytes_default(1 << 20) == 32 << 20


async def test_a_body_beyond_what_the_model_can_use_is_413_whether_its_size_is_stated_or_not(app):
    async def pieces():
        for _ in range(6):
            yield b"x" * MILLION

    for content in (b"x" * 6 * MILLION, pieces()):
        reply = await app.client.post(COMPLETIONS, content=content, headers=JSON)
        assert reply.status_code == 413
        assert reply.json()["error"]["type"] == "PayloadTooLargeError"
    assert app.engine.calls == []


async def test_a_size_that_was_set_wins(tmp_path, monkeypatch):
    monkeypatch.setenv("VLLM_HTTP_MAX_REQUEST_BODY_SIZE", str(8 * MILLION))
    app = App(tmp_path, says("foo"))
    body = json.dumps({"prompt": "x", "user": "u" * 6 * MILLION})
    assert (await app.client.post(COMPLETIONS, content=body, headers=JSON)).status_code == 200


# --- reading ------------------------------------------------------------------------------------------------------


def test_of_a_key_that_is_there_twice_the_last_counts_however_large_the_body_is():
    raw = b'{"model": "a", "prompt": "x", "logit_bias": {"1": 2, "1": 3}, "model": "b"}'
    assert parse_body(raw) == parse_large_body(raw) == {"model": "b", "prompt": "x", "logit_bias": {"1": 3}}


async def test_a_large_body_is_read_beside_the_event_loop(app, monkeypatch):
    threads = []

    def noted(raw):
        threads.append(threading.current_thread())
        return parse_large_body(raw)

    monkeypatch.setattr(bodies, "parse_large_body", noted)
    await app.complete(user="u" * (INLINE_BODY_MAX - 100))
    assert threads == []
    await app.complete(user="u" * INLINE_BODY_MAX)
    assert threads
    assert threading.main_thread() not in threads


@pytest.mark.parametrize(
    "value",
    [
        {"a": ["\U0001f389", "\\ud83d", '"[{,', 2**64 - 1, -(2**63), 1e300, None, True], "b": [[1]] * 300},
        {"text": ',[{"\\' * 100_000},
        {"a": 1, "b": {"c": []}},
    ],
    ids=["mixed", "marks in a text", "small"],
)
@pytest.mark.parametrize("encoding", ["utf-8", "utf-16"])
def test_the_quick_reader_reads_what_the_other_one_reads(value, encoding):
    assert parse_large_body(json.dumps(value).encode(encoding)) == value
    assert parse_large_body(json.dumps(value, ensure_ascii=False).encode(encoding)) == value


@pytest.mark.parametrize(
    ("raw", "word"),
    [
        (b'"\\ud83d"', "surrogate"),
        (b"NaN", "NaN"),
        (str(2**64).encode(), "64 bits"),
        (b"[" * 200_000, "deep"),
        (b'{"a": }', "value"),
        (b'"\xff"', "utf-8"),
    ],
)
def test_the_quick_reader_refuses_in_the_words_of_the_other_one(raw, word):
    with pytest.raises(json.JSONDecodeError, match=word):
        parse_large_body(raw)


@pytest.mark.parametrize(
    "value",
    [[[1]] * (CONTAINERS_MAX + 1), [{}] * (CONTAINERS_MAX + 1), [1] * (bodies.VALUES_MAX + 2)],
    ids=["lists", "objects", "values"],
)
async def test_a_body_of_too_many_values_is_413(app, value):
    error = await app.error(COMPLETIONS, {"prompt": "a", "user": value})
    assert error["code"] == 413
    assert "too many values" in error["message"]


@pytest.mark.parametrize(
    "extra",
    [
        {"tools": [{"function": {"name": "f", "description": "x" * 5000}}], "tool_choice": "none"},
        {"documents": [{"text": "x" * 5000}]},
        {"chat_template_kwargs": {"x": ["x" * 5000]}},
    ],
)
async def test_all_that_a_template_may_use_is_rendered_beside_the_event_loop(app, monkeypatch, extra):
    threads = []
    render_chat = render.render_chat

    def seen(*args):
        threads.append(threading.current_thread())
        return render_chat(*args)

    monkeypatch.setattr(render, "render_chat", seen)
    await app.chat()
    await app.chat(**extra)
    assert threads[0] is threading.main_thread()
    assert threads[1] is not threading.main_thread()


# --- checking -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("path", "body", "param"),
    [
        (COMPLETIONS, {"prompt": [7] * MILLION}, "prompt"),
        (COMPLETIONS, {"prompt": [[7] * (MILLION // 2)] * 2}, "prompt"),
        (COMPLETIONS, {"prompt": "x " * MILLION}, "prompt"),
        (CHAT, {"messages": [{"role": "user", "content": "x " * MILLION}]}, "messages"),
        (CHAT, {"messages": [{"role": "user", "content": "x " * 9000}] * 100}, "messages"),
    ],
)
async def test_a_prompt_that_is_far_too_long_is_400_naming_the_limit(app, path, body, param):
    error = await app.error(path, body)
    assert (error["code"], error["param"]) == (400, param)
    assert "2048" in error["message"]


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("prompt", [1] + ["x"] * 100_000),
        ("prompt", [[1] * 10, [1] * CONVERTED_ITEMS_MAX + ["x"]]),
        ("prompt", ["x"] * 10_000),
        ("stop_token_ids", ["x"] * 100_000),
        ("allowed_token_ids", [{}] * 10_000),
        ("stop", [1] * 100_000),
        ("logit_bias", {str(number): "x" for number in range(CONVERTED_ITEMS_MAX + 1)}),
        ("logit_bias", {str(number): 1 for number in range(LOGIT_BIASES_MAX + 1)}),
        ("vllm_xargs", {str(number): 1 for number in range(XARGS_MAX + 1)}),
        ("vllm_xargs", {"a": [{}] * 10_000}),
        ("vllm_xargs", [1]),
    ],
)
async def test_a_long_list_of_faults_is_one_fault(app, field, value):
    error = await app.error(COMPLETIONS, {"prompt": "a", field: value})
    assert error["code"] == 400
    assert error["param"].startswith(field)
    assert error["message"].count(";") <= 6


async def test_short_lists_are_still_converted(app):
    await app.complete(
        prompt=[5.0, 6], stop_token_ids=["7"], logit_bias={"8": "1"}, vllm_xargs={"a": [1, "b"]}
    )
    assert app.call.prompt["prompt_token_ids"] == [5, 6]
    assert app.call.params.stop_token_ids == [7]
    assert app.call.params.extra_args == {"a": [1, "b"]}


async def test_samples_of_all_prompts_together_are_limited(app):
    error = await app.error(COMPLETIONS, {"prompt": ["a"] * 100, "n": 1000})
    assert (error["code"], error["param"]) == (400, "n")
    assert "VLLM_MAX_N_SEQUENCES" in error["message"]


async def test_many_short_texts_are_tokenised_beside_the_event_loop(app, monkeypatch):
    renderer = app.app.state.serving.renderer
    threads, encode = [], renderer.tokenizer.encode

    def noted(*args, **kwargs):
        threads.append(threading.current_thread())
        return encode(*args, **kwargs)

    monkeypatch.setattr(renderer.tokenizer, "encode", noted)
    await app.complete(prompt=["hello"] * 3)
    assert set(threads) == {threading.main_thread()}
    threads.clear()
    await app.complete(prompt=["hello " * 100] * 10)
    assert len(threads) == 10
    assert threading.main_thread() not in threads


async def test_many_tokens_are_turned_into_text_beside_the_event_loop(app, monkeypatch):
    renderer = app.app.state.serving.renderer
    threads, decode = [], renderer.tokenizer.decode

    def noted(*args, **kwargs):
        threads.append(threading.current_thread())
        return decode(*args, **kwargs)

    monkeypatch.setattr(renderer.tokenizer, "decode", noted)
    reply = await app.post("/detokenize", {"tokens": [70] * 100_000})
    assert len(reply.json()["prompt"]) >= 100_000
    assert threading.main_thread() not in threads
