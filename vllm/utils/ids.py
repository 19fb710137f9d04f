"""Sources of unique ids, given to whoever needs one so that tests can count instead of draw. Layer: L0."""

from __future__ import annotations

import itertools
import uuid
from typing import Protocol


class IdSource(Protocol):
    """Gives a new id at each call."""

    def next_id(self) -> str:
        """An id that this source has not given before."""
        ...


class RandomIds:
    """Random hexadecimal ids, unique across processes."""

    __slots__ = ()

    def next_id(self) -> str:
        return random_uuid()


class CountingIds:
    """`prefix0`, `prefix1`, …: reproducible ids for tests and simulations."""

    __slots__ = ("_count", "_prefix")

    def __init__(self, prefix: str = "") -> None:
        self._prefix = prefix
        self._count = itertools.count()

    def next_id(self) -> str:
        return f"{self._prefix}{next(self._count)}"


def random_uuid() -> str:
    """32 random hexadecimal digits."""
    return uuid.uuid4().hex
