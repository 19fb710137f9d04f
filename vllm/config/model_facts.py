"""What follows from a model's config record: sizes, lengths, layer kinds. Pure functions. Layer: L1.

Knows the spellings that model families use for the same thing; knows no config class and no model code.
"""

from __future__ import annotations

from typing import Any, Final

from vllm.transformers_utils.config_record import ConfigRecord

_LENGTH_KEYS: Final = (
    "max_position_embeddings",
    "n_positions",
    "max_seq_len",
    "max_seq_length",
    "seq_length",
    "model_max_length",
    "max_sequence_length",
    "max_target_positions",
    "n_ctx",
)
DEFAULT_MODEL_LENGTH: Final = 2048
# Rope types whose config already states the scaled length.
_UNSCALED_ROPE_TYPES: Final = ("default", "mrope", "llama3", "su", "longrope", "proportional")
# Families whose config already states the scaled length, whatever the rope type.
_SCALED_LENGTH_TYPES: Final = ("gemma3", "gemma3_text")
_RECURRENT_KINDS: Final = (
    "mamba",
    "mamba2",
    "linear_attention",
    "recurrent",
    "conv",
    "kda",
    "gated_delta_net",
)
_ATTENTION_FREE_TYPES: Final = ("mamba", "mamba2", "falcon_mamba", "rwkv")
_HYBRID_TYPES: Final = ("jamba", "bamba", "falcon_h1", "zamba2", "nemotron_h", "granitemoehybrid", "plamo2")
_MLA_TYPES: Final = ("deepseek_v4", "deepseek_v41")
_ENCODER_DECODER_TYPES: Final = ("t5", "bart", "mbart", "whisper", "florence2")


def hidden_size(text: ConfigRecord) -> int:
    """Width of the residual stream."""
    return int(_required(text, "hidden_size", "n_embd", "d_model"))


def num_hidden_layers(text: ConfigRecord) -> int:
    """Number of decoder layers."""
    return int(_required(text, "num_hidden_layers", "n_layer", "num_layers", "n_layers"))


def vocab_size(text: ConfigRecord) -> int:
    """Number of rows of the output layer."""
    return int(_required(text, "vocab_size"))


def num_attention_heads(text: ConfigRecord) -> int:
    """Number of query heads; 0 for a model without attention."""
    return int(text.first("num_attention_heads", "n_head", "n_heads") or 0)


def is_mla(text: ConfigRecord) -> bool:
    """Whether the model caches one latent row per token instead of keys and values per head."""
    return text.first("kv_lora_rank") is not None or text.get("model_type") in _MLA_TYPES


def num_kv_heads(text: ConfigRecord) -> int:
    """Number of key/value heads over all ranks; 1 for a latent cache."""
    if is_mla(text):
        return 1
    if text.get("multi_query") and not text.get("new_decoder_architecture"):
        return 1
    found = text.first("num_key_value_heads", "n_head_kv", "num_kv_heads", "multi_query_group_num")
    return int(found) if found is not None else num_attention_heads(text)


def head_size(text: ConfigRecord) -> int:
    """Elements that one head of one token takes in the cache; the latent row for MLA; 0 without attention."""
    if is_mla(text) and text.first("kv_lora_rank") is not None:
        return int(text.kv_lora_rank) + int(text.first("qk_rope_head_dim") or 0)
    found = text.first("head_dim", "head_size", "attention_head_dim")
    if found is not None:
        return int(found)
    heads = num_attention_heads(text)
    return hidden_size(text) // heads if heads else 0


def sliding_window(text: ConfigRecord) -> int | None:
    """Window in tokens of the model's windowed layers, None without any."""
    if text.get("use_sliding_window") is False:
        return None
    window = text.first("sliding_window", "sliding_window_size")
    return int(window) if isinstance(window, int) and window > 0 else None


def layer_kinds(text: ConfigRecord) -> list[str]:
    """The kind of each layer as the config names it (`full_attention`, `mamba`, …); empty if it names none."""
    kinds = text.first("layer_types", "layers_block_type")
    if isinstance(kinds, list):
        return [str(kind) for kind in kinds]
    pattern = text.first("hybrid_override_pattern")
    if isinstance(pattern, str):
        names = {"M": "mamba", "*": "full_attention", "-": "mlp", "E": "moe"}
        return [names.get(letter, letter) for letter in pattern]
    return []


def is_attention_free(text: ConfigRecord) -> bool:
    """Whether no layer keeps keys and values."""
    if text.get("model_type") in _ATTENTION_FREE_TYPES:
        return True
    kinds = layer_kinds(text)
    return bool(kinds) and all(kind in _RECURRENT_KINDS for kind in kinds)


def is_hybrid(text: ConfigRecord) -> bool:
    """Whether recurrent layers stand beside attention layers."""
    if is_attention_free(text):
        return False
    if text.get("model_type") in _HYBRID_TYPES or text.first("linear_attn_config") is not None:
        return True
    return any(kind in _RECURRENT_KINDS for kind in layer_kinds(text))


def is_encoder_decoder(config: ConfigRecord) -> bool:
    """Whether the model has an encoder whose output the decoder attends to."""
    return bool(config.get("is_encoder_decoder")) or config.get("model_type") in _ENCODER_DECODER_TYPES


def has_media_inputs(config: ConfigRecord) -> bool:
    """Whether the checkpoint is for text together with images, video or sound."""
    return any(config.first(key) is not None for key in ("vision_config", "audio_config", "speech_config"))


def max_length(text: ConfigRecord) -> int | None:
    """Longest sequence the checkpoint states, scaled by its rope scaling; None if it states none."""
    lengths = [int(text[key]) for key in _LENGTH_KEYS if isinstance(text.get(key), int)]
    if not lengths:
        return None
    length = min(lengths)
    scaling = text.first("rope_scaling", "rope_parameters")
    if not isinstance(scaling, ConfigRecord) or text.get("model_type") in _SCALED_LENGTH_TYPES:
        return length
    rope_type = scaling.first("rope_type", "type")
    if rope_type is None or rope_type in _UNSCALED_ROPE_TYPES:
        return length
    if rope_type == "yarn":
        length = int(scaling.first("original_max_position_embeddings") or length)
    return int(length * float(scaling.first("factor") or 1.0))


def _required(text: ConfigRecord, *names: str) -> Any:
    value = text.first(*names)
    if value is None:
        raise ValueError(f"config.json of model_type {text.get('model_type')!r} lacks {' / '.join(names)}")
    return value
