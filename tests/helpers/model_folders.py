"""Folders that hold a `config.json` and nothing else: enough for every test that needs no weights."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

LLAMA: dict[str, Any] = {
    "architectures": ["LlamaForCausalLM"],
    "model_type": "llama",
    "hidden_size": 64,
    "intermediate_size": 128,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "vocab_size": 256,
    "max_position_embeddings": 512,
    "torch_dtype": "float32",
}


def write_model_folder(folder: Path, **overrides: Any) -> str:
    """A folder with the config of a tiny Llama, changed by `overrides` (None removes a key); its path."""
    folder.mkdir(parents=True, exist_ok=True)
    values = {key: value for key, value in {**LLAMA, **overrides}.items() if value is not None}
    (folder / "config.json").write_text(json.dumps(values))
    return str(folder)
