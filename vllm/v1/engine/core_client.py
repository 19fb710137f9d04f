"""Clients of an engine core: in the same process, or over sockets.  Layer L7.

Owns the connection to one core (or several data-parallel ones) and the answers to utility calls. Must not know text. A dead
core is an `EngineDeadError` at every call; nothing waits for ever on a core that has gone.
"""

from __future__ import annotations

import contextlib
import queue
import threading
from abc import ABC, abstractmethod
from concurrent.futures import Future
from pathlib import Path
from typing import Any

import zmq

from vllm.config import VllmConfig
from vllm.utils.clock import MonotonicClock
from vllm.v1.engine.async_core_client import AsyncMPClient
from vllm.v1.engine.core_connection import SocketConnection
from vllm.v1.engine.core_loop import EngineCore
from vllm.v1.engine.core_ready import ready_response
from vllm.v1.engine.core_utilities import utility_methods
from vllm.v1.engine.serial import Frame
from vllm.v1.executor.abstract import Executor
from vllm.v1.messages import (
    EngineCoreOutputs,
    EngineCoreReadyResponse,
    EngineCoreRequest,
    EngineCoreRequestType,
)

# How long an in-process core is ticked after its last request, so that transfers which are nearly done are collected.
SETTLE_S = 0.1
SETTLE_TICK_S = 0.001


class EngineCoreClient(ABC):
    """What a synchronous front end needs of a core."""

    @staticmethod
    def make_client(
        multiprocess_mode: bool,
        asyncio_mode: bool,
        vllm_config: VllmConfig,
        executor_class: type[Executor],
        log_stats: bool,
    ) -> Any:
        """An `InprocClient`, `SyncMPClient` or, with `asyncio_mode`, `AsyncMPClient` (which needs a process)."""
        if asyncio_mode and not multiprocess_mode:
            raise ValueError(
                "the asyncio engine needs a core in a process of its own (VLLM_ENABLE_V1_MULTIPROCESSING=1)"
            )
        if asyncio_mode:
            return AsyncMPClient(vllm_config, executor_class, log_stats)
        if multiprocess_mode:
            return SyncMPClient(vllm_config, executor_class, log_stats)
        return InprocClient(vllm_config, executor_class, log_stats)

    ready: EngineCoreReadyResponse

    @abstractmethod
    def get_output(self) -> EngineCoreOutputs:
        """The messages of one step; may be empty."""

    @abstractmethod
    def add_request(self, request: EngineCoreRequest) -> None:
        """Hand over a request."""

    @abstractmethod
    def abort_requests(self, request_ids: list[str]) -> None:
        """End requests."""

    @abstractmethod
    def call_utility(self, method: str, *args: Any) -> Any:
        """Call a utility method of the core and wait for its result. RuntimeError with the core's message."""

    def settle(self) -> None:
        """Nothing is left to answer: let the core finish what is under way. A core process does so by itself."""
        return

    @abstractmethod
    def shutdown(self, timeout: float | None = None) -> None:
        """End the core. Idempotent."""


def _refuse_replicas(vllm_config: VllmConfig) -> None:
    """ValueError for a configuration of several replicas: a synchronous front end has one core."""
    replicas = vllm_config.parallel_config.data_parallel_size
    if replicas > 1:
        raise ValueError(
            f"data_parallel_size={replicas} needs the asyncio engine (the server, or AsyncLLM); with LLM, start a process "
            "with an LLM of its own for each replica"
        )


