"""Token embedding and language-model head, possibly one matrix.

Owns: both ends of the vocabulary. Must not know: models. Layer L6.
"""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import Tensor
from torch.nn import functional as F

from vllm import _custom_ops as ops
from vllm.model_executor.layers.linear import WeightHolder, frozen

__all__ = ["LmHead", "VocabEmbedding"]


class VocabEmbedding(WeightHolder):
    """`ids[T] → [T, D]`."""

    def __init__(self, vocab_size: int, size: int, dtype: torch.dtype) -> None:
        super().__init__()
        self.weight = frozen(vocab_size, size, dtype=dtype)
        self.dtype = dtype

    def forward(self, ids: Tensor) -> Tensor:
        return F.embedding(ids, self.weight).to(self.dtype)

    def weight_slots(self, prefix: str) -> Iterator[tuple[str, Tensor]]:
        yield f"{prefix}.weight", self.weight


class LmHead(WeightHolder):
    """`[N, D] → [N, V]` in fp32; shares the embedding's matrix when `tied` is given."""

    def __init__(
        self, vocab_size: int, size: int, dtype: torch.dtype, tied: VocabEmbedding | None = None
    ) -> None:
        super().__init__()
        self.is_tied = tied is not None
        self.weight = tied.weight if tied is not None else frozen(vocab_size, size, dtype=dtype)

    def forward(self, hidden: Tensor) -> Tensor:
        return ops.linear(hidden, self.weight).float()

    def weight_slots(self, prefix: str) -> Iterator[tuple[str, Tensor]]:
        if not self.is_tied:
            yield f"{prefix}.weight", self.weight
