"""Gemma 3 and 4, text path: their config.json as numbers, and the KV cache specs that follow from them.

Owns: what each layer is (window, head sizes, whose cache it reads), the refusal of what is not computed. Must not know:
layers, weights. Layer L6.

Layers alternate between a sliding window and full attention. In Gemma 4 full layers may have larger and fewer heads, and
the last `num_kv_shared_layers` layers have queries alone: each reads the keys and values of the last earlier layer of its
own type.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from vllm.model_executor.layers.attention import AttentionShape
from vllm.model_executor.layers.layernorm import OffsetRMSNorm, RMSNorm
from vllm.model_executor.layers.rotary_embedding import RopeParams
from vllm.model_executor.layers.sharding import check_split
from vllm.model_executor.models.interfaces import ModelSettings
from vllm.v1.kv_cache_interface import AttentionSpec, FullAttentionSpec, SlidingWindowSpec

__all__ = ["GemmaLayerParams", "GemmaParams", "gemma_kv_specs"]

_DEFAULT_BLOCK_SIZE = 16
_FULL, _SLIDING = "full_attention", "sliding_attention"
# Every sixth layer is a full one unless the checkpoint says otherwise.
_PATTERN = 6
_GENERATIONS = {"gemma3": 3, "gemma3_text": 3, "gemma4": 4, "gemma4_text": 4}
_GLOBAL_HEAD_DIM = 512
_THETA = {_SLIDING: 10_000.0, _FULL: 1_000_000.0}
_ROPE = {
    _SLIDING: {"rope_type": "default"},
    _FULL: {"rope_type": "proportional", "partial_rotary_factor": 0.25},
}


@dataclass(frozen=True, slots=True)
class GemmaLayerParams:
    """One layer. `target`: index of the layer whose cache it reads; None if it has one of its own."""

    kind: str
    head_dim: int
    num_kv_heads: int
    intermediate_size: int
    window: int | None
    target: int | None

    def check_split(self, tp_size: int) -> None:
        """`ValueError` naming what `tp_size` ranks cannot share."""
        check_split(tp_size, intermediate_size=self.intermediate_size)
        if tp_size % self.num_kv_heads:
            check_split(tp_size, num_key_value_heads=self.num_kv_heads)


@dataclass(frozen=True, slots=True)
class GemmaParams:
    """The numbers of one checkpoint's language model. Sizes of parts that it does not have are 0."""

    generation: int
    vocab_size: int
    hidden_size: int
    num_heads: int
    score_scale: float
    eps: float
    activation: str
    is_tied: bool
    has_bias: bool
    is_k_eq_v: bool
    softcap: float | None
    ple_size: int
    ple_vocab_size: int
    num_experts: int
    top_k: int
    moe_intermediate_size: int
    layers: tuple[GemmaLayerParams, ...]
    ropes: Mapping[str, RopeParams]

    @staticmethod
    def from_config(config: Mapping[str, Any]) -> GemmaParams:
        """Reads a flat text config or a composite one; `ValueError` names what is missing or not supported.

        Values that the checkpoint left out are those of the family already (`config_dict`); null counts as missing.
        """
        try:
            text = config.get("text_config") or config
            # A composite checkpoint says of the whole whether its embeddings are tied.
            tied = {"tie_word_embeddings": config.get("tie_word_embeddings", True)}
            text = {key: value for key, value in (dict(text) | tied).items() if value is not None}
            kind = text.get("model_type") or config.get("model_type")
            if kind not in _GENERATIONS:
                raise ValueError(
                    f"model_type {kind!r} is not supported; supported: {', '.join(_GENERATIONS)}"
                )
            return GemmaParams._read(text, _GENERATIONS[kind])
        except KeyError as error:
            raise ValueError(f"config.json lacks {error.args[0]}") from None

    @staticmethod
    def _read(text: Mapping[str, Any], generation: int) -> GemmaParams:
        _refuse(text)
        _check(text)
        layers = _read_layers(text, generation)
        has_experts = bool(text.get("enable_moe_block", False))
        ple = int(text.get("hidden_size_per_layer_input", 0))
        return GemmaParams(
            generation=generation,
            vocab_size=int(text["vocab_size"]),
            hidden_size=int(text["hidden_size"]),
            num_heads=int(text["num_attention_heads"]),
            score_scale=1.0 if generation == 4 else float(text["query_pre_attn_scalar"]) ** -0.5,
            eps=float(text["rms_norm_eps"]),
            activation=str(text["hidden_activation"]),
            is_tied=bool(text["tie_word_embeddings"]),
            has_bias=bool(text["attention_bias"]),
            is_k_eq_v=bool(text.get("attention_k_eq_v", False)),
            softcap=text.get("final_logit_softcapping"),
            ple_size=ple,
            ple_vocab_size=int(text["vocab_size_per_layer_input"]) if ple else 0,
            num_experts=int(text["num_experts"]) if has_experts else 0,
            top_k=int(text["top_k_experts"]) if has_experts else 0,
            moe_intermediate_size=int(text["moe_intermediate_size"]) if has_experts else 0,
            layers=layers,
            ropes=_read_ropes(text, generation, layers),
        )

    @property
    def norm(self) -> type[RMSNorm]:
        """The kind of all norms with a weight."""
        return OffsetRMSNorm if self.generation == 3 else RMSNorm

    def check_split(self, tp_size: int) -> None:
        """`ValueError` naming what `tp_size` ranks cannot share."""
        check_split(
            tp_size, num_attention_heads=self.num_heads, moe_intermediate_size=self.moe_intermediate_size
        )
        for layer in self.layers:
            layer.check_split(tp_size)

    def attention_shape(self, layer: GemmaLayerParams, settings: ModelSettings) -> AttentionShape:
        """The shape record of one layer's attention."""
        return AttentionShape(
            hidden_size=self.hidden_size,
            num_heads=self.num_heads,
            num_kv_heads=layer.num_kv_heads,
            head_dim=layer.head_dim,
            dtype=settings.dtype,
            qkv_bias=self.has_bias,
            out_bias=self.has_bias,
            qk_norm_eps=self.eps,
            window=layer.window,
            scale=self.score_scale,
            norm=self.norm,
            has_value_norm=self.generation == 4,
            is_k_eq_v=self.is_k_eq_v and layer.kind == _FULL,
            is_sharing=layer.target is not None,
        )


