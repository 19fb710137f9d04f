"""From the spec of a group to its manager. Layer: L3.

Owns nothing: the table spec class → manager is the spec registry's.
"""

from __future__ import annotations

from typing import cast

from vllm.v1.core.block_pool import BlockPool
from vllm.v1.core.kv_kinds.base import SingleTypeKVCacheManager
from vllm.v1.kv_cache_interface import KVCacheGroupRole, KVCacheSpec
from vllm.v1.kv_cache_spec_registry import KVCacheSpecRegistry


def manager_class_for(
    spec: KVCacheSpec, role: KVCacheGroupRole | None = None
) -> type[SingleTypeKVCacheManager]:
    """The registered manager class; ValueError for an unregistered spec."""
    return cast(type[SingleTypeKVCacheManager], KVCacheSpecRegistry.get_manager_class(spec, role))


def get_manager_for_kv_cache_spec(
    kv_cache_spec: KVCacheSpec,
    max_in_flight_tokens: int | None,
    max_model_len: int,
    role: KVCacheGroupRole | None = None,
    *,
    block_pool: BlockPool,
    enable_caching: bool,
    kv_cache_group_id: int,
    scheduler_block_size: int,
    dcp_world_size: int = 1,
    pcp_world_size: int = 1,
    needs_kv_cache_zeroing: bool = False,
) -> SingleTypeKVCacheManager:
    """The manager of one group. The admission cap is the number that also sized the pool; None counts no batch."""
    manager_class = manager_class_for(kv_cache_spec, role)
    in_flight = max_model_len if max_in_flight_tokens is None else max_in_flight_tokens
    return manager_class(
        kv_cache_spec,
        block_pool=block_pool,
        enable_caching=enable_caching,
        kv_cache_group_id=kv_cache_group_id,
        scheduler_block_size=scheduler_block_size,
        dcp_world_size=dcp_world_size,
        pcp_world_size=pcp_world_size,
        needs_kv_cache_zeroing=needs_kv_cache_zeroing,
        max_admission_blocks_per_request=manager_class.admission_cap(kv_cache_spec, in_flight, max_model_len),
    )
