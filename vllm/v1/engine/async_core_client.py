"""The asyncio client of engine core processes.  Layer L7.

Owns which of several data-parallel cores gets a request, and the task that reads outputs. Must not know text. One event
loop uses it; it may be built before that loop runs.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import Any

import zmq
import zmq.asyncio

from vllm.config import VllmConfig
from vllm.logger import init_logger
from vllm.v1.engine.core_connection import SocketConnection
from vllm.v1.engine.serial import Frame
from vllm.v1.executor.abstract import Executor
from vllm.v1.messages import EngineCoreOutputs, EngineCoreRequest, EngineCoreRequestType

logger = init_logger(__name__)


class AsyncMPClient:
    """Sends without waiting; `get_output_async` gives the cores' messages one by one."""

    def __init__(
        self,
        vllm_config: VllmConfig,
        executor_class: type[Executor] | None,
        log_stats: bool,
        meanwhile: Callable[[], None] | None = None,
    ) -> None:
        self._connection = SocketConnection(vllm_config, executor_class, log_stats, meanwhile)
        self.readies = self._connection.readies
        self._outputs: asyncio.Queue[EngineCoreOutputs | Exception] = asyncio.Queue()
        self._loop: asyncio.AbstractEventLoop | None = None
        self._reader: asyncio.Task[None] | None = None
        self._cores_of: dict[str, int] = {}
        self._loads = [0] * self.num_cores
        self._closed = False
        self._connection.cores.watch(self._on_death)

    @property
    def num_cores(self) -> int:
        """Data-parallel cores."""
        return len(self._connection.cores.identities)

    @property
    def dead_error(self) -> Exception | None:
        """Why the core is gone, or None."""
        return self._connection.dead

    # -- requests ------------------------------------------------------------------------------------------------

    async def add_request_async(self, request: EngineCoreRequest) -> None:
        """Hand over a request, to the wanted core or the one with the fewest requests."""
        self._start()
        core = request.data_parallel_rank
        if core is None:
            core = self._loads.index(min(self._loads))
        self._cores_of[request.request_id] = core
        self._loads[core] += 1
        self._send(self._connection.frames(EngineCoreRequestType.ADD, request, core))

    async def abort_requests_async(self, request_ids: list[str]) -> None:
        """End requests; unknown ids are ignored."""
        self.abort_requests_now(request_ids)

    def abort_requests_now(self, request_ids: list[str]) -> None:
        """The same; sending never waits."""
        if self._connection.dead is not None:
            return
        for core in range(self.num_cores):
            ids = [request_id for request_id in request_ids if self._cores_of.get(request_id) == core]
            if ids:
                self._send(self._connection.frames(EngineCoreRequestType.ABORT, ids, core))
        for request_id in request_ids:
            self._forget(request_id)

    def _forget(self, request_id: str) -> None:
        core = self._cores_of.pop(request_id, None)
        if core is not None:
            self._loads[core] -= 1

    async def call_utility_async(self, method: str, *args: Any) -> Any:
        """Call a method on every core; several results are joined (`all` of booleans, lists in a row, else the first)."""
        return _joined(await self.call_each_async(method, *args))

    async def call_each_async(self, method: str, *args: Any) -> list[Any]:
        """Call a method on every core; the results in the cores' order."""
        self._connection.check_alive()
        self._start()
        futures = []
        for core in range(self.num_cores):
            frames, future = self._connection.new_call(method, args, core)
            self._send(frames)
            futures.append(asyncio.wrap_future(future))
        return await asyncio.gather(*futures)

    def _send(self, frames: list[Frame]) -> None:
        self._connection.check_alive()
        self._connection.input.send_multipart(frames, copy=False)

    # -- outputs -------------------------------------------------------------------------------------------------

    async def get_output_async(self) -> EngineCoreOutputs:
        """The next message of a core. Raises EngineDeadError once a core is gone."""
        self._start()
        output = await self._outputs.get()
        if isinstance(output, Exception):
            self._outputs.put_nowait(output)
            raise output
        for item in output.outputs:
            if item.finished:
                self._forget(item.request_id)
        return output

    def _start(self) -> None:
        """Begin to read, in the loop that is running now; a new loop takes over from one that has ended."""
        self._connection.check_alive()
        loop = asyncio.get_running_loop()
        if self._loop is not loop:
            self._loop = loop
            self._outputs = asyncio.Queue()
            self._reader = loop.create_task(self._read(), name="core-output")

    async def _read(self) -> None:
        connection = self._connection
        socket = zmq.asyncio.Socket.shadow(connection.output)
        try:
            while True:
                outputs = connection.decode(await socket.recv_multipart(copy=False))
                if outputs is not None:
                    self._outputs.put_nowait(outputs)
        except asyncio.CancelledError:
            raise
        except Exception as error:
            if not self._closed:
                logger.error("The connection to the engine core is broken: %s", error)
            self._outputs.put_nowait(connection.note_death(str(error)))

    def _on_death(self, reason: str) -> None:
        """Called from the watching thread."""
        if self._closed:
            return
        if self._loop is None or self._loop.is_closed():
            self._connection.note_death(reason)
            return
        self._loop.call_soon_threadsafe(lambda: self._outputs.put_nowait(self._connection.note_death(reason)))

    def shutdown(self, timeout: float | None = None) -> None:
        """End the cores. Idempotent."""
        if self._closed:
            return
        self._closed = True
        if self._reader is not None and self._loop is not None and not self._loop.is_closed():
            _cancel(self._loop, self._reader)
        self._connection.close(timeout)


def _cancel(loop: asyncio.AbstractEventLoop, task: asyncio.Task[None]) -> None:
    try:
        running = asyncio.get_running_loop()
    except RuntimeError:
        running = None
    if running is loop:
        task.cancel()
    elif loop.is_running():
        loop.call_soon_threadsafe(task.cancel)


def _joined(results: list[Any]) -> Any:
    if len(results) == 1:
        return results[0]
    if all(isinstance(result, bool) for result in results):
        return all(results)
    if all(isinstance(result, list) for result in results):
        return [item for result in results for item in result]
    return results[0]
