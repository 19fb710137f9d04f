"""Latent attention without positions, over the tokens that an indexer selected.

Owns: the low-rank projections and their absorbed form. Must not know: how tokens are selected. Layer L6.

Only the normed latent row `c` of a token is cached. Keys and values would be `W_k c` and `W_v c`; instead the query is
taken into latent space (`q W_k`), attention runs over the latent rows, and `W_v` is applied to what comes out.

Tensor-parallel ranks share out the query heads. The latent row has no heads: every rank computes and caches all of it,
and its indexer too, from inputs that are the same on all ranks, so that the pages of the ranks are equal byte for byte.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace

import torch
from torch import Tensor, nn

from vllm.distributed.parallel_state import get_tp_group
from vllm.model_executor.layers.kpool import KpoolIndexer, Selection
from vllm.model_executor.layers.layernorm import RMSNorm
from vllm.model_executor.layers.linear import Linear, RowLinear, StackedLinear, frozen
from vllm.model_executor.layers.sharding import Shard, Slot
from vllm.v1.attention.backend import StepMeta
from vllm.v1.attention.compute import ComputeBackend
from vllm.v1.attention.pages import RowPages, slots_of

__all__ = ["LatentShape", "SparseLatentAttention"]


@dataclass(frozen=True, slots=True)
class LatentShape:
    """Sizes of one layer over all ranks: query rank, latent width, and per head the key and value sizes."""

    hidden_size: int
    num_heads: int
    q_rank: int
    latent: int
    key_dim: int
    value_dim: int
    eps: float
    dtype: torch.dtype
    has_bias: bool = False


def _per_head(x: Tensor, weight: Tensor) -> Tensor:
    """`x [T, H, I]` by the matrices of the heads `[H, I, O]` → `[T, H, O]`.

    A single row is computed as two equal ones: alone it would be added up in another order than beside others.
    """
    rows = x.transpose(0, 1)
    if x.shape[0] == 1:
        rows = rows.expand(-1, 2, -1)
    return torch.matmul(rows, weight)[:, : x.shape[0]].transpose(0, 1)


class SparseLatentAttention(nn.Module):
    """`x [T, D] → [T, D]`; with its own indexer, or using the selection of an earlier layer."""

    def __init__(
        self, shape: LatentShape, pages: RowPages, indexer: KpoolIndexer | None, backend: type[ComputeBackend]
    ) -> None:
        super().__init__()
        self.attend = backend.latent_attention
        self.shard = Shard.of_rank(get_tp_group())
        all_heads = shape.num_heads
        shape = replace(shape, num_heads=all_heads // self.shard.count)
        self.shape = shape
        self.pages = pages
        self.indexer = indexer
        heads, dtype = shape.num_heads, shape.dtype
        self.low = StackedLinear(shape.hidden_size, [shape.q_rank, shape.latent], dtype, shape.has_bias)
        self.q_norm = RMSNorm(shape.q_rank, shape.eps, dtype)
        self.latent_norm = RMSNorm(shape.latent, shape.eps, dtype)
        self.query = Linear(shape.q_rank, heads * shape.key_dim, dtype, shard=self.shard)
        self.expand = frozen(heads * (shape.key_dim + shape.value_dim), shape.latent, dtype=dtype)
        self.out = RowLinear(all_heads * shape.value_dim, shape.hidden_size, dtype, shape.has_bias)

    def forward(self, x: Tensor, meta: StepMeta, selection: Selection | None) -> tuple[Tensor, Selection]:
        """Returns the output and the selection it used, for layers that share it."""
        shape = self.shape
        q_low, latent = self.low.split(self.low.forward(x))
        q_low = self.q_norm.forward(q_low)
        group = meta.groups[self.pages.cache_name]
        self.pages.write(self.latent_norm.forward(latent), slots_of(group))
        if self.indexer is not None:
            selection = self.indexer.forward(x, q_low, meta)
        if selection is None:
            raise ValueError(
                f"layer of cache {self.pages.cache_name} shares a selection, but no layer before it made one"
            )
        expand = self.expand.view(shape.num_heads, shape.key_dim + shape.value_dim, shape.latent)
        to_latent, to_value = expand.split([shape.key_dim, shape.value_dim], dim=1)
        q = self.query.forward(q_low).view(-1, shape.num_heads, shape.key_dim)
        absorbed = _per_head(q, to_latent)
        mixed = self.attend(absorbed, self.pages, meta, group, shape.key_dim**-0.5, selection)
        values = _per_head(mixed.to(x.dtype), to_value.transpose(1, 2))
        return self.out.forward(values.flatten(1)), selection

    def weight_slots(self, prefix: str) -> Iterator[tuple[str, Slot]]:
        yield from self.low.part_slots([f"{prefix}.q_a_proj", f"{prefix}.kv_a_proj_with_mqa"])
        yield from self.q_norm.weight_slots(f"{prefix}.q_a_layernorm")
        yield from self.latent_norm.weight_slots(f"{prefix}.kv_a_layernorm")
        yield from self.query.weight_slots(f"{prefix}.q_b_proj")
        yield f"{prefix}.kv_b_proj.weight", self.shard.slot(self.expand)
        yield from self.out.weight_slots(f"{prefix}.o_proj")
        if self.indexer is not None:
            yield from self.indexer.weight_slots(f"{prefix}.indexer")
