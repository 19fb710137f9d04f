"""What planner, worker and tiers ask every kind: the answers of scratch, states and groups of unlike layers."""

from __future__ import annotations

from types import SimpleNamespace

import pytest

from tests.helpers.kv_plans import BF16, FP32, full, mamba, ring, window
from vllm.v1.kv_cache_interface import (
    ChunkedLocalAttentionSpec,
    FullAttentionSpec,
    HiSparseHotSpec,
    HiSparseResidentSpec,
    KVQuantMode,
    MambaSpec,
    MLAAttentionSpec,
    RSWASpec,
    SlidingWindowMLASpec,
    UniformTypeKVCacheSpecs,
)


def hot(blocks: int = 3) -> HiSparseHotSpec:
    return HiSparseHotSpec(block_size=16, page_size=1024, blocks_per_request=blocks)


def resident() -> HiSparseResidentSpec:
    return HiSparseResidentSpec(block_size=16, page_size=1024)


def latent_window(**changes: object) -> SlidingWindowMLASpec:
    fields = {"num_kv_heads": 1, "head_size": 8, "dtype": BF16, "sliding_window": 32, **changes}
    return SlidingWindowMLASpec(block_size=16, **fields)


def uniform(*specs: object) -> UniformTypeKVCacheSpecs:
    members = {f"layer{i}": spec for i, spec in enumerate(specs)}
    return UniformTypeKVCacheSpecs(16, members)  # type: ignore[arg-type]


def test_scratch_is_bytes_without_tensors_and_never_found() -> None:
    for spec in (hot(), resident()):
        assert not spec.prefix_cacheable
        assert not spec.transferable
        assert not spec.has_layer_views
        assert spec.page_size_bytes == spec.num_states * spec.state_content_size_bytes == 1024
        assert (spec.num_heads, spec.tokens_per_state) == (1, 1)
    assert not hot().uses_slot_mapping, "the worker says which row a token takes"
    assert hot().block_table_token_alignment is None
    assert hot(5).max_num_blocks_per_req(None, 10_000) == 5  # type: ignore[arg-type]


def test_a_state_has_no_slots_and_one_row_entry_in_mode_none() -> None:
    spec = mamba(mode="none", num_speculative_blocks=2)
    assert not spec.uses_slot_mapping
    assert spec.block_table_token_alignment is None
    assert not spec.keeps_aligned_states
    assert spec.max_num_blocks_per_req(None, 10_000) == 3  # type: ignore[arg-type]
    assert mamba(mode="align").max_num_blocks_per_req(None, 5 * spec.block_size) == 5  # type: ignore[arg-type]
    assert spec.state_content_size_bytes * spec.num_heads == spec.unpadded_page_size_bytes


def test_a_state_per_block_needs_as_many_states_as_the_longest_request_has_blocks() -> None:
    spec = mamba(mode="all", num_speculative_blocks=1)
    sizing = SimpleNamespace(model_config=SimpleNamespace(max_model_len=4 * spec.block_size))
    assert spec.max_memory_usage_bytes(sizing) == 5 * spec.page_size_bytes  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="resolved max_model_len"):
        spec.max_memory_usage_bytes(SimpleNamespace(model_config=None))  # type: ignore[arg-type]


def test_states_name_a_type_for_each_shape_and_are_padded_but_never_cut() -> None:
    with pytest.raises(ValueError, match="1 state shapes but 2 dtypes"):
        MambaSpec(16, ((4, 4),), (BF16, FP32))
    spec = mamba()
    size = spec.unpadded_page_size_bytes
    padded = spec.with_page_size(2 * size)
    assert padded is not None
    assert padded.page_size_bytes == 2 * size
    assert spec.with_page_size(size - 1) is None
    assert ring().with_page_size(1) is None


def test_a_replicated_state_lies_on_every_rank() -> None:
    assert mamba(tp_replicated=True).tp_replicas(4, 1) == 4
    assert mamba().tp_replicas(4, 1) == 1
    assert uniform(mamba(block_size=16, tp_replicated=True), mamba(block_size=16)).tp_replicas(4, 1) == 1


