"""Specs of all ranks and their memory → one `KVCacheConfig` per rank. Layer: L3.

Joins grouping, placement and capacity; owns what concerns several ranks at once: equal group ids everywhere, an equal
number of blocks, pipeline stages that hold part of a group. Must not know devices; bytes are given to it.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import replace

from vllm.config.model import ModelConfig
from vllm.config.vllm import VllmConfig
from vllm.logger import init_logger
from vllm.v1.core.kv_cache_capacity import (
    RankMemory,
    common_num_blocks,
    largest_fitting_len,
    may_override_num_blocks,
    require_available_memory,
    require_room_for_one_request,
    require_usable_override,
)
from vllm.v1.core.kv_cache_config_builder import KVCacheConfigBuilder, get_kv_cache_config_builder
from vllm.v1.core.kv_cache_grouping import Specs, check_every_layer_once, group_layers
from vllm.v1.core.kv_cache_placement import group_waste, layer_spec, place_groups
from vllm.v1.core.kv_cache_plan_inputs import read_plan_inputs
from vllm.v1.kv_cache_config_types import KVCacheConfig, KVCacheGroupSpec
from vllm.v1.kv_cache_spec_base import KVCacheSpec, max_model_len_of
from vllm.v1.kv_cache_spec_registry import KVCacheSpecRegistry
from vllm.v1.kv_cache_spec_uniform import UniformTypeKVCacheSpecs, is_full_attention_spec, iter_layer_specs

logger = init_logger(__name__)


class DefaultKVCacheConfigBuilder(KVCacheConfigBuilder):
    """Grouping by the rules of kv_cache_grouping.py, or by the model class if it brings its own."""

    def get_kv_cache_groups(
        self, vllm_config: VllmConfig, kv_cache_spec: Mapping[str, KVCacheSpec]
    ) -> list[KVCacheGroupSpec]:
        inputs = read_plan_inputs(vllm_config)
        model_config = vllm_config.model_config
        if model_config is None or not model_config.supports_kv_cache_grouping:
            return group_layers(inputs, kv_cache_spec)
        if inputs.hisparse_requested:
            raise ValueError("hisparse_config cannot be combined with a model that groups its own KV caches")
        model_cls = model_config.registry.resolve_model_cls(model_config.architectures)
        groups: list[KVCacheGroupSpec] = model_cls.get_kv_cache_groups(vllm_config, kv_cache_spec)
        return groups

    def get_kv_cache_config_from_groups(
        self, vllm_config: VllmConfig, kv_cache_groups: Sequence[KVCacheGroupSpec], num_blocks: int
    ) -> KVCacheConfig:
        inputs = read_plan_inputs(vllm_config)
        groups = list(kv_cache_groups)
        return KVCacheConfig(
            num_blocks=num_blocks if groups else 1,
            kv_cache_tensors=place_groups(inputs.layout, groups, num_blocks),
            kv_cache_groups=groups,
            prefix_cache_retention_interval=inputs.retention_interval,
            kv_cache_layout=str(inputs.layout),
            hash_block_size=inputs.hash_block_size,
            cache_hit_alignment_tokens=inputs.cache_hit_alignment_tokens,
            kv_tp_replicas=kv_cache_groups_tp_replicas(groups, inputs.tp_size, inputs.dcp_size),
        )


def get_kv_cache_groups(vllm_config: VllmConfig, kv_cache_spec: Specs) -> list[KVCacheGroupSpec]:
    """Groups of these layers by the default rules."""
    return group_layers(read_plan_inputs(vllm_config), kv_cache_spec)


def get_kv_cache_groups_from_builder(
    builder: KVCacheConfigBuilder, vllm_config: VllmConfig, kv_cache_spec: Specs
) -> list[KVCacheGroupSpec]:
    """Groups of these layers by `builder`. ValueError unless every layer is in exactly one."""
    groups = builder.get_kv_cache_groups(vllm_config, kv_cache_spec)
    check_every_layer_once(kv_cache_spec, groups)
    return groups


def get_global_kv_cache_groups(
    vllm_config: VllmConfig, kv_cache_specs: Sequence[Specs]
) -> list[KVCacheGroupSpec]:
    """Groups of the whole model from the layers of all ranks.

    Raises ValueError for a layer whose specs differ between ranks, or whose kind is not registered.
    """
    merged = _merge_ranks(kv_cache_specs)
    KVCacheSpecRegistry.check_kv_cache_spec_registry(merged)
    _check_replay(merged)
    inputs = read_plan_inputs(vllm_config)
    if inputs.extra_retained_tokens:
        merged = {n: s.with_retained_tokens(inputs.extra_retained_tokens) for n, s in merged.items()}
    groups = get_kv_cache_groups_from_builder(get_kv_cache_config_builder(vllm_config), vllm_config, merged)
    for group in groups:
        group.is_eagle_group = inputs.drafter_drops_block and any(
            merged[name].is_draft for name in group.layer_names
        )
    return groups


def _merge_ranks(kv_cache_specs: Sequence[Specs]) -> dict[str, KVCacheSpec]:
    merged: dict[str, KVCacheSpec] = {}
    for rank, specs in enumerate(kv_cache_specs):
        for name, spec in specs.items():
            known = merged.setdefault(name, spec)
            if known != spec:
                raise ValueError(
                    f"Layer {name!r} has different KV cache specs on the ranks: {known} and, on rank {rank}, {spec}"
                )
    return merged


def _check_replay(specs: Specs) -> None:
    """A replay computes tokens before a hit's end again, so every other cache must still hold what they read.

    Raises ValueError naming a layer whose cache keeps only the end of a prefix, or windows that do not begin together.
    """
    windows = sorted({spec.prefix_replay_tokens for spec in specs.values()} - {0})
    if not windows:
        return
    if len(windows) > 1:
        raise ValueError(
            f"swa_bounded_replay needs windows of one size, but the layers have {windows}; set swa_bounded_replay=False "
            "for this model"
        )
    for name, spec in specs.items():
        if spec.prefix_cacheable and not is_full_attention_spec(spec):
            raise ValueError(
                f"swa_bounded_replay needs caches that keep whole prefixes, but layer {name!r} is "
                f"{spec.kv_cache_spec_kind.value}; set swa_bounded_replay=False for this model"
            )


def project_groups(groups: Sequence[KVCacheGroupSpec], kv_cache_spec: Specs) -> list[KVCacheGroupSpec]:
    """The groups as one rank holds them: same ids, only its layers. A group may be empty on a rank."""
    projected = []
    for group in groups:
        names = [name for name in group.layer_names if name in kv_cache_spec]
        spec = group.kv_cache_spec
        if names and isinstance(spec, UniformTypeKVCacheSpecs):
            spec = replace(spec, kv_cache_specs={name: layer_spec(group, name) for name in names})
        projected.append(replace(group, layer_names=names, kv_cache_spec=spec))
    return projected


def get_kv_cache_config_from_groups(
    vllm_config: VllmConfig, kv_cache_groups: Sequence[KVCacheGroupSpec], available_memory: int
) -> KVCacheConfig:
    """The plan of one rank for that many bytes (or for `num_gpu_blocks_override`)."""
    builder = get_kv_cache_config_builder(vllm_config)
    memory = RankMemory(available_memory, _bytes_per_block(builder, vllm_config, kv_cache_groups))
    num_blocks = may_override_num_blocks(vllm_config, memory.num_blocks or 0)
    return builder.get_kv_cache_config_from_groups(vllm_config, kv_cache_groups, num_blocks)


def _bytes_per_block(
    builder: KVCacheConfigBuilder, vllm_config: VllmConfig, groups: Sequence[KVCacheGroupSpec]
) -> int:
    """Bytes of one block by the builder's own placement, which grows linearly with the number of blocks."""
    config = builder.get_kv_cache_config_from_groups(vllm_config, groups, 1)
    return max((t.size for t in config.kv_cache_tensors if not t.host_resident), default=0)


