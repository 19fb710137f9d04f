"""The real language model: SmolLM2-135M-Instruct answers sensibly, with the CPU tier on, streaming and not."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import openai
import pytest

from examples.serving import Server, offload_flags, serve

pytestmark = pytest.mark.model

QUESTION: list[Any] = [{"role": "user", "content": "What is the capital of France?"}]


@pytest.fixture(scope="module")
def server(smollm2: Path) -> Iterator[Server]:
    flags = [*offload_flags(256 << 20), "--max-model-len", "2048", "--dtype", "float32"]
    with serve(smollm2, *flags, env={"VLLM_CPU_KVCACHE_SPACE": "1"}) as running:
        yield running


@pytest.fixture
def client(server: Server) -> Iterator[openai.OpenAI]:
    with openai.OpenAI(base_url=f"{server.url}/v1", api_key="none") as made:
        yield made


def test_capital_of_france(client: openai.OpenAI) -> None:
    answer = client.chat.completions.create(model="m", messages=QUESTION, temperature=0, max_tokens=24)
    assert "Paris" in (answer.choices[0].message.content or "")
    assert answer.choices[0].finish_reason == "stop"


def test_streaming_says_the_same(client: openai.OpenAI) -> None:
    whole = client.chat.completions.create(model="m", messages=QUESTION, temperature=0, max_tokens=24)
    chunks = client.chat.completions.create(
        model="m", messages=QUESTION, temperature=0, max_tokens=24, stream=True
    )
    text = "".join(chunk.choices[0].delta.content or "" for chunk in chunks if chunk.choices)
    assert text == whole.choices[0].message.content


def test_a_long_chat_hits_the_cpu_pool_and_answers_the_same(server: Server) -> None:
    story = "The river ran past the old mill, and every morning the miller counted his sacks. " * 20
    body = {"model": "m", "messages": [{"role": "user", "content": story + "What did the miller count?"}]}
    body |= {"temperature": 0, "max_tokens": 16}
    fresh = server.request("POST", "/v1/chat/completions", body).body
    server.wait_for_stores()
    assert server.reset()
    again = server.request("POST", "/v1/chat/completions", body).body
    assert again["usage"]["prompt_tokens_details"]["cached_tokens"] > 300
    assert again["choices"][0]["message"]["content"] == fresh["choices"][0]["message"]["content"]
