"""Gemma 3 and 4, text path: sliding and full attention; last layers may read earlier layers' caches.

Owns: the assembly of the layers and the checkpoint names. Must not know: the runner. Layer L6.
The vision and audio towers of a composite checkpoint are passed over.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from vllm.model_executor.layers.activation import by_rows, get_gated_activation
from vllm.model_executor.layers.attention import GroupedQueryAttention
from vllm.model_executor.layers.fused_moe import RoutedExperts, route_softmax
from vllm.model_executor.layers.layernorm import PlainRMSNorm, RMSNorm
from vllm.model_executor.layers.linear import Linear, frozen
from vllm.model_executor.layers.mlp import GatedMLP
from vllm.model_executor.layers.rotary_embedding import RotaryEmbedding
from vllm.model_executor.layers.sharding import Shard, Slot, Weight
from vllm.model_executor.layers.vocab_embedding import LmHead, VocabEmbedding
from vllm.model_executor.models.gemma4_config import GemmaParams, cache_name, gemma_kv_specs
from vllm.model_executor.models.interfaces import ModelSettings, NativeModel, config_dict
from vllm.v1.attention.backend import StepMeta
from vllm.v1.attention.pages import KVHeadPages
from vllm.v1.kv_cache_interface import KVCacheSpec

__all__ = ["Gemma4ForCausalLM"]

_TOWERS = ("vision_tower.", "audio_tower.", "embed_vision.", "embed_audio.", "multi_modal_projector.")
_OF_OWNERS = (".k_proj.weight", ".k_proj.bias", ".v_proj.weight", ".v_proj.bias", ".k_norm.weight")
_STACKED = ".experts.gate_up_proj"


class GemmaExperts(RoutedExperts):
    """Experts beside the dense feed-forward; the router reads the residual stream, normed and scaled by channel."""

    def __init__(self, p: GemmaParams, dtype: torch.dtype) -> None:
        super().__init__((p.num_experts, p.hidden_size, p.moe_intermediate_size), dtype, p.activation)
        self.top_k = p.top_k
        self.router_norm = PlainRMSNorm(p.hidden_size, p.eps, dtype)
        self.router = frozen(p.num_experts, p.hidden_size, dtype=torch.float32)
        self.channel_scale = frozen(p.hidden_size, dtype=torch.float32)
        self.expert_scale = frozen(p.num_experts, dtype=torch.float32)

    def route_and_run(self, residual: Tensor, x: Tensor) -> Tensor:
        """The experts that `residual` chooses, over `x`."""
        scaled = self.router_norm.forward(residual).float() * self.channel_scale * residual.shape[1] ** -0.5
        weights, experts = route_softmax(F.linear(scaled, self.router), self.top_k)
        return self.tp.all_reduce(self.partial(x, weights * self.expert_scale[experts], experts))

    def weight_slots(self, prefix: str) -> Iterator[tuple[str, Slot]]:
        yield f"{prefix}.router.proj.weight", self.router
        yield f"{prefix}.router.scale", self.channel_scale
        yield f"{prefix}.router.per_expert_scale", self.expert_scale
        shard = Shard.of_rank(self.tp)
        gate, up = self.gate_up.chunk(2, dim=1)
        yield f"{prefix}.experts.gate_proj", shard.slot(gate, axis=1)
        yield f"{prefix}.experts.up_proj", shard.slot(up, axis=1)
        yield f"{prefix}.experts.down_proj", shard.slot(self.down, axis=2)


class GemmaLayer(nn.Module):
    """Attention and feed-forward, each normed before and after, then what the token's own embedding adds."""

    def __init__(
        self, p: GemmaParams, settings: ModelSettings, index: int, pages: KVHeadPages, rope: RotaryEmbedding
    ) -> None:
        super().__init__()
        dtype, layer = settings.dtype, p.layers[index]
        self.attention = GroupedQueryAttention(
            p.attention_shape(layer, settings), pages, rope, settings.attention
        )
        self.mlp = GatedMLP((p.hidden_size, layer.intermediate_size), dtype, p.activation)
        self.scalar = frozen(1, dtype=dtype) if p.generation == 4 else None
        names = [
            "input_layernorm",
            "post_attention_layernorm",
            "pre_feedforward_layernorm",
            "post_feedforward_layernorm",
        ]
        self.experts: GemmaExperts | None = None
        if p.num_experts:
            self.experts = GemmaExperts(p, dtype)
            names += [
                f"{place}_feedforward_layernorm_{i}" for place, i in (("post", 1), ("pre", 2), ("post", 2))
            ]
        if p.ple_size:
            names.append("post_per_layer_input_norm")
            self.ple_gate = Linear(p.hidden_size, p.ple_size, dtype)
            self.ple_projection = Linear(p.ple_size, p.hidden_size, dtype)
            self.activation = get_gated_activation(p.activation)
        # By checkpoint name: there are up to eight of them.
        self.norms = nn.ModuleDict({name: p.norm(p.hidden_size, p.eps, dtype) for name in names})

    def norm(self, name: str, x: Tensor) -> Tensor:
        normed: Tensor = self.norms[name].forward(x)
        return normed

    def forward(self, x: Tensor, ple: Tensor | None, meta: StepMeta) -> Tensor:
        """`ple [T, P]`: the layer's part of the tokens' per-layer embeddings."""
        attended = self.attention.forward(self.norm("input_layernorm", x), meta)
        x = x + self.norm("post_attention_layernorm", attended)
        y = self.mlp.forward(self.norm("pre_feedforward_layernorm", x))
        if self.experts is not None:
            routed = self.experts.route_and_run(x, self.norm("pre_feedforward_layernorm_2", x))
            y = self.norm("post_feedforward_layernorm_1", y) + self.norm(
                "post_feedforward_layernorm_2", routed
            )
        x = x + self.norm("post_feedforward_layernorm", y)
        if ple is not None:
            gated = self.activation(torch.cat([self.ple_gate.forward(x), ple], dim=-1))
            x = x + self.norm("post_per_layer_input_norm", self.ple_projection.forward(gated))
        return x if self.scalar is None else x * self.scalar

    def weight_slots(self, prefix: str) -> Iterator[tuple[str, Slot]]:
        yield from self.attention.weight_slots(f"{prefix}.self_attn")
        yield from self.mlp.weight_slots(f"{prefix}.mlp")
        if self.scalar is not None:
            yield f"{prefix}.layer_scalar", self.scalar
        for name, norm in self.norms.items():
            yield f"{prefix}.{name}.weight", norm.weight
        if self.experts is not None:
            yield from self.experts.weight_slots(prefix)
        if "post_per_layer_input_norm" in self.norms:
            yield from self.ple_gate.weight_slots(f"{prefix}.per_layer_input_gate")
            yield from self.ple_projection.weight_slots(f"{prefix}.per_layer_projection")


