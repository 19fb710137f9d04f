"""Which tier of ours stands for where a manager from outside says that content is loaded from.

Owns how tokens are counted by tier. It must not know requests or transfers. Layer L4.
"""

from __future__ import annotations

from collections.abc import Sequence

from vllm.v1.kv_offload.base import (
    Locality,
    Medium,
    OffloadingManager,
    OffloadKey,
    ReqContext,
    get_offload_group_idx,
)
from vllm.v1.metrics.cache_hit_source import CacheHitSource

UNKNOWN = CacheHitSource.EXTERNAL_UNSPECIFIED
_TIERS = {
    (Medium.CPU, Locality.LOCAL): CacheHitSource.HOST,
    (Medium.CPU, Locality.REMOTE): CacheHitSource.P2P,
    (Medium.STORAGE, Locality.LOCAL): CacheHitSource.DISK,
    (Medium.STORAGE, Locality.REMOTE): CacheHitSource.DISK,
}


class LoadSources:
    """Asks the manager block by block. ``leading_group`` has blocks of ``block_size`` tokens."""

    def __init__(self, manager: OffloadingManager, leading_group: int, block_size: int) -> None:
        self._manager = manager
        self._leading_group = leading_group
        self._block_size = block_size
        self._named = {UNKNOWN}

    @property
    def named(self) -> tuple[CacheHitSource, ...]:
        """The tiers that the manager has named so far and the unknown one, from the inner one outwards."""
        return tuple(source for source in CacheHitSource if source in self._named)

    def split(
        self, keys: Sequence[OffloadKey], num_tokens: int, ctx: ReqContext
    ) -> dict[CacheHitSource, int]:
        """Tokens by tier: a block of the leading group tells of its own tokens, the outermost block of all others."""
        counts = {UNKNOWN: 0}
        found: set[CacheHitSource] = set()
        left = num_tokens
        for key in keys:
            told = self._manager.get_load_source(key, ctx)
            source = UNKNOWN if told is None else _TIERS[told]
            found.add(source)
            if get_offload_group_idx(key) == self._leading_group:
                here = min(left, self._block_size)
                counts[source] = counts.get(source, 0) + here
                left -= here
        if left:
            source = CacheHitSource.outermost(found or {UNKNOWN})
            counts[source] = counts.get(source, 0) + left
        self._named |= counts.keys()
        return counts
