"""Every byte of every layer belongs to exactly one (group, block), for any mix of layers and layouts."""

from __future__ import annotations

from hypothesis import given, settings
from hypothesis import strategies as st

from tests.helpers.kv_plans import full, mamba, plan_config, ring, window
from vllm.v1.core.kv_cache_placement import bytes_per_block, group_waste, layer_spec
from vllm.v1.core.kv_cache_planning import DefaultKVCacheConfigBuilder, get_kv_cache_groups
from vllm.v1.kv_cache_interface import (
    HiSparseHotSpec,
    HiSparseResidentSpec,
    KVCacheConfig,
    KVCacheLayout,
    KVCacheSpec,
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