def _refuse(text: Mapping[str, Any]) -> None:
    """`ValueError` for what this engine does not compute."""
    bidirectional = text.get("use_bidirectional_attention")
    if bidirectional not in (None, False, "vision"):  # "vision" is about images alone
        raise ValueError(
            f"use_bidirectional_attention {bidirectional!r} is not supported: this engine generates causally"
        )
    if text.get("attn_logit_softcapping") is not None:
        raise ValueError(
            f"attn_logit_softcapping {text['attn_logit_softcapping']} is not supported: scores are not capped"
        )
    tokens, embedded = int(text["vocab_size"]), text.get("vocab_size_per_layer_input")
    if text.get("hidden_size_per_layer_input") and embedded is not None and int(embedded) < tokens:
        raise ValueError(
            f"vocab_size_per_layer_input {embedded} is smaller than vocab_size {tokens}: "
            f"some tokens would have no embedding"
        )


def _check(text: Mapping[str, Any]) -> None:
    """`ValueError` for values with which no model of the family computes."""
    count = int(text["num_hidden_layers"])
    experts = text.get("num_experts", 0) if text.get("enable_moe_block") else None
    limits = {
        "sliding_window": (1, None),
        "sliding_window_pattern": (1, None),
        "_sliding_window_pattern": (1, None),
        "num_kv_shared_layers": (0, count - 1),
        "hidden_size_per_layer_input": (0, None),
        **({"num_experts": (1, None), "top_k_experts": (1, experts)} if experts is not None else {}),
    }
    for name, (low, high) in limits.items():
        value = text.get(name, low)
        if type(value) is not int or value < low or (high is not None and value > high):
            bounds = f"at least {low}" if high is None else f"from {low} to {high}"
            raise ValueError(f"{name} {value!r} must be a whole number {bounds}")
    by_layer, used = text.get("per_layer_config", {}), text.get("rope_parameters", {})
    if isinstance(used, Mapping):
        used = {kind: rope for kind, rope in used.items() if kind in (_FULL, _SLIDING)}
    for name, record in (("per_layer_config", by_layer), ("rope_parameters", used)):
        if not isinstance(record, Mapping) or not all(isinstance(own, Mapping) for own in record.values()):
            raise ValueError(
                f"{name} {record!r} must be an object of objects, one for each layer or layer type"
            )
    strangers = [key for key in by_layer if not key.isdecimal() or int(key) >= count]
    if strangers:
        raise ValueError(f"per_layer_config names {', '.join(strangers)}: there are layers 0 to {count - 1}")


def _read_ropes(
    text: Mapping[str, Any], generation: int, layers: tuple[GemmaLayerParams, ...]
) -> dict[str, RopeParams]:
    """Rotary settings by layer type; each type has a base of its own where the checkpoint names none."""
    by_kind = text.get("rope_parameters") or (_ROPE if generation == 4 else _old_ropes(text))
    ropes: dict[str, RopeParams] = {}
    for kind in (_FULL, _SLIDING):
        sizes = sorted({layer.head_dim for layer in layers if layer.kind == kind})
        if len(sizes) > 1:
            raise ValueError(f"head_dim {sizes} of {kind} layers: layers of one type are turned alike")
    for layer in layers:
        settings = {"rope_theta": _THETA[layer.kind], **by_kind[layer.kind]}
        config = {**text, "rope_scaling": None, "rope_parameters": settings}
        ropes[layer.kind] = RopeParams.from_config(config, layer.head_dim)
    return ropes


