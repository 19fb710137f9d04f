"""Sizes, equality and merge rules of the KV cache specs."""

from __future__ import annotations

from dataclasses import replace
from fractions import Fraction

import pytest

from tests.helpers.kv_plans import BF16, FP32, U8, full, mamba, plan_config, ring, window
from vllm.v1.kv_cache_interface import (
    ChunkedLocalAttentionSpec,
    CrossAttentionSpec,
    EncoderOnlyAttentionSpec,
    FullAttentionSpec,
    HiddenStateCacheSpec,
    HiSparseHotSpec,
    HiSparseResidentSpec,
    KVCacheSpecKind,
    KVQuantMode,
    MambaSpec,
    MLAAttentionSpec,
    MultipleOf,
    RSWASpec,
    SinkFullAttentionSpec,
    SlidingWindowMLASpec,
    UniformTypeKVCacheSpecs,
    get_kv_cache_spec_kind,
    get_kv_cache_spec_sliding_window,
    get_kv_quant_mode,
    get_mamba_prefill_checkpoint_position,
    is_full_attention_spec,
    is_mamba_prefill_checkpoint_valid,
    is_quantized_kv_cache,
    iter_layer_specs,
    replace_as,
)


def mla(block_size: int = 16, **changes: object) -> MLAAttentionSpec:
    values = {"num_kv_heads": 1, "head_size": 64, "dtype": BF16, **changes}
    return MLAAttentionSpec(block_size=block_size, **values)


def test_page_is_heads_times_states_times_bytes_per_state() -> None:
    assert full(block_size=16, heads=2, head_size=8).page_size_bytes == 2 * 16 * (8 + 8) * 2


def test_value_head_size_defaults_to_key_head_size_and_zero_for_latents() -> None:
    assert full(head_size=8).head_size_v == 8
    assert mla().head_size_v == 0
    assert mla().page_size_bytes == 16 * 64 * 2


def test_several_tokens_per_state_and_several_states_per_token() -> None:
    assert mla(block_size=1152, head_size=132, dtype=U8, tokens_per_state=4).page_size_bytes == 38_016
    assert mla(block_size=8, tokens_per_state=Fraction(1, 2)).num_states == 16


def test_head_slots_and_state_bytes_replace_the_derived_sizes() -> None:
    assert full(heads=2, num_head_slots=3).num_heads == 3
    assert mla(state_content_bytes=584).page_size_bytes == 16 * 584


def test_alignment_rounds_the_page_of_latents_up() -> None:
    spec = mla(block_size=1, state_content_bytes=584, alignment=576)
    assert (spec.unpadded_page_size_bytes, spec.page_size_bytes) == (584, 1152)
    assert spec.real_page_size_bytes == 584


@pytest.mark.parametrize(
    ("content", "alignment", "page"), [(584, 576, 1152), (528, 512, 1024), (288, 512, 512)]
)
def test_rows_of_the_releases_have_their_pages(content: int, alignment: int, page: int) -> None:
    assert mla(block_size=1, state_content_bytes=content, alignment=alignment).page_size_bytes == page


def test_alignment_follows_a_new_block_size() -> None:
    spec = mla(block_size=4, state_content_bytes=584, alignment=576)
    assert spec.copy_with_new_block_size(1).page_size_bytes == 1152


def test_padding_below_the_content_is_refused() -> None:
    with pytest.raises(AssertionError, match="page_size_padded=8"):
        _ = full(page_size_padded=8).page_size_bytes


def test_stride_alignment_must_be_positive() -> None:
    with pytest.raises(ValueError, match="block_stride_alignment"):
        full(block_stride_alignment=0)
    assert full(block_stride_alignment=512).get_block_stride_alignment() == 512
    assert full(block_stride_alignment=MultipleOf(64)).get_block_stride_alignment() == 64
    assert full().get_block_stride_alignment() == 1


def test_draft_flag_is_no_part_of_equality_hash_or_merge() -> None:
    target, draft = full(), full(is_draft=True)
    assert target == draft
    assert hash(target) == hash(draft)
    assert FullAttentionSpec.merge([target, draft]) == target


