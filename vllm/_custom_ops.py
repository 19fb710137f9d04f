"""One function per op: the native version where its library is loaded and takes the input, else a torch reference.

Owns: loading `_C.abi3.so`, the dispatch, the references. Must not know: models, what pages mean. Layer L6.

The references define what an op means; tests/contract/test_ops.py runs every op both ways. Without the library (no
compiler at install time, another torch) everything works, only slower; one notice says so.
"""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F

from vllm import envs
from vllm.logger import init_logger

__all__ = [
    "add_rms_norm",
    "can_copy_over_bus",
    "copy_blocks",
    "delta_rule_step",
    "delta_rule_steps_ref",
    "has_native_ops",
    "linear",
    "mhc_weights",
    "native_isa",
    "paged_decode_attention",
    "rms_norm",
    "rotary",
    "select_native_isa",
    "silu_and_mul",
    "write_kv",
    "write_rows",
    "write_states",
]

logger = init_logger(__name__)

# Inputs of the delta rule: q, k, v, g [N, H, d], beta [N, H], all fp32.
DeltaInputs = tuple[Tensor, Tensor, Tensor, Tensor, Tensor]

_LIBRARY = Path(__file__).with_name("_C.abi3.so")
_CUDA_LIBRARY = Path(__file__).with_name("_C_cuda.abi3.so")
# Largest head size and number of residual streams that the native ops take.
_HEAD_MAX = 1024
_STREAMS_MAX = 16
# From this many rows on, weights of half size are widened once and multiplied by the fp32 matrix product of torch.
_WIDEN_ROWS = 192

# What the library must have; one that was built from other sources may lack some.
_NATIVE_OPS = (
    "add_rms_norm",
    "copy_host_blocks",
    "delta_rule_step",
    "linear",
    "mhc_weights",
    "paged_decode_attention",
    "rms_norm",
    "rotary",
    "silu_and_mul",
    "write_kv",
)

_HAS_CUDA_OPS = _CUDA_LIBRARY.exists() and torch.cuda.is_available()


def _load() -> Any:
    """The namespace of the native ops, or None with a notice of why not."""
    if envs.VLLM_NO_NATIVE:
        logger.info("VLLM_NO_NATIVE is set: the torch reference ops are used")
        return None
    if not _LIBRARY.exists():
        logger.warning(
            "Native ops are not built (%s is missing); the slower torch reference ops are used", _LIBRARY
        )
        return None
    try:
        torch.ops.load_library(str(_LIBRARY))
        if _HAS_CUDA_OPS:
            torch.ops.load_library(str(_CUDA_LIBRARY))
    except OSError as error:
        logger.warning("Native ops cannot be loaded (%s); the slower torch reference ops are used", error)
        return None
    missing = [name for name in _NATIVE_OPS if not hasattr(torch.ops.vllm_native, name)]
    if missing:
        logger.warning(
            "The native library was built from other sources (it has no %s); the slower torch reference ops are used",
            ", ".join(missing),
        )
        return None
    return torch.ops.vllm_native


_native: Any = _load()
# Matrix products over half-size types that torch runs on this processor's own instructions.
_FAST_TYPES: set[torch.dtype] = {torch.float32}
if torch.cpu._is_avx512_bf16_supported() or torch.cpu._is_amx_tile_supported():
    _FAST_TYPES.add(torch.bfloat16)
if torch.cpu._is_amx_fp16_supported():
    _FAST_TYPES.add(torch.float16)


def has_native_ops() -> bool:
    """Whether the native library is loaded."""
    return _native is not None


def native_isa() -> str:
    """Instruction set of the native CPU ops ("avx512", "avx2", "scalar"), "none" without the library."""
    return str(_native.get_cpu_isa()) if _native is not None else "none"


def select_native_isa(name: str) -> bool:
    """Chooses the instruction set ("auto" for the best), for tests; False if this processor lacks it."""
    return _native is not None and bool(_native.set_cpu_isa(name))


