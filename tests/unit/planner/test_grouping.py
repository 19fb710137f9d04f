"""Which rule groups which layers."""

from __future__ import annotations

from dataclasses import replace
from types import SimpleNamespace

import pytest

from tests.helpers.kv_plans import BF16, full, mamba, plan_config, ring, window
from vllm.v1.core.kv_cache_planning import (
    create_kv_cache_group_specs,
    get_global_kv_cache_groups,
    get_kv_cache_configs,
    get_kv_cache_groups,
    get_kv_cache_groups_from_builder,
    get_uniform_page_size,
    is_kv_cache_spec_uniform,
    is_kv_cache_type_attention_free,
    unify_hybrid_kv_cache_specs,
    unify_kv_cache_spec_page_size,
)
from vllm.v1.core.kv_cache_sizes import resolve_kv_cache_block_sizes
from vllm.v1.kv_cache_interface import (
    ChunkedLocalAttentionSpec,
    FullAttentionSpec,
    HiddenStateCacheSpec,
    HiSparseHotSpec,
    HiSparseResidentSpec,
    KVCacheGroupSpec,
    MLAAttentionSpec,
    SlidingWindowMLASpec,
    UniformTypeKVCacheSpecs,
)


def chunked(block_size: int = 16) -> ChunkedLocalAttentionSpec:
    return ChunkedLocalAttentionSpec(
        block_size=block_size, num_kv_heads=1, head_size=8, dtype=BF16, attention_chunk_size=32
    )


def sizes(groups: list[KVCacheGroupSpec]) -> list[int]:
    return [len(group.layer_names) for group in groups]


def test_no_layers_no_groups() -> None:
    assert get_kv_cache_groups(plan_config(), {}) == []
    assert is_kv_cache_type_attention_free({})


def test_equal_layers_form_one_group() -> None:
    groups = get_kv_cache_groups(plan_config(), {f"l{i}": full() for i in range(4)})
    assert sizes(groups) == [4]
    assert groups[0].kv_cache_spec == full()


def test_layers_of_one_type_and_block_size_form_one_uniform_group() -> None:
    groups = get_kv_cache_groups(plan_config(), {"a": full(heads=1), "b": full(heads=3)})
    assert sizes(groups) == [2]
    assert isinstance(groups[0].kv_cache_spec, UniformTypeKVCacheSpecs)


def test_equal_pages_make_groups_of_the_smallest_bucket() -> None:
    specs = {f"f{i}": full() for i in range(10)} | {f"w{i}": window() for i in range(20)}
    assert sizes(get_kv_cache_groups(plan_config(), specs)) == [10, 10, 10]
    groups = get_kv_cache_groups(plan_config(), specs)
    assert groups[1].layer_names[:3] == ["w0", "w2", "w4"]


def test_nearly_equal_buckets_are_padded_instead_of_split() -> None:
    specs = {f"f{i}": full() for i in range(13)} | {f"w{i}": window() for i in range(12)}
    assert sizes(get_kv_cache_groups(plan_config(), specs)) == [13, 12]


def test_different_windows_are_different_groups() -> None:
    specs = {"a": window(size=32), "b": window(size=64), "c": full()}
    assert sizes(get_kv_cache_groups(plan_config(), specs)) == [1, 1, 1]


def test_mixed_pages_are_unified_where_layers_lie_in_ranges_of_their_own() -> None:
    specs = {"f": full(heads=2), "w": window(heads=1), "m": mamba(elements=100)}
    groups = get_kv_cache_groups(plan_config(layout="LBHNC"), specs)
    assert sizes(groups) == [1, 1, 1]
    assert {g.kv_cache_spec.page_size_bytes for g in groups} == {full(heads=2).page_size_bytes}
    assert [g.kv_cache_spec.block_size for g in groups] == [16, 32, 16]


def test_unification_multiplies_blocks_pads_states_and_rings_and_pads_odd_pages() -> None:
    specs = {"f": full(heads=6), "w": window(heads=3), "x": window(heads=4), "m": mamba(), "r": ring()}
    unified = unify_kv_cache_spec_page_size(specs)
    assert get_uniform_page_size(unified.values()) == full(heads=6).page_size_bytes
    assert unified["w"].block_size == 32
    assert (unified["x"].block_size, unified["m"].block_size, unified["r"].block_size) == (16, 16, 4)
    with pytest.raises(AssertionError):
        get_uniform_page_size(specs.values())


def mla(head_size: int, block_size: int = 16) -> MLAAttentionSpec:
    return MLAAttentionSpec(block_size=block_size, num_kv_heads=1, head_size=head_size, dtype=BF16)


