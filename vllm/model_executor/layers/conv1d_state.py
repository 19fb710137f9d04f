"""Causal depthwise convolution whose last inputs are kept as a state.

Owns: the convolution over "state rows, then new rows". Must not know: pages, gates. Layer L6.

A state is the last `K − 1` inputs, oldest first, `[K − 1, C]`; zeros stand for "before the beginning".
"""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn import functional as F

__all__ = ["conv_sequence", "conv_step"]


def conv_sequence(x: Tensor, state: Tensor | None, weight: Tensor) -> tuple[Tensor, Tensor]:
    """New inputs `x [T, C]` of one request and `weight [C, K]` → fp32 outputs `[T, C]`, next state `[K − 1, C]`."""
    keep = weight.shape[1] - 1
    if state is None:
        state = x.new_zeros(keep, x.shape[1])
    rows = torch.cat([state.to(x.dtype), x])
    out = F.conv1d(rows.float().T.unsqueeze(0), weight.unsqueeze(1), groups=weight.shape[0])
    return out[0].T, rows[rows.shape[0] - keep :]


def conv_step(x: Tensor, states: Tensor, weight: Tensor) -> tuple[Tensor, Tensor]:
    """One new input for each of N requests: `x [N, C]`, `states [N, K − 1, C]` → fp32 `[N, C]`, `[N, K − 1, C]`."""
    rows = torch.cat([states.to(x.dtype), x.unsqueeze(1)], dim=1)
    out = (rows.float() * weight.T).sum(1)
    return out, rows[:, 1:]
