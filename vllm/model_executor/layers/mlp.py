"""The dense gated feed-forward block.

Owns: gate and up as one product, activation, down. Must not know: models. Layer L6.
"""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import Tensor, nn

from vllm.distributed.parallel_state import get_tp_group
from vllm.model_executor.layers.activation import get_gated_activation
from vllm.model_executor.layers.linear import RowLinear, StackedLinear
from vllm.model_executor.layers.sharding import Shard, Slot

__all__ = ["GatedMLP", "MlpShape"]

MlpShape = tuple[int, int]


class GatedMLP(nn.Module):
    """`down(act(gate x, up x))`; `shape` is (hidden size, intermediate size), `limit` clamps as in SwiGLU-L.

    The intermediate values are dealt to the tensor-parallel ranks.
    """

    def __init__(
        self,
        shape: MlpShape,
        dtype: torch.dtype,
        activation: str = "silu",
        bias: bool = False,
        limit: float | None = None,
    ) -> None:
        super().__init__()
        hidden, intermediate = shape
        shard = Shard.of_rank(get_tp_group())
        self.gate_up = StackedLinear(hidden, [intermediate // shard.count] * 2, dtype, bias, [shard] * 2)
        self.down = RowLinear(intermediate, hidden, dtype, bias)
        self.activation = get_gated_activation(activation, limit)

    def forward(self, x: Tensor) -> Tensor:
        return self.down.forward(self.activation(self.gate_up.forward(x)))

    def partial(self, x: Tensor) -> Tensor:
        """This rank's part of the sum, without the bias of `down`: for callers that add up over ranks themselves."""
        return self.down.partial(self.activation(self.gate_up.forward(x)))

    def weight_slots(self, prefix: str) -> Iterator[tuple[str, Slot]]:
        yield from self.gate_up.part_slots([f"{prefix}.gate_proj", f"{prefix}.up_proj"])
        yield from self.down.weight_slots(f"{prefix}.down_proj")
