"""Which part of a checkpoint tensor a tensor-parallel rank keeps, and where it puts it.

Owns: the arithmetic of parts, the record that loaders fill tensors by. Must not know: layers, files. Layer L6.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol, TypeAlias

from torch import Tensor

from vllm.distributed.parallel_state import TPGroup

__all__ = ["WHOLE", "Part", "Shard", "Slot", "Weight", "WeightSlot", "check_split"]

# One slice per axis; () stands for the whole tensor.
Part = tuple[slice, ...]


class Weight(Protocol):
    """A checkpoint tensor, or something that reads one from its file; indexing by slices reads that part of it."""

    @property
    def shape(self) -> tuple[int, ...]:
        """The shape of all of it."""

    def __getitem__(self, part: Part, /) -> Tensor:
        """The part as a tensor; may share memory."""


@dataclass(frozen=True, slots=True)
class WeightSlot:
    """`tensor` receives `part` of a checkpoint tensor of `shape`."""

    tensor: Tensor
    shape: tuple[int, ...]
    part: Part = ()

    @staticmethod
    def of(slot: Slot) -> WeightSlot:
        """The record of any slot."""
        return slot if isinstance(slot, WeightSlot) else WeightSlot(slot, tuple(slot.shape))


# A tensor alone receives a whole one of its own shape.
Slot: TypeAlias = Tensor | WeightSlot


@dataclass(frozen=True, slots=True)
class Shard:
    """Part `index` of `count` parts of equal size."""

    index: int
    count: int

    @staticmethod
    def of_rank(tp: TPGroup) -> Shard:
        """One part for each rank."""
        return Shard(tp.rank, tp.size)

    @staticmethod
    def of_kv_heads(tp: TPGroup, num_kv_heads: int) -> Shard:
        """One part for each rank, or for neighbouring ranks together where there are fewer heads than ranks."""
        count = min(tp.size, num_kv_heads)
        return Shard(tp.rank * count // tp.size, count)

    def slot(self, tensor: Tensor, axis: int = 0) -> Slot:
        """The slot of `tensor`, which is this part along `axis`."""
        if self.count == 1:
            return tensor
        size = tensor.shape[axis]
        shape, part = list(tensor.shape), [slice(0, n) for n in tensor.shape]
        shape[axis] = size * self.count
        part[axis] = slice(self.index * size, (self.index + 1) * size)
        return WeightSlot(tensor, tuple(shape), tuple(part))


WHOLE = Shard(0, 1)


def check_split(tp_size: int, **sizes: int) -> None:
    """`ValueError` naming the first of `sizes` that `tp_size` ranks cannot share evenly."""
    for name, size in sizes.items():
        if size % tp_size:
            raise ValueError(f"tensor_parallel_size {tp_size} does not divide {name} {size}")
