"""Ranks of one machine, each connected to each: what they tell each other in host memory.

Owns the sockets and the order in which bytes go over them. Next to a library with threads of its own an exchange takes
no switch to a third thread, which on busy cores is what costs time. It must not know what the bytes mean. Layer L6.
"""

from __future__ import annotations

import os
import socket
import struct
from collections.abc import Callable

import torch

# Less than what a socket holds: everybody can send so much before anybody receives.
CHUNK_BYTES = 1 << 16
_RANK = struct.Struct("<I")
_CREDENTIALS = struct.Struct("3i")  # pid, uid, gid


class LocalMesh:
    """This rank's lines to the others. All ranks make the same calls in the same order, with tensors of the same size.

    `ConnectionError` once a rank has gone.
    """

    def __init__(self, rank: int, size: int, tell: Callable[[bytes], list[bytes]]) -> None:
        """`tell` gives every rank what each of them said, in rank order: here, where it can be found."""
        self._rank = rank
        self._lines: dict[int, socket.socket] = {}
        with socket.socket(socket.AF_UNIX) as listener:
            listener.bind("")  # an address that the kernel chooses: no file, gone with the socket
            listener.listen(size)
            addresses = tell(listener.getsockname())
            for other in range(rank):
                line = self._lines[other] = socket.socket(socket.AF_UNIX)
                line.connect(addresses[other])
                line.sendall(_RANK.pack(rank))
            while len(self._lines) < size - 1:
                line, _ = listener.accept()
                if _is_stranger(line):
                    line.close()
                    continue
                (other,) = _RANK.unpack(_receive(line, bytearray(_RANK.size)))
                self._lines[other] = line
        for line in self._lines.values():
            # Whatever the system's default is: else two ranks that send at once may wait for each other.
            line.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, 2 * CHUNK_BYTES)

    def gather(self, tensor: torch.Tensor) -> list[torch.Tensor]:
        """The ranks' tensors, in rank order; this rank's own is `tensor` itself. Contiguous, in host memory."""
        parts = [
            tensor if rank == self._rank else torch.empty_like(tensor) for rank in range(1 + len(self._lines))
        ]
        views = [_bytes_of(part) for part in parts]
        for start in range(0, len(views[self._rank]), CHUNK_BYTES):
            chunk = slice(start, start + CHUNK_BYTES)
            for line in self._lines.values():
                line.sendall(views[self._rank][chunk])
            for other, line in self._lines.items():
                _receive(line, views[other][chunk])
        return parts

    def broadcast(self, tensor: torch.Tensor, source: int) -> None:
        """Fill `tensor` with that of rank `source`. Contiguous, in host memory."""
        view = _bytes_of(tensor)
        if source != self._rank:
            _receive(self._lines[source], view)
            return
        for line in self._lines.values() if len(view) else ():
            line.sendall(view)

    def close(self) -> None:
        """Leave: the others are told."""
        for line in self._lines.values():
            line.close()


def _bytes_of(tensor: torch.Tensor) -> memoryview:
    return memoryview(tensor.detach().view(-1).view(torch.uint8).numpy())


def _receive(line: socket.socket, target: bytearray | memoryview) -> bytearray | memoryview:
    view, got = memoryview(target), 0
    while got < len(view):
        count = line.recv_into(view[got:])
        if not count:
            raise ConnectionError("another rank has left the group")
        got += count
    return target


def _is_stranger(line: socket.socket) -> bool:
    """Whether the other end belongs to another user: the address can be seen by all of them."""
    credentials = line.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, _CREDENTIALS.size)
    uid: int = _CREDENTIALS.unpack(credentials)[1]
    return uid != os.geteuid()
