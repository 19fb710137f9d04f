"""Converts a GGUF file once into an ordinary checkpoint folder.

Owns: the tokenizer files rebuilt from GGUF metadata, the choice of the stored precision. Must not know: models,
the tensor formats (gguf.py). Layer L6.

`python -m vllm.model_executor.model_loader.gguf_convert FILE.gguf FOLDER` writes config.json, generation_config.json,
tokenizer.json, tokenizer_config.json (with the chat template) and model.safetensors.

Weights are stored as fp16: 4-bit and 8-bit blocks are `scale · small integer (+ minimum)` with an fp16 scale, which
fp16 keeps eight times closer than bfloat16 does. config.json asks for fp32 arithmetic: the CPU ops read fp16 weights
as they are, so it costs no memory traffic, and small models answer visibly worse with bfloat16 activations. A matrix
with values beyond fp16's range is stored as fp32.
"""

from __future__ import annotations

import argparse
import json
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file
from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, pre_tokenizers
from torch import Tensor

from vllm.model_executor.layers.rotary_embedding import ROPE_FACTORS
from vllm.model_executor.model_loader.gguf import iter_gguf
from vllm.transformers_utils.gguf_config import config_from_gguf
from vllm.transformers_utils.gguf_metadata import read_gguf_header

__all__ = ["convert", "tokenizer_from_gguf"]

_CONTROL, _USER_DEFINED = 3, 4
_HALF_MAX = torch.finfo(torch.float16).max

_LLAMA_SPLIT = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+"
    r"|\s+(?!\S)|\s+"
)
_QWEN_SPLIT = _LLAMA_SPLIT.replace(r"\p{N}{1,3}", r"\p{N}")


def _pre_tokenizer(kind: str) -> Any:
    """The split rule behind `tokenizer.ggml.pre`; `ValueError` names an unknown one."""
    byte_level = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=True)
    if kind in ("default", "gpt-2"):
        return byte_level
    if kind == "smollm":
        return pre_tokenizers.Sequence([pre_tokenizers.Digits(individual_digits=True), byte_level])
    pattern = {"llama-bpe": _LLAMA_SPLIT, "qwen2": _QWEN_SPLIT}.get(kind)
    if pattern is None:
        raise ValueError(
            f"tokenizer.ggml.pre {kind!r} is not supported; supported: default, gpt-2, llama-bpe, qwen2, smollm"
        )
    split = pre_tokenizers.Split(Regex(pattern), behavior="isolated")
    return pre_tokenizers.Sequence([split, pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)])


def tokenizer_from_gguf(metadata: dict[str, Any]) -> Tokenizer:
    """The byte-level BPE tokenizer that the metadata describes; `ValueError` for another kind."""
    kind = metadata.get("tokenizer.ggml.model")
    if kind != "gpt2":
        raise ValueError(f"tokenizer.ggml.model {kind!r} is not supported; supported: gpt2 (byte-level BPE)")
    tokens: list[str] = metadata["tokenizer.ggml.tokens"]
    merges = [tuple(merge.split(" ", 1)) for merge in metadata["tokenizer.ggml.merges"]]
    tokenizer = Tokenizer(models.BPE(vocab={token: i for i, token in enumerate(tokens)}, merges=merges))
    tokenizer.pre_tokenizer = _pre_tokenizer(metadata.get("tokenizer.ggml.pre", "default"))
    tokenizer.decoder = decoders.ByteLevel()
    types = metadata.get("tokenizer.ggml.token_type") or [1] * len(tokens)
    for token, number in zip(tokens, types, strict=True):
        if number in (_CONTROL, _USER_DEFINED):
            tokenizer.add_special_tokens([AddedToken(token, special=number == _CONTROL, normalized=False)])
    return tokenizer


def _write_tokenizer(metadata: dict[str, Any], max_length: int, folder: Path) -> None:
    tokenizer_from_gguf(metadata).save(str(folder / "tokenizer.json"))
    tokens: list[str] = metadata["tokenizer.ggml.tokens"]
    settings: dict[str, Any] = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "model_max_length": max_length,
        "clean_up_tokenization_spaces": False,
        "add_bos_token": bool(metadata.get("tokenizer.ggml.add_bos_token", False)),
    }
    for key, name in (
        ("bos", "bos_token"),
        ("eos", "eos_token"),
        ("unknown", "unk_token"),
        ("padding", "pad_token"),
    ):
        index = metadata.get(f"tokenizer.ggml.{key}_token_id")
        if index is not None:
            settings[name] = tokens[index]
    if metadata.get("tokenizer.chat_template"):
        settings["chat_template"] = metadata["tokenizer.chat_template"]
    (folder / "tokenizer_config.json").write_text(json.dumps(settings, indent=1, ensure_ascii=False))


def _stored(tensor: Tensor) -> Tensor:
    """fp16 where the values fit, else as they are."""
    return tensor if bool((tensor.abs() > _HALF_MAX).any()) else tensor.to(torch.float16)


def convert(source: str | Path, folder: str | Path, show_progress: bool = True) -> Path:
    """Writes the checkpoint folder of a GGUF file and returns it; `ValueError` for what cannot be converted."""
    source, path = Path(source), Path(folder)
    path.mkdir(parents=True, exist_ok=True)
    metadata = read_gguf_header(source).metadata
    config = config_from_gguf(source).to_dict()
    config.pop("gguf_file", None)
    config["dtype"] = "float32"
    _write_tokenizer(metadata, int(config["max_position_embeddings"]), path)
    weights = {name: _stored(tensor) for name, tensor in iter_gguf(source, show_progress)}
    if ROPE_FACTORS in weights:
        raise ValueError(
            f"{source}: a scaled rotary embedding ({ROPE_FACTORS}) has no form in config.json; serve the GGUF file itself"
        )
    save_file(weights, path / "model.safetensors", metadata={"format": "pt"})
    generation = {k: config[k] for k in ("bos_token_id", "eos_token_id", "pad_token_id") if k in config}
    (path / "generation_config.json").write_text(json.dumps(generation, indent=1))
    # Last: a folder with a config.json is complete.
    (path / "config.json").write_text(json.dumps(config, indent=1))
    return path


def main() -> None:
    """Command line entry."""
    parser = argparse.ArgumentParser(description="Convert a GGUF file into a checkpoint folder.")
    parser.add_argument("source")
    parser.add_argument("folder")
    arguments = parser.parse_args()
    convert(arguments.source, arguments.folder)


if __name__ == "__main__":
    main()
