"""Packed groups of the released hybrid models, checked against their published numbers."""

from __future__ import annotations

from collections import Counter

import pytest

from tests.helpers.kv_plans import (
    full,
    glm_release_specs,
    mamba,
    plan_config,
    qwen4_release_specs,
    ring,
    window,
)
from vllm.v1.core import kv_cache_planner
from vllm.v1.core.kv_cache_placement import bytes_per_block, group_waste, place_groups
from vllm.v1.core.kv_cache_planning import (
    DefaultKVCacheConfigBuilder,
    get_global_kv_cache_groups,
    get_kv_cache_configs,
    get_kv_cache_groups,
)
from vllm.v1.core.kv_cache_sizes import resolve_kv_cache_block_sizes, smallest_cacheable_block_size
from vllm.v1.kv_cache_interface import (
    KVCacheConfig,
    KVCacheGroupSpec,
    KVCacheLayout,
    RSWASpec,
    UniformTypeKVCacheSpecs,
    is_full_attention_spec,
    iter_layer_specs,
    replace_as,
)

LAYOUT = KVCacheLayout.BLHNC


@pytest.mark.parametrize(("tp", "block_size"), [(1, 4352), (4, 1152), (8, 640)])
def test_glm_attention_block_follows_the_state_size(tp: int, block_size: int) -> None:
    groups = get_kv_cache_groups(plan_config(), glm_release_specs(tp))
    attention = [g for g in groups if is_full_attention_spec(g.kv_cache_spec)]
    assert [g.kv_cache_spec.block_size for g in attention] == [block_size]


def test_glm_tp4_has_six_groups_and_67_cache_layers() -> None:
    specs = glm_release_specs(4)
    groups = get_kv_cache_groups(plan_config(), specs)
    assert len(specs) == 67
    assert sum(len(g.layer_names) for g in groups) == 67
    kinds = Counter(next(iter(iter_layer_specs(g.kv_cache_spec))).kv_cache_spec_kind.value for g in groups)
    assert kinds == {"mla_attention": 1, "mamba": 4, "unknown": 1}
    states = [len(g.layer_names) for g in groups if "linear_attn" in g.layer_names[0]]
    assert states == [9, 9, 8, 8]
    assert bytes_per_block(LAYOUT, groups) == 13_394_304


def test_glm_tp4_ring_is_one_group_of_eleven_small_pages() -> None:
    groups = get_kv_cache_groups(plan_config(), glm_release_specs(4))
    rings = [g for g in groups if not g.kv_cache_spec.prefix_cacheable]
    assert [(len(g.layer_names), g.kv_cache_spec.page_size_bytes) for g in rings] == [(11, 2048)]
    waste = {w.group_id: w for w in group_waste(LAYOUT, groups)}
    assert waste[groups.index(rings[0])].used_bytes == 22_528
    assert waste[0].wasted_bytes == 0


def test_glm_tp4_scheduler_and_hash_block_leave_the_ring_out() -> None:
    groups = get_kv_cache_groups(plan_config(), glm_release_specs(4))
    config = KVCacheConfig(10, [], groups)
    assert resolve_kv_cache_block_sizes(config, plan_config()) == (1152, 1152)
    assert smallest_cacheable_block_size(config) == 1152


def test_glm_state_groups_take_turns_over_the_layers() -> None:
    groups = get_kv_cache_groups(plan_config(), glm_release_specs(4))
    first = next(g for g in groups if "linear_attn" in g.layer_names[0])
    assert [int(name.split(".")[2]) for name in first.layer_names[:3]] == [0, 5, 10]


