"""One seed, named sub-streams: a new draw in one place does not shift the draws of another."""

from __future__ import annotations

import random


class Streams:
    """Streams of chance that depend on the seed and their name only (never on the order of creation)."""

    def __init__(self, seed: int) -> None:
        self.seed = seed

    def stream(self, name: str) -> random.Random:
        """The stream of that name, from its beginning."""
        return random.Random(f"{self.seed}/{name}")
