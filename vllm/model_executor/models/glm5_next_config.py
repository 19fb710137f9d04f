"""GLM-5.3-Flash: its config.json as numbers, and the KV cache specs that follow from them.

Owns: the derived schedules (layer kinds, indexer kinds) and the block arithmetic. Must not know: layers, weights.
Layer L6.

Blocks. All caches of a layer that keeps tokens use one block size: a multiple of the storage's alignment such that the
latent page is at least as large as one recurrent state, so that both fit the same pool block; state pages are padded up
to it. GPU storage aligns to 128 tokens and keeps pooled keys as 132 bytes (fp8 and a scale); CPU storage aligns to 16
and keeps them in fp32, since near ties decide what is selected.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch

from vllm.model_executor.layers.kpool import ring_capacity
from vllm.model_executor.layers.sharding import check_split
from vllm.model_executor.models.interfaces import ModelSettings
from vllm.v1.kv_cache_interface import (
    CircularBufferSpec,
    KVCacheSpec,
    MambaSpec,
    MLAAttentionSpec,
    SparseCacheRole,
)

__all__ = ["GlmParams", "glm_kv_specs", "resolve_block_size"]

_ALIGNMENT_CPU = 16
_ALIGNMENT_GPU = 128
# fp8 pooled key of 128 channels and one fp32 scale.
_GPU_SCALE_BYTES = 4


@dataclass(frozen=True, slots=True)
class GlmParams:
    """The numbers of one checkpoint's language model, with the per-layer schedules spelled out."""

    vocab_size: int
    hidden_size: int
    intermediate_size: int
    moe_intermediate_size: int
    num_heads: int
    q_rank: int
    latent: int
    key_dim: int
    value_dim: int
    has_bias: bool
    num_experts: int
    top_k: int
    num_shared: int
    routed_scale: float
    norm_topk: bool
    num_groups: int
    top_groups: int
    eps: float
    swiglu_limit: float | None
    activation: str
    is_tied: bool
    index_topk: int
    index_heads: int
    index_dim: int
    pool: int
    linear_heads: int
    linear_dim: int
    linear_kernel: int
    decay_min: float | None
    hc_streams: int
    hc_eps: float
    hc_iterations: int
    is_linear: tuple[bool, ...]
    is_sparse_mlp: tuple[bool, ...]
    has_indexer: tuple[bool, ...]

    @staticmethod
    def from_config(config: Mapping[str, Any]) -> GlmParams:
        """Reads a flat text config or a composite one; `ValueError` names what is missing or not supported."""
        try:
            return GlmParams._read(config)
        except KeyError as error:
            raise ValueError(f"config.json lacks {error.args[0]}") from None

    @staticmethod
    def _read(config: Mapping[str, Any]) -> GlmParams:
        text = config.get("text_config") or config
        layers = int(text["num_hidden_layers"])
        linear = _linear_options(text)
        params = GlmParams(
            vocab_size=int(text["vocab_size"]),
            hidden_size=int(text["hidden_size"]),
            intermediate_size=int(text["intermediate_size"]),
            moe_intermediate_size=int(text["moe_intermediate_size"]),
            num_heads=int(text["num_attention_heads"]),
            q_rank=int(text["q_lora_rank"]),
            latent=int(text["kv_lora_rank"]),
            key_dim=int(text["qk_nope_head_dim"]),
            value_dim=int(text["v_head_dim"]),
            has_bias=bool(text.get("attention_bias", False)),
            num_experts=int(text["n_routed_experts"]),
            top_k=int(text["num_experts_per_tok"]),
            num_shared=int(text.get("n_shared_experts", 1)),
            routed_scale=float(text.get("routed_scaling_factor", 2.5)),
            norm_topk=bool(text.get("norm_topk_prob", True)),
            num_groups=int(text.get("n_group", 1)),
            top_groups=int(text.get("topk_group", 1)),
            eps=float(text.get("rms_norm_eps", 1e-5)),
            swiglu_limit=text.get("swiglu_limit", 10.0),
            activation=str(text.get("hidden_act", "silu")),
            is_tied=bool(config.get("tie_word_embeddings", False)),
            index_topk=int(text.get("index_topk", 2048)),
            index_heads=int(text.get("index_n_heads", 32)),
            index_dim=int(text.get("index_head_dim", 128)),
            pool=int(text.get("index_kpool", 16)),
            linear_heads=linear["num_heads"],
            linear_dim=linear["head_dim"],
            linear_kernel=linear["kernel"],
            decay_min=linear["decay_min"],
            hc_streams=int(text.get("hc_mult", 4)),
            hc_eps=float(text.get("hc_eps", 1e-6)),
            hc_iterations=int(text.get("hc_sinkhorn_iters", 20)),
            is_linear=_linear_schedule(text, layers),
            is_sparse_mlp=_mlp_schedule(text, layers),
            has_indexer=_indexer_schedule(text, layers),
        )
        params.check(text)
        return params

    def check(self, text: Mapping[str, Any]) -> None:
        """Refuses what this engine does not compute."""
        if int(text.get("qk_rope_head_dim", 0)) != 0:
            raise ValueError(
                f"qk_rope_head_dim {text['qk_rope_head_dim']} is not supported; this family has none"
            )
        if self.pool < 1 or self.index_topk % self.pool:
            raise ValueError(f"index_topk {self.index_topk} must be a multiple of index_kpool {self.pool}")
        if self.pool > 1 and not text.get("index_kpool_always_select_tail", True):
            raise ValueError("index_kpool_always_select_tail false is not supported")
        attention = [i for i, linear in enumerate(self.is_linear) if not linear]
        if attention and not self.has_indexer[attention[0]]:
            raise ValueError(
                f"indexer_types: the first attention layer {attention[0]} has no selection to share"
            )

    def check_split(self, tp_size: int) -> None:
        """`ValueError` naming what `tp_size` ranks cannot share."""
        check_split(
            tp_size,
            num_attention_heads=self.num_heads,
            linear_num_heads=self.linear_heads,
            intermediate_size=self.intermediate_size,
            moe_intermediate_size=self.moe_intermediate_size,
        )


