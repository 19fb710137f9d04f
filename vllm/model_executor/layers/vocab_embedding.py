"""Token embedding and language-model head, possibly one matrix.

Owns: both ends of the vocabulary, and how its rows are dealt to tensor-parallel ranks. Must not know: models. Layer L6.

Every rank has the same number of rows; the last ones are padding where the vocabulary does not divide.
"""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import Tensor
from torch.nn import functional as F

from vllm import _custom_ops as ops
from vllm.distributed.parallel_state import get_tp_group
from vllm.model_executor.layers.linear import WeightHolder, frozen
from vllm.model_executor.layers.sharding import Slot, WeightSlot

__all__ = ["LmHead", "VocabEmbedding"]


class _VocabRows(WeightHolder):
    """A rank's rows `[first, first + rows)` of a matrix `[vocab, D]`; those past the vocabulary are zeros."""

    def __init__(self, vocab_size: int, size: int, dtype: torch.dtype, shared: Tensor | None = None) -> None:
        super().__init__()
        self.tp = get_tp_group()
        self.vocab_size = vocab_size
        self.rows = -(-vocab_size // self.tp.size)
        self.first = min(self.tp.rank * self.rows, vocab_size)
        self.filled = min(self.rows, vocab_size - self.first)
        self.weight = frozen(self.rows, size, dtype=dtype) if shared is None else shared
        if self.filled < self.rows:
            self.weight[self.filled :] = 0

    def weight_slots(self, prefix: str) -> Iterator[tuple[str, Slot]]:
        if self.tp.size == 1:
            yield f"{prefix}.weight", self.weight
            return
        size = self.weight.shape[1]
        part = (slice(self.first, self.first + self.filled), slice(0, size))
        yield f"{prefix}.weight", WeightSlot(self.weight[: self.filled], (self.vocab_size, size), part)


class VocabEmbedding(_VocabRows):
    """`ids[T] → [T, D]`."""

    def __init__(self, vocab_size: int, size: int, dtype: torch.dtype) -> None:
        super().__init__(vocab_size, size, dtype)
        self.dtype = dtype

    def forward(self, ids: Tensor) -> Tensor:
        if self.tp.size == 1:
            return F.embedding(ids, self.weight).to(self.dtype)
        local = ids - self.first
        is_elsewhere = (local < 0) | (local >= self.rows)
        found = F.embedding(local.masked_fill(is_elsewhere, 0), self.weight).to(self.dtype)
        return self.tp.all_reduce(found.masked_fill(is_elsewhere.unsqueeze(-1), 0))


class LmHead(_VocabRows):
    """`[N, D] → [N, V]` in fp32; shares the embedding's matrix when `tied` is given."""

    def __init__(
        self, vocab_size: int, size: int, dtype: torch.dtype, tied: VocabEmbedding | None = None
    ) -> None:
        super().__init__(vocab_size, size, dtype, tied.weight if tied is not None else None)
        self.is_tied = tied is not None

    def forward(self, hidden: Tensor) -> Tensor:
        logits = ops.linear(hidden, self.weight).float()
        if self.tp.size == 1:
            return logits
        return self.tp.all_gather(logits)[:, : self.vocab_size].contiguous()

    def weight_slots(self, prefix: str) -> Iterator[tuple[str, Slot]]:
        if not self.is_tied:
            yield from super().weight_slots(prefix)
