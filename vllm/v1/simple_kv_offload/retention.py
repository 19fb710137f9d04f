"""Retention hints of ended requests, applied to the tier below the device. Layer: L4.

Owns which contents of a request are, or will be, in the tier. It must not know how they are kept.
"""

from __future__ import annotations

from vllm.utils.clock import Clock
from vllm.v1.core.block_hash import BlockHashWithGroupId
from vllm.v1.core.kv_retention import first_own_token, leaves_content, retention_of
from vllm.v1.request import Request
from vllm.v1.simple_kv_offload.store_policy import Stores, confirmed_tokens, expected_keys, num_full_blocks


def retain_in_tier(stores: Stores, request: Request, share: float, clock: Clock) -> None:
    """Keep the ended request's contents in the tier as its hint says; copies under way count when they arrive."""
    hint = request.retention
    if hint is None or not leaves_content(request):
        return
    retention = retention_of(stores.tier.pool, share, clock, stores.in_flight)
    if retention is None:
        return
    start = first_own_token(request, hint.level)
    end = confirmed_tokens(request)
    if stores.prompt_only:
        end = min(end, request.num_prompt_tokens)
    on_device = stores.device.cached_block_hash_to_block
    contents: list[tuple[int, BlockHashWithGroupId]] = []
    for group in stores.tier.group_ids:
        size, key_at = stores.block_size(group), expected_keys(stores, request, group)
        for index in range(start // size, num_full_blocks(stores, request, group, end)):
            key = key_at(index)
            if stores.is_copied(key) or on_device.get_one_block(key) is not None:
                contents.append(((index + 1) * size, key))
    retention.hold(contents, hint, request.cache_salt)
