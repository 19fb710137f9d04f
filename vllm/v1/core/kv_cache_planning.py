"""Public face of the planner: specs → groups → configurations; re-exports only. Layer: L3."""

from __future__ import annotations

from vllm.v1.core.kv_cache_capacity import max_memory_usage_bytes, may_override_num_blocks
from vllm.v1.core.kv_cache_grouping import (
    create_kv_cache_group_specs,
    get_uniform_page_size,
    is_kv_cache_spec_uniform,
    unify_hybrid_kv_cache_specs,
    unify_kv_cache_spec_page_size,
)
from vllm.v1.core.kv_cache_placement import validate_kv_cache_layout
from vllm.v1.core.kv_cache_planner import (
    DefaultKVCacheConfigBuilder,
    check_enough_kv_cache_memory,
    estimate_max_model_len,
    get_global_kv_cache_groups,
    get_kv_cache_config_from_groups,
    get_kv_cache_configs,
    get_kv_cache_groups,
    get_kv_cache_groups_from_builder,
    is_kv_cache_type_attention_free,
    kv_cache_groups_tp_replicas,
)

__all__ = [
    "DefaultKVCacheConfigBuilder",
    "get_global_kv_cache_groups",
    "get_kv_cache_configs",
    "get_kv_cache_groups",
    "get_kv_cache_groups_from_builder",
    "get_kv_cache_config_from_groups",
    "estimate_max_model_len",
    "check_enough_kv_cache_memory",
    "max_memory_usage_bytes",
    "is_kv_cache_spec_uniform",
    "is_kv_cache_type_attention_free",
    "create_kv_cache_group_specs",
    "unify_kv_cache_spec_page_size",
    "unify_hybrid_kv_cache_specs",
    "get_uniform_page_size",
    "may_override_num_blocks",
    "validate_kv_cache_layout",
    "kv_cache_groups_tp_replicas",
]
