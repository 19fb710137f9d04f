"""The `Clock` protocol and the real clock. L2–L5 are given a clock and never read one themselves. Layer: L0."""

from __future__ import annotations

import time
from typing import Protocol


class Clock(Protocol):
    """Source of time, in seconds."""

    def monotonic(self) -> float:
        """Seconds since an arbitrary start; never goes back."""
        ...

    def time(self) -> float:
        """Seconds since the epoch."""
        ...


class MonotonicClock:
    """The machine's clocks."""

    __slots__ = ()

    def monotonic(self) -> float:
        return time.monotonic()

    def time(self) -> float:
        return time.time()


def monotonic_ns() -> int:
    """Nanoseconds since an arbitrary start; never goes back."""
    return time.monotonic_ns()
