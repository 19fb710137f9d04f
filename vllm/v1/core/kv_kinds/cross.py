"""Cross attention: blocks for the encoder's output, as many as its tokens need, never found by hash. Layer: L3.

Encoder-only attention keeps nothing: the whole input is computed at once.
"""

from __future__ import annotations

from collections.abc import Sequence

from vllm.v1.core.block_hash import BlockHash
from vllm.v1.core.block_pool import BlockPool
from vllm.v1.core.kv_cache_block import KVCacheBlock
from vllm.v1.core.kv_kinds.base import UNLIMITED_SLOTS, SingleTypeKVCacheManager
from vllm.v1.kv_cache_interface import KVCacheSpec


class CrossAttentionManager(SingleTypeKVCacheManager):
    """Sizes count encoder tokens (`counts_encoder_tokens`), which are all there from the first step on."""

    supports_prefix_lookup = False
    counts_encoder_tokens = True

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
        """Raises: the hashes describe decoder tokens, which say nothing about the encoder's."""
        raise RuntimeError("cross-attention blocks are never looked up by hash")

    def num_slots(self, request_id: str) -> int:
        """The blocks hold encoder outputs, whose number does not change."""
        return UNLIMITED_SLOTS

    def add_local_computed_blocks(
        self,
        request_id: str,
        new_computed_blocks: Sequence[KVCacheBlock],
        num_local_computed_tokens: int,
        num_external_computed_tokens: int = 0,
    ) -> None:
        """Nothing can have been hit."""

    def allocate_external_computed_blocks(
        self,
        request_id: str,
        num_local_computed_tokens: int,
        num_external_computed_tokens: int,
        record_for_zeroing: bool = True,
    ) -> list[KVCacheBlock]:
        """Computed decoder tokens need no blocks here."""
        return []


class EncoderOnlyAttentionManager(CrossAttentionManager):
    """No block is ever held, as the spec's size says."""

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
        """None."""
        return 0

    def allocate_new_blocks(
        self,
        request_id: str,
        num_tokens: int,
        num_tokens_main_model: int,
        total_computed_tokens: int = 0,
        prefill_end: int = 0,
    ) -> list[KVCacheBlock]:
        """None."""
        return []
