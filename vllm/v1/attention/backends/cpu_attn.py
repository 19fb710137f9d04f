"""Attention over pages on the CPU: one native call for all decode rows, fused torch attention per prefill row.

Owns: splitting a step into decode and prefill, and the calls. Must not know: models. Layer L6.
"""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn import functional as F

from vllm import _custom_ops as ops
from vllm.v1.attention.backend import GroupMeta, StepMeta
from vllm.v1.attention.backends.torch_ref import visible_mask
from vllm.v1.attention.compute import ComputeBackend
from vllm.v1.attention.pages import KVHeadPages, RowPages

__all__ = ["CpuAttentionBackend", "latent_attention", "paged_attention"]

# Latent attention works through long prefills in slices of this many scores, to bound its scratch memory.
_SCORES_MAX = 1 << 25


def paged_attention(
    q: Tensor, pages: KVHeadPages, meta: StepMeta, group: GroupMeta, scale: float, window: int | None = None
) -> Tensor:
    """`q [T, Hq, D]` against the pages (new tokens already written) → `[T, Hq, Dv]` in q's dtype."""
    out = torch.empty((*q.shape[:2], pages.head_size_v), dtype=q.dtype)
    decodes = meta.num_decodes
    if decodes:
        inputs = _decode_inputs(meta, group, window)
        ops.paged_decode_attention(out[:decodes], q[:decodes], pages.pages, *inputs, scale)
    start = decodes
    for r in range(decodes, meta.num_reqs):
        end = start + meta.query_lens[r]
        out[start:end] = _prefill(q[start:end], pages, meta, group, r, scale, window)
        start = end
    return out


def _decode_inputs(
    meta: StepMeta, group: GroupMeta, window: int | None
) -> tuple[Tensor, Tensor, Tensor, int]:
    """Block table, lengths, first visible positions (int32) and longest stretch of the decode rows; once per step."""
    key = f"decode:{id(group)}:{window}"
    found = meta.derived.get(key)
    if found is None:
        n = meta.num_decodes
        lengths = meta.seq_lens[:n]
        lows = [0] * n
        if window is not None:
            floors = meta.replay_starts or [0] * n
            lows = [max(floors[r], lengths[r] - window, 0) for r in range(n)]
        found = (
            group.block_table[:n],
            torch.tensor(lengths, dtype=torch.int32),
            torch.tensor(lows, dtype=torch.int32),
            max(length - low for length, low in zip(lengths, lows, strict=True)),
        )
        meta.derived[key] = found
    result: tuple[Tensor, Tensor, Tensor, int] = found
    return result


def _prefill(
    q: Tensor,
    pages: KVHeadPages,
    meta: StepMeta,
    group: GroupMeta,
    r: int,
    scale: float,
    window: int | None,
) -> Tensor:
    """One request's new tokens `[query, Hq, D]` → `[query, Hq, Dv]`."""
    context, query = meta.context_lens[r], meta.query_lens[r]
    floor = meta.replay_starts[r] if window is not None and meta.replay_starts else 0
    first = max(floor, context - window + 1, 0) if window is not None else 0
    keys, values = pages.gather(group.block_table[r], context + query, first)
    is_plain = context == 0 and (window is None or query <= window)
    mask = None if is_plain else visible_mask(context, query, window, first, floor)
    attended = F.scaled_dot_product_attention(
        q.transpose(0, 1).unsqueeze(0),
        keys.to(q.dtype).unsqueeze(0),
        values.to(q.dtype).unsqueeze(0),
        attn_mask=mask,
        is_causal=is_plain,
        scale=scale,
        enable_gqa=pages.num_kv_heads != q.shape[1],
    )
    return attended[0].transpose(0, 1)


def latent_attention(
    q: Tensor,
    pages: RowPages,
    meta: StepMeta,
    group: GroupMeta,
    scale: float,
    selection: list[Tensor | None],
) -> Tensor:
    """Absorbed latent attention, see `latent_attention_ref`; a decode row reads its selected rows only."""
    out = torch.empty(q.shape, dtype=torch.float32)
    start = 0
    for r, query in enumerate(meta.query_lens):
        length = meta.seq_lens[r]
        mask = selection[r]
        table = group.block_table[r]
        if query == 1:
            if mask is None:
                rows = pages.gather(table, length)
            else:
                rows = pages.gather_at(table, mask[0].nonzero().flatten())
            out[start] = _attend(q[start].float(), rows.float(), scale, None)
        else:
            rows = pages.gather(table, length).float()
            if mask is None:
                mask = visible_mask(meta.context_lens[r], query)
            step = max(1, _SCORES_MAX // (length * q.shape[1]))
            for low in range(0, query, step):
                high = min(low + step, query)
                part = q[start + low : start + high].float()
                out[start + low : start + high] = _attend(part, rows, scale, mask[low:high, None, :])
        start += query
    return out


def _attend(q: Tensor, rows: Tensor, scale: float, mask: Tensor | None) -> Tensor:
    """`q […, H, C]`, `rows [K, C]` → `softmax(q · rowsᵀ) · rows`."""
    scores = torch.matmul(q, rows.T).mul_(scale)
    if mask is not None:
        scores.masked_fill_(~mask, float("-inf"))
    return torch.matmul(scores.softmax(-1), rows)


class CpuAttentionBackend(ComputeBackend):
    """The default on CPU; any head size, any block size."""

    @staticmethod
    def get_name() -> str:
        return "CPU_ATTN"

    paged_attention = staticmethod(paged_attention)
    latent_attention = staticmethod(latent_attention)
