"""Token sizes of a plan: scheduler block, hash block, hit alignment, capacity in tokens. Layer: L3.

The scheduler block is the step in which hits of all groups can end, so it is a common multiple of the blocks of the
groups that can be hit. Scratch groups (rings, bounded-replay windows) take no part: they never end a hit, and they only
have to offer a request a whole block.
"""

from __future__ import annotations

import copy
import math
from collections.abc import Sequence
from typing import Protocol, cast

from vllm.config.vllm import VllmConfig
from vllm.v1.core.kv_cache_capacity import max_concurrency
from vllm.v1.kv_cache_config_types import KVCacheConfig, KVCacheGroupSpec
from vllm.v1.kv_cache_spec_base import KVCacheSpec, KVCacheSpecKind, max_model_len_of
from vllm.v1.kv_cache_spec_registry import KVCacheSpecRegistry
from vllm.v1.kv_cache_spec_uniform import UniformTypeKVCacheSpecs, is_full_attention_spec, iter_layer_specs


def resolve_dcp_kv_block_size(kv_cache_spec: KVCacheSpec, dcp_world_size: int) -> int:
    """Tokens of the sequence behind one block id: the block size, times the ranks that share its tokens."""
    return kv_cache_spec.block_size * (dcp_world_size if kv_cache_spec.dcp_sharded else 1)


def resolve_dcp_kv_cache_spec(kv_cache_spec: KVCacheSpec, dcp_world_size: int) -> KVCacheSpec:
    """The spec with the block size that the sequence sees."""
    block_size = resolve_dcp_kv_block_size(kv_cache_spec, dcp_world_size)
    if block_size == kv_cache_spec.block_size:
        return kv_cache_spec
    return kv_cache_spec.copy_with_new_block_size(block_size)


def resolve_kv_cache_block_sizes(kv_cache_config: KVCacheConfig, vllm_config: VllmConfig) -> tuple[int, int]:
    """(scheduler block size, hash block size) in tokens.

    Raises ValueError where `prefix_match_unit` does not divide a group's block, or a hit could end inside a compressed
    state. `vllm_config` may be a record of cache, parallel and transfer config only.
    """
    cache_config = vllm_config.cache_config
    dcp = vllm_config.parallel_config.decode_context_parallel_size
    groups = kv_cache_config.kv_cache_groups
    hashes_needed = bool(cache_config.enable_prefix_caching) or vllm_config.kv_transfer_config is not None
    if len(groups) <= 1:
        base = _base_block_size(vllm_config)
        size = base * dcp if groups and groups[0].kv_cache_spec.dcp_sharded else base
        _require_match_unit_is(size, cache_config.prefix_match_unit, hashes_needed)
        return size, size
    scheduler_block_size = _scheduler_block_size(kv_cache_config, dcp)
    if not hashes_needed or _has_unaligned_states(groups):
        return scheduler_block_size, scheduler_block_size
    cacheable = kv_cache_config.prefix_cacheable_groups or groups
    sizes = [resolve_dcp_kv_block_size(group.kv_cache_spec, dcp) for group in cacheable]
    hash_block_size = cache_config.prefix_match_unit or math.gcd(*sizes)
    for size in sizes:
        if size % hash_block_size:
            raise ValueError(
                f"prefix_match_unit={hash_block_size} does not divide the KV cache block of {size} tokens; "
                f"block sizes of the prefix-cacheable groups: {sizes}"
            )
    _require_whole_states(
        groups,
        resolve_cache_hit_alignment_tokens(
            kv_cache_config, vllm_config, scheduler_block_size, hash_block_size
        ),
    )
    return scheduler_block_size, hash_block_size


def _base_block_size(vllm_config: VllmConfig) -> int:
    block_size = vllm_config.cache_config.block_size
    if block_size is None:
        raise ValueError("cache_config.block_size is not resolved yet")
    return block_size


def _require_match_unit_is(size: int, match_unit: int | None, hashes_needed: bool) -> None:
    if hashes_needed and match_unit is not None and match_unit != size:
        raise ValueError(
            f"prefix_match_unit={match_unit} must equal the block size of {size} tokens for a model with one KV cache "
            "group"
        )


def _scheduler_block_size(kv_cache_config: KVCacheConfig, dcp: int) -> int:
    """Common multiple of the blocks that a hit can end on; of all groups where none can be hit."""
    groups = kv_cache_config.kv_cache_groups
    aligned = [group for group in groups if group.kv_cache_spec.prefix_cacheable] or groups
    for group in groups:
        if group.kv_cache_spec.block_size <= 0:
            raise ValueError(
                f"block size {group.kv_cache_spec.block_size} of a KV cache group is not positive"
            )
    return math.lcm(*(resolve_dcp_kv_block_size(group.kv_cache_spec, dcp) for group in aligned))


def _has_unaligned_states(groups: Sequence[KVCacheGroupSpec]) -> bool:
    """Some recurrent state is kept only for the running request."""
    return any(
        spec.kv_cache_spec_kind is KVCacheSpecKind.MAMBA and not spec.keeps_aligned_states
        for group in groups
        for spec in iter_layer_specs(group.kv_cache_spec)
    )