class PerLayerEmbedding(nn.Module):
    """A small input for every layer: a table looked up by token, and a projection of the token's embedding."""

    def __init__(self, p: GemmaParams, dtype: torch.dtype) -> None:
        super().__init__()
        self.shape = (len(p.layers), p.ple_size)
        width = len(p.layers) * p.ple_size
        self.table = VocabEmbedding(p.ple_vocab_size, width, dtype)
        self.projection = Linear(p.hidden_size, width, dtype)
        self.norm = RMSNorm(p.ple_size, p.eps, dtype)
        self.table_scale = _rounded(p.ple_size**0.5, dtype)

    def forward(self, ids: Tensor, embedded: Tensor) -> Tensor:
        """`[T]`, `[T, D]` → `[T, layers, P]`."""
        projected = self.projection.forward(embedded) * embedded.shape[1] ** -0.5
        looked_up = (self.table.forward(ids) * self.table_scale).unflatten(-1, self.shape)
        return (self.norm.forward(projected.unflatten(-1, self.shape)) + looked_up) * 2.0**-0.5

    def weight_slots(self) -> Iterator[tuple[str, Slot]]:
        yield from self.table.weight_slots("model.embed_tokens_per_layer")
        yield from self.projection.weight_slots("model.per_layer_model_projection")
        yield from self.norm.weight_slots("model.per_layer_projection_norm")


def _rounded(value: float, dtype: torch.dtype) -> float:
    """The factor as the checkpoint's type holds it: what the model was trained with."""
    return float(torch.tensor(value, dtype=dtype))


