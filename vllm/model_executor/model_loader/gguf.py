"""Reads tensors of a GGUF file, dequantised, under the names that the models use.

Ranks of a tensor-parallel group read only the blocks that hold their part of a tensor.

Owns: block formats (F32, F16, BF16, Q4_0, Q4_1, Q8_0, Q6_K), tensor names, the row order of rotary heads.
Must not know: models, the header format (transformers_utils/gguf_metadata.py). Layer L6.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor
from tqdm import tqdm

from vllm.model_executor.layers.rotary_embedding import ROPE_FACTORS
from vllm.model_executor.layers.sharding import Part
from vllm.transformers_utils.gguf_metadata import GGUFHeader, GGUFTensorInfo, read_gguf_header

__all__ = ["GGUFWeight", "dequantise", "iter_gguf", "tensor_name"]

Bytes = NDArray[np.uint8]
Floats = NDArray[np.float32]


@dataclass(frozen=True, slots=True)
class BlockFormat:
    """How a tensor type is stored: `values` numbers in `size` bytes; `decode` maps `[N, size]` to `[N, values]`."""

    name: str
    values: int
    size: int
    decode: Callable[[Bytes], Floats]


def _halves(blocks: Bytes, start: int) -> Floats:
    """The fp16 number at byte `start` of each block, `[N, 1]`."""
    return np.ascontiguousarray(blocks[:, start : start + 2]).view(np.float16).astype(np.float32)


def _nibbles(packed: Bytes) -> Floats:
    """Low halves of all bytes, then high halves."""
    return np.concatenate([packed & 15, packed >> 4], axis=1).astype(np.float32)


def _f32(blocks: Bytes) -> Floats:
    return np.ascontiguousarray(blocks).view(np.float32)


def _f16(blocks: Bytes) -> Floats:
    return np.ascontiguousarray(blocks).view(np.float16).astype(np.float32)


def _bf16(blocks: Bytes) -> Floats:
    wide: Floats = (np.ascontiguousarray(blocks).view(np.uint16).astype(np.uint32) << 16).view(np.float32)
    return wide


def _q4_0(blocks: Bytes) -> Floats:
    return _halves(blocks, 0) * (_nibbles(blocks[:, 2:]) - 8)


def _q4_1(blocks: Bytes) -> Floats:
    return _halves(blocks, 0) * _nibbles(blocks[:, 4:]) + _halves(blocks, 2)


def _q8_0(blocks: Bytes) -> Floats:
    return _halves(blocks, 0) * blocks[:, 2:].view(np.int8).astype(np.float32)


def _q6_k(blocks: Bytes) -> Floats:
    """256 values: 128 bytes of low nibbles, 64 bytes of high bit pairs, 16 int8 scales, one fp16 scale.

    Each half of 128 values uses 64 low bytes and 32 high bytes; value 32·g + l of a half takes nibble g // 2 of low
    byte 32·(g % 2) + l and bit pair g of high byte l.
    """
    count = blocks.shape[0]
    low = blocks[:, :128].reshape(count, 2, 2, 32)
    high = blocks[:, 128:192].reshape(count, 2, 1, 32)
    scales = blocks[:, 192:208].view(np.int8).astype(np.float32).reshape(count, 16, 1)
    nibbles = np.concatenate([low & 15, low >> 4], axis=2)
    pairs = (high >> np.array([0, 2, 4, 6], dtype=np.uint8).reshape(1, 1, 4, 1)) & 3
    values = (nibbles | (pairs << 4)).astype(np.float32) - 32
    return (_halves(blocks, 208)[..., None] * scales * values.reshape(count, 16, 16)).reshape(count, 256)


_FORMATS: dict[int, BlockFormat] = {
    0: BlockFormat("F32", 1, 4, _f32),
    1: BlockFormat("F16", 1, 2, _f16),
    2: BlockFormat("Q4_0", 32, 18, _q4_0),
    3: BlockFormat("Q4_1", 32, 20, _q4_1),
    8: BlockFormat("Q8_0", 32, 34, _q8_0),
    14: BlockFormat("Q6_K", 256, 210, _q6_k),
    30: BlockFormat("BF16", 1, 2, _bf16),
}

_GLOBAL_NAMES = {
    "token_embd.weight": "model.embed_tokens.weight",
    "output_norm.weight": "model.norm.weight",
    "output.weight": "lm_head.weight",
    ROPE_FACTORS: ROPE_FACTORS,
}

_LAYER_NAMES = {
    "attn_norm": "input_layernorm",
    "attn_q": "self_attn.q_proj",
    "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj",
    "attn_output": "self_attn.o_proj",
    "attn_q_norm": "self_attn.q_norm",
    "attn_k_norm": "self_attn.k_norm",
    "ffn_norm": "post_attention_layernorm",
    "ffn_gate": "mlp.gate_proj",
    "ffn_up": "mlp.up_proj",
    "ffn_down": "mlp.down_proj",
}


def tensor_name(name: str) -> str:
    """The models' name of a GGUF tensor; `ValueError` if there is none."""
    if name in _GLOBAL_NAMES:
        return _GLOBAL_NAMES[name]
    parts = name.split(".")
    if len(parts) == 4 and parts[0] == "blk" and parts[2] in _LAYER_NAMES:
        return f"model.layers.{parts[1]}.{_LAYER_NAMES[parts[2]]}.{parts[3]}"
    raise ValueError(f"GGUF tensor {name!r} is not known")