def _linear_options(text: Mapping[str, Any]) -> dict[str, Any]:
    """Linear attention sizes, given flat or as one `linear_attn_config`."""
    nested = text.get("linear_attn_config") or {}
    decay_min = nested.get("gate_lower_bound", text.get("linear_lower_bound", -5.0))
    if nested and decay_min is None and nested.get("safe_gate", True):
        decay_min = -5.0
    return {
        "num_heads": int(nested.get("num_heads", text.get("linear_num_heads", 64))),
        "head_dim": int(nested.get("head_dim", text.get("linear_head_dim", 128))),
        "kernel": int(nested.get("short_conv_kernel_size", text.get("linear_conv_kernel_dim", 4))),
        "decay_min": None if decay_min is None else float(decay_min),
    }


def _of_length(name: str, values: list[Any], layers: int) -> list[Any]:
    if len(values) < layers:
        raise ValueError(f"{name} names {len(values)} layers, num_hidden_layers is {layers}")
    return values[:layers]


def _linear_schedule(text: Mapping[str, Any], layers: int) -> tuple[bool, ...]:
    kinds = text.get("layer_types")
    if kinds is None:
        return tuple(i % 4 != 3 for i in range(layers))
    return tuple(k == "linear_attention" for k in _of_length("layer_types", kinds, layers))


def _mlp_schedule(text: Mapping[str, Any], layers: int) -> tuple[bool, ...]:
    kinds = text.get("mlp_layer_types")
    if kinds is None:
        return tuple(i >= 3 for i in range(layers))
    return tuple(k == "sparse" for k in _of_length("mlp_layer_types", kinds, layers))


