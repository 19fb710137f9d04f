"""Every byte of every layer belongs to exactly one (group, block), for any mix of layers and layouts."""

from __future__ import annotations

import re

from hypothesis import given, settings
from hypothesis import strategies as st

from tests.helpers.kv_plans import BF16, full, mamba, plan_config, ring, window
from vllm.v1.core.kv_cache_placement import bytes_per_block, group_waste, layer_spec
from vllm.v1.core.kv_cache_planning import (
    DefaultKVCacheConfigBuilder,
    get_global_kv_cache_groups,
    get_kv_cache_configs,
    get_kv_cache_groups,
)
from vllm.v1.kv_cache_interface import (
    AttentionSpec,
    ChunkedLocalAttentionSpec,
    CrossAttentionSpec,
    EncoderOnlyAttentionSpec,
    FullAttentionSpec,
    HiddenStateCacheSpec,
    HiSparseHotSpec,
    HiSparseResidentSpec,
    KVCacheConfig,
    KVCacheLayout,
    KVCacheSpec,
    MLAAttentionSpec,
    RSWASpec,
    SinkFullAttentionSpec,
    SlidingWindowMLASpec,
)

BLOCKS = 3


def hot(page_size: int) -> KVCacheSpec:
    return HiSparseHotSpec(block_size=4, page_size=page_size, blocks_per_request=2)


def resident(page_size: int) -> KVCacheSpec:
    return HiSparseResidentSpec(block_size=4, page_size=page_size)


layers = st.one_of(
    st.builds(full, st.sampled_from([4, 8]), st.integers(1, 3), st.sampled_from([2, 6])),
    st.builds(window, st.sampled_from([4, 8]), st.sampled_from([8, 16]), st.integers(1, 3)),
    st.builds(mamba, st.sampled_from([4, 8]), st.integers(1, 80)),
    st.builds(ring, st.sampled_from([2, 4]), st.integers(1, 2), st.sampled_from([2, 6])),
    st.builds(hot, st.sampled_from([24, 96])),
    st.builds(resident, st.sampled_from([24, 96])),
)


def attention(kind: type[AttentionSpec], block_size: int, head_size: int, **more: object) -> KVCacheSpec:
    return kind(block_size=block_size, num_kv_heads=1, head_size=head_size, dtype=BF16, **more)


blocks, sizes = st.sampled_from([4, 8]), st.integers(1, 9)
every_kind = st.one_of(
    layers,
    st.builds(attention, st.just(FullAttentionSpec), blocks, sizes, block_stride_alignment=st.sampled_from([96, 64])),
    st.builds(attention, st.just(ChunkedLocalAttentionSpec), blocks, sizes, attention_chunk_size=st.sampled_from([8, 16])),
    st.builds(attention, st.just(SinkFullAttentionSpec), blocks, sizes, sink_len=st.sampled_from([2, 4])),
    st.builds(attention, st.just(RSWASpec), blocks, sizes, rswa_window=st.sampled_from([4, 8])),
    st.builds(attention, st.just(CrossAttentionSpec), blocks, sizes),
    st.builds(attention, st.just(EncoderOnlyAttentionSpec), blocks, sizes),
    st.builds(attention, st.just(HiddenStateCacheSpec), blocks, sizes),
    st.builds(
        attention,
        st.just(MLAAttentionSpec),
        blocks,
        sizes,
        tokens_per_state=st.sampled_from([1, 4]),
        alignment=st.sampled_from([None, 32]),
        is_draft=st.booleans(),
    ),
    st.builds(
        attention,
        st.just(SlidingWindowMLASpec),
        blocks,
        sizes,
        sliding_window=st.sampled_from([4, 8]),
        bounded_replay=st.booleans(),
    ),
)  # fmt: skip
REFUSED = "cannot be made|swa_bounded_replay needs|one page size"


