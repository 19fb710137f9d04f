"""What a spec from outside is told about the engine, read out of the public configuration.

Owns the translation. It must not know specs, nor decide anything. Layer L4.
"""

from __future__ import annotations

from dataclasses import dataclass

from vllm.config import VllmConfig
from vllm.distributed.kv_transfer.kv_connector.v1.offloading.events import OffloadingEventGroupSpec
from vllm.utils.math_utils import cdiv
from vllm.v1.core.kv_cache_sizes import resolve_kv_cache_block_sizes
from vllm.v1.core.kv_cache_view import gpu_total_bytes
from vllm.v1.kv_cache_interface import (
    KVCacheConfig,
    KVCacheSpec,
    KVCacheSpecKind,
    get_kv_cache_spec_kind,
    get_kv_cache_spec_sliding_window,
)
from vllm.v1.kv_offload.base import OffloadingSpec
from vllm.v1.kv_offload.config import (
    OffloadingCacheConfig,
    OffloadingConfig,
    OffloadingGroupConfig,
    OffloadingModelConfig,
    OffloadingParallelConfig,
)

BLOCKS_PER_CHUNK = 1
"""Blocks are offered one by one: a key stands for one."""


def get_offloading_group_ids(kv_cache_config: KVCacheConfig) -> tuple[int, ...]:
    """Ids of the groups that are offloaded, among all groups. ``ValueError`` if there are none."""
    group_ids = tuple(kv_cache_config.prefix_cacheable_group_ids)
    if not group_ids:
        raise ValueError("KV offloading found no eligible cache groups.")
    return group_ids


def get_sliding_window_size_in_chunks(spec: KVCacheSpec, tokens_per_chunk: int) -> int | None:
    """How many chunks before its end a hit needs of such layers; None = all of them."""
    if get_kv_cache_spec_kind(spec) is KVCacheSpecKind.MAMBA:
        return 1
    window = get_kv_cache_spec_sliding_window(spec)
    return None if window is None else max(1, cdiv(window - 1, tokens_per_chunk))


def build_offloading_config(vllm_config: VllmConfig, kv_cache_config: KVCacheConfig) -> OffloadingConfig:
    """The engine as a spec sees it. ``ValueError`` if no group can be offloaded."""
    cache, model = vllm_config.cache_config, vllm_config.model_config
    parallel, events = vllm_config.parallel_config, vllm_config.kv_events_config
    transfer = vllm_config.kv_transfer_config
    _, hash_block_size = resolve_kv_cache_block_sizes(kv_cache_config, vllm_config)
    groups = []
    for group_id in get_offloading_group_ids(kv_cache_config):
        group = kv_cache_config.kv_cache_groups[group_id]
        spec = group.kv_cache_spec
        shards = parallel.decode_context_parallel_size if spec.dcp_sharded else 1
        tokens = spec.block_size * shards * parallel.prefill_context_parallel_size
        window = get_sliding_window_size_in_chunks(spec, tokens * BLOCKS_PER_CHUNK)
        groups.append(OffloadingGroupConfig(tokens, tuple(group.layer_names), group_id, window))
    return OffloadingConfig(
        groups=tuple(groups),
        worker_kv_bytes_per_block=gpu_total_bytes(kv_cache_config) // max(1, kv_cache_config.num_blocks),
        enable_kv_cache_events=events is not None and events.enable_kv_cache_events,
        extra_config={} if transfer is None else transfer.kv_connector_extra_config,
        engine_id=None if transfer is None else transfer.engine_id,
        model=OffloadingModelConfig(
            "" if model is None else str(model.model),
            str(cache.cache_dtype if model is None or cache.cache_dtype != "auto" else model.dtype),
            0 if model is None else model.max_model_len or 0,
        ),
        cache=OffloadingCacheConfig(hash_block_size, BLOCKS_PER_CHUNK),
        parallel=OffloadingParallelConfig(
            rank=parallel.rank,
            world_size=parallel.world_size,
            tp_size=parallel.tensor_parallel_size,
            pp_size=parallel.pipeline_parallel_size,
            pcp_size=parallel.prefill_context_parallel_size,
            dcp_size=parallel.decode_context_parallel_size,
            data_parallel_index=parallel.data_parallel_index,
            data_parallel_size=parallel.replicas_on_node,
            data_parallel_rank_local=parallel.data_parallel_index,
            # Pages have the layout of their rank.
            is_parallelism_agnostic=False,
        ),
        kv_cache_layout=None if cache.kv_cache_layout is None else str(cache.kv_cache_layout),
    )


@dataclass(frozen=True, slots=True)
class GroupOffloadConfig:
    """One offloaded group: its id among all groups, tokens per block, and how it is told of in events."""

    group_id: int
    tokens_per_block: int
    event_spec: OffloadingEventGroupSpec


@dataclass(frozen=True, slots=True)
class SchedulerOffloadConfig:
    """What the scheduler half takes from the engine's configuration."""

    groups: tuple[GroupOffloadConfig, ...]
    scheduler_block_size: int
    hash_block_size: int
    num_slots: int
    offload_prompt_only: bool
    self_describing_kv_events: bool

    @classmethod
    def from_spec(
        cls, spec: OffloadingSpec, vllm_config: VllmConfig, kv_cache_config: KVCacheConfig
    ) -> SchedulerOffloadConfig:
        """Read once; ``ValueError`` if no group can be offloaded."""
        sizes = resolve_kv_cache_block_sizes(kv_cache_config, vllm_config)
        tokens = {group.group_id: group.tokens_per_block for group in spec.config.groups}
        groups = []
        for group_id in get_offloading_group_ids(kv_cache_config):
            layers = kv_cache_config.kv_cache_groups[group_id].kv_cache_spec
            about = OffloadingEventGroupSpec(
                get_kv_cache_spec_kind(layers).value, get_kv_cache_spec_sliding_window(layers)
            )
            groups.append(GroupOffloadConfig(group_id, tokens.get(group_id, layers.block_size), about))
        extra = spec.config.extra_config
        return cls(
            tuple(groups),
            *sizes,
            # As many names as there can be blocks: of content that is found, promised or on its way.
            num_slots=2 * kv_cache_config.num_blocks + 1,
            offload_prompt_only=bool(extra.get("offload_prompt_only", True)),
            self_describing_kv_events=bool(extra.get("self_describing_kv_events", False)),
        )
