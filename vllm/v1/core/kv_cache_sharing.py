"""KV sharing: layers that read the cache of another layer and have none of their own. Layer: L3.

Owns what may be shared and the report of it. A model names, for each such layer, the layer that owns the cache. The
plan knows owners alone, so sharing layers take no bytes, are copied by no connector and need no block of their own; a
worker binds them to the owner's pages and gives them the metadata of the owner's group. Must not know models, pages.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence

from vllm.logger import init_logger
from vllm.v1.core.kv_cache_grouping import Specs
from vllm.v1.kv_cache_config_types import KVCacheConfig

logger = init_logger(__name__)

SharedLayers = Mapping[str, str]
"""Sharing layer -> layer that owns the cache."""


def check_kv_sharing(specs: Specs, targets: SharedLayers) -> None:
    """Raise ValueError naming the first layer that cannot share its target's cache, and why.

    `specs`: every cache that the layers of one rank read, in the order in which they run; those of sharing layers say
    what they expect to find.
    """
    for name, target in targets.items():
        problem = _problem(specs, targets, name, target)
        if problem is not None:
            raise ValueError(f"layer {name!r} cannot share the KV cache of {target!r}: {problem}")


def _problem(specs: Specs, targets: SharedLayers, name: str, target: str) -> str | None:
    if name not in specs:
        return "the sharing layer is no layer of the model"
    if target not in specs:
        return "no layer of this rank has the latter name"
    if name == target:
        return "a layer cannot be its own target"
    if target in targets:
        return f"that one itself shares the cache of {targets[target]!r}"
    order = list(specs)
    if order.index(target) > order.index(name):
        return "that one runs later, so its keys and values would not be there yet"
    if not specs[name].uses_slot_mapping:
        return f"{type(specs[name]).__name__} does not keep a row for each token"
    if specs[name] != specs[target]:
        return f"it reads {specs[name]}, but finds {specs[target]}"
    return None


def merge_kv_sharing(per_rank: Sequence[SharedLayers], kv_cache_specs: Sequence[Specs]) -> dict[str, str]:
    """The sharing layers of the whole model with their targets.

    `kv_cache_specs`: the caches that each rank owns. Raises ValueError, naming layer and rank, for ranks that disagree,
    for a layer that has a cache of its own too, and for a target that the same rank (the same pipeline stage, that is)
    does not own.
    """
    if len(per_rank) != len(kv_cache_specs):
        raise ValueError(
            f"{len(per_rank)} ranks tell which layers share, but {len(kv_cache_specs)} have specs"
        )
    merged: dict[str, str] = {}
    for rank, targets in enumerate(per_rank):
        owned = kv_cache_specs[rank]
        for name, target in targets.items():
            known = merged.setdefault(name, target)
            if known != target:
                raise ValueError(
                    f"layer {name!r} shares the KV cache of {known!r} and, on rank {rank}, that of {target!r}"
                )
            if target not in owned:
                raise ValueError(
                    f"layer {name!r} shares the KV cache of {target!r}, which rank {rank} does not own: both must run "
                    f"on the same pipeline stage"
                )
    for rank, owned in enumerate(kv_cache_specs):
        doubled = [name for name in merged if name in owned]
        if doubled:
            raise ValueError(
                f"layer {doubled[0]!r} shares the KV cache of {merged[doubled[0]]!r} but has one of its own "
                f"on rank {rank}"
            )
    return merged


def note_kv_sharing(kv_cache_config: KVCacheConfig, sharing: SharedLayers) -> None:
    """Write into each group how many layers read its caches beside those that own them, and tell of it."""
    if not sharing:
        return
    readers = Counter(sharing.values())
    for group in kv_cache_config.kv_cache_groups:
        group.num_sharing_layers = sum(readers[name] for name in group.layer_names)
    owners = sum(len(group.layer_names) for group in kv_cache_config.kv_cache_groups)
    logger.info(
        "KV cache: %d of %d layers read the cache of another layer and take no memory of it",
        len(sharing),
        owners + len(sharing),
    )