def test_latent_pages_that_do_not_divide_cannot_be_unified() -> None:
    with pytest.raises(NotImplementedError, match=r"'l'.*1024 bytes"):
        unify_kv_cache_spec_page_size({"l": mla(24), "f": full(heads=2)})


def test_latents_beside_plain_windows_fall_back_to_full_attention(caplog: pytest.LogCaptureFixture) -> None:
    specs = {"l": mla(24), "w": window(heads=2)}
    with pytest.raises(NotImplementedError):
        get_kv_cache_groups(plan_config(layout="LBHNC"), specs)  # even full attention has another page
    specs = {"l": mla(24, block_size=32), "w": window(heads=3, block_size=40)}
    groups = get_kv_cache_groups(plan_config(layout="LBHNC"), specs)
    assert all(isinstance(g.kv_cache_spec, FullAttentionSpec) for g in groups)


def test_without_the_hybrid_manager_windows_keep_all_tokens() -> None:
    specs = {"f": full(), "w": window(size=32), "f2": full()}
    groups = get_kv_cache_groups(plan_config(disable_hybrid=True), specs)
    assert sizes(groups) == [3]
    assert groups[0].kv_cache_spec.sliding_window == 32


def test_promotion_takes_the_full_attention_block_size_and_keeps_the_kind() -> None:
    specs = {
        "f": full(block_size=32),
        "w": window(),
        "c": chunked(),
        "l": SlidingWindowMLASpec(block_size=16, num_kv_heads=1, head_size=8, dtype=BF16, sliding_window=32),
        "m": mamba(),
    }
    unify_hybrid_kv_cache_specs(specs)
    assert {name: spec.block_size for name, spec in specs.items()} == {
        "f": 32,
        "w": 32,
        "c": 32,
        "l": 32,
        "m": 16,
    }
    assert type(specs["w"]) is FullAttentionSpec
    assert type(specs["l"]) is MLAAttentionSpec
    assert specs["c"].attention_chunk_size == 32


def test_windows_alone_are_not_promoted() -> None:
    specs = {"w": window()}
    unify_hybrid_kv_cache_specs(specs)
    assert specs == {"w": window()}


def test_without_the_hybrid_manager_states_beside_attention_are_refused() -> None:
    with pytest.raises(ValueError, match="disable_hybrid_kv_cache_manager"):
        get_kv_cache_groups(plan_config(disable_hybrid=True), {"f": full(), "m": mamba()})


@pytest.mark.parametrize("layout", ["BLHNC", "LBHNC"])
def test_scratch_of_host_sparse_attention_is_grouped_and_hidden_from_connectors(layout: str) -> None:
    hot = HiSparseHotSpec(block_size=16, page_size=640, blocks_per_request=2)
    resident = HiSparseResidentSpec(block_size=16, page_size=640)
    layers = {name: full() for name in ("a", "b")}
    scratch = {f"{name}.hisparse_resident": resident for name in layers}
    scratch |= {f"{name}.hisparse_hot": hot for name in layers}
    config = plan_config(layout=layout)
    groups = get_global_kv_cache_groups(config, [{**layers, "c": window(), **scratch}])
    assert {name for g in groups if not g.enable_kv_transfer for name in g.layer_names} == set(scratch)
    (plan,) = get_kv_cache_configs(config, [{**layers, "c": window(), **scratch}], [1 << 20], groups)
    hidden = [g.kv_cache_spec for g in groups if not g.enable_kv_transfer]
    held = {spec.max_blocks_per_request(config) for spec in hidden}
    assert held == {2, 17}, "256 tokens in flight, and one block more as they may begin inside one"
    cacheable = [groups[i].kv_cache_spec for i in plan.prefix_cacheable_group_ids]
    assert len(cacheable) == len(groups) - len(hidden)
    scheduler_block_size, hash_block_size = resolve_kv_cache_block_sizes(plan, config)
    assert scheduler_block_size % hash_block_size == 0
    assert scheduler_block_size == max(spec.block_size for spec in cacheable)


def test_hidden_states_share_the_table_of_full_attention() -> None:
    hidden = HiddenStateCacheSpec(block_size=16, num_kv_heads=1, head_size=64, dtype=BF16)
    (group,) = get_kv_cache_groups(plan_config(), {"a": full(), "h": hidden})
    assert isinstance(group.kv_cache_spec, UniformTypeKVCacheSpecs)
    assert group.enable_kv_transfer


def test_hisparse_is_refused_by_name() -> None:
    with pytest.raises(ValueError, match="hisparse_config"):
        get_kv_cache_groups(plan_config(hisparse={}), {"f": full()})


