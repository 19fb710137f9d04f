"""KV cache memory: where pages lie, what overlaps, and work on whole blocks."""

from __future__ import annotations

import pytest
import torch

from vllm.v1.kv_cache_interface import (
    FullAttentionSpec,
    KVCacheConfig,
    KVCacheGroupSpec,
    KVCacheTensor,
    SlidingWindowSpec,
    UniformTypeKVCacheSpecs,
)
from vllm.v1.kv_cache_layout import KVCacheLayout
from vllm.v1.worker.kv_cache_alloc import KVCachePages, copy_kv_blocks, layer_specs
from vllm.v1.worker.utils import add_kv_sharing_layers_to_kv_cache_groups, allocate_kv_cache

CPU = torch.device("cpu")
FULL = FullAttentionSpec(block_size=4, num_kv_heads=1, head_size=8, dtype=torch.float32)
WINDOW = SlidingWindowSpec(block_size=4, num_kv_heads=1, head_size=8, dtype=torch.float32, sliding_window=8)
PAGE = FULL.page_size_bytes
BLOCKS = 6


def block_outermost() -> KVCacheConfig:
    """Two full and two window layers: blocks outermost, both groups over the same bytes."""
    size = BLOCKS * 2 * PAGE
    tensors = [
        KVCacheTensor(size, ["f0", "f1"], layer_stride=PAGE, block_stride=2 * PAGE),
        KVCacheTensor(size, ["w0", "w1"], layer_stride=PAGE, block_stride=2 * PAGE),
    ]
    groups = [KVCacheGroupSpec(["f0", "f1"], FULL), KVCacheGroupSpec(["w0", "w1"], WINDOW)]
    return KVCacheConfig(BLOCKS, tensors, groups)


def layer_outermost() -> KVCacheConfig:
    size = BLOCKS * 2 * PAGE
    tensors = [KVCacheTensor(size, ["f0", "f1"], layer_stride=BLOCKS * PAGE, block_stride=PAGE)]
    return KVCacheConfig(BLOCKS, tensors, [KVCacheGroupSpec(["f0", "f1"], FULL)])


def test_pages_are_strided_views_and_groups_overlap_byte_for_byte() -> None:
    raw = allocate_kv_cache(block_outermost(), CPU, KVCacheLayout.BLHNC)
    assert set(raw) == {"f0", "f1", "w0", "w1"}
    for tensor in raw.values():
        assert tensor.dtype == torch.int8
        assert tensor.shape == (BLOCKS, PAGE)
        assert tensor.stride() == (2 * PAGE, 1)
        assert not tensor.any()
    assert raw["f0"].data_ptr() == raw["w0"].data_ptr()
    assert raw["f0"].data_ptr() % 64 == 0
    assert raw["f1"].data_ptr() == raw["f0"].data_ptr() + PAGE
    raw["f1"][3] = 5
    assert (raw["w1"][3] == 5).all()
    assert not raw["w0"].any()


def test_layers_outermost_works_too() -> None:
    raw = allocate_kv_cache(layer_outermost(), "cpu", KVCacheLayout.LBHNC)
    assert raw["f0"].is_contiguous()
    raw["f0"][:] = 1
    assert not raw["f1"].any()


@pytest.mark.parametrize("plan", [block_outermost, layer_outermost])
def test_zeroing_and_copying_act_on_whole_blocks(plan) -> None:
    pages = KVCachePages(plan(), CPU)
    for value, tensor in enumerate((pages.raw["f0"], pages.raw["f1"]), 1):
        for block in range(BLOCKS):
            tensor[block] = 10 * value + block
    pages.copy_blocks([(1, 2), (2, 4)])
    assert [int(pages.raw["f0"][b, 0]) for b in range(BLOCKS)] == [10, 11, 11, 13, 12, 15]
    assert [int(pages.raw["f1"][b, -1]) for b in range(BLOCKS)] == [20, 21, 21, 23, 22, 25]
    pages.zero_blocks([1, 4])
    assert [int(pages.raw["f1"][b, 0]) for b in range(BLOCKS)] == [20, 0, 21, 23, 0, 25]
    pages.zero_blocks([])
    pages.copy_blocks([])


