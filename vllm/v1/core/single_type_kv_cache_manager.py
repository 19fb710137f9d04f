"""Public face of the managers of the KV kinds; re-exports, and the hook for kinds from outside. Layer: L3."""

from __future__ import annotations

from typing import Protocol, cast

from vllm.utils.registry import resolve_object
from vllm.v1.core.kv_kinds.base import SingleTypeKVCacheManager
from vllm.v1.core.kv_kinds.chunked_local import ChunkedLocalAttentionManager
from vllm.v1.core.kv_kinds.circular import (
    CircularBufferManager,
    HiSparseHotManager,
    HiSparseResidentManager,
)
from vllm.v1.core.kv_kinds.cross import CrossAttentionManager
from vllm.v1.core.kv_kinds.factory import get_manager_for_kv_cache_spec
from vllm.v1.core.kv_kinds.full import FullAttentionManager, RSWAManager, SinkFullAttentionManager
from vllm.v1.core.kv_kinds.mamba import MambaManager
from vllm.v1.core.kv_kinds.sliding_window import SlidingWindowManager
from vllm.v1.kv_cache_spec_registry import KVCacheSpecRegistry, register_kv_cache_spec

__all__ = [
    "ChunkedLocalAttentionManager",
    "CircularBufferManager",
    "CrossAttentionManager",
    "FullAttentionManager",
    "HiSparseHotManager",
    "HiSparseResidentManager",
    "KVCacheSpecRegistry",
    "MambaManager",
    "RSWAManager",
    "SingleTypeKVCacheManager",
    "SinkFullAttentionManager",
    "SlidingWindowManager",
    "get_manager_for_kv_cache_spec",
    "register_all_kvcache_specs",
    "register_kv_cache_spec",
]

_CURRENT_PLATFORM = "vllm.platforms:current_platform"


class _SpecSource(Protocol):
    """The part of a platform that can bring kinds of its own."""

    def register_custom_kv_cache_specs(self, vllm_config: object) -> None: ...


def register_all_kvcache_specs(vllm_config: object) -> None:
    """Make all kinds known: the built-in ones always are, and the platform adds its own. May be called repeatedly.

    `vllm_config` may be None. The platform is named by a string, because it lives above this layer.
    """
    platform = cast(_SpecSource, resolve_object(_CURRENT_PLATFORM))
    platform.register_custom_kv_cache_specs(vllm_config)
