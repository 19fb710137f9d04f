"""Settings of the KV cache: size, block size, prefix caching, and the registry of cache dtypes. Layer: L1.

Knows names of dtypes but no tensor library: a handler gives the tensor dtype when it is asked.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Annotated, Any, ClassVar, Literal, Protocol, TypeVar

from pydantic import Field

from vllm.config.setting import Flag, config, setting, state
from vllm.utils.registry import resolve_object

MambaCacheMode = Literal["align", "none"]
PrefixCachingHashAlgo = Literal["sha256", "sha256_cbor", "xxhash", "xxhash_cbor"]
KVOffloadingBackend = Literal["native", "lmcache"]


class KVCacheDTypeHandler(Protocol):
    """What the engine asks about one KV cache dtype."""

    name: str

    # A torch.dtype: this layer only passes it on.
    def torch_dtype(self) -> Any:
        """The dtype of one stored element."""
        ...

    def quant_mode(self) -> int:
        """How the element is quantised: the number of a `KVQuantMode`."""
        ...


class _BuiltInDType:
    """A dtype that torch has as `torch_name`."""

    def __init__(self, name: str, torch_name: str, quant_mode: int) -> None:
        self.name = name
        self._torch_name = torch_name
        self._quant_mode = quant_mode

    def torch_dtype(self) -> Any:
        return resolve_object(f"torch:{self._torch_name}")

    def quant_mode(self) -> int:
        return self._quant_mode


_PLAIN, _FP8_PER_TENSOR = 0, 1
_BUILT_IN: dict[str, KVCacheDTypeHandler] = {
    name: _BuiltInDType(name, torch_name, quant_mode)
    for name, torch_name, quant_mode in (
        ("float32", "float32", _PLAIN),
        ("float16", "float16", _PLAIN),
        ("bfloat16", "bfloat16", _PLAIN),
        ("fp8", "float8_e4m3fn", _FP8_PER_TENSOR),
        ("fp8_e4m3", "float8_e4m3fn", _FP8_PER_TENSOR),
        ("fp8_e5m2", "float8_e5m2", _FP8_PER_TENSOR),
    )
}
# Names of the public interface that a plugin may serve; without one the model refuses them at start-up.
_RESERVED = (
    "fp8_inc",
    "fp8_ds_mla",
    "int8_per_token_head",
    "fp8_per_token_head",
    "int4_per_token_head",
    "nvfp4",
    "nvfp4_ds_mla",
    "turboquant_k8v4",
    "turboquant_4bit_nc",
    "turboquant_k3v4_nc",
    "turboquant_3bit_nc",
    "ultraquant_4bit",
    "octave_k3v4",
    "octave_k3v3",
    "octave_k3v3_compact",
)
_registered: dict[str, KVCacheDTypeHandler] = {}
KV_CACHE_DTYPES: tuple[str, ...] = ("auto", *_BUILT_IN, *_RESERVED)
_Handler = TypeVar("_Handler", bound=KVCacheDTypeHandler)


def register_kv_cache_dtype(name: str) -> Callable[[type[_Handler]], type[_Handler]]:
    """Class decorator: an instance of the class handles the cache dtype `name`. Raises ValueError if it is taken."""
    if name == "auto" or name in _BUILT_IN or name in _registered:
        raise ValueError(f"KV cache dtype {name!r} is already registered")

    def register(handler_class: type[_Handler]) -> type[_Handler]:
        handler = handler_class()
        handler.name = name
        _registered[name] = handler
        return handler_class

    return register


def get_kv_cache_dtype_handler(name: str) -> KVCacheDTypeHandler | None:
    """The handler of the dtype `name`; None for `auto` (the model's dtype) and for names without one."""
    return _registered.get(name) or _BUILT_IN.get(name)


def is_known_kv_cache_dtype(name: str) -> bool:
    """Whether `CacheConfig.cache_dtype` accepts `name`."""
    return name in KV_CACHE_DTYPES or name in _registered


@config
class CacheConfig:
    """Settings of the KV cache."""

    DEFAULT_BLOCK_SIZE: ClassVar[int] = 16

    block_size: Annotated[int, Field(ge=1)] | None = setting(
        default=None, doc="Tokens per KV block; the platform's choice (16) when not given."
    )
    gpu_memory_utilization: Annotated[float, Field(gt=0, le=1)] = setting(
        default=0.92,
        doc="Share of device memory the engine may use.",
        flag=Flag(aliases=("device-memory-utilization",)),
    )
    cache_dtype: str = setting(
        default="auto", doc="Dtype of the KV cache; auto is the model's.", flag=Flag(name="kv_cache_dtype")
    )
    num_gpu_blocks_override: Annotated[int, Field(ge=1)] | None = setting(
        default=None, doc="Use exactly this many device blocks instead of sizing by memory."
    )
    sliding_window: int | None = setting(
        default=None, doc="Window of a model whose layers are all windowed; derived.", flag=Flag(hidden=True)
    )
    enable_prefix_caching: bool = setting(
        default=True, doc="Reuse the KV of equal prompt prefixes.", flag=Flag(unset=True)
    )
    prefix_caching_hash_algo: PrefixCachingHashAlgo = setting(
        default="sha256", doc="Hash over block contents; the cbor kinds agree across languages."
    )
    prefix_match_unit: Annotated[int, Field(ge=1)] | None = setting(
        default=None, doc="Tokens per hash block; the common divisor of the group block sizes when not given."
    )
    prefix_cache_retention_interval: Annotated[int, Field(ge=0)] | None = setting(
        default=0, doc="Keep window and state tails every n tokens; 0 at replay points only, None everywhere."
    )
    mamba_block_size: Annotated[int, Field(ge=1)] | None = setting(
        default=None,
        doc="Tokens between two kept recurrent states, where the model leaves the choice; needs prefix caching.",
    )
    mamba_cache_mode: MambaCacheMode = setting(
        default="none", doc="Deprecated, no effect: the mode follows prefix caching.", flag=Flag(unset=True)
    )
    mamba_cache_dtype: str = setting(default="auto", doc="Dtype of the convolution part of recurrent states.")
    mamba_ssm_cache_dtype: str = setting(default="auto", doc="Dtype of the recurrent part of the states.")
    enable_mamba_shared_prefix_checkpoint: bool = setting(
        default=False, doc="Keep a state where a prompt leaves a prefix that other requests share."
    )
    swa_bounded_replay: bool = setting(
        default=True,
        doc="Recompute a window after a prefix hit where the model supports it, instead of storing it.",
    )
    kv_cache_memory_bytes: Annotated[int, Field(ge=1)] | None = setting(
        default=None, doc="Bytes of the KV cache; overrides gpu_memory_utilization.", flag=Flag(human=True)
    )
    kv_offloading_size: Annotated[float, Field(gt=0, allow_inf_nan=False)] | None = setting(
        default=None,
        doc="GiB of host memory for offloaded KV, summed over tensor-parallel ranks; off when not given.",
    )
    kv_offloading_backend: KVOffloadingBackend = setting(default="native", doc="Which offloading to use.")
    kv_retention_share: Annotated[float, Field(ge=0, le=1)] = setting(
        default=0.25, doc="Share of a cache's blocks that requests may have pinned or kept before others."
    )

    kv_cache_layout: str | None = state(
        default=None, doc="Name of the page layout that the workers agreed on."
    )
    num_gpu_blocks: int | None = state(default=None, doc="Device blocks, once memory is known.")
    num_cpu_blocks: int | None = state(default=None, doc="Host blocks; 0 or None without a host tier.")
    simple_cpu_offload_num_blocks: int | None = state(
        default=None, doc="Host blocks per rank that the workers agreed on."
    )
    effective_attention_block_size: int | None = state(
        default=None, doc="The one block size of all full-attention groups, None if they differ."
    )
    hash_block_size: int | None = state(default=None, doc="Tokens per block hash.")
    cache_hit_alignment_tokens: int | None = state(default=None, doc="Prefix hits end on multiples of this.")
    kv_cache_size_tokens: int | None = state(default=None, doc="Tokens that the device cache holds.")
    kv_cache_max_concurrency: float | None = state(
        default=None, doc="Requests of full length that fit at once."
    )

    def __post_init__(self) -> None:
        if not is_known_kv_cache_dtype(self.cache_dtype):
            known = ", ".join([*KV_CACHE_DTYPES, *_registered])
            raise ValueError(f"cache_dtype={self.cache_dtype!r} is not known; known: {known}")
        if self.mamba_block_size is not None and not self.enable_prefix_caching:
            raise ValueError(f"mamba_block_size={self.mamba_block_size} needs prefix caching to be on")

    def get_resolved_kv_cache_layout(self) -> Any:
        """The `KVCacheLayout` that the workers agreed on. Raises ValueError before that."""
        if self.kv_cache_layout is None:
            raise ValueError("The KV cache layout is not resolved yet; the workers choose it when they start")
        return resolve_object(f"vllm.v1.kv_cache_layout:KVCacheLayout.{self.kv_cache_layout}")

    def metrics_info(self) -> dict[str, str]:
        """Every field as text, for the labels of the metric `cache_config_info`."""
        return {key: str(value) for key, value in vars(self).items()}