def get_kv_cache_configs(
    vllm_config: VllmConfig,
    kv_cache_specs: Sequence[Specs],
    available_memory: Sequence[int],
    global_kv_cache_groups: Sequence[KVCacheGroupSpec],
) -> list[KVCacheConfig]:
    """One plan per rank, all with the same number of blocks and the same group ids.

    With `original_max_model_len == -1` the largest length that fits is written to `model_config.max_model_len`.
    Raises ValueError if a request of `max_model_len` does not fit. `num_gpu_blocks_override` skips the memory checks,
    with a warning where such a request does not fit; one in which no request at all fits is refused.
    """
    if len(kv_cache_specs) != len(available_memory):
        raise ValueError(f"{len(kv_cache_specs)} ranks have specs but {len(available_memory)} have memory")
    builder = get_kv_cache_config_builder(vllm_config)
    per_rank = [project_groups(global_kv_cache_groups, specs) for specs in kv_cache_specs]
    ranks = [
        RankMemory(bytes_, _bytes_per_block(builder, vllm_config, groups))
        for bytes_, groups in zip(available_memory, per_rank, strict=True)
    ]
    num_blocks = _agree_on_num_blocks(vllm_config, global_kv_cache_groups, ranks)
    configs = [builder.get_kv_cache_config_from_groups(vllm_config, g, num_blocks) for g in per_rank]
    _report(vllm_config, global_kv_cache_groups, ranks, num_blocks)
    return configs


