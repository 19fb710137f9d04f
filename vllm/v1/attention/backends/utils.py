"""Choices that concern several backends at once.

Owns: the common KV cache layout. Must not know: a backend's insides. Layer L6.
"""

from __future__ import annotations

from collections.abc import Iterable

from vllm.v1.attention.backend import AttentionBackend
from vllm.v1.kv_cache_layout import KVCacheLayout

__all__ = ["resolve_kv_cache_layout"]


def resolve_kv_cache_layout(
    backends: Iterable[type[AttentionBackend]], requested: KVCacheLayout | None = None
) -> KVCacheLayout:
    """The layout that all `backends` support: `requested` if given, else the first one's most preferred.

    `ValueError` names the backends if they have none in common, or do not all support the requested one.
    """
    chosen = list(backends)
    names = ", ".join(backend.get_name() for backend in chosen)
    if not chosen:
        return requested or KVCacheLayout.BLHNC
    supported = [backend.get_supported_kv_cache_layouts() for backend in chosen]
    common = [layout for layout in supported[0] if all(layout in others for others in supported)]
    if requested is not None:
        if requested not in common:
            raise ValueError(f"KV cache layout {requested.name} is not supported by all of: {names}")
        return requested
    if not common:
        raise ValueError(f"attention backends have no KV cache layout in common: {names}")
    return common[0]
