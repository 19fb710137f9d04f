"""Writes small GGUF files: metadata and tensor table, with zero bytes as tensor data."""

from __future__ import annotations

import struct
from pathlib import Path
from typing import Any

_FORMS = {int: (4, "<I"), float: (6, "<f"), bool: (7, "<?")}


def _text(value: str) -> bytes:
    data = value.encode()
    return struct.pack("<Q", len(data)) + data


def _value(value: Any) -> bytes:
    if isinstance(value, str):
        return struct.pack("<I", 8) + _text(value)
    if isinstance(value, list):
        items = [_value(item) for item in value]
        return (
            struct.pack("<I", 9)
            + items[0][:4]
            + struct.pack("<Q", len(items))
            + b"".join(i[4:] for i in items)
        )
    number, form = _FORMS[type(value)]
    return struct.pack("<I", number) + struct.pack(form, value)


def write_gguf(
    path: Path, metadata: dict[str, Any], tensors: dict[str, tuple[int, ...]], version: int = 3
) -> Path:
    """A GGUF file with float32 tensors of the given shapes (slowest dimension first)."""
    out = b"GGUF" + struct.pack("<IQQ", version, len(tensors), len(metadata))
    for key, value in metadata.items():
        out += _text(key) + _value(value)
    offset = 0
    for name, shape in tensors.items():
        out += (
            _text(name)
            + struct.pack("<I", len(shape))
            + b"".join(struct.pack("<Q", d) for d in reversed(shape))
        )
        out += struct.pack("<IQ", 0, offset)
        size = 4
        for dimension in shape:
            size *= dimension
        offset += -(-size // 32) * 32
    out += b"\0" * (-len(out) % 32) + b"\0" * offset
    path.write_bytes(out)
    return path


def llama_metadata(**more: Any) -> dict[str, Any]:
    """Metadata of a tiny llama."""
    return {
        "general.architecture": "llama",
        "llama.context_length": 128,
        "llama.embedding_length": 32,
        "llama.block_count": 2,
        "llama.feed_forward_length": 64,
        "llama.attention.head_count": 4,
        "llama.attention.head_count_kv": 2,
        "llama.attention.layer_norm_rms_epsilon": 1e-5,
        "llama.rope.freq_base": 10000.0,
        "tokenizer.ggml.tokens": ["a", "b", "c"],
        "tokenizer.ggml.eos_token_id": 2,
        "tokenizer.ggml.add_bos_token": False,
        **more,
    }
