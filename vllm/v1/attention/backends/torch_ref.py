"""Attention over pages in the plainest possible torch: the oracle every other backend is tested against.

Owns: what paged attention means (causal, window, bounded replay, sparse selection over latent rows).
Must not know: models, speed. Layer L6.
"""

from __future__ import annotations

import torch
from torch import Tensor

from vllm.v1.attention.backend import GroupMeta, StepMeta
from vllm.v1.attention.compute import ComputeBackend
from vllm.v1.attention.pages import KVHeadPages, RowPages

__all__ = ["TorchRefBackend", "latent_attention_ref", "paged_attention_ref", "visible_mask"]


def visible_mask(
    context: int, query: int, window: int | None = None, first: int = 0, floor: int = 0
) -> Tensor:
    """Which positions `[first, context + query)` each new token may read: bool `[query, keys]`.

    Causal; with a window the last `window` positions including itself; never below `floor`.
    """
    queries = torch.arange(context, context + query)[:, None]
    keys = torch.arange(first, context + query)[None, :]
    mask = (keys <= queries) & (keys >= floor)
    if window is not None:
        mask &= keys > queries - window
    return mask


def paged_attention_ref(
    q: Tensor, pages: KVHeadPages, meta: StepMeta, group: GroupMeta, scale: float, window: int | None = None
) -> Tensor:
    """`q [T, Hq, D]` against the pages (new tokens already written) → `[T, Hq, Dv]`, computed in fp32."""
    out = torch.empty(*q.shape[:2], pages.head_size_v, dtype=q.dtype)
    start = 0
    for r, query in enumerate(meta.query_lens):
        context = meta.context_lens[r]
        floor = meta.replay_starts[r] if window is not None and meta.replay_starts else 0
        first = max(floor, context - window + 1, 0) if window is not None else 0
        keys, values = pages.gather(group.block_table[r], context + query, first)
        repeat = q.shape[1] // pages.num_kv_heads
        keys, values = keys.float().repeat_interleave(repeat, 0), values.float().repeat_interleave(repeat, 0)
        scores = torch.einsum("qhd,hkd->hqk", q[start : start + query].float(), keys) * scale
        mask = visible_mask(context, query, window, first, floor)
        weights = scores.masked_fill(~mask, float("-inf")).softmax(-1)
        out[start : start + query] = torch.einsum("hqk,hkd->qhd", weights, values).to(q.dtype)
        start += query
    return out


def latent_attention_ref(
    q: Tensor,
    pages: RowPages,
    meta: StepMeta,
    group: GroupMeta,
    scale: float,
    selection: list[Tensor | None],
) -> Tensor:
    """Absorbed latent attention: `q [T, H, C]` scores latent rows `[C]`, which are also the values → `[T, H, C]` fp32.

    `selection[r]` is bool `[query, positions]` (positions a new token may read, causality included) or None for all.
    """
    out = torch.empty(q.shape, dtype=torch.float32)
    start = 0
    for r, query in enumerate(meta.query_lens):
        context = meta.context_lens[r]
        rows = pages.gather(group.block_table[r], context + query).float()
        mask = selection[r]
        if mask is None:
            mask = visible_mask(context, query)
        scores = torch.einsum("qhc,kc->qhk", q[start : start + query].float(), rows) * scale
        weights = scores.masked_fill(~mask[:, None, :], float("-inf")).softmax(-1)
        out[start : start + query] = torch.einsum("qhk,kc->qhc", weights, rows)
        start += query
    return out


class TorchRefBackend(ComputeBackend):
    """The reference; any head size, any block size."""

    @staticmethod
    def get_name() -> str:
        return "TORCH_REF"

    paged_attention = staticmethod(paged_attention_ref)
    latent_attention = staticmethod(latent_attention_ref)
