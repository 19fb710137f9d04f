"""The best tokens of each row, fast. Layer: L6.

Maxima of blocks come first: a plain maximum runs at the speed of memory, one with indices and a top-k do not. Device
tensors, and rows that no block size divides, take the ordinary way.
"""

from __future__ import annotations

import numpy as np
import torch
from torch import Tensor

_BLOCK_MAX = 512
_BLOCK_MIN = 32
_TOPK_BLOCK = 64


def block_size_of(width: int) -> int:
    """The largest power of two up to 512 that divides `width`; 0 if none of at least 32 does."""
    size = min(_BLOCK_MAX, width & -width)
    return size if size >= _BLOCK_MIN else 0


def row_max(logits: Tensor) -> tuple[Tensor, Tensor]:
    """Largest value and its first index per row of `[rows, n]`; NaN counts as largest."""
    rows, width = logits.shape
    size = block_size_of(width)
    if size == 0 or logits.device.type != "cpu":
        values, ids = logits.max(dim=-1)
        return values, ids
    blocks = logits.view(rows, width // size, size)
    values, which = blocks.amax(dim=-1).max(dim=-1)
    inside = blocks[torch.arange(rows), which].argmax(dim=-1)
    return values, which * size + inside


def row_topk(logits: Tensor, k: int) -> tuple[Tensor, Tensor]:
    """The `k` largest values per row, descending, and their indices; of equal values any may be chosen."""
    rows, width = logits.shape
    if logits.device.type == "cpu" and logits.dtype == torch.float32 and 4 * k > width:
        # Sorting by numpy is several times as fast as the library's top-k of nearly a whole row.
        ids = torch.from_numpy(np.argsort(-logits.numpy(), axis=-1)[:, :k])
        return logits.gather(-1, ids), ids
    size = min(_TOPK_BLOCK, block_size_of(width))
    if size == 0 or logits.device.type != "cpu" or 4 * k * size > width:
        values, ids = logits.topk(k, dim=-1)
        return values, ids
    blocks = logits.view(rows, width // size, size)
    # The k blocks with the largest maxima hold the k largest values.
    which = blocks.amax(dim=-1).topk(k, dim=-1).indices
    chosen = blocks[torch.arange(rows).unsqueeze(1), which].view(rows, k * size)
    values, places = chosen.topk(k, dim=-1)
    block = which.gather(1, places // size)
    return values, block * size + places % size
