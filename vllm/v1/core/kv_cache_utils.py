"""Public face of hashing, blocks and block sizes; re-exports only. Layer: L3.

`NONE_HASH` is read through to `block_hash`, so that it is always the root that hashing uses.
"""

from __future__ import annotations

from vllm.v1.core import block_hash as _block_hash
from vllm.v1.core.block_hash import (
    DEFAULT_NONE_HASH_SEED,
    BlockHash,
    BlockHashList,
    BlockHashListWithBlockSize,
    BlockHashWithGroupId,
    ExternalBlockHash,
    get_block_hash,
    get_group_id,
    get_none_hash_seed,
    init_none_hash,
    make_block_hash_with_group_id,
    maybe_convert_block_hash,
    resolve_block_hashes,
    resolve_none_hash_seed,
)
from vllm.v1.core.block_hasher import (
    generate_block_hash_extra_keys,
    get_request_block_hasher,
    hash_block_tokens,
    to_event_extra_keys,
)
from vllm.v1.core.free_block_queue import FreeKVCacheBlockQueue
from vllm.v1.core.kv_cache_block import KVCacheBlock, KVCacheBlockCopy, null_head_len, trim_null_head

# The planning names lived here in a neighbouring version.
from vllm.v1.core.kv_cache_planning import (
    check_enough_kv_cache_memory,
    create_kv_cache_group_specs,
    estimate_max_model_len,
    get_global_kv_cache_groups,
    get_kv_cache_config_from_groups,
    get_kv_cache_configs,
    get_kv_cache_groups,
    get_kv_cache_groups_from_builder,
    get_uniform_page_size,
    is_kv_cache_spec_uniform,
    is_kv_cache_type_attention_free,
    kv_cache_groups_tp_replicas,
    max_memory_usage_bytes,
    may_override_num_blocks,
    unify_hybrid_kv_cache_specs,
    unify_kv_cache_spec_page_size,
    validate_kv_cache_layout,
)
from vllm.v1.core.kv_cache_sizes import (
    generate_scheduler_kv_cache_config,
    get_kv_cache_capacity,
    get_max_concurrency_for_kv_cache_config,
    partial_hash_hits_enabled,
    resolve_cache_hit_alignment_tokens,
    resolve_dcp_kv_block_size,
    resolve_dcp_kv_cache_spec,
    resolve_kv_cache_block_sizes,
)
from vllm.v1.utils import tensor_data

# Another neighbouring version has a hasher of its own for drafters.
get_request_eagle_block_hasher = get_request_block_hasher

__all__ = [
    "DEFAULT_NONE_HASH_SEED",
    "BlockHash",
    "BlockHashList",
    "BlockHashListWithBlockSize",
    "BlockHashWithGroupId",
    "ExternalBlockHash",
    "FreeKVCacheBlockQueue",
    "KVCacheBlock",
    "KVCacheBlockCopy",
    "NONE_HASH",  # noqa: F822 (see __getattr__)
    "check_enough_kv_cache_memory",
    "create_kv_cache_group_specs",
    "estimate_max_model_len",
    "generate_block_hash_extra_keys",
    "generate_scheduler_kv_cache_config",
    "get_block_hash",
    "get_global_kv_cache_groups",
    "get_group_id",
    "get_kv_cache_capacity",
    "get_kv_cache_config_from_groups",
    "get_kv_cache_configs",
    "get_kv_cache_groups",
    "get_kv_cache_groups_from_builder",
    "get_max_concurrency_for_kv_cache_config",
    "get_none_hash_seed",
    "get_request_block_hasher",
    "get_request_eagle_block_hasher",
    "get_uniform_page_size",
    "hash_block_tokens",
    "init_none_hash",
    "is_kv_cache_spec_uniform",
    "is_kv_cache_type_attention_free",
    "kv_cache_groups_tp_replicas",
    "make_block_hash_with_group_id",
    "max_memory_usage_bytes",
    "may_override_num_blocks",
    "maybe_convert_block_hash",
    "null_head_len",
    "partial_hash_hits_enabled",
    "resolve_block_hashes",
    "resolve_cache_hit_alignment_tokens",
    "resolve_dcp_kv_block_size",
    "resolve_dcp_kv_cache_spec",
    "resolve_kv_cache_block_sizes",
    "resolve_none_hash_seed",
    "tensor_data",
    "to_event_extra_keys",
    "trim_null_head",
    "unify_hybrid_kv_cache_specs",
    "unify_kv_cache_spec_page_size",
    "validate_kv_cache_layout",
]


def __getattr__(name: str) -> BlockHash:
    if name == "NONE_HASH":
        return _block_hash.NONE_HASH
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
