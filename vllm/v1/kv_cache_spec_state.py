"""Specs of caches that are no attention pages: recurrent states and the scratch of host-sparse attention. Layer: L2."""

from __future__ import annotations

from dataclasses import dataclass, replace
from fractions import Fraction
from math import prod

from vllm.utils.math_utils import cdiv
from vllm.v1.kv_cache_spec_base import DType, KVCacheSpec, KVCacheSpecKind, SizingContext, max_model_len_of

MAMBA2 = "mamba2"


@dataclass(frozen=True)
class MambaSpec(KVCacheSpec):
    """One recurrent state per block: tensors of `shapes` and `dtypes`, side by side.

    `mamba_cache_mode` "none": one running state per request; "align": a state at every multiple of `block_size`, of
    which only the running one, the one before it and retained checkpoints are real blocks.
    """

    shapes: tuple[tuple[int, ...], ...]
    dtypes: tuple[DType, ...]
    page_size_padded: int | None = None
    mamba_type: str = MAMBA2
    mamba_cache_mode: str = "none"
    num_speculative_blocks: int = 0
    num_prefill_checkpoint_blocks: int = 0
    prefill_checkpoint_alignment: int | None = None
    num_heads: int = 1
    tokens_per_state: int | Fraction = -1
    tp_replicated: bool = False

    def __post_init__(self) -> None:
        super().__post_init__()
        object.__setattr__(self, "shapes", tuple(tuple(shape) for shape in self.shapes))
        object.__setattr__(self, "dtypes", tuple(self.dtypes))
        if len(self.shapes) != len(self.dtypes):
            raise ValueError(f"{len(self.shapes)} state shapes but {len(self.dtypes)} dtypes")

    @property
    def kv_cache_spec_kind(self) -> KVCacheSpecKind:
        return KVCacheSpecKind.MAMBA

    @property
    def sharing_key(self) -> tuple[object, ...]:
        return (
            self.mamba_cache_mode,
            self.num_speculative_blocks,
            self.num_prefill_checkpoint_blocks,
            self.prefill_checkpoint_alignment,
        )

    @property
    def keeps_aligned_states(self) -> bool:
        return self.mamba_cache_mode == "align"

    @property
    def state_content_size_bytes(self) -> int:
        sizes = [prod(s) * d.itemsize for s, d in zip(self.shapes, self.dtypes, strict=True)]
        return sum(sizes) // self.num_heads

    @property
    def unpadded_page_size_bytes(self) -> int:
        """Bytes of one state without padding."""
        return sum(prod(s) * d.itemsize for s, d in zip(self.shapes, self.dtypes, strict=True))

    @property
    def page_size_bytes(self) -> int:
        unpadded = self.unpadded_page_size_bytes
        if self.page_size_padded is None:
            return unpadded
        if self.page_size_padded < unpadded:
            raise AssertionError(
                f"page_size_padded={self.page_size_padded} is smaller than the state of {unpadded} bytes"
            )
        return self.page_size_padded

    @property
    def block_table_token_alignment(self) -> int | None:
        return None

    @property
    def uses_slot_mapping(self) -> bool:
        return False

    def tp_replicas(self, tp_size: int, dcp_size: int) -> int:
        return tp_size if self.tp_replicated else 1

    def with_page_size(self, page_size_bytes: int) -> KVCacheSpec | None:
        if page_size_bytes < self.unpadded_page_size_bytes:
            return None
        return replace(self, page_size_padded=page_size_bytes)

    def max_memory_usage_bytes(self, vllm_config: SizingContext) -> int:
        if self.mamba_cache_mode == "align":
            states = 2 + self.num_speculative_blocks + self.num_prefill_checkpoint_blocks
        elif self.mamba_cache_mode == "none":
            states = 1 + self.num_speculative_blocks
        else:  # a state per block, as a neighbouring version allows
            states = cdiv(max_model_len_of(vllm_config), self.block_size) + self.num_speculative_blocks
        return states * self.page_size_bytes

    def max_num_blocks_per_req(self, vllm_config: SizingContext, max_len: int) -> int:
        if self.mamba_cache_mode == "none":
            return 1 + self.num_speculative_blocks
        return cdiv(max_len, self.block_size) + self.num_speculative_blocks


