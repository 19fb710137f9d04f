"""Integers with a suffix (`1k`, `2M`), alone and inside JSON text. Knows no flags. Layer: L0.

A lower-case suffix is decimal and allows a fraction (`25.6k` = 25600); an upper-case one is binary (`1K` = 1024).
"""

from __future__ import annotations

import argparse
import json
import re
from decimal import Decimal
from typing import Any, Final

_FACTORS: Final = {
    "k": 10**3,
    "m": 10**6,
    "g": 10**9,
    "t": 10**12,
    "K": 2**10,
    "M": 2**20,
    "G": 2**30,
    "T": 2**40,
}
_NUMBER: Final = re.compile(r"(-?\d+(?:\.\d+)?)([kKmMgGtT])?")
# A JSON string, or a bare number with a suffix outside of strings.
_STRING_OR_NUMBER: Final = re.compile(r'"(?:\\.|[^"\\])*"|(?<![\w.])-?\d+(?:\.\d+)?[kKmMgGtT](?!\w)')


def human_readable_int(text: str) -> int:
    """The integer that `text` means. Raises `argparse.ArgumentTypeError` (shown as a usage error) if it means none."""
    match = _NUMBER.fullmatch(text.strip())
    if match is None:
        raise argparse.ArgumentTypeError(
            f"{text!r} is not an integer with an optional suffix k, K, m, M, g, G, t or T"
        )
    digits, suffix = match.groups()
    if suffix is not None and suffix.isupper() and "." in digits:
        raise argparse.ArgumentTypeError(
            f"{text!r}: a fraction needs a decimal (lower-case) suffix, did you mean {digits}{suffix.lower()!s}?"
        )
    value = Decimal(digits) * (1 if suffix is None else _FACTORS[suffix])
    if value != int(value):
        raise argparse.ArgumentTypeError(f"{text!r} is not a whole number")
    return int(value)


def loads_json(text: str) -> Any:
    """Parse JSON in which bare numbers may carry a suffix. Raises ValueError with the position of the fault."""

    def plain(match: re.Match[str]) -> str:
        token = match.group()
        if token.startswith('"'):
            return token
        try:
            return str(human_readable_int(token))
        except argparse.ArgumentTypeError as error:
            raise ValueError(str(error)) from error

    return json.loads(_STRING_OR_NUMBER.sub(plain, text))


def parse_scalar(text: str) -> Any:
    """A dotted flag's value: JSON if it parses, else an integer with suffix, else the text itself."""
    try:
        return loads_json(text)
    except ValueError:
        pass
    try:
        return human_readable_int(text)
    except argparse.ArgumentTypeError:
        return text
