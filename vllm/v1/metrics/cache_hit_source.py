"""Where cached tokens came from, ordered from the innermost tier outwards.

Owns the names of the sources.  Must not know connectors or tiers.  Layer: L2 (values).
"""

from collections.abc import Iterable
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


def outermost(sources: Iterable[CacheHitSource]) -> CacheHitSource:
    """The source farthest from the device (``ValueError`` if there is none)."""
    found = max(sources, key=_OUTWARD_ORDER.__getitem__, default=None)
    if found is None:
        raise ValueError("outermost() needs at least one cache hit source")
    return found
