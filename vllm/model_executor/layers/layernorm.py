"""Normalisation layers. All statistics are computed in fp32, whatever the model's dtype.

Owns: RMSNorm (weighted, offset, plain, gated) and LayerNorm. Must not know: models. Layer L6.
"""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from vllm import _custom_ops as ops
from vllm.model_executor.layers.activation import by_rows
from vllm.model_executor.layers.linear import frozen

__all__ = ["GatedRMSNorm", "LayerNorm", "OffsetRMSNorm", "PlainRMSNorm", "RMSNorm", "rms_unweighted"]


class RMSNorm(nn.Module):
    """`w · x / rms(x)`."""

    def __init__(self, size: int, eps: float, dtype: torch.dtype) -> None:
        super().__init__()
        self.weight = frozen(size, dtype=dtype)
        self.eps = eps

    def forward(self, x: Tensor) -> Tensor:
        return ops.rms_norm(x, self.weight, self.eps)

    def add_and_norm(self, x: Tensor, residual: Tensor) -> Tensor:
        """`residual += x` in place, then the norm of it; returns the normed tensor."""
        return ops.add_rms_norm(x, residual, self.weight, self.eps)

    def weight_slots(self, prefix: str) -> Iterator[tuple[str, Tensor]]:
        yield f"{prefix}.weight", self.weight


class OffsetRMSNorm(RMSNorm):
    """`(1 + w) · x / rms(x)`, all in fp32: a weight near 0 would lose digits beside the 1 in a half-size type."""

    def __init__(self, size: int, eps: float, dtype: torch.dtype) -> None:
        super().__init__(size, eps, torch.float32)
        self._scale: Tensor | None = None  # 1 + w; None before there are weights

    def note_weights(self) -> None:
        """The weights have been loaded, or have changed."""
        self._scale = 1 + self.weight

    def forward(self, x: Tensor) -> Tensor:
        if self._scale is None:
            self.note_weights()
        assert self._scale is not None
        return ops.rms_norm(x.float(), self._scale, self.eps).to(x.dtype)

    def add_and_norm(self, x: Tensor, residual: Tensor) -> Tensor:
        return self.forward(residual.add_(x))


class PlainRMSNorm(nn.Module):
    """`x / rms(x)` over the last axis, in x's dtype; no weight in the checkpoint."""

    def __init__(self, size: int, eps: float, dtype: torch.dtype) -> None:
        super().__init__()
        self.register_buffer("ones", torch.ones(size, dtype=dtype), persistent=False)
        self.eps = eps

    def forward(self, x: Tensor) -> Tensor:
        return ops.rms_norm(x, self.get_buffer("ones"), self.eps)


class GatedRMSNorm(nn.Module):
    """`w · x / rms(x) · sigmoid(gate)`, all in fp32, over the last axis (a head)."""

    def __init__(self, size: int, eps: float, dtype: torch.dtype) -> None:
        super().__init__()
        self.weight = frozen(size, dtype=dtype)
        self.eps = eps

    def forward(self, x: Tensor, gate: Tensor) -> Tensor:
        normed = rms_unweighted(x.float(), self.eps) * self.weight.float()
        return normed * by_rows(torch.sigmoid, gate.float())

    def weight_slots(self, prefix: str) -> Iterator[tuple[str, Tensor]]:
        yield f"{prefix}.weight", self.weight


class LayerNorm(nn.Module):
    """Mean and variance norm with weight and bias."""

    def __init__(self, size: int, eps: float, dtype: torch.dtype) -> None:
        super().__init__()
        self.weight = frozen(size, dtype=dtype)
        self.bias = frozen(size, dtype=dtype)
        self.eps = eps

    def forward(self, x: Tensor) -> Tensor:
        normed = F.layer_norm(x.float(), x.shape[-1:], self.weight.float(), self.bias.float(), self.eps)
        return normed.to(x.dtype)

    def weight_slots(self, prefix: str) -> Iterator[tuple[str, Tensor]]:
        yield f"{prefix}.weight", self.weight
        yield f"{prefix}.bias", self.bias


def rms_unweighted(x: Tensor, eps: float) -> Tensor:
    """`x / rms(x)` over the last axis of an fp32 tensor."""
    return x * torch.rsqrt(x.square().mean(-1, keepdim=True) + eps)
