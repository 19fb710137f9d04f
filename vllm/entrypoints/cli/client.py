"""`vllm chat` and `vllm complete`: a small client for a running server. Layer: L8."""

from __future__ import annotations

import argparse
import json
import os
import sys
import time
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import httpx

from vllm.utils.argparse_utils import FlexibleArgumentParser

DEFAULT_URL = "http://localhost:8000/v1"
CONNECT_TIMEOUT_S = 10.0


@dataclass
class Timing:
    """What one answer took."""

    first_s: float = 0.0
    total_s: float = 0.0
    pieces: int = 0

    def line(self) -> str:
        """The figures in words."""
        rate = self.pieces / self.total_s if self.total_s else 0.0
        return f"[first piece after {self.first_s:.2f} s, {self.pieces} pieces in {self.total_s:.2f} s, {rate:.1f}/s]"


class Client:
    """Talks to one server, inside a `with` block. Errors of the server are ValueErrors with its message."""

    def __init__(self, url: str, api_key: str | None, model: str | None) -> None:
        headers = {"Authorization": f"Bearer {api_key}"} if api_key else {}
        timeout = httpx.Timeout(None, connect=CONNECT_TIMEOUT_S)
        self.http = httpx.Client(base_url=url.rstrip("/"), headers=headers, timeout=timeout)
        self._wanted = model
        self.model = ""

    def __enter__(self) -> Client:
        try:
            self.model = self._wanted or self._first_model()
        except ValueError:
            self.http.close()
            raise
        return self

    def __exit__(self, *exc_info: object) -> None:
        self.http.close()

    def _first_model(self) -> str:
        try:
            reply = self.http.get("/models")
        except httpx.HTTPError as error:
            raise ValueError(f"no server answers at {self.http.base_url}: {error}") from error
        _check(reply)
        return str(reply.json()["data"][0]["id"])

    def stream(self, path: str, body: dict[str, Any]) -> Iterator[dict[str, Any]]:
        """Chunks of an answer."""
        try:
            with self.http.stream("POST", path, json={"model": self.model, "stream": True, **body}) as reply:
                yield from _chunks(reply)
        except httpx.HTTPError as error:
            raise ValueError(f"no answer from {self.http.base_url}: {error}") from error


def _chunks(reply: httpx.Response) -> Iterator[dict[str, Any]]:
    if reply.status_code != 200:
        reply.read()
        _check(reply)
    for line in reply.iter_lines():
        data = line.removeprefix("data: ")
        if data == line or data == "[DONE]":
            continue
        chunk = json.loads(data)
        if "error" in chunk:
            raise ValueError(chunk["error"]["message"])
        yield chunk


def _check(reply: httpx.Response) -> None:
    if reply.status_code == 200:
        return
    try:
        message = reply.json()["error"]["message"]
    except (ValueError, KeyError, TypeError):
        message = reply.text[:500]
    raise ValueError(f"the server answered {reply.status_code}: {message}")


def show(pieces: Iterator[str], timing: Timing) -> str:
    """Print pieces as they come; the whole text."""
    start = time.monotonic()
    whole = ""
    for piece in pieces:
        if not timing.pieces:
            timing.first_s = time.monotonic() - start
        timing.pieces += 1
        whole += piece
        print(piece, end="", flush=True)
    timing.total_s = time.monotonic() - start
    print()
    return whole


def chat_pieces(client: Client, messages: list[dict[str, str]]) -> Iterator[str]:
    """Pieces of the next message."""
    for chunk in client.stream("/chat/completions", {"messages": messages}):
        for choice in chunk["choices"]:
            text = choice["delta"].get("content")
            if text:
                yield text


def completion_pieces(client: Client, prompt: str, max_tokens: int | None) -> Iterator[str]:
    """Pieces of a continuation."""
    body: dict[str, Any] = {"prompt": prompt}
    if max_tokens is not None:
        body["max_tokens"] = max_tokens
    for chunk in client.stream("/completions", body):
        for choice in chunk["choices"]:
            if choice["text"]:
                yield choice["text"]


def _parser(command: str) -> FlexibleArgumentParser:
    parser = FlexibleArgumentParser(prog=f"vllm {command}")
    parser.add_argument("--url", default=DEFAULT_URL, help="Address of the server, with /v1.")
    parser.add_argument("--model-name", default=None, help="Served name; the server's first when not given.")
    parser.add_argument("--api-key", default=None, help="Key; OPENAI_API_KEY when not given.")
    parser.add_argument("-q", "--quick", default=None, metavar="TEXT", help="Ask once and end.")
    parser.add_argument("--stats", action="store_true", help="Show how long each answer took.")
    return parser


def _client(args: argparse.Namespace) -> Client:
    return Client(args.url, args.api_key or os.environ.get("OPENAI_API_KEY"), args.model_name)


def _inputs(quick: str | None) -> Iterator[str]:
    """The one question, or lines of the terminal until its end."""
    if quick is not None:
        yield quick
        return
    while True:
        try:
            line = input("> ")
        except EOFError:
            return
        if line:
            yield line


def chat(argv: list[str]) -> int:
    """A conversation; the exit status."""
    parser = _parser("chat")
    parser.add_argument("--system-prompt", default=None, help="First message of the conversation.")
    args = parser.parse_args(argv)
    messages = [] if args.system_prompt is None else [{"role": "system", "content": args.system_prompt}]
    with _client(args) as client:
        for line in _inputs(args.quick):
            messages.append({"role": "user", "content": line})
            timing = Timing()
            messages.append({"role": "assistant", "content": show(chat_pieces(client, messages), timing)})
            if args.stats:
                print(timing.line(), file=sys.stderr)
    return 0


def complete(argv: list[str]) -> int:
    """Continuations of lines; the exit status."""
    parser = _parser("complete")
    parser.add_argument("--max-tokens", type=int, default=None, help="Most tokens of one continuation.")
    args = parser.parse_args(argv)
    with _client(args) as client:
        for line in _inputs(args.quick):
            timing = Timing()
            show(completion_pieces(client, line, args.max_tokens), timing)
            if args.stats:
                print(timing.line(), file=sys.stderr)
    return 0