def test_a_group_of_unlike_layers_answers_for_all_of_them() -> None:
    wide, narrow = full(block_size=16, heads=4), full(block_size=16, heads=2)
    group = uniform(wide, narrow)
    assert (
        group.page_size_bytes
        == group.state_content_size_bytes
        == wide.page_size_bytes + narrow.page_size_bytes
    )
    assert (group.num_heads, group.num_states) == (1, 1), "one page holds them all"
    assert group.uses_slot_mapping
    assert group.has_layer_views
    assert group.sharing_key == wide.sharing_key
    assert group.block_table_token_alignment == wide.block_table_token_alignment
    assert group.max_num_blocks_per_req(_lengths(64), 64) == 4
    assert group.prefix_replay_tokens == 0
    assert not group.keeps_aligned_states
    assert group.get_block_stride_alignment() == 1
    doubled = group.copy_with_new_block_size(32)
    assert {spec.block_size for spec in doubled.kv_cache_specs.values()} == {32}


def test_only_kinds_that_drop_nothing_say_that_any_shorter_prefix_is_whole() -> None:
    rswa = RSWASpec(block_size=16, num_kv_heads=2, head_size=8, dtype=BF16, rswa_window=32)
    assert full().keeps_all_tokens
    assert not rswa.keeps_all_tokens, "its generated tokens leave a window"
    assert not any(spec.keeps_all_tokens for spec in (mamba(), ring(), hot(), resident()))
    assert uniform(full(block_size=16, heads=4), full(block_size=16, heads=2)).keeps_all_tokens
    assert not uniform(rswa, full(block_size=16, heads=2, head_size=8)).keeps_all_tokens


def _lengths(length: int) -> object:
    parallel = SimpleNamespace(decode_context_parallel_size=1, prefill_context_parallel_size=1)
    return SimpleNamespace(model_config=SimpleNamespace(max_model_len=length), parallel_config=parallel)


def test_kinds_that_keep_a_part_become_kinds_that_keep_all() -> None:
    chunked = ChunkedLocalAttentionSpec(
        block_size=16, num_kv_heads=1, head_size=8, dtype=BF16, attention_chunk_size=64
    )
    as_full = chunked.as_full_attention(32)
    assert isinstance(as_full, FullAttentionSpec)
    assert (as_full.block_size, as_full.attention_chunk_size) == (32, 64)
    latent = latent_window().as_full_attention(32)
    assert isinstance(latent, MLAAttentionSpec)
    assert latent.sliding_window == 32
    assert full().as_full_attention(32) == full(), "nothing to give up"
    assert full().with_retained_tokens(3) == full()
    assert window().with_retained_tokens(3).extra_retained_tokens == 3


def test_a_latent_window_knows_its_models_and_fills_wider_pages_with_tokens() -> None:
    with pytest.raises(ValueError, match="model_version must be None or 'deepseek_v4', got 'v3'"):
        latent_window(model_version="v3")
    spec = latent_window()
    assert spec.with_page_size(spec.page_size_bytes) is spec
    doubled = spec.with_page_size(2 * spec.page_size_bytes)
    assert doubled is not None
    assert doubled.block_size == 32
    assert latent_window().sharing_key != latent_window(bounded_replay=True).sharing_key


def test_every_quantisation_belongs_to_one_family() -> None:
    families = {
        "is_per_token_head": {"INT8_PER_TOKEN_HEAD", "FP8_PER_TOKEN_HEAD", "INT4_PER_TOKEN_HEAD"},
        "is_nvfp4": {"NVFP4"},
        "is_turboquant": {m.name for m in KVQuantMode if m.name.startswith("TURBOQUANT")},
        "is_ultraquant": {"ULTRAQUANT_4BIT"},
        "is_octave": {"OCTAVE_K3V4", "OCTAVE_K3V3", "OCTAVE_K3V3_COMPACT"},
        "is_custom_mode": {"OCTAVE_K3V4"},
    }
    for family, names in families.items():
        assert {mode.name for mode in KVQuantMode if getattr(mode, family)} == names, family
