"""Llama and its close relatives: Mistral, Qwen2, Qwen3.

Owns: the translation of their config.json into layers, and their checkpoint names. Must not know: the runner. Layer L6.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from torch import Tensor, nn

from vllm.model_executor.layers.attention import AttentionShape, GroupedQueryAttention
from vllm.model_executor.layers.layernorm import RMSNorm
from vllm.model_executor.layers.mlp import GatedMLP
from vllm.model_executor.layers.rotary_embedding import ROPE_FACTORS, RopeParams, RotaryEmbedding
from vllm.model_executor.layers.sharding import Slot, Weight, check_split
from vllm.model_executor.layers.vocab_embedding import LmHead, VocabEmbedding
from vllm.model_executor.models.interfaces import ModelSettings, NativeModel, config_dict
from vllm.v1.attention.backend import StepMeta
from vllm.v1.attention.pages import KVHeadPages
from vllm.v1.kv_cache_interface import AttentionSpec, FullAttentionSpec, KVCacheSpec, SlidingWindowSpec

__all__ = ["LlamaForCausalLM", "llama_kv_specs"]

_DEFAULT_BLOCK_SIZE = 16


@dataclass(frozen=True, slots=True)
class LlamaParams:
    """The numbers of one checkpoint. `windows` holds one entry per layer, None for full attention."""

    vocab_size: int
    hidden_size: int
    intermediate_size: int
    num_layers: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    eps: float
    activation: str
    is_tied: bool
    qkv_bias: bool
    out_bias: bool
    mlp_bias: bool
    has_qk_norm: bool
    windows: tuple[int | None, ...]

    @staticmethod
    def from_config(config: Mapping[str, Any]) -> LlamaParams:
        """Reads a config.json; `ValueError` names what is missing, or an impossible head count."""
        try:
            return LlamaParams._read(config)
        except KeyError as error:
            raise ValueError(f"config.json lacks {error.args[0]}") from None

    @staticmethod
    def _read(config: Mapping[str, Any]) -> LlamaParams:
        heads = int(config["num_attention_heads"])
        kv_heads = int(config.get("num_key_value_heads") or heads)
        if kv_heads < 1 or heads % kv_heads:
            raise ValueError(
                f"num_attention_heads {heads} is not a multiple of num_key_value_heads {kv_heads}"
            )
        kind = str(config.get("model_type", "llama"))
        bias = bool(config.get("attention_bias", False))
        return LlamaParams(
            vocab_size=int(config["vocab_size"]),
            hidden_size=int(config["hidden_size"]),
            intermediate_size=int(config["intermediate_size"]),
            num_layers=int(config["num_hidden_layers"]),
            num_heads=heads,
            num_kv_heads=kv_heads,
            head_dim=int(config.get("head_dim") or config["hidden_size"] // heads),
            eps=float(config.get("rms_norm_eps", 1e-6)),
            activation=str(config.get("hidden_act", "silu")),
            is_tied=bool(config.get("tie_word_embeddings", False)),
            qkv_bias=bias or kind == "qwen2",
            out_bias=bias and kind != "qwen2",
            mlp_bias=bool(config.get("mlp_bias", False)),
            has_qk_norm=kind == "qwen3",
            windows=_layer_windows(config, kind),
        )

    def check_split(self, tp_size: int) -> None:
        """`ValueError` naming what `tp_size` ranks cannot share."""
        check_split(tp_size, num_attention_heads=self.num_heads, intermediate_size=self.intermediate_size)
        # Fewer KV heads than ranks are repeated; either way no rank may have parts of two of them.
        if tp_size % self.num_kv_heads:
            check_split(tp_size, num_key_value_heads=self.num_kv_heads)

    def attention_shape(self, layer: int, settings: ModelSettings) -> AttentionShape:
        """The shape record of one layer's attention."""
        return AttentionShape(
            hidden_size=self.hidden_size,
            num_heads=self.num_heads,
            num_kv_heads=self.num_kv_heads,
            head_dim=self.head_dim,
            dtype=settings.dtype,
            qkv_bias=self.qkv_bias,
            out_bias=self.out_bias,
            qk_norm_eps=self.eps if self.has_qk_norm else None,
            window=self.windows[layer],
        )


def _layer_windows(config: Mapping[str, Any], kind: str) -> tuple[int | None, ...]:
    """The window of each layer: by `layer_types`, else by the family's own rule."""
    layers = int(config["num_hidden_layers"])
    window = config.get("sliding_window")
    if not window or (kind.startswith("qwen") and not config.get("use_sliding_window", False)):
        return (None,) * layers
    kinds = config.get("layer_types")
    if kinds:
        return tuple(int(window) if k == "sliding_attention" else None for k in kinds)
    if kind.startswith("qwen"):
        first = int(config.get("max_window_layers", 0))
        return tuple(int(window) if i >= first else None for i in range(layers))
    return (int(window),) * layers


