"""What the offload takes from the engine's plan: a tier's geometry, the group that leads, how much lazy mode guards.

Owns the reading of public configuration, as functions. It must not know blocks or requests. Layer L4.
"""

from __future__ import annotations

from vllm.config import VllmConfig
from vllm.utils.math_utils import cdiv
from vllm.v1.kv_cache_interface import (
    KVCacheConfig,
    KVCacheSpecKind,
    get_kv_cache_spec_kind,
    get_kv_cache_spec_sliding_window,
    is_full_attention_spec,
)
from vllm.v1.simple_kv_offload.capacity import blocks_for_bytes, gpu_total_bytes
from vllm.v1.simple_kv_offload.rank_parts import slot_widths
from vllm.v1.simple_kv_offload.tier import TierGeometry


def geometry(
    vllm_config: VllmConfig,
    *,
    num_blocks: int,
    medium: str,
    block_sizes: tuple[int, int],
    allow_partial_hits: bool,
    eviction_policy: str,
    shared_config: KVCacheConfig | None = None,
) -> TierGeometry:
    """The tier's numbers out of the public configuration, read once. ``shared_config``: that of a tier that ranks share."""
    parallel = vllm_config.parallel_config
    events = vllm_config.kv_events_config
    speculative = vllm_config.speculative_config
    model = vllm_config.model_config
    scheduler_block_size, hash_block_size = block_sizes
    return TierGeometry(
        num_blocks=num_blocks,
        medium=medium,
        scheduler_block_size=scheduler_block_size,
        hash_block_size=hash_block_size,
        # The tier never admits requests, so a length is only asked for form's sake.
        max_model_len=(model.max_model_len if model is not None else None) or scheduler_block_size,
        max_in_flight_tokens=vllm_config.max_in_flight_tokens,
        use_eagle=speculative is not None and speculative.use_eagle_block_drop(),
        dcp_world_size=parallel.decode_context_parallel_size,
        pcp_world_size=parallel.prefill_context_parallel_size,
        num_hash_lookahead_tokens=vllm_config.num_hash_lookahead_tokens,
        allow_partial_hits=allow_partial_hits,
        enable_events=events is not None and events.enable_kv_cache_events,
        eviction_policy=eviction_policy,
        slot_widths=()
        if shared_config is None
        else slot_widths(shared_config, parallel.tensor_parallel_size, parallel.decode_context_parallel_size),
    )


def blocks_in(kv_cache_config: KVCacheConfig, num_bytes: int) -> int:
    """Blocks of this plan that fit into so many bytes of a rank, at least 1."""
    return blocks_for_bytes(num_bytes, kv_cache_config.num_blocks, gpu_total_bytes(kv_cache_config))


def find_full_attention_group(kv_cache_config: KVCacheConfig, *, or_any: bool = False) -> int:
    """The first cacheable group of full attention, with ``or_any`` else the first one; ``ValueError`` without one."""
    group_ids = kv_cache_config.prefix_cacheable_group_ids
    for group_id in group_ids:
        if is_full_attention_spec(kv_cache_config.kv_cache_groups[group_id].kv_cache_spec):
            return group_id
    if or_any and group_ids:
        return group_ids[0]
    raise ValueError("SimpleCPUOffloadConnector needs a prefix-cacheable group with full attention")


def estimate_lazy_target_blocks(
    kv_cache_config: KVCacheConfig, max_num_batched_tokens: int, cp_world_size: int = 1
) -> int:
    """Free blocks that should be covered by copies: what two steps may take from every cacheable group."""
    blocks = 0
    for group in kv_cache_config.prefix_cacheable_groups:
        spec = group.kv_cache_spec
        size = spec.block_size * (cp_world_size if spec.dcp_sharded else 1)
        window = get_kv_cache_spec_sliding_window(spec)
        if get_kv_cache_spec_kind(spec) is KVCacheSpecKind.MAMBA:
            blocks += 2
        elif window is not None:
            blocks += cdiv(window, size) + 1
        else:
            blocks += cdiv(max_num_batched_tokens, size)
    return 2 * blocks
