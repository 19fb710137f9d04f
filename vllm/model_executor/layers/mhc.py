"""Manifold hyper-connections: several residual streams, mixed by a learned doubly stochastic matrix.

Owns: the collapse before a sub-layer and the merge after it. Must not know: the sub-layers. Layer L6.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from vllm import _custom_ops as ops
from vllm.model_executor.layers.layernorm import rms_unweighted
from vllm.model_executor.layers.linear import frozen

__all__ = ["HyperConnection", "MhcShape"]


@dataclass(frozen=True, slots=True)
class MhcShape:
    """`streams` residual streams of `hidden_size`; `eps` and `iterations` of the Sinkhorn normalisation."""

    hidden_size: int
    streams: int
    eps: float
    iterations: int
    norm_eps: float


class HyperConnection(nn.Module):
    """The weights of one sub-layer's connection to the streams; everything but the streams is fp32."""

    def __init__(self, shape: MhcShape) -> None:
        super().__init__()
        self.shape = shape
        n = shape.streams
        self.fn = frozen((2 + n) * n, n * shape.hidden_size, dtype=torch.float32)
        self.base = frozen((2 + n) * n, dtype=torch.float32)
        self.scale = frozen(3, dtype=torch.float32)

    def collapse(self, streams: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """`X [T, n, D]` → the sub-layer's input `[T, D]`, `post [T, n]`, `comb [T, n, n]`."""
        shape = self.shape
        mixed = F.linear(rms_unweighted(streams.flatten(1).float(), shape.norm_eps), self.fn)
        pre, post, comb = ops.mhc_weights(mixed, self.scale, self.base, shape.eps, shape.iterations)
        return torch.einsum("tn,tnd->td", pre, streams.float()).to(streams.dtype), post, comb

    @staticmethod
    def merge(streams: Tensor, output: Tensor, post: Tensor, comb: Tensor) -> Tensor:
        """`X'_k = post_k · output + Σ_j comb[j, k] · X_j`, in the streams' dtype."""
        dtype = streams.dtype
        kept = torch.matmul(comb.to(dtype).transpose(1, 2), streams)
        return torch.addcmul(kept, post.to(dtype).unsqueeze(-1), output.unsqueeze(1))

    def weight_slots(self, prefix: str) -> Iterator[tuple[str, Tensor]]:
        yield f"{prefix}_fn", self.fn
        yield f"{prefix}_base", self.base
        yield f"{prefix}_scale", self.scale
