"""The event stream: how chunks, errors and keep-alive comments are written. Layer: L8."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncGenerator, AsyncIterator

from pydantic import BaseModel

from vllm.entrypoints.openai.errors import ErrorResponse
from vllm.entrypoints.openai.late_json import model_text

SSE_DONE = "data: [DONE]\n\n"
SSE_KEEP_ALIVE_COMMENT = ": keep-alive\n\n"
SSE_HEADERS = {"Cache-Control": "no-cache", "X-Accel-Buffering": "no"}


async def sse_event(body: BaseModel) -> str:
    """One event; fields that were never set are left out."""
    return f"data: {await model_text(body)}\n\n"


def sse_error(body: ErrorResponse) -> str:
    """An error in the middle of a stream, whose HTTP status is 200 already."""
    return f"data: {body.model_dump_json()}\n\n"


async def with_sse_keep_alive(stream: AsyncIterator[str], interval: float) -> AsyncGenerator[str, None]:
    """`stream`, with a comment line whenever it is silent for `interval` seconds; 0 turns that off.

    Closing this generator closes `stream`, also in the middle of waiting for it.
    """
    if interval <= 0:
        try:
            async for item in stream:
                yield item
        finally:
            await _close(stream)
        return
    pending: asyncio.Task[str] | None = None
    try:
        while True:
            pending = pending or asyncio.ensure_future(_next(stream))
            done, _ = await asyncio.wait({pending}, timeout=interval)
            if not done:
                yield SSE_KEEP_ALIVE_COMMENT
                continue
            task, pending = pending, None
            try:
                item = task.result()
            except StopAsyncIteration:
                return
            yield item
    finally:
        if pending is not None:
            pending.cancel()
            with contextlib.suppress(asyncio.CancelledError, StopAsyncIteration):
                await pending
        await _close(stream)


async def _next(stream: AsyncIterator[str]) -> str:
    return await stream.__anext__()


async def _close(stream: AsyncIterator[str]) -> None:
    if isinstance(stream, AsyncGenerator):
        await stream.aclose()
