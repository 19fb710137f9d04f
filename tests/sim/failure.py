"""How a run fails."""

from __future__ import annotations


class SimFailure(AssertionError):
    """An invariant of the simulation does not hold. `code` names it (I1 … I11, or CRASH)."""

    def __init__(self, code: str, message: str) -> None:
        super().__init__(code, message)
        self.code = code
        self.message = message

    def __str__(self) -> str:
        return f"[{self.code}] {self.message}"


def require(condition: bool, code: str, message: str) -> None:
    """Raise `SimFailure` unless `condition` holds."""
    if not condition:
        raise SimFailure(code, message)
