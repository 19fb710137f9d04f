"""Requests and replies, byte for byte, as clients see them. To accept a change on purpose: UPDATE_GOLDEN=1 pytest …"""

import json
import os
from dataclasses import replace
from pathlib import Path

import pytest

from tests.helpers.fake_engine import Step
from tests.helpers.http_app import App
from vllm.exceptions import GenerationError, QueueOverflowError
from vllm.utils.ids import CountingIds

FOLDER = Path(__file__).parent / "golden"
USER = [{"role": "user", "content": "hi"}]
TOOLS = [{"type": "function", "function": {"name": "f", "parameters": {"type": "object"}}}]
USAGE = {"include_usage": True}
ALWAYS = {"include_usage": True, "continuous_usage_stats": True}
FLAGS = ["--enable-prompt-tokens-details", "--enable-auto-tool-choice", "--tool-call-parser", "hermes"]

PLAIN = [Step("Hel", [100]), Step("lo", [101], "stop")]
CALL = [Step('<tool_call>{"name": "f", ', [100]), Step('"arguments": {"a": 1}}</tool_call>', [101], "stop")]
BROKEN = [Step("Hel", [100]), GenerationError("the KV cache could not be loaded")]

# name → path, body, script
CASES = {
    "completion": ("/v1/completions", {"prompt": "hello", "max_tokens": 5}, PLAIN),
    "completion_logprobs": ("/v1/completions", {"prompt": "hello", "logprobs": 1, "echo": True, "return_token_ids": True}, PLAIN),
    "completion_stream": ("/v1/completions", {"prompt": "hello", "stream": True, "stream_options": USAGE}, PLAIN),
    "completion_stream_logprobs": ("/v1/completions", {"prompt": "hello", "stream": True, "logprobs": 0, "return_token_ids": True}, PLAIN),
    "completion_stream_error": ("/v1/completions", {"prompt": "hello", "stream": True}, BROKEN),
    "completion_bad_field": ("/v1/completions", {"prompt": "hello", "temperature": -1}, PLAIN),
    "completion_bad_type": ("/v1/completions", {"prompt": "hello", "max_tokens": "many"}, PLAIN),
    "completion_unknown_model": ("/v1/completions", {"prompt": "hello", "model": "nope"}, PLAIN),
    "completion_full_queue": ("/v1/completions", {"prompt": "hello"}, [QueueOverflowError("8 requests wait already")]),
    "completion_failed": ("/v1/completions", {"prompt": "hello"}, [GenerationError("the KV cache could not be loaded")]),
    "chat": ("/v1/chat/completions", {"messages": USER}, PLAIN),
    "chat_logprobs": ("/v1/chat/completions", {"messages": USER, "logprobs": True, "top_logprobs": 2}, PLAIN),
    "chat_stream": ("/v1/chat/completions", {"messages": USER, "stream": True, "stream_options": ALWAYS}, PLAIN),
    "chat_tools": ("/v1/chat/completions", {"messages": USER, "tools": TOOLS}, CALL),
    "chat_tools_stream": ("/v1/chat/completions", {"messages": USER, "tools": TOOLS, "stream": True}, CALL),
    "tokenize": ("/tokenize", {"prompt": "hello"}, PLAIN),
    "detokenize": ("/detokenize", {"tokens": [3, 4]}, PLAIN),
    "generate": ("/inference/v1/generate", {"request_id": "r", "token_ids": [5], "sampling_params": {"logprobs": 0}}, PLAIN),
}  # fmt: skip


class FixedClock:
    def time(self):
        return 1_700_000_000.0

    def monotonic(self):
        return 0.0


@pytest.mark.parametrize("name", CASES)
async def test_replies_are_as_recorded(tmp_path, name):
    path, body, script = CASES[name]
    app = App(
        tmp_path, lambda call, sample: script, FLAGS, cached_tokens=2, kv_transfer_params={"remote": "x"}
    )
    state = app.app.state.serving
    for endpoint in (state.completion, state.chat):
        endpoint.options = replace(endpoint.options, clock=FixedClock(), ids=CountingIds())
    reply = await app.post(path, body)
    headers = {key: value for key, value in reply.headers.items() if key in ("content-type", "retry-after")}
    text = reply.text if "event-stream" in headers["content-type"] else reply.json()
    seen = {
        "request": {"path": path, "body": body},
        "status": reply.status_code,
        "headers": headers,
        "reply": text,
    }
    file = FOLDER / f"{name}.json"
    if os.environ.get("UPDATE_GOLDEN") == "1":
        file.write_text(json.dumps(seen, indent=1, ensure_ascii=False) + "\n")
    assert seen == json.loads(file.read_text())


def test_every_recording_belongs_to_a_case():
    assert {path.stem for path in FOLDER.glob("*.json")} == set(CASES)
