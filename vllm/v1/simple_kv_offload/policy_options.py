"""The settings of the offload's policies: what is evicted, what is worth a copy, what is worth a load.

Owns names, bounds and defaults of these keys. It must not know sizes of a model. Layer L4.
"""

from __future__ import annotations

from argparse import ArgumentTypeError
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from vllm.utils.human_numbers import human_readable_int
from vllm.v1.simple_kv_offload.admission import DEFAULT_MAX_TRACKER_SIZE
from vllm.v1.simple_kv_offload.eviction import DEFAULT_EVICTION_POLICY, eviction_queue

DEFAULT_MAX_PENDING_STORE_BYTES = 4 * 1024**3
DECLINE_CHOICES = ("off", "disk", "all")
POLICY_KEYS = (
    "eviction_policy",
    "store_threshold",
    "max_tracker_size",
    "max_pending_store_bytes",
    "decline_slow_tier",
)


@dataclass(frozen=True, slots=True)
class OffloadPolicy:
    """Checked settings; bytes are per rank."""

    eviction_policy: str = DEFAULT_EVICTION_POLICY
    """A name of `EVICTION_POLICIES`, or "module:Class"."""
    store_threshold: int = 0
    """How many requests must have had a block before it is stored; 0 and 1: none but its own."""
    max_tracker_size: int = DEFAULT_MAX_TRACKER_SIZE
    """Hashes that are remembered to count them."""
    max_pending_store_bytes: int = DEFAULT_MAX_PENDING_STORE_BYTES
    """Bytes of stores under way beyond which none is added."""
    decline_slow_tier: str = "disk"
    """Which tiers are not read while they are slower than computing: one of `DECLINE_CHOICES`."""


DEFAULT_POLICY = OffloadPolicy()


# The values come from the user's JSON, so anything may be in them.
def parse_policy(extra: Mapping[str, Any]) -> OffloadPolicy:
    """Read these keys of ``kv_connector_extra_config``; ``ValueError`` naming key and value."""
    defaults = DEFAULT_POLICY
    name = extra.get("eviction_policy", defaults.eviction_policy)
    if not isinstance(name, str):
        raise ValueError(f"eviction_policy must be a name, got {name!r}")
    eviction_queue(name)
    return OffloadPolicy(
        eviction_policy=name,
        store_threshold=_count(extra, "store_threshold", defaults.store_threshold, 0),
        max_tracker_size=_count(extra, "max_tracker_size", defaults.max_tracker_size, 1),
        max_pending_store_bytes=_count(extra, "max_pending_store_bytes", defaults.max_pending_store_bytes, 1),
        decline_slow_tier=_decline(extra.get("decline_slow_tier", defaults.decline_slow_tier)),
    )


def number_of_text(value: Any) -> Any:
    """A text such as "64M" as the number it means (suffixes as on the command line); anything else as it is."""
    if not isinstance(value, str):
        return value
    try:
        return human_readable_int(value)
    except ArgumentTypeError:
        return value


def _count(extra: Mapping[str, Any], key: str, default: int, least: int) -> int:
    value = number_of_text(extra.get(key, default))
    if isinstance(value, float) and value.is_integer():
        value = int(value)
    if type(value) is not int or value < least:
        raise ValueError(f"{key} must be a whole number of at least {least}, got {value!r}")
    return value


def _decline(value: Any) -> str:
    """``false`` and ``true`` stand for "off" and "all"."""
    if isinstance(value, bool):
        return "all" if value else "off"
    if value not in DECLINE_CHOICES:
        raise ValueError(f"decline_slow_tier must be one of {', '.join(DECLINE_CHOICES)}, got {value!r}")
    return str(value)