@settings(max_examples=300, deadline=None)
@given(
    st.lists(st.tuples(every_kind, st.integers(0, 2)), min_size=1, max_size=9),
    st.sampled_from(["BLHNC", "BLNHC", "LBHNC", "LBNHC"]),
)
def test_any_mix_of_kinds_over_pipeline_stages_has_each_page_to_itself(
    dealt: list[tuple[KVCacheSpec, int]], name: str
) -> None:
    config = plan_config(layout=name, override=24)
    stages: list[dict[str, KVCacheSpec]] = [{}, {}, {}]
    for i, (spec, stage) in enumerate(dealt):
        stages[stage][f"l{i}"] = spec
    refusal = ""
    try:
        groups = get_global_kv_cache_groups(config, stages)
        plans = get_kv_cache_configs(config, stages, [1 << 20] * 3, groups)
    except (NotImplementedError, ValueError) as error:
        refusal, plans = str(error), []
    assert not refusal or re.search(REFUSED, refusal), refusal  # told, and never planned wrongly
    assert len(plans) == (0 if refusal else 3)
    for plan, stage_specs in zip(plans, stages, strict=False):
        assert plan.num_blocks == 24
        assert sorted(n for g in plan.kv_cache_groups for n in g.layer_names) == sorted(stage_specs)
        assert sorted(n for t in plan.kv_cache_tensors for n in t.layers) == sorted(stage_specs)
        pages = []  # (first byte, end, block, group)
        for number, group in enumerate(plan.kv_cache_groups):
            for layer in group.layer_names:
                tensor = next(t for t in plan.kv_cache_tensors if layer in t.layers)
                for block in range(plan.num_blocks):
                    start = tensor.page_start(tensor.layers.index(layer), block)
                    end = start + layer_spec(group, layer).page_size_bytes
                    assert 0 <= start < end <= tensor.size
                    pages.append((start, end, block, number))
        reach: dict[int, tuple[int, int]] = {}  # group -> end of its bytes so far, and of which block
        for start, end, block, number in sorted(pages):
            for other, (other_end, other_block) in reach.items():
                # Groups lie on each other, block by block; within a group every page is apart.
                assert other_end <= start or (other != number and other_block == block)
            reach[number] = (end, block)


def page_bytes(
    layout: KVCacheLayout, config: KVCacheConfig, name: str, spec: KVCacheSpec, block: int
) -> set[int]:
    """The bytes of one page, walked by head where the layout cuts pages by heads."""
    tensor = next(t for t in config.kv_cache_tensors if name in t.layers)
    start = tensor.page_start(tensor.layers.index(name), block)
    if layout.is_block_compact:
        return set(range(start, start + spec.page_size_bytes))
    piece = spec.page_size_bytes // spec.num_heads
    step = len(tensor.layers) * piece if layout.is_block_outermost else config.num_blocks * piece
    return {start + head * step + i for head in range(spec.num_heads) for i in range(piece)}


@settings(max_examples=150, deadline=None)
@given(st.lists(layers, min_size=1, max_size=9), st.sampled_from(["BLHNC", "BLNHC", "LBHNC", "LBNHC"]))
def test_pages_never_overlap_and_stay_inside_the_allocation(specs: list[KVCacheSpec], name: str) -> None:
    config = plan_config(layout=name)
    layout = KVCacheLayout[name]
    groups = get_kv_cache_groups(config, {f"l{i}": spec for i, spec in enumerate(specs)})
    plan = DefaultKVCacheConfigBuilder().get_kv_cache_config_from_groups(config, groups, BLOCKS)
    assert sorted(n for g in groups for n in g.layer_names) == sorted(f"l{i}" for i in range(len(specs)))
    owner: dict[int, int] = {}  # byte -> block id, over all groups
    for group in groups:
        used = 0
        seen: set[int] = set()
        for layer in group.layer_names:
            spec = layer_spec(group, layer)
            for block in range(BLOCKS):
                page = page_bytes(layout, plan, layer, spec, block)
                assert not page & seen  # no overlap inside a group
                seen |= page
                used += len(page)
                for byte in page:
                    assert owner.setdefault(byte, block) == block  # ids never share bytes
        assert used == len(seen)
        assert max(seen) < plan.kv_cache_tensors[0].size
    total = bytes_per_block(layout, groups)
    assert plan.kv_cache_tensors[0].size == total * BLOCKS
    for waste in group_waste(layout, groups):
        assert waste.used_bytes + waste.wasted_bytes == total
        assert waste.wasted_bytes >= 0


@settings(max_examples=60, deadline=None)
@given(st.integers(1, 4), st.integers(1, 4), st.sampled_from(["LHBNC", "BHLNC"]))
def test_pages_cut_by_heads_never_overlap(heads: int, count: int, name: str) -> None:
    config = plan_config(layout=name)
    layout = KVCacheLayout[name]
    specs: dict[str, KVCacheSpec] = {f"f{i}": full(4, heads, 2) for i in range(count)}
    specs |= {f"w{i}": window(4, 8, heads) for i in range(count)}
    specs = {
        n: s for n, s in specs.items() if n[0] == "f" or s.page_size_bytes == specs["f0"].page_size_bytes
    }
    groups = get_kv_cache_groups(config, specs)
    plan = DefaultKVCacheConfigBuilder().get_kv_cache_config_from_groups(config, groups, BLOCKS)
    owner: dict[int, int] = {}
    for group in groups:
        seen: set[int] = set()
        for layer in group.layer_names:
            for block in range(BLOCKS):
                page = page_bytes(layout, plan, layer, layer_spec(group, layer), block)
                assert len(page) == layer_spec(group, layer).page_size_bytes
                assert not page & seen
                seen |= page
                assert all(owner.setdefault(byte, block) == block for byte in page)
        assert max(seen) < plan.kv_cache_tensors[0].size
