"""Linear layers: one weight, or several checkpoint matrices stacked into one.

Owns: the stacked weight layout and which rows belong to which checkpoint name. Must not know: files, models. Layer L6.

Every layer of this package offers `weight_slots(prefix)`: pairs of checkpoint name and the tensor (often a view of a
stacked weight) that receives it. The loader copies by name into these views, so fused layers need no loading code.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import torch
from torch import Tensor, nn
from torch.nn import functional as F

__all__ = ["Linear", "StackedLinear", "frozen"]


def frozen(*shape: int, dtype: torch.dtype) -> nn.Parameter:
    """An uninitialised parameter that never needs a gradient."""
    return nn.Parameter(torch.empty(shape, dtype=dtype), requires_grad=False)


class Linear(nn.Module):
    """`y = x Wᵀ + b`, weight `[outputs, inputs]`."""

    def __init__(self, inputs: int, outputs: int, dtype: torch.dtype, bias: bool = False) -> None:
        super().__init__()
        self.weight = frozen(outputs, inputs, dtype=dtype)
        self.bias = frozen(outputs, dtype=dtype) if bias else None

    def forward(self, x: Tensor) -> Tensor:
        return F.linear(x, self.weight, self.bias)

    def weight_slots(self, prefix: str) -> Iterator[tuple[str, Tensor]]:
        yield f"{prefix}.weight", self.weight
        if self.bias is not None:
            yield f"{prefix}.bias", self.bias


class StackedLinear(Linear):
    """Several projections of the same input as one matrix product; `parts` are their output sizes in order."""

    def __init__(self, inputs: int, parts: Sequence[int], dtype: torch.dtype, bias: bool = False) -> None:
        super().__init__(inputs, sum(parts), dtype, bias)
        self.parts = list(parts)

    def split(self, y: Tensor) -> tuple[Tensor, ...]:
        """Views of the parts in the output of `forward`."""
        return y.split(self.parts, dim=-1)

    def part_slots(self, names: Sequence[str]) -> Iterator[tuple[str, Tensor]]:
        """Slots of the parts, given the checkpoint name of each (without ".weight")."""
        weights = self.weight.split(self.parts)
        biases: Sequence[Tensor | None] = (
            self.bias.split(self.parts) if self.bias is not None else [None] * len(self.parts)
        )
        for name, weight, bias in zip(names, weights, biases, strict=True):
            yield f"{name}.weight", weight
            if bias is not None:
                yield f"{name}.bias", bias
