"""Typed views over raw KV pages: one class per kind of cache, each the only code that knows its page's inside.

Owns: the layout inside a page (BLHNC: `[head, state, content]`; recurrent states one after another), writing rows by
slot, gathering rows of a request, choosing state pages. Must not know: models, how pages are allocated. Layer L6.

Every class here is a `CacheLayer` (v1/attention/backend.py): a name, a spec, and `bind_kv_cache`.
"""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from dataclasses import dataclass
from typing import Generic, TypeVar, cast

import torch
from torch import Tensor

from vllm import _custom_ops as ops
from vllm.v1.attention.backend import GroupMeta, StepMeta
from vllm.v1.kv_cache_interface import AttentionSpec, KVCacheSpec, MambaSpec

__all__ = ["KVHeadPages", "RingPages", "RowPages", "StatePages", "StateBlocks", "ring_slots", "slots_of"]


SpecT = TypeVar("SpecT", bound=KVCacheSpec)


def ring_slots(meta: StepMeta, group: GroupMeta) -> Tensor:
    """The slots of a ring group with −1 for all but the last `capacity` tokens of each request; once per step.

    In a chunk longer than the ring several tokens fall on one slot, and which of them stays would be undefined.
    """
    key = f"ring:{id(group)}"
    found = meta.derived.get(key)
    if found is None:
        lengths = torch.tensor(meta.seq_lens, dtype=torch.int64)
        ends = lengths.repeat_interleave(torch.tensor(meta.query_lens, dtype=torch.int64))
        found = slots_of(group).masked_fill(meta.positions < ends - group.block_size, -1)
        meta.derived[key] = found
    result: Tensor = found
    return result


def slots_of(group: GroupMeta) -> Tensor:
    """The group's slot mapping; `ValueError` for a group of recurrent states, which has none."""
    if group.slot_mapping is None:
        raise ValueError("a paged cache needs a slot_mapping; its group has none")
    return group.slot_mapping


def _typed_rows(raw: Tensor, spec: KVCacheSpec, name: str, dtype: torch.dtype, num_values: int) -> Tensor:
    """The first `num_values` of each page as `dtype`, `[num_blocks, num_values]`; rows keep the raw stride."""
    if raw.dim() != 2 or raw.dtype != torch.int8:
        raise ValueError(
            f"cache {name}: raw pages must be int8 [num_blocks, bytes], got {raw.dtype} {tuple(raw.shape)}"
        )
    needed = num_values * dtype.itemsize
    if raw.shape[1] < needed:
        raise ValueError(f"cache {name}: a page needs {needed} bytes, got {raw.shape[1]} (spec {spec})")
    return raw[:, :needed].view(dtype)


class _Pages(ABC, Generic[SpecT]):
    """Common part: name and spec. The planner may have changed the spec (block size) before the pages are bound."""

    def __init__(self, cache_name: str, spec: SpecT) -> None:
        self.cache_name = cache_name
        self._spec = spec
        self._configure(spec)

    def kv_spec(self) -> SpecT:
        return self._spec

    def bind_kv_cache(self, raw: Tensor, spec: KVCacheSpec | None = None) -> None:
        if spec is not None:
            self._spec = cast("SpecT", spec)
            self._configure(self._spec)
        self._view(raw)

    @abstractmethod
    def _configure(self, spec: SpecT) -> None:
        """Takes the sizes from the spec."""

    @abstractmethod
    def _view(self, raw: Tensor) -> None:
        """Makes the typed views."""


