"""Time that moves only when the driver says so."""

from __future__ import annotations


class SimClock:
    """Implements `vllm.utils.clock.Clock`."""

    def __init__(self) -> None:
        self._now = 1000.0

    def advance(self, seconds: float) -> None:
        """Move on by that much."""
        self._now += seconds

    def monotonic(self) -> float:
        return self._now

    def time(self) -> float:
        return self._now