def test_full_attention_needs_a_request_of_full_length_divided_over_context_ranks() -> None:
    spec = full(block_size=16)
    assert spec.max_memory_usage_bytes(plan_config(max_model_len=100)) == 7 * spec.page_size_bytes
    assert spec.max_memory_usage_bytes(plan_config(max_model_len=100, dcp=4)) == 2 * spec.page_size_bytes
    assert spec.max_num_blocks_per_req(plan_config(dcp=4), 130) == 3
    unsharded = replace(spec, dcp_sharded=False)
    assert unsharded.max_memory_usage_bytes(plan_config(max_model_len=100, dcp=4)) == 7 * spec.page_size_bytes
    assert unsharded.max_num_blocks_per_req(plan_config(dcp=4), 130) == 9


def test_sliding_window_needs_window_plus_tokens_in_flight_plus_one_block() -> None:
    spec = window(block_size=16, size=33, extra_retained_tokens=2)
    config = plan_config(max_model_len=1000, max_in_flight_tokens=64)
    assert spec.num_retained_tokens == 34
    assert spec.max_admission_blocks_per_request(64, 1000) == 7 + 1
    assert spec.max_memory_usage_bytes(config) == 8 * spec.page_size_bytes
    assert spec.max_memory_usage_bytes(plan_config(max_model_len=20)) == 3 * spec.page_size_bytes


def test_off_14_an_unaligned_window_may_touch_one_block_more() -> None:
    assert window(block_size=32, size=4096).max_admission_blocks_per_request(1, 1 << 20) == 129


def test_chunked_local_needs_its_chunk_and_the_tokens_in_flight() -> None:
    spec = ChunkedLocalAttentionSpec(
        block_size=16, num_kv_heads=1, head_size=8, dtype=BF16, attention_chunk_size=64
    )
    assert spec.max_admission_blocks_per_request(32, 1000) == 6
    assert spec.max_memory_usage_bytes(plan_config(max_in_flight_tokens=32)) == 6 * spec.page_size_bytes


def test_ring_needs_one_block_whatever_the_length() -> None:
    spec = ring()
    assert spec.max_memory_usage_bytes(plan_config()) == spec.page_size_bytes
    assert spec.max_num_blocks_per_req(plan_config(), 10_000) == 1
    assert not spec.prefix_cacheable
    assert spec.block_table_token_alignment is None
    assert not spec.uses_slot_mapping


def test_recurrent_states_per_request_by_mode() -> None:
    config = plan_config()
    none = mamba(block_size=1024, mode="none", num_speculative_blocks=2)
    assert none.max_memory_usage_bytes(config) == 3 * none.page_size_bytes
    assert none.max_num_blocks_per_req(config, 1024) == 3
    align = mamba(block_size=16, num_speculative_blocks=1, num_prefill_checkpoint_blocks=1)
    assert align.max_memory_usage_bytes(config) == 4 * align.page_size_bytes
    assert align.max_num_blocks_per_req(config, 100) == 8
    assert (align.keeps_aligned_states, none.keeps_aligned_states) == (True, False)


def test_state_page_is_the_sum_of_its_tensors_or_the_padding() -> None:
    spec = MambaSpec(16, [[3, 6], [4, 2]], [BF16, FP32])
    assert spec.page_size_bytes == 3 * 6 * 2 + 4 * 2 * 4
    assert replace(spec, page_size_padded=100).page_size_bytes == 100
    assert hash(spec) == hash(MambaSpec(16, ((3, 6), (4, 2)), (BF16, FP32)))


def test_encoder_specs() -> None:
    cross = CrossAttentionSpec(block_size=16, num_kv_heads=1, head_size=8, dtype=BF16)
    assert cross.max_memory_usage_bytes(plan_config()) == 16 * cross.page_size_bytes
    only = EncoderOnlyAttentionSpec(block_size=16, num_kv_heads=1, head_size=8, dtype=BF16)
    assert only.max_memory_usage_bytes(plan_config()) == 0


