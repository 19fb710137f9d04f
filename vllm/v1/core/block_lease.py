"""A counted hold on blocks with an owner tag, released exactly once. Layer: L3.

Owns the references it took. It must not know why they are held: requests, transfers and promises use it alike.
"""

from __future__ import annotations

from collections.abc import Sequence
from enum import Enum

from vllm.utils.checks import check
from vllm.v1.core.block_pool import BlockPool
from vllm.v1.core.kv_cache_block import KVCacheBlock


class LeaseState(Enum):
    """HELD → RELEASED (references dropped) | HANDED_OVER (references now belong to someone else)."""

    HELD = "held"
    RELEASED = "released"
    HANDED_OVER = "handed_over"


_HELD = LeaseState.HELD
_NONE: frozenset[int] = frozenset()


class Lease:
    """References to `blocks` of one pool, held for `owner`. Ends exactly once.

        acquire/adopt ──► HELD ──► RELEASED      release()
                            └────► HANDED_OVER   hand_over()

    `split` and `shorten` part a held lease. Null blocks may be among the blocks; they are never counted.
    `in_order`: the blocks are in the order in which they are to be evicted, else the last one is to go first.
    `to_front`: in that order, and the hold is no sign of use, so that blocks go back to the front of the queue even if
    they are cached.
    `evicted`: ids of blocks whose hashes were dropped by id during the hold. Their content is not to be trusted, even
    if the block has a hash again: it may have been written anew.
    """

    __slots__ = ("_blocks", "_pool", "_state", "evicted", "in_order", "owner", "to_front")

    def __init__(
        self, pool: BlockPool, blocks: Sequence[KVCacheBlock], owner: str, *, to_front: bool = False
    ) -> None:
        """Hold `blocks`: adds a reference to each."""
        pool.touch(blocks)
        self._start(pool, list(blocks), owner, to_front, to_front)

    @classmethod
    def adopt(
        cls,
        pool: BlockPool,
        blocks: Sequence[KVCacheBlock],
        owner: str,
        *,
        to_front: bool = False,
        in_order: bool = False,
    ) -> Lease:
        """Take over references that the caller holds, such as those of freshly allocated blocks; a list with them."""
        lease = cls.__new__(cls)
        own = blocks if isinstance(blocks, list) else list(blocks)
        lease._start(pool, own, owner, to_front, in_order or to_front)
        return lease

    def _start(
        self, pool: BlockPool, blocks: list[KVCacheBlock], owner: str, to_front: bool, in_order: bool
    ) -> None:
        self._pool = pool
        self._blocks = blocks
        self._state = _HELD
        self.evicted = _NONE
        self.owner = owner
        self.to_front = to_front
        self.in_order = in_order
        pool.leases[id(self)] = self

    @property
    def blocks(self) -> Sequence[KVCacheBlock]:
        """The blocks held, in order; empty once the lease ended."""
        return self._blocks

    @property
    def state(self) -> LeaseState:
        """Where the lease stands."""
        return self._state

    @property
    def held(self) -> bool:
        """Whether the lease has not ended yet."""
        return self._state is LeaseState.HELD

    def note_evicted(self, block_ids: frozenset[int]) -> None:
        """The pool has dropped the hashes of these held blocks, which may be of this lease."""
        self.evicted |= block_ids.intersection(block.block_id for block in self._blocks)

    def split(self, num_blocks: int) -> Lease:
        """Part off the first `num_blocks` blocks as a lease of the same owner; the rest stays here."""
        self._require_held("split")
        self._require_within(num_blocks)
        blocks = self._blocks[:num_blocks]
        head = Lease.adopt(self._pool, blocks, self.owner, to_front=self.to_front, in_order=self.in_order)
        del self._blocks[:num_blocks]
        head.evicted = self.evicted
        return head

    def shorten(self, num_blocks: int) -> None:
        """Release all but the first `num_blocks` blocks."""
        self._require_held("shortened")
        self._require_within(num_blocks)
        rest = self._blocks[num_blocks:]
        del self._blocks[num_blocks:]
        self._drop(rest)

    def release(self) -> None:
        """Drop the references. Blocks nobody holds then join the free queue so that the last one is evicted first.

        Or the first one: see `in_order`.
        """
        self._drop(self._end(LeaseState.RELEASED))

    def hand_over(self) -> list[KVCacheBlock]:
        """End the lease without dropping references: they now belong to the caller."""
        return self._end(LeaseState.HANDED_OVER)

    def _end(self, state: LeaseState) -> list[KVCacheBlock]:
        self._require_held(state.value)
        blocks, self._blocks = self._blocks, []
        self._state = state
        del self._pool.leases[id(self)]
        return blocks

    def _drop(self, blocks: list[KVCacheBlock]) -> None:
        if not self.in_order:
            blocks.reverse()
        if self.to_front:
            self._pool.free_blocks_to_front(blocks)
        else:
            self._pool.free_blocks(blocks)

    def _require_held(self, action: str) -> None:
        check(
            self._state is LeaseState.HELD,
            f"lease of {self.owner} cannot be {action}: it is {self._state.value}",
        )

    def _require_within(self, num_blocks: int) -> None:
        check(
            0 <= num_blocks <= len(self._blocks),
            f"lease of {self.owner} holds {len(self._blocks)} blocks, cut at {num_blocks}",
        )

    def __repr__(self) -> str:
        ids = [block.block_id for block in self._blocks]
        return f"Lease(owner={self.owner!r}, state={self._state.value}, blocks={ids})"
