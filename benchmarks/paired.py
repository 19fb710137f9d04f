"""Ratios of two sides that took turns: in pairs of neighbours, with the interval that chance leaves, and what two equal sides give.

Owns the arithmetic only. Rounds come in the order off, eager, eager, off, off, eager, … (`ORDER`), so that what drifts meets both
sides alike, and every other two neighbours are of the same side: their ratio, which should be 1, is how well the run can tell.
"""

from __future__ import annotations

import math
import random
import statistics
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Any

ORDER = ("off", "eager", "eager", "off")
RESAMPLES = 2000
TRIM = 0.1
"""Of the pairs at either end, so much is left out: rounds in which another program had the machine."""
CONFIDENCE = 0.95

Pair = tuple[Sequence[float], Sequence[float]]
"""Seconds of the steps of two rounds: without, and with."""


@dataclass(frozen=True)
class Estimate:
    """A ratio, and where 95 of 100 repetitions of the run would find it."""

    ratio: float
    low: float
    high: float
    pairs: int

    def as_dict(self) -> dict[str, Any]:
        """For the document."""
        return asdict(self)


def rounds_of(rounds: Sequence[Sequence[float]], side: str) -> list[Sequence[float]]:
    """Those of one side."""
    return [times for number, times in enumerate(rounds) if ORDER[number % len(ORDER)] == side]


def unlike_pairs(rounds: Sequence[Sequence[float]]) -> list[Pair]:
    """(off, eager) of every two neighbours of different sides within four rounds."""
    pairs: list[Pair] = []
    for start in range(0, len(rounds) - 3, len(ORDER)):
        off, eager, eager_again, off_again = rounds[start : start + len(ORDER)]
        pairs += [(off, eager), (off_again, eager_again)]
    return pairs


def like_pairs(rounds: Sequence[Sequence[float]]) -> list[Pair]:
    """The same of neighbours of one side, the earlier one first in turns."""
    pairs: list[Pair] = []
    for first in range(1, len(rounds) - 1, 2):
        earlier, later = rounds[first], rounds[first + 1]
        # Neighbours are of the side with by turns; each side has either order equally often.
        pairs.append((earlier, later) if first % 8 in (1, 3) else (later, earlier))
    return pairs


def by_round(pairs: Sequence[Pair]) -> Estimate:
    """Time without / time with, from the pairs' sums."""
    logs = [[math.log(sum(off) / sum(eager)) for off, eager in pairs]]
    return _estimate(logs, [1.0])


def by_step(pairs: Sequence[Pair]) -> Estimate:
    """The same from each step beside the same step of the other round, weighted with the step's share of the time.

    What another program did to one step costs that step only, not the whole round.
    """
    steps = min(min(len(off), len(eager)) for off, eager in pairs)
    merged = [(_merge(off, steps), _merge(eager, steps)) for off, eager in pairs]
    shares = [statistics.median(off[i] + eager[i] for off, eager in merged) for i in range(steps)]
    logs = [[math.log(off[i] / eager[i]) for off, eager in merged] for i in range(steps)]
    return _estimate(logs, [share / sum(shares) for share in shares])


def _merge(times: Sequence[float], steps: int) -> list[float]:
    """So many steps, the last with all that came after it."""
    return [*times[: steps - 1], sum(times[steps - 1 :])]


def _trimmed(values: Sequence[float]) -> float:
    cut = int(TRIM * len(values))
    return statistics.fmean(sorted(values)[cut : len(values) - cut])


def _estimate(logs: Sequence[Sequence[float]], weights: Sequence[float]) -> Estimate:
    """``logs``: by step, one value per pair. The bootstrap draws whole pairs."""
    chance, count = random.Random(17), len(logs[0])

    def ratio(drawn: Sequence[int]) -> float:
        values = ([row[i] for i in drawn] for row in logs)
        return math.exp(sum(weight * _trimmed(row) for weight, row in zip(weights, values, strict=True)))

    everything = range(count)
    drawn = sorted(ratio(chance.choices(everything, k=count)) for _ in range(RESAMPLES))
    outside = int((1 - CONFIDENCE) / 2 * RESAMPLES)
    return Estimate(ratio(everything), drawn[outside], drawn[-1 - outside], count)
