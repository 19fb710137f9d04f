"""Public helpers round the worker's KV cache. Layer: L6."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from vllm.v1.attention.backend import AttentionBackend
from vllm.v1.kv_cache_interface import KVCacheGroupSpec, KVCacheSpec
from vllm.v1.worker.kv_cache_alloc import allocate_kv_cache


@dataclass
class AttentionGroup:
    """Layers of one KV cache group that run on the same backend."""

    backend: type[AttentionBackend]
    layer_names: list[str]
    kv_cache_spec: KVCacheSpec
    kv_cache_group_id: int
    # Builders are a backend's own objects.
    metadata_builders: list[Any] = field(default_factory=list)


def add_kv_sharing_layers_to_kv_cache_groups(
    shared_kv_cache_layers: Mapping[str, str],
    kv_cache_groups: Sequence[KVCacheGroupSpec],
    runner_only_attn_layers: set[str] | None = None,
) -> None:
    """Append each layer that uses another one's cache to that one's group; they get no memory of their own.

    `shared_kv_cache_layers`: layer → layer that owns the cache. `ValueError` if an owner is in no group.
    """
    group_of = {name: group for group in kv_cache_groups for name in group.layer_names}
    for layer, owner in shared_kv_cache_layers.items():
        if owner not in group_of:
            raise ValueError(f"layer {layer} shares the KV cache of {owner}, which is in no KV cache group")
        group_of[owner].layer_names.append(layer)
        if runner_only_attn_layers is not None:
            runner_only_attn_layers.add(layer)


__all__ = ["AttentionGroup", "add_kv_sharing_layers_to_kv_cache_groups", "allocate_kv_cache"]