class InprocClient(EngineCoreClient):
    """The core in this process: every `get_output` is one step."""

    def __init__(self, vllm_config: VllmConfig, executor_class: type[Executor], log_stats: bool) -> None:
        _refuse_replicas(vllm_config)
        self.engine_core = EngineCore(vllm_config, executor_class, log_stats)
        self.ready = ready_response(self.engine_core, 0)
        self._utilities = utility_methods(self.engine_core)
        self._closed = False
        self._clock = MonotonicClock()
        self._unread: list[dict[int, EngineCoreOutputs]] = []

    def get_output(self) -> EngineCoreOutputs:
        core = self.engine_core
        core.tick()
        outputs = core.step_fn()[0] if core.has_work() else {}
        unread, self._unread = self._unread, []
        messages = [step[0] for step in [*unread, *core.take_side_outputs(), outputs or {}] if 0 in step]
        if not messages:
            return EngineCoreOutputs()
        first, *others = messages
        for message in others:
            first.outputs.extend(message.outputs)
            first.scheduler_stats = message.scheduler_stats or first.scheduler_stats
        return first

    def settle(self) -> None:
        """Nothing is left to answer: tick on for a moment, so that transfers end and events are published.

        What takes longer is collected by the next step, whenever that comes.
        """
        core = self.engine_core
        deadline = self._clock.monotonic() + SETTLE_S
        while core.has_work() and not core.is_scheduler_paused() and self._clock.monotonic() < deadline:
            core.step_fn()
            if core.has_work():
                threading.Event().wait(SETTLE_TICK_S)
        core.go_idle()

    def add_request(self, request: EngineCoreRequest) -> None:
        self.engine_core.add_request(*self.engine_core.preprocess_add_request(request))

    def abort_requests(self, request_ids: list[str]) -> None:
        if request_ids:
            self.engine_core.abort_requests(request_ids)

    def call_utility(self, method: str, *args: Any) -> Any:
        if method == "pause_scheduler" and args[:1] == ("wait",):
            raise ValueError(
                "pause mode 'wait' needs a core in a process of its own: nothing would run meanwhile"
            )
        result = self._utilities[method](*args)
        return self._wait(result) if isinstance(result, Future) else result

    def _wait(self, future: Future[Any]) -> Any:
        """The result of an operation that waits for copies: they are collected by steps, which run only here."""
        core = self.engine_core
        while not future.done():
            outputs = core.step_fn()[0] if core.has_work() else None
            if outputs:
                self._unread.append(outputs)
            core.tick()
            threading.Event().wait(SETTLE_TICK_S)
        return future.result()

    def shutdown(self, timeout: float | None = None) -> None:
        if not self._closed:
            self._closed = True
            self.engine_core.shutdown()


class SyncMPClient(EngineCoreClient):
    """The core in its own process, for a synchronous front end. One thread reads its outputs."""

    def __init__(self, vllm_config: VllmConfig, executor_class: type[Executor], log_stats: bool) -> None:
        _refuse_replicas(vllm_config)
        self._connection = SocketConnection(vllm_config, executor_class, log_stats)
        self.ready = self._connection.readies[0]
        self._outputs: queue.SimpleQueue[EngineCoreOutputs | Exception] = queue.SimpleQueue()
        self._stop_address = "inproc://client-stop"
        self._stop = self._connection.context.socket(zmq.PAIR)
        self._stop.bind(self._stop_address)
        self._reader = threading.Thread(target=self._read, name="core-output", daemon=True)
        self._reader.start()
        self._closed = False
        self._connection.cores.watch(self._on_death)

    @property
    def core_pids(self) -> list[int]:
        """Process ids of the cores."""
        return [process.pid for process in self._connection.cores.processes]

    @property
    def is_dead(self) -> bool:
        """True once the core is known to be gone."""
        return self._connection.dead is not None

    @property
    def folder(self) -> Path:
        """The private folder of the sockets."""
        return self._connection.cores.folder

    def _read(self) -> None:
        connection = self._connection
        poller = zmq.Poller()
        stop = connection.context.socket(zmq.PAIR)
        stop.connect(self._stop_address)
        poller.register(stop, zmq.POLLIN)
        poller.register(connection.output, zmq.POLLIN)
        try:
            while not any(socket is stop for socket, _ in poller.poll()):
                outputs = connection.decode(connection.output.recv_multipart(copy=False))
                if outputs is not None:
                    self._outputs.put(outputs)
        except Exception as error:
            connection.note_death(str(error))
            self._outputs.put(error)
        finally:
            stop.close(linger=0)

    def _on_death(self, reason: str) -> None:
        self._outputs.put(self._connection.note_death(reason))

    def get_output(self) -> EngineCoreOutputs:
        output = self._outputs.get()
        if isinstance(output, Exception):
            self._outputs.put(output)
            raise self._connection.note_death(str(output)) from None
        return output

    def add_request(self, request: EngineCoreRequest) -> None:
        self._send(self._connection.frames(EngineCoreRequestType.ADD, request))

    def abort_requests(self, request_ids: list[str]) -> None:
        if request_ids and self._connection.dead is None:
            self._send(self._connection.frames(EngineCoreRequestType.ABORT, request_ids))

    def call_utility(self, method: str, *args: Any) -> Any:
        frames, future = self._connection.new_call(method, args)
        self._send(frames)
        return future.result()

    def _send(self, frames: list[Frame]) -> None:
        self._connection.check_alive()
        self._connection.input.send_multipart(frames, copy=False)

    def shutdown(self, timeout: float | None = None) -> None:
        if self._closed:
            return
        self._closed = True
        # A reader that has ended already takes no message; waiting for it would never end.
        with contextlib.suppress(zmq.Again):
            self._stop.send(b"", zmq.DONTWAIT)
        self._reader.join(timeout=1.0)
        self._stop.close(linger=0)
        self._connection.close(timeout)