# --- norms and activations -------------------------------------------------------------------------------------------


def rms_norm_ref(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    wide = x.float()
    return (wide * torch.rsqrt(wide.square().mean(-1, keepdim=True) + eps) * weight.float()).to(x.dtype)


def rms_norm(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    """`weight · x / rms(x)` over the last axis, statistics in fp32; a new tensor of x's dtype."""
    if _native is not None and x.is_cpu:
        result: Tensor = _native.rms_norm(x if x.is_contiguous() else x.contiguous(), weight, eps)
        return result
    return rms_norm_ref(x, weight, eps)


def add_rms_norm_ref(x: Tensor, residual: Tensor, weight: Tensor, eps: float) -> Tensor:
    residual.add_(x)
    return rms_norm_ref(residual, weight, eps)


def add_rms_norm(x: Tensor, residual: Tensor, weight: Tensor, eps: float) -> Tensor:
    """`residual += x` in place (rounded to its dtype), then `rms_norm(residual)`."""
    if _native is not None and x.is_cpu and residual.is_contiguous() and x.is_contiguous():
        result: Tensor = _native.add_rms_norm(x, residual, weight, eps)
        return result
    return add_rms_norm_ref(x, residual, weight, eps)


def silu_and_mul_ref(gate_up: Tensor, limit: float | None = None) -> Tensor:
    gate, up = gate_up.float().chunk(2, dim=-1)
    if limit is not None:
        gate, up = gate.clamp(max=limit), up.clamp(-limit, limit)
    return (gate * torch.sigmoid(gate) * up).to(gate_up.dtype)


def silu_and_mul(gate_up: Tensor, limit: float | None = None) -> Tensor:
    """`silu(min(gate, L)) · clamp(up, −L, L)` for `[…, gate | up]`; no clamp when `limit` is None."""
    if _native is not None and gate_up.is_cpu and gate_up.is_contiguous():
        result: Tensor = _native.silu_and_mul(gate_up, limit or 0.0)
        return result
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
    if _native is not None and x.is_cpu:
        _native.rotary(x, cos_sin, interleaved)
        return x
    return rotary_ref(x, cos_sin, interleaved)


# --- matrix product --------------------------------------------------------------------------------------------------


def linear(x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
    """`x Wᵀ + b` in x's dtype, `x [T, I]`, `weight [O, I]`; the weight may be of a narrower type than x.

    Processors without instructions for a half-size type multiply it slowly; then few rows run on the native op, which
    reads each weight once and computes in fp32, and many rows on widened weights.
    """
    if weight.dtype == x.dtype and x.dtype in _FAST_TYPES:
        return F.linear(x, weight, bias)
    if _native is not None and x.is_cpu and x.shape[0] < _WIDEN_ROWS:
        result: Tensor = _native.linear(x.contiguous(), weight, bias)
        return result
    wide = F.linear(x.float(), weight.float(), bias.float() if bias is not None else None)
    return wide.to(x.dtype)


# --- pages -----------------------------------------------------------------------------------------------------------


def write_rows(pages: Tensor, rows: Tensor, slots: Tensor) -> None:
    """`rows [T, C]` → `pages [blocks, N, C]` at `slots` int64 `[T]` = block · N + row.

    −1 and slots of block 0 (the null block) are left alone. Slots must not repeat.
    """
    size = pages.shape[1]
    keep = slots >= size
    if not bool(keep.all()):
        slots, rows = slots[keep], rows[keep]
    blocks = torch.div(slots, size, rounding_mode="floor")
    pages[blocks, slots - blocks * size] = rows.to(pages.dtype)


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
    if _native is not None and pages.is_cpu and pages.dtype == key.dtype:
        _native.write_kv(pages, key, value, slots)
    else:
        write_kv_ref(pages, key, value, slots)


def check_blocks_ref(target: Tensor, source: Tensor, target_blocks: Tensor, source_blocks: Tensor) -> None:
    """RuntimeError for a copy in host memory that `copy_blocks` does not do."""
    targets, sources = target.shape[0], source.shape[0]
    for ids, count in ((target_blocks, targets), (source_blocks, sources)):
        if len(ids) and not 0 <= int(ids.min()) <= int(ids.max()) < count:
            raise RuntimeError(f"blocks {int(ids.min())}..{int(ids.max())} are outside 0..{count - 1}")
    written = set(target_blocks.tolist())
    if len(written) < len(target_blocks):
        raise RuntimeError("a block is a target twice")
    row, stride, source_stride = (
        size * target.element_size() for size in (target.shape[1], target.stride(0), source.stride(0))
    )
    if targets > 1 and stride < row:
        raise RuntimeError("target blocks overlap")
    apart = source.data_ptr() - target.data_ptr()
    if not written or apart >= (targets - 1) * stride + row or -apart >= (sources - 1) * source_stride + row:
        return  # nothing in common
    rows_apart, shift = divmod(apart, stride) if stride == source_stride else (0, -1)
    if shift and row <= shift <= stride - row:
        return  # other columns of the same rows
    if shift:
        raise RuntimeError("source and target blocks overlap")
    if not written.isdisjoint((source_blocks + rows_apart).tolist()):
        raise RuntimeError("a block is both a source and a target")


def copy_blocks_ref(target: Tensor, source: Tensor, target_blocks: Tensor, source_blocks: Tensor) -> None:
    if target.is_cpu and source.is_cpu:
        check_blocks_ref(target, source, target_blocks, source_blocks)
    target[target_blocks] = source[source_blocks]


def can_copy_over_bus() -> bool:
    """Whether a kernel is there that copies blocks on a CUDA device, and between it and pinned host memory."""
    return _native is not None and _HAS_CUDA_OPS


def copy_blocks(
    target: Tensor, source: Tensor, target_blocks: Tensor, source_blocks: Tensor, threads: int = 1
) -> None:
    """Copies whole blocks, `source[source_blocks[i]] → target[target_blocks[i]]`.

    Both are `[blocks, bytes]` of one dtype (rows may be strided, also the same tensor); ids are int64. A block must
    not be a target twice, nor both a source and a target in one call; in host memory that is refused, and so are ids
    out of range. One side may be host memory that is pinned for the device of the other (`can_copy_over_bus`); a device
    also has to be able to read the ids. ``threads``: how many may share a large copy in host memory.
    """
    if target.is_cuda or source.is_cuda:
        if can_copy_over_bus():
            _native.copy_blocks(target, source, target_blocks, source_blocks)
            return
    elif _native is not None and target.is_cpu and source.is_cpu:
        _native.copy_host_blocks(target, source, target_blocks, source_blocks, threads)
        return
    copy_blocks_ref(target, source, target_blocks, source_blocks)


def paged_decode_attention_ref(
    out: Tensor, q: Tensor, pages: Tensor, table: Tensor, lengths: Tensor, lows: Tensor, scale: float
) -> None:
    heads, size = pages.shape[1], pages.shape[2]
    head_size = q.shape[2]
    for r, (length, low) in enumerate(zip(lengths.tolist(), lows.tolist(), strict=True)):
        first = low // size
        blocks = table[r, first : -(-length // size)].to(torch.int64)
        rows = pages[blocks].transpose(0, 1).flatten(1, 2)[:, low - first * size : length - first * size]
        rows = rows.to(q.dtype)
        folded = q[r].reshape(1, heads, -1, head_size)
        attended = F.scaled_dot_product_attention(
            folded, rows[None, ..., :head_size], rows[None, ..., head_size:], scale=scale
        )
        out[r] = attended.reshape(out.shape[1:])


def paged_decode_attention(
    out: Tensor,
    q: Tensor,
    pages: Tensor,
    table: Tensor,
    lengths: Tensor,
    lows: Tensor,
    length_max: int,
    scale: float,
) -> None:
    """One new token per row against its pages, grouped heads.

    `out [N, Hq, Dv]` is written; `q [N, Hq, D]`; `pages [blocks, Hkv, block_size, D + Dv]` (keys then values);
    `table` int32 `[N, W]`; row r reads positions `lows[r] : lengths[r]` (int32), at most `length_max` of them.
    Softmax in fp32.
    """
    is_small = max(q.shape[2], out.shape[2]) <= _HEAD_MAX
    if _native is not None and is_small and q.is_cpu and q.dtype == pages.dtype:
        _native.paged_decode_attention(out, q, pages, table, lengths, lows, length_max, scale)
    else:
        paged_decode_attention_ref(out, q, pages, table, lengths, lows, scale)


# --- recurrent states and residual streams ---------------------------------------------------------------------------


def write_states(states: Tensor, values: Tensor, target: Tensor) -> None:
    """`values [N, …]` → `states [blocks, …]` at `target` int64 `[N]`; block 0 is never written."""
    keep = target > 0
    if not bool(keep.all()):
        target, values = target[keep], values[keep]
    states[target] = values.to(states.dtype)


def delta_rule_steps_ref(inputs: DeltaInputs, state: Tensor) -> tuple[Tensor, Tensor]:
    """The delta rule token by token: `[T, H, …]` inputs of one request from `state [H, d_k, d_v]`."""
    outputs = []
    for q, k, v, g, beta in zip(*inputs, strict=True):
        state = state * g.exp().unsqueeze(-1)
        remembered = torch.einsum("hk,hkv->hv", k, state)
        state = state + k.unsqueeze(-1) * (beta.unsqueeze(-1) * (v - remembered)).unsqueeze(-2)
        outputs.append(torch.einsum("hk,hkv->hv", q, state))
    return torch.stack(outputs), state


def delta_rule_step_ref(inputs: DeltaInputs, states: Tensor, source: Tensor, target: Tensor) -> Tensor:
    q, k, v, g, beta = inputs
    state = states[source] * g.exp().unsqueeze(-1)
    remembered = torch.einsum("nhk,nhkv->nhv", k, state)
    state = state + k.unsqueeze(-1) * (beta.unsqueeze(-1) * (v - remembered)).unsqueeze(-2)
    write_states(states, state, target)
    return torch.einsum("nhk,nhkv->nhv", q, state)


def delta_rule_step(inputs: DeltaInputs, states: Tensor, source: Tensor, target: Tensor) -> Tensor:
    """One token for each of N requests: q, k, g `[N, H, d_k]`, v `[N, H, d_v]`, beta `[N, H]` (fp32) → `[N, H, d_v]`.

    Request n's state is read from `states[source[n]]` (`[blocks, H, d_k, d_v]` fp32) and written to
    `states[target[n]]`; block 0 is never written.
    """
    if _native is not None and states.is_cpu and states.shape[2] <= _HEAD_MAX:
        result: Tensor = _native.delta_rule_step(*inputs, states, source, target)
        return result
    return delta_rule_step_ref(inputs, states, source, target)


def mhc_weights_ref(
    mixed: Tensor, scale: Tensor, base: Tensor, eps: float, iterations: int
) -> tuple[Tensor, Tensor, Tensor]:
    streams = math.isqrt(mixed.shape[-1] + 1) - 1
    sizes = [streams, streams, streams * streams]
    parts = zip(mixed.split(sizes, -1), scale, base.split(sizes), strict=True)
    pre, post, comb = (part * factor + offset for part, factor, offset in parts)
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
    if _native is not None and mixed.is_cpu and mixed.shape[-1] <= (2 + _STREAMS_MAX) * _STREAMS_MAX:
        pre, post, comb = _native.mhc_weights(mixed, scale, base, eps, iterations)
        return pre, post, comb
    return mhc_weights_ref(mixed, scale, base, eps, iterations)
