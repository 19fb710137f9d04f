"""One block's record: id, references, hash, links of the free list. Owns no policy. Layer: L3.

Must not know pools, requests or groups: a block is an entry that the pool and the free list write.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, NamedTuple, Protocol, cast

from vllm.utils.checks import InvariantError
from vllm.utils.native_core import native_core
from vllm.v1.core.block_hash import BlockHashWithGroupId


class BlockOwner(Protocol):
    """The pool a block came from; blocks of several pools may meet in one request."""

    def free_blocks(self, ordered_blocks: Sequence[KVCacheBlock]) -> None: ...

    def touch(self, blocks: Sequence[KVCacheBlock]) -> None: ...


class KVCacheBlock:
    """A slot of the KV pool. Only the pool (and its index and free list) writes the attributes.

    `ref_cnt`: request tables, leases and transfers that hold the block. `block_hash`: primary index key or None.
    `block_hash_num_tokens`: prefix tokens that the primary key covers; not a multiple of the block size where the
    entry ends inside the block. `pool` is None only for records made outside a pool.

    This class is the reference for the native one, which replaces it below: that takes half the memory, holds its pool
    weakly and cannot be subclassed.
    """

    __slots__ = (
        "block_hash",
        "block_hash_num_tokens",
        "block_id",
        "is_null",
        "next_free_block",
        "pool",
        "prev_free_block",
        "ref_cnt",
    )

    def __init__(
        self, block_id: int, ref_cnt: int = 0, *, pool: BlockOwner | None = None, is_null: bool = False
    ) -> None:
        self.block_id = block_id
        self.ref_cnt = ref_cnt
        self.block_hash: BlockHashWithGroupId | None = None
        self.block_hash_num_tokens: int | None = None
        self.prev_free_block: KVCacheBlock | None = None
        self.next_free_block: KVCacheBlock | None = None
        self.is_null = is_null
        self.pool = pool

    @property
    def _block_hash(self) -> BlockHashWithGroupId | None:
        """The name under which outside code reads and assigns the primary key."""
        return self.block_hash

    @_block_hash.setter
    def _block_hash(self, value: BlockHashWithGroupId | None) -> None:
        self.block_hash = value

    def set_block_hash(self, block_hash: BlockHashWithGroupId, num_tokens: int | None = None) -> None:
        """Give the block its primary key; it must not have one."""
        if self.block_hash is not None:
            raise InvariantError(f"block {self.block_id} already has a hash")
        self.block_hash = block_hash
        self.block_hash_num_tokens = num_tokens

    def reset_hash(self) -> None:
        """Forget the primary key."""
        self.block_hash = None
        self.block_hash_num_tokens = None

    def __repr__(self) -> str:
        previous = self.prev_free_block.block_id if self.prev_free_block else None
        following = self.next_free_block.block_id if self.next_free_block else None
        return (
            f"KVCacheBlock(block_id={self.block_id}, ref_cnt={self.ref_cnt}, block_hash={self.block_hash!r}, "
            f"prev_free_block={previous}, next_free_block={following})"
        )


def make_blocks(count: int, pool: BlockOwner) -> list[KVCacheBlock]:
    """Blocks 0 … `count` - 1 of `pool`."""
    if native_core is not None:
        return cast(list[KVCacheBlock], native_core.make_blocks(count, pool))
    return [KVCacheBlock(i, pool=pool) for i in range(count)]


PythonBlock = KVCacheBlock
if native_core is not None and not TYPE_CHECKING:
    KVCacheBlock = native_core.KVCacheBlock


class KVCacheBlockCopy(NamedTuple):
    """Order to the worker: copy all bytes of one block onto another before the forward of the step."""

    src_block_id: int
    dst_block_id: int


def null_head_len(blocks: Sequence[KVCacheBlock]) -> int:
    """How many null blocks the sequence starts with."""
    for index, block in enumerate(blocks):
        if not block.is_null:
            return index
    return len(blocks)


def trim_null_head(blocks: Sequence[KVCacheBlock]) -> Sequence[KVCacheBlock]:
    """The sequence without its leading null blocks; the same object if there are none."""
    head = null_head_len(blocks)
    return blocks[head:] if head else blocks
