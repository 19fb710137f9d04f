"""A file of fixed slots with a checksum per slot: exclusive, private, gone after use unless it is kept.

Owns the file and its checksums. It must not know devices or jobs. Layer L6.
"""

from __future__ import annotations

import errno
import fcntl
import glob
import math
import mmap
import os
import shutil
import stat
import time

import numpy as np
import numpy.typing as npt
import xxhash

from vllm.logger import init_logger
from vllm.v1.simple_kv_offload.copy_backends.base import CopyError

logger = init_logger(__name__)

DIRECT_IO_ALIGNMENT = 4096
# A file without an owner that is younger than this may just be starting up.
STALE_AFTER_S = 60.0
# An engine that was just killed may hold its kept file a little longer.
KEPT_LOCK_PATIENCE_S = 5.0
_LOCK_POLL_S = 0.05
_NO_DIRECT_IO = "KV offload: %s does not support direct I/O; the page cache is used."

Bytes = npt.NDArray[np.int8]


class SlotFile:
    """``num_slots`` slots of ``slot_bytes`` bytes; slot i starts at byte ``i * slot_bytes``.

    Created exclusively with mode 0600 and locked for the owner's life; removed by `close`. Reads and
    writes go on until all bytes are through. Raises ``ValueError`` for slot sizes that direct I/O
    cannot handle and ``OSError`` if the file cannot be made.

    A *kept* file stays, and is taken as it is if it exists; who finds it may tell which slots hold what
    (`restore`). ``BlockingIOError`` while another engine has it.
    """

    def __init__(
        self, path: str, num_slots: int, slot_bytes: int, use_page_cache: bool, *, is_kept: bool = False
    ) -> None:
        if not use_page_cache and slot_bytes % DIRECT_IO_ALIGNMENT != 0:
            raise ValueError(
                f"direct I/O needs blocks of a multiple of {DIRECT_IO_ALIGNMENT} bytes, got {slot_bytes}; "
                "set use_page_cache=true"
            )
        self.path = path
        self.num_slots = num_slots
        self.slot_bytes = slot_bytes
        self.is_kept = is_kept
        self._checksums: list[int | None] = [None] * num_slots
        self.is_direct = not use_page_cache
        self._fd = self._create()

    def _create(self) -> int:
        flags = os.O_RDWR | os.O_CREAT | os.O_CLOEXEC | (os.O_NOFOLLOW if self.is_kept else os.O_EXCL)
        try:
            fd = os.open(self.path, flags | (os.O_DIRECT if self.is_direct else 0), 0o600)
        except OSError as error:
            if not self.is_direct or error.errno != errno.EINVAL:
                raise
            logger.warning(_NO_DIRECT_IO, self.path)
            # The failed attempt may have left the file behind.
            if os.path.lexists(self.path) and os.lstat(self.path).st_size == 0:
                os.unlink(self.path)
            self.is_direct = False
            fd = os.open(self.path, flags, 0o600)
        is_locked = False
        try:
            if self.is_kept:
                check_private(fd, self.path)
            lock_file(fd, KEPT_LOCK_PATIENCE_S if self.is_kept else 0.0)
            if os.fstat(fd).st_nlink == 0:
                raise BlockingIOError(errno.EWOULDBLOCK, "another engine has just removed it", self.path)
            is_locked = True
            os.ftruncate(fd, self.num_slots * self.slot_bytes)
            if self.is_direct:
                self.is_direct = _takes_direct_io(fd, self.path)
        except OSError:
            # A kept file with content stays for the next start; an empty one has none to keep.
            if not self.is_kept or (is_locked and os.fstat(fd).st_size == 0):
                os.unlink(self.path)
            os.close(fd)
            raise
        return fd

    def checksum(self, slot: int) -> int | None:
        """The checksum of what was written there last; None if nothing is known to be there."""
        return self._checksums[slot]

    def restore(self, slot: int, checksum: int) -> None:
        """An earlier owner wrote bytes with this checksum there; they are looked at when they are read."""
        self._checksums[slot] = checksum

    def write(self, first_slot: int, data: Bytes) -> None:
        """Write consecutive slots; ``data`` is ``[slots, slot_bytes]``, aligned for direct I/O."""
        slots = range(first_slot, first_slot + data.shape[0])
        for slot in slots:
            self._checksums[slot] = None
        self._transfer(first_slot, data, is_write=True)
        for row, slot in enumerate(slots):
            self._checksums[slot] = checksum_of(data[row])

    def read(self, first_slot: int, data: Bytes) -> None:
        """Read consecutive slots into ``data``; `CopyError` naming the slots whose bytes are not what was written."""
        slots = range(first_slot, first_slot + data.shape[0])
        try:
            self._transfer(first_slot, data, is_write=False)
        except OSError as error:
            raise CopyError(
                f"reading slots {slots} of {self.path} failed: {error}", frozenset(slots)
            ) from error
        bad = frozenset(
            slot for row, slot in enumerate(slots) if self._checksums[slot] != checksum_of(data[row])
        )
        if bad:
            raise CopyError(f"checksum mismatch in slots {sorted(bad)} of {self.path}", bad)

    def _transfer(self, first_slot: int, data: Bytes, is_write: bool) -> None:
        view = memoryview(data.reshape(-1).view(np.uint8).data)
        offset = first_slot * self.slot_bytes
        done = 0
        while done < len(view):
            rest = view[done:]
            if is_write:
                count = os.pwrite(self._fd, rest, offset + done)
            else:
                count = os.preadv(self._fd, [rest], offset + done)
            if count <= 0:
                raise OSError(errno.EIO, f"only {done} of {len(view)} bytes transferred")
            done += count

    def close(self, keep_open: bool = False) -> None:
        """Remove the file, unless it is kept. ``keep_open`` leaves the descriptor to a thread that may still use it.

        Idempotent.
        """
        if self._fd < 0:
            return
        try:
            if not self.is_kept:
                os.unlink(self.path)
        except FileNotFoundError:
            logger.warning("KV offload: %s was removed by someone else.", self.path)
        if not keep_open:
            os.close(self._fd)
        self._fd = -1


