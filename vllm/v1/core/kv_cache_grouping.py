"""Layers → groups: which layers share a block table. Layer: L3.

Owns the order in which the grouping rules are tried, and each rule. Must not know memory sizes of a device or block
counts (kv_cache_capacity.py), nor where a page lies (kv_cache_placement.py).
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence

from vllm.logger import init_logger
from vllm.utils.math_utils import cdiv
from vllm.v1.core.kv_cache_plan_inputs import PlanInputs
from vllm.v1.kv_cache_config_types import KVCacheGroupSpec
from vllm.v1.kv_cache_spec_base import KVCacheSpec, KVCacheSpecKind
from vllm.v1.kv_cache_spec_uniform import (
    UniformTypeKVCacheSpecs,
    get_kv_cache_spec_sliding_window,
    group_sharing_key,
    is_full_attention_spec,
)

logger = init_logger(__name__)

# A group may be up to this much longer than the shortest bucket, at the price of padding layers in the others.
_MAX_PADDING_RATIO = 1.5

Specs = Mapping[str, KVCacheSpec]


def group_layers(inputs: PlanInputs, kv_cache_specs: Specs) -> list[KVCacheGroupSpec]:
    """Groups of these layers by the first rule that applies; `[]` without layers.

    Raises ValueError where no rule applies, naming what stands in the way.
    """
    groups = _group_by_rules(inputs, kv_cache_specs)
    for group in groups:
        group.enable_kv_transfer = group.kv_cache_spec.transferable
    return groups


def _group_by_rules(inputs: PlanInputs, kv_cache_specs: Specs) -> list[KVCacheGroupSpec]:
    specs = dict(kv_cache_specs)
    if inputs.hybrid_manager_disabled:
        unify_hybrid_kv_cache_specs(specs)
    if not specs:
        return []
    if inputs.hisparse_requested:
        raise ValueError(
            "attention_config.hisparse_config is set, but this engine has no host-sparse KV cache; "
            "remove it, or offload with --kv-offloading-size"
        )
    merged = merge_or_none(list(specs.values()))
    if merged is not None:
        return [KVCacheGroupSpec(list(specs), merged)]
    uniform = UniformTypeKVCacheSpecs.from_specs(specs)
    if uniform is not None:
        return [KVCacheGroupSpec(list(specs), uniform)]
    if inputs.hybrid_manager_disabled:
        kinds = sorted({spec.kv_cache_spec_kind.value for spec in specs.values()})
        raise ValueError(
            f"disable_hybrid_kv_cache_manager is set, but the layers' caches cannot be made one type: {kinds}"
        )
    if inputs.layout.is_block_outermost and len({s.page_size_bytes for s in specs.values()}) > 1:
        return _packed_groups(specs)
    return _uniform_page_groups(_unified_pages(specs))


def merge_or_none(specs: Sequence[KVCacheSpec]) -> KVCacheSpec | None:
    """The one spec of these layers, or None if they cannot share a spec."""
    if any(type(spec) is not type(specs[0]) for spec in specs):
        return None
    try:
        return type(specs[0]).merge(specs)
    except (AssertionError, ValueError):
        return None


def is_kv_cache_spec_uniform(kv_cache_specs: Specs) -> bool:
    """All layers can share one spec; true without layers."""
    return not kv_cache_specs or merge_or_none(list(kv_cache_specs.values())) is not None


def create_kv_cache_group_specs(
    kv_cache_specs: Specs, grouped_layer_names: Iterable[Sequence[str]]
) -> list[KVCacheGroupSpec]:
    """One group per list of names, with the merged spec. AssertionError or ValueError if a list cannot merge."""
    groups = []
    for names in grouped_layer_names:
        members = [kv_cache_specs[name] for name in names]
        groups.append(KVCacheGroupSpec(list(names), type(members[0]).merge(members)))
    return groups


def unify_hybrid_kv_cache_specs(kv_cache_specs: dict[str, KVCacheSpec]) -> None:
    """Where full attention and windowed or chunked layers coexist, make the latter full attention, in place."""
    full_block_sizes = [s.block_size for s in kv_cache_specs.values() if is_full_attention_spec(s)]
    if not full_block_sizes:
        return
    for name, spec in kv_cache_specs.items():
        kv_cache_specs[name] = spec.as_full_attention(full_block_sizes[0])


def unify_kv_cache_spec_page_size(kv_cache_specs: Specs) -> dict[str, KVCacheSpec]:
    """The same layers with equal pages: the largest page wins, others get more tokens or padding.

    Raises NotImplementedError naming the first layer whose page can become neither.
    """
    target = max(spec.page_size_bytes for spec in kv_cache_specs.values())
    unified = {}
    for name, spec in kv_cache_specs.items():
        wider = spec.with_page_size(target)
        if wider is None:
            raise NotImplementedError(
                f"Layer {name!r}: its page of {spec.page_size_bytes} bytes cannot be made {target} bytes, the page of "
                f"the largest layer; choose block sizes whose pages divide it, or a block-outermost layout"
            )
        unified[name] = wider
    return unified


def get_uniform_page_size(kv_cache_specs: Iterable[KVCacheSpec]) -> int:
    """The one page size of these specs, in bytes. AssertionError if they differ."""
    sizes = sorted({spec.page_size_bytes for spec in kv_cache_specs})
    if len(sizes) != 1:
        raise AssertionError(f"expected one page size, got {sizes}")
    return sizes[0]


def _unified_pages(specs: dict[str, KVCacheSpec]) -> dict[str, KVCacheSpec]:
    """Equal pages; latent plus plain window layers fall back to full attention where that cannot be."""
    try:
        return unify_kv_cache_spec_page_size(specs)
    except NotImplementedError as error:
        kinds = {spec.kv_cache_spec_kind for spec in specs.values()}
        if kinds != {KVCacheSpecKind.MLA_ATTENTION, KVCacheSpecKind.SLIDING_WINDOW}:
            raise
        logger.warning("%s. Windowed layers keep all their tokens instead.", error)
    full = dict(specs)
    unify_hybrid_kv_cache_specs(full)
    return unify_kv_cache_spec_page_size(full)


def _mergeable_buckets(specs: Specs) -> list[list[str]]:
    """Layers by mergeable spec, in order of first appearance."""
    buckets: list[list[str]] = []
    for name, spec in specs.items():
        for bucket in buckets:
            if merge_or_none([*(specs[other] for other in bucket), spec]) is not None:
                bucket.append(name)
                break
        else:
            buckets.append([name])
    return buckets


def _uniform_page_groups(specs: Specs) -> list[KVCacheGroupSpec]:
    """Groups of about equal length over equal pages; the longest one sets the width of a block."""
    buckets = _mergeable_buckets(specs)
    shortest = min(len(bucket) for bucket in buckets)
    longest = max(len(bucket) for bucket in buckets)
    size = longest if longest < _MAX_PADDING_RATIO * shortest else shortest
    names = [part for bucket in buckets for part in _interleaved(bucket, cdiv(len(bucket), size))]
    return create_kv_cache_group_specs(specs, names)


def _interleaved(names: Sequence[str], parts: int) -> list[list[str]]:
    """`parts` lists that take turns, so that every pipeline stage has its share of each."""
    return [list(names[i::parts]) for i in range(parts)]


def _packed_groups(specs: Specs) -> list[KVCacheGroupSpec]:
    """Pages of different sizes side by side in one block.

    Layers that can share a block table form a bucket. State, ring and (if nothing else is split) window buckets are
    split into as few groups as keep each within the width of the other buckets, so that they never widen a block.
    """
    buckets: dict[tuple[object, ...], list[str]] = {}
    for name, spec in specs.items():
        buckets.setdefault(group_sharing_key(spec), []).append(name)
    split, whole = _choose_split_buckets(specs, list(buckets.values()))
    widths = [_width(specs, bucket) for bucket in whole] or [min(_width(specs, bucket) for bucket in split)]
    widest_page = max(spec.page_size_bytes for spec in specs.values())
    limit = max(*widths, widest_page)
    grouped = [*whole, *(part for bucket in split for part in _split_to_width(specs, bucket, limit))]
    return [KVCacheGroupSpec(names, _group_spec(specs, names)) for names in grouped]


def _choose_split_buckets(
    specs: Specs, buckets: Sequence[list[str]]
) -> tuple[list[list[str]], list[list[str]]]:
    """(buckets that are split to fit, buckets that set the width of a block)."""

    def always_split(bucket: list[str]) -> bool:
        spec = specs[bucket[0]]
        return spec.kv_cache_spec_kind is KVCacheSpecKind.MAMBA or spec.block_table_token_alignment is None

    split = [bucket for bucket in buckets if always_split(bucket)]
    whole = [bucket for bucket in buckets if not always_split(bucket)]
    if not split:
        split = [b for b in whole if get_kv_cache_spec_sliding_window(specs[b[0]]) is not None]
        whole = [b for b in whole if b not in split]
    return split, whole


def _width(specs: Specs, names: Sequence[str]) -> int:
    return sum(specs[name].page_size_bytes for name in names)


def _split_to_width(specs: Specs, bucket: Sequence[str], limit: int) -> list[list[str]]:
    """The fewest interleaved parts of the bucket whose pages together fit into `limit` bytes each."""
    parts = cdiv(_width(specs, bucket), limit)
    while any(_width(specs, part) > limit for part in _interleaved(bucket, parts)):
        parts += 1
    return _interleaved(bucket, parts)


def _group_spec(specs: Specs, names: Sequence[str]) -> KVCacheSpec:
    members = {name: specs[name] for name in names}
    merged = merge_or_none(list(members.values()))
    if merged is not None:
        return merged
    uniform = UniformTypeKVCacheSpecs.from_specs(members)
    if uniform is None:
        raise AssertionError(f"layers of one bucket cannot share a block table: {list(names)}")
    return uniform


def check_every_layer_once(kv_cache_specs: Specs, groups: Sequence[KVCacheGroupSpec]) -> None:
    """Raise ValueError naming layers that are in no group, in several, or unknown."""
    seen: dict[str, int] = {}
    for group in groups:
        for name in group.layer_names:
            seen[name] = seen.get(name, 0) + 1
    missing = [name for name in kv_cache_specs if name not in seen]
    repeated = [name for name, count in seen.items() if count > 1]
    unknown = [name for name in seen if name not in kv_cache_specs]
    if missing or repeated or unknown:
        raise ValueError(
            "every layer must be in exactly one KV cache group; "
            f"in none: {missing}, in several: {repeated}, not a layer: {unknown}"
        )
