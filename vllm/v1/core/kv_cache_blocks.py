"""The blocks of one request, per group: what the manager hands to the scheduler. Layer: L3.

Owns nothing: holding this record does not hold the blocks. Must not know pools or requests.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Literal, overload

from vllm.v1.core.kv_cache_block import KVCacheBlock


@dataclass(slots=True)
class KVCacheBlocks:
    """`blocks[g][i]`: block i of the request in KV cache group g; scratch groups without entries have an empty slot."""

    blocks: tuple[Sequence[KVCacheBlock], ...]

    def __add__(self, other: KVCacheBlocks) -> KVCacheBlocks:
        """Per group, the blocks of self followed by those of `other`."""
        if len(self.blocks) != len(other.blocks):
            raise ValueError(f"{len(self.blocks)} groups + {len(other.blocks)} groups")
        return KVCacheBlocks(
            tuple([*mine, *theirs] for mine, theirs in zip(self.blocks, other.blocks, strict=True))
        )

    @overload
    def get_block_ids(
        self, allow_none: Literal[False] = False, *, group_ids: Iterable[int] | None = None
    ) -> tuple[list[int], ...]: ...

    @overload
    def get_block_ids(
        self, allow_none: bool, *, group_ids: Iterable[int] | None = None
    ) -> tuple[list[int], ...] | None: ...

    def get_block_ids(
        self, allow_none: bool = False, *, group_ids: Iterable[int] | None = None
    ) -> tuple[list[int], ...] | None:
        """Block ids per group (per listed group if `group_ids` is given), null blocks included as 0.

        With `allow_none`, None stands for "no blocks in any of these groups".
        """
        blocks = self.blocks if group_ids is None else tuple(self.blocks[group] for group in group_ids)
        if allow_none and not any(blocks):
            return None
        return tuple([block.block_id for block in group] for group in blocks)

    def get_unhashed_block_ids(self) -> list[int]:
        """Ids of the blocks without a hash, for a single group; ValueError with more groups."""
        if len(self.blocks) != 1:
            raise ValueError(f"get_unhashed_block_ids needs one group, got {len(self.blocks)}")
        return self.get_unhashed_block_ids_all_groups()[0]

    def get_unhashed_block_ids_all_groups(self) -> list[list[int]]:
        """Per group, the ids of the real blocks without a hash."""
        return [
            [block.block_id for block in group if block.block_hash is None and not block.is_null]
            for group in self.blocks
        ]

    def new_empty(self) -> KVCacheBlocks:
        """A record of as many groups, without blocks."""
        return KVCacheBlocks(tuple([] for _ in self.blocks))