class KVHeadPages(_Pages[AttentionSpec]):
    """Keys and values per KV head; page `[kv_head, token, key | value]`."""

    def _configure(self, spec: AttentionSpec) -> None:
        self.block_size = spec.block_size
        self.num_kv_heads = spec.num_kv_heads
        self.head_size = spec.head_size
        self.head_size_v = spec.head_size_v if spec.head_size_v is not None else spec.head_size
        self.dtype: torch.dtype = spec.dtype
        self.pages = torch.empty(0)
        self.keys = torch.empty(0)
        self.values = torch.empty(0)

    def _view(self, raw: Tensor) -> None:
        width = self.head_size + self.head_size_v
        rows = _typed_rows(
            raw, self._spec, self.cache_name, self.dtype, self.num_kv_heads * self.block_size * width
        )
        self.pages = rows.unflatten(1, (self.num_kv_heads, self.block_size, width))
        self.keys = self.pages[..., : self.head_size]
        self.values = self.pages[..., self.head_size :]

    def write(self, key: Tensor, value: Tensor, slots: Tensor) -> None:
        """Stores `key [T, Hkv, D]` and `value [T, Hkv, Dv]`; −1 and slots of the null block are left alone."""
        ops.write_kv(self.pages, key, value, slots)

    def gather(self, block_row: Tensor, length: int, first: int = 0) -> tuple[Tensor, Tensor]:
        """Keys and values of positions `[first, length)` of one request as `[Hkv, length − first, D]`."""
        low = first // self.block_size
        blocks = block_row[low : -(-length // self.block_size)].to(torch.int64)
        rows = self.pages[blocks].transpose(0, 1).flatten(1, 2)
        skip = low * self.block_size
        rows = rows[:, first - skip : length - skip]
        return rows[..., : self.head_size], rows[..., self.head_size :]


class RowPages(_Pages[AttentionSpec]):
    """One row per `tokens_per_state` tokens, a single head: latent rows, pooled keys. Page `[row, channel]`."""

    def _configure(self, spec: AttentionSpec) -> None:
        self.block_size = spec.block_size
        self.tokens_per_row = int(spec.tokens_per_state)
        self.rows_per_block = spec.block_size // self.tokens_per_row
        self.width = spec.head_size
        self.dtype: torch.dtype = spec.dtype
        self.pages = torch.empty(0)

    def _view(self, raw: Tensor) -> None:
        rows = _typed_rows(raw, self._spec, self.cache_name, self.dtype, self.rows_per_block * self.width)
        self.pages = rows.unflatten(1, (self.rows_per_block, self.width))

    def write(self, rows: Tensor, row_slots: Tensor) -> None:
        """Stores `rows [M, width]` at `block · rows_per_block + row`; −1 and rows of the null block are left alone."""
        ops.write_rows(self.pages, rows, row_slots)

    def gather(self, block_row: Tensor, num_rows: int) -> Tensor:
        """The first `num_rows` rows of one request, `[num_rows, width]`."""
        blocks = block_row[: -(-num_rows // self.rows_per_block)].to(torch.int64)
        return self.pages[blocks].flatten(0, 1)[:num_rows]

    def gather_at(self, block_row: Tensor, row_index: Tensor) -> Tensor:
        """Rows at chosen indexes of one request: `row_index [...]` → `[..., width]`."""
        blocks = torch.div(row_index, self.rows_per_block, rounding_mode="floor")
        return self.pages[block_row.to(torch.int64)[blocks], row_index - blocks * self.rows_per_block]


class RingPages(_Pages[AttentionSpec]):
    """Circular buffer of the last `capacity` rows of a request; page `[head, position % capacity, channel]`."""

    def _configure(self, spec: AttentionSpec) -> None:
        self.capacity = spec.block_size
        self.num_heads = spec.num_kv_heads
        self.width = spec.head_size
        self.dtype: torch.dtype = spec.dtype
        self.pages = torch.empty(0)

    def _view(self, raw: Tensor) -> None:
        count = self.num_heads * self.capacity * self.width
        rows = _typed_rows(raw, self._spec, self.cache_name, self.dtype, count)
        self.pages = rows.unflatten(1, (self.num_heads, self.capacity, self.width))

    def write(self, heads: tuple[Tensor, ...], slots: Tensor) -> None:
        """Stores one `[T, width]` per head; `slots` come from `ring_slots`."""
        for head, rows in enumerate(heads):
            ops.write_rows(self.pages[:, head], rows, slots)


@dataclass(slots=True)
class StateBlocks:
    """Per request: page read (−1 = start from zeros) and page written (0 = write nothing), as lists and tensors."""

    source: list[int]
    target: list[int]
    source_tensor: Tensor
    target_tensor: Tensor


class StatePages(_Pages[MambaSpec]):
    """Recurrent states of a layer, stored one after another in a page (conv rows, then the recurrent state)."""

    def _configure(self, spec: MambaSpec) -> None:
        self.block_size = spec.block_size
        self.shapes = [tuple(shape) for shape in spec.shapes]
        self.dtypes: list[torch.dtype] = list(spec.dtypes)
        self.states: list[Tensor] = []

    def _view(self, raw: Tensor) -> None:
        self.states = []
        offset = 0
        for shape, dtype in zip(self.shapes, self.dtypes, strict=True):
            count = math.prod(shape)
            if offset % dtype.itemsize:
                raise ValueError(
                    f"cache {self.cache_name}: a {dtype} state would start at byte {offset}, which is not aligned"
                )
            part = _typed_rows(raw[:, offset:], self._spec, self.cache_name, dtype, count)
            self.states.append(part.unflatten(1, shape))
            offset += count * dtype.itemsize

    @staticmethod
    def blocks(meta: StepMeta, group: GroupMeta) -> StateBlocks:
        """Which page each request reads and writes in this step; computed once per group and step."""
        key = f"state:{id(group)}"
        found = meta.derived.get(key)
        if found is None:
            size = group.block_size
            rows = torch.arange(meta.num_reqs)
            before = torch.tensor([max(c - 1, 0) // size for c in meta.context_lens], dtype=torch.int64)
            after = torch.tensor([max(s - 1, 0) // size for s in meta.seq_lens], dtype=torch.int64)
            source = group.block_table[rows, before].to(torch.int64)
            fresh = torch.tensor([c == 0 for c in meta.context_lens], dtype=torch.bool)
            source[fresh] = -1
            target = group.block_table[rows, after].to(torch.int64)
            found = StateBlocks(source.tolist(), target.tolist(), source, target)
            meta.derived[key] = found
        result: StateBlocks = found
        return result
