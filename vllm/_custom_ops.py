"""One function per op: the native version where the library is loaded and takes the input, else a torch reference.

Owns: loading `_C.abi3.so`, the dispatch, the references. Must not know: models, pages beyond their tensors. Layer L6.

The references define what an op means; tests/contract/test_ops.py runs every op both ways.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor
from torch.nn import functional as F

__all__ = [
    "add_rms_norm",
    "delta_rule_step",
    "delta_rule_steps_ref",
    "mhc_weights",
    "paged_decode_attention",
    "rms_norm",
    "rotary",
    "silu_and_mul",
    "write_kv",
    "write_rows",
    "write_states",
]


def rms_norm_ref(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    wide = x.float()
    return (wide * torch.rsqrt(wide.square().mean(-1, keepdim=True) + eps) * weight.float()).to(x.dtype)


def rms_norm(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    """`weight · x / rms(x)` over the last axis, statistics in fp32; a new tensor of x's dtype."""
    return rms_norm_ref(x, weight, eps)


def add_rms_norm_ref(x: Tensor, residual: Tensor, weight: Tensor, eps: float) -> Tensor:
    residual.add_(x)
    return rms_norm_ref(residual, weight, eps)


def add_rms_norm(x: Tensor, residual: Tensor, weight: Tensor, eps: float) -> Tensor:
    """`residual += x` in place (rounded to its dtype), then `rms_norm(residual)`."""
    return add_rms_norm_ref(x, residual, weight, eps)


def silu_and_mul_ref(gate_up: Tensor, limit: float | None = None) -> Tensor:
    gate, up = gate_up.float().chunk(2, dim=-1)
    if limit is not None:
        gate, up = gate.clamp(max=limit), up.clamp(-limit, limit)
    return (gate * torch.sigmoid(gate) * up).to(gate_up.dtype)


def silu_and_mul(gate_up: Tensor, limit: float | None = None) -> Tensor:
    """`silu(min(gate, L)) · clamp(up, −L, L)` for `[…, gate | up]`; no clamp when `limit` is None."""
    return silu_and_mul_ref(gate_up, limit)


def rotary_ref(x: Tensor, cos_sin: Tensor, interleaved: bool) -> Tensor:
    size = cos_sin.shape[-1]
    cos, sin = (part[:, None, :] for part in cos_sin.chunk(2, dim=-1))
    turned = x[..., :size].float()
    if interleaved:
        first, second = turned[..., 0::2], turned[..., 1::2]
        result = torch.stack([first * cos - second * sin, second * cos + first * sin], dim=-1).flatten(-2)
    else:
        first, second = turned.chunk(2, dim=-1)
        result = torch.cat([first * cos - second * sin, second * cos + first * sin], dim=-1)
    x[..., :size] = result.to(x.dtype)
    return x


def rotary(x: Tensor, cos_sin: Tensor, interleaved: bool) -> Tensor:
    """Rotates `x [T, H, D]` in place by `cos_sin [T, R]` (fp32, cosines then sines) in its first R channels.

    Pairs are channel i with i + R/2, or neighbours when `interleaved`. Returns x.
    """
    return rotary_ref(x, cos_sin, interleaved)


