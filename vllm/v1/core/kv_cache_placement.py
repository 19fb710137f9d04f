"""Groups and a block count → where every page lies. Layer: L3.

All groups draw ids from one pool and alias the same bytes, which is sound because an id has one owner group at a
time. So the ranges of two different block ids must never meet, whatever their groups: `check_layout` refuses layouts
where they would.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

from vllm.utils.math_utils import round_up
from vllm.v1.kv_cache_config_types import KVCacheGroupSpec, KVCacheTensor
from vllm.v1.kv_cache_layout import KVCacheLayout
from vllm.v1.kv_cache_spec_base import KVCacheSpec
from vllm.v1.kv_cache_spec_uniform import UniformTypeKVCacheSpecs, iter_layer_specs

PAGE_START_ALIGNMENT = 16
"""Bytes to which runs of pages are aligned, for vector loads."""


@dataclass(frozen=True, slots=True)
class PageRun:
    """Consecutive same-shaped layers of a group. `offset`: bytes from the start of the block, blocks outermost."""

    layer_names: tuple[str, ...]
    spec: KVCacheSpec
    offset: int


@dataclass(frozen=True, slots=True)
class GroupWaste:
    """Bytes of one block that a group uses and leaves unused."""

    group_id: int
    used_bytes: int
    wasted_bytes: int


def layer_spec(group: KVCacheGroupSpec, layer_name: str) -> KVCacheSpec:
    """The spec of one layer of a group."""
    if isinstance(group.kv_cache_spec, UniformTypeKVCacheSpecs):
        return group.kv_cache_spec.kv_cache_specs[layer_name]
    return group.kv_cache_spec


def page_stride(layout: KVCacheLayout, spec: KVCacheSpec) -> int:
    """Bytes that one page of one layer takes up; layers in ranges of their own align each page by itself."""
    if layout.is_block_outermost:
        return spec.page_size_bytes
    return round_up(spec.page_size_bytes, spec.get_block_stride_alignment())


def page_runs(layout: KVCacheLayout, group: KVCacheGroupSpec) -> list[PageRun]:
    """The group's layers, same-shaped ones together, and where each run starts inside a block."""
    by_spec: dict[KVCacheSpec, list[str]] = {}
    for name in group.layer_names:
        by_spec.setdefault(layer_spec(group, name), []).append(name)
    runs = []
    offset = 0
    before = 0
    for spec, names in by_spec.items():
        stride = page_stride(layout, spec)
        # Groups that share ranges of layers do so page by page: equal pages must follow each other without a gap.
        if layout.is_block_outermost or stride != before:
            offset = round_up(offset, PAGE_START_ALIGNMENT)
        runs.append(PageRun(tuple(names), spec, offset))
        offset += len(names) * stride
        before = stride
    return runs


def group_width(layout: KVCacheLayout, group: KVCacheGroupSpec) -> int:
    """Bytes from the start of a block to the end of the group's last page; 0 without layers."""
    runs = page_runs(layout, group)
    if not runs:
        return 0
    return runs[-1].offset + len(runs[-1].layer_names) * page_stride(layout, runs[-1].spec)


def bytes_per_block(layout: KVCacheLayout, groups: Sequence[KVCacheGroupSpec]) -> int:
    """Bytes of one block of the pool: the widest group, rounded up to every group's alignment. 0 without layers."""
    width = max((group_width(layout, group) for group in groups), default=0)
    alignments = [g.kv_cache_spec.get_block_stride_alignment() for g in groups if g.layer_names]
    return round_up(width, math.lcm(*alignments)) if width else 0


def group_waste(layout: KVCacheLayout, groups: Sequence[KVCacheGroupSpec]) -> list[GroupWaste]:
    """What each group leaves unused of the blocks that it owns."""
    total = bytes_per_block(layout, groups)
    report = []
    for group_id, group in enumerate(groups):
        used = sum(layer_spec(group, name).page_size_bytes for name in group.layer_names)
        report.append(GroupWaste(group_id, used, total - used))
    return report


def place_groups(
    layout: KVCacheLayout, groups: Sequence[KVCacheGroupSpec], num_blocks: int
) -> list[KVCacheTensor]:
    """One tensor per run of same-shaped layers; all lie in one allocation of `num_blocks * bytes_per_block` bytes."""
    validate_kv_cache_layout(layout, groups)
    block_bytes = bytes_per_block(layout, groups)
    size = num_blocks * block_bytes
    tensors = []
    for group in groups:
        for run in page_runs(layout, group):
            if layout.is_block_outermost:
                tensors.append(_place_in_block(layout, run, size, block_bytes))
            else:
                tensors.append(_place_in_layers(layout, run, size, num_blocks))
    return tensors


def _place_in_block(layout: KVCacheLayout, run: PageRun, size: int, block_bytes: int) -> KVCacheTensor:
    page = run.spec.page_size_bytes
    layer_stride = page if layout.is_block_compact else page // run.spec.num_heads
    return KVCacheTensor(size, list(run.layer_names), layer_stride, block_bytes, run.offset)


def _place_in_layers(layout: KVCacheLayout, run: PageRun, size: int, num_blocks: int) -> KVCacheTensor:
    page = page_stride(layout, run.spec)
    block_stride = page if layout.is_block_compact else page // run.spec.num_heads
    return KVCacheTensor(
        size, list(run.layer_names), page * num_blocks, block_stride, run.offset * num_blocks
    )


def validate_kv_cache_layout(layout: KVCacheLayout, groups: Sequence[KVCacheGroupSpec]) -> None:
    """Raise ValueError if two block ids could share bytes, or a page cannot be cut by heads, in this layout."""
    specs = [spec for group in groups for spec in iter_layer_specs(group.kv_cache_spec) if group.layer_names]
    if not layout.is_block_outermost and len(groups) > 1:
        pages = sorted({page_stride(layout, spec) for spec in specs})
        if len(pages) > 1:
            raise ValueError(
                f"KV cache layout {layout} keeps each layer in one range, so groups that share the pool need one page "
                f"size, got {pages}; use a block-outermost layout such as {KVCacheLayout.BLHNC}"
            )
    if not layout.is_block_compact:
        _check_pages_by_head(layout, groups, specs)


def _check_pages_by_head(
    layout: KVCacheLayout, groups: Sequence[KVCacheGroupSpec], specs: Sequence[KVCacheSpec]
) -> None:
    """Layouts that cut a page by heads need pages that are heads only, and equal ones where ids share layers."""
    for spec in specs:
        if spec.num_heads * spec.num_states * spec.state_content_size_bytes != spec.page_size_bytes:
            raise ValueError(f"KV cache layout {layout} cannot hold a padded page or a state: {spec}")
    if layout.is_block_outermost or len(groups) == 1:
        return
    heads = sorted({spec.num_heads for spec in specs})
    if len(heads) > 1:
        raise ValueError(
            f"KV cache layout {layout} puts heads outside blocks, so groups that share the pool need one number of "
            f"heads, got {heads}"
        )
