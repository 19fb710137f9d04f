"""The asyncio client of engine core processes.  Layer L7.

Owns the reading of outputs, and what the answers of several data-parallel cores are as one. Must not know text. One
event loop uses it; it may be built before that loop runs.
"""

from __future__ import annotations

import asyncio
import contextlib
import threading
from collections.abc import Callable
from typing import Any

import zmq

from vllm.config import VllmConfig
from vllm.logger import init_logger
from vllm.v1.engine.core_connection import SocketConnection
from vllm.v1.engine.exceptions import EngineDeadError
from vllm.v1.engine.replica_choice import ReplicaChoice
from vllm.v1.engine.serial import Frame
from vllm.v1.executor.abstract import Executor
from vllm.v1.messages import EngineCoreOutputs, EngineCoreRequest, EngineCoreRequestType

logger = init_logger(__name__)

# Messages taken before other tasks get a turn.
READ_MAX = 64
# How long an end in another thread waits for the loop to stop reading.
STOP_WAIT_S = 1.0
# What is asked of each worker: the answers of all cores' workers, in order.
PER_WORKER = frozenset({"collective_rpc", "list_loras"})


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
        self._choice = ReplicaChoice(self.num_cores)
        self._closed = False
        self._connection.cores.watch(self._on_death)

    @property
    def num_cores(self) -> int:
        """Data-parallel cores."""
        return len(self._connection.cores.identities)

    @property
    def resolved(self) -> list[dict[str, Any]]:
        """Per core, what it has decided about its cache: fields of CacheConfig."""
        return self._connection.resolved

    @property
    def dead_error(self) -> Exception | None:
        """Why the core is gone, or None."""
        return self._connection.dead

    # -- requests ------------------------------------------------------------------------------------------------

    async def add_request_async(self, request: EngineCoreRequest) -> None:
        """Hand over a request, to the core that it asks for or else to the one that `ReplicaChoice` finds."""
        self._start()
        core = self._choice.place(request)
        self._send(self._connection.frames(EngineCoreRequestType.ADD, request, core))

    def abort_requests_now(self, request_ids: list[str]) -> None:
        """End requests; unknown ids are ignored. Sending never waits."""
        if self._connection.dead is not None:
            return
        for core in range(self.num_cores):
            ids = [request_id for request_id in request_ids if self._choice.replica_of(request_id) == core]
            if ids:
                with contextlib.suppress(EngineDeadError):  # its requests have ended with it
                    self._send(self._connection.frames(EngineCoreRequestType.ABORT, ids, core))
        for request_id in request_ids:
            self._choice.forget(request_id)

    async def call_utility_async(self, method: str, *args: Any) -> Any:
        """Call a method on every core. Of several results: True if all are, what the workers say in a row, else the first.

        Cores are alike, so that what they tell of themselves is the same.
        """
        results = await self.call_each_async(method, *args)
        if all(isinstance(result, bool) for result in results):
            return all(results)
        return [item for result in results for item in result] if method in PER_WORKER else results[0]

    async def call_each_async(self, method: str, *args: Any) -> list[Any]:
        """Call a method on every core; the results in the cores' order.

        When all have answered, a failure is raised: of several cores with the number of the one that failed.
        """
        self._connection.check_alive()
        self._start()
        futures = []
        for core in range(self.num_cores):
            frames, future = self._connection.new_call(method, args, core)
            self._send(frames)
            futures.append(future)
        # Only now: if a core was gone already, nobody waits for the others.
        waiting = map(asyncio.wrap_future, futures)
        return _checked(await asyncio.gather(*waiting, return_exceptions=True))

    def _send(self, frames: list[Frame]) -> None:
        self._connection.check_alive()
        try:
            self._connection.input.send_multipart(frames, copy=False)
        except zmq.ZMQError as error:  # its socket is closed: it ends, or has ended
            raise EngineDeadError(f"An engine core has ended ({error}).") from error

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
                self._choice.forget(item.request_id)
        return output

    def _start(self) -> None:
        """Begin to read, in the loop that is running now; a new loop takes over from one that has ended."""
        self._connection.check_alive()
        loop = asyncio.get_running_loop()
        if self._loop is not loop:
            self._stop_reading()
            self._loop = loop
            self._outputs = asyncio.Queue()
            loop.add_reader(self._connection.output.FD, self._read)
            loop.call_soon(self._read)  # what is there already is not told of again

    def _read(self) -> None:
        """Take what has arrived, to the last message: the descriptor tells only of what comes after it."""
        connection = self._connection
        if self._closed or self._loop is None:
            return
        try:
            for _ in range(READ_MAX):
                outputs = connection.decode(connection.output.recv_multipart(zmq.NOBLOCK, copy=False))
                if outputs is not None:
                    self._outputs.put_nowait(outputs)
        except zmq.Again:
            return
        except Exception as error:
            logger.error("The connection to the engine core is broken: %s", error)
            self._outputs.put_nowait(connection.note_death(str(error)))
            self._stop_reading()
            return
        self._loop.call_soon(self._read)

    def _stop_reading(self) -> None:
        """Take the socket out of its loop, before it is closed: its descriptor's number may be used again."""
        loop, self._loop = self._loop, None
        if loop is None or loop.is_closed():
            return
        descriptor = self._connection.output.FD
        if not loop.is_running() or _is_running_here(loop):
            loop.remove_reader(descriptor)
            return
        done = threading.Event()

        def stop() -> None:
            loop.remove_reader(descriptor)
            done.set()

        loop.call_soon_threadsafe(stop)
        done.wait(STOP_WAIT_S)

    def _on_death(self, reason: str) -> None:
        """Called from the watching thread."""
        if self._closed:
            return
        loop = self._loop
        if loop is None or loop.is_closed():
            self._connection.note_death(reason)
            return
        loop.call_soon_threadsafe(lambda: self._outputs.put_nowait(self._connection.note_death(reason)))

    def shutdown(self, timeout: float | None = None) -> None:
        """End the cores. Idempotent."""
        if self._closed:
            return
        self._closed = True
        self._stop_reading()
        self._connection.close(timeout)


def _is_running_here(loop: asyncio.AbstractEventLoop) -> bool:
    try:
        return asyncio.get_running_loop() is loop
    except RuntimeError:
        return False


def _checked(results: list[Any]) -> list[Any]:
    """The results, if none is an exception; else the first one. What all say alike is not said of one of them."""
    failures = {core: result for core, result in enumerate(results) if isinstance(result, BaseException)}
    if not failures:
        return results
    core, first = next(iter(failures.items()))
    alike = len(failures) == len(results) and len({str(failure) for failure in failures.values()}) == 1
    if alike or isinstance(first, EngineDeadError) or not isinstance(first, RuntimeError):
        raise first
    told = "; ".join(f"engine {core}: {failure}" for core, failure in failures.items())
    # Where some cores have done what they were asked, something has changed: that is no refusal.
    raise (type(first) if len(failures) == len(results) else RuntimeError)(told) from first
