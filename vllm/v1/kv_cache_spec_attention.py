"""Specs of attention caches that keep every token, and of encoder and cross attention. Layer: L2.

Must not know how blocks are found or freed; that is the managers' part (core/kv_kinds).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from fractions import Fraction
from typing import Self, TypeVar

from vllm.utils.math_utils import cdiv, round_up
from vllm.v1.kv_cache_quant_mode import KVQuantMode
from vllm.v1.kv_cache_spec_base import (
    DType,
    KVCacheSpec,
    KVCacheSpecKind,
    SizingContext,
    SparseCacheRole,
    max_model_len_of,
    require_equal_specs,
)

FullT = TypeVar("FullT", bound="FullAttentionSpec")
MLAT = TypeVar("MLAT", bound="MLAAttentionSpec")


@dataclass(frozen=True, kw_only=True)
class AttentionSpec(KVCacheSpec):
    """Keys and values per token: `num_kv_heads` heads of `head_size` + `head_size_v` elements of `dtype`.

    `num_head_slots` and `state_content_bytes` replace the derived head count and bytes per state where a kernel stores
    something else. `max_tp_shards`: over how many tensor-parallel ranks the heads can be split (None = not known).
    `page_size_padded`: bytes of a page if it must be wider than its content.
    """

    dcp_sharded: bool = True
    max_tp_shards: int | None = None
    num_kv_heads: int
    head_size: int
    dtype: DType
    head_size_v: int = None  # type: ignore[assignment]  # resolved to head_size below
    kv_quant_mode: KVQuantMode = KVQuantMode.NONE
    page_size_padded: int | None = None
    num_head_slots: int | None = None
    state_content_bytes: int | None = None
    tokens_per_state: int | Fraction = 1

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.head_size_v is None:
            object.__setattr__(self, "head_size_v", self.head_size)

    @property
    def precision(self) -> tuple[DType, int] | None:
        return (self.dtype, self.kv_quant_mode)

    @property
    def num_heads(self) -> int:
        return self.num_head_slots or self.num_kv_heads

    @property
    def state_content_size_bytes(self) -> int:
        if self.state_content_bytes is not None:
            return self.state_content_bytes
        return (self.head_size + self.head_size_v) * self.dtype.itemsize

    @property
    def unpadded_page_size_bytes(self) -> int:
        """Bytes of one block of one layer without padding."""
        return self.num_heads * self.num_states * self.state_content_size_bytes

    @property
    def real_page_size_bytes(self) -> int:
        """Alias of `unpadded_page_size_bytes`."""
        return self.unpadded_page_size_bytes

    @property
    def page_size_bytes(self) -> int:
        unpadded = self.unpadded_page_size_bytes
        if self.page_size_padded is None:
            return unpadded
        if self.page_size_padded < unpadded:
            raise AssertionError(
                f"page_size_padded={self.page_size_padded} is smaller than the page's content of {unpadded} bytes"
            )
        return self.page_size_padded

    def tp_replicas(self, tp_size: int, dcp_size: int) -> int:
        if self.max_tp_shards is None:
            return 1
        replicas = tp_size // min(tp_size, self.max_tp_shards)
        return max(1, replicas // dcp_size) if self.dcp_sharded else replicas

    def with_page_size(self, page_size_bytes: int) -> KVCacheSpec | None:
        if page_size_bytes == self.page_size_bytes:
            return self
        wider = self._with_more_tokens(page_size_bytes)
        if wider is not None:
            return wider
        if page_size_bytes < self.unpadded_page_size_bytes:
            return None
        return replace(self, page_size_padded=page_size_bytes)

    def _with_more_tokens(self, page_size_bytes: int) -> Self | None:
        """A page of that many bytes with proportionally more tokens, or None if it does not come out even."""
        ratio, rest = divmod(page_size_bytes, self.page_size_bytes)
        if rest or ratio == 0:
            return None
        padded = None if self.page_size_padded is None else page_size_bytes
        wider = replace(self, block_size=self.block_size * ratio, page_size_padded=padded)
        return wider if wider.page_size_bytes == page_size_bytes else None

    def _dcp_size(self, vllm_config: SizingContext) -> int:
        return vllm_config.parallel_config.decode_context_parallel_size if self.dcp_sharded else 1

    def max_num_blocks_per_req(self, vllm_config: SizingContext, max_len: int) -> int:
        return cdiv(max_len, self.block_size * self._dcp_size(vllm_config))


@dataclass(frozen=True, kw_only=True)
class FullAttentionSpec(AttentionSpec):
    """Every token is kept. `sliding_window` or `attention_chunk_size`: the layer reads less than is kept.

    A layer whose own manager is not used (hybrid manager off) becomes this, with its window remembered here.
    """

    sliding_window: int | None = None
    attention_chunk_size: int | None = None
    non_causal: bool = False

    @property
    def kv_cache_spec_kind(self) -> KVCacheSpecKind:
        return KVCacheSpecKind.FULL_ATTENTION

    @property
    def keeps_all_tokens(self) -> bool:
        return True

    def max_memory_usage_bytes(self, vllm_config: SizingContext) -> int:
        tokens = cdiv(max_model_len_of(vllm_config), self._dcp_size(vllm_config))
        return cdiv(tokens, self.block_size) * self.page_size_bytes

    @classmethod
    def merge(cls: type[FullT], specs: Sequence[FullT]) -> FullT:
        """Specs that differ only in `sliding_window` or `attention_chunk_size` merge into the one distinct value.

        Raises ValueError for two distinct windows or chunk sizes, AssertionError for any other difference.
        """
        require_equal_specs([replace(s, sliding_window=None, attention_chunk_size=None) for s in specs])
        window = _one_value("sliding_window", [s.sliding_window for s in specs])
        chunk = _one_value("attention_chunk_size", [s.attention_chunk_size for s in specs])
        if window is not None and chunk is not None:
            raise AssertionError(
                f"one KV cache group cannot hold sliding-window ({window}) and chunked ({chunk}) layers"
            )
        return replace(specs[0], sliding_window=window, attention_chunk_size=chunk)


def _one_value(name: str, values: Sequence[int | None]) -> int | None:
    distinct = sorted({value for value in values if value is not None})
    if len(distinct) > 1:
        raise ValueError(f"layers of one KV cache group have different {name} values: {distinct}")
    return distinct[0] if distinct else None


@dataclass(frozen=True, kw_only=True)
class MLAAttentionSpec(FullAttentionSpec):
    """One latent row per state instead of keys and values. `alignment`: bytes to which the page is rounded up."""

    cache_dtype_str: str | None = None
    topk_buffer_width: int | None = None
    alignment: int | None = None
    model_version: str | None = None
    cache_role: SparseCacheRole = SparseCacheRole.SPARSE
    is_index_group_leader: bool = False
    non_causal_multi_token_decode: bool = False
    head_size_v: int = 0

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.alignment is not None:
            padded = round_up(self.unpadded_page_size_bytes, self.alignment)
            object.__setattr__(self, "page_size_padded", padded)

    @property
    def kv_cache_spec_kind(self) -> KVCacheSpecKind:
        return KVCacheSpecKind.MLA_ATTENTION

    def with_page_size(self, page_size_bytes: int) -> KVCacheSpec | None:
        return self if page_size_bytes == self.page_size_bytes else self._with_more_tokens(page_size_bytes)

    @classmethod
    def merge(cls: type[MLAT], specs: Sequence[MLAT]) -> MLAT:
        """As full attention; the two non-causal flags are or-ed, everything else must be equal."""
        if not specs:
            raise AssertionError("cannot merge an empty list of KV cache specs")
        non_causal = any(s.non_causal for s in specs)
        multi_token = any(s.non_causal_multi_token_decode for s in specs)
        return super().merge(
            [replace(s, non_causal=non_causal, non_causal_multi_token_decode=multi_token) for s in specs]
        )


@dataclass(frozen=True, kw_only=True)
class HiddenStateCacheSpec(MLAAttentionSpec):
    """Marker: the cached rows are hidden states."""


@dataclass(frozen=True, kw_only=True)
class RSWASpec(FullAttentionSpec):
    """Prompt kept in full, generated tokens through a window of `rswa_window`."""

    rswa_window: int

    @property
    def sharing_key(self) -> tuple[object, ...]:
        return (self.rswa_window,)

    @property
    def keeps_all_tokens(self) -> bool:
        return False


@dataclass(frozen=True)
class SinkFullAttentionSpec(FullAttentionSpec):
    """Full attention with `sink_len` tokens that are always visible."""

    sink_len: int | None = None

    @property
    def sharing_key(self) -> tuple[object, ...]:
        return (self.sink_len,)

    @property
    def kv_cache_spec_kind(self) -> KVCacheSpecKind:
        return KVCacheSpecKind.SINK_FULL_ATTENTION


@dataclass(frozen=True)
class CrossAttentionSpec(AttentionSpec):
    """Keys and values of the encoder's output; never looked up by hash."""

    @property
    def kv_cache_spec_kind(self) -> KVCacheSpecKind:
        return KVCacheSpecKind.CROSS_ATTENTION

    def max_memory_usage_bytes(self, vllm_config: SizingContext) -> int:
        tokens = vllm_config.scheduler_config.max_num_encoder_input_tokens
        return cdiv(tokens, self.block_size) * self.page_size_bytes


@dataclass(frozen=True)
class EncoderOnlyAttentionSpec(AttentionSpec):
    """Attention without a cache."""

    @property
    def kv_cache_spec_kind(self) -> KVCacheSpecKind:
        return KVCacheSpecKind.ENCODER_ONLY_ATTENTION

    def max_memory_usage_bytes(self, vllm_config: SizingContext) -> int:
        return 0
