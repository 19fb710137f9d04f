"""The base of all KV cache specs, and the enums that describe them. Layer: L2.

A spec says how one layer caches: bytes per page, tokens per block, memory per request. It must not know pools,
schedulers, devices or torch: a dtype needs only `.itemsize`.
"""

from __future__ import annotations

import copy
from abc import abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from enum import StrEnum
from fractions import Fraction
from typing import Protocol, TypeVar

from vllm.utils.math_utils import cdiv
from vllm.v1.kv_cache_spec_registry import KVCacheSpecRegistry

BLOCK_TABLE_TOKEN_ALIGNMENT = 128
"""Block-table rows of ordinary groups are padded so that a row covers a multiple of this many tokens."""


class DType(Protocol):
    """The part of `torch.dtype` that specs need."""

    @property
    def itemsize(self) -> int: ...


class ModelLimits(Protocol):
    """The part of a model config that sizing needs."""

    @property
    def max_model_len(self) -> int | None: ...


class ParallelLimits(Protocol):
    """The part of a parallel config that sizing needs."""

    @property
    def decode_context_parallel_size(self) -> int: ...


class SchedulerLimits(Protocol):
    """The part of a scheduler config that sizing needs."""

    @property
    def max_num_encoder_input_tokens(self) -> int: ...


class SizingContext(Protocol):
    """The part of `VllmConfig` that specs read; partial records are legal if a spec needs only part of it."""

    @property
    def model_config(self) -> ModelLimits | None: ...
    @property
    def parallel_config(self) -> ParallelLimits: ...
    @property
    def scheduler_config(self) -> SchedulerLimits: ...
    @property
    def max_in_flight_tokens(self) -> int: ...


def max_model_len_of(vllm_config: SizingContext) -> int:
    """`model_config.max_model_len`; ValueError without a model config or while the length is not resolved."""
    model_config = vllm_config.model_config
    if model_config is None or model_config.max_model_len is None:
        raise ValueError("KV cache sizing needs a model_config with a resolved max_model_len")
    return model_config.max_model_len


class KVCacheSpecKind(StrEnum):
    """The name of a kind in KV events."""

    FULL_ATTENTION = "full_attention"
    MLA_ATTENTION = "mla_attention"
    SLIDING_WINDOW = "sliding_window"
    SLIDING_WINDOW_MLA = "sliding_window_mla"
    MAMBA = "mamba"
    CHUNKED_LOCAL_ATTENTION = "chunked_local_attention"
    SINK_FULL_ATTENTION = "sink_full_attention"
    ENCODER_ONLY_ATTENTION = "encoder_only_attention"
    CROSS_ATTENTION = "cross_attention"
    UNKNOWN = "unknown"


class SparseCacheRole(StrEnum):
    """What a latent cache of a sparse-attention layer holds."""

    SPARSE = "sparse"
    INDEXER = "indexer"


class KVCacheGroupRole(StrEnum):
    """What a group is for; roles other than DEFAULT may have their own manager."""

    DEFAULT = "default"
    HISPARSE_SOURCE = "hisparse_source"
    HISPARSE_INDEXER = "hisparse_indexer"


@dataclass(frozen=True)
class MultipleOf:
    """Any multiple of `base`, where a list of sizes would be endless."""

    base: int


SpecT = TypeVar("SpecT", bound="KVCacheSpec")


