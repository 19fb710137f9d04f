"""Writes small GGUF files: header, metadata, tensors of any type as raw bytes."""

from __future__ import annotations

import struct
from pathlib import Path
from typing import Any

import numpy as np

F32, F16, Q4_0, Q4_1, Q8_0, Q6_K, BF16 = 0, 1, 2, 3, 8, 14, 30
ALIGNMENT = 32

Tensor = tuple[str, tuple[int, ...], int, bytes]


def _text(value: str) -> bytes:
    data = value.encode()
    return struct.pack("<Q", len(data)) + data


def _value(value: Any) -> bytes:
    """Type number and value; ints as uint32, floats as float32."""
    if isinstance(value, bool):
        return struct.pack("<I?", 7, value)
    if isinstance(value, int):
        return struct.pack("<II", 4, value)
    if isinstance(value, float):
        return struct.pack("<If", 6, value)
    if isinstance(value, str):
        return struct.pack("<I", 8) + _text(value)
    items = [_value(item) for item in value]
    kind = items[0][:4]
    return struct.pack("<I", 9) + kind + struct.pack("<Q", len(items)) + b"".join(item[4:] for item in items)


def write_gguf(path: Path, metadata: dict[str, Any], tensors: list[Tensor]) -> Path:
    """`tensors`: name, shape (slowest first), type number, bytes."""
    head = b"GGUF" + struct.pack("<IQQ", 3, len(tensors), len(metadata))
    for key, value in metadata.items():
        head += _text(key) + _value(value)
    body = b""
    for name, shape, kind, data in tensors:
        head += _text(name) + struct.pack("<I", len(shape))
        head += b"".join(struct.pack("<Q", n) for n in reversed(shape))
        head += struct.pack("<IQ", kind, len(body))
        body += data + b"\0" * (-len(data) % ALIGNMENT)
    head += b"\0" * (-len(head) % ALIGNMENT)
    path.write_bytes(head + body)
    return path


def permute_rotary(weight: np.ndarray, heads: int) -> np.ndarray:
    """Rows as files of the llama kind have them: the two halves of a head interleaved."""
    rows = weight.reshape(heads, 2, weight.shape[0] // heads // 2, *weight.shape[1:])
    return np.ascontiguousarray(rows.swapaxes(1, 2).reshape(weight.shape))


def quantise_q8_0(values: np.ndarray) -> bytes:
    blocks = values.reshape(-1, 32).astype(np.float32)
    scale = (np.abs(blocks).max(1, keepdims=True) / 127).astype(np.float16)
    numbers = np.rint(blocks / np.maximum(scale.astype(np.float32), 1e-9)).astype(np.int8)
    return np.concatenate([scale.view(np.uint8), numbers.view(np.uint8)], axis=1).tobytes()


def quantise_q4_1(values: np.ndarray) -> bytes:
    blocks = values.reshape(-1, 32).astype(np.float32)
    low = blocks.min(1, keepdims=True).astype(np.float16)
    scale = ((blocks.max(1, keepdims=True) - low.astype(np.float32)) / 15).astype(np.float16)
    numbers = np.rint((blocks - low.astype(np.float32)) / np.maximum(scale.astype(np.float32), 1e-9))
    numbers = numbers.clip(0, 15).astype(np.uint8)
    packed = numbers[:, :16] | (numbers[:, 16:] << 4)
    return np.concatenate([scale.view(np.uint8), low.view(np.uint8), packed], axis=1).tobytes()
