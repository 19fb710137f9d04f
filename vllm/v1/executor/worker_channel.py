"""The line between an executor and one of its worker processes: calls one way, replies the other.  Layer L7.

Owns frames on a socket and what is in them. Must not know processes, what is called, or who waits. Both ends belong to
one engine on one machine, so frames are pickled.
"""

from __future__ import annotations

import contextlib
import pickle
import socket
import struct
import traceback
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

# Method names, arguments and results are the workers' business, hence `Any`.
Method = str | Callable[..., Any]

_SIZE = struct.Struct("<Q")
_CALL = struct.Struct("<Q")  # id of the call
_REPLY = struct.Struct("<Q?Q")  # id of the call, whether it failed, operations of the group so far


class Channel:
    """One end of a stream socket that carries frames. One thread sends, one receives.

    `stall_s`: an other end that stops for so long before or in the middle of a frame counts as gone.
    """

    def __init__(self, end: socket.socket, stall_s: int | None = None) -> None:
        self._socket = end
        if stall_s is not None:  # of receiving only: to send may take as long as the other end is busy
            end.setsockopt(socket.SOL_SOCKET, socket.SO_RCVTIMEO, struct.pack("ll", stall_s, 0))

    def fileno(self) -> int:
        return self._socket.fileno()

    def send(self, frame: bytes) -> None:
        """Send a frame; waits while the other end is busy and its buffer full. OSError if it is gone."""
        self._socket.sendall(_SIZE.pack(len(frame)) + frame)

    def receive(self) -> bytearray | None:
        """The next frame, or None if the other end will send none any more."""
        header = self._read(_SIZE.size)
        return None if header is None else self._read(_SIZE.unpack(header)[0])

    def _read(self, size: int) -> bytearray | None:
        data = bytearray(size)
        view, got = memoryview(data), 0
        while got < size:
            try:
                count = self._socket.recv_into(view[got:])
            except (ConnectionResetError, BlockingIOError):
                return None
            if not count:
                return None
            got += count
        return data

    def stop_sending(self) -> None:
        """Let the other end read to the end; also wakes a thread of this process that still sends."""
        with contextlib.suppress(OSError):  # the other end is gone already
            self._socket.shutdown(socket.SHUT_WR)

    def close(self) -> None:
        self._socket.close()


@dataclass(frozen=True, slots=True)
class Reply:
    """A rank's answer to a call. `operations`: how many operations of the tensor-parallel group it has begun so far."""

    rank: int
    operations: int
    value: Any = None
    error: Exception | None = None


def encode_call(method: Method, args: tuple[Any, ...], kwargs: dict[str, Any]) -> bytes:
    """The content of a call. ValueError naming the method if something in it cannot be sent to a process."""
    try:
        return pickle.dumps((method, args, kwargs), protocol=pickle.HIGHEST_PROTOCOL)
    except (pickle.PicklingError, TypeError, AttributeError) as error:
        raise ValueError(f"the call of {method!r} cannot be sent to the worker processes: {error}") from error


def number_call(call_id: int, content: bytes) -> bytes:
    """The frame of a call."""
    return _CALL.pack(call_id) + content


def answer_call(frame: bytearray, execute: Callable[..., Any], count: Callable[[], int]) -> bytes:
    """Make the call of a frame and return the frame of the reply: whatever goes wrong is part of it."""
    (call_id,) = _CALL.unpack_from(frame)

    def call() -> Any:
        method, args, kwargs = pickle.loads(memoryview(frame)[_CALL.size :])
        return execute(method, *args, **kwargs)

    return answer(call_id, call, count)


def answer(call_id: int, call: Callable[[], Any], count: Callable[[], int]) -> bytes:
    """The frame of the reply to call `call_id`, which is `call`."""
    try:
        body, failed = pickle.dumps(call(), protocol=pickle.HIGHEST_PROTOCOL), False
    except Exception as error:  # the caller is told
        body, failed = pickle.dumps(_portable(error), protocol=pickle.HIGHEST_PROTOCOL), True
    return _REPLY.pack(call_id, failed, count()) + body


def decode_reply(rank: int, frame: bytearray) -> tuple[int, Reply]:
    """(id of the call, the reply)."""
    call_id, failed, operations = _REPLY.unpack_from(frame)
    content = pickle.loads(memoryview(frame)[_REPLY.size :])
    return call_id, Reply(rank, operations, **{"error" if failed else "value": content})


def _portable(error: Exception) -> Exception:
    """The error with its stack as a note; one that cannot be pickled becomes a RuntimeError with its text."""
    stack = "".join(traceback.format_exception(error))
    try:
        pickle.loads(pickle.dumps(error))
    except Exception:  # an error may hold anything and have any constructor
        error = RuntimeError(f"{type(error).__name__}: {error}")
    error.add_note(f"In the worker process:\n{stack}")
    return error
