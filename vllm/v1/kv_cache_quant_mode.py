"""How cached keys and values are quantised, by the name of the cache dtype. Layer: L2."""

from __future__ import annotations

from enum import IntEnum

from vllm.config.cache import get_kv_cache_dtype_handler, is_known_kv_cache_dtype


class KVQuantMode(IntEnum):
    """Numbers are part of the interface with kernels. CUSTOM is an alias of OCTAVE_K3V4."""

    NONE = 0
    FP8_PER_TENSOR = 1
    INT8_PER_TOKEN_HEAD = 2
    FP8_PER_TOKEN_HEAD = 3
    INT4_PER_TOKEN_HEAD = 4
    NVFP4 = 5
    TURBOQUANT_K8V4 = 6
    TURBOQUANT_4BIT_NC = 7
    TURBOQUANT_K3V4_NC = 8
    TURBOQUANT_3BIT_NC = 9
    NVFP4_DS_MLA = 10
    ULTRAQUANT_4BIT = 11
    OCTAVE_K3V4 = 12
    CUSTOM = 12
    OCTAVE_K3V3 = 13
    OCTAVE_K3V3_COMPACT = 14

    @property
    def is_per_token_head(self) -> bool:
        """One scale per token and head."""
        return KVQuantMode.INT8_PER_TOKEN_HEAD <= self <= KVQuantMode.INT4_PER_TOKEN_HEAD

    @property
    def is_nvfp4(self) -> bool:
        return self is KVQuantMode.NVFP4

    @property
    def is_turboquant(self) -> bool:
        return KVQuantMode.TURBOQUANT_K8V4 <= self <= KVQuantMode.TURBOQUANT_3BIT_NC

    @property
    def is_ultraquant(self) -> bool:
        return self is KVQuantMode.ULTRAQUANT_4BIT

    @property
    def is_octave(self) -> bool:
        return self >= KVQuantMode.OCTAVE_K3V4

    @property
    def is_custom_mode(self) -> bool:
        return self is KVQuantMode.CUSTOM


_BUILT_IN = {mode.name.lower(): mode for mode in KVQuantMode if mode is not KVQuantMode.NONE}


def get_kv_quant_mode(kv_cache_dtype: str | None) -> KVQuantMode:
    """The mode of a cache dtype name: registered handlers first, then the built-in names; NONE for plain dtypes."""
    if kv_cache_dtype is None:
        return KVQuantMode.NONE
    if is_known_kv_cache_dtype(kv_cache_dtype):
        handler = get_kv_cache_dtype_handler(kv_cache_dtype)
        if handler is not None:
            return KVQuantMode(handler.quant_mode())
    if kv_cache_dtype in _BUILT_IN:
        return _BUILT_IN[kv_cache_dtype]
    if kv_cache_dtype.startswith("fp8"):
        return KVQuantMode.FP8_PER_TENSOR
    return KVQuantMode.NONE


def is_quantized_kv_cache(kv_cache_dtype: str | None) -> bool:
    """The cache dtype stores something else than plain elements."""
    return get_kv_quant_mode(kv_cache_dtype) is not KVQuantMode.NONE