def _old_ropes(text: Mapping[str, Any]) -> dict[str, dict[str, Any]]:
    """Rotary settings by layer type as checkpoints of Gemma 3 name them; a scaling concerns full layers alone."""
    plain = {"rope_type": "default"}
    settings = {_SLIDING: plain, _FULL: text.get("rope_scaling", plain)}
    bases = {_SLIDING: text.get("rope_local_base_freq"), _FULL: text.get("rope_theta")}
    return {
        kind: {**({"rope_theta": base} if base else {}), **settings[kind]} for kind, base in bases.items()
    }


def _read_layers(text: Mapping[str, Any], generation: int) -> tuple[GemmaLayerParams, ...]:
    kinds = _layer_kinds(text, generation)
    first_sharing = len(kinds) - int(text.get("num_kv_shared_layers", 0))
    doubles = bool(text.get("use_double_wide_mlp", False))
    layers = []
    for i, kind in enumerate(kinds):
        head_dim, kv_heads = _heads(text, i, generation == 4 and kind == _FULL)
        is_sharing = i >= first_sharing
        layers.append(
            GemmaLayerParams(
                kind=kind,
                head_dim=head_dim,
                num_kv_heads=kv_heads,
                intermediate_size=int(text["intermediate_size"]) * (2 if doubles and is_sharing else 1),
                window=int(text["sliding_window"]) if kind == _SLIDING else None,
                target=_target(kinds, first_sharing, i) if is_sharing else None,
            )
        )
    return tuple(layers)


def _layer_kinds(text: Mapping[str, Any], generation: int) -> list[str]:
    count = int(text["num_hidden_layers"])
    pattern = int(text.get("sliding_window_pattern") or text.get("_sliding_window_pattern") or _PATTERN)
    kinds = [_FULL if (i + 1) % pattern == 0 else _SLIDING for i in range(count)]
    kinds = list(text.get("layer_types") or kinds)
    unknown = sorted(set(kinds) - {_FULL, _SLIDING})
    if len(kinds) != count or unknown:
        raise ValueError(
            f"layer_types must name {_FULL} or {_SLIDING} for each of {count} layers, got {len(kinds)} names"
            + (f", among them {unknown}" if unknown else "")
        )
    if generation == 4:
        kinds[-1] = _FULL  # whatever is written
    return kinds


def _target(kinds: list[str], first_sharing: int, index: int) -> int:
    """The last layer of the same type that has keys and values of its own."""
    for i in range(first_sharing - 1, -1, -1):
        if kinds[i] == kinds[index]:
            return i
    raise ValueError(
        f"num_kv_shared_layers {len(kinds) - first_sharing}: layer {index} is {kinds[index]}, and no layer of that "
        f"type keeps keys and values"
    )


def _heads(text: Mapping[str, Any], index: int, is_global: bool) -> tuple[int, int]:
    """Head size and KV heads of a layer: spelled out by layer, or by the names for full (`is_global`) layers."""
    values = {
        "head_dim": text["head_dim"],
        "num_key_value_heads": text["num_key_value_heads"],
    }
    by_layer = text.get("per_layer_config")
    if by_layer is not None:
        # The library writes all indexes with as many digits as the last one has: "05" of 35 layers.
        own = {int(layer): changes for layer, changes in by_layer.items()}.get(index) or {}
        unknown = sorted(own.keys() - values.keys())
        if unknown:
            raise ValueError(f"per_layer_config of layer {index}: {', '.join(unknown)} is not supported")
        values.update(own)
    elif is_global:
        values["head_dim"] = text.get("global_head_dim", _GLOBAL_HEAD_DIM)
        if text.get("attention_k_eq_v") and text.get("num_global_key_value_heads"):
            values["num_key_value_heads"] = text["num_global_key_value_heads"]
    heads, kv_heads = int(text["num_attention_heads"]), int(values["num_key_value_heads"])
    if kv_heads < 1 or heads % kv_heads:
        raise ValueError(
            f"layer {index}: num_attention_heads {heads} is not a multiple of num_key_value_heads {kv_heads}"
        )
    return int(values["head_dim"]), kv_heads


def gemma_kv_specs(params: GemmaParams, settings: ModelSettings) -> dict[str, AttentionSpec]:
    """What each layer's cache holds on one rank, by cache name; a layer that shares a cache reads the same.

    `ValueError` when that many ranks cannot share the model.
    """
    params.check_split(settings.tp_size)
    specs: dict[str, AttentionSpec] = {}
    for i, layer in enumerate(params.layers):
        sizes: dict[str, Any] = {
            "block_size": settings.block_size or _DEFAULT_BLOCK_SIZE,
            "num_kv_heads": max(1, layer.num_kv_heads // settings.tp_size),
            "head_size": layer.head_dim,
            "dtype": settings.cache_dtype,
            "max_tp_shards": layer.num_kv_heads,
        }
        window = layer.window
        specs[cache_name(i)] = (
            FullAttentionSpec(**sizes)
            if window is None
            else SlidingWindowSpec(**sizes, sliding_window=window)
        )
    return specs


def cache_name(index: int) -> str:
    """The name of the cache that layer `index` reads."""
    return f"model.layers.{index}.self_attn.attn"
