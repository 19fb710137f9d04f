"""The KV cache of one engine described from the device outwards, and what a reset did to each tier.

Owns how the parts' counters are put together; reads counters only and changes nothing.  Must not know queues.
Layer: L5 (scheduler).
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence

from vllm.distributed.kv_transfer.kv_connector.v1.base import KVConnectorBase_V1
from vllm.v1.core.kv_cache_manager import KVCacheManager
from vllm.v1.core.kv_cache_view import describe_groups, describe_pool, device_block_bytes, host_block_bytes
from vllm.v1.core.sched.connector_calls import tier_reports, tiers_below
from vllm.v1.kv_cache_report import (
    HitReport,
    KVCacheReport,
    PoolReport,
    RequestsReport,
    TierReport,
    TierReset,
)
from vllm.v1.metrics.cache_hit_source import CacheHitSource
from vllm.v1.metrics.stats import CacheUse


def device_pools(manager: KVCacheManager, world_size: int) -> tuple[PoolReport, ...]:
    """The pools that requests allocate from; O(pools)."""
    config = manager.kv_cache_config
    sizes = (device_block_bytes(config, world_size), host_block_bytes(config, world_size))
    return tuple(
        describe_pool(pool, CacheHitSource.DEVICE, size)
        for pool, size in zip(manager.coordinator.pools, sizes, strict=False)
    )


def hits(use: CacheUse, connector: KVConnectorBase_V1 | None) -> tuple[HitReport, ...]:
    """Tokens asked of each tier and found there.  All tiers of the connector are asked for the same tokens."""
    below = tiers_below(connector)
    asked = {CacheHitSource.DEVICE: use.local_queries, **dict.fromkeys(below, use.external_queries)}
    for source in use.hits_by_source:
        asked.setdefault(source, use.external_queries)
    return tuple(
        HitReport(source, asked[source], use.hits_by_source.get(source, 0))
        for source in CacheHitSource
        if source in asked
    )


def build_report(
    manager: KVCacheManager,
    connector: KVConnectorBase_V1 | None,
    use: CacheUse,
    requests: RequestsReport,
    block_size: int,
    world_size: int,
) -> KVCacheReport:
    """Everything; O(groups + tiers).  ``block_size`` is the scheduler's, in tokens."""
    tiers = tier_reports(connector)
    return KVCacheReport(
        pools=(*device_pools(manager, world_size), *(tier.pool for tier in tiers)),
        groups=describe_groups(manager.kv_cache_config, world_size),
        hits=hits(use, connector),
        transfers=tuple(transfer for tier in tiers for transfer in tier.transfers),
        modes=_modes(tiers),
        pending_store_blocks=sum(tier.pending_store_blocks for tier in tiers),
        requests=requests,
        block_size=block_size,
        prefix_caching=manager.enable_caching,
    )


def _modes(tiers: Sequence[TierReport]) -> dict[CacheHitSource, str]:
    """By tier, the mode; of several connectors with such a tier all that differ."""
    modes: dict[CacheHitSource, dict[str, None]] = {}
    for tier in tiers:
        modes.setdefault(tier.pool.tier, {})[tier.mode] = None
    return {source: ", ".join(different) for source, different in modes.items()}


def tier_pools(manager: KVCacheManager, connector: KVConnectorBase_V1 | None) -> list[PoolReport]:
    """The pools of all tiers, from the device outwards."""
    tiers = tier_reports(connector)
    return [*device_pools(manager, 1), *(tier.pool for tier in tiers)]


def resets_by_tier(
    before: Sequence[PoolReport],
    after: Sequence[PoolReport],
    asked: Collection[CacheHitSource],
    uncounted: Mapping[CacheHitSource, bool],
) -> tuple[TierReset, ...]:
    """What a reset of the tiers ``asked`` did, pool by pool added up per tier.

    ``uncounted``: tiers without a pool that is told of, and whether their connector says that it has reset them.
    """
    resets: dict[CacheHitSource, TierReset] = {}
    for tier in dict.fromkeys(pool.tier for pool in after):
        held = sum(pool.blocks_held for pool in after if pool.tier is tier)
        cached = sum(pool.blocks_cached for pool in after if pool.tier is tier)
        had = sum(pool.blocks_cached for pool in before if pool.tier is tier)
        reason = _what_is_left(held, cached) if tier in asked else None
        success = reason is None if tier in asked else None
        resets[tier] = TierReset(tier, tier in asked, success, max(0, had - cached), held, cached, reason)
    for tier, is_done in uncounted.items():
        if tier not in resets:
            reason = None if is_done or tier not in asked else "its connector could not reset it"
            success = is_done if tier in asked else None
            resets[tier] = TierReset(tier, tier in asked, success, None, None, None, reason)
    return tuple(resets[tier] for tier in CacheHitSource if tier in resets)


def _what_is_left(held: int, cached: int) -> str | None:
    """Why a tier is not empty after its reset; None if it is."""
    reasons = []
    if held:
        reasons.append(f"{held} blocks are held by requests or transfers until those end")
    if cached:
        reasons.append(f"{cached} blocks can still be found")
    return "; ".join(reasons) or None
