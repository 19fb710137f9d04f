"""Sockets of an engine core process.  Layer L7.

Owns two threads that move bytes: one reads the clients' requests into a queue, one writes outputs. They never touch the
scheduler, and they decode nothing but the one byte that says what a message is. Frames on an input socket are
`[type, payload frames…]`; on an output socket `[payload frames…]`.
"""

from __future__ import annotations

import contextlib
import queue
import threading
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import zmq

from vllm.logger import init_logger
from vllm.v1.engine.serial import Frame
from vllm.v1.messages import EngineCoreRequestType

logger = init_logger(__name__)

ENGINE_CORE_DEAD = b"ENGINE_CORE_DEAD"
# How long a dying core waits for its last messages to leave.
LINGER_MS = 4000
STOP_ADDRESS = "inproc://engine-core-stop"


class Arrival(NamedTuple):
    """One message of a client, still encoded."""

    kind: EngineCoreRequestType
    frames: Sequence[Frame]


@dataclass(frozen=True, slots=True)
class CoreAddresses:
    """Where the clients listen; entry i belongs to client i."""

    inputs: list[str]
    outputs: list[str]


class CoreSockets:
    """The two threads. `arrivals` is filled by the input thread, for the core's thread to read.

    Aborts are also handed to `on_abort` as they come in (from the input thread), so that a running step can be told.
    """

    def __init__(
        self,
        addresses: CoreAddresses,
        identity: bytes,
        ready_message: bytes,
        on_abort: Callable[[Sequence[Frame]], None],
    ) -> None:
        self.arrivals: queue.SimpleQueue[Arrival] = queue.SimpleQueue()
        self._departures: queue.SimpleQueue[tuple[int, Sequence[Frame]] | None] = queue.SimpleQueue()
        self._addresses = addresses
        self._identity = identity
        self._ready_message = ready_message
        self._on_abort = on_abort
        self._context = zmq.Context()
        self._stop = self._context.socket(zmq.PAIR)
        self._stop.bind(STOP_ADDRESS)
        self._threads = [
            threading.Thread(target=self._read, name="core-input", daemon=True),
            threading.Thread(target=self._write, name="core-output", daemon=True),
        ]
        for thread in self._threads:
            thread.start()

    def send(self, client_index: int, frames: Sequence[Frame]) -> None:
        """Queue a message for a client; never blocks. The buffers must not be written to any more."""
        self._departures.put((client_index, frames))

    def broadcast(self, frame: bytes) -> None:
        """Queue a raw frame for every client."""
        for index in range(len(self._addresses.outputs)):
            self.send(index, [frame])

    def wake(self) -> None:
        """Make a waiting core look up. May be called from a signal handler."""
        self.arrivals.put(Arrival(EngineCoreRequestType.WAKEUP, ()))

    def close(self) -> None:
        """Send what is queued, then end both threads."""
        self._departures.put(None)
        # A reader that has ended already takes no message; waiting for it would never end.
        with contextlib.suppress(zmq.Again):
            self._stop.send(b"", zmq.DONTWAIT)
        for thread in self._threads:
            thread.join(timeout=LINGER_MS / 1000 + 1)
        self._stop.close(linger=0)
        self._context.term()

    # -- input thread --------------------------------------------------------------------------------------------

    def _read(self) -> None:
        poller = zmq.Poller()
        stop = self._context.socket(zmq.PAIR)
        stop.connect(STOP_ADDRESS)
        poller.register(stop, zmq.POLLIN)
        sockets = []
        for address in self._addresses.inputs:
            socket = self._context.socket(zmq.DEALER)
            socket.setsockopt(zmq.IDENTITY, self._identity)
            socket.setsockopt(zmq.RCVHWM, 0)
            socket.connect(address)
            socket.send(self._ready_message)
            poller.register(socket, zmq.POLLIN)
            sockets.append(socket)
        try:
            while True:
                for socket, _ in poller.poll():
                    if socket is stop:
                        return
                    self._receive(socket)
        finally:
            for socket in [*sockets, stop]:
                socket.close(linger=0)

    def _receive(self, socket: zmq.Socket[bytes]) -> None:
        kind_frame, *frames = socket.recv_multipart(copy=False)
        try:
            kind = EngineCoreRequestType(bytes(kind_frame.buffer))
        except ValueError:
            logger.error("A message of unknown type %r was dropped.", bytes(kind_frame.buffer)[:16])
            return
        if kind is EngineCoreRequestType.ABORT:
            self._on_abort(frames)
        self.arrivals.put(Arrival(kind, frames))

    # -- output thread -------------------------------------------------------------------------------------------

    def _write(self) -> None:
        sockets = []
        for address in self._addresses.outputs:
            socket = self._context.socket(zmq.PUSH)
            socket.setsockopt(zmq.SNDHWM, 0)
            socket.setsockopt(zmq.LINGER, LINGER_MS)
            socket.connect(address)
            sockets.append(socket)
        try:
            while (departure := self._departures.get()) is not None:
                client_index, frames = departure
                sockets[client_index].send_multipart(frames, copy=False)
        finally:
            for socket in sockets:
                socket.close()
