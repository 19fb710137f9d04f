"""Makes tiny random checkpoints with a tokenizer: something to serve and to test with, offline and in seconds.

Owns: the tiny configurations, the byte tokenizer and its chat template. Must not know: the runner. Layer L6.

`python -m vllm.model_executor.model_loader.tiny NAME FOLDER` writes a folder like any other checkpoint:
config.json, generation_config.json, model.safetensors, tokenizer.json, tokenizer_config.json.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Mapping
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch
from safetensors.torch import save_file
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers

from vllm.model_executor.model_loader.dummy import fill_random
from vllm.model_executor.models.interfaces import NativeModel
from vllm.model_executor.models.registry import ModelRegistry

__all__ = ["TINY_CONFIGS", "VOCAB_SIZE", "make_tiny", "write_tokenizer"]

_SPECIAL_BEFORE = ["<pad>", "<s>", "</s>"]
_SPECIAL_AFTER = ["<|system|>", "<|user|>", "<|assistant|>", "<|tool|>", "<|end|>"]
# Three special tokens, every byte, five roles.
VOCAB_SIZE = len(_SPECIAL_BEFORE) + 256 + len(_SPECIAL_AFTER)

CHAT_TEMPLATE = (
    "{% for message in messages %}<|{{ message['role'] }}|>{{ message['content'] }}<|end|>{% endfor %}"
    "{% if add_generation_prompt %}<|assistant|>{% endif %}"
)

_COMMON: dict[str, Any] = {
    "vocab_size": VOCAB_SIZE,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_attention_heads": 4,
    "max_position_embeddings": 4096,
    "hidden_act": "silu",
    "rms_norm_eps": 1e-5,
    "tie_word_embeddings": False,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "dtype": "float32",
}

_LLAMA: dict[str, Any] = {
    **_COMMON,
    "architectures": ["LlamaForCausalLM"],
    "model_type": "llama",
    "num_hidden_layers": 2,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "rope_theta": 10000.0,
}

TINY_CONFIGS: dict[str, dict[str, Any]] = {
    "gemma4": {
        **_COMMON,
        "architectures": ["Gemma4ForCausalLM"],
        "model_type": "gemma4_text",
        "num_hidden_layers": 7,
        "num_key_value_heads": 2,
        "head_dim": 16,
        "global_head_dim": 32,
        "sliding_window": 64,
        "layer_types": [*["sliding_attention", "sliding_attention", "full_attention"] * 2, "full_attention"],
        "num_kv_shared_layers": 3,
        "vocab_size_per_layer_input": VOCAB_SIZE,
        "hidden_size_per_layer_input": 16,
        "hidden_activation": "gelu_pytorch_tanh",
        "final_logit_softcapping": 30.0,
        "tie_word_embeddings": True,
    },
    "glm5_next": {
        **_COMMON,
        "architectures": ["Glm5NextForCausalLM"],
        "model_type": "glm5_next_text",
        "num_hidden_layers": 4,
        "num_key_value_heads": 4,
        "moe_intermediate_size": 32,
        "q_lora_rank": 24,
        "kv_lora_rank": 32,
        "qk_nope_head_dim": 16,
        "qk_rope_head_dim": 0,
        "v_head_dim": 16,
        "n_routed_experts": 4,
        "n_shared_experts": 1,
        "num_experts_per_tok": 2,
        "index_topk": 32,
        "index_head_dim": 16,
        "index_n_heads": 4,
        "index_kpool": 4,
        "linear_head_dim": 16,
        "linear_num_heads": 4,
        "linear_conv_kernel_dim": 4,
        "mlp_layer_types": ["dense", "sparse", "sparse", "sparse"],
        "layer_types": ["linear_attention", "linear_attention", "linear_attention", "indexed_attention"],
        "indexer_types": ["full", "full", "full", "full"],
        "hc_mult": 2,
    },
    "llama": _LLAMA,
    "mistral": {
        **_LLAMA,
        "architectures": ["MistralForCausalLM"],
        "model_type": "mistral",
        "sliding_window": 64,
    },
    "qwen2": {**_LLAMA, "architectures": ["Qwen2ForCausalLM"], "model_type": "qwen2"},
    "qwen3": {**_LLAMA, "architectures": ["Qwen3ForCausalLM"], "model_type": "qwen3"},
}


def write_tokenizer(folder: Path) -> None:
    """A tokenizer in which every byte is one token, so that it encodes any text; special tokens for chat roles."""
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    names = [*_SPECIAL_BEFORE, *alphabet, *_SPECIAL_AFTER]
    tokenizer = Tokenizer(models.BPE(vocab={name: i for i, name in enumerate(names)}, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=True)
    tokenizer.decoder = decoders.ByteLevel()
    special = [AddedToken(name, special=True, normalized=False) for name in _SPECIAL_BEFORE + _SPECIAL_AFTER]
    tokenizer.add_special_tokens(special)
    tokenizer.save(str(folder / "tokenizer.json"))
    settings = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "pad_token": "<pad>",
        "bos_token": "<s>",
        "eos_token": "</s>",
        "model_max_length": _COMMON["max_position_embeddings"],
        "clean_up_tokenization_spaces": False,
        "chat_template": CHAT_TEMPLATE,
    }
    (folder / "tokenizer_config.json").write_text(json.dumps(settings, indent=1))


def _build(config: dict[str, Any], seed: int) -> NativeModel:
    """The model with random weights, sharpened so that its choices are clear."""
    settings = SimpleNamespace(
        model_config=SimpleNamespace(
            hf_config=config, dtype=torch.float32, max_model_len=config["max_position_embeddings"]
        ),
        cache_config=SimpleNamespace(cache_dtype="auto", block_size=None, enable_prefix_caching=True),
        parallel_config=SimpleNamespace(tensor_parallel_size=1),
        speculative_config=None,
        attention_config=SimpleNamespace(backend=None),
    )
    model: NativeModel = ModelRegistry.resolve_model_cls(config["architectures"])(settings)
    fill_random(model, seed)
    for name, slot in model.slots().items():
        if name.endswith(("_scale", "layer_scalar")):
            slot.tensor.fill_(1.0)
        elif name == "lm_head.weight":
            slot.tensor.mul_(3.0)
    return model


def make_tiny(
    name: str, folder: str | Path, seed: int = 0, overrides: Mapping[str, Any] | None = None
) -> Path:
    """Writes the tiny checkpoint `name` into `folder`; `overrides` replace values of its configuration.

    `ValueError` for an unknown name.
    """
    if name not in TINY_CONFIGS:
        raise ValueError(f"tiny checkpoint {name!r} is unknown; known: {', '.join(sorted(TINY_CONFIGS))}")
    config = TINY_CONFIGS[name] | dict(overrides or {})
    path = Path(folder)
    path.mkdir(parents=True, exist_ok=True)
    with torch.inference_mode():
        model = _build(config, seed)
        weights = {name: slot.tensor.clone() for name, slot in model.slots().items()}
    save_file(weights, path / "model.safetensors", metadata={"format": "pt"})
    write_tokenizer(path)
    generation = {key: config[key] for key in ("bos_token_id", "eos_token_id", "pad_token_id")}
    (path / "generation_config.json").write_text(json.dumps(generation, indent=1))
    # Last: a folder with a config.json is complete.
    (path / "config.json").write_text(json.dumps(config, indent=1))
    return path


def main() -> None:
    """Command line entry."""
    parser = argparse.ArgumentParser(description="Write a tiny random checkpoint.")
    parser.add_argument("name", choices=sorted(TINY_CONFIGS))
    parser.add_argument("folder")
    parser.add_argument("--seed", type=int, default=0)
    arguments = parser.parse_args()
    make_tiny(arguments.name, arguments.folder, arguments.seed)


if __name__ == "__main__":
    main()
