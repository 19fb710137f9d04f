"""The queue between the output loop and one waiting caller.  Layer L7.

Owns how outputs join while nobody reads: deltas are added up, cumulative outputs replace each other. So the queue never
holds more than one output per request, however slow the reader is. Single event loop; not thread-safe.
"""

from __future__ import annotations

import asyncio
from collections import deque
from types import TracebackType
from typing import Any

from vllm.outputs import PoolingRequestOutput, RequestOutput
from vllm.sampling_params import RequestOutputKind

Output = RequestOutput | PoolingRequestOutput[Any]


class RequestOutputCollector:
    """Holds at most one output (or the exception that ended the request) until it is read."""

    def __init__(self, output_kind: RequestOutputKind, request_id: str) -> None:
        self.aggregate = output_kind == RequestOutputKind.DELTA
        self.request_id = request_id
        self.ready = asyncio.Event()
        self.output: Output | Exception | None = None
        self._origin: TracebackType | None = None  # of an exception, as it was put
        self.closed = False

    def put(self, output: Output | Exception) -> None:
        """Add an output. An exception replaces what waits; after `close` everything is dropped."""
        if self.closed:
            return
        waiting = self.output
        if isinstance(output, Exception) or not isinstance(waiting, RequestOutput):
            if not isinstance(waiting, Exception):
                self.output = output
                self._origin = output.__traceback__ if isinstance(output, Exception) else None
        elif isinstance(output, RequestOutput):
            waiting.add(output, aggregate=self.aggregate)
        else:
            self.output = output
        self.ready.set()

    async def get(self) -> Output:
        """The next output; waits for one. Raises the exception that was put."""
        while self.output is None:
            await self.ready.wait()
        return self._take()

    def get_nowait(self) -> Output | None:
        """The next output, or None if there is none. Raises the exception that was put."""
        return None if self.output is None else self._take()

    def close(self) -> None:
        """The reader is gone: drop what waits and whatever comes."""
        self.closed = True
        self.output = None

    def _take(self) -> Output:
        output = self.output
        assert output is not None
        self.output = None
        self.ready.clear()
        if isinstance(output, Exception):
            # The end of the engine is one error for all readers: each would lengthen the stack that the next one logs.
            raise output.with_traceback(self._origin)
        return output


class StreamingInputOutputCollector(RequestOutputCollector):
    """For requests whose input arrives in chunks: the last output of a chunk is never merged with the next chunk's."""

    def __init__(self, output_kind: RequestOutputKind, request_id: str) -> None:
        super().__init__(output_kind, request_id)
        self._chunk_finals: deque[Output] = deque()

    def put(self, output: Output | Exception) -> None:
        waiting = self.output
        if isinstance(waiting, RequestOutput) and waiting.finished and not isinstance(output, Exception):
            self._chunk_finals.append(waiting)
            self.output = None
        super().put(output)

    async def get(self) -> Output:
        while self.output is None and not self._chunk_finals:
            await self.ready.wait()
        return self._next()

    def get_nowait(self) -> Output | None:
        if self.output is None and not self._chunk_finals:
            return None
        return self._next()

    def _next(self) -> Output:
        return self._chunk_finals.popleft() if self._chunk_finals else self._take()

    def close(self) -> None:
        self._chunk_finals.clear()
        super().close()