@dataclass(frozen=True, kw_only=True)
class ScratchSpec(KVCacheSpec):
    """Blocks of `page_size` raw bytes that mean nothing to another request, nor to another engine."""

    page_size: int

    @property
    def prefix_cacheable(self) -> bool:
        return False

    @property
    def transferable(self) -> bool:
        return False

    @property
    def num_heads(self) -> int:
        return 1

    @property
    def tokens_per_state(self) -> int | Fraction:
        return 1

    @property
    def state_content_size_bytes(self) -> int:
        return self.page_size // self.num_states

    @property
    def page_size_bytes(self) -> int:
        return self.page_size

    @property
    def has_layer_views(self) -> bool:
        return False

    def with_page_size(self, page_size_bytes: int) -> KVCacheSpec | None:
        return replace(self, page_size=page_size_bytes) if page_size_bytes >= self.page_size else None


@dataclass(frozen=True, kw_only=True)
class HiSparseHotSpec(ScratchSpec):
    """Scratch of `blocks_per_request` device blocks that hold the rows selected last."""

    blocks_per_request: int

    @property
    def block_table_token_alignment(self) -> int | None:
        return None

    @property
    def uses_slot_mapping(self) -> bool:
        return False

    def max_memory_usage_bytes(self, vllm_config: SizingContext) -> int:
        return self.blocks_per_request * self.page_size_bytes

    def max_num_blocks_per_req(self, vllm_config: SizingContext, max_len: int) -> int:
        return self.blocks_per_request


@dataclass(frozen=True, kw_only=True)
class HiSparseResidentSpec(ScratchSpec):
    """Device blocks that hold the tokens in flight before they move to the host."""

    def max_admission_blocks_per_request(self, max_in_flight_tokens: int, max_model_len: int) -> int:
        """Blocks for the tokens in flight of one request."""
        return cdiv(min(max_in_flight_tokens, max_model_len), self.block_size)

    def max_blocks_held(self, max_in_flight_tokens: int, max_model_len: int) -> int:
        """The most blocks a request holds at once: one more where its tokens in flight do not begin with a block."""
        blocks = self.max_admission_blocks_per_request(max_in_flight_tokens, max_model_len) + 1
        return min(blocks, cdiv(max_model_len, self.block_size))

    def max_blocks_per_request(self, vllm_config: SizingContext) -> int:
        return self.max_blocks_held(vllm_config.max_in_flight_tokens, max_model_len_of(vllm_config))

    def max_memory_usage_bytes(self, vllm_config: SizingContext) -> int:
        blocks = self.max_admission_blocks_per_request(
            vllm_config.max_in_flight_tokens, max_model_len_of(vllm_config)
        )
        return blocks * self.page_size_bytes


def get_mamba_prefill_checkpoint_position(
    num_tokens: int, hash_block_size: int, drop_eagle_block: bool, num_hash_lookahead_tokens: int = 0
) -> int:
    """The last prefix length of `num_tokens` tokens at which a state can be found again by hash; 0 if none.

    At least one token must stay to be computed, more with lookahead hashing; with the EAGLE drop one hash unit is
    given back instead.
    """
    usable = num_tokens if drop_eagle_block else num_tokens - max(1, num_hash_lookahead_tokens)
    position = usable // hash_block_size * hash_block_size
    if drop_eagle_block:
        position -= hash_block_size
    return max(0, position)


def is_mamba_prefill_checkpoint_valid(
    position: int, chunk_start: int, chunk_end: int, checkpoint_alignment: int | None = None
) -> bool:
    """A backend can export the state after `position` tokens while it computes the chunk [start, end).

    The position must lie strictly inside the chunk and, counted from the chunk's start, on the backend's alignment.
    """
    if not chunk_start < position < chunk_end:
        return False
    return checkpoint_alignment is None or (position - chunk_start) % checkpoint_alignment == 0
