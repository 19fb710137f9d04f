"""Retention hints of ended requests, applied to the device's pool. Layer: L3.

Owns which contents of a request its hint is about. It must not know how they are kept.
"""

from __future__ import annotations

from collections.abc import Container

from vllm.kv_retention import RetentionLevel
from vllm.utils.clock import Clock
from vllm.v1.core.block_hash import (
    BlockHashWithGroupId,
    make_block_hash_with_group_id,
    resolve_block_hashes,
)
from vllm.v1.core.block_pool import BlockPool
from vllm.v1.core.block_retention import BlockRetention, can_retain
from vllm.v1.core.kv_cache_manager import KVCacheManager
from vllm.v1.request import Request, RequestStatus


def leaves_content(request: Request) -> bool:
    """Whether an ended request left what its hint is about: its prompt was computed, and nothing was wrong with it."""
    if request.status in (RequestStatus.FINISHED_ERROR, RequestStatus.FINISHED_IGNORED):
        return False
    return request.num_confirmed_tokens >= request.num_prompt_tokens - 1


def retention_of(
    pool: BlockPool,
    share: float,
    clock: Clock,
    expected: Container[BlockHashWithGroupId] = frozenset(),
) -> BlockRetention | None:
    """The pool's levels, made when they are first asked for; None if its order of eviction can have none."""
    if pool.placer is None and can_retain(pool):
        pool.placer = BlockRetention(pool, share, clock, expected)
    return pool.placer if isinstance(pool.placer, BlockRetention) else None


def first_own_token(request: Request, level: RetentionLevel) -> int:
    """Where the contents begin that the hint may be about: what was there before is never made less worth keeping."""
    return request.num_cached_tokens if level is RetentionLevel.LOW else 0


def retain_on_device(manager: KVCacheManager, request: Request, share: float, clock: Clock) -> None:
    """Keep what the ended request leaves in the device's cache as its hint says; its blocks are still held.

    States and windows that the request itself has left behind count as well: a hit needs them.
    """
    hint = request.retention
    if hint is None or not manager.enable_caching or not leaves_content(request):
        return
    retention = retention_of(manager.block_pool, share, clock)
    if retention is None:
        return
    start = first_own_token(request, hint.level)
    pool = manager.block_pool
    contents: list[tuple[int, BlockHashWithGroupId]] = []
    for group, kind in enumerate(manager.coordinator.single_type_managers):
        if not kind.caches:
            continue
        hashes = resolve_block_hashes(request.block_hashes, pool.hash_block_size, kind.block_size)
        for index in range(start // kind.block_size, len(hashes)):
            key = make_block_hash_with_group_id(hashes[index], group)
            if pool.index.map.get_one_block(key) is not None:
                contents.append(((index + 1) * kind.block_size, key))
    retention.hold(contents, hint, request.cache_salt)
