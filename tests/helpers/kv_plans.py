"""Specs and config records for planner tests, built by hand from the published shapes of the models."""

from __future__ import annotations

from dataclasses import dataclass
from types import SimpleNamespace

from vllm.v1.kv_cache_interface import (
    CircularBufferSpec,
    FullAttentionSpec,
    KVCacheSpec,
    MambaSpec,
    MLAAttentionSpec,
    SlidingWindowSpec,
)


@dataclass(frozen=True)
class Bytes:
    """Stands for a dtype: planning needs only its size."""

    itemsize: int


U8, BF16, FP32 = Bytes(1), Bytes(2), Bytes(4)


def plan_config(
    layout: str | None = "BLHNC",
    max_model_len: int = 1024,
    max_in_flight_tokens: int = 256,
    override: int | None = None,
    disable_hybrid: bool | None = None,
    **sizes: object,
) -> SimpleNamespace:
    """A partial record with what the planner reads of a `VllmConfig`."""
    return SimpleNamespace(
        model_config=SimpleNamespace(
            max_model_len=max_model_len,
            original_max_model_len=sizes.get("original_max_model_len", max_model_len),
            supports_kv_cache_grouping=False,
        ),
        cache_config=SimpleNamespace(
            kv_cache_layout=layout,
            block_size=sizes.get("block_size", 16),
            num_gpu_blocks_override=override,
            enable_prefix_caching=sizes.get("enable_prefix_caching", True),
            prefix_match_unit=sizes.get("prefix_match_unit"),
            prefix_cache_retention_interval=0,
        ),
        parallel_config=SimpleNamespace(
            decode_context_parallel_size=sizes.get("dcp", 1), tensor_parallel_size=sizes.get("tp", 1)
        ),
        scheduler_config=SimpleNamespace(
            disable_hybrid_kv_cache_manager=disable_hybrid, max_num_encoder_input_tokens=256
        ),
        attention_config=SimpleNamespace(hisparse_config=sizes.get("hisparse")),
        speculative_config=sizes.get("speculative"),
        kv_transfer_config=sizes.get("kv_transfer"),
        num_prefill_lookahead_tokens=sizes.get("lookahead", 0),
        max_in_flight_tokens=max_in_flight_tokens,
    )


def full(block_size: int = 16, heads: int = 1, head_size: int = 8, **changes: object) -> FullAttentionSpec:
    """A full-attention layer; page = block_size * heads * 2 * head_size * 2 bytes."""
    return FullAttentionSpec(
        block_size=block_size, num_kv_heads=heads, head_size=head_size, dtype=BF16, **changes
    )


def window(block_size: int = 16, size: int = 32, heads: int = 1, **changes: object) -> SlidingWindowSpec:
    """A sliding-window layer."""
    return SlidingWindowSpec(
        block_size=block_size, num_kv_heads=heads, head_size=8, dtype=BF16, sliding_window=size, **changes
    )


def mamba(block_size: int = 16, elements: int = 128, mode: str = "align", **changes: object) -> MambaSpec:
    """A recurrent layer with a state of `elements` fp32 numbers."""
    return MambaSpec(block_size, ((elements,),), (FP32,), mamba_cache_mode=mode, **changes)


def ring(capacity: int = 4, heads: int = 2, head_size: int = 8) -> CircularBufferSpec:
    """Scratch of `capacity` rows per request."""
    return CircularBufferSpec(
        block_size=capacity,
        num_kv_heads=heads,
        head_size=head_size,
        head_size_v=0,
        dtype=BF16,
        dcp_sharded=False,
    )


def glm_release_specs(tp: int) -> dict[str, KVCacheSpec]:
    """GLM-5.3-Flash: 45 layers, attention at every fourth, per rank of `tp` tensor-parallel ranks."""
    state_bytes = (64 * 128 * 128 * 4 + 24576 * 3 * 2) // tp
    latent_bytes = 512 * 2
    block_size = 128 * -(-state_bytes // (128 * latent_bytes))
    specs: dict[str, KVCacheSpec] = {}
    for layer in range(45):
        prefix = f"model.layers.{layer}"
        if layer % 4 == 3:
            specs[f"{prefix}.self_attn.attn"] = MLAAttentionSpec(
                block_size=block_size, num_kv_heads=1, head_size=512, dtype=BF16, max_tp_shards=1
            )
            specs[f"{prefix}.self_attn.indexer.k_cache"] = MLAAttentionSpec(
                block_size=block_size,
                num_kv_heads=1,
                head_size=132,
                dtype=U8,
                tokens_per_state=4,
                max_tp_shards=1,
            )
            specs[f"{prefix}.self_attn.indexer.kpool_tail"] = CircularBufferSpec(
                block_size=4, num_kv_heads=2, head_size=128, head_size_v=0, dtype=BF16, dcp_sharded=False
            )
        else:
            specs[f"{prefix}.linear_attn"] = MambaSpec(
                block_size,
                ((3, 24576 // tp), (64 // tp, 128, 128)),
                (BF16, FP32),
                page_size_padded=block_size * latent_bytes,
                mamba_cache_mode="align",
            )
    return specs


def qwen4_release_specs() -> dict[str, KVCacheSpec]:
    """Qwen3.8-Flash-Next on one of 4 tensor-parallel ranks: 48 layers, attention at every fourth, PLE at layer 2."""
    tp = 4
    key_heads, value_heads, dim = 16 // tp, 48 // tp, 128
    conv = 2 * key_heads * dim + value_heads * dim
    state_bytes = 3 * conv * 2 + value_heads * dim * dim * 4
    token_bytes = 2 * 256 * 2
    block_size = 16 * -(-state_bytes // (16 * token_bytes))
    specs: dict[str, KVCacheSpec] = {}
    for layer in range(48):
        prefix = f"model.layers.{layer}"
        if layer % 4 == 3:
            specs[f"{prefix}.self_attn.attn"] = FullAttentionSpec(
                block_size=block_size, num_kv_heads=1, head_size=256, dtype=BF16, max_tp_shards=2
            )
            specs[f"{prefix}.self_attn.indexer.k_cache"] = MLAAttentionSpec(
                block_size=block_size, num_kv_heads=1, head_size=128, dtype=BF16, tokens_per_state=4
            )
            specs[f"{prefix}.self_attn.indexer.ring"] = CircularBufferSpec(
                block_size=4, num_kv_heads=1, head_size=128, head_size_v=12, dtype=BF16, dcp_sharded=False
            )
            continue
        specs[f"{prefix}.linear_attn"] = MambaSpec(
            block_size,
            ((3, conv), (value_heads, dim, dim)),
            (BF16, FP32),
            page_size_padded=block_size * token_bytes,
            mamba_cache_mode="align",
        )
        if layer == 1:
            specs[f"{prefix}.ple"] = MambaSpec(
                block_size, ((9, 4 * 2560),), (BF16,), mamba_cache_mode="align", tp_replicated=True
            )
    return specs
