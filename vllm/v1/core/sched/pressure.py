"""How much memory must stay free beside an admission, learnt from preemptions.

Owns one number. Must not know requests, queues or blocks. Layer: L5 (scheduler).
"""

from __future__ import annotations

_LEVEL_MAX = 24


class MemoryPressure:
    """Keeps requests from being admitted, preempted and admitted again while nothing changes.

    Each pass that preempts for want of memory doubles what must stay free for the growth of the running requests; so
    between two ends of requests there are at most about log2(blocks) such passes. An end lets it start over at the
    room for one block per running request and group; once nobody waits for memory, nothing is kept free.
    """

    def __init__(self) -> None:
        self._level = 0
        self._last_pass = -1

    def note_preemption(self, current_pass: int) -> None:
        """A running request had to give way in this pass; further ones in the same pass are one misjudgement."""
        if current_pass != self._last_pass:
            self._last_pass = current_pass
            self._level = min(self._level + 1, _LEVEL_MAX)

    def note_end(self) -> None:
        """A request has ended and gives its blocks back."""
        self._level = min(self._level, 1)

    def note_relief(self) -> None:
        """Nobody waits for memory any more."""
        self._level = 0

    def reserve(self, num_running: int, num_groups: int) -> int:
        """Blocks that an admission must leave free. Nothing is kept free where nothing runs: no request starves."""
        if self._level == 0 or num_running == 0:
            return 0
        return num_running * num_groups << (self._level - 1)


__all__ = ["MemoryPressure"]
