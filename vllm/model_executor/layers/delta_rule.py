"""The gated delta rule with a decay per key channel: one token at a time, or a chunk at once.

Owns: the recurrence, always in fp32. Must not know: projections, pages. Layer L6.

Per head, with state `S [d_k, d_v]`, log decay `g ≤ 0` and strength `β`:

    S ← diag(exp g) · S;   u = β (v − kᵀ S);   S ← S + k ⊗ u;   o = qᵀ S

Chunk form. With `G_t` the running sum of `g` inside the chunk, every `u_t` depends on the state before the chunk and
on the earlier `u_s` of the chunk only:

    u_t = β_t (v_t − (k_t e^{G_t})ᵀ S_0 − Σ_{s<t} A_ts u_s),    A_ts = Σ_c k_tc k_sc e^{G_tc − G_sc}

which is a unit lower triangular system; outputs and the next state follow from the `u`. All exponents that matter are
differences `G_t − G_s ≤ 0`. Where the decay is bounded, they are split round the middle of the chunk so that the sums
over channels become matrix products; the two factors then stay within fp32's range by the choice of the chunk length.
"""

from __future__ import annotations

import torch
from torch import Tensor

from vllm import _custom_ops as ops

__all__ = ["DeltaInputs", "chunk_delta_rule", "delta_rule", "l2_normalise"]

# q, k [T, H, d_k]; v [T, H, d_v]; g [T, H, d_k]; beta [T, H]; all fp32, q and k normalised, q scaled.
DeltaInputs = tuple[Tensor, Tensor, Tensor, Tensor, Tensor]

_CHUNK = 16
# Largest exponent of one factor; exp(±44) leaves room for the products in fp32.
_EXPONENT_MAX = 44.0
# Up to this many tokens the plain recurrence is cheaper than setting up chunks.
_STEPS_MAX = 4


def l2_normalise(x: Tensor) -> Tensor:
    """`x / sqrt(|x|² + 1e-6)` over the last axis."""
    return x * torch.rsqrt(x.square().sum(-1, keepdim=True) + 1e-6)


def delta_rule(inputs: DeltaInputs, state: Tensor, decay_min: float | None) -> tuple[Tensor, Tensor]:
    """Runs `T` tokens of one request from `state [H, d_k, d_v]` → outputs `[T, H, d_v]` and the state after them.

    `decay_min`: lower bound of `g`, None if it has none. `state` itself is left as it is.
    """
    if inputs[0].shape[0] <= _STEPS_MAX:
        return ops.delta_rule_steps_ref(inputs, state)
    return chunk_delta_rule(inputs, state, decay_min)


def chunk_delta_rule(inputs: DeltaInputs, state: Tensor, decay_min: float | None) -> tuple[Tensor, Tensor]:
    """As `delta_rule`, always in chunks."""
    tokens = inputs[0].shape[0]
    q, k, v, g, beta = (_to_chunks(x) for x in inputs)
    total = g.cumsum(-2)
    is_bounded = decay_min is not None and -decay_min * _CHUNK / 2 <= _EXPONENT_MAX
    earlier, upto = _decayed_products(q, k, total, is_bounded)
    beta = beta.unsqueeze(-1)
    eye = torch.eye(_CHUNK)
    solved = torch.linalg.solve_triangular(
        eye + beta * earlier, beta * torch.cat([v, k * total.exp()], dim=-1), upper=False, unitriangular=True
    )
    fresh, seen = solved.split([v.shape[-1], k.shape[-1]], dim=-1)
    q_decayed = q * total.exp()
    last = total[..., -1:, :]
    k_to_end = (k * (last - total).exp()).transpose(-1, -2)
    keep = last.exp().transpose(-1, -2)
    outputs = []
    for n in range(q.shape[0]):
        u = fresh[n] - seen[n] @ state
        outputs.append(q_decayed[n] @ state + upto[n] @ u)
        state = keep[n] * state + k_to_end[n] @ u
    out = torch.stack(outputs).transpose(1, 2).flatten(0, 1)
    return out[:tokens], state


def _to_chunks(x: Tensor) -> Tensor:
    """`[T, H, …]` → `[N, H, C, …]`, the last chunk filled with zeros (which change nothing)."""
    tokens = x.shape[0]
    missing = -tokens % _CHUNK
    if missing:
        x = torch.cat([x, x.new_zeros(missing, *x.shape[1:])])
    return x.unflatten(0, (-1, _CHUNK)).transpose(1, 2)


def _decayed_products(q: Tensor, k: Tensor, total: Tensor, is_bounded: bool) -> tuple[Tensor, Tensor]:
    """`Σ_c x_tc k_sc e^{G_tc − G_sc}` with x = k for s < t, and with x = q for s ≤ t; `[N, H, C, C]` each."""
    if is_bounded:
        middle = total[..., _CHUNK // 2 - 1 : _CHUNK // 2, :]
        up = (total - middle).exp()
        right = (k * (middle - total).exp()).transpose(-1, -2)
        return torch.matmul(k * up, right).tril(-1), torch.matmul(q * up, right).tril()
    # Without a bound a factor could overflow although the product is small: exponentiate the differences themselves.
    gaps = (total.unsqueeze(-2) - total.unsqueeze(-3)).clamp(max=0).exp()
    weighted = gaps * k.unsqueeze(-3)
    earlier = torch.einsum("nhtc,nhtsc->nhts", k, weighted)
    upto = torch.einsum("nhtc,nhtsc->nhts", q, weighted)
    return earlier.tril(-1), upto.tril()
