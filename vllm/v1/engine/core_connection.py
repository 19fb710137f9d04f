"""The connection of a front end to its engine core processes.  Layer L7.

Owns processes, sockets, codec and the answers to utility calls, for the synchronous and the asyncio client alike. Must not
know how a client waits. Once a core is dead every open call fails and `check_alive` raises.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from typing import Any

import msgspec
import zmq

from vllm.config import VllmConfig
from vllm.config.refusals import refuse_replicas
from vllm.v1.engine.core_io import ENGINE_CORE_DEAD
from vllm.v1.engine.core_launch import CoreProcesses, start_cores, wait_until_ready
from vllm.v1.engine.core_ready import apply_resolved_settings
from vllm.v1.engine.exceptions import EngineDeadError, UtilityRefusedError
from vllm.v1.engine.serial import Frame, MsgpackDecoder, MsgpackEncoder
from vllm.v1.executor.abstract import Executor
from vllm.v1.messages import EngineCoreOutputs, EngineCoreReadyResponse, EngineCoreRequestType

CONNECT_TIMEOUT_MS = 30_000


# How the core words a refusal: the type of the error, then its message.
_REFUSALS = ("UtilityRefusedError: ", "ValueError: ", "VLLMValidationError: ")


def _failure(message: str) -> RuntimeError:
    kind = next((kind for kind in _REFUSALS if message.startswith(kind)), None)
    return RuntimeError(message) if kind is None else UtilityRefusedError(message.removeprefix(kind))


class SocketConnection:
    """The parts that both socket clients share: processes, sockets, codec, utility answers."""

    def __init__(
        self,
        vllm_config: VllmConfig,
        executor_class: type[Executor] | None,
        log_stats: bool,
        meanwhile: Callable[[], None] | None = None,
    ) -> None:
        """`meanwhile` is called while the cores start: there is time to do something useful."""
        refuse_replicas(vllm_config)  # of configurations that were made by hand
        count = max(1, vllm_config.parallel_config.data_parallel_size)
        self.cores: CoreProcesses
        self.cores, handshake = start_cores(vllm_config, executor_class, log_stats, count)
        self.context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
        self.encoder = MsgpackEncoder()
        self.decoder = MsgpackDecoder(EngineCoreOutputs)
        self.dead: EngineDeadError | None = None
        self._call_ids = itertools.count(1)
        self._calls: dict[int, Future[Any]] = {}
        try:
            self.input = self._socket(zmq.ROUTER, self.cores.input_address)
            self.output = self._socket(zmq.PULL, self.cores.output_address)
            if meanwhile is not None:
                meanwhile()
            wait_until_ready(self.cores, handshake)
            self.readies = self._greetings()
        except BaseException:
            self.close(timeout=1.0)
            raise
        self.resolved = [self.cores.resolved[identity] for identity in self.cores.identities]
        apply_resolved_settings(vllm_config, self.resolved, self.readies)

    def _socket(self, kind: int, address: str) -> zmq.Socket[bytes]:
        socket = self.context.socket(kind)
        socket.setsockopt(zmq.SNDHWM if kind == zmq.ROUTER else zmq.RCVHWM, 0)
        socket.setsockopt(zmq.LINGER, 0)
        if kind == zmq.ROUTER:
            socket.setsockopt(zmq.ROUTER_MANDATORY, 1)
        socket.bind(address)
        return socket

    def _greetings(self) -> list[EngineCoreReadyResponse]:
        """The first message of every core on the input socket; from then on messages can be sent to it."""
        answers: dict[bytes, EngineCoreReadyResponse] = {}
        while len(answers) < len(self.cores.identities):
            if not self.input.poll(CONNECT_TIMEOUT_MS):
                raise TimeoutError("an engine core did not connect to its input socket")
            identity, payload = self.input.recv_multipart()
            answers[identity] = msgspec.msgpack.decode(payload, type=EngineCoreReadyResponse)
        return [answers[identity] for identity in self.cores.identities]

    # -- messages ------------------------------------------------------------------------------------------------

    def frames(self, kind: EngineCoreRequestType, payload: Any, core: int = 0) -> list[Frame]:
        """A message for one core."""
        return [self.cores.identities[core], kind.value, *self.encoder.encode(payload)]

    def new_call(self, method: str, args: Sequence[Any], core: int = 0) -> tuple[list[Frame], Future[Any]]:
        """The message of a utility call, and the future of its result."""
        call_id = next(self._call_ids)
        frames = self.frames(EngineCoreRequestType.UTILITY, (0, call_id, method, tuple(args)), core)
        future: Future[Any] = Future()
        self._calls[call_id] = future
        return frames, future

    def decode(self, frames: Sequence[Frame]) -> EngineCoreOutputs | None:
        """A message of a core; None if it was the answer to a utility call. EngineDeadError if it is the last word."""
        first = frames[0]
        if (
            len(frames) == 1
            and bytes(first.buffer if isinstance(first, zmq.Frame) else first) == ENGINE_CORE_DEAD
        ):
            raise self.note_death()
        outputs: EngineCoreOutputs = self.decoder.decode(frames)
        answer = outputs.utility_output
        if answer is None:
            return outputs
        future = self._calls.pop(answer.call_id, None)
        if future is not None and not future.cancelled():
            if answer.failure_message is not None:
                future.set_exception(_failure(answer.failure_message))
            else:
                future.set_result(answer.result)
        return None

    # -- end -----------------------------------------------------------------------------------------------------

    def note_death(self, reason: str | None = None) -> EngineDeadError:
        """The core is gone: fail every open call."""
        if self.dead is None:
            self.dead = (
                EngineDeadError()
                if reason is None
                else EngineDeadError(f"{EngineDeadError.ENGINE_DEAD_MESSAGE} ({reason})")
            )
            calls, self._calls = self._calls, {}
            for future in calls.values():
                if not future.done():
                    future.set_exception(self.dead)
        return self.dead

    def check_alive(self) -> None:
        """Raise EngineDeadError if the core is gone."""
        if self.dead is not None:
            raise self.dead
        if self.context.closed:
            raise EngineDeadError("The engine was shut down.")

    def close(self, timeout: float | None = None) -> None:
        """End cores and sockets. Idempotent."""
        self.cores.close(timeout)
        self.context.destroy(linger=0)
