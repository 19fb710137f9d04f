"""Holds on folders that other engines may remove: a second name for each of their files, until they have been read.

Owns the folders of those names. It must not know what is in the files. Layer L6.
"""

from __future__ import annotations

import os
import shutil
from collections import deque
from errno import EMLINK, ENOSYS, EOPNOTSUPP, EPERM, EXDEV
from itertools import count
from pathlib import Path

# File systems without such names: what is on them is read without a hold.
_NO_LINKS = frozenset({EMLINK, ENOSYS, EOPNOTSUPP, EPERM, EXDEV})


class FolderHolds:
    """One hold per request. A folder is complete as long as it has its name, so that a hold is complete too.

    ``steps_in_flight``: a hold that was handed over is read within so many steps, and removed by its reader; what a
    failed step has left goes then.
    """

    def __init__(self, storage: Path, steps_in_flight: int) -> None:
        self._storage = storage
        self._steps_in_flight = steps_in_flight
        self._owner = f"held-{os.uname().nodename}-"
        self._numbers = count()
        self._held: dict[str, tuple[tuple[int, int], Path | None]] = {}
        self._handed_over: deque[tuple[int, Path]] = deque()
        self._step = 0

    def take(self, request_id: str, folder: Path) -> bool:
        """Hold the folder for this request, instead of what it held; False if the folder is not there (any more)."""
        try:
            info = folder.stat()
            identity = info.st_ino, info.st_ctime_ns
            if request_id in self._held and self._held[request_id][0] == identity:
                return True
            self.drop(request_id)
            self._held[request_id] = identity, self._link(folder)
        except OSError:
            self.drop(request_id)
            return False
        return True

    def _link(self, folder: Path) -> Path | None:
        held = self._storage / f"{self._owner}{os.getpid()}-{next(self._numbers)}"
        try:
            held.mkdir()
            for name in sorted(os.listdir(folder)):
                os.link(folder / name, held / name)
        except OSError as error:
            shutil.rmtree(held, ignore_errors=True)
            if error.errno in _NO_LINKS:
                return None
            raise
        return held

    def drop(self, request_id: str) -> None:
        """The request does not read what it held."""
        _, held = self._held.pop(request_id, (None, None))
        if held is not None:
            shutil.rmtree(held, ignore_errors=True)

    def drop_all(self) -> None:
        """Nobody reads what is held; what was handed over is read all the same."""
        for request_id in list(self._held):
            self.drop(request_id)

    def hand_over(self, request_id: str) -> str:
        """The name of the folder that the request's files are to be read from; nothing if that is their own."""
        _, held = self._held.pop(request_id, (None, None))
        if held is None:
            return ""
        self._handed_over.append((self._step, held))
        return held.name

    def begin_step(self) -> None:
        """Remove what the readers have left of steps that are long over."""
        self._step += 1
        while self._handed_over and self._handed_over[0][0] + self._steps_in_flight < self._step:
            shutil.rmtree(self._handed_over.popleft()[1], ignore_errors=True)

    def shutdown(self) -> None:
        """Remove everything. Idempotent."""
        self.drop_all()
        while self._handed_over:
            shutil.rmtree(self._handed_over.popleft()[1], ignore_errors=True)

    def remove_orphans(self) -> None:
        """Remove what engines of this machine that were killed have left."""
        for folder in self._storage.glob(f"{self._owner}*"):
            pid = folder.name.removeprefix(self._owner).partition("-")[0]
            if pid.isdecimal() and not _is_alive(int(pid)):
                shutil.rmtree(folder, ignore_errors=True)


def _is_alive(pid: int) -> bool:
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    except OSError:  # somebody else's
        pass
    return True