def llama_kv_specs(config: Mapping[str, Any], settings: ModelSettings) -> dict[str, AttentionSpec]:
    """Cache names and specs of one rank from a config.json alone.

    `ValueError` when that many ranks cannot share the model.
    """
    params = LlamaParams.from_config(config)
    params.check_split(settings.tp_size)
    sizes: dict[str, Any] = {
        "block_size": settings.block_size or _DEFAULT_BLOCK_SIZE,
        "num_kv_heads": max(1, params.num_kv_heads // settings.tp_size),
        "head_size": params.head_dim,
        "dtype": settings.cache_dtype,
        "max_tp_shards": params.num_kv_heads,
    }
    specs: dict[str, AttentionSpec] = {}
    for i, window in enumerate(params.windows):
        name = f"model.layers.{i}.self_attn.attn"
        if window is None:
            specs[name] = FullAttentionSpec(**sizes)
        else:
            specs[name] = SlidingWindowSpec(**sizes, sliding_window=window)
    return specs


class LlamaLayer(nn.Module):
    """Pre-norm attention and feed-forward; the residual stream is updated in place."""

    def __init__(
        self,
        params: LlamaParams,
        settings: ModelSettings,
        index: int,
        pages: KVHeadPages,
        rope: RotaryEmbedding,
    ) -> None:
        super().__init__()
        dtype = settings.dtype
        self.input_norm = RMSNorm(params.hidden_size, params.eps, dtype)
        shape = params.attention_shape(index, settings)
        self.attention = GroupedQueryAttention(shape, pages, rope, settings.attention)
        self.post_norm = RMSNorm(params.hidden_size, params.eps, dtype)
        sizes = (params.hidden_size, params.intermediate_size)
        self.mlp = GatedMLP(sizes, dtype, params.activation, params.mlp_bias)

    def forward(self, x: Tensor | None, residual: Tensor, meta: StepMeta) -> Tensor:
        """`x` is the previous layer's output, not yet added to `residual` (None before the first layer)."""
        normed = self.input_norm.forward(residual) if x is None else self.input_norm.add_and_norm(x, residual)
        attended = self.attention.forward(normed, meta)
        return self.mlp.forward(self.post_norm.add_and_norm(attended, residual))

    def weight_slots(self, prefix: str) -> Iterator[tuple[str, Slot]]:
        yield from self.input_norm.weight_slots(f"{prefix}.input_layernorm")
        yield from self.attention.weight_slots(f"{prefix}.self_attn")
        yield from self.post_norm.weight_slots(f"{prefix}.post_attention_layernorm")
        yield from self.mlp.weight_slots(f"{prefix}.mlp")


class LlamaForCausalLM(NativeModel):
    """Decoder with rotary positions, grouped-query attention and gated feed-forward."""

    def __init__(self, vllm_config: Any) -> None:
        super().__init__()
        config = config_dict(vllm_config.model_config.hf_config)
        settings = ModelSettings.from_vllm_config(vllm_config)
        params = LlamaParams.from_config(config)
        self.params = params
        self.embed = VocabEmbedding(params.vocab_size, params.hidden_size, settings.dtype)
        self.rope = RotaryEmbedding(RopeParams.from_config(config, params.head_dim))
        self.layers = nn.ModuleList()
        for i, (name, spec) in enumerate(llama_kv_specs(config, settings).items()):
            pages = KVHeadPages(name, spec)
            self.cache_layers[name] = pages
            self.layers.append(LlamaLayer(params, settings, i, pages, self.rope))
        self.norm = RMSNorm(params.hidden_size, params.eps, settings.dtype)
        tied = self.embed if params.is_tied else None
        self.head = LmHead(params.vocab_size, params.hidden_size, settings.dtype, tied)

    @classmethod
    def kv_specs_from_config(cls, hf_config: Any, settings: ModelSettings) -> dict[str, KVCacheSpec]:
        """The specs without building the model."""
        return dict(llama_kv_specs(config_dict(hf_config), settings))

    @classmethod
    def check_split(cls, config: Mapping[str, Any], tp_size: int) -> None:
        LlamaParams.from_config(config).check_split(tp_size)

    def forward(self, input_ids: Tensor, positions: Tensor, meta: StepMeta) -> Tensor:
        residual = self.embed.forward(input_ids)
        x: Tensor | None = None
        for layer in self.layers:
            x = layer.forward(x, residual, meta)
        if x is None:
            return self.norm.forward(residual)
        return self.norm.add_and_norm(x, residual)

    def compute_logits(self, hidden: Tensor) -> Tensor:
        return self.head.forward(hidden)

    def load_weights(self, weights: Iterable[tuple[str, Weight]]) -> set[str]:
        return super().load_weights(self._take_rope_factors(weights))

    def _take_rope_factors(self, weights: Iterable[tuple[str, Weight]]) -> Iterator[tuple[str, Weight]]:
        """Passes everything on but the rotary factors, which are no parameter."""
        for name, weight in weights:
            if name == ROPE_FACTORS:
                self.rope.divide_frequencies(weight[()])
            else:
                yield name, weight

    def weight_name(self, name: str) -> str | None:
        if name == "lm_head.weight" and self.params.is_tied:
            return None  # some checkpoints store the shared matrix twice
        return super().weight_name(name)

    def weight_slots(self) -> Iterator[tuple[str, Slot]]:
        yield from self.embed.weight_slots("model.embed_tokens")
        for i, layer in enumerate(self.layers):
            yield from layer.weight_slots(f"model.layers.{i}")
        yield from self.norm.weight_slots("model.norm")
        yield from self.head.weight_slots("lm_head")
