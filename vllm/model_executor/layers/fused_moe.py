"""Mixture of experts: routing and the experts' feed-forward.

Owns: the router rules and the grouping of tokens by expert. Must not know: models. Layer L6.

A token's result depends on nothing but the token: its experts' outputs are summed in the order of its own choice.
Tensor-parallel ranks share out the intermediate values of every expert; all of them route all tokens alike.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn import functional as F

from vllm import _custom_ops as ops
from vllm.distributed.parallel_state import get_tp_group
from vllm.model_executor.layers.activation import by_rows, get_gated_activation
from vllm.model_executor.layers.linear import WeightHolder, frozen
from vllm.model_executor.layers.mlp import GatedMLP
from vllm.model_executor.layers.sharding import Shard, Slot

__all__ = ["MoeShape", "RoutedExperts", "SharedExpertMoE", "route_sigmoid_bias", "route_softmax"]


@dataclass(frozen=True, slots=True)
class MoeShape:
    """Sizes and routing of one layer. `scale` multiplies the chosen weights; groups limit the choice when > 1."""

    hidden_size: int
    intermediate_size: int
    num_experts: int
    top_k: int
    num_shared: int
    scale: float
    is_normalised: bool
    num_groups: int
    top_groups: int
    limit: float | None
    dtype: torch.dtype


def _stable_top(scores: Tensor, k: int) -> Tensor:
    """Indexes of the k largest per row, best first; of equals the lowest index wins."""
    return scores.sort(dim=-1, descending=True, stable=True).indices[..., :k]


def route_sigmoid_bias(logits: Tensor, bias: Tensor, shape: MoeShape) -> tuple[Tensor, Tensor]:
    """Router logits `[T, E]` fp32 → weights `[T, k]` fp32 and experts `[T, k]`.

    The bias takes part in the choice only. With groups, first the groups with the best two members are kept.
    """
    scores = by_rows(torch.sigmoid, logits)
    choice = scores + bias
    if shape.num_groups > 1:
        grouped = choice.unflatten(-1, (shape.num_groups, -1))
        best_two = grouped.topk(min(2, grouped.shape[-1]), dim=-1).values.sum(-1)
        kept = torch.zeros_like(best_two, dtype=torch.bool)
        kept.scatter_(-1, _stable_top(best_two, shape.top_groups), True)
        choice = grouped.masked_fill(~kept.unsqueeze(-1), float("-inf")).flatten(-2)
    experts = _stable_top(choice, shape.top_k)
    weights = scores.gather(-1, experts)
    if shape.is_normalised:
        weights = weights / (weights.sum(-1, keepdim=True) + 1e-20)
    return weights * shape.scale, experts


def route_softmax(logits: Tensor, top_k: int) -> tuple[Tensor, Tensor]:
    """Router logits `[T, E]` fp32 → weights `[T, k]` fp32, which add up to 1, and experts `[T, k]`."""
    probabilities = logits.softmax(dim=-1)
    experts = _stable_top(probabilities, top_k)
    weights = probabilities.gather(-1, experts)
    return weights / weights.sum(-1, keepdim=True), experts


class RoutedExperts(WeightHolder):
    """The feed-forward of every expert; `sizes` are (experts, hidden, intermediate of all ranks together)."""

    narrowable = ("gate_up", "down")

    def __init__(
        self,
        sizes: tuple[int, int, int],
        dtype: torch.dtype,
        activation: str = "silu",
        limit: float | None = None,
    ) -> None:
        super().__init__()
        self.tp = get_tp_group()
        self.num_experts, d, intermediate = sizes
        i = intermediate // self.tp.size
        self.gate_up = frozen(self.num_experts, 2 * i, d, dtype=dtype)
        self.down = frozen(self.num_experts, d, i, dtype=dtype)
        self.activation = get_gated_activation(activation, limit)

    def partial(self, x: Tensor, weights: Tensor, experts: Tensor) -> Tensor:
        """This rank's part of each token's weighted sum over its experts."""
        routed = self._run_experts(x, experts)
        # Not as a matrix product, which adds up in another order for a token alone.
        return (weights.unsqueeze(-1) * routed.float()).sum(1).to(x.dtype)

    def _run_experts(self, x: Tensor, experts: Tensor) -> Tensor:
        """Outputs `[T, k, D]` of each token's experts; every expert runs once over all of its tokens."""
        tokens, k = experts.shape
        flat = experts.flatten()
        order = flat.argsort(stable=True)
        gathered = x[torch.div(order, k, rounding_mode="floor")]
        results = torch.empty_like(gathered)
        start = 0
        for e, count in enumerate(torch.bincount(flat, minlength=self.num_experts).tolist()):
            if count:
                part = self.activation(ops.linear(gathered[start : start + count], self.gate_up[e]))
                results[start : start + count] = ops.linear(part, self.down[e])
                start += count
        out = torch.empty_like(results)
        out[order] = results
        return out.view(tokens, k, -1)


class SharedExpertMoE(RoutedExperts):
    """Sigmoid-routed experts plus experts that every token passes."""

    def __init__(self, shape: MoeShape) -> None:
        e, d = shape.num_experts, shape.hidden_size
        super().__init__((e, d, shape.intermediate_size), shape.dtype, limit=shape.limit)
        self.shape = shape
        self.router = frozen(e, d, dtype=torch.float32)
        self.router_bias = frozen(e, dtype=torch.float32)
        self.shared: GatedMLP | None = None
        if shape.num_shared:
            sizes = (d, shape.intermediate_size * shape.num_shared)
            self.shared = GatedMLP(sizes, shape.dtype, limit=shape.limit)

    def forward(self, x: Tensor) -> Tensor:
        weights, experts = route_sigmoid_bias(F.linear(x.float(), self.router), self.router_bias, self.shape)
        out = self.partial(x, weights, experts)
        return self.tp.all_reduce(out + self.shared.partial(x) if self.shared is not None else out)

    def weight_slots(self, prefix: str) -> Iterator[tuple[str, Slot]]:
        yield f"{prefix}.gate.weight", self.router
        yield f"{prefix}.gate.e_score_correction_bias", self.router_bias
        shard = Shard.of_rank(self.tp)
        for e in range(self.num_experts):
            gate, up = self.gate_up[e].chunk(2)
            yield f"{prefix}.experts.{e}.gate_proj.weight", shard.slot(gate)
            yield f"{prefix}.experts.{e}.up_proj.weight", shard.slot(up)
            yield f"{prefix}.experts.{e}.down_proj.weight", shard.slot(self.down[e], axis=1)
        if self.shared is not None:
            yield from self.shared.weight_slots(f"{prefix}.shared_experts")
