"""Sliding window (also latent rows): only the trailing window of a prefix is needed. Layer: L3.

A window that is replayed after a hit (`bounded_replay`) is the same kind with caching off: its spec says so.
"""

from __future__ import annotations

from collections.abc import Sequence

from vllm.utils.math_utils import cdiv, round_down
from vllm.v1.core.block_hash import BlockHash
from vllm.v1.core.block_pool import BlockPool
from vllm.v1.core.kv_cache_block import KVCacheBlock
from vllm.v1.core.kv_kinds.base import SingleTypeKVCacheManager
from vllm.v1.core.kv_kinds.tails import effective_block_size, tail_mask
from vllm.v1.kv_cache_interface import KVCacheSpec, SlidingWindowSpec


def window_of(kv_cache_spec: KVCacheSpec) -> SlidingWindowSpec:
    """The window spec, also from inside a uniform group. TypeError for another kind."""
    spec = kv_cache_spec.kind_spec
    if not isinstance(spec, SlidingWindowSpec):
        raise TypeError(f"a sliding-window manager needs a SlidingWindowSpec, got {type(spec).__name__}")
    return spec


class SlidingWindowManager(SingleTypeKVCacheManager):
    """Blocks that fell out of the window are null; a hit needs the blocks of one window before its end."""

    supports_retention = True

    @classmethod
    def admission_cap(
        cls, kv_cache_spec: KVCacheSpec, max_in_flight_tokens: int, max_model_len: int
    ) -> int | None:
        return window_of(kv_cache_spec).max_admission_blocks_per_request(max_in_flight_tokens, max_model_len)

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
        """From the right: the last aligned end with a whole window of blocks before it, or all blocks from 0.

        A missing block rules out every end whose window holds it, so the search jumps over them; where nothing is
        cached it looks at one block per window.
        """
        block_size = effective_block_size(kv_cache_spec, dcp_world_size)
        window = _window_blocks(kv_cache_spec, block_size)
        extra = 1 if drop_eagle_block else 0
        known: dict[int, list[KVCacheBlock]] = {}

        def lookup(index: int) -> bool:
            if index not in known:
                found = block_pool.get_cached_block(block_hashes[index], kv_cache_group_ids)
                if found is None:
                    return False
                known[index] = found
            return True

        limit = min(max_length // block_size, len(block_hashes)) - extra
        end = _aligned(limit, block_size, alignment_tokens)
        while end > 0:
            start = max(0, end - window)
            missing = next((i for i in range(start, end + extra) if not lookup(i)), None)
            if missing is None:
                return _columns(known, start, end, len(kv_cache_group_ids), block_pool.null_block), (
                    end * block_size
                )
            end = _aligned(missing - extra, block_size, alignment_tokens)
        return tuple([] for _ in kv_cache_group_ids), 0

    def get_num_skipped_tokens(self, num_computed_tokens: int) -> int:
        """All but the tokens that the next one may read, and those kept for drafts that are taken back."""
        return max(0, num_computed_tokens - window_of(self.kv_cache_spec).num_retained_tokens)

    @classmethod
    def reachable_block_mask(
        cls,
        start_block: int,
        end_block: int,
        alignment_tokens: int,
        kv_cache_spec: KVCacheSpec,
        use_eagle: bool,
        retention_interval: int | None = None,
        reachable_boundaries: Sequence[int] = (),
        dcp_world_size: int = 1,
        final_segment_end_block: int | None = None,
    ) -> list[bool] | None:
        """The window before each end that a hit may have, and with EAGLE the block after it, which is dropped."""
        block_size = effective_block_size(kv_cache_spec, dcp_world_size)
        return tail_mask(
            range(start_block, end_block),
            block_size,
            alignment_tokens,
            before=_window_blocks(kv_cache_spec, block_size),
            after=1 if use_eagle else 0,
            retention=(retention_interval, reachable_boundaries, final_segment_end_block),
        )


def _window_blocks(kv_cache_spec: KVCacheSpec, block_size: int) -> int:
    """Blocks that hold the tokens a position reads before itself."""
    return cdiv(window_of(kv_cache_spec).sliding_window - 1, block_size)


def _aligned(end_block: int, block_size: int, alignment_tokens: int) -> int:
    """The last block end at or before `end_block` whose tokens are a multiple of the alignment."""
    return round_down(max(0, end_block) * block_size, alignment_tokens) // block_size


def _columns(
    known: dict[int, list[KVCacheBlock]], start: int, end: int, num_groups: int, null_block: KVCacheBlock
) -> tuple[list[KVCacheBlock], ...]:
    head = [null_block] * start
    return tuple([*head, *(known[i][group] for i in range(start, end))] for group in range(num_groups))
