"""What drafts leave behind beside states and rings, which cannot take a token back: the rare situations."""

from __future__ import annotations

from collections.abc import Sequence

from tests.sim.device import Group, RingGroup, Rows, StateGroup
from tests.sim.marks import Marks


class DraftMarks:
    """Which of them a run has reached. Knows the prefixes whose state a step with drafts brought to a block's end."""

    def __init__(self, marks: Marks) -> None:
        self._marks = marks
        self._brought: set[int] = set()

    def admitted(self, fingerprint: int, groups: Sequence[Group]) -> None:
        """A request goes on from a hit on the prefix with this fingerprint."""
        if fingerprint in self._brought and any(isinstance(group, StateGroup) for group in groups):
            self._marks.hit("hit on a state that drafts left")

    def accepted(self, rows: Rows, num_accepted: int, groups: Sequence[Group]) -> None:
        """Of the step's drafts the first ones were right."""
        if not rows.drafts:
            return
        confirmed = rows.known_end + num_accepted
        for group in groups:
            if isinstance(group, StateGroup):
                self._beside_a_state(rows, confirmed, group.block_size)
            elif isinstance(group, RingGroup) and rows.end > max(confirmed, group.block_size):
                self._marks.hit("ring overwritten by refused drafts")

    def _beside_a_state(self, rows: Rows, confirmed: int, size: int) -> None:
        if confirmed > rows.known_end:
            self._marks.hit("drafts accepted beside a state")
        if confirmed < rows.end:
            self._marks.hit("drafts refused beside a state")
        if rows.drafts[0] < 0:
            self._marks.hit("void drafts beside a state")
        passed = confirmed // size * size
        if passed >= rows.known_end:
            self._marks.hit("block end among accepted drafts")
            self._brought.add(rows.chain.prints[passed])
        if rows.end // size * size > confirmed:
            self._marks.hit("block end among refused drafts")
