"""`check`: an assertion that no interpreter flag switches off. For programmer errors only. Layer: L0."""

from __future__ import annotations


class InvariantError(AssertionError):
    """An invariant of the engine does not hold; the component that raised it must not go on."""


def check(condition: bool, message: str) -> None:
    """Raise `InvariantError(message)` unless `condition` holds. The message names the values involved."""
    if not condition:
        raise InvariantError(message)