class Gemma4ForCausalLM(NativeModel):
    """Serves both the flat text checkpoint and the language model of the composite one."""

    def __init__(self, vllm_config: Any) -> None:
        super().__init__()
        settings = ModelSettings.from_vllm_config(vllm_config)
        params = GemmaParams.from_config(config_dict(vllm_config.model_config.hf_config))
        self.params = params
        self.embed = VocabEmbedding(params.vocab_size, params.hidden_size, settings.dtype)
        self.embed_scale = _rounded(params.hidden_size**0.5, settings.dtype)
        self.per_layer = PerLayerEmbedding(params, settings.dtype) if params.ple_size else None
        ropes = {kind: RotaryEmbedding(rope) for kind, rope in params.ropes.items()}
        self.layers = nn.ModuleList()
        for i, (name, spec) in enumerate(gemma_kv_specs(params, settings).items()):
            pages = KVHeadPages(name, spec)
            self.cache_layers[name] = pages
            layer = params.layers[i]
            if layer.target is not None:
                self.shared_caches[name] = cache_name(layer.target)
            self.layers.append(GemmaLayer(params, settings, i, pages, ropes[layer.kind]))
        self.norm = params.norm(params.hidden_size, params.eps, settings.dtype)
        tied = self.embed if params.is_tied else None
        self.head = LmHead(params.vocab_size, params.hidden_size, settings.dtype, tied)

    @classmethod
    def kv_specs_from_config(cls, hf_config: Any, settings: ModelSettings) -> dict[str, KVCacheSpec]:
        """The specs without building the model; those of layers that own a cache."""
        params = GemmaParams.from_config(config_dict(hf_config))
        specs = gemma_kv_specs(params, settings)
        return {
            name: specs[name]
            for name, layer in zip(specs, params.layers, strict=True)
            if layer.target is None
        }

    @classmethod
    def check_split(cls, config: Mapping[str, Any], tp_size: int) -> None:
        GemmaParams.from_config(config).check_split(tp_size)

    def forward(self, input_ids: Tensor, positions: Tensor, meta: StepMeta) -> Tensor:
        x = self.embed.forward(input_ids) * self.embed_scale
        ples = self.per_layer.forward(input_ids, x) if self.per_layer is not None else None
        for i, layer in enumerate(self.layers):
            x = layer.forward(x, None if ples is None else ples[:, i], meta)
        return self.norm.forward(x)

    def compute_logits(self, hidden: Tensor) -> Tensor:
        logits, cap = self.head.forward(hidden), self.params.softcap
        return logits if cap is None else by_rows(torch.tanh, logits / cap) * cap

    def load_weights(self, weights: Iterable[tuple[str, Weight]]) -> set[str]:
        return super().load_weights(_with_experts_split(weights))

    def weight_name(self, name: str) -> str | None:
        if name.removeprefix("model.").startswith(_TOWERS):
            return None
        name = name.replace("model.language_model.", "model.", 1).removeprefix("language_model.")
        if name == "lm_head.weight" and self.params.is_tied:
            return None
        if name.endswith(_OF_OWNERS) and cache_name(int(name.split(".")[2])) in self.shared_caches:
            return None  # some checkpoints keep what a layer had before it shared
        return super().weight_name(name)

    def weight_slots(self) -> Iterator[tuple[str, Slot]]:
        yield from self.embed.weight_slots("model.embed_tokens")
        if self.per_layer is not None:
            yield from self.per_layer.weight_slots()
        for i, layer in enumerate(self.layers):
            yield from layer.weight_slots(f"model.layers.{i}")
        yield from self.norm.weight_slots("model.norm")
        yield from self.head.weight_slots("lm_head")


def _with_experts_split(weights: Iterable[tuple[str, Weight]]) -> Iterator[tuple[str, Weight]]:
    """Gates and ups of a layer's experts come as one tensor `[E, gate | up, D]`; ranks take parts of each."""
    for name, weight in weights:
        if not name.endswith(_STACKED):
            yield name, weight
            continue
        experts, width, hidden = weight.shape
        for part, low in (("gate_proj", 0), ("up_proj", width // 2)):
            halves = slice(0, experts), slice(low, low + width // 2), slice(0, hidden)
            yield name.replace("gate_up_proj", part), weight[halves]
