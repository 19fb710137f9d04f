"""What the system says of this process's memory."""

from __future__ import annotations

import ctypes
import mmap
from pathlib import Path


def mapping_of(address: int) -> dict[str, int]:
    """Bytes by name (`Size`, `Rss`, `AnonHugePages` …) of the mapping that an address lies in."""
    found: dict[str, int] = {}
    inside = False
    for line in Path("/proc/self/smaps").read_text().splitlines():
        first, *rest = line.split()
        if not first.endswith(":"):
            start, end = (int(part, 16) for part in first.split("-"))
            inside = start <= address < end
        elif inside and len(rest) == 2 and rest[1] == "kB":
            found[first[:-1]] = int(rest[0]) << 10
    return found


def resident_bytes(address: int, size: int) -> int:
    """Bytes of the pages of this range that are there. A mapping may have more: the system joins neighbours."""
    first = address // mmap.PAGESIZE
    num_pages = -(-(address + size) // mmap.PAGESIZE) - first
    there = (ctypes.c_ubyte * num_pages)()
    libc = ctypes.CDLL(None, use_errno=True)
    libc.mincore.argtypes = [ctypes.c_void_p, ctypes.c_size_t, ctypes.c_void_p]
    if libc.mincore(first * mmap.PAGESIZE, num_pages * mmap.PAGESIZE, there):
        raise OSError(ctypes.get_errno(), "mincore")
    return sum(page & 1 for page in there) * mmap.PAGESIZE


def anonymous_bytes() -> int:
    """All memory of the process that is no file's."""
    lines = Path("/proc/self/smaps_rollup").read_text().splitlines()
    (line,) = [line for line in lines if line.startswith("Anonymous:")]
    return int(line.split()[1]) << 10