def paged_decode_attention_ref(
    out: Tensor, q: Tensor, pages: Tensor, table: Tensor, lengths: Tensor, lows: Tensor, scale: float
) -> None:
    heads, size, width = pages.shape[1], pages.shape[2], pages.shape[3]
    head_size = q.shape[2]
    for r, (length, low) in enumerate(zip(lengths.tolist(), lows.tolist(), strict=True)):
        first = low // size
        blocks = table[r, first : -(-length // size)].to(torch.int64)
        rows = (
            pages[blocks]
            .transpose(0, 1)
            .reshape(heads, -1, width)[:, low - first * size : length - first * size]
        )
        rows = rows.to(q.dtype)
        folded = q[r].reshape(1, heads, -1, head_size)
        attended = F.scaled_dot_product_attention(
            folded, rows[None, ..., :head_size], rows[None, ..., head_size:], scale=scale
        )
        out[r] = attended.reshape(out.shape[1:])


def paged_decode_attention(
    out: Tensor, q: Tensor, pages: Tensor, table: Tensor, lengths: Tensor, lows: Tensor, scale: float
) -> None:
    """One new token per row against its pages, grouped heads.

    `out [N, Hq, Dv]` is written; `q [N, Hq, D]`; `pages [blocks, Hkv, block_size, D + Dv]` (keys then values);
    `table` int32 `[N, W]`; row r reads positions `lows[r] : lengths[r]` (int32). Softmax in fp32.
    """
    paged_decode_attention_ref(out, q, pages, table, lengths, lows, scale)


def write_rows_ref(pages: Tensor, rows: Tensor, slots: Tensor) -> None:
    size = pages.shape[1]
    keep = slots >= size
    if not bool(keep.all()):
        slots, rows = slots[keep], rows[keep]
    blocks = torch.div(slots, size, rounding_mode="floor")
    pages[blocks, slots - blocks * size] = rows.to(pages.dtype)


def write_rows(pages: Tensor, rows: Tensor, slots: Tensor) -> None:
    """`rows [T, C]` → `pages [blocks, N, C]` at `slots` int64 `[T]` = block · N + row.

    −1 and slots of block 0 (the null block) are left alone. Slots must not repeat.
    """
    write_rows_ref(pages, rows, slots)


def write_kv_ref(pages: Tensor, key: Tensor, value: Tensor, slots: Tensor) -> None:
    size = pages.shape[2]
    keep = slots >= size
    if not bool(keep.all()):
        slots, key, value = slots[keep], key[keep], value[keep]
    blocks = torch.div(slots, size, rounding_mode="floor")
    offsets = slots - blocks * size
    pages[..., : key.shape[-1]][blocks, :, offsets] = key.to(pages.dtype)
    pages[..., key.shape[-1] :][blocks, :, offsets] = value.to(pages.dtype)


def write_kv(pages: Tensor, key: Tensor, value: Tensor, slots: Tensor) -> None:
    """`key [T, Hkv, D]`, `value [T, Hkv, Dv]` → `pages [blocks, Hkv, N, D + Dv]`; slots as in `write_rows`."""
    write_kv_ref(pages, key, value, slots)


def mhc_weights_ref(
    mixed: Tensor, scale: Tensor, base: Tensor, eps: float, iterations: int
) -> tuple[Tensor, Tensor, Tensor]:
    streams = math.isqrt(mixed.shape[-1] + 1) - 1
    sizes = [streams, streams, streams * streams]
    pre, post, comb = (
        part * scale[i] + offset
        for i, (part, offset) in enumerate(zip(mixed.split(sizes, -1), base.split(sizes), strict=True))
    )
    comb = comb.unflatten(-1, (streams, streams)).softmax(-1) + eps
    comb = comb / (comb.sum(-2, keepdim=True) + eps)
    for _ in range(iterations - 1):
        comb = comb / (comb.sum(-1, keepdim=True) + eps)
        comb = comb / (comb.sum(-2, keepdim=True) + eps)
    return torch.sigmoid(pre) + eps, 2 * torch.sigmoid(post), comb


def mhc_weights(
    mixed: Tensor, scale: Tensor, base: Tensor, eps: float, iterations: int
) -> tuple[Tensor, Tensor, Tensor]:
    """Projected streams `[T, (2 + n)·n]` (fp32) → `pre [T, n]`, `post [T, n]`, `comb [T, n, n]`.

    `comb` is the softmax of its part brought near a doubly stochastic matrix by Sinkhorn iterations.
    """
    return mhc_weights_ref(mixed, scale, base, eps, iterations)


def write_states(states: Tensor, values: Tensor, target: Tensor) -> None:
    """`values [N, …]` → `states [blocks, …]` at `target` int64 `[N]`; block 0 is never written."""
    keep = target > 0
    if not bool(keep.all()):
        target, values = target[keep], values[keep]
    states[target] = values.to(states.dtype)


def delta_rule_steps_ref(
    inputs: tuple[Tensor, Tensor, Tensor, Tensor, Tensor], state: Tensor
) -> tuple[Tensor, Tensor]:
    """The delta rule token by token: `[T, H, …]` inputs of one request from `state [H, d_k, d_v]`."""
    outputs = []
    for q, k, v, g, beta in zip(*inputs, strict=True):
        state = state * g.exp().unsqueeze(-1)
        remembered = torch.einsum("hk,hkv->hv", k, state)
        state = state + k.unsqueeze(-1) * (beta.unsqueeze(-1) * (v - remembered)).unsqueeze(-2)
        outputs.append(torch.einsum("hk,hkv->hv", q, state))
    return torch.stack(outputs), state


def delta_rule_step_ref(
    inputs: tuple[Tensor, Tensor, Tensor, Tensor, Tensor], states: Tensor, source: Tensor, target: Tensor
) -> Tensor:
    q, k, v, g, beta = inputs
    state = states[source] * g.exp().unsqueeze(-1)
    remembered = torch.einsum("nhk,nhkv->nhv", k, state)
    state = state + k.unsqueeze(-1) * (beta.unsqueeze(-1) * (v - remembered)).unsqueeze(-2)
    write_states(states, state, target)
    return torch.einsum("nhk,nhkv->nhv", q, state)


def delta_rule_step(
    inputs: tuple[Tensor, Tensor, Tensor, Tensor, Tensor], states: Tensor, source: Tensor, target: Tensor
) -> Tensor:
    """One token for each of N requests: q, k, g `[N, H, d_k]`, v `[N, H, d_v]`, beta `[N, H]` (fp32) → `[N, H, d_v]`.

    Request n's state is read from `states[source[n]]` (`[blocks, H, d_k, d_v]` fp32) and written to
    `states[target[n]]`; block 0 is never written.
    """
    return delta_rule_step_ref(inputs, states, source, target)
