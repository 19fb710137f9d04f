"""Errors of settings in words for the person who set them.  Layer: L1 (config).

Owns the one form in which configuration errors are shown on a command line or in the message of a core that could not
start.  Must not know who shows them.
"""

from __future__ import annotations

import reprlib
from collections.abc import Mapping
from typing import Any

from pydantic import ValidationError

ENTRIES_MAX = 10
# Errors whose message says all: their type tells nothing to somebody who only set a flag.
_TOLD_PLAINLY = (ValueError, TypeError)


def error_text(error: BaseException) -> str:
    """The message of an error; of a schema violation every fault with its setting and value, on one line."""
    if isinstance(error, ValidationError):
        faults = error.errors(include_url=False)
        lines = [_fault(fault) for fault in faults[:ENTRIES_MAX]]
        if len(faults) > ENTRIES_MAX:
            lines.append(f"and {len(faults) - ENTRIES_MAX} more")
        return "; ".join(lines)
    if isinstance(error, _TOLD_PLAINLY) and str(error):
        return str(error)
    return f"{type(error).__name__}: {error}" if str(error) else type(error).__name__


def _fault(fault: Mapping[str, Any]) -> str:  # an entry of the schema library: opaque values
    message = str(fault["msg"]).removeprefix("Value error, ").removeprefix("Assertion failed, ")
    name = ".".join(str(part) for part in fault["loc"])
    if not name:
        return message
    value = "" if fault["type"] == "missing" else f"={reprlib.repr(fault['input'])}"
    return f"{name}{value}: {message[:1].lower()}{message[1:]}"
