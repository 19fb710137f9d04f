"""Memory, block counts, lengths, and the errors that say what would fit."""

from __future__ import annotations

import pytest

from tests.helpers.kv_plans import BF16, full, mamba, plan_config, window
from vllm.v1.core.kv_cache_planning import (
    check_enough_kv_cache_memory,
    estimate_max_model_len,
    get_global_kv_cache_groups,
    get_kv_cache_config_from_groups,
    get_kv_cache_configs,
    kv_cache_groups_tp_replicas,
    max_memory_usage_bytes,
    validate_kv_cache_layout,
)
from vllm.v1.core.kv_cache_sizes import get_kv_cache_capacity, get_max_concurrency_for_kv_cache_config
from vllm.v1.kv_cache_interface import (
    KVCacheConfig,
    KVCacheGroupSpec,
    KVCacheLayout,
    MLAAttentionSpec,
)

PAGE = full().page_size_bytes


def plan(config: object, specs: list[dict], memory: list[int]) -> list[KVCacheConfig]:
    return get_kv_cache_configs(config, specs, memory, get_global_kv_cache_groups(config, specs))


def test_block_count_is_memory_over_the_widest_group() -> None:
    specs = [{"a": full(), "b": full(), "w": window()}]
    (config,) = plan(plan_config(max_model_len=64, max_in_flight_tokens=16), specs, [25 * PAGE])
    assert config.num_blocks == 25
    assert len(config.kv_cache_groups) == 3
    (config,) = plan(plan_config(max_model_len=64), [{"a": full(), "b": full()}], [25 * PAGE])
    assert config.num_blocks == 12


def test_the_null_block_is_not_counted_as_capacity() -> None:
    specs = {"a": full()}
    config = plan_config(max_model_len=64)
    check_enough_kv_cache_memory(config, specs, 5 * PAGE)
    with pytest.raises(ValueError, match=r"max seq len \(64\)"):
        check_enough_kv_cache_memory(config, specs, 4 * PAGE)


def test_the_error_says_which_length_would_fit() -> None:
    with pytest.raises(ValueError, match=r"estimated maximum model length is 48"):
        plan(plan_config(max_model_len=1024), [{"a": full()}], [4 * PAGE])
    with pytest.raises(ValueError, match="no length fits"):
        plan(plan_config(max_model_len=1024), [{"a": full()}], [1 * PAGE])


def test_nothing_left_for_the_cache_is_an_error_of_its_own() -> None:
    for memory in (0, -5):
        with pytest.raises(ValueError, match="No available memory for the cache blocks"):
            plan(plan_config(), [{"a": full()}], [memory])
    with pytest.raises(ValueError, match="No available memory"):
        check_enough_kv_cache_memory(plan_config(), {"a": full()}, 0)
    check_enough_kv_cache_memory(plan_config(), {}, 0)


