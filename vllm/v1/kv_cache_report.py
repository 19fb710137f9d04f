"""What the KV cache holds and did, as data: the records behind look-ups, statistics and resets.

Owns the records. Must not know pools, connectors or who shows them. All counts are taken since the start unless they
describe a state; bytes are those of all ranks together. Layer: L2 (values).
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from vllm.v1.metrics.cache_hit_source import CacheHitSource


@dataclass(frozen=True, slots=True)
class ExternalHit:
    """What lies below the device behind a local prefix, in tokens by tier; every tier that was looked in is named.

    ``offered``: what a load would bring, its values add up. ``held``: what each tier could bring by itself.
    """

    offered: Mapping[CacheHitSource, int]
    held: Mapping[CacheHitSource, int]
    loads_async: bool

    @property
    def num_tokens(self) -> int:
        """All tokens that a load would bring."""
        return sum(self.offered.values())


@dataclass(frozen=True, slots=True)
class CacheLookup:
    """What a prompt would find in the caches now.

    ``cached_tokens_by_source`` is what a request sent now would report; its values add up to ``cached_tokens``.
    ``tokens_by_tier`` says how long a usable prefix each tier holds by itself. ``complete`` is False, and tiers of the
    connector are missing, where the connector cannot tell.
    """

    prompt_tokens: int
    cached_tokens: int
    cached_tokens_by_source: dict[CacheHitSource, int]
    tokens_by_tier: dict[CacheHitSource, int]
    complete: bool = True


@dataclass(frozen=True, slots=True)
class PoolReport:
    """One pool of blocks, its null block left out: ``blocks_free + blocks_held = blocks_total``.

    ``blocks_cached``: blocks whose content can be found, held or free. ``entries_cached``: different contents that can
    be found; a block can have several, and several blocks the same.
    """

    tier: CacheHitSource
    medium: str
    blocks_total: int
    blocks_free: int
    blocks_held: int
    blocks_cached: int
    entries_cached: int
    blocks_evicted: int
    block_bytes: int
    entries_protected: int = 0
    """Contents that requests had kept before others, and may at most have: see `kv_retention_share`."""
    entries_protected_max: int = 0
    protections_refused: int = 0


@dataclass(frozen=True, slots=True)
class TransferReport:
    """Copies of blocks in one direction: ``scheduled = in_flight + done + failed + dropped``."""

    tier: CacheHitSource
    direction: str
    blocks_scheduled: int
    blocks_in_flight: int
    blocks_done: int
    blocks_failed: int
    blocks_dropped: int
    bytes_done: int


@dataclass(frozen=True, slots=True)
class TierReport:
    """One tier below the device, as its connector sees it. ``mode`` is eager or lazy."""

    pool: PoolReport
    mode: str
    pending_store_blocks: int
    transfers: tuple[TransferReport, ...]


@dataclass(frozen=True, slots=True)
class GroupReport:
    """One KV cache group. ``use``: "cache", or "scratch" for memory that is never found again.

    ``num_layers`` own a cache in this group, ``num_sharing_layers`` read those without having one.
    """

    group: int
    kind: str
    spec: str
    block_size: int
    use: str
    sliding_window: int | None
    num_layers: int
    block_bytes: int
    num_sharing_layers: int = 0


@dataclass(frozen=True, slots=True)
class HitReport:
    """Tokens asked of a tier and found there."""

    tier: CacheHitSource
    tokens_asked: int
    tokens_hit: int


@dataclass(frozen=True, slots=True)
class RequestsReport:
    """Requests now: ``loading`` of the waiting ones wait for a load."""

    running: int
    waiting: int
    loading: int
    admitted: int


@dataclass(frozen=True, slots=True)
class KVCacheReport:
    """Everything of one engine. Pools and hits are ordered from the device outwards."""

    pools: tuple[PoolReport, ...]
    groups: tuple[GroupReport, ...]
    hits: tuple[HitReport, ...]
    transfers: tuple[TransferReport, ...]
    modes: dict[CacheHitSource, str]
    pending_store_blocks: int
    requests: RequestsReport
    block_size: int
    prefix_caching: bool


@dataclass(frozen=True, slots=True)
class TierReset:
    """What a reset did to one tier. For a tier that it left alone ``asked`` is False and ``success`` None.

    ``blocks_dropped`` lost their content; ``blocks_held`` are still held by requests or transfers; ``blocks_cached``
    can still be found. All three are None where the connector does not count its blocks. ``reason`` says why a tier
    that was asked is no success, else it is None.
    """

    tier: CacheHitSource
    asked: bool
    success: bool | None
    blocks_dropped: int | None
    blocks_held: int | None
    blocks_cached: int | None
    reason: str | None = None
