"""Scheduler block, hash block and hit alignment."""

from __future__ import annotations

from types import SimpleNamespace

import pytest

from tests.helpers.kv_plans import BF16, full, mamba, plan_config, ring, window
from vllm.v1.core.kv_cache_sizes import (
    generate_scheduler_kv_cache_config,
    partial_hash_hits_enabled,
    resolve_dcp_kv_block_size,
    resolve_dcp_kv_cache_spec,
    resolve_effective_attention_block_size,
    resolve_kv_cache_block_sizes,
    smallest_cacheable_block_size,
)
from vllm.v1.core.kv_cache_view import describe_groups, device_block_bytes
from vllm.v1.kv_cache_interface import (
    KVCacheConfig,
    KVCacheGroupSpec,
    KVCacheSpec,
    MLAAttentionSpec,
    UniformTypeKVCacheSpecs,
)


class Fine:
    supports_fine_grained_hash_lookup = True


class Coarse:
    supports_fine_grained_hash_lookup = False


def config(*specs: KVCacheSpec) -> KVCacheConfig:
    return KVCacheConfig(10, [], [KVCacheGroupSpec([str(i)], spec) for i, spec in enumerate(specs)])


def test_one_group_uses_the_configured_block() -> None:
    assert resolve_kv_cache_block_sizes(config(full()), plan_config()) == (16, 16)
    assert resolve_kv_cache_block_sizes(config(full()), plan_config(dcp=2)) == (32, 32)
    unsharded = config(full(dcp_sharded=False))
    assert resolve_kv_cache_block_sizes(unsharded, plan_config(dcp=2)) == (16, 16)
    with pytest.raises(ValueError, match="prefix_match_unit=8"):
        resolve_kv_cache_block_sizes(config(full()), plan_config(prefix_match_unit=8))
    quiet = plan_config(prefix_match_unit=8, enable_prefix_caching=False)
    assert resolve_kv_cache_block_sizes(config(full()), quiet) == (16, 16)


def test_several_groups_use_common_multiple_and_divisor_of_what_can_be_hit() -> None:
    cfg = config(full(16), window(32), ring(6))
    assert resolve_kv_cache_block_sizes(cfg, plan_config()) == (32, 16)


def test_scratch_only_groups_count_when_nothing_can_be_hit() -> None:
    assert resolve_kv_cache_block_sizes(config(ring(4), ring(6)), plan_config()) == (12, 2)


def test_hash_block_is_the_scheduler_block_without_a_user_of_hashes() -> None:
    cfg = config(full(16), window(32))
    off = plan_config(enable_prefix_caching=False)
    assert resolve_kv_cache_block_sizes(cfg, off) == (32, 32)
    off.kv_transfer_config = SimpleNamespace()
    assert resolve_kv_cache_block_sizes(cfg, off) == (32, 16)


def test_states_that_are_not_kept_coarsen_the_hash_block() -> None:
    cfg = config(full(16), mamba(32, mode="none"))
    assert resolve_kv_cache_block_sizes(cfg, plan_config()) == (32, 32)


def test_match_unit_must_divide_every_block_that_can_be_hit() -> None:
    cfg = config(full(16), mamba(64))
    assert resolve_kv_cache_block_sizes(cfg, plan_config(prefix_match_unit=8)) == (64, 8)
    with pytest.raises(ValueError, match="prefix_match_unit=12"):
        resolve_kv_cache_block_sizes(cfg, plan_config(prefix_match_unit=12))


def test_hits_must_not_end_inside_a_compressed_state() -> None:
    pooled = MLAAttentionSpec(block_size=16, num_kv_heads=1, head_size=8, dtype=BF16, tokens_per_state=4)
    assert resolve_kv_cache_block_sizes(config(pooled, mamba(64)), plan_config(prefix_match_unit=8)) == (
        64,
        8,
    )
    with pytest.raises(ValueError, match="one state per 4 tokens"):
        resolve_kv_cache_block_sizes(config(pooled, mamba(64)), plan_config(prefix_match_unit=2))


