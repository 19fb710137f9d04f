"""Where cached tokens came from, ordered from the innermost tier outwards.

Owns the names of the sources.  Must not know connectors or tiers.  Layer: L2 (values).
"""

from collections.abc import Iterable, Mapping
from enum import StrEnum


class CacheHitSource(StrEnum):
    """Origin of a prefix cache hit.  The declaration order is the outward order (device is innermost)."""

    DEVICE = "device"
    HOST = "host"
    P2P = "p2p"
    DISK = "disk"
    EXTERNAL_UNSPECIFIED = "external_unspecified"

    @classmethod
    def outermost(cls, sources: Iterable["CacheHitSource"]) -> "CacheHitSource":
        """The source farthest from the device.

        Raises:
            ValueError: ``sources`` is empty.
        """
        return outermost(sources)


_OUTWARD_ORDER = {source: rank for rank, source in enumerate(CacheHitSource)}


def limit_by_source(
    tokens_by_source: Mapping["CacheHitSource", int], num_tokens: int
) -> dict["CacheHitSource", int]:
    """Split ``num_tokens`` tokens by source: inner sources keep theirs, what exceeds them all has no known source.

    Every source that is named stays named, be it with 0 tokens.
    """
    left = max(0, num_tokens)
    split: dict[CacheHitSource, int] = {}
    for source in sorted(tokens_by_source, key=_OUTWARD_ORDER.__getitem__):
        split[source] = min(left, max(0, tokens_by_source[source]))
        left -= split[source]
    if left:
        unknown = CacheHitSource.EXTERNAL_UNSPECIFIED
        split[unknown] = split.get(unknown, 0) + left
    return split


def outermost(sources: Iterable[CacheHitSource]) -> CacheHitSource:
    """The source farthest from the device (``ValueError`` if there is none)."""
    found = max(sources, key=_OUTWARD_ORDER.__getitem__, default=None)
    if found is None:
        raise ValueError("outermost() needs at least one cache hit source")
    return found