def test_longest_length_that_fits() -> None:
    specs = {"a": full(), "m": mamba(elements=PAGE // 4)}
    config = plan_config(max_model_len=4096)
    assert estimate_max_model_len(config, specs, 10 * PAGE) == (10 - 1 - 2) * 16
    assert config.model_config.max_model_len == 4096
    assert estimate_max_model_len(config, specs, 3 * PAGE) == 0
    assert estimate_max_model_len(config, {"a": full()}, 10**9) == 4096
    assert estimate_max_model_len(config, {}, 0) == 4096


def test_length_minus_one_is_replaced_by_what_fits() -> None:
    config = plan_config(max_model_len=4096, original_max_model_len=-1)
    (result,) = plan(config, [{"a": full()}], [10 * PAGE])
    assert config.model_config.max_model_len == 144
    assert result.num_blocks == 10
    with pytest.raises(ValueError, match="no length fits"):
        plan(plan_config(max_model_len=4096, original_max_model_len=-1), [{"a": full()}], [PAGE])


def test_an_override_wins_over_memory() -> None:
    (config,) = plan(plan_config(override=7), [{"a": full()}], [0])
    assert config.num_blocks == 7
    assert config.kv_cache_tensors[0].size == 7 * PAGE
    groups = [KVCacheGroupSpec(["a"], full())]
    assert get_kv_cache_config_from_groups(plan_config(override=7), groups, 10**6).num_blocks == 7
    assert get_kv_cache_config_from_groups(plan_config(), groups, 9 * PAGE).num_blocks == 9


def test_all_ranks_take_the_smallest_count() -> None:
    specs = [{"a": full()}, {"a": full()}]
    configs = plan(plan_config(max_model_len=64), specs, [20 * PAGE, 10 * PAGE])
    assert [c.num_blocks for c in configs] == [10, 10]
    with pytest.raises(ValueError, match="2 ranks"):
        get_kv_cache_configs(plan_config(), specs, [1], [])


def test_a_rank_without_layers_follows_the_others() -> None:
    specs = [{"a": full()}, {}]
    configs = plan(plan_config(max_model_len=64), specs, [20 * PAGE, 0])
    assert [c.num_blocks for c in configs] == [20, 20]
    assert configs[1].kv_cache_tensors == []
    assert [len(c.kv_cache_groups) for c in configs] == [1, 1]


def test_models_without_caches_have_one_block_and_no_tensors() -> None:
    (config,) = plan(plan_config(), [{}], [0])
    assert (config.num_blocks, config.kv_cache_tensors, config.kv_cache_groups) == (1, [], [])


def test_context_parallelism_divides_the_tokens() -> None:
    config = plan_config(max_model_len=1024, dcp=4)
    check_enough_kv_cache_memory(config, {"a": full()}, 17 * PAGE)
    with pytest.raises(ValueError, match="max seq len"):
        check_enough_kv_cache_memory(config, {"a": full()}, 16 * PAGE)
    assert max_memory_usage_bytes(config, [full(), full()]) == 2 * 16 * PAGE


def test_capacity_in_requests_and_tokens() -> None:
    config = plan_config(max_model_len=64)
    cfg = KVCacheConfig(13, [], [KVCacheGroupSpec(["a"], full())])
    assert get_max_concurrency_for_kv_cache_config(config, cfg) == 3.0
    assert get_kv_cache_capacity(config, cfg) == (192, 3.0)
    assert get_kv_cache_capacity(config, KVCacheConfig(1, [], [])) == (0, 0.0)


def mla(shards: int | None = 1, **changes: object) -> MLAAttentionSpec:
    return MLAAttentionSpec(
        block_size=16, num_kv_heads=1, head_size=8, dtype=BF16, max_tp_shards=shards, **changes
    )


@pytest.mark.parametrize(
    ("specs", "tp", "dcp", "replicas"),
    [
        ([mla()], 8, 1, 8),
        ([mla()], 8, 2, 4),
        ([mla(dcp_sharded=False)], 8, 2, 8),
        ([full(max_tp_shards=2)], 8, 1, 4),
        ([full(max_tp_shards=16)], 8, 1, 1),
        ([full()], 8, 1, 1),
        ([mla(), mamba()], 8, 1, 1),
        ([mla(), mamba(tp_replicated=True)], 8, 1, 8),
        ([], 8, 1, 1),
    ],
)
def test_xfer_07_ranks_that_hold_identical_bytes(specs: list, tp: int, dcp: int, replicas: int) -> None:
    groups = [KVCacheGroupSpec([str(i)], spec) for i, spec in enumerate(specs)]
    assert kv_cache_groups_tp_replicas(groups, tp, dcp) == replicas


def test_layouts_in_which_two_ids_would_share_bytes_are_refused() -> None:
    mixed = [KVCacheGroupSpec(["a"], full()), KVCacheGroupSpec(["b"], window(heads=2))]
    validate_kv_cache_layout(KVCacheLayout.BLHNC, mixed)
    with pytest.raises(ValueError, match="one page size"):
        validate_kv_cache_layout(KVCacheLayout.LBHNC, mixed)
    by_head = [
        KVCacheGroupSpec(["a"], full(heads=2)),
        KVCacheGroupSpec(["b"], window(block_size=32, heads=1)),
    ]
    validate_kv_cache_layout(KVCacheLayout.LBHNC, by_head)
    with pytest.raises(ValueError, match="number of heads"):
        validate_kv_cache_layout(KVCacheLayout.LHBNC, by_head)
    with pytest.raises(ValueError, match="padded page or a state"):
        validate_kv_cache_layout(KVCacheLayout.BHLNC, [KVCacheGroupSpec(["m"], full(page_size_padded=4096))])


def test_an_override_that_leaves_no_usable_block_is_refused() -> None:
    with pytest.raises(
        ValueError, match="num_gpu_blocks_override=1 leaves no usable KV cache.* less than 2 blocks"
    ):
        plan(plan_config(override=1), [{"a": full()}], [10**6])
    (config,) = plan(plan_config(override=2), [{"a": full()}], [10**6])
    assert config.num_blocks == 2
