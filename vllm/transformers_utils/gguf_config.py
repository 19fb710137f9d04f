"""A GGUF file's metadata as the record that `config.json` would have given. Layer: L1."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any, Final

from vllm.transformers_utils.config_record import ConfigRecord
from vllm.transformers_utils.gguf_metadata import GGUFHeader, read_gguf_header

# architecture in the file → (model_type, architecture of the model class): those whose tensors the weight loader knows too
ARCHITECTURES: Final = {
    "llama": ("llama", "LlamaForCausalLM"),
    "mistral": ("mistral", "MistralForCausalLM"),
    "qwen2": ("qwen2", "Qwen2ForCausalLM"),
    "qwen3": ("qwen3", "Qwen3ForCausalLM"),
}

# key below the architecture's prefix → what none of their models does; a file may say so all the same (Mixtral is a llama)
_UNSERVED: Final = {
    "expert_count": "experts",
    "attn_logit_softcapping": "capped scores",
    "final_logit_softcapping": "capped logits",
}

# key below the architecture's prefix → name in config.json
_FIELDS: Final = {
    "context_length": "max_position_embeddings",
    "embedding_length": "hidden_size",
    "feed_forward_length": "intermediate_size",
    "block_count": "num_hidden_layers",
    "attention.head_count": "num_attention_heads",
    "attention.head_count_kv": "num_key_value_heads",
    "attention.key_length": "head_dim",
    "attention.layer_norm_rms_epsilon": "rms_norm_eps",
    "attention.sliding_window": "sliding_window",
    "rope.freq_base": "rope_theta",
}

_TOKEN_IDS: Final = {
    "tokenizer.ggml.bos_token_id": "bos_token_id",
    "tokenizer.ggml.eos_token_id": "eos_token_id",
    "tokenizer.ggml.padding_token_id": "pad_token_id",
}


def config_from_gguf(path: str | Path) -> ConfigRecord:
    """The config record of the GGUF file at `path`.

    Raises ValueError if the file is no GGUF file, holds an architecture that has no table line here, or needs what no
    model of these does.
    """
    header = read_gguf_header(path)
    architecture = header.metadata.get("general.architecture")
    if architecture not in ARCHITECTURES:
        raise ValueError(
            f"{path}: GGUF architecture {architecture!r} is not supported; supported: {', '.join(ARCHITECTURES)}"
        )
    for key, feature in _UNSERVED.items():
        value = header.metadata.get(f"{architecture}.{key}")
        if value:
            raise ValueError(
                f"{path}: {architecture}.{key}={value} is not supported: no GGUF model has {feature}"
            )
    model_type, class_name = ARCHITECTURES[architecture]
    values: dict[str, Any] = {"model_type": model_type, "architectures": [class_name]}
    for key, name in _FIELDS.items():
        value = header.metadata.get(f"{architecture}.{key}")
        if value is not None:
            values[name] = value
    for key, name in _TOKEN_IDS.items():
        if key in header.metadata:
            values[name] = header.metadata[key]
    _spell_out(values)
    values.update(_rope_values(header, architecture, values))
    values["vocab_size"] = _vocab_size(header, architecture)
    values["tie_word_embeddings"] = all(tensor.name != "output.weight" for tensor in header.tensors)
    values["attention_bias"] = any(tensor.name == "blk.0.attn_q.bias" for tensor in header.tensors)
    values["hidden_act"] = "silu"
    values["gguf_file"] = str(path)
    return ConfigRecord(values)


def _spell_out(values: dict[str, Any]) -> None:
    """What the format means where it says nothing; a family's config.json may mean something else."""
    heads = values.get("num_attention_heads")
    if heads:
        values.setdefault("num_key_value_heads", heads)
        values.setdefault("head_dim", values["hidden_size"] // heads)
    values.setdefault("sliding_window", None)


def _rope_values(header: GGUFHeader, architecture: str, values: Mapping[str, Any]) -> dict[str, Any]:
    """Scaling and partial rotation, by the names of config.json."""
    found: dict[str, Any] = {}
    prefix = f"{architecture}.rope"
    head_dim = values.get("head_dim")
    rotated = header.metadata.get(f"{prefix}.dimension_count")
    if rotated is not None and head_dim is not None and rotated < head_dim:
        found["partial_rotary_factor"] = rotated / head_dim
    kind = header.metadata.get(f"{prefix}.scaling.type")
    if kind in ("linear", "yarn"):
        scaling = {"rope_type": kind, "factor": header.metadata.get(f"{prefix}.scaling.factor", 1.0)}
        original = header.metadata.get(f"{prefix}.scaling.original_context_length")
        if original is not None:
            scaling["original_max_position_embeddings"] = original
        found["rope_scaling"] = scaling
    elif kind not in (None, "none"):
        raise ValueError(
            f"{header.path}: {prefix}.scaling.type={kind!r} is not supported; supported: none, linear, yarn"
        )
    return found


def _vocab_size(header: GGUFHeader, architecture: str) -> int:
    """Rows of the embedding: the tensor is the truth, the metadata may lack the padding."""
    for tensor in header.tensors:
        if tensor.name == "token_embd.weight":
            return tensor.shape[0]
    tokens = header.metadata.get("tokenizer.ggml.tokens")
    return int(header.metadata.get(f"{architecture}.vocab_size") or len(tokens or ()))