def _agree_on_num_blocks(
    vllm_config: VllmConfig, groups: Sequence[KVCacheGroupSpec], ranks: Sequence[RankMemory]
) -> int:
    """The block count of every rank, after the checks; may lower `max_model_len` if that was left to the engine."""
    inputs = read_plan_inputs(vllm_config)
    fitting = common_num_blocks(ranks)
    if fitting is None:  # no rank caches anything
        return 1
    if inputs.num_blocks_override is not None:
        num_blocks = may_override_num_blocks(vllm_config, fitting)
        require_usable_override(groups, num_blocks)
    else:
        for rank in ranks:
            if rank.bytes_per_block:
                require_available_memory(rank.available_bytes)
        num_blocks = fitting
    model_config = vllm_config.model_config
    if model_config is not None and model_config.original_max_model_len == -1:
        _fit_max_model_len(vllm_config, model_config, groups, num_blocks)
    if inputs.num_blocks_override is None:
        for rank in ranks:
            require_room_for_one_request(vllm_config, groups, rank)
    elif largest_fitting_len(vllm_config, groups, num_blocks) < max_model_len_of(vllm_config):
        logger.warning(
            "num_gpu_blocks_override=%d is too small for one request of max_model_len=%d tokens",
            num_blocks,
            max_model_len_of(vllm_config),
        )
    return num_blocks


def _fit_max_model_len(
    vllm_config: VllmConfig, model_config: ModelConfig, groups: Sequence[KVCacheGroupSpec], num_blocks: int
) -> None:
    """Write the largest length that fits; leave the length alone if none does, so that the check explains it."""
    fitted = largest_fitting_len(vllm_config, groups, num_blocks)
    if 0 < fitted < max_model_len_of(vllm_config):
        logger.info("max_model_len=-1: the largest length that fits the KV cache is %d", fitted)
        model_config.max_model_len = fitted


def _report(
    vllm_config: VllmConfig,
    groups: Sequence[KVCacheGroupSpec],
    ranks: Sequence[RankMemory],
    num_blocks: int,
) -> None:
    if not groups:
        return
    widest = max(rank.bytes_per_block for rank in ranks)
    wastes = group_waste(read_plan_inputs(vllm_config).layout, groups)
    unused = ", ".join(f"{w.wasted_bytes / max(1, w.used_bytes + w.wasted_bytes):.0%}" for w in wastes)
    logger.info(
        "KV cache: %d blocks of %d bytes for %d groups, which leave unused of a block of theirs: %s",
        num_blocks,
        widest,
        len(groups),
        unused,
    )
    for waste in wastes:
        logger.debug(
            "KV cache group %d: %d bytes of a block used, %d unused",
            waste.group_id,
            waste.used_bytes,
            waste.wasted_bytes,
        )


def check_enough_kv_cache_memory(
    vllm_config: VllmConfig, kv_cache_spec: Specs, available_memory: int
) -> None:
    """Raise ValueError if these layers cannot serve one request of `max_model_len` in that many bytes."""
    if not kv_cache_spec:
        return
    require_available_memory(available_memory)
    groups, memory = _groups_and_memory(vllm_config, kv_cache_spec, available_memory)
    require_room_for_one_request(vllm_config, groups, memory)


def estimate_max_model_len(vllm_config: VllmConfig, kv_cache_spec: Specs, available_memory: int) -> int:
    """The largest length up to `max_model_len` that fits into that many bytes; 0 if none does."""
    groups, memory = _groups_and_memory(vllm_config, kv_cache_spec, available_memory)
    if memory.num_blocks is None:
        return max_model_len_of(vllm_config)
    return largest_fitting_len(vllm_config, groups, memory.num_blocks)


def _groups_and_memory(
    vllm_config: VllmConfig, kv_cache_spec: Specs, available_memory: int
) -> tuple[list[KVCacheGroupSpec], RankMemory]:
    builder = get_kv_cache_config_builder(vllm_config)
    groups = get_kv_cache_groups_from_builder(builder, vllm_config, kv_cache_spec)
    return groups, RankMemory(available_memory, _bytes_per_block(builder, vllm_config, groups))


def kv_cache_groups_tp_replicas(groups: Sequence[KVCacheGroupSpec], tp_size: int, dcp_size: int = 1) -> int:
    """How many tensor-parallel ranks hold identical bytes in every group; 1 if any group is split or not known."""
    replicas = [
        spec.tp_replicas(tp_size, dcp_size) for g in groups for spec in iter_layer_specs(g.kv_cache_spec)
    ]
    return math.gcd(*replicas) if replicas else 1


def is_kv_cache_type_attention_free(kv_cache_spec: Specs) -> bool:
    """No layer caches anything."""
    return not kv_cache_spec