def _indexer_schedule(text: Mapping[str, Any], layers: int) -> tuple[bool, ...]:
    kinds = text.get("indexer_types") or text.get("index_topk_pattern")
    if kinds is not None:
        return tuple(k in ("full", "F") for k in _of_length("indexer_types", list(kinds), layers))
    every = max(int(text.get("index_topk_freq", 1)), 1)
    offset = int(text.get("index_skip_topk_offset", 2))
    return tuple(max(i - offset + 1, 0) % every == 0 for i in range(layers))


def _state_shapes(params: GlmParams, settings: ModelSettings) -> tuple[tuple[int, ...], tuple[int, ...]]:
    params.check_split(settings.tp_size)
    heads = params.linear_heads // settings.tp_size
    rows = params.linear_kernel - 1 + settings.num_speculative_tokens
    return (rows, 3 * heads * params.linear_dim), (heads, params.linear_dim, params.linear_dim)


def resolve_block_size(params: GlmParams, settings: ModelSettings) -> int:
    """Tokens per block: the user's wish if the latent page then holds a state, else the least size that does."""
    conv, state = _state_shapes(params, settings)
    state_bytes = math.prod(conv) * settings.dtype.itemsize + math.prod(state) * torch.float32.itemsize
    token_bytes: int = params.latent * settings.cache_dtype.itemsize
    base = _ALIGNMENT_GPU if settings.gpu_storage else _ALIGNMENT_CPU
    alignment: int = math.lcm(base, ring_capacity(params.pool, settings.num_speculative_tokens))
    least: int = state_bytes if any(params.is_linear) else 1
    needed = alignment * math.ceil(least / (alignment * token_bytes))
    wished = settings.block_size or 0
    return max(needed, alignment * math.ceil(wished / alignment))


def glm_kv_specs(config: Mapping[str, Any], settings: ModelSettings) -> dict[str, KVCacheSpec]:
    """Cache names and specs of one rank, in layer order, from a config.json alone."""
    params = GlmParams.from_config(config)
    block_size = resolve_block_size(params, settings)
    rows: dict[str, Any] = {"block_size": block_size, "num_kv_heads": 1, "max_tp_shards": 1}
    latent = MLAAttentionSpec(**rows, head_size=params.latent, dtype=settings.cache_dtype)
    key_width, key_dtype = params.index_dim, torch.float32
    if settings.gpu_storage:
        key_width, key_dtype = params.index_dim + _GPU_SCALE_BYTES, torch.uint8
    keys = MLAAttentionSpec(
        **rows,
        head_size=key_width,
        dtype=key_dtype,
        tokens_per_state=params.pool,
        cache_role=SparseCacheRole.INDEXER,
    )
    ring = CircularBufferSpec(
        block_size=ring_capacity(params.pool, settings.num_speculative_tokens),
        num_kv_heads=2,
        head_size=params.index_dim,
        head_size_v=0,
        dtype=settings.dtype,
        dcp_sharded=False,
    )
    state = MambaSpec(
        block_size=block_size if settings.enable_prefix_caching else settings.max_model_len,
        shapes=_state_shapes(params, settings),
        dtypes=(settings.dtype, torch.float32),
        page_size_padded=latent.page_size_bytes,
        mamba_cache_mode="align" if settings.enable_prefix_caching else "none",
        num_speculative_blocks=settings.num_speculative_tokens,
    )
    specs: dict[str, KVCacheSpec] = {}
    for i, linear in enumerate(params.is_linear):
        if linear:
            specs[f"model.layers.{i}.linear_attn"] = state
            continue
        prefix = f"model.layers.{i}.self_attn"
        specs[f"{prefix}.attn"] = latent
        if params.has_indexer[i]:
            specs[f"{prefix}.indexer.k_cache"] = keys
            specs[f"{prefix}.indexer.kpool_tail"] = ring
    return specs
