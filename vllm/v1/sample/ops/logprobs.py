"""Ranks of chosen values in their rows. Layer: L6."""

from __future__ import annotations

import torch
from torch import Tensor


def batched_count_greater_than(x: Tensor, values: Tensor) -> Tensor:
    """How many entries of each row are at least that row's value: `[rows, n]`, `[rows, 1]` → int64 `[rows]`.

    With the value being in the row, this is its rank: 1 = largest, ties share the worst rank of theirs.
    """
    # Counted in float32, which is exact up to 2**24 and faster than summing booleans.
    return torch.ge(x, values, out=torch.empty_like(x, dtype=torch.float32)).sum(dim=-1).to(torch.int64)
