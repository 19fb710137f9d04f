"""Linear layers: one weight, or several checkpoint matrices stacked into one.

Owns: the stacked weight layout and which rows belong to which checkpoint name. Must not know: files, models. Layer L6.

Every layer of this package offers `weight_slots(prefix)`: pairs of checkpoint name and the tensor (often a view of a
stacked weight) that receives it. The loader copies by name into these views, so fused layers need no loading code.

Tensor parallelism. A layer whose outputs are dealt to the ranks needs nothing but its `shard`; `RowLinear` takes such
outputs as its inputs, and what the ranks have computed of each output is added up. A slot says which part of the
checkpoint's tensor it receives. With one rank every shard is the whole and nothing is added.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import torch
from torch import Tensor, nn

from vllm import _custom_ops as ops
from vllm.distributed.parallel_state import get_tp_group
from vllm.model_executor.layers.sharding import WHOLE, Shard, Slot

__all__ = ["Linear", "RowLinear", "StackedLinear", "WeightHolder", "frozen"]

_SLICE = 1 << 20


def frozen(*shape: int, dtype: torch.dtype) -> nn.Parameter:
    """An uninitialised parameter that never needs a gradient."""
    return nn.Parameter(torch.empty(shape, dtype=dtype), requires_grad=False)


class WeightHolder(nn.Module):
    """A module whose large weights go through `ops.linear` (or a lookup), which takes weights narrower than the input.

    `narrowable` names those parameters.
    """

    narrowable: tuple[str, ...] = ("weight",)

    def narrow_weights(self) -> None:
        """Stores fp32 weights whose values all fit a half-size type exactly in that type: same results, half the reads.

        A checkpoint of a half-size type that is run in fp32 is such a case.
        """
        for name in self.narrowable:
            parameter = self.get_parameter(name)
            if parameter.dtype != torch.float32:
                continue
            for dtype in (torch.float16, torch.bfloat16):
                if _fits(parameter, dtype):
                    parameter.data = parameter.data.to(dtype)
                    break


def _fits(weight: Tensor, dtype: torch.dtype) -> bool:
    """Whether every value survives the way to `dtype` and back; stops at the first slice where one does not."""
    return all(bool((part.to(dtype).float() == part).all()) for part in weight.view(-1).split(_SLICE))


class Linear(WeightHolder):
    """`y = x Wᵀ + b`, weight `[outputs, inputs]`; `shard`: which part of the checkpoint's outputs these are."""

    def __init__(
        self, inputs: int, outputs: int, dtype: torch.dtype, bias: bool = False, shard: Shard = WHOLE
    ) -> None:
        super().__init__()
        self.shard = shard
        self.weight = frozen(outputs, inputs, dtype=dtype)
        self.bias = frozen(outputs, dtype=dtype) if bias else None

    def forward(self, x: Tensor) -> Tensor:
        return ops.linear(x, self.weight, self.bias)

    def weight_slots(self, prefix: str) -> Iterator[tuple[str, Slot]]:
        yield f"{prefix}.weight", self.shard.slot(self.weight)
        if self.bias is not None:
            yield f"{prefix}.bias", self.shard.slot(self.bias)


class RowLinear(Linear):
    """A `Linear` over inputs that are dealt to the ranks: `inputs` of all ranks together, outputs on every rank."""

    def __init__(self, inputs: int, outputs: int, dtype: torch.dtype, bias: bool = False) -> None:
        tp = get_tp_group()
        super().__init__(inputs // tp.size, outputs, dtype, bias, Shard.of_rank(tp))
        self.tp = tp

    def forward(self, x: Tensor) -> Tensor:
        if self.tp.size == 1:
            return super().forward(x)
        total = self.tp.all_reduce(self.partial(x))
        return total if self.bias is None else total + self.bias

    def partial(self, x: Tensor) -> Tensor:
        """This rank's part of the sum, without bias."""
        return ops.linear(x, self.weight)

    def weight_slots(self, prefix: str) -> Iterator[tuple[str, Slot]]:
        yield f"{prefix}.weight", self.shard.slot(self.weight, axis=1)
        if self.bias is not None:
            yield f"{prefix}.bias", WHOLE.slot(self.bias)


class StackedLinear(Linear):
    """Several projections of the same input as one matrix product; `parts` are their output sizes in order.

    `shards`: which part of the checkpoint's outputs each of them is; all of them if left out.
    """

    def __init__(
        self,
        inputs: int,
        parts: Sequence[int],
        dtype: torch.dtype,
        bias: bool = False,
        shards: Sequence[Shard] | None = None,
    ) -> None:
        super().__init__(inputs, sum(parts), dtype, bias)
        self.parts = list(parts)
        self.shards = list(shards) if shards is not None else [WHOLE] * len(self.parts)

    def split(self, y: Tensor) -> tuple[Tensor, ...]:
        """Views of the parts in the output of `forward`."""
        parts: tuple[Tensor, ...] = y.split(self.parts, dim=-1)
        return parts

    def part_slots(self, names: Sequence[str]) -> Iterator[tuple[str, Slot]]:
        """Slots of the parts, given the checkpoint name of each (without ".weight")."""
        weights = self.weight.split(self.parts)
        biases: Sequence[Tensor | None] = (
            self.bias.split(self.parts) if self.bias is not None else [None] * len(self.parts)
        )
        for name, shard, weight, bias in zip(names, self.shards, weights, biases, strict=True):
            yield f"{name}.weight", shard.slot(weight)
            if bias is not None:
                yield f"{name}.bias", shard.slot(bias)