def test_qwen4_tp4_has_block_784_and_73_cache_layers() -> None:
    specs = qwen4_release_specs()
    groups = get_kv_cache_groups(plan_config(), specs)
    assert len(specs) == 73
    assert sum(len(g.layer_names) for g in groups) == 73
    attention = [g for g in groups if is_full_attention_spec(g.kv_cache_spec)]
    assert [(g.kv_cache_spec.block_size, len(g.layer_names)) for g in attention] == [(784, 24)]
    width = 12 * 784 * 1024 + 12 * (784 // 4) * 256
    assert bytes_per_block(LAYOUT, groups) == width


def test_pages_of_mixed_sizes_lie_side_by_side() -> None:
    specs = glm_release_specs(4)
    groups = get_kv_cache_groups(plan_config(), specs)
    config = DefaultKVCacheConfigBuilder().get_kv_cache_config_from_groups(plan_config(), groups, 3)
    latent, index = config.kv_cache_tensors[:2]
    assert (latent.offset, latent.layer_stride, latent.block_stride) == (0, 1_179_648, 13_394_304)
    assert (index.offset, index.layer_stride) == (11 * 1_179_648, 38_016)
    assert {t.size for t in config.kv_cache_tensors} == {3 * 13_394_304}
    assert config.kv_cache_layout == "BLHNC"


def test_what_groups_leave_unused_is_told_when_the_plan_is_made(monkeypatch: pytest.MonkeyPatch) -> None:
    told: list[str] = []
    monkeypatch.setattr(kv_cache_planner.logger, "info", lambda text, *values: told.append(text % values))
    specs = [{"f": full(heads=2), "g": full(heads=2), "w": window()}]
    config = plan_config(max_model_len=64, max_in_flight_tokens=16)
    get_kv_cache_configs(config, specs, [1 << 20], get_global_kv_cache_groups(config, specs))
    assert told[-1].endswith("2048 bytes for 2 groups, which leave unused of a block of theirs: 0%, 75%")


def test_windows_are_split_to_fit_when_nothing_else_is() -> None:
    specs = {f"f{i}": full(heads=2) for i in range(2)} | {f"w{i}": window() for i in range(10)}
    groups = get_kv_cache_groups(plan_config(), specs)
    assert [len(g.layer_names) for g in groups] == [2, 4, 3, 3]
    assert bytes_per_block(LAYOUT, groups) == 2 * full(heads=2).page_size_bytes


def test_windows_stay_whole_beside_rings_and_states() -> None:
    specs = {"f": full()} | {f"w{i}": window() for i in range(3)} | {f"r{i}": ring() for i in range(3)}
    groups = get_kv_cache_groups(plan_config(), specs)
    assert [len(g.layer_names) for g in groups] == [1, 3, 3]


def test_states_alone_are_split_by_their_widest_page() -> None:
    specs = {"a": mamba(elements=128), "b": mamba(elements=64), "c": mamba(elements=64), "r": ring()}
    groups = get_kv_cache_groups(plan_config(), specs)
    assert sorted(name for g in groups for name in g.layer_names) == ["a", "b", "c", "r"]
    assert bytes_per_block(LAYOUT, groups) == 512


def test_pipeline_stages_share_group_ids_and_the_smallest_block_count() -> None:
    specs = glm_release_specs(4)
    stages = [dict(list(specs.items())[:34]), dict(list(specs.items())[34:])]
    config = plan_config(max_model_len=4096, max_in_flight_tokens=2048)
    groups = get_global_kv_cache_groups(config, stages)
    plans = get_kv_cache_configs(config, stages, [200_000_000, 400_000_000], groups)
    assert [len(plan.kv_cache_groups) for plan in plans] == [6, 6]
    assert len({plan.num_blocks for plan in plans}) == 1
    for plan, stage in zip(plans, stages, strict=True):
        assert sorted(n for t in plan.kv_cache_tensors for n in t.layers) == sorted(stage)
        assert plan.kv_cache_tensors[0].size <= 400_000_000
    assert plans[0].kv_cache_tensors[0].size <= 200_000_000


def test_groups_of_equal_small_pages_never_share_bytes_whatever_runs_they_have() -> None:
    """A model may group its layers itself: here pages of 24 bytes, in one run and in two."""
    one = full(3, 1, 2)
    other = replace_as(one, RSWASpec, rswa_window=6)
    mixed = UniformTypeKVCacheSpecs(3, {"c": one, "d": other}, dcp_sharded=True)
    groups = [KVCacheGroupSpec(["a", "b"], one), KVCacheGroupSpec(["c", "d"], mixed)]
    assert one.page_size_bytes == other.page_size_bytes == 24
    owner: dict[int, int] = {}
    for tensor in place_groups(KVCacheLayout.LBNHC, groups, 5):
        for layer in range(len(tensor.layers)):
            for block in range(5):
                start = tensor.page_start(layer, block)
                for byte in range(start, start + 24):
                    assert owner.setdefault(byte, block) == block
