"""Gets host memory from the system before a copy needs it.

Owns a thread that touches the pages behind those in use, a bounded way ahead. It changes no byte, so copies may write
meanwhile. It must not know what the memory is for. Layer L6.
"""

from __future__ import annotations

import ctypes
import mmap
import os
import sys
import threading
from collections.abc import Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass

import torch

from vllm.logger import init_logger

logger = init_logger(__name__)

MADV_POPULATE_WRITE = 23
AHEAD_BYTES = 128 << 20
"""More than the stores of a few steps; what a tier takes at least, however little of it is used."""
PIECE_BYTES = 2 << 20
"""One huge page. Others wait meanwhile who want to change the process's mappings."""
NICENESS = 5
CLOSE_PATIENCE_S = 5.0


@dataclass(slots=True)
class _Region:
    """Bytes that lie one behind the other, and how many of the first are there."""

    address: int
    row_bytes: int
    size: int
    done: int = 0

    def end(self, num_rows: int) -> int:
        """Where so many rows end."""
        return min(self.size, num_rows * self.row_bytes)


class Prefault:
    """Keeps the memory of the next ``ahead_bytes`` behind the last row in use there; of all rows if that is None.

    Regions are ``[rows, bytes]``, rows side by side, and are used from their first row on. Where the system cannot do
    it, pages come when they are first written, as ever.
    """

    def __init__(self, regions: Sequence[torch.Tensor], ahead_bytes: int | None = AHEAD_BYTES) -> None:
        self._memory = tuple(regions)  # stays mapped while the thread is at work
        self._regions = [
            _Region(region.data_ptr(), region.shape[1], region.numel())
            for region in regions
            if region.numel()
        ]
        row_bytes = sum(region.row_bytes for region in self._regions)
        self._num_rows = max((region.shape[0] for region in regions), default=0)
        self._ahead_rows = self._num_rows
        if ahead_bytes is not None and row_bytes:
            self._ahead_rows = -(-ahead_bytes // row_bytes)
        self._wanted_rows = min(self._ahead_rows, self._num_rows)
        self._closed = False
        self._condition = threading.Condition()
        self._thread: threading.Thread | None = None
        if self._regions and sys.platform == "linux":
            self._thread = threading.Thread(target=self._run, name="kv-offload-prefault", daemon=True)
            self._thread.start()

    def use(self, row: int) -> None:
        """Rows up to this one are in use, or soon will be."""
        wanted = min(row + 1 + self._ahead_rows, self._num_rows)
        # Not for each small step: a thread that wakes up costs more than its page.
        if wanted - self._wanted_rows < self._ahead_rows // 4 and wanted < self._num_rows:
            return
        if wanted > self._wanted_rows:
            with self._condition:
                self._wanted_rows = wanted
                self._condition.notify()

    def close(self) -> None:
        """End the thread. Idempotent."""
        with self._condition:
            self._closed = True
            self._condition.notify()
        thread, self._thread = self._thread, None
        if thread is not None:
            thread.join(CLOSE_PATIENCE_S)

    @property
    def num_bytes(self) -> int:
        """Bytes that were touched so far."""
        return sum(region.done for region in self._regions)

    def _run(self) -> None:
        with suppress(OSError):
            os.setpriority(os.PRIO_PROCESS, threading.get_native_id(), NICENESS)
        populate = ctypes.CDLL(None, use_errno=True).madvise
        populate.argtypes = [ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int]
        for start, end in self._pieces():
            if populate(start, end - start, MADV_POPULATE_WRITE):
                logger.debug("KV offload: memory comes as it is written: %s", os.strerror(ctypes.get_errno()))
                return

    def _pieces(self) -> Iterator[tuple[int, int]]:
        """Addresses to touch, whole pages each, until all is there or nobody wants it any more."""
        while (num_rows := self._next_rows()) is not None:
            for region in self._regions:
                while region.done < region.end(num_rows) and not self._closed:
                    first = region.address + region.done
                    last = min(
                        (first // PIECE_BYTES + 1) * PIECE_BYTES, region.address + region.end(num_rows)
                    )
                    yield first // mmap.PAGESIZE * mmap.PAGESIZE, -(-last // mmap.PAGESIZE) * mmap.PAGESIZE
                    region.done = last - region.address

    def _next_rows(self) -> int | None:
        with self._condition:
            while not self._closed:
                rows = self._wanted_rows
                if any(region.done < region.end(rows) for region in self._regions):
                    return rows
                if rows >= self._num_rows:
                    return None
                self._condition.wait()
            return None
