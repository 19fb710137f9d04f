"""What the system says of this process's memory."""

from __future__ import annotations

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


def anonymous_bytes() -> int:
    """All memory of the process that is no file's."""
    lines = Path("/proc/self/smaps_rollup").read_text().splitlines()
    (line,) = [line for line in lines if line.startswith("Anonymous:")]
    return int(line.split()[1]) << 10
