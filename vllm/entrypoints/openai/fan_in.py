"""Several streams of outputs read as one, and a stream whose first item is awaited early. Layer: L8.

Closing the joint stream, or cancelling its reader, closes every source: that is what aborts requests in the engine.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Sequence
from contextlib import aclosing
from typing import Generic, TypeVar

T = TypeVar("T")

# Items a source may be ahead of the reader.
BUFFERED = 64


class _End(Exception):
    """A source is exhausted."""


async def fan_in(sources: Sequence[AsyncGenerator[T, None]]) -> AsyncGenerator[tuple[int, T], None]:
    """Items of all sources as they come, each with its source's index. The first error ends the joint stream."""
    if len(sources) == 1:
        try:
            async for item in sources[0]:
                yield 0, item
        finally:
            await sources[0].aclose()
        return
    async with aclosing(_pumped(sources)) as pairs:
        async for pair in pairs:
            yield pair


async def _pumped(sources: Sequence[AsyncGenerator[T, None]]) -> AsyncGenerator[tuple[int, T], None]:
    queue: asyncio.Queue[tuple[int, T | Exception]] = asyncio.Queue(BUFFERED)

    async def pump(index: int) -> None:
        try:
            async for item in sources[index]:
                await queue.put((index, item))
        except Exception as error:
            await queue.put((index, error))
        else:
            await queue.put((index, _End()))

    tasks = [asyncio.create_task(pump(index)) for index in range(len(sources))]
    open_sources = len(sources)
    try:
        while open_sources:
            index, item = await queue.get()
            if isinstance(item, _End):
                open_sources -= 1
            elif isinstance(item, Exception):
                raise item
            else:
                yield index, item
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        for source in sources:
            await source.aclose()


class Primed(Generic[T]):
    """A stream whose first item has been asked for before anyone reads: errors that come first can still be replied."""

    def __init__(self, stream: AsyncGenerator[T, None]) -> None:
        self._stream = stream
        self._first: asyncio.Future[T] | None = None

    async def wait(self, timeout: float | None = None) -> None:
        """Wait for the first item or the end, at most `timeout` seconds. Raises what the stream raises.

        Cancelling this call closes the stream.
        """
        self._first = asyncio.ensure_future(_next(self._stream))
        try:
            await asyncio.wait({self._first}, timeout=timeout)
        except asyncio.CancelledError:
            await self._close()
            raise
        if self._first.done() and not isinstance(self._first.exception(), StopAsyncIteration):
            self._first.result()

    async def read(self) -> AsyncGenerator[T, None]:
        """The whole stream, the awaited item first."""
        try:
            if self._first is not None:
                try:
                    yield await self._first
                except StopAsyncIteration:
                    return
            async for item in self._stream:
                yield item
        finally:
            await self._close()

    async def _close(self) -> None:
        if self._first is not None and not self._first.done():
            self._first.cancel()
            await asyncio.gather(self._first, return_exceptions=True)
        await self._stream.aclose()


async def _next(stream: AsyncGenerator[T, None]) -> T:
    return await stream.__anext__()
