"""Converts a GGUF file once into an ordinary checkpoint folder.

Owns: the files of the folder, the choice of the stored precision. Must not know: models, the tensor formats (gguf.py),
how a tokenizer is rebuilt (transformers_utils/tokenizer_gguf.py). Layer L7, a tool beside the engine.

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
from torch import Tensor

from vllm.model_executor.layers.rotary_embedding import ROPE_FACTORS
from vllm.model_executor.model_loader.gguf import iter_gguf
from vllm.transformers_utils.gguf_config import config_from_gguf
from vllm.transformers_utils.gguf_metadata import read_gguf_header
from vllm.transformers_utils.tokenizer_gguf import tokenizer_from_gguf

__all__ = ["convert"]

_HALF_MAX = torch.finfo(torch.float16).max


def _write_tokenizer(metadata: dict[str, Any], source: Path, max_length: int, folder: Path) -> None:
    backend, found = tokenizer_from_gguf(metadata, str(source))
    backend.save(str(folder / "tokenizer.json"))
    settings = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "model_max_length": max_length,
        "clean_up_tokenization_spaces": False,
        **{name: value for name, value in found.items() if value is not None},
    }
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
    _write_tokenizer(metadata, source, int(config["max_position_embeddings"]), path)
    weights = {name: _stored(weight[()]) for name, weight in iter_gguf(source, show_progress)}
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
