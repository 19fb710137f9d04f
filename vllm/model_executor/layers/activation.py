"""Gated activations, and elementwise functions that do not depend on the batch.

Owns: the table of activation names a checkpoint may use, `by_rows`. Must not know: models. Layer L6.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

from torch import Tensor
from torch.nn import functional as F

from vllm import _custom_ops as ops

__all__ = ["by_rows", "get_gated_activation"]

# A multiple of the values that one step of torch's vectorised loops takes, on any processor.
_LANES = 32


def by_rows(function: Callable[[Tensor], Tensor], x: Tensor) -> Tensor:
    """The elementwise `function` of `x [T, …]`, such that a row's result is the same whatever other rows there are.

    torch takes whole vectors of a tensor by one formula and what is left at its end by another, which rounds
    differently: rows are filled up to whole vectors.
    """
    flat = x.flatten(1)
    missing = -flat.shape[1] % _LANES
    if not missing:
        return function(x)
    return function(F.pad(flat, (0, missing)))[:, : flat.shape[1]].reshape(x.shape)


def _gelu_and_mul(gate_up: Tensor, approximate: str) -> Tensor:
    gate, up = gate_up.chunk(2, dim=-1)
    return by_rows(partial(F.gelu, approximate=approximate), gate) * up


def get_gated_activation(name: str, limit: float | None = None) -> Callable[[Tensor], Tensor]:
    """The function `[…, 2·I] → […, I]` for `hidden_act`; `limit` clamps gate from above and up on both sides.

    `ValueError` names the activation and the known ones.
    """
    if name in ("silu", "swish"):
        return partial(ops.silu_and_mul, limit=limit)
    if limit is not None:
        raise ValueError(
            f"hidden_act {name!r} with swiglu_limit {limit} is not supported; only silu takes a limit"
        )
    if name == "gelu":
        return partial(_gelu_and_mul, approximate="none")
    if name in ("gelu_pytorch_tanh", "gelu_new"):
        return partial(_gelu_and_mul, approximate="tanh")
    raise ValueError(f"hidden_act {name!r} is not supported; supported: silu, gelu, gelu_pytorch_tanh")
