"""ASGI layers round the app: keys, sizes, unread bodies, last replies, request ids, load, HTTP metrics. Layer: L8.

Each is a plain ASGI callable, so that streams pass through unbuffered and disconnects reach the routes.
"""

from __future__ import annotations

import asyncio
import contextlib
import hashlib
import secrets
import time
from collections.abc import Awaitable, Callable, Iterable, MutableMapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from prometheus_client import REGISTRY, CollectorRegistry, Counter, Histogram
from starlette.exceptions import HTTPException
from starlette.responses import Response

from vllm.entrypoints.openai.errors import create_error_response, to_http_response

Scope = MutableMapping[str, Any]
Message = MutableMapping[str, Any]
Receive = Callable[[], Awaitable[Message]]
Send = Callable[[Message], Awaitable[None]]
App = Callable[[Scope, Receive, Send], Awaitable[None]]

# Answered without a key: what load balancers and scrapers ask.
OPEN_PATHS = ("/health", "/ping", "/version", "/metrics")
UNMETERED_PATHS = ("/metrics", "/health", "/load", "/ping", "/version", "/server_info")
GENERATING_PATHS = (
    "/v1/completions",
    "/v1/chat/completions",
    "/v1/chat/completions/batch",
    "/inference/v1/generate",
)

# Of a body whose request is answered early, so much is read on, and so long.
READ_ON_BYTES_MAX = 64 << 20
READ_ON_SECONDS_MAX = 5.0


def header_of(scope: Scope, name: bytes) -> str | None:
    """The first header of this name (lower case); None without one."""
    for key, value in scope["headers"]:
        if key == name:
            return bytes(value).decode("latin-1")
    return None


def stated_length(scope: Scope) -> int:
    """Bytes of the body as its header says, 0 where that says nothing. More digits than any size has are cut off."""
    stated = header_of(scope, b"content-length") or ""
    return int(stated.lstrip("0")[:20] or 0) if stated.isascii() and stated.isdigit() else 0


async def _reply(error: tuple[int, str], scope: Scope, receive: Receive, send: Send) -> None:
    status, message = error
    response: Response = to_http_response(create_error_response(message, status_code=status))
    await response(scope, receive, send)


class AuthMiddleware:
    """Every path but `OPEN_PATHS` needs `Authorization: Bearer KEY`."""

    def __init__(self, app: App, keys: Iterable[str], root_path: str = "") -> None:
        self.app = app
        self.digests = [hashlib.sha256(key.encode()).digest() for key in keys]
        self.root_path = root_path

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] not in ("http", "websocket") or self._is_free(scope) or self._is_known(scope):
            await self.app(scope, receive, send)
            return
        await _reply((401, "Unauthorized: a valid API key is needed"), scope, receive, send)

    def _is_free(self, scope: Scope) -> bool:
        path = scope["path"].removeprefix(self.root_path)
        return scope.get("method") == "OPTIONS" or path in OPEN_PATHS

    def _is_known(self, scope: Scope) -> bool:
        scheme, _, key = (header_of(scope, b"authorization") or "").partition(" ")
        if scheme.lower() != "bearer":
            return False
        digest = hashlib.sha256(key.strip().encode()).digest()
        # Every key is compared, so that the time taken tells nothing.
        matches = [secrets.compare_digest(digest, known) for known in self.digests]
        return any(matches)


class LimitsMiddleware:
    """Refuses requests with too many headers or too large a body, before the body is held in memory."""

    def __init__(self, app: App, body_bytes_max: int, headers_max: int) -> None:
        self.app = app
        self.body_bytes_max = body_bytes_max
        self.headers_max = headers_max

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self.app(scope, receive, send)
            return
        if len(scope["headers"]) > self.headers_max:
            await _reply((431, f"The request has more than {self.headers_max} headers"), scope, receive, send)
            return
        too_large = f"The request body is larger than {self.body_bytes_max} bytes"
        if stated_length(scope) > self.body_bytes_max:
            await _reply((413, too_large), scope, receive, send)
            return
        seen = 0

        async def counted_receive() -> Message:
            nonlocal seen
            message = await receive()
            if message["type"] == "http.request":
                seen += len(message.get("body", b""))
                if seen > self.body_bytes_max:
                    raise HTTPException(413, too_large)
            return message

        await self.app(scope, counted_receive, send)


