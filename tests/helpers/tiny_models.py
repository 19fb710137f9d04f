"""Tiny random checkpoints made by the transformers library: the numerical oracle of our models.

Weights of two or more dimensions are tripled (an untrained net is nearly linear and hides mistakes) and tensors that
start as all zeros or ones are randomised (their paths would be untested).
"""

from __future__ import annotations

import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch
from transformers import AutoConfig, AutoModelForCausalLM, Glm5NextConfig, Glm5NextForConditionalGeneration

from vllm.model_executor.model_loader.tiny import VOCAB_SIZE, write_tokenizer

_DENSE: dict[str, Any] = {
    "vocab_size": VOCAB_SIZE,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 512,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": 2,
}

CONFIGS: dict[str, dict[str, Any]] = {
    "llama": {**_DENSE, "head_dim": 16},
    "mistral": {**_DENSE, "head_dim": 16, "sliding_window": 8},
    "qwen2": _DENSE,
    "qwen3": {**_DENSE, "head_dim": 16},
    "gemma3_text": {
        **_DENSE,
        "num_hidden_layers": 4,
        "head_dim": 16,
        "sliding_window": 8,
        "query_pre_attn_scalar": 24,
        "sliding_window_pattern": 2,
    },
    "gemma4_text": {
        **_DENSE,
        "num_hidden_layers": 7,
        "head_dim": 16,
        "global_head_dim": 32,
        "sliding_window": 8,
        "layer_types": [
            "sliding_attention",
            "sliding_attention",
            "full_attention",
            "sliding_attention",
            "sliding_attention",
            "full_attention",
            "full_attention",
        ],
        "num_kv_shared_layers": 3,
        "vocab_size_per_layer_input": VOCAB_SIZE,
        "hidden_size_per_layer_input": 12,
        "final_logit_softcapping": 5.0,
    },
    "glm5_next": {
        **_DENSE,
        "moe_intermediate_size": 32,
        "num_hidden_layers": 4,
        "num_key_value_heads": 4,
        "q_lora_rank": 24,
        "kv_lora_rank": 32,
        "qk_nope_head_dim": 16,
        "v_head_dim": 16,
        "n_routed_experts": 4,
        "num_experts_per_tok": 2,
        "index_topk": 8,
        "index_head_dim": 16,
        "index_n_heads": 4,
        "index_kpool": 4,
        "linear_head_dim": 16,
        "linear_num_heads": 4,
        "mlp_layer_types": ["dense", "sparse", "sparse", "sparse"],
        "indexer_types": ["full", "full", "full", "full"],
        "hc_mult": 2,
    },
}

_GLM_VISION = {
    "depth": 1,
    "hidden_size": 32,
    "num_heads": 2,
    "intermediate_size": 32,
    "out_hidden_size": 64,
    "projection_intermediate_size": 64,
    "image_size": 28,
    "patch_size": 14,
}


def make_oracle(kind: str, seed: int = 0, **overrides: Any) -> torch.nn.Module:
    """A random fp32 model of the library; `overrides` replace config values."""
    torch.manual_seed(seed)
    values = {**CONFIGS[kind], **overrides}
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        if kind == "glm5_next":
            text = dict(values)
            text.setdefault("index_kpool_always_select_tail", True)
            config = Glm5NextConfig(text_config=text, vision_config=_GLM_VISION)
            model = Glm5NextForConditionalGeneration(config)
        else:
            model = AutoModelForCausalLM.from_config(AutoConfig.for_model(kind, **values))
    model = model.float().eval()
    with torch.no_grad():
        for tensor in [*model.parameters(), *model.buffers()]:
            if not tensor.is_floating_point():
                continue
            if tensor.dim() >= 2:
                tensor.mul_(3)
            if bool((tensor == 0).all()) or bool((tensor == 1).all()):
                tensor.add_(torch.randn_like(tensor) * 0.3)
        for name, tensor in model.named_parameters() if kind == "gemma4_text" else ():
            if name.endswith("q_norm.weight"):
                # Scores have no scale of their own: a trained norm carries it. Without it softmax is all but a switch,
                # and the library's logits in fp32 and fp64 are up to 9e-4 apart.
                tensor.mul_(tensor.numel() ** -0.5)
    return model


def save_oracle(model: torch.nn.Module, folder: Path) -> Path:
    """Writes the checkpoint under its release names, with a byte tokenizer."""
    model.save_pretrained(folder)
    write_tokenizer(folder)
    return folder


@contextmanager
def stable_topk() -> Iterator[None]:
    """Replaces `Tensor.topk` by a stable descending sort: of equal values the lowest index wins, as in our models."""
    original, original_function = torch.Tensor.topk, torch.topk

    def topk(self: torch.Tensor, k: int, dim: int = -1, largest: bool = True, sorted: bool = True) -> Any:
        ordered = torch.sort(self, dim=dim, descending=largest, stable=True)
        values, indices = ordered.values.narrow(dim, 0, k), ordered.indices.narrow(dim, 0, k)
        return torch.return_types.topk((values, indices))

    torch.Tensor.topk = topk  # type: ignore[method-assign]
    torch.topk = topk
    try:
        yield
    finally:
        torch.Tensor.topk = original  # type: ignore[method-assign]
        torch.topk = original_function


def oracle_logits(model: torch.nn.Module, tokens: list[int]) -> torch.Tensor:
    """One-shot logits `[len(tokens), vocab]`; never through the library's cache."""
    with torch.no_grad(), stable_topk(), warnings.catch_warnings():
        warnings.simplefilter("ignore")
        logits: torch.Tensor = model(input_ids=torch.tensor([tokens]), use_cache=False).logits[0]
    return logits


def engine_config(
    folder: Path,
    hf_config: Any,
    dtype: torch.dtype = torch.float32,
    block_size: int | None = None,
    enable_prefix_caching: bool = True,
    max_model_len: int = 512,
    load_format: str = "auto",
    tensor_parallel_size: int = 1,
) -> SimpleNamespace:
    """The few values that models and the loader read of a `VllmConfig`."""
    config = hf_config if isinstance(hf_config, dict) else hf_config.to_dict()
    return SimpleNamespace(
        model_config=SimpleNamespace(
            model=str(folder),
            revision=None,
            hf_token=None,
            hf_config=config,
            architectures=config.get("architectures"),
            dtype=dtype,
            max_model_len=max_model_len,
            seed=0,
        ),
        cache_config=SimpleNamespace(
            cache_dtype="auto", block_size=block_size, enable_prefix_caching=enable_prefix_caching
        ),
        parallel_config=SimpleNamespace(tensor_parallel_size=tensor_parallel_size, pipeline_parallel_size=1),
        load_config=SimpleNamespace(load_format=load_format, use_tqdm_on_load=False, download_dir=None),
        speculative_config=None,
        attention_config=SimpleNamespace(backend=None),
    )