def dequantise(data: Bytes, type_number: int, shape: tuple[int, ...]) -> Tensor:
    """Raw bytes of a tensor → fp32 tensor of `shape`; `ValueError` for an unknown type or a wrong byte count."""
    form = _FORMATS.get(type_number)
    if form is None:
        known = ", ".join(f.name for f in _FORMATS.values())
        raise ValueError(f"GGUF tensor type {type_number} is not supported; supported: {known}")
    if data.size % form.size:
        raise ValueError(f"{data.size} bytes are no whole number of {form.name} blocks of {form.size}")
    values = form.decode(data.reshape(-1, form.size)).reshape(shape)
    # A copy: fp32 tensors would otherwise be views of the read-only file.
    return torch.from_numpy(values.copy())


class GGUFWeight:
    """A tensor of a mapped file; what is asked for is read and dequantised to fp32.

    `heads`: into how many groups of rows the file has permuted it, 0 if it has not.
    """

    def __init__(self, info: GGUFTensorInfo, data: Bytes, heads: int = 0) -> None:
        self._info, self._data, self._heads = info, data, heads
        self.shape = info.shape

    def __getitem__(self, part: Part, /) -> Tensor:
        """`ValueError` for a part of a tensor whose rows are no whole blocks, or that cuts through a permuted head."""
        data = np.asarray(self._data)
        if not part:
            tensor = dequantise(data, self._info.type_number, self.shape)
            return _unpermute(tensor, self._heads) if self._heads else tensor
        # The last axis is that of the blocks; a vector is one row.
        *outer, columns = (range(n)[along] for n, along in zip(self.shape, part, strict=True))
        rows = outer[0] if outer else range(1)
        form = _FORMATS[self._info.type_number]
        num_blocks, rest = divmod(self.shape[-1], form.values)
        if len(outer) > 1 or rest:
            raise ValueError(
                f"GGUF tensor {self._info.name!r} {self.shape} cannot be shared by ranks: its rows are no whole"
                f" {form.name} blocks of {form.values} values"
            )
        first, end = columns.start // form.values, -(-columns.stop // form.values)
        blocks = data.reshape(-1, num_blocks, form.size)[rows.start : rows.stop, first:end]
        wide = dequantise(
            np.ascontiguousarray(blocks), self._info.type_number, (len(rows), (end - first) * form.values)
        )
        skip = first * form.values
        tensor = wide[:, columns.start - skip : columns.stop - skip]
        tensor = tensor if outer else tensor[0]
        return self._unpermuted(tensor, outer[0] if outer else columns) if self._heads else tensor

    def _unpermuted(self, tensor: Tensor, rows: range) -> Tensor:
        size = self.shape[0] // self._heads
        if rows.start % size or rows.stop % size:
            raise ValueError(
                f"GGUF tensor {self._info.name!r}: rows {rows.start} to {rows.stop} are no whole heads of {size}"
            )
        return _unpermute(tensor, len(rows) // size)


def _num_bytes(path: Path, info: GGUFTensorInfo) -> int:
    form = _FORMATS.get(info.type_number)
    if form is None:
        known = ", ".join(f.name for f in _FORMATS.values())
        raise ValueError(
            f"{path}: tensor {info.name!r} has type {info.type_number}, which is not supported; supported: {known}"
        )
    return info.num_elements // form.values * form.size


def _place(header: GGUFHeader, info: GGUFTensorInfo, file_size: int) -> tuple[str, int, int]:
    """The models' name of a tensor, and the bytes of the file that hold it."""
    start = header.data_offset + info.offset
    end = start + _num_bytes(header.path, info)
    if end > file_size:
        raise ValueError(f"{header.path}: tensor {info.name!r} is cut off at byte {file_size} of {end}")
    return tensor_name(info.name), start, end


def _unpermute(weight: Tensor, heads: int) -> Tensor:
    """Rows of a rotary projection from the neighbour order of the file to halves (channel i turns with i + d/2)."""
    return weight.unflatten(0, (heads, -1, 2)).transpose(1, 2).reshape(weight.shape)


def _permuted_heads(header: GGUFHeader) -> dict[str, int]:
    """Layer parts whose rows are permuted, with their head count. Only files of the llama kind permute them."""
    if header.metadata.get("general.architecture") != "llama":
        return {}
    heads = int(header.metadata["llama.attention.head_count"])
    kv_heads = int(header.metadata.get("llama.attention.head_count_kv", heads))
    return {"attn_q": heads, "attn_k": kv_heads}


def iter_gguf(path: Path, show_progress: bool = True) -> Iterator[tuple[str, GGUFWeight]]:
    """Yields (model's name, tensor to be read) for every tensor; the bar counts file bytes.

    `ValueError` names a tensor that is unknown, of an unsupported type or cut off, before any is read.
    """
    header = read_gguf_header(path)
    permuted = _permuted_heads(header)
    file_bytes = np.memmap(path, dtype=np.uint8, mode="r")
    total = file_bytes.size - header.data_offset
    places = [_place(header, info, file_bytes.size) for info in header.tensors]
    with tqdm(
        total=total,
        desc="Loading weights",
        unit="B",
        unit_scale=True,
        disable=None if show_progress else True,
    ) as bar:
        for info, (name, start, end) in zip(header.tensors, places, strict=True):
            part = info.name.split(".")[2] if info.name.startswith("blk.") else ""
            yield name, GGUFWeight(info, file_bytes[start:end], permuted.get(part, 0))
            bar.update(end - start)
