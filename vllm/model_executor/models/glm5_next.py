"""GLM-5.3-Flash, text path: hyper-connected layers of KDA or sparse latent attention, with a mixture of experts.

Owns: the assembly of the layers and the checkpoint names. Must not know: the runner. Layer L6.
The vision tower and the multi-token-prediction layer of a checkpoint are passed over.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

from torch import Tensor, nn

from vllm.model_executor.layers.fused_moe import MoeShape, SharedExpertMoE
from vllm.model_executor.layers.kda import KdaShape, KimiDeltaAttention
from vllm.model_executor.layers.kpool import IndexerShape, KpoolIndexer, Selection
from vllm.model_executor.layers.layernorm import RMSNorm
from vllm.model_executor.layers.mhc import HyperConnection, MhcShape
from vllm.model_executor.layers.mla import LatentShape, SparseLatentAttention
from vllm.model_executor.layers.mlp import GatedMLP
from vllm.model_executor.layers.sharding import Slot
from vllm.model_executor.layers.vocab_embedding import LmHead, VocabEmbedding
from vllm.model_executor.models.glm5_next_config import GlmParams, glm_kv_specs
from vllm.model_executor.models.interfaces import ModelSettings, NativeModel, config_dict
from vllm.v1.attention.backend import CacheLayer, StepMeta
from vllm.v1.attention.pages import RingPages, RowPages, StatePages
from vllm.v1.kv_cache_interface import KVCacheSpec

__all__ = ["Glm5NextForCausalLM"]


class LayerBuilder:
    """Builds the parts of the layers and collects their caches by name."""

    def __init__(self, params: GlmParams, settings: ModelSettings, specs: Mapping[str, KVCacheSpec]) -> None:
        self.params = params
        self.settings = settings
        self.specs: Mapping[str, Any] = specs
        self.caches: dict[str, CacheLayer] = {}

    def _rows(self, name: str) -> RowPages:
        pages = RowPages(name, self.specs[name])
        self.caches[name] = pages
        return pages

    def linear_attention(self, index: int) -> KimiDeltaAttention:
        p = self.params
        name = f"model.layers.{index}.linear_attn"
        pages = StatePages(name, self.specs[name])
        self.caches[name] = pages
        shape = KdaShape(
            p.hidden_size,
            p.linear_heads,
            p.linear_dim,
            p.linear_kernel,
            p.decay_min,
            p.eps,
            self.settings.dtype,
        )
        return KimiDeltaAttention(shape, pages)

    def sparse_attention(self, index: int) -> SparseLatentAttention:
        p, dtype = self.params, self.settings.dtype
        prefix = f"model.layers.{index}.self_attn"
        pages = self._rows(f"{prefix}.attn")
        indexer = None
        if p.has_indexer[index]:
            keys = self._rows(f"{prefix}.indexer.k_cache")
            ring_name = f"{prefix}.indexer.kpool_tail"
            ring = RingPages(ring_name, self.specs[ring_name])
            self.caches[ring_name] = ring
            indexer_shape = IndexerShape(
                p.hidden_size, p.q_rank, p.index_heads, p.index_dim, p.index_topk, p.pool, dtype
            )
            indexer = KpoolIndexer(indexer_shape, keys, ring)
        shape = LatentShape(
            hidden_size=p.hidden_size,
            num_heads=p.num_heads,
            q_rank=p.q_rank,
            latent=p.latent,
            key_dim=p.key_dim,
            value_dim=p.value_dim,
            eps=p.eps,
            dtype=dtype,
            has_bias=p.has_bias,
        )
        return SparseLatentAttention(shape, pages, indexer, self.settings.attention)

    def feed_forward(self, index: int) -> SharedExpertMoE | GatedMLP:
        p, dtype = self.params, self.settings.dtype
        if not p.is_sparse_mlp[index]:
            return GatedMLP((p.hidden_size, p.intermediate_size), dtype, p.activation, limit=p.swiglu_limit)
        shape = MoeShape(
            hidden_size=p.hidden_size,
            intermediate_size=p.moe_intermediate_size,
            num_experts=p.num_experts,
            top_k=p.top_k,
            num_shared=p.num_shared,
            scale=p.routed_scale,
            is_normalised=p.norm_topk,
            num_groups=p.num_groups,
            top_groups=p.top_groups,
            limit=p.swiglu_limit,
            dtype=dtype,
        )
        return SharedExpertMoE(shape)

    def connection(self) -> HyperConnection:
        p = self.params
        return HyperConnection(MhcShape(p.hidden_size, p.hc_streams, p.hc_eps, p.hc_iterations, p.eps))

    def norm(self) -> RMSNorm:
        return RMSNorm(self.params.hidden_size, self.params.eps, self.settings.dtype)


class GlmLayer(nn.Module):
    """Hyper-connected mixer, then hyper-connected feed-forward."""

    def __init__(self, builder: LayerBuilder, index: int) -> None:
        super().__init__()
        self.linear: KimiDeltaAttention | None = None
        self.sparse: SparseLatentAttention | None = None
        if builder.params.is_linear[index]:
            self.linear = builder.linear_attention(index)
        else:
            self.sparse = builder.sparse_attention(index)
        self.mlp = builder.feed_forward(index)
        self.input_norm, self.post_norm = builder.norm(), builder.norm()
        self.mixer_connection, self.mlp_connection = builder.connection(), builder.connection()

    def forward(
        self, streams: Tensor, meta: StepMeta, selection: Selection | None
    ) -> tuple[Tensor, Selection | None]:
        x, post, comb = self.mixer_connection.collapse(streams)
        x = self.input_norm.forward(x)
        if self.sparse is not None:
            x, selection = self.sparse.forward(x, meta, selection)
        elif self.linear is not None:
            x = self.linear.forward(x, meta)
        streams = HyperConnection.merge(streams, x, post, comb)
        x, post, comb = self.mlp_connection.collapse(streams)
        x = self.mlp.forward(self.post_norm.forward(x))
        return HyperConnection.merge(streams, x, post, comb), selection

    def weight_slots(self, prefix: str) -> Iterator[tuple[str, Slot]]:
        mixer = self.linear if self.linear is not None else self.sparse
        if mixer is not None:
            yield from mixer.weight_slots(f"{prefix}.self_attn")
        yield from self.mlp.weight_slots(f"{prefix}.mlp")
        yield from self.input_norm.weight_slots(f"{prefix}.input_layernorm")
        yield from self.post_norm.weight_slots(f"{prefix}.post_attention_layernorm")
        yield from self.mixer_connection.weight_slots(f"{prefix}.hc_attn")
        yield from self.mlp_connection.weight_slots(f"{prefix}.hc_ffn")


class Glm5NextForCausalLM(NativeModel):
    """Serves both the flat text checkpoint and the language model of the composite one."""

    def __init__(self, vllm_config: Any) -> None:
        super().__init__()
        config = config_dict(vllm_config.model_config.hf_config)
        settings = ModelSettings.from_vllm_config(vllm_config)
        params = GlmParams.from_config(config)
        self.params = params
        self.embed = VocabEmbedding(params.vocab_size, params.hidden_size, settings.dtype)
        builder = LayerBuilder(params, settings, glm_kv_specs(config, settings))
        self.layers = nn.ModuleList(GlmLayer(builder, i) for i in range(len(params.is_linear)))
        self.cache_layers = builder.caches
        self.norm = builder.norm()
        tied = self.embed if params.is_tied else None
        self.head = LmHead(params.vocab_size, params.hidden_size, settings.dtype, tied)

    @classmethod
    def kv_specs_from_config(cls, hf_config: Any, settings: ModelSettings) -> dict[str, KVCacheSpec]:
        """The specs without building the model."""
        return glm_kv_specs(config_dict(hf_config), settings)

    @classmethod
    def check_split(cls, config: Mapping[str, Any], tp_size: int) -> None:
        GlmParams.from_config(config).check_split(tp_size)

    def forward(self, input_ids: Tensor, positions: Tensor, meta: StepMeta) -> Tensor:
        embedded = self.embed.forward(input_ids)
        streams = embedded.unsqueeze(1).repeat(1, self.params.hc_streams, 1)
        selection: Selection | None = None
        for layer in self.layers:
            streams, selection = layer.forward(streams, meta, selection)
        return self.norm.forward(streams.float().mean(1).to(streams.dtype))

    def compute_logits(self, hidden: Tensor) -> Tensor:
        return self.head.forward(hidden)

    def weight_name(self, name: str) -> str | None:
        if name.startswith(("model.visual.", "visual.")):
            return None
        name = name.replace("model.language_model.", "model.", 1)
        if name == "lm_head.weight" and self.params.is_tied:
            return None
        if name.startswith("model.layers."):
            index = name.split(".")[2]
            if index.isdigit() and int(index) >= len(self.layers):
                return None  # the multi-token-prediction layer
        return super().weight_name(name)

    def weight_slots(self) -> Iterator[tuple[str, Slot]]:
        yield from self.embed.weight_slots("model.embed_tokens")
        for i, layer in enumerate(self.layers):
            yield from layer.weight_slots(f"model.layers.{i}")
        yield from self.norm.weight_slots("model.norm")
        yield from self.head.weight_slots("lm_head")
