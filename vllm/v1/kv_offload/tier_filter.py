"""Which tiers below the device a request may load from.

Owns the values, and how a request states them. It must not know tiers, pools or requests. Layer L2.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from enum import StrEnum
from typing import Any, TypeVar

TIER_FILTER_PARAM = "load_tier_filter"
"""The key of ``kv_transfer_params`` that restricts the tiers of a request."""


class Medium(StrEnum):
    """What a tier below the device is made of, spelled as in KV events."""

    CPU = "CPU"
    STORAGE = "STORAGE"


class Locality(StrEnum):
    """Whether a tier is reached over a network."""

    LOCAL = "LOCAL"
    REMOTE = "REMOTE"


@dataclass(frozen=True, slots=True)
class TierMatcher:
    """Tiers of this medium and locality; None = any."""

    medium: Medium | None = None
    locality: Locality | None = None

    def matches(self, medium: str, locality: str = Locality.LOCAL) -> bool:
        """Whether a tier is one of them."""
        return self.medium in (None, medium) and self.locality in (None, locality)


@dataclass(frozen=True, slots=True)
class TierFilter:
    """Tiers that one of the matchers names; None = all tiers, an empty tuple = none."""

    matchers: tuple[TierMatcher, ...] | None = None

    def allows(self, medium: str, locality: str = Locality.LOCAL) -> bool:
        """Whether a request with this filter may load from such a tier."""
        return self.matchers is None or any(matcher.matches(medium, locality) for matcher in self.matchers)


ALL = TierFilter()


# What a client sends may be anything.
def parse_tier_filter(params: Mapping[str, Any] | None) -> TierFilter:
    """The filter in ``kv_transfer_params``: a list of mappings with ``medium``, ``locality`` or both; null = not given.

    ``ValueError`` naming field and value if it is anything else.
    """
    value = None if params is None else params.get(TIER_FILTER_PARAM)
    if value is None:
        return ALL
    if not isinstance(value, list):
        raise ValueError(f"{TIER_FILTER_PARAM} must be a list of mappings, got {value!r}")
    return TierFilter(tuple(map(_matcher, value)))


def _matcher(entry: Any) -> TierMatcher:
    if not isinstance(entry, Mapping) or not entry:
        raise _names_nothing(entry)
    unknown = sorted(str(key) for key in entry if key not in ("medium", "locality"))
    if unknown:
        raise ValueError(f"{TIER_FILTER_PARAM}: unknown key {unknown[0]!r}; there are medium and locality")
    matcher = TierMatcher(_one_of(Medium, entry, "medium"), _one_of(Locality, entry, "locality"))
    if matcher == TierMatcher():  # of nulls alone: it would match everything
        raise _names_nothing(entry)
    return matcher


def _names_nothing(entry: Any) -> ValueError:
    return ValueError(f"{TIER_FILTER_PARAM} must hold mappings with medium or locality, got {entry!r} in it")


_Choice = TypeVar("_Choice", Medium, Locality)


def _one_of(kind: type[_Choice], entry: Mapping[str, Any], field: str) -> _Choice | None:
    value = entry.get(field)
    if value is None:
        return None
    if not isinstance(value, str) or value.upper() not in kind.__members__:
        names = " or ".join(kind.__members__)
        raise ValueError(f"{TIER_FILTER_PARAM}: {field} must be {names}, got {value!r}")
    return kind[value.upper()]