def _takes_direct_io(fd: int, path: str) -> bool:
    """Whether direct I/O of the file's alignment works; if not, the descriptor uses the page cache from now on.

    Some file systems take the flag and refuse the first transfer.
    """
    try:
        os.preadv(fd, [mmap.mmap(-1, DIRECT_IO_ALIGNMENT)], 0)
    except OSError as error:
        if error.errno != errno.EINVAL:
            raise
        logger.warning(_NO_DIRECT_IO, path)
        fcntl.fcntl(fd, fcntl.F_SETFL, fcntl.fcntl(fd, fcntl.F_GETFL) & ~os.O_DIRECT)
        return False
    return True


def checksum_of(data: Bytes) -> int:
    """XXH3 of 64 bits."""
    digest: int = xxhash.xxh3_64_intdigest(data.data)
    return digest


def check_private(fd: int, path: str) -> None:
    """``PermissionError`` unless this is a regular file that only its owner, this user, can read and write."""
    info = os.fstat(fd)
    if not stat.S_ISREG(info.st_mode) or info.st_uid != os.geteuid() or stat.S_IMODE(info.st_mode) & 0o077:
        raise PermissionError(errno.EPERM, "not a private file of this user", path)


def lock_file(fd: int, patience_s: float) -> None:
    """Lock the file for this process; ``BlockingIOError`` if another one has it for so long."""
    give_up_at = time.monotonic() + patience_s
    while True:
        try:
            fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
            return
        except BlockingIOError:
            if time.monotonic() >= give_up_at:
                raise
        time.sleep(_LOCK_POLL_S)


def refuse_place(path: str, num_bytes: int) -> None:
    """`ValueError` naming the setting if no file of ``num_bytes`` can ever be made at ``path``."""
    folder = os.path.dirname(path) or "."
    if not os.path.isdir(folder):
        raise ValueError(f"disk_path: {folder} is not a folder that exists")
    space = shutil.disk_usage(folder)
    if num_bytes > space.total:
        raise ValueError(
            f"disk_path: {folder} has room for {space.total} bytes in all, the tier is to have {num_bytes}; "
            "lower disk_capacity_bytes"
        )


