"""Integer arithmetic used everywhere: ceiling division and rounding. Knows nothing else. Layer: L0."""

from __future__ import annotations


def cdiv(a: int, b: int) -> int:
    """`a / b` rounded up, for a positive `b`."""
    return -(a // -b)


def round_up(x: int, multiple: int) -> int:
    """The smallest multiple of `multiple` that is at least `x`."""
    return cdiv(x, multiple) * multiple


def round_down(x: int, multiple: int) -> int:
    """The largest multiple of `multiple` that is at most `x`."""
    return x // multiple * multiple
