"""The ring of raw rows behind a pooled-key indexer, as a storage-only attention backend.

Owns: the slot rule of ring caches and the backend that states what such a cache supports.
Must not know: how rows are pooled (model_executor/layers/kpool.py) or who allocates the pages. Layer L6.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from vllm.v1.attention.backend import AttentionBackend, MultipleOf
from vllm.v1.kv_cache_layout import KVCacheLayout

__all__ = ["KpoolTailBackend", "KpoolTailMetadata", "KpoolTailMetadataBuilder", "ring_slot_mapping"]


def ring_slot_mapping(block_table: Tensor, token_rows: Tensor, positions: Tensor, capacity: int) -> Tensor:
    """Slots of ring rows: int64 `[T]`, `k · capacity + position % capacity`, or −1 where the ring block k is null.

    `block_table` is `[R]` or `[R, W]` (column 0 counts); `token_rows[T]` is the row of the batch a token belongs to.
    A generic slot mapping would index the table by `position // capacity` and run out of its single column.
    """
    if capacity < 1:
        raise ValueError(f"ring capacity must be positive, got {capacity}")
    table = block_table if block_table.dim() == 1 else block_table[:, 0]
    blocks = table.to(torch.int64)[token_rows.to(torch.int64)]
    slots = blocks * capacity + positions.to(torch.int64) % capacity
    return torch.where(blocks == 0, torch.full_like(slots, -1), slots)


@dataclass(slots=True)
class KpoolTailMetadata:
    """`slot_mapping` int64 `[T]` in ring rows, −1 = do not write; `block_table` int32 `[R, 1]`."""

    slot_mapping: Tensor
    block_table: Tensor


class KpoolTailMetadataBuilder:
    """Builds the metadata of one ring group with `capacity` rows per request."""

    def __init__(self, capacity: int) -> None:
        if capacity < 1:
            raise ValueError(f"ring capacity must be positive, got {capacity}")
        self.capacity = capacity

    def build(self, block_table: Tensor, query_start: Tensor, positions: Tensor) -> KpoolTailMetadata:
        """`block_table` int32 `[R, ≥1]`, `query_start` `[R + 1]`, `positions` `[T]` → metadata of this step."""
        counts = (query_start[1:] - query_start[:-1]).to(torch.int64)
        rows = torch.repeat_interleave(torch.arange(counts.numel()), counts)
        return KpoolTailMetadata(
            ring_slot_mapping(block_table, rows, positions, self.capacity), block_table[:, :1]
        )


class KpoolTailBackend(AttentionBackend):
    """Storage only: rows are written and read by the indexer, no attention runs over them."""

    supported_kv_cache_layouts = (KVCacheLayout.BLHNC,)

    @staticmethod
    def get_name() -> str:
        return "KPOOL_TAIL"

    @classmethod
    def get_supported_head_sizes(cls) -> list[int]:
        return []

    @classmethod
    def get_supported_kernel_block_sizes(cls) -> list[int | MultipleOf]:
        return [MultipleOf(1)]

    @staticmethod
    def get_builder_cls() -> type[KpoolTailMetadataBuilder]:
        """Class that builds the metadata of a ring group."""
        return KpoolTailMetadataBuilder

    @staticmethod
    def get_kv_cache_shape(
        num_blocks: int, block_size: int, num_kv_heads: int, head_size: int, cache_dtype_str: str = "auto"
    ) -> tuple[int, ...]:
        """Logical page shape, block outermost: `(blocks, heads, rows, channels)`."""
        return (num_blocks, num_kv_heads, block_size, head_size)
