"""Kimi delta attention: short convolution, per-channel decay, delta rule, gated output norm.

Owns: the linear-attention mixer and how it uses its state pages. Must not know: the model around it. Layer L6.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from vllm import _custom_ops as ops
from vllm.distributed.parallel_state import get_tp_group
from vllm.model_executor.layers.activation import by_rows
from vllm.model_executor.layers.conv1d_state import conv_sequence, conv_step
from vllm.model_executor.layers.delta_rule import DeltaInputs, delta_rule, l2_normalise
from vllm.model_executor.layers.layernorm import GatedRMSNorm
from vllm.model_executor.layers.linear import Linear, RowLinear, StackedLinear, frozen
from vllm.model_executor.layers.sharding import WHOLE, Shard, Slot
from vllm.v1.attention.backend import GroupMeta, StepMeta
from vllm.v1.attention.pages import StatePages

__all__ = ["KdaShape", "KimiDeltaAttention"]


@dataclass(frozen=True, slots=True)
class KdaShape:
    """Sizes of one layer. `decay_min`: lower bound of the log decay per token, None for the unbounded gate."""

    hidden_size: int
    num_heads: int
    head_dim: int
    kernel: int
    decay_min: float | None
    eps: float
    dtype: torch.dtype

    @property
    def width(self) -> int:
        """Channels of queries, of keys and of values."""
        return self.num_heads * self.head_dim


class KimiDeltaAttention(nn.Module):
    """`x [T, D] → [T, D]`; reads and writes one state page per request (conv rows, recurrent state).

    `shape` states the heads of all tensor-parallel ranks together; they are dealt to the ranks with all their channels.
    """

    def __init__(self, shape: KdaShape, pages: StatePages) -> None:
        super().__init__()
        shard = Shard.of_rank(get_tp_group())
        all_channels = shape.width
        shape = replace(shape, num_heads=shape.num_heads // shard.count)
        self.shard = shard
        self.shape = shape
        self.pages = pages
        width, dtype = shape.width, shape.dtype
        self.qkv = StackedLinear(shape.hidden_size, [width] * 3, dtype, shards=[shard] * 3)
        # Narrow projections of x in one product: decay and output gate (low rank), strength.
        narrow = [shape.head_dim, shape.head_dim, shape.num_heads]
        self.narrow = StackedLinear(shape.hidden_size, narrow, dtype, shards=[WHOLE, WHOLE, shard])
        self.decay_up = Linear(shape.head_dim, width, dtype, shard=shard)
        self.gate_up = Linear(shape.head_dim, width, dtype, shard=shard)
        self.conv = frozen(3 * width, 1, shape.kernel, dtype=torch.float32)
        self.decay_rate_log = frozen(shape.num_heads, dtype=torch.float32)
        self.decay_bias = frozen(width, dtype=torch.float32)
        self.norm = GatedRMSNorm(shape.head_dim, shape.eps, dtype)
        self.out = RowLinear(all_channels, shape.hidden_size, dtype)

    def forward(self, x: Tensor, meta: StepMeta) -> Tensor:
        shape = self.shape
        qkv = self.qkv.forward(x)
        decay_low, gate_low, strength = self.narrow.split(self.narrow.forward(x))
        g = self._log_decay(self.decay_up.forward(decay_low))
        beta = by_rows(torch.sigmoid, strength.float())
        group = meta.groups[self.pages.cache_name]
        mixed = torch.empty(x.shape[0], shape.num_heads, shape.head_dim)
        if meta.num_decodes:
            self._decode(mixed, qkv, g, beta, meta, group)
        if meta.num_decodes < meta.num_reqs:
            self._prefill(mixed, qkv, g, beta, meta, group)
        gate = self.gate_up.forward(gate_low).view(mixed.shape)
        return self.out.forward(self.norm.forward(mixed, gate).to(x.dtype).flatten(1))

    def _states(self) -> tuple[Tensor, Tensor]:
        """Conv rows and recurrent states of all pages; rows that speculation reserves are left out."""
        conv_states, states = self.pages.states
        return conv_states[:, : self.shape.kernel - 1], states

    def _log_decay(self, raw: Tensor) -> Tensor:
        """The gate's projection → `g [T, H, d]`, fp32."""
        shape = self.shape
        biased = (raw.float() + self.decay_bias).view(-1, shape.num_heads, shape.head_dim)
        rate = self.decay_rate_log.exp().unsqueeze(-1)
        if shape.decay_min is None:
            return -rate * by_rows(F.softplus, biased)
        return shape.decay_min * by_rows(torch.sigmoid, rate * biased)

    def _delta_inputs(self, convolved: Tensor, g: Tensor, beta: Tensor) -> DeltaInputs:
        """Convolution outputs `[T, 3·H·d]` → inputs of the recurrence."""
        shape = self.shape
        heads = by_rows(F.silu, convolved).view(-1, 3, shape.num_heads, shape.head_dim)
        q = l2_normalise(heads[:, 0]) * shape.head_dim**-0.5
        return q, l2_normalise(heads[:, 1]), heads[:, 2], g, beta

    def _decode(
        self, out: Tensor, qkv: Tensor, g: Tensor, beta: Tensor, meta: StepMeta, group: GroupMeta
    ) -> None:
        """The decode rows at once: gather states by page, step, scatter."""
        n = meta.num_decodes
        conv_states, states = self._states()
        blocks = self.pages.blocks(meta, group)
        source, target = blocks.source_tensor[:n], blocks.target_tensor[:n]
        convolved, rows = conv_step(qkv[:n], conv_states[source], self.conv.squeeze(1))
        ops.write_states(conv_states, rows, target)
        inputs = self._delta_inputs(convolved, g[:n], beta[:n])
        out[:n] = ops.delta_rule_step(inputs, states, source, target)

    def _prefill(
        self, out: Tensor, qkv: Tensor, g: Tensor, beta: Tensor, meta: StepMeta, group: GroupMeta
    ) -> None:
        """The other rows one by one."""
        shape = self.shape
        conv_states, states = self._states()
        blocks = self.pages.blocks(meta, group)
        start = meta.num_decodes
        for r in range(meta.num_decodes, meta.num_reqs):
            end = start + meta.query_lens[r]
            source, target = blocks.source[r], blocks.target[r]
            before = conv_states[source] if source >= 0 else None
            convolved, rows = conv_sequence(qkv[start:end], before, self.conv.squeeze(1))
            inputs = self._delta_inputs(convolved, g[start:end], beta[start:end])
            state = (
                states[source]
                if source >= 0
                else torch.zeros(shape.num_heads, shape.head_dim, shape.head_dim)
            )
            out[start:end], state = delta_rule(inputs, state, shape.decay_min)
            if target > 0:
                conv_states[target] = rows.to(conv_states.dtype)
                states[target] = state
            start = end

    def weight_slots(self, prefix: str) -> Iterator[tuple[str, Slot]]:
        yield from self.qkv.part_slots([f"{prefix}.{n}_proj" for n in "qkv"])
        yield from self.narrow.part_slots([f"{prefix}.{n}_proj" for n in ("f_a", "g_a", "b")])
        yield from self.decay_up.weight_slots(f"{prefix}.f_b_proj")
        yield from self.gate_up.weight_slots(f"{prefix}.g_b_proj")
        for name, weight in zip("qkv", self.conv.chunk(3), strict=True):
            yield f"{prefix}.{name}_conv1d.weight", self.shard.slot(weight)
        yield f"{prefix}.A_log", self.shard.slot(self.decay_rate_log)
        yield f"{prefix}.dt_bias", self.shard.slot(self.decay_bias)
        yield from self.norm.weight_slots(f"{prefix}.o_norm")
        yield from self.out.weight_slots(f"{prefix}.o_proj")