def test_hisparse_scratch() -> None:
    hot = HiSparseHotSpec(block_size=16, page_size=256, blocks_per_request=3)
    assert hot.max_memory_usage_bytes(plan_config()) == 768
    assert (hot.prefix_cacheable, hot.block_table_token_alignment) == (False, None)
    resident = HiSparseResidentSpec(block_size=16, page_size=256)
    assert resident.max_admission_blocks_per_request(100, 50) == 4
    assert resident.max_memory_usage_bytes(plan_config(max_in_flight_tokens=32)) == 512
    assert resident.max_blocks_per_request(plan_config(max_in_flight_tokens=32)) == 3, "tokens 8 to 39, say"
    assert resident.max_blocks_per_request(plan_config(max_in_flight_tokens=2048, max_model_len=1024)) == 64


def test_bounded_replay_windows_are_recomputed_instead_of_found() -> None:
    spec = SlidingWindowMLASpec(
        block_size=32, num_kv_heads=1, head_size=64, dtype=BF16, sliding_window=128, bounded_replay=True
    )
    assert (spec.prefix_cacheable, spec.prefix_replay_tokens) == (False, 128)
    kept = replace(spec, bounded_replay=False)
    assert (kept.prefix_cacheable, kept.prefix_replay_tokens) == (True, 0)
    with pytest.raises(ValueError, match="model_version"):
        replace(spec, model_version="v9")


def test_full_attention_merges_layers_that_differ_only_in_one_window() -> None:
    merged = FullAttentionSpec.merge([full(), full(sliding_window=32), full(sliding_window=32)])
    assert merged.sliding_window == 32
    with pytest.raises(ValueError, match="sliding_window"):
        FullAttentionSpec.merge([full(sliding_window=32), full(sliding_window=64)])
    with pytest.raises(AssertionError):
        FullAttentionSpec.merge([full(sliding_window=32), full(attention_chunk_size=64)])
    with pytest.raises(AssertionError):
        FullAttentionSpec.merge([full(), full(heads=2)])


def test_latents_merge_only_with_equal_roles_and_or_their_non_causal_flags() -> None:
    merged = MLAAttentionSpec.merge([mla(), mla(non_causal=True), mla(non_causal_multi_token_decode=True)])
    assert (merged.non_causal, merged.non_causal_multi_token_decode) == (True, True)
    for difference in (
        {"cache_dtype_str": "fp8"},
        {"topk_buffer_width": 8},
        {"tokens_per_state": 4},
        {"model_version": "deepseek_v4"},
        {"is_index_group_leader": True},
    ):
        with pytest.raises(AssertionError):
            MLAAttentionSpec.merge([mla(), mla(**difference)])


def test_other_kinds_merge_only_when_equal() -> None:
    assert type(window()).merge([window(), window()]) == window()
    with pytest.raises(AssertionError):
        type(window()).merge([window(size=32), window(size=64)])
    with pytest.raises(AssertionError):
        type(window()).merge([])


@pytest.mark.parametrize(
    ("spec", "kind"),
    [
        (full(), KVCacheSpecKind.FULL_ATTENTION),
        (mla(), KVCacheSpecKind.MLA_ATTENTION),
        (HiddenStateCacheSpec(block_size=1, num_kv_heads=1, head_size=8, dtype=BF16), "mla_attention"),
        (RSWASpec(block_size=1, num_kv_heads=1, head_size=8, dtype=BF16, rswa_window=4), "full_attention"),
        (SinkFullAttentionSpec(block_size=1, num_kv_heads=1, head_size=8, dtype=BF16), "sink_full_attention"),
        (window(), "sliding_window"),
        (mamba(), "mamba"),
        (ring(), "unknown"),
    ],
)
def test_kind_named_in_events(spec: object, kind: str) -> None:
    assert get_kv_cache_spec_kind(spec) == kind


def test_window_named_in_events() -> None:
    assert get_kv_cache_spec_sliding_window(window(size=32)) == 32
    assert get_kv_cache_spec_sliding_window(full(sliding_window=32)) is None


def test_uniform_group_adds_pages_and_takes_the_longest_member() -> None:
    uniform = UniformTypeKVCacheSpecs.from_specs({"a": full(heads=1), "b": full(heads=2)})
    assert uniform is not None
    assert uniform.page_size_bytes == full(heads=1).page_size_bytes + full(heads=2).page_size_bytes
    assert uniform.max_memory_usage_bytes(plan_config(max_model_len=32)) == 2 * uniform.page_size_bytes
    assert list(iter_layer_specs(uniform)) == [full(heads=1), full(heads=2)]
    assert is_full_attention_spec(uniform)
    assert uniform.first_spec == full(heads=1)
    assert uniform.dcp_sharded
    assert hash(uniform) == hash(UniformTypeKVCacheSpecs(16, {"a": full(heads=1), "b": full(heads=2)}))


