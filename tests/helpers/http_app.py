"""The HTTP app round a fake engine, and a client for it; everything in one process and one loop."""

from __future__ import annotations

import json
import threading
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from functools import cache
from pathlib import Path
from typing import Any

import httpx
import uvicorn
from fastapi import FastAPI

from tests.helpers.fake_engine import FakeEngine, Script, text_steps
from tests.helpers.model_folders import write_model_folder
from tests.helpers.tiny_tokenizers import make_tokenizer
from vllm.engine.arg_utils import AsyncEngineArgs
from vllm.entrypoints.common.cli_args import make_arg_parser
from vllm.entrypoints.openai.api_server import build_app, prepare
from vllm.utils.argparse_utils import FlexibleArgumentParser

TEMPLATE = (
    "{% for m in messages %}<{{ m.role }}>{{ m.content }}</{{ m.role }}>{% endfor %}"
    "{% if tools %}[{{ tools | length }} tools]{% endif %}{% if add_generation_prompt %}<assistant>{% endif %}"
)


@cache
def _parser() -> FlexibleArgumentParser:
    return make_arg_parser(FlexibleArgumentParser())


class App:
    """An app, its engine and a client. `flags` are those of `vllm serve`."""

    def __init__(self, folder: Path, script: Script, flags: Sequence[str] = (), **engine: Any) -> None:
        model = write_model_folder(folder, vocab_size=2000, max_position_embeddings=2048)
        args = _parser().parse_args(
            [model, "--served-model-name", "m", "other", "--chat-template", TEMPLATE, *flags]
        )
        prepare(args)
        config = AsyncEngineArgs.from_cli_args(args).create_engine_config()
        tokenizer = None if args.skip_tokenizer_init else make_tokenizer("byte_level")
        self.engine = FakeEngine(config, tokenizer, script, **engine)
        self.app: FastAPI = build_app(args, self.engine)
        transport = httpx.ASGITransport(self.app, raise_app_exceptions=False)
        self.client = httpx.AsyncClient(transport=transport, base_url="http://test")

    @property
    def call(self) -> Any:
        """The engine's last call."""
        return self.engine.calls[-1]

    async def post(self, path: str, body: Any, **options: Any) -> httpx.Response:
        return await self.client.post(path, json=body, **options)

    async def complete(self, **body: Any) -> dict[str, Any]:
        """Body of a completion that must succeed."""
        reply = await self.post("/v1/completions", {"prompt": "hello", **body})
        assert reply.status_code == 200, reply.text
        return reply.json()

    async def chat(self, **body: Any) -> dict[str, Any]:
        """Body of a chat completion that must succeed."""
        reply = await self.post(
            "/v1/chat/completions", {"messages": [{"role": "user", "content": "hi"}], **body}
        )
        assert reply.status_code == 200, reply.text
        return reply.json()

    async def stream(self, path: str, **body: Any) -> list[dict[str, Any]]:
        """Chunks of a stream that must end with [DONE]."""
        given = {"messages": [{"role": "user", "content": "hi"}]} if "chat" in path else {"prompt": "hello"}
        reply = await self.post(path, {**given, "stream": True, **body})
        assert reply.status_code == 200, reply.text
        assert reply.headers["content-type"].startswith("text/event-stream")
        return events(reply.text)

    async def error(self, path: str, body: Any, **options: Any) -> dict[str, Any]:
        """The error object of a refusal; its code must be the HTTP status."""
        reply = await self.post(path, body, **options)
        error = reply.json()["error"]
        assert set(error) == {"message", "type", "param", "code"}
        assert error["code"] == reply.status_code
        return error


def events(text: str) -> list[dict[str, Any]]:
    """The events of a stream without its end mark."""
    lines = [line.removeprefix("data: ") for line in text.split("\n\n") if line.startswith("data: ")]
    assert lines[-1] == "[DONE]"
    return [json.loads(line) for line in lines[:-1]]


def says(*pieces: str, finish: str = "stop", stop_reason: int | str | None = None) -> Script:
    """A script with the same pieces for every sample."""
    return lambda call, sample: text_steps(pieces, finish, stop_reason)


@contextmanager
def running(app: App) -> Iterator[str]:
    """The app behind a real socket; its address."""
    config = uvicorn.Config(app.app, port=0, log_level="error")
    server = uvicorn.Server(config)
    thread = threading.Thread(target=server.run, daemon=True)
    thread.start()
    while not server.started:
        thread.join(0.01)
    try:
        yield f"http://127.0.0.1:{server.servers[0].sockets[0].getsockname()[1]}"
    finally:
        server.should_exit = True
        thread.join()