def test_partial_records_are_enough_for_grouping() -> None:
    record = SimpleNamespace(cache_config=None, scheduler_config=SimpleNamespace(), speculative_config=None)
    assert sizes(get_kv_cache_groups(record, {"a": full(), "b": window()})) == [1, 1]


def test_group_specs_from_names() -> None:
    groups = create_kv_cache_group_specs({"a": full(), "b": full(), "c": window()}, [["a", "b"], ["c"]])
    assert sizes(groups) == [2, 1]
    assert is_kv_cache_spec_uniform({"a": full(), "b": full()})
    assert not is_kv_cache_spec_uniform({"a": full(), "c": window()})


class WrongBuilder:
    def __init__(self, names: list[list[str]]) -> None:
        self.names = names

    def get_kv_cache_groups(self, vllm_config: object, specs: object) -> list[KVCacheGroupSpec]:
        return [KVCacheGroupSpec(names, full()) for names in self.names]


@pytest.mark.parametrize(
    ("names", "problem"),
    [([["a"]], "in none: ..b"), ([["a", "b"], ["a"]], "several: ..a"), ([["a", "b", "x"]], "x")],
)
def test_builders_must_place_every_layer_exactly_once(names: list[list[str]], problem: str) -> None:
    with pytest.raises(ValueError, match=problem):
        get_kv_cache_groups_from_builder(WrongBuilder(names), plan_config(), {"a": full(), "b": full()})


def test_ranks_must_agree_on_a_layer() -> None:
    with pytest.raises(ValueError, match=r"'a'.*rank 1"):
        get_global_kv_cache_groups(plan_config(), [{"a": full()}, {"a": full(heads=2)}])


class Drafter:
    disable_eagle_block_drop = False

    def needs_eagle_block_drop(self) -> bool:
        return True


def test_draft_layers_flag_their_group_only_if_the_drafter_drops_a_block() -> None:
    specs = [{"a": full(), "w": window(), "w2": window(), "draft": full(is_draft=True)}]
    flags = [g.is_eagle_group for g in get_global_kv_cache_groups(plan_config(speculative=Drafter()), specs)]
    assert flags == [True, False]
    assert not any(g.is_eagle_group for g in get_global_kv_cache_groups(plan_config(), specs))
    keeps = Drafter()
    keeps.disable_eagle_block_drop = True
    assert not any(
        g.is_eagle_group for g in get_global_kv_cache_groups(plan_config(speculative=keeps), specs)
    )


def test_windows_keep_the_drafts_lookahead() -> None:
    groups = get_global_kv_cache_groups(plan_config(lookahead=4), [{"f": full(), "w": window(size=32)}])
    assert groups[1].kv_cache_spec.num_retained_tokens == 31 + 3


def test_replayed_windows_need_whole_prefixes_beside_them() -> None:
    replayed = SlidingWindowMLASpec(
        block_size=16, num_kv_heads=1, head_size=8, dtype=BF16, sliding_window=32, bounded_replay=True
    )
    get_global_kv_cache_groups(plan_config(), [{"f": full(), "r": ring(), "w": replayed}])
    with pytest.raises(ValueError, match=r"swa_bounded_replay.*'m' is mamba"):
        get_global_kv_cache_groups(plan_config(), [{"m": mamba(), "w": replayed}])
    shorter = replace(replayed, sliding_window=16)
    with pytest.raises(ValueError, match=r"swa_bounded_replay needs windows of one size.*\[16, 32\]"):
        get_global_kv_cache_groups(plan_config(), [{"f": full(), "v": shorter, "w": replayed}])


def test_evt_11_events_do_not_change_the_grouping() -> None:
    specs = {"f": full(), "m": mamba(), "w": window()}
    with_events = plan_config()
    with_events.kv_events_config = SimpleNamespace(enable_kv_cache_events=True)
    assert get_kv_cache_groups(with_events, specs) == get_kv_cache_groups(plan_config(), specs)


class OwnGrouping:
    @classmethod
    def get_kv_cache_groups(cls, vllm_config: object, specs: dict[str, object]) -> list[KVCacheGroupSpec]:
        return [KVCacheGroupSpec([name], full()) for name in specs]


def test_a_model_class_may_bring_its_own_grouping() -> None:
    config = plan_config()
    config.model_config.supports_kv_cache_grouping = True
    config.model_config.architectures = ["Own"]
    config.model_config.registry = SimpleNamespace(resolve_model_cls=lambda architectures: OwnGrouping)
    assert sizes(get_global_kv_cache_groups(config, [{"a": full(), "b": full()}])) == [1, 1]
    config.attention_config.hisparse_config = {}
    with pytest.raises(ValueError, match="hisparse_config"):
        get_global_kv_cache_groups(config, [{"a": full()}])
