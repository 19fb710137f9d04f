"""What a checkpoint's config record may say. Layer: L1.

Owns the one place where impossible values of `config.json` are refused, before weights are read. Missing values are for
those who need them to tell. Knows no model code.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from typing import Final

from vllm.transformers_utils.config_record import TEXT_RECORDS, ConfigRecord

_SIZES: Final = (
    "hidden_size",
    "intermediate_size",
    "num_hidden_layers",
    "num_attention_heads",
    "num_key_value_heads",
    "head_dim",
    "vocab_size",
    "max_position_embeddings",
    "global_head_dim",
    "num_global_key_value_heads",
    "vocab_size_per_layer_input",
    "n_embd",
    "n_layer",
    "n_head",
    # Latent attention, its selection of tokens, linear attention, experts, parallel residual streams.
    "q_lora_rank",
    "kv_lora_rank",
    "qk_nope_head_dim",
    "v_head_dim",
    "index_topk",
    "index_n_heads",
    "index_head_dim",
    "index_kpool",
    "linear_num_heads",
    "linear_head_dim",
    "linear_conv_kernel_dim",
    "moe_intermediate_size",
    "n_routed_experts",
    "num_experts_per_tok",
    "n_group",
    "topk_group",
    "hc_mult",
    "hc_sinkhorn_iters",
)
_LINEAR_SIZES: Final = ("num_heads", "head_dim", "short_conv_kernel_size")
# Any of them makes the width independent of the number of heads.
_HEAD_SIZES: Final = ("head_dim", "head_size", "attention_head_dim", "kv_lora_rank")
_POSITIVES: Final = (
    "rms_norm_eps",
    "layer_norm_eps",
    "layer_norm_epsilon",
    "norm_eps",
    "norm_epsilon",
    "query_pre_attn_scalar",
    "final_logit_softcapping",
)
_DTYPES: Final = ("auto", "float16", "half", "bfloat16", "float32", "float", "float64", "double")
# Records that may hold settings of the rotary embedding.
_ROPE_RECORDS: Final = ("rope_parameters", "rope_scaling")


def check_config(config: ConfigRecord) -> None:
    """Refuse sizes, constants and types with which no model computes. Raises ValueError naming key and value."""
    for key in TEXT_RECORDS:
        _check(config, key, _is_record, "must be an object")
    text = config.get_text_config()
    for record in (config, text):
        for key in ("dtype", "torch_dtype"):
            _check(record, key, _is_float_type, f"is not supported; supported: {', '.join(_DTYPES)}")
    # In latent attention head_dim is the part that is turned: none of it in a model without positions.
    has_no_head_dim = text.first("head_dim") == 0 and text.first("kv_lora_rank") is not None
    for key in _SIZES:
        if not (key == "head_dim" and has_no_head_dim):
            _check(text, key, _is_size, "must be a positive integer")
    linear = text.get("linear_attn_config")
    if isinstance(linear, ConfigRecord):
        for key in _LINEAR_SIZES:
            _check(linear, key, _is_size, "in linear_attn_config must be a positive integer")
    for key in _POSITIVES:
        _check(text, key, _is_positive, "must be a positive finite number")
    for record in _rope_records(text):
        _check(record, "rope_theta", _is_positive, "must be a positive finite number")
        _check(record, "partial_rotary_factor", _is_share, "must be a number in (0, 1]")
    for key in ("head_dim", "global_head_dim"):
        _check(text, key, _is_even, "must be even: rotary embeddings turn pairs")
    by_layer = text.get("per_layer_config")
    for record in by_layer.values() if isinstance(by_layer, ConfigRecord) else ():
        if isinstance(record, ConfigRecord):
            for key in ("head_dim", "num_key_value_heads"):
                _check(record, key, _is_size, "in per_layer_config must be a positive integer")
            _check(record, "head_dim", _is_even, "in per_layer_config must be even")
    _check_implied_head(text)
    _check_heads(text)
    _check_turned_part(text)
    _check_experts(text)


def _check(record: ConfigRecord, key: str, is_good: Callable[[object], bool], rule: str) -> None:
    value = record.first(key)
    if value is not None and not is_good(value):
        raise ValueError(f"config.json: {key}={value!r} {rule}")


def _rope_records(text: ConfigRecord) -> Iterator[ConfigRecord]:
    yield text
    for name in _ROPE_RECORDS:
        record = text.get(name)
        if isinstance(record, ConfigRecord):
            yield record
            # Some families have one such record per kind of layer.
            yield from (nested for nested in record.values() if isinstance(nested, ConfigRecord))


def _check_implied_head(text: ConfigRecord) -> None:
    """Without a size of its own, a head is an equal share of the width."""
    heads, width = text.first("num_attention_heads"), text.first("hidden_size")
    if heads is None or width is None or text.first(*_HEAD_SIZES) is not None:
        return
    if width % heads or width // heads % 2:
        raise ValueError(
            f"config.json: hidden_size={width} must be an even multiple of num_attention_heads={heads}, "
            "or head_dim must be given"
        )


def _check_heads(text: ConfigRecord) -> None:
    """Query heads share KV heads evenly. A width of any size may be projected to heads of a given one, but not in Llama."""
    heads, kv_heads = text.first("num_attention_heads"), text.first("num_key_value_heads")
    if heads is None:
        return
    is_latent = text.first("kv_lora_rank") is not None
    if kv_heads is not None and not is_latent and heads % kv_heads:
        raise ValueError(
            f"config.json: num_attention_heads={heads} must be a multiple of num_key_value_heads={kv_heads}"
        )
    width = text.first("hidden_size")
    if text.get("model_type") == "llama" and width is not None and width % heads:
        raise ValueError(
            f"config.json: hidden_size={width} must be a multiple of num_attention_heads={heads} in a Llama model, with "
            f"head_dim={text.first('head_dim')} too"
        )


def _check_turned_part(text: ConfigRecord) -> None:
    """The part of a head that is turned consists of pairs."""
    size = text.first("head_dim")
    for record in _rope_records(text):
        share = record.first("partial_rotary_factor")
        if size and share is not None and (int(size * share) % 2 or int(size * share) == 0):
            raise ValueError(
                f"config.json: partial_rotary_factor={share!r} turns {int(size * share)} of head_dim={size} values: "
                "it must be a positive even number"
            )


def _check_experts(text: ConfigRecord) -> None:
    """A token finds its experts in the groups it may choose from."""
    experts, chosen = text.first("n_routed_experts"), text.first("num_experts_per_tok")
    if experts is None or chosen is None:
        return
    groups, taken = text.first("n_group") or 1, text.first("topk_group") or 1
    if experts % groups:
        raise ValueError(f"config.json: n_routed_experts={experts} must be a multiple of n_group={groups}")
    if taken > groups:
        raise ValueError(f"config.json: topk_group={taken} must be at most n_group={groups}")
    if groups > 1 and experts // groups < 2:
        raise ValueError(
            f"config.json: n_group={groups} leaves {experts // groups} of n_routed_experts={experts} in a group; a group is "
            "chosen by its two best"
        )
    if chosen > experts // groups * taken:
        raise ValueError(
            f"config.json: num_experts_per_tok={chosen} must be at most the {experts // groups * taken} experts in "
            f"topk_group={taken} of n_group={groups} groups of n_routed_experts={experts}"
        )


def _is_size(value: object) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and value > 0


def _is_record(value: object) -> bool:
    return isinstance(value, ConfigRecord)


def _is_even(value: object) -> bool:
    return isinstance(value, int) and value % 2 == 0


def _is_positive(value: object) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool) and 0 < value < math.inf


def _is_share(value: object) -> bool:
    return _is_positive(value) and isinstance(value, int | float) and value <= 1


def _is_float_type(value: object) -> bool:
    return isinstance(value, str) and value.removeprefix("torch.") in _DTYPES
