"""Scratch of a fixed number of blocks per request: rings and hot rows. Never hashed, never shared. Layer: L3.

The worker overwrites the blocks in place; which row a position takes is the worker's affair.
"""

from __future__ import annotations

from collections.abc import Sequence

from vllm.v1.core.block_hash import BlockHash
from vllm.v1.core.block_pool import BlockPool
from vllm.v1.core.kv_cache_block import KVCacheBlock
from vllm.v1.core.kv_kinds.base import UNLIMITED_SLOTS, SingleTypeKVCacheManager
from vllm.v1.kv_cache_interface import HiSparseHotSpec, HiSparseResidentSpec, KVCacheSpec


class ScratchManager(SingleTypeKVCacheManager):
    """Blocks whose content means nothing to another request."""

    supports_prefix_lookup = False

    @classmethod
    def find_longest_cache_hit(
        cls,
        block_hashes: Sequence[BlockHash],
        max_length: int,
        kv_cache_group_ids: Sequence[int],
        block_pool: BlockPool,
        kv_cache_spec: KVCacheSpec,
        drop_eagle_block: bool,
        alignment_tokens: int,
        dcp_world_size: int = 1,
        pcp_world_size: int = 1,
    ) -> tuple[tuple[list[KVCacheBlock], ...], int]:
        """Never hits."""
        return tuple([] for _ in kv_cache_group_ids), 0


class FixedScratchManager(ScratchManager):
    """`blocks_per_request` blocks from the first allocation to the end of the request."""

    @property
    def blocks_per_request(self) -> int:
        """How many blocks each request holds."""
        return 1

    def get_num_blocks_to_allocate(
        self,
        request_id: str,
        num_tokens: int,
        new_computed_blocks: Sequence[KVCacheBlock],
        total_computed_tokens: int,
        num_local_computed_tokens: int,
        num_tokens_main_model: int,
        apply_admission_cap: bool = False,
        prefill_end: int = 0,
    ) -> int:
        """The whole share of a new request, nothing afterwards."""
        return self.blocks_per_request - len(self.req_to_blocks.get(request_id, ()))

    def allocate_external_computed_blocks(
        self,
        request_id: str,
        num_local_computed_tokens: int,
        num_external_computed_tokens: int,
        record_for_zeroing: bool = True,
    ) -> list[KVCacheBlock]:
        """A load may bring scratch content too, so the share is allocated before it."""
        if num_external_computed_tokens == 0:
            return []
        return self.allocate_new_blocks(request_id, 0, 0)

    def num_slots(self, request_id: str) -> int:
        """No number of tokens needs more than the share."""
        return UNLIMITED_SLOTS if self.req_to_blocks.get(request_id) else 0

    def allocate_new_blocks(
        self,
        request_id: str,
        num_tokens: int,
        num_tokens_main_model: int,
        total_computed_tokens: int = 0,
        prefill_end: int = 0,
    ) -> list[KVCacheBlock]:
        """The whole share at once."""
        blocks = self.req_to_blocks[request_id]
        fresh = self._new_blocks(self.blocks_per_request - len(blocks))
        blocks += fresh
        return fresh


class CircularBufferManager(FixedScratchManager):
    """A ring: one block per request."""


class HiSparseHotManager(FixedScratchManager):
    """Device blocks for the rows of a host-resident cache that were selected last."""

    @property
    def blocks_per_request(self) -> int:
        spec = self.kv_cache_spec.kind_spec
        if not isinstance(spec, HiSparseHotSpec):
            raise TypeError(f"HiSparseHotManager needs a HiSparseHotSpec, got {type(spec).__name__}")
        return spec.blocks_per_request


class HiSparseResidentManager(ScratchManager):
    """Device blocks for tokens in flight; computed tokens live on the host and need no block here."""

    @classmethod
    def admission_cap(
        cls, kv_cache_spec: KVCacheSpec, max_in_flight_tokens: int, max_model_len: int
    ) -> int | None:
        spec = kv_cache_spec.kind_spec
        if not isinstance(spec, HiSparseResidentSpec):
            raise TypeError(
                f"HiSparseResidentManager needs a HiSparseResidentSpec, got {type(spec).__name__}"
            )
        return spec.max_blocks_held(max_in_flight_tokens, max_model_len)

    def get_num_skipped_tokens(self, num_computed_tokens: int) -> int:
        """Every computed token."""
        return num_computed_tokens
