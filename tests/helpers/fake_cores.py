"""Engine cores without engines: real sockets and messages, answers by a function, processes that are only names."""

from __future__ import annotations

import threading
from collections.abc import Callable
from pathlib import Path
from tempfile import mkdtemp
from typing import Any

import msgspec
import zmq

from vllm.config import VllmConfig
from vllm.v1.engine import core_connection
from vllm.v1.engine.core_launch import CoreProcesses
from vllm.v1.engine.serial import MsgpackDecoder, MsgpackEncoder
from vllm.v1.messages import (
    EngineCoreOutputs,
    EngineCoreReadyResponse,
    EngineCoreRequest,
    EngineCoreRequestType,
    UtilityOutput,
)

# Beyond every process of a machine: who is killed by force takes the children of its number along.
NO_PID = 1 << 30
# (core, method, arguments) → the result; an exception is a failure of that core.
Answer = Callable[[int, str, tuple[Any, ...]], Any]


class FakeProcess:
    """Ends when it is told to; one that `is_deaf` only by force."""

    def __init__(self, pid: int) -> None:
        self.pid = pid
        self.is_deaf = False
        self.status = 0
        self._ended = threading.Event()

    def wait(self, timeout: float | None = None) -> int | None:
        return self.status if self._ended.wait(timeout) else None

    def die(self, status: int) -> None:
        if not self._ended.is_set():
            self.status = status
            self._ended.set()

    def terminate(self) -> None:
        if not self.is_deaf:
            self.die(0)

    def kill(self) -> None:
        self.die(-9)


class FakeCore(threading.Thread):
    """One core's side of the sockets. `requests` and `aborts`: the ids that it was sent."""

    def __init__(
        self, cores: CoreProcesses, index: int, ready: EngineCoreReadyResponse, answer: Answer
    ) -> None:
        super().__init__(name=f"fake-core-{index}", daemon=True)
        self.index = index
        self.requests: list[str] = []
        self.aborts: list[str] = []
        self.has_left = False  # set it: the sockets are closed, but the process goes on
        self._cores = cores
        self._ready = ready
        self._answer = answer
        self._encoder = MsgpackEncoder()
        self._context = zmq.Context()
        self._output = self._context.socket(zmq.PUSH)
        self._output.connect(cores.output_address)

    def run(self) -> None:
        socket = self._context.socket(zmq.DEALER)
        socket.setsockopt(zmq.IDENTITY, self._cores.identities[self.index])
        socket.connect(self._cores.input_address)
        socket.send(msgspec.msgpack.encode(self._ready))
        process = self._cores.processes[self.index]
        while process.wait(0) is None and not self.has_left:
            if socket.poll(5):
                kind, *frames = socket.recv_multipart()
                self._take(EngineCoreRequestType(kind), frames)
        socket.close(linger=0)
        self._output.close(linger=0)
        self._context.term()

    def _take(self, kind: EngineCoreRequestType, frames: list[bytes]) -> None:
        if kind is EngineCoreRequestType.ADD:
            self.requests.append(MsgpackDecoder(EngineCoreRequest).decode(frames).request_id)
        elif kind is EngineCoreRequestType.ABORT:
            self.aborts += MsgpackDecoder().decode(frames)
        elif kind is EngineCoreRequestType.UTILITY:
            _, call_id, method, args = MsgpackDecoder().decode(frames)
            try:
                output = UtilityOutput(call_id, result=self._answer(self.index, method, tuple(args)))
            except Exception as error:
                output = UtilityOutput(call_id, f"{type(error).__name__}: {error}")
            self.send(EngineCoreOutputs(utility_output=output))

    def send(self, outputs: EngineCoreOutputs) -> None:
        """Send the client a message."""
        outputs.engine_index = self.index
        self._output.send_multipart(self._encoder.encode(outputs))


class FakeCores:
    """The cores that a client made meanwhile gets, with `monkeypatch` to put them in place."""

    def __init__(self, monkeypatch: Any, answer: Answer = lambda *_: None, grace_s: float = 5.0) -> None:
        self.answer = answer
        self.grace_s = grace_s
        self.lengths: list[int] = []  # max_model_len of each core
        self.cores: list[FakeCore] = []
        self.processes: list[FakeProcess] = []
        monkeypatch.setattr(core_connection, "start_cores", self._start)
        monkeypatch.setattr(core_connection, "wait_until_ready", self._ready)

    def close(self) -> None:
        """Wait until nothing of the cores is left; their clients are shut down."""
        for process in self.processes:
            process.die(0)
        for thread in [*self.cores, *(each for each in threading.enumerate() if each.name == "core-watch")]:
            thread.join(5)

    def _start(
        self, config: VllmConfig, executor_class: Any, log_stats: bool, count: int
    ) -> tuple[CoreProcesses, None]:
        folder = Path(mkdtemp(prefix="vllm-fake-"))
        self.processes = [FakeProcess(NO_PID + index) for index in range(count)]
        addresses = f"ipc://{folder}/input", f"ipc://{folder}/output"
        cores = CoreProcesses(list(self.processes), *addresses, folder, self.grace_s, config)
        lengths = self.lengths or [64] * count
        for index in range(count):
            ready = EngineCoreReadyResponse(
                lengths[index], 9, 16, None, "float32", "0", 1, count, 1, 1, 1, index, 8, 64, "id", False, 0, None, 144,
                1.0, None, None, False, False, None,
            )  # fmt: skip
            self.cores.append(FakeCore(cores, index, ready, lambda *args: self.answer(*args)))
            cores.resolved[cores.identities[index]] = {"num_gpu_blocks": 9 - index}
        return cores, None

    def _ready(self, cores: CoreProcesses, socket: None) -> None:
        for core in self.cores:
            core.start()