def _require_whole_states(groups: Sequence[KVCacheGroupSpec], alignment: int) -> None:
    """A hit must not end inside a state that several tokens share."""
    for group in groups:
        for spec in iter_layer_specs(group.kv_cache_spec):
            ratio = spec.tokens_per_state
            if ratio > 1 and ratio == int(ratio) and alignment % int(ratio):
                raise ValueError(
                    f"prefix hits end on multiples of {alignment} tokens, but a layer of group {group.layer_names[:1]} "
                    f"stores one state per {ratio} tokens; choose a prefix_match_unit that is a multiple of it"
                )


def partial_hash_hits_enabled(
    kv_cache_groups: Sequence[KVCacheGroupSpec],
    hash_block_size: int,
    dcp_world_size: int = 1,
    manager_classes: Sequence[type] | None = None,
) -> bool:
    """Hits may end on any hash block instead of scheduler blocks only.

    That needs a recurrent group whose states are further apart than hash blocks, and that every group that can be hit
    either finds prefixes inside a block or has blocks of exactly one hash block. `manager_classes`: one per group,
    where they differ from the registered ones.
    """
    hittable = [i for i, group in enumerate(kv_cache_groups) if _is_hittable(group)]
    if not any(_gains_by_fine_hits(kv_cache_groups[i], hash_block_size, dcp_world_size) for i in hittable):
        return False
    for i in hittable:
        group = kv_cache_groups[i]
        if resolve_dcp_kv_block_size(group.kv_cache_spec, dcp_world_size) == hash_block_size:
            continue
        manager = manager_classes[i] if manager_classes is not None else _manager_class(group)
        if not _finds_partial_blocks(manager):
            return False
    return True


def _gains_by_fine_hits(group: KVCacheGroupSpec, hash_block_size: int, dcp_world_size: int) -> bool:
    if not group.kv_cache_spec.keeps_aligned_states:
        return False
    block_size = resolve_dcp_kv_block_size(group.kv_cache_spec, dcp_world_size)
    return block_size > hash_block_size or (dcp_world_size > 1 and block_size == hash_block_size)


def _is_hittable(group: KVCacheGroupSpec) -> bool:
    return group.enable_kv_transfer and group.kv_cache_spec.prefix_cacheable


def _manager_class(group: KVCacheGroupSpec) -> type:
    return KVCacheSpecRegistry.get_manager_class(group.kv_cache_spec, group.role)


class _ManagerFlags(Protocol):
    """The class attribute of a manager that matters here; the classes live in modules that only strings name."""

    supports_fine_grained_hash_lookup: bool


def _finds_partial_blocks(manager_class: type) -> bool:
    return cast(_ManagerFlags, manager_class).supports_fine_grained_hash_lookup


def resolve_cache_hit_alignment_tokens(
    kv_cache_config: KVCacheConfig, vllm_config: VllmConfig, scheduler_block_size: int, hash_block_size: int
) -> int:
    """Tokens on whose multiples prefix hits end."""
    dcp = vllm_config.parallel_config.decode_context_parallel_size
    fine = hash_block_size < scheduler_block_size and partial_hash_hits_enabled(
        kv_cache_config.kv_cache_groups, hash_block_size, dcp
    )
    return hash_block_size if fine else scheduler_block_size


def resolve_effective_attention_block_size(kv_cache_config: KVCacheConfig, dcp_world_size: int) -> int | None:
    """The one block size, as the sequence sees it, that all full-attention groups share; None if they differ."""
    sizes = {
        resolve_dcp_kv_block_size(group.kv_cache_spec, dcp_world_size)
        for group in kv_cache_config.kv_cache_groups
        if is_full_attention_spec(group.kv_cache_spec)
    }
    return sizes.pop() if len(sizes) == 1 else None


def smallest_cacheable_block_size(kv_cache_config: KVCacheConfig) -> int | None:
    """The block size that `cache_config.block_size` reports after planning; None if no group can be hit."""
    return min((g.kv_cache_spec.block_size for g in kv_cache_config.prefix_cacheable_groups), default=None)


def generate_scheduler_kv_cache_config(kv_cache_configs: Sequence[KVCacheConfig]) -> KVCacheConfig:
    """The plan as the scheduler sees it: rank 0's, with one member standing for each uniform group.

    Raises AssertionError unless all ranks have the same number of blocks and groups.
    """
    first = kv_cache_configs[0]
    for config in kv_cache_configs:
        if (config.num_blocks, len(config.kv_cache_groups)) != (first.num_blocks, len(first.kv_cache_groups)):
            raise AssertionError("all ranks must plan the same number of blocks and groups")
    scheduler_config = copy.deepcopy(first)
    for group in scheduler_config.kv_cache_groups:
        if isinstance(group.kv_cache_spec, UniformTypeKVCacheSpecs):
            group.bytes_per_block = group.kv_cache_spec.page_size_bytes
            group.kv_cache_spec = group.kv_cache_spec.first_spec
    return scheduler_config


def get_max_concurrency_for_kv_cache_config(vllm_config: VllmConfig, kv_cache_config: KVCacheConfig) -> float:
    """How many requests of `max_model_len` tokens fit at once."""
    return max_concurrency(vllm_config, kv_cache_config.kv_cache_groups, kv_cache_config.num_blocks)


def get_kv_cache_capacity(vllm_config: VllmConfig, kv_cache_config: KVCacheConfig) -> tuple[int, float]:
    """(tokens that fit if all requests are of `max_model_len`, how many such requests fit)."""
    concurrency = get_max_concurrency_for_kv_cache_config(vllm_config, kv_cache_config)
    return int(concurrency * max_model_len_of(vllm_config)), concurrency
