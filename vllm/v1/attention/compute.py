"""What a backend that computes attention offers to the layers.

Owns: the two calls and their meaning. Must not know: a backend's insides, models. Layer L6.
"""

from __future__ import annotations

from abc import abstractmethod

from torch import Tensor

from vllm.v1.attention.backend import AttentionBackend, GroupMeta, StepMeta
from vllm.v1.attention.pages import KVHeadPages, RowPages
from vllm.v1.kv_cache_layout import KVCacheLayout

__all__ = ["ComputeBackend"]


class ComputeBackend(AttentionBackend):
    """A backend whose kernels read pages block by block: how blocks of several layers lie does not matter."""

    supported_kv_cache_layouts = (KVCacheLayout.BLHNC, KVCacheLayout.LBHNC)

    @staticmethod
    @abstractmethod
    def paged_attention(
        q: Tensor,
        pages: KVHeadPages,
        meta: StepMeta,
        group: GroupMeta,
        scale: float,
        window: int | None = None,
    ) -> Tensor:
        """`q [T, Hq, D]` against the pages (this step's tokens already written) → `[T, Hq, Dv]` in q's dtype.

        Causal; with a window the last `window` positions including the token itself, and nothing below the request's
        `replay_starts`.
        """

    @staticmethod
    @abstractmethod
    def latent_attention(
        q: Tensor,
        pages: RowPages,
        meta: StepMeta,
        group: GroupMeta,
        scale: float,
        selection: list[Tensor | None],
    ) -> Tensor:
        """Absorbed latent attention: `q [T, H, C]` scores latent rows `[C]`, which are also the values → fp32.

        `selection[r]` is bool `[query, seq_len]`, what each new token of request r may read (causality included), or
        None for everything up to itself.
        """