def test_off_16_context_parallel_sizes_are_per_group() -> None:
    assert resolve_dcp_kv_block_size(full(64), 2) == 128
    assert resolve_dcp_kv_block_size(mamba(64), 2) == 64
    assert resolve_dcp_kv_cache_spec(full(64), 2).block_size == 128
    assert resolve_dcp_kv_cache_spec(mamba(64), 2) == mamba(64)
    cfg = config(full(64), mamba(64))
    assert resolve_kv_cache_block_sizes(cfg, plan_config(dcp=2)) == (128, 64)


def test_fine_hits_need_a_coarse_state_and_managers_that_find_them() -> None:
    groups = config(full(64), mamba(64)).kv_cache_groups
    assert partial_hash_hits_enabled(groups, 16, manager_classes=[Fine, Fine])
    assert not partial_hash_hits_enabled(groups, 16, manager_classes=[Coarse, Fine])
    assert not partial_hash_hits_enabled(groups, 64, manager_classes=[Fine, Fine])
    assert partial_hash_hits_enabled(groups, 64, 2, manager_classes=[Fine, Fine])
    assert not partial_hash_hits_enabled(config(full(64), full(32)).kv_cache_groups, 16, 1, [Fine, Fine])


def test_rings_take_no_part_in_the_vote() -> None:
    groups = config(full(64), mamba(64), ring(4)).kv_cache_groups
    assert partial_hash_hits_enabled(groups, 16, manager_classes=[Fine, Fine, Coarse])


def test_a_coarse_manager_may_stay_if_its_block_is_the_hash_block() -> None:
    groups = config(window(16), mamba(64)).kv_cache_groups
    assert partial_hash_hits_enabled(groups, 16, manager_classes=[Coarse, Fine])


def test_sizes_that_the_engine_reports() -> None:
    cfg = config(full(64), mamba(32), ring(4))
    assert smallest_cacheable_block_size(cfg) == 32
    assert smallest_cacheable_block_size(config(ring(4))) is None
    assert resolve_effective_attention_block_size(cfg, 2) == 128
    assert resolve_effective_attention_block_size(config(full(16), full(32)), 1) is None


def test_the_scheduler_sees_one_member_of_a_uniform_group() -> None:
    uniform = UniformTypeKVCacheSpecs.from_specs({"a": full(heads=1), "b": full(heads=2)})
    first = KVCacheConfig(10, [], [KVCacheGroupSpec(["a", "b"], uniform)])
    seen = generate_scheduler_kv_cache_config([first, first])
    assert seen.kv_cache_groups[0].kv_cache_spec == full(heads=1)
    assert first.kv_cache_groups[0].kv_cache_spec is uniform
    with pytest.raises(AssertionError):
        generate_scheduler_kv_cache_config([first, KVCacheConfig(9, [], first.kv_cache_groups)])


@pytest.mark.parametrize("heads", [(1, 3), (3, 1)])
def test_a_block_is_as_large_for_the_scheduler_as_for_the_rank(heads: tuple[int, int]) -> None:
    uniform = UniformTypeKVCacheSpecs.from_specs({"a": full(heads=heads[0]), "b": full(heads=heads[1])})
    first = KVCacheConfig(10, [], [KVCacheGroupSpec(["a", "b"], uniform)])
    seen = generate_scheduler_kv_cache_config([first])
    page = full(heads=1).page_size_bytes
    assert device_block_bytes(first, 1) == device_block_bytes(seen, 1) == 4 * page
    assert describe_groups(seen, 1)[0].block_bytes == 4 * page


def test_sizes_that_cannot_be_are_named() -> None:
    with pytest.raises(ValueError, match="block_size is not resolved yet"):
        resolve_kv_cache_block_sizes(config(full()), plan_config(block_size=None))
    with pytest.raises(ValueError, match="block size 0 of a KV cache group is not positive"):
        resolve_kv_cache_block_sizes(config(full(16), mamba(0)), plan_config())