@dataclass(frozen=True)
class KVCacheSpec:
    """How one layer caches. Frozen and hashable; change it with `dataclasses.replace`.

    `block_size`: tokens per block, before context parallelism multiplies it. `dcp_sharded`: decode context parallelism
    splits the token positions over its ranks. `block_stride_alignment`: bytes to which the distance between physical
    blocks is rounded. `is_draft`: the layer belongs to a draft model (no part of equality).
    """

    block_size: int
    dcp_sharded: bool = field(default=False, kw_only=True)
    block_stride_alignment: int | MultipleOf | None = field(default=None, kw_only=True)
    is_draft: bool = field(default=False, kw_only=True, compare=False)

    def __post_init__(self) -> None:
        alignment = self.block_stride_alignment
        if isinstance(alignment, int) and alignment <= 0:
            raise ValueError(f"block_stride_alignment must be positive, got {alignment}")

    @property
    def kind_spec(self) -> KVCacheSpec:
        """The spec that stands for the kind: a uniform group names one of its members, all others themselves."""
        return self

    @property
    def kv_cache_spec_kind(self) -> KVCacheSpecKind:
        """The name of the kind in KV events."""
        return KVCacheSpecKind.UNKNOWN

    @property
    def event_sliding_window(self) -> int | None:
        """The window that KV events report for this kind, if it has one."""
        return None

    @property
    def sharing_key(self) -> tuple[object, ...]:
        """What layers of one group must agree on besides base type, block size and context-parallel sharding."""
        return ()

    @property
    def precision(self) -> tuple[DType, int] | None:
        """(element type, quantisation mode) of token rows; None for caches that hold no token rows."""
        return None

    @property
    def prefix_cacheable(self) -> bool:
        """Blocks of this kind may be found again by hash."""
        return True

    @property
    def transferable(self) -> bool:
        """Connectors may see groups of this kind."""
        return True

    @property
    def keeps_aligned_states(self) -> bool:
        """The cache is a recurrent state that is kept at multiples of the block size."""
        return False

    @property
    def keeps_all_tokens(self) -> bool:
        """No block is dropped while its request lives, so any shorter prefix of what is cached is whole."""
        return False

    @property
    def prefix_replay_tokens(self) -> int:
        """Tokens before the end of a prefix hit that must be computed again because this kind does not keep them."""
        return 0

    @property
    @abstractmethod
    def num_heads(self) -> int:
        """Heads in a page, the H axis of the layout."""

    @property
    @abstractmethod
    def tokens_per_state(self) -> int | Fraction:
        """Tokens that share one stored state; below 1: several states per token; not positive: one state per block."""

    @property
    @abstractmethod
    def state_content_size_bytes(self) -> int:
        """Bytes of one state of one head."""

    @property
    @abstractmethod
    def page_size_bytes(self) -> int:
        """Bytes of one block of one layer, padding included."""

    @property
    def num_states(self) -> int:
        """States in one block."""
        return self.get_num_kernel_states(self.block_size)

    @property
    def block_table_token_alignment(self) -> int | None:
        """Tokens to which a block-table row is rounded up; None = not at all."""
        return BLOCK_TABLE_TOKEN_ALIGNMENT

    @property
    def has_layer_views(self) -> bool:
        """The worker makes a tensor view per layer."""
        return True

    @property
    def uses_slot_mapping(self) -> bool:
        """The worker computes a slot per token by the ordinary rule block * block_size + offset."""
        return True

    def get_num_kernel_states(self, num_tokens: int) -> int:
        """States that `num_tokens` tokens occupy; 1 for kinds with one state per block."""
        if self.tokens_per_state <= 0:
            return 1
        return int(num_tokens // self.tokens_per_state)

    def get_block_stride_alignment(self) -> int:
        """The byte multiple between physical blocks; 1 = none."""
        alignment = self.block_stride_alignment
        if alignment is None:
            return 1
        return alignment.base if isinstance(alignment, MultipleOf) else alignment

    @abstractmethod
    def max_memory_usage_bytes(self, vllm_config: SizingContext) -> int:
        """The most bytes that one request of `max_model_len` tokens needs in this layer."""
        # Specs are plain classes, so nobody else tells the author of a kind what is missing.
        raise NotImplementedError(f"{type(self).__name__} must say its max_memory_usage_bytes")

    def max_blocks_per_request(self, vllm_config: SizingContext) -> int:
        """The most blocks of the pool that one request of `max_model_len` tokens holds for this kind."""
        return cdiv(self.max_memory_usage_bytes(vllm_config), self.page_size_bytes)

    def max_num_blocks_per_req(self, vllm_config: SizingContext, max_len: int) -> int:
        """Length of a block-table row in the worker for requests of up to `max_len` tokens."""
        return cdiv(max_len, self.block_size)

    def copy_with_new_block_size(self: SpecT, block_size: int) -> SpecT:
        """The same spec with another number of tokens per block."""
        return replace(self, block_size=block_size)

    def with_page_size(self, page_size_bytes: int) -> KVCacheSpec | None:
        """The same cache with a page of exactly that many bytes, by more tokens or by padding; None if impossible."""
        return self if page_size_bytes == self.page_size_bytes else None

    def with_retained_tokens(self, extra_retained_tokens: int) -> KVCacheSpec:
        """The same cache that keeps that many tokens before its window; kinds without a window do not change."""
        return self

    def as_full_attention(self, block_size: int) -> KVCacheSpec:
        """The cache that keeps every token where this kind keeps a window; other kinds do not change."""
        return self

    def tp_replicas(self, tp_size: int, dcp_size: int) -> int:
        """How many tensor-parallel ranks hold identical bytes of this cache; 1 where it is not known."""
        return 1

    def tp_shard(self, rank: int, tp_size: int, dcp_size: int) -> int:
        """Which of the distinct caches of this layer a tensor-parallel rank holds, from 0.

        Ranks with equal numbers hold identical bytes. Heads are dealt to the ranks in order, so replicas are
        neighbours, and those that split the context lie among them in turn.
        """
        split = dcp_size if self.dcp_sharded else 1
        alike = self.tp_replicas(tp_size, dcp_size) * split
        if alike == split or tp_size % alike:
            return rank
        return rank // alike * split + rank % split

    @classmethod
    def merge(cls: type[SpecT], specs: Sequence[SpecT]) -> SpecT:
        """One spec for a group of layers. AssertionError if they cannot share a group."""
        require_equal_specs(specs)
        return copy.copy(specs[0])

    def is_uniform_with_collection(self, kv_cache_specs: Mapping[str, KVCacheSpec]) -> bool:
        """Every spec is of the registered uniform base type of this one."""
        base = KVCacheSpecRegistry.get_uniform_type_base_spec(self)
        return all(KVCacheSpecRegistry.get_uniform_type_base_spec(s) is base for s in kv_cache_specs.values())


def require_equal_specs(specs: Sequence[KVCacheSpec]) -> None:
    """Raise AssertionError unless all are equal and there is at least one."""
    if not specs:
        raise AssertionError("cannot merge an empty list of KV cache specs")
    for spec in specs[1:]:
        if spec != specs[0]:
            raise AssertionError(f"layers of one KV cache group must have equal specs: {specs[0]} and {spec}")
