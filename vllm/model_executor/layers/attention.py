"""Grouped-query attention over pages: projections, rotary, page write, attention, output projection.

Owns: the mixer of ordinary decoder layers. Must not know: a model's other layers. Layer L6.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace

import torch
from torch import Tensor, nn

from vllm.distributed.parallel_state import TPGroup, get_tp_group
from vllm.model_executor.layers.layernorm import PlainRMSNorm, RMSNorm
from vllm.model_executor.layers.linear import RowLinear, StackedLinear
from vllm.model_executor.layers.rotary_embedding import RotaryEmbedding
from vllm.model_executor.layers.sharding import Shard, Slot
from vllm.v1.attention.backend import StepMeta
from vllm.v1.attention.compute import ComputeBackend
from vllm.v1.attention.pages import KVHeadPages, slots_of

__all__ = ["AttentionShape", "GroupedQueryAttention"]


@dataclass(frozen=True, slots=True)
class AttentionShape:
    """Sizes and options of one attention layer. `qk_norm_eps` turns on a per-head norm of queries and keys.

    `norm` is its kind. `has_value_norm`: values are normed too, without a weight. `is_k_eq_v`: values are the keys before their norm.
    `is_sharing`: keys and values are those that the layer wrote which owns the cache; this one has queries alone.
    """

    hidden_size: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    dtype: torch.dtype
    qkv_bias: bool = False
    out_bias: bool = False
    qk_norm_eps: float | None = None
    window: int | None = None
    scale: float | None = None
    has_value_norm: bool = False
    is_k_eq_v: bool = False
    is_sharing: bool = False
    norm: type[RMSNorm] = RMSNorm

    @property
    def projections(self) -> str:
        """One letter for each projection that the layer has."""
        return "q" if self.is_sharing else "qk" if self.is_k_eq_v else "qkv"

    def of_rank(self, tp: TPGroup) -> AttentionShape:
        """What a rank has of it; with fewer KV heads than ranks, neighbours have the same one."""
        kv_heads = max(1, self.num_kv_heads // tp.size)
        return replace(self, num_heads=self.num_heads // tp.size, num_kv_heads=kv_heads)


class GroupedQueryAttention(nn.Module):
    """`x [T, D] → [T, D]`; writes this step's keys and values to its pages first, then attends over them.

    `shape` states the heads of all tensor-parallel ranks together; `pages` are those of this one.
    """

    def __init__(
        self,
        shape: AttentionShape,
        pages: KVHeadPages,
        rope: RotaryEmbedding | None,
        backend: type[ComputeBackend],
    ) -> None:
        super().__init__()
        self.attend = backend.paged_attention
        tp = get_tp_group()
        self.names = shape.projections
        shards = [Shard.of_rank(tp), *[Shard.of_kv_heads(tp, shape.num_kv_heads)] * 2][: len(self.names)]
        all_heads = shape.num_heads * shape.head_dim
        shape = shape.of_rank(tp)
        self.shape = shape
        self.pages = pages
        self.rope = rope
        self.scale = shape.scale if shape.scale is not None else shape.head_dim**-0.5
        heads = [shape.num_heads, shape.num_kv_heads, shape.num_kv_heads][: len(self.names)]
        sizes = [n * shape.head_dim for n in heads]
        self.qkv = StackedLinear(shape.hidden_size, sizes, shape.dtype, shape.qkv_bias, shards)
        self.out = RowLinear(all_heads, shape.hidden_size, shape.dtype, shape.out_bias)
        self.q_norm: RMSNorm | None = None
        self.k_norm: RMSNorm | None = None
        self.v_norm: PlainRMSNorm | None = None
        if shape.qk_norm_eps is not None:
            sizes_of_norm = (shape.head_dim, shape.qk_norm_eps, shape.dtype)
            self.q_norm = shape.norm(*sizes_of_norm)
            if not shape.is_sharing:
                self.k_norm = shape.norm(*sizes_of_norm)
                self.v_norm = PlainRMSNorm(*sizes_of_norm) if shape.has_value_norm else None

    def forward(self, x: Tensor, meta: StepMeta) -> Tensor:
        shape = self.shape
        tokens = x.shape[0]
        heads = self.qkv.forward(x).view(tokens, -1, shape.head_dim)
        num_rotated = shape.num_heads + (0 if shape.is_sharing else shape.num_kv_heads)
        q, k, v = heads[:, : shape.num_heads], heads[:, shape.num_heads : num_rotated], heads[:, num_rotated:]
        if shape.is_k_eq_v:
            v = k.clone()  # the keys change below
        if self.q_norm is not None:
            heads[:, : shape.num_heads] = self.q_norm.forward(q)
        if self.k_norm is not None:
            heads[:, shape.num_heads : num_rotated] = self.k_norm.forward(k)
        if self.v_norm is not None:
            v = self.v_norm.forward(v)
        if self.rope is not None:
            self.rope.apply(heads[:, :num_rotated], self.rope.of_step(meta))
        group = meta.groups[self.pages.cache_name]
        if not shape.is_sharing:
            self.pages.write(k, v, slots_of(group))
        attended = self.attend(q, self.pages, meta, group, self.scale, shape.window)
        return self.out.forward(attended.view(tokens, -1))

    def weight_slots(self, prefix: str) -> Iterator[tuple[str, Slot]]:
        yield from self.qkv.part_slots([f"{prefix}.{n}_proj" for n in self.names])
        yield from self.out.weight_slots(f"{prefix}.o_proj")
        if self.q_norm is not None:
            yield from self.q_norm.weight_slots(f"{prefix}.q_norm")
        if self.k_norm is not None:
            yield from self.k_norm.weight_slots(f"{prefix}.k_norm")
