"""Derived members of a KV cache configuration, and layouts."""

from __future__ import annotations

from dataclasses import replace

import pytest

from tests.helpers.kv_plans import full, mamba, ring, window
from vllm.v1.kv_cache_interface import (
    KVCacheConfig,
    KVCacheGroupSpec,
    KVCacheLayout,
    KVCacheTensor,
    compute_layout_strides,
    create_kv_cache_views,
)
from vllm.v1.kv_cache_layout import LayoutShape


def config(*groups: KVCacheGroupSpec) -> KVCacheConfig:
    return KVCacheConfig(10, [], list(groups))


def three_groups() -> KVCacheConfig:
    return config(
        KVCacheGroupSpec(["a"], full()),
        KVCacheGroupSpec(["b"], ring()),
        KVCacheGroupSpec(["c"], full(), enable_kv_transfer=False),
    )


def test_transfer_and_prefix_cacheable_groups() -> None:
    cfg = three_groups()
    assert cfg.transfer_group_ids == (0, 1)
    assert cfg.prefix_cacheable_group_ids == (0,)
    assert [g.layer_names for g in cfg.transfer_groups] == [["a"], ["b"]]
    assert [g.layer_names for g in cfg.prefix_cacheable_groups] == [["a"]]
    assert cfg.transfer_group_index_by_layer == {"a": 0, "b": 1}


def test_derived_members_follow_later_changes() -> None:
    cfg = three_groups()
    cfg.kv_cache_groups[2].enable_kv_transfer = True
    assert cfg.prefix_cacheable_group_ids == (0, 2)
    cfg.kv_cache_groups[0].kv_cache_spec = ring()
    assert cfg.prefix_cacheable_group_ids == (2,)


def test_block_ids_of_transfer_groups() -> None:
    assert three_groups().select_transfer_block_ids(([1], [2], [3])) == ([1], [2])
    with pytest.raises(ValueError, match="3 KV cache groups, got 1"):
        three_groups().select_transfer_block_ids(([1],))


def test_zeroing_is_needed_with_states_or_mixed_precision() -> None:
    assert not config(
        KVCacheGroupSpec(["a"], full()), KVCacheGroupSpec(["b"], window())
    ).needs_kv_cache_zeroing
    assert config(KVCacheGroupSpec(["a"], mamba())).needs_kv_cache_zeroing
    mixed = config(KVCacheGroupSpec(["a"], full()), KVCacheGroupSpec(["b"], replace(full(), kv_quant_mode=1)))
    assert mixed.has_mixed_precision_kv_cache


def test_host_tensors_have_their_own_block_count() -> None:
    cfg = config(KVCacheGroupSpec(["a"], full(), host_resident=True))
    host = KVCacheTensor(64, ["a"], 64, 64, host_resident=True)
    assert cfg.host_group_ids == (0,)
    with pytest.raises(ValueError, match="hisparse_host_num_blocks"):
        cfg.num_blocks_of(host)
    cfg.hisparse_host_num_blocks = 7
    assert cfg.num_blocks_of(host) == 7
    assert cfg.num_blocks_of(KVCacheTensor(64, ["a"], 64, 64)) == 10


def test_layout_properties() -> None:
    assert [layout.name for layout in KVCacheLayout] == ["LBHNC", "LBNHC", "LHBNC", "BLHNC", "BLNHC", "BHLNC"]
    assert [lay.name for lay in KVCacheLayout if lay.is_block_outermost] == ["BLHNC", "BLNHC", "BHLNC"]
    assert [lay.name for lay in KVCacheLayout if not lay.is_block_compact] == ["LHBNC", "BHLNC"]
    assert KVCacheLayout.BLNHC.stride_order == (1, 0, 3, 2, 4)
    assert KVCacheLayout.BLNHC.layer_view_order == (0, 2, 1, 3)
    assert KVCacheLayout.from_name("NHD") is KVCacheLayout.LBNHC
    with pytest.raises(ValueError, match="NOPE"):
        KVCacheLayout.from_name("NOPE")


@pytest.mark.parametrize("layout", list(KVCacheLayout))
def test_views_cover_the_allocation_exactly_once(layout: KVCacheLayout) -> None:
    shape = LayoutShape(layers=2, blocks=3, heads=2, states=2, content=3)
    seen = []
    for view in create_kv_cache_views(layout, shape):
        for block in range(3):
            for head in range(2):
                for state in range(2):
                    start = (
                        view.offset
                        + block * view.strides[0]
                        + head * view.strides[1]
                        + state * view.strides[2]
                    )
                    seen += range(start, start + 3)
    assert sorted(seen) == list(range(2 * 3 * 2 * 2 * 3))
    assert compute_layout_strides(layout, shape)["C"] == 1


def test_block_stride_is_for_block_outermost_layouts() -> None:
    shape = LayoutShape(layers=1, blocks=2, heads=1, states=2, content=2)
    assert create_kv_cache_views(KVCacheLayout.BLHNC, shape, block_stride=10)[0].strides[0] == 10
    with pytest.raises(ValueError, match="block-outermost"):
        create_kv_cache_views(KVCacheLayout.LBHNC, shape, block_stride=10)
    with pytest.raises(ValueError, match="smaller"):
        create_kv_cache_views(KVCacheLayout.BLHNC, shape, block_stride=3)
