"""How long the KV cache of a request is worth keeping: the hint that a request may carry, read and checked.

Owns the fields, their bounds, and the short form ``cache_control``. It must not know blocks, pools or HTTP. Layer L1.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from difflib import get_close_matches
from enum import IntEnum
from typing import Final

EXTRA_ARG: Final = "kv_retention"
"""Where the hint travels in ``SamplingParams.extra_args``."""
FIELDS: Final = ("pin", "priority", "ttl", "id", "superseded_by")
MAX_TTL_S: Final = 7 * 86_400.0
MAX_NAME_LENGTH: Final = 256
DEFAULT_CACHE_CONTROL_TTL: Final = "5m"
_UNITS: Final = {"s": 1.0, "m": 60.0, "h": 3600.0, "d": 86_400.0}


class RetentionLevel(IntEnum):
    """What goes first when memory is needed: the lower level."""

    LOW = 0
    NORMAL = 1
    HIGH = 2
    PINNED = 3

    @property
    def is_protected(self) -> bool:
        """Whether it outlives ordinary content, which only a share of a pool may do."""
        return self >= RetentionLevel.HIGH


@dataclass(frozen=True, slots=True)
class RetentionHint:
    """``ttl_s`` seconds after the request's end its content is the first to go; None = no limit.

    ``name`` names this version of the prompt; the end of a request called ``superseded_by``, or again ``name``, makes
    the content of this one the first to go as well.
    """

    level: RetentionLevel = RetentionLevel.NORMAL
    ttl_s: float | None = None
    name: str | None = None
    superseded_by: str | None = None


def parse_retention(value: object) -> RetentionHint:
    """The hint in a ``kv_retention`` mapping. ``ValueError`` naming field and value."""
    if not isinstance(value, Mapping):
        raise ValueError(f"kv_retention must be a mapping, got {value!r}")
    for key in value:
        if key not in FIELDS:
            nearest = get_close_matches(str(key), FIELDS, n=1, cutoff=0.4)
            hint = f" (did you mean {nearest[0]!r}?)" if nearest else ""
            raise ValueError(f"kv_retention has no field {key!r}{hint}; known: {', '.join(FIELDS)}")
    pin = value.get("pin")
    if pin is not None and not isinstance(pin, bool):
        raise ValueError(f"kv_retention.pin must be true or false, got {pin!r}")
    level = _level(value.get("priority"))
    if pin:
        if level is RetentionLevel.LOW:
            raise ValueError("kv_retention: pin=true and priority='low' exclude each other")
        level = RetentionLevel.PINNED
    name, successor = _name(value, "id"), _name(value, "superseded_by")
    if name is not None and name == successor:
        raise ValueError(f"kv_retention.superseded_by must differ from kv_retention.id, both are {name!r}")
    return RetentionHint(level, _ttl(value.get("ttl"), "kv_retention.ttl"), name, successor)


def from_cache_control(value: object) -> dict[str, object]:
    """``cache_control`` as the ``kv_retention`` it stands for: kept before others for its ``ttl``."""
    if not isinstance(value, Mapping) or value.get("type") != "ephemeral":
        raise ValueError(
            f'cache_control must be {{"type": "ephemeral"}}, with "ttl" if wanted, got {value!r}'
        )
    unknown = [key for key in value if key not in ("type", "ttl")]
    if unknown:
        raise ValueError(f"cache_control has no field {unknown[0]!r}; known: type, ttl")
    ttl = value.get("ttl")
    return {
        "priority": "high",
        "ttl": _ttl(DEFAULT_CACHE_CONTROL_TTL if ttl is None else ttl, "cache_control.ttl"),
    }


def last_cache_control(messages: Sequence[object]) -> object:
    """The last ``cache_control`` of these messages or of their parts; None if there is none."""
    for message in reversed(messages):
        if not isinstance(message, Mapping):
            continue
        parts = message.get("content")
        for place in (*reversed(parts if isinstance(parts, list) else ()), message):
            if isinstance(place, Mapping) and place.get("cache_control") is not None:
                return place["cache_control"]
    return None


def _level(value: object) -> RetentionLevel:
    if value is None:
        return RetentionLevel.NORMAL
    levels = {"low": RetentionLevel.LOW, "normal": RetentionLevel.NORMAL, "high": RetentionLevel.HIGH}
    if not isinstance(value, str) or value not in levels:
        raise ValueError(f"kv_retention.priority must be one of {', '.join(levels)}, got {value!r}")
    return levels[value]


def _ttl(value: object, field: str) -> float | None:
    """Seconds as a number, or as text with a unit: 90, "90s", "5m", "1h", "1d"."""
    if value is None:
        return None
    seconds: float | None = None
    if isinstance(value, int | float) and not isinstance(value, bool):
        seconds = min(value, 2 * MAX_TTL_S)
    elif isinstance(value, str) and value[-1:] in _UNITS and value[:-1].isascii() and value[:-1].isdecimal():
        seconds = float(value[:-1]) * _UNITS[value[-1]]
    if seconds is None or not 0 < seconds <= MAX_TTL_S:
        raise ValueError(
            f'{field} must be seconds or text such as "90s", "5m" or "1h", above 0 and at most 7 days, got {value!r}'
        )
    return seconds


def _name(value: Mapping[object, object], field: str) -> str | None:
    name = value.get(field)
    if name is None:
        return None
    if not isinstance(name, str) or not 0 < len(name) <= MAX_NAME_LENGTH:
        raise ValueError(
            f"kv_retention.{field} must be a text of 1 to {MAX_NAME_LENGTH} characters, got {name!r:.80}"
        )
    return name