def refuse_read_only(path: str) -> None:
    """`ValueError` naming the setting if this process may not make files beside ``path``."""
    folder = os.path.dirname(path) or "."
    if not os.access(folder, os.W_OK | os.X_OK):
        raise ValueError(f"disk_path: no files can be made in {folder}")


def check_place(path: str, num_bytes: int) -> None:
    """As `refuse_place`; less free space than that is only told.

    The file grows as it is used, and stores that find no room fail alone.
    """
    refuse_place(path, num_bytes)
    folder = os.path.dirname(path) or "."
    free = shutil.disk_usage(folder).free
    if num_bytes > free:
        logger.warning(
            "KV offload: %d bytes are free in %s, the tier may grow to %d.", free, folder, num_bytes
        )


def staging(num_slots: int, slot_bytes: int) -> Bytes:
    """Page-aligned scratch memory ``[num_slots, slot_bytes]``."""
    return np.frombuffer(mmap.mmap(-1, num_slots * slot_bytes), dtype=np.int8).reshape(num_slots, slot_bytes)


def remove_stale_files(path: str) -> list[str]:
    """Remove files of dead engines beside ``path``: same prefix, not locked, not fresh.

    ``path`` is ``<prefix>.<engine>.rank_<n>``. Symbolic links, live and fresh files stay; an error
    with one file is logged and does not stop the start-up.
    """
    head, separator, _ = path.rpartition(".rank_")
    prefix = head.rpartition(".")[0]
    if not separator or not prefix:
        return []
    removed = _remove_stale(f"{glob.escape(prefix)}.*.rank_*", (path,))
    if removed:
        logger.info("KV offload: removed %d files of engines that are gone", len(removed))
    return removed


def remove_files_of_ranks(prefix: str) -> list[str]:
    """Remove ``<prefix>.rank_<n>`` of an engine that is gone, however young; a file that somebody has locked stays."""
    return _remove_stale(f"{glob.escape(prefix)}.rank_*", (), -math.inf)


def remove_outdated_files(path: str) -> list[str]:
    """Remove kept files of the same engine and rank that another model, layout or version left, by the same rules.

    ``path`` is ``<prefix>.kept-<digest>-<engine>-<rank>``; beside it lies the index, ``<path>.index``.
    """
    head, separator, tail = path.rpartition(".kept-")
    digest, dash, place = tail.partition("-")
    if not separator or not dash:
        return []
    pattern = f"{glob.escape(head)}.kept-{'?' * len(digest)}-{glob.escape(place)}"
    own = (path, f"{path}.index")
    removed = _remove_stale(pattern, own)
    # An index goes with its data: alone it is of no use, and the lock is on the data.
    for data in removed[:]:
        removed += _remove_stale(glob.escape(f"{data}.index"), own)
    if removed:
        logger.warning(
            "KV offload: %s was kept by another model, layout or version and is removed.",
            ", ".join(removed),
        )
    return removed


def _remove_stale(pattern: str, spared: tuple[str, ...], stale_after_s: float = STALE_AFTER_S) -> list[str]:
    removed = []
    for candidate in sorted(glob.glob(pattern)):
        try:
            if candidate not in spared and _is_stale(candidate, stale_after_s):
                os.unlink(candidate)
                removed.append(candidate)
        except OSError as error:
            logger.warning("KV offload: cannot clean up %s: %s", candidate, error)
    return removed


def _is_stale(path: str, stale_after_s: float) -> bool:
    info = os.lstat(path)
    if not stat.S_ISREG(info.st_mode) or time.time() - info.st_mtime < stale_after_s:
        return False
    fd = os.open(path, os.O_RDWR | os.O_NOFOLLOW | os.O_CLOEXEC)
    try:
        fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return False  # its engine is alive
    finally:
        os.close(fd)
    return True
