"""What a client hears whose request the end of the server cuts off."""

from __future__ import annotations

import asyncio
import json

import pytest

from tests.helpers.http_app import App, says
from vllm.entrypoints.openai.middleware import HttpMetricsMiddleware, LastReplyMiddleware

SCOPE = {"type": "http", "path": "/v1/completions", "method": "POST", "headers": []}
START = {"type": "http.response.start", "status": 200, "headers": []}


async def cut_off(scope: dict[str, object], has_begun: bool) -> tuple[list[dict], asyncio.Task]:
    sent: list[dict] = []
    waits = asyncio.Event()

    async def app(scope, receive, send) -> None:
        if has_begun:
            await send(START)
        waits.set()
        await asyncio.Event().wait()

    async def send(message) -> None:
        sent.append(message)

    task = asyncio.create_task(LastReplyMiddleware(app)(scope, None, send))
    await waits.wait()
    task.cancel()
    await asyncio.wait([task])
    return sent, task


async def test_a_request_without_a_reply_gets_an_error_object():
    sent, task = await cut_off(SCOPE, has_begun=False)
    assert not task.cancelled()
    assert task.exception() is None
    start, body = sent
    assert start["status"] == 503
    assert (b"content-type", b"application/json") in start["headers"]
    error = json.loads(body["body"])["error"]
    assert (error["code"], error["message"]) == (503, "The server is shutting down")


@pytest.mark.parametrize(("scope", "has_begun"), [(SCOPE, True), ({"type": "lifespan"}, False)])
async def test_nothing_is_added_to_a_reply_that_has_begun_or_to_what_is_no_request(scope, has_begun):
    sent, task = await cut_off(scope, has_begun)
    assert task.cancelled()
    assert sent == ([START] if has_begun else [])


async def test_the_server_has_this_layer_outside_all_that_may_be_cut_off(tmp_path):
    app = App(tmp_path, says("hi")).app
    layers = [layer.cls for layer in app.user_middleware]
    assert layers[:2] == [HttpMetricsMiddleware, LastReplyMiddleware]