class UnreadBodyMiddleware:
    """Reads on, within bounds, the rest of a body whose request is answered before its end: too large, no key, no such path.

    A connection that closes on bytes nobody has read is reset, and a client that is still sending never sees the reply.
    """

    def __init__(self, app: App) -> None:
        self.app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http" or not _sends_unasked(scope):
            await self.app(scope, receive, send)
            return
        has_ended = False

        async def noted_receive() -> Message:
            nonlocal has_ended
            message = await receive()
            has_ended = message["type"] != "http.request" or not message.get("more_body", False)
            return message

        async def late_send(message: Message) -> None:
            if message["type"] == "http.response.start":
                with contextlib.suppress(TimeoutError):
                    async with asyncio.timeout(READ_ON_SECONDS_MAX):
                        seen = 0
                        while not has_ended and seen <= READ_ON_BYTES_MAX:
                            seen += len((await noted_receive()).get("body", b""))
            await send(message)

        await self.app(scope, noted_receive, late_send)


def _sends_unasked(scope: Scope) -> bool:
    """Whether a body comes that can be read to its end, from a client that does not wait to be asked for it."""
    if header_of(scope, b"expect") is not None:
        return False
    if header_of(scope, b"content-length") is None:
        return header_of(scope, b"transfer-encoding") is not None
    return 0 < stated_length(scope) <= READ_ON_BYTES_MAX


class LastReplyMiddleware:
    """Answers a request that the end of the server cuts off, unless its reply has begun."""

    def __init__(self, app: App) -> None:
        self.app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        has_begun = False

        async def noted_send(message: Message) -> None:
            nonlocal has_begun
            has_begun = True
            await send(message)

        try:
            await self.app(scope, receive, noted_send)
        except asyncio.CancelledError:
            if has_begun or scope["type"] != "http":
                raise
            await _reply((503, "The server is shutting down"), scope, receive, send)


class RequestIdMiddleware:
    """Sends `X-Request-Id` back."""

    def __init__(self, app: App, new_id: Callable[[], str]) -> None:
        self.app = app
        self.new_id = new_id

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self.app(scope, receive, send)
            return
        request_id = header_of(scope, b"x-request-id") or self.new_id()

        async def send_with_id(message: Message) -> None:
            if message["type"] == "http.response.start":
                message["headers"] = [
                    *message.get("headers", ()),
                    (b"x-request-id", request_id.encode("latin-1")),
                ]
            await send(message)

        await self.app(scope, receive, send_with_id)


@dataclass
class ServerLoad:
    """Generating requests in flight, from arrival until the last byte."""

    in_flight: int = 0


class LoadMiddleware:
    """Counts requests on the generating paths."""

    def __init__(self, app: App, load: ServerLoad) -> None:
        self.app = app
        self.load = load

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http" or scope["path"] not in GENERATING_PATHS:
            await self.app(scope, receive, send)
            return
        self.load.in_flight += 1
        try:
            await self.app(scope, receive, send)
        finally:
            self.load.in_flight -= 1


@dataclass
class HttpMetrics:
    """Counters of the HTTP level. `paths`: known routes; others share one label, so that labels stay bounded."""

    paths: Sequence[str]
    registry: CollectorRegistry = REGISTRY
    requests: Counter = field(init=False)
    seconds: Histogram = field(init=False)

    def __post_init__(self) -> None:
        for name in ("http_requests", "http_request_duration_seconds"):
            _unregister(self.registry, name)
        labels = ("handler", "method", "status")
        self.requests = Counter("http_requests_total", "HTTP requests.", labels, registry=self.registry)
        self.seconds = Histogram(
            "http_request_duration_seconds", "Time until the last byte.", labels[:2], registry=self.registry
        )

    def observe(self, path: str, method: str, status: int, seconds: float) -> None:
        """Count one finished request."""
        if path in UNMETERED_PATHS:
            return
        handler = path if path in self.paths else "none"
        self.requests.labels(handler, method, f"{status // 100}xx").inc()
        self.seconds.labels(handler, method).observe(seconds)


def _unregister(registry: CollectorRegistry, name: str) -> None:
    """Forget a metric of an earlier app in this process."""
    collector = registry._names_to_collectors.get(name)
    if collector is not None:
        registry.unregister(collector)


class HttpMetricsMiddleware:
    """Feeds `HttpMetrics`."""

    def __init__(self, app: App, metrics: HttpMetrics) -> None:
        self.app = app
        self.metrics = metrics

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self.app(scope, receive, send)
            return
        start = time.monotonic()
        status = 500

        async def watched_send(message: Message) -> None:
            nonlocal status
            if message["type"] == "http.response.start":
                status = message["status"]
            await send(message)

        try:
            await self.app(scope, receive, watched_send)
        finally:
            self.metrics.observe(scope["path"], scope["method"], status, time.monotonic() - start)