def test_tensors_that_would_share_pages_within_a_group_get_their_own_memory() -> None:
    size = BLOCKS * PAGE
    tensors = [KVCacheTensor(size, [name], layer_stride=PAGE, block_stride=PAGE) for name in ("f0", "f1")]
    pages = KVCachePages(KVCacheConfig(BLOCKS, tensors, [KVCacheGroupSpec(["f0", "f1"], FULL)]), CPU)
    pages.raw["f0"][:] = 1
    assert not pages.raw["f1"].any()
    pages.raw["f1"][2] = 7
    pages.copy_blocks([(2, 3)])
    assert int(pages.raw["f1"][3, 0]) == 7
    assert int(pages.raw["f0"][3, 0]) == 1


def test_released_memory_reads_as_zeros_and_keeps_its_views() -> None:
    pages = KVCachePages(block_outermost(), CPU)
    pages.raw["f0"][:] = 3
    pages.release()
    assert not pages.raw["f0"].any()
    pages.raw["f0"][1] = 4
    assert (pages.raw["w0"][1] == 4).all()


def test_uniform_groups_give_each_layer_its_own_page_size() -> None:
    wide = FullAttentionSpec(block_size=4, num_kv_heads=1, head_size=16, dtype=torch.float32)
    spec = UniformTypeKVCacheSpecs(4, {"a": FULL, "b": wide})
    block = FULL.page_size_bytes + wide.page_size_bytes
    size = 3 * block
    tensors = [
        KVCacheTensor(size, ["a"], layer_stride=PAGE, block_stride=block),
        KVCacheTensor(size, ["b"], layer_stride=2 * PAGE, block_stride=block, offset=PAGE),
    ]
    config = KVCacheConfig(3, tensors, [KVCacheGroupSpec(["a", "b"], spec)])
    raw = allocate_kv_cache(config, CPU)
    assert raw["b"].shape == (3, wide.page_size_bytes)
    assert layer_specs(config) == {"a": FULL, "b": wide}
    raw["b"][:] = 1
    assert not raw["a"].any()


def test_bad_plans_are_refused() -> None:
    with pytest.raises(ValueError, match="LHBNC scatters the page"):
        allocate_kv_cache(block_outermost(), CPU, KVCacheLayout.LHBNC)
    with pytest.raises(ValueError, match="kernel_block_sizes has 1 entries for 2"):
        allocate_kv_cache(block_outermost(), CPU, KVCacheLayout.BLHNC, [4])
    config = block_outermost()
    config.kv_cache_tensors.pop()
    with pytest.raises(ValueError, match="no tensor for the layers w0, w1"):
        allocate_kv_cache(config, CPU)
    config = block_outermost()
    config.kv_cache_tensors[0].size = config.kv_cache_tensors[1].size = PAGE
    with pytest.raises(ValueError, match="beyond the allocation"):
        allocate_kv_cache(config, CPU)
    config = block_outermost()
    config.kv_cache_groups.pop()
    with pytest.raises(ValueError, match="w0, which is in no group"):
        allocate_kv_cache(config, CPU)


def test_a_plan_without_tensors_allocates_nothing() -> None:
    assert allocate_kv_cache(KVCacheConfig(4, [], block_outermost().kv_cache_groups), CPU) == {}


def test_layers_that_share_a_cache_join_its_group() -> None:
    groups = block_outermost().kv_cache_groups
    runner_only: set[str] = set()
    add_kv_sharing_layers_to_kv_cache_groups({"f2": "f0", "w2": "w1"}, groups, runner_only)
    assert groups[0].layer_names == ["f0", "f1", "f2"]
    assert groups[1].layer_names == ["w0", "w1", "w2"]
    assert runner_only == {"f2", "w2"}
    with pytest.raises(ValueError, match="x shares the KV cache of nobody"):
        add_kv_sharing_layers_to_kv_cache_groups({"x": "nobody"}, groups)


def test_blocks_copy_between_host_and_device_pages() -> None:
    source, target = {"a": torch.arange(12).view(4, 3)}, {"a": torch.zeros(4, 3, dtype=torch.int64)}
    copy_kv_blocks(source, target, [1, 3], [0, 2], "d2h")
    assert target["a"].tolist() == [[3, 4, 5], [0, 0, 0], [9, 10, 11], [0, 0, 0]]
    with pytest.raises(ValueError, match="direction"):
        copy_kv_blocks(source, target, [1], [1], "sideways")
