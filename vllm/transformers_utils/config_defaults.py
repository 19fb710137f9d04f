"""What a checkpoint's config leaves out because it equals the default of its family. A table of facts. Layer: L1.

Released files are written without such values: those of a composite checkpoint often name a handful of sizes of its
language model. Holds the values that this engine reads, by `model_type`; what a family derives from other values
(layer kinds, rotary settings by layer kind) is its model's to tell. Knows no model code.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Final

from vllm.transformers_utils.config_record import TEXT_RECORDS

_LLAMA: Final[dict[str, Any]] = {
    "vocab_size": 32000,
    "hidden_size": 4096,
    "intermediate_size": 11008,
    "num_hidden_layers": 32,
    "num_attention_heads": 32,
    "hidden_act": "silu",
    "max_position_embeddings": 2048,
    "rms_norm_eps": 1e-6,
    "tie_word_embeddings": False,
}
_QWEN: Final[dict[str, Any]] = {
    **_LLAMA,
    "vocab_size": 151936,
    "intermediate_size": 22016,
    "num_key_value_heads": 32,
    "max_position_embeddings": 32768,
    "use_sliding_window": False,
    "sliding_window": 4096,
    "max_window_layers": 28,
}
_GEMMA: Final[dict[str, Any]] = {
    "hidden_size": 2304,
    "intermediate_size": 9216,
    "num_attention_heads": 8,
    "num_key_value_heads": 4,
    "head_dim": 256,
    "hidden_activation": "gelu_pytorch_tanh",
    "max_position_embeddings": 131072,
    "rms_norm_eps": 1e-6,
    "tie_word_embeddings": True,
    "attention_bias": False,
}

FAMILY_DEFAULTS: Final[dict[str, dict[str, Any]]] = {
    "gemma3_text": {
        **_GEMMA,
        "vocab_size": 262208,
        "num_hidden_layers": 26,
        "sliding_window": 4096,
        "query_pre_attn_scalar": 256,
    },
    "gemma4_text": {
        **_GEMMA,
        "vocab_size": 262144,
        "num_hidden_layers": 30,
        "sliding_window": 512,
        "vocab_size_per_layer_input": 262144,
        "hidden_size_per_layer_input": 256,
        "attention_k_eq_v": False,
        "num_kv_shared_layers": 0,
        "enable_moe_block": False,
        "use_double_wide_mlp": False,
    },
    "glm5_next_text": {
        "vocab_size": 154880,
        "hidden_size": 4096,
        "intermediate_size": 12288,
        "moe_intermediate_size": 2048,
        "num_hidden_layers": 45,
        "num_attention_heads": 64,
        "num_key_value_heads": 64,
        "n_shared_experts": 1,
        "n_routed_experts": 288,
        "routed_scaling_factor": 2.5,
        "kv_lora_rank": 512,
        "q_lora_rank": 1536,
        "qk_rope_head_dim": 0,
        "v_head_dim": 256,
        "qk_nope_head_dim": 256,
        "n_group": 1,
        "topk_group": 1,
        "num_experts_per_tok": 8,
        "norm_topk_prob": True,
        "hidden_act": "silu",
        "max_position_embeddings": 1048576,
        "rms_norm_eps": 1e-5,
        "tie_word_embeddings": False,
        "attention_bias": False,
        "index_topk": 2048,
        "index_head_dim": 128,
        "index_n_heads": 32,
        "index_kpool": 16,
        "index_kpool_always_select_tail": True,
        "swiglu_limit": 10.0,
        "linear_head_dim": 128,
        "linear_num_heads": 64,
        "linear_conv_kernel_dim": 4,
        "linear_lower_bound": -5.0,
        "hc_mult": 4,
        "hc_eps": 1e-6,
        "hc_sinkhorn_iters": 20,
    },
    "llama": {**_LLAMA, "attention_bias": False, "mlp_bias": False},
    "mistral": {
        **_LLAMA,
        "intermediate_size": 14336,
        "num_key_value_heads": 8,
        "max_position_embeddings": 131072,
        "sliding_window": 4096,
    },
    "qwen2": _QWEN,
    "qwen3": {**_QWEN, "head_dim": 128, "attention_bias": False},
}
# A composite family's language model, by the name of the whole.
_LANGUAGE_MODELS: Final = {
    "gemma3": "gemma3_text",
    "gemma4": "gemma4_text",
    "glm5_next": "glm5_next_text",
}


def with_defaults(config: Mapping[str, Any]) -> dict[str, Any]:
    """`config` with what it leaves out, in a composite one with what the record of its language model leaves out.

    A value that is there stays, null too. Nothing is added for a family that the table does not have.
    """
    whole = dict(config)
    for name in TEXT_RECORDS:
        text = whole.get(name)
        if isinstance(text, Mapping):
            whole[name] = _filled(text, whole.get("model_type"))
            return whole
    return _filled(whole, None)


def _filled(text: Mapping[str, Any], kind_of_whole: str | None) -> dict[str, Any]:
    kind = text.get("model_type") or kind_of_whole
    family = _LANGUAGE_MODELS.get(str(kind), str(kind))
    defaults = FAMILY_DEFAULTS.get(family)
    if defaults is None:
        return dict(text)
    return {"model_type": family, **defaults, **text}
