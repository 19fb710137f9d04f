"""Specs of attention caches that keep only part of the tokens: windows, chunks, rings. Layer: L2.

`max_admission_blocks_per_request` sizes the pool at start-up and caps admission at run time: one number for both.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

from vllm.utils.math_utils import cdiv, round_up
from vllm.v1.kv_cache_spec_attention import AttentionSpec, FullAttentionSpec, MLAAttentionSpec
from vllm.v1.kv_cache_spec_base import KVCacheSpec, KVCacheSpecKind, SizingContext, max_model_len_of
from vllm.v1.kv_cache_spec_uniform import replace_as


@dataclass(frozen=True, kw_only=True)
class SlidingWindowSpec(AttentionSpec):
    """A token reads the `sliding_window` tokens that end with it.

    `extra_retained_tokens`: tokens before the window that are kept because drafts may still be taken back.
    """

    sliding_window: int
    extra_retained_tokens: int = 0

    @property
    def sharing_key(self) -> tuple[object, ...]:
        return (self.sliding_window, self.extra_retained_tokens)

    @property
    def kv_cache_spec_kind(self) -> KVCacheSpecKind:
        return KVCacheSpecKind.SLIDING_WINDOW

    @property
    def event_sliding_window(self) -> int | None:
        return self.sliding_window

    @property
    def num_retained_tokens(self) -> int:
        """Computed tokens that the next token may need."""
        return self.sliding_window - 1 + self.extra_retained_tokens

    def with_retained_tokens(self, extra_retained_tokens: int) -> KVCacheSpec:
        return replace(self, extra_retained_tokens=extra_retained_tokens)

    def as_full_attention(self, block_size: int) -> KVCacheSpec:
        return replace_as(
            self,
            FullAttentionSpec,
            drop=("extra_retained_tokens", "page_size_padded"),
            block_size=block_size,
        )

    def max_admission_blocks_per_request(self, max_in_flight_tokens: int, max_model_len: int) -> int:
        """The most blocks a request holds at once: window plus tokens in flight, one more for being unaligned."""
        tokens = min(self.num_retained_tokens + max_in_flight_tokens, max_model_len)
        return cdiv(tokens, self.block_size) + 1

    def max_memory_usage_bytes(self, vllm_config: SizingContext) -> int:
        blocks = self.max_admission_blocks_per_request(
            vllm_config.max_in_flight_tokens, max_model_len_of(vllm_config)
        )
        return blocks * self.page_size_bytes


@dataclass(frozen=True, kw_only=True)
class SlidingWindowMLASpec(SlidingWindowSpec):
    """A window of latent rows. `bounded_replay`: never stored by hash, recomputed after a prefix hit instead."""

    cache_dtype_str: str | None = None
    alignment: int | None = None
    model_version: str | None = None
    bounded_replay: bool = False
    head_size_v: int = 0

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.model_version not in (None, "deepseek_v4"):
            raise ValueError(f"model_version must be None or 'deepseek_v4', got {self.model_version!r}")
        if self.alignment is not None:
            padded = round_up(self.unpadded_page_size_bytes, self.alignment)
            object.__setattr__(self, "page_size_padded", padded)

    @property
    def kv_cache_spec_kind(self) -> KVCacheSpecKind:
        return KVCacheSpecKind.SLIDING_WINDOW_MLA

    @property
    def sharing_key(self) -> tuple[object, ...]:
        return (self.sliding_window, self.extra_retained_tokens, self.bounded_replay)

    def with_page_size(self, page_size_bytes: int) -> KVCacheSpec | None:
        return self if page_size_bytes == self.page_size_bytes else self._with_more_tokens(page_size_bytes)

    def as_full_attention(self, block_size: int) -> KVCacheSpec:
        return replace_as(
            self,
            MLAAttentionSpec,
            drop=("extra_retained_tokens", "bounded_replay", "page_size_padded"),
            block_size=block_size,
        )

    @property
    def prefix_cacheable(self) -> bool:
        return not self.bounded_replay

    @property
    def prefix_replay_tokens(self) -> int:
        return self.sliding_window if self.bounded_replay else 0


@dataclass(frozen=True, kw_only=True)
class ChunkedLocalAttentionSpec(AttentionSpec):
    """A token reads its own chunk of `attention_chunk_size` tokens up to itself."""

    attention_chunk_size: int

    @property
    def sharing_key(self) -> tuple[object, ...]:
        return (self.attention_chunk_size,)

    @property
    def kv_cache_spec_kind(self) -> KVCacheSpecKind:
        return KVCacheSpecKind.CHUNKED_LOCAL_ATTENTION

    def as_full_attention(self, block_size: int) -> KVCacheSpec:
        return replace_as(self, FullAttentionSpec, drop=("page_size_padded",), block_size=block_size)

    def max_admission_blocks_per_request(self, max_in_flight_tokens: int, max_model_len: int) -> int:
        """The most blocks a request holds at once: its chunk plus the tokens in flight."""
        return cdiv(min(self.attention_chunk_size + max_in_flight_tokens, max_model_len), self.block_size)

    def max_memory_usage_bytes(self, vllm_config: SizingContext) -> int:
        blocks = self.max_admission_blocks_per_request(
            vllm_config.max_in_flight_tokens, max_model_len_of(vllm_config)
        )
        return blocks * self.page_size_bytes


@dataclass(frozen=True, kw_only=True)
class CircularBufferSpec(AttentionSpec):
    """A ring of `block_size` rows, one block per request for its whole life, overwritten in place, never shared."""

    @property
    def prefix_cacheable(self) -> bool:
        return False

    def with_page_size(self, page_size_bytes: int) -> KVCacheSpec | None:
        if page_size_bytes < self.unpadded_page_size_bytes:
            return None
        return replace(self, page_size_padded=page_size_bytes)

    @property
    def block_table_token_alignment(self) -> int | None:
        return None

    @property
    def uses_slot_mapping(self) -> bool:
        return False

    def max_memory_usage_bytes(self, vllm_config: SizingContext) -> int:
        return self.page_size_bytes

    def max_num_blocks_per_req(self, vllm_config: SizingContext, max_len: int) -> int:
        return 1


KpoolTailSpec = CircularBufferSpec
"""The name that a neighbouring version gives the ring spec."""