def test_uniform_group_needs_one_block_size_kind_and_window() -> None:
    assert UniformTypeKVCacheSpecs.is_uniform_type({"a": full(), "b": mla()})
    for other in (full(block_size=32), window(), mamba(), full(dcp_sharded=False)):
        assert not UniformTypeKVCacheSpecs.is_uniform_type({"a": full(), "b": other})
    assert not UniformTypeKVCacheSpecs.is_uniform_type({"a": window(size=32), "b": window(size=64)})
    assert not UniformTypeKVCacheSpecs.is_uniform_type({"a": mamba(), "b": mamba(mode="none")})


def test_uniform_kind_is_the_common_one_else_full_attention() -> None:
    assert UniformTypeKVCacheSpecs(16, {"a": full(), "b": mla()}).kv_cache_spec_kind == "full_attention"
    assert (
        UniformTypeKVCacheSpecs(16, {"a": mla(), "b": mla(head_size=8)}).kv_cache_spec_kind == "mla_attention"
    )
    assert UniformTypeKVCacheSpecs(16, {"a": full(), "b": window()}).kv_cache_spec_kind == "unknown"


def test_replace_as_rebuilds_another_class() -> None:
    spec = replace_as(window(size=32), FullAttentionSpec, drop=("extra_retained_tokens",))
    assert (type(spec), spec.sliding_window, spec.block_size) == (FullAttentionSpec, 32, 16)
    with pytest.raises(TypeError):
        replace_as(window(), FullAttentionSpec)


def test_quantisation_mode_of_a_cache_dtype_name() -> None:
    assert get_kv_quant_mode("auto") is KVQuantMode.NONE
    assert get_kv_quant_mode("fp8_e5m2") is KVQuantMode.FP8_PER_TENSOR
    assert get_kv_quant_mode("int8_per_token_head").is_per_token_head
    assert get_kv_quant_mode(None) is KVQuantMode.NONE
    assert KVQuantMode.CUSTOM is KVQuantMode.OCTAVE_K3V4
    assert KVQuantMode(13).is_octave
    assert is_quantized_kv_cache("fp8")
    assert not is_quantized_kv_cache("auto")


@pytest.mark.parametrize(
    ("tokens", "hash_block", "drop", "lookahead", "position"),
    [
        (50, 16, False, 0, 48),
        (48, 16, False, 0, 32),
        (48, 16, True, 0, 32),
        (50, 16, False, 3, 32),
        (8, 16, True, 0, 0),
    ],
)
def test_last_position_whose_state_can_be_found_again(
    tokens: int, hash_block: int, drop: bool, lookahead: int, position: int
) -> None:
    assert get_mamba_prefill_checkpoint_position(tokens, hash_block, drop, lookahead) == position


def test_checkpoints_lie_strictly_inside_a_chunk_and_on_the_backend_alignment() -> None:
    assert is_mamba_prefill_checkpoint_valid(48, 32, 60)
    assert not is_mamba_prefill_checkpoint_valid(60, 32, 60)
    assert not is_mamba_prefill_checkpoint_valid(48, 32, 60, checkpoint_alignment=64)


def test_pages_do_not_shrink_and_padding_is_no_smaller_than_the_content() -> None:
    page = full().page_size_bytes
    assert full().with_page_size(page // 3) is None
    assert window().with_page_size(page // 3) is None
    assert mamba().with_page_size(8) is None
    assert ring().with_page_size(8) is None
    with pytest.raises(AssertionError, match="page_size_padded=8 is smaller than the state"):
        _ = mamba(page_size_padded=8).page_size_bytes
    with pytest.raises(AssertionError, match="empty list"):
        MLAAttentionSpec.merge([])
    with pytest.raises(TypeError, match="int is not a dataclass"):
        replace_as(full(), int)  # type: ignore[type-var]
