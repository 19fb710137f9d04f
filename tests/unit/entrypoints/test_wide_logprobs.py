"""Replies with log probabilities of a whole vocabulary: written in turns with everybody else, and the same text."""

import asyncio
import json
from typing import Any

import numpy as np
import pytest

from tests.helpers.http_app import App, says
from vllm.entrypoints.openai.late_json import (
    SLICE,
    LateJson,
    in_pieces,
    list_text,
    model_text,
    object_text,
    rows_text,
)
from vllm.v1.engine.packed_logprobs import PackedPosition

WIDTH = 2500
COMPLETIONS, CHAT, TOKENS = "/v1/completions", "/v1/chat/completions", "/inference/v1/generate"
MESSAGES = [{"role": "user", "content": "hi"}]
BODIES: dict[str, dict[str, Any]] = {
    COMPLETIONS: {"prompt": "hello", "n": 3, "logprobs": -1, "prompt_logprobs": -1},
    CHAT: {"messages": MESSAGES, "n": 3, "logprobs": True, "top_logprobs": -1, "prompt_logprobs": -1},
    TOKENS: {"token_ids": [1, 2, 3], "sampling_params": {"n": 3, "logprobs": -1, "prompt_logprobs": -1}},
}
STREAMED = {
    COMPLETIONS: {"prompt": "hello", "n": 3, "logprobs": -1, "echo": True},
    CHAT: {"messages": MESSAGES, "n": 3, "logprobs": True, "top_logprobs": -1},
    TOKENS: {"token_ids": [1, 2, 3], "sampling_params": {"n": 3, "logprobs": -1}},
}


class Turns:
    """Counts texts made without a turn of another task, which is here a task that only asks for its next turn."""

    def __init__(self) -> None:
        self.turns = 0
        self.since = 0
        self.longest = 0

    def text(self, token_id: int, context: Any) -> str:
        self.since += 1
        self.longest = max(self.longest, self.since)
        return f"«{token_id // 2}»"  # two tokens of every text

    async def other_task(self) -> None:
        while True:
            self.turns += 1
            self.since = 0
            await asyncio.sleep(0)

    def position(self, token: int) -> PackedPosition:
        ids = np.concatenate([[token], np.roll(np.arange(WIDTH), token)])
        values = np.concatenate([[-7.5], -np.arange(WIDTH) / 64]).astype(np.float32)
        values[0] = values[1:][ids[1:] == token][0]
        return PackedPosition(ids, values, 3, self.text, ())


def make_app(folder: Any, turns: Turns, packed: bool) -> App:
    position = turns.position if packed else lambda token: dict(turns.position(token).items())
    return App(folder, says("foo", " bar"), ("--max-logprobs", "-1"), position=position)


async def beside_another(turns: Turns, work: Any) -> Any:
    other = asyncio.create_task(turns.other_task())
    try:
        return await work
    finally:
        other.cancel()


def without_chance(text: str) -> Any:
    def cleaned(body: Any) -> Any:
        return {key: value for key, value in body.items() if key not in ("id", "created", "request_id")}

    if text.startswith("data: "):
        lines = [line.removeprefix("data: ") for line in text.strip().split("\n\n")]
        return [line if line == "[DONE]" else cleaned(json.loads(line)) for line in lines]
    return cleaned(json.loads(text))


@pytest.mark.parametrize(
    ("path", "body"),
    [*BODIES.items(), *((path, {**body, "stream": True}) for path, body in STREAMED.items())],
)
async def test_a_wide_reply_lets_others_have_their_turn_and_says_the_same(tmp_path, path, body):
    turns = Turns()
    reply = await beside_another(turns, make_app(tmp_path, turns, True).post(path, body))
    assert reply.status_code == 200, reply.text[:300]
    # The text of the token itself is made once more.
    assert turns.longest <= SLICE + 64
    # At least the two tokens of three samples.
    assert turns.turns > 6 * (WIDTH // SLICE)
    at_once = await make_app(tmp_path, Turns(), False).post(path, body)
    assert without_chance(reply.text) == without_chance(at_once.text)


async def test_a_late_value_without_a_writer_is_the_value(tmp_path):
    app = make_app(tmp_path, Turns(), True)
    reply = await app.post(COMPLETIONS, BODIES[COMPLETIONS])
    assert reply.headers["content-type"] == "application/json"
    assert len(reply.json()["choices"][2]["logprobs"]["top_logprobs"][1]) == WIDTH // 2


@pytest.mark.parametrize("count", [0, 1, SLICE, SLICE + 1, 3 * SLICE])
async def test_pieces_join_to_json(count):
    numbers = list(range(count))
    assert json.loads("".join(list_text(numbers))) == numbers
    named = {str(number): number for number in numbers}
    assert json.loads("".join(object_text(named.items()))) == named
    rows = [list_text(numbers) for _ in range(count % 3)]
    assert json.loads("".join(rows_text(rows))) == [numbers] * (count % 3)


async def test_a_name_that_stands_for_nothing_is_a_text_like_any_other():
    name = "late:" + "0" * 32
    text = json.dumps({"a": name, "b": f'"{name}"'})
    assert "".join([piece async for piece in in_pieces(text, {})]) == text


async def test_a_model_holds_late_values_where_its_lists_are():
    from vllm.entrypoints.openai.completion.protocol import CompletionLogProbs

    body = CompletionLogProbs(tokens=["late:" + "0" * 32])
    body.top_logprobs = LateJson(lambda: rows_text([object_text({"a": 1.0}.items()), ("null",)]))
    wanted = {"tokens": ["late:" + "0" * 32], "top_logprobs": [{"a": 1.0}, None]}
    assert json.loads(await model_text(body)) == wanted
    assert body.model_dump(exclude_unset=True) == wanted


@pytest.mark.parametrize(
    ("path", "body"),
    [
        (COMPLETIONS, {"prompt": "hello", "n": 50, "temperature": 1, "logprobs": -1, "max_tokens": 400}),
        (COMPLETIONS, {"prompt": "hello", "n": 16384, "temperature": 1, "logprobs": 2, "max_tokens": 800}),
        (CHAT, {"messages": MESSAGES, "n": 10, "temperature": 1, "logprobs": True, "top_logprobs": -1}),
        (TOKENS, {"token_ids": [1], "sampling_params": {"n": 50, "logprobs": -1, "max_tokens": 400}}),
    ],
)
async def test_more_log_probabilities_than_a_reply_can_hold_are_refused(tmp_path, path, body):
    app = make_app(tmp_path, Turns(), True)
    error = await app.error(path, body)
    assert (error["code"], error["param"]) == (400, "logprobs")
    assert "33554432" in error["message"]
    assert app.engine.calls == []
