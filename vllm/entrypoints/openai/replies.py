"""Runs an endpoint's work while its client is there, and turns the result into an HTTP reply. Layer: L8."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Coroutine
from typing import Any

from fastapi import Request
from fastapi.responses import JSONResponse, Response, StreamingResponse
from pydantic import BaseModel

from vllm.entrypoints.openai.errors import ErrorResponse, error_reply, to_http_response
from vllm.entrypoints.openai.late_json import Held, dump_json, in_pieces
from vllm.entrypoints.openai.sse import SSE_HEADERS, with_sse_keep_alive

# Nobody reads it: the client is gone.
CLIENT_CLOSED_REQUEST = 499

Result = AsyncGenerator[str, None] | BaseModel | ErrorResponse


async def reply(work: Coroutine[Any, Any, Any], raw_request: Request, keep_alive_s: float = 0.0) -> Response:
    """The HTTP reply for the result of `work`.

    A client that goes away cancels `work`, which aborts its requests in the engine. Errors become error bodies.
    """
    try:
        result = await _while_connected(work, raw_request)
    except Exception as error:
        return error_reply(error)
    if result is None:
        return Response(status_code=CLIENT_CLOSED_REQUEST)
    if isinstance(result, ErrorResponse):
        return to_http_response(result)
    if isinstance(result, BaseModel):
        return _whole(result)
    stream = with_sse_keep_alive(result, keep_alive_s)
    return StreamingResponse(stream, media_type="text/event-stream", headers=SSE_HEADERS)


def _whole(result: BaseModel) -> Response:
    held: Held = {}
    content = result.model_dump(context=held)
    if not held:
        return JSONResponse(content)
    return StreamingResponse(in_pieces(dump_json(content), held), media_type="application/json")


async def _while_connected(work: Coroutine[Any, Any, Any], raw_request: Request) -> Any:
    """The result of `work`, or None if the client went away first."""
    task = asyncio.ensure_future(work)
    watch = asyncio.ensure_future(_disconnected(raw_request))
    try:
        await asyncio.wait({task, watch}, return_when=asyncio.FIRST_COMPLETED)
        return task.result() if task.done() else None
    finally:
        for future in (task, watch):
            future.cancel()
        await asyncio.gather(task, watch, return_exceptions=True)


async def _disconnected(raw_request: Request) -> None:
    while True:
        message = await raw_request.receive()
        if message["type"] == "http.disconnect":
            return
