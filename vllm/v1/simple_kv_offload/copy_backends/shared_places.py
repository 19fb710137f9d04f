"""Who uses a shared file: one lock that keeps the others out, a place per engine, and in it one for each of its processes.

Owns the locks, and how the file gets its memory while others wait for them. The locks lie on bytes that no file reaches,
and the kernel drops them with their process, however that ends. Must not know what the file holds. Layer L6.
"""

from __future__ import annotations

import ctypes
import fcntl
import mmap
import os
import stat
import struct
import time
from contextlib import closing, suppress
from pathlib import Path

from vllm.logger import init_logger
from vllm.utils.clock import Clock, MonotonicClock
from vllm.v1.simple_kv_offload.copy_backends.numa import spread_over_nodes
from vllm.v1.simple_kv_offload.copy_backends.prefault import MADV_POPULATE_WRITE

logger = init_logger(__name__)

MAX_PLACES = 64
SCHEDULER = 0
"""The member of an engine that uses its table; rank r is member ``1 + r``."""
MAX_MEMBERS = 65

RESERVE_BYTES = 256 << 20
PROGRESS_S = 2.0
"""How often the log says how far the reservation is."""
MOUNTS = Path("/proc/self/mountinfo")

_MUTEX = 1 << 40
_PLACES = _MUTEX + 1
_MEMBERS = _PLACES + MAX_PLACES
_FLOCK = struct.Struct("hhqqi4x")


class PlaceLocks:
    """One process's locks on an open file. A place is alive while any process of its engine is."""

    def __init__(self, fd: int, clock: Clock) -> None:
        self._fd = fd
        self._clock = clock

    def wait_for_mutex(self, patience_s: float) -> bool:
        """Keep all other processes out; False if that could not be had in time."""
        pause, deadline = 20e-6, None
        while not self._lock(_MUTEX, fcntl.F_WRLCK):
            now = self._clock.monotonic()
            deadline = now + patience_s if deadline is None else deadline
            if now >= deadline:
                return False
            time.sleep(pause)
            pause = min(2 * pause, 1e-3)
        return True

    def wait_for_start(self, patience_s: float) -> bool:
        """The mutex, for as long as who has it makes progress: the file's memory grows within ``patience_s``."""
        blocks = -1
        while (now := os.fstat(self._fd).st_blocks) != blocks:
            blocks = now
            if self.wait_for_mutex(patience_s):
                return True
        return False

    def release_mutex(self) -> None:
        """Let the others in."""
        self._lock(_MUTEX, fcntl.F_UNLCK)

    def drop_all(self) -> None:
        """Give up all that this process has. Closing the file does it only if no forked child has it open too."""
        self._lock(_MUTEX, fcntl.F_UNLCK, 1 + MAX_PLACES * (1 + MAX_MEMBERS))

    def keep_all_out(self) -> bool:
        """Take the mutex and every place at once; False if anybody has one of them."""
        return self._lock(_MUTEX, fcntl.F_WRLCK, 1 + MAX_PLACES)

    def take(self, place: int, member: int) -> bool:
        """Be this member of the engine in a place; False if another process is. The mutex is held."""
        if not self._lock(_MEMBERS + place * MAX_MEMBERS + member, fcntl.F_WRLCK):
            return False
        # Shared with the other members.
        return self._lock(_PLACES + place, fcntl.F_RDLCK)

    def is_alive(self, place: int) -> bool:
        """Whether some other process has joined in this place and still exists."""
        return self._is_locked(_PLACES + place)

    def is_there(self, place: int, member: int) -> bool:
        """Whether another process is this member, and still exists."""
        return self._is_locked(_MEMBERS + place * MAX_MEMBERS + member)

    def _lock(self, start: int, kind: int, count: int = 1) -> bool:
        """Set or drop the lock on some bytes; False if another process has one of them."""
        try:
            fcntl.fcntl(self._fd, fcntl.F_OFD_SETLK, _FLOCK.pack(kind, os.SEEK_SET, start, count, 0))
        except (BlockingIOError, PermissionError):
            return False
        return True

    def _is_locked(self, byte: int) -> bool:
        wanted = _FLOCK.pack(fcntl.F_WRLCK, os.SEEK_SET, byte, 1, 0)
        found = fcntl.fcntl(self._fd, fcntl.F_OFD_GETLK, wanted)
        return bool(_FLOCK.unpack(found)[0] != fcntl.F_UNLCK)


def remove_if_unused(path: str) -> bool:
    """Remove a segment of this user that no engine uses or is about to use; False if it stays."""
    fd = os.open(path, os.O_RDWR | os.O_NOFOLLOW | os.O_CLOEXEC)
    try:
        info = os.fstat(fd)
        if not stat.S_ISREG(info.st_mode) or info.st_uid != os.geteuid():
            return False
        if not PlaceLocks(fd, MonotonicClock()).keep_all_out() or not is_at(path, info):
            return False
        os.unlink(path)
        return True
    finally:
        os.close(fd)


def reserve(fd: int, size: int, clock: Clock, path: str) -> None:
    """Give an empty file all of its memory, and tell in the log how far it is. ``OSError`` if there is too little.

    From all memory nodes in turn, and in huge pages where the mount gives them to who asks; for all processes that map it.
    """
    os.ftruncate(fd, 0)
    os.ftruncate(fd, size)
    next_word = clock.monotonic() + PROGRESS_S
    # A mapping keeps its descriptor's locks alive: it gets one of its own.
    own = os.open(f"/proc/self/fd/{fd}", os.O_RDWR | os.O_CLOEXEC)
    try:
        mapping = mmap.mmap(own, size)
    finally:
        os.close(own)
    with closing(mapping):
        spread_over_nodes(ctypes.addressof(ctypes.c_char.from_buffer(mapping)), size)
        asks = _gives_huge_pages_to_who_asks(fd)
        for start in range(0, size, RESERVE_BYTES):
            count = min(RESERVE_BYTES, size - start)
            if asks:
                with suppress(OSError):  # what is missing then comes below, or is told
                    mapping.madvise(mmap.MADV_HUGEPAGE)
                    mapping.madvise(MADV_POPULATE_WRITE, start, count)
            os.posix_fallocate(fd, start, count)
            if clock.monotonic() >= next_word:
                next_word = clock.monotonic() + PROGRESS_S
                done, whole = (start + RESERVE_BYTES) / 2**30, size / 2**30
                logger.info("KV offload: reserving %s: %.1f of %.1f GiB", path, min(done, whole), whole)


def _gives_huge_pages_to_who_asks(fd: int) -> bool:
    """Whether the file lies in memory that was mounted with `huge=advise`: only pages that a mapping asks for are huge then.

    With `huge=always` or `within_size` they are anyway; without, asking would only take longer.
    """
    device = os.fstat(fd).st_dev
    place = f"{os.major(device)}:{os.minor(device)}"
    try:
        mounts = [line.split(" - ") for line in MOUNTS.read_text().splitlines()]
    except OSError:
        return False
    return any(mount[0].split()[2] == place and "huge=advise" in mount[-1] for mount in mounts)


def is_at(path: str, info: os.stat_result) -> bool:
    """Whether the path still leads to this file."""
    try:
        now = os.stat(path, follow_symlinks=False)
    except FileNotFoundError:
        return False
    return (now.st_dev, now.st_ino) == (info.st_dev, info.st_ino)
