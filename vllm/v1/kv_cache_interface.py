"""Public face of the KV cache's specs and plan; re-exports only. Layer: L2."""

from __future__ import annotations

from vllm.v1.kv_cache_config_types import KVCacheConfig, KVCacheGroupSpec, KVCacheTensor
from vllm.v1.kv_cache_layout import KVCacheLayout, compute_layout_strides, create_kv_cache_views
from vllm.v1.kv_cache_quant_mode import KVQuantMode, get_kv_quant_mode, is_quantized_kv_cache
from vllm.v1.kv_cache_spec_attention import (
    AttentionSpec,
    CrossAttentionSpec,
    EncoderOnlyAttentionSpec,
    FullAttentionSpec,
    HiddenStateCacheSpec,
    MLAAttentionSpec,
    RSWASpec,
    SinkFullAttentionSpec,
)
from vllm.v1.kv_cache_spec_base import (
    KVCacheGroupRole,
    KVCacheSpec,
    KVCacheSpecKind,
    MultipleOf,
    SizingContext,
    SparseCacheRole,
)
from vllm.v1.kv_cache_spec_state import (
    HiSparseHotSpec,
    HiSparseResidentSpec,
    MambaSpec,
    get_mamba_prefill_checkpoint_position,
    is_mamba_prefill_checkpoint_valid,
)
from vllm.v1.kv_cache_spec_uniform import (
    UniformTypeKVCacheSpecs,
    get_kv_cache_spec_kind,
    get_kv_cache_spec_sliding_window,
    is_full_attention_spec,
    iter_layer_specs,
    replace_as,
)
from vllm.v1.kv_cache_spec_window import (
    ChunkedLocalAttentionSpec,
    CircularBufferSpec,
    KpoolTailSpec,
    SlidingWindowMLASpec,
    SlidingWindowSpec,
)

__all__ = [
    "KVCacheSpec",
    "AttentionSpec",
    "FullAttentionSpec",
    "MLAAttentionSpec",
    "HiddenStateCacheSpec",
    "RSWASpec",
    "SinkFullAttentionSpec",
    "SlidingWindowSpec",
    "SlidingWindowMLASpec",
    "ChunkedLocalAttentionSpec",
    "CircularBufferSpec",
    "KpoolTailSpec",
    "MambaSpec",
    "CrossAttentionSpec",
    "EncoderOnlyAttentionSpec",
    "HiSparseHotSpec",
    "HiSparseResidentSpec",
    "UniformTypeKVCacheSpecs",
    "KVCacheTensor",
    "KVCacheGroupSpec",
    "KVCacheGroupRole",
    "KVCacheConfig",
    "KVCacheLayout",
    "KVQuantMode",
    "KVCacheSpecKind",
    "MultipleOf",
    "SizingContext",
    "SparseCacheRole",
    "iter_layer_specs",
    "is_full_attention_spec",
    "get_kv_cache_spec_kind",
    "get_kv_cache_spec_sliding_window",
    "replace_as",
    "get_kv_quant_mode",
    "is_quantized_kv_cache",
    "get_mamba_prefill_checkpoint_position",
    "is_mamba_prefill_checkpoint_valid",
    "compute_layout_strides",
    "create_kv_cache_views",
]
