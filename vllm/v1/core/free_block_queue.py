"""The ordered list of blocks nobody holds; the front is handed out, and so evicted, first. Layer: L3.

Owns the links inside the block records. It must not know references or requests, nor more of hashes than whether a
block has one.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING, Protocol

from vllm.utils.native_core import native_core
from vllm.v1.core.kv_cache_block import KVCacheBlock


class FreeQueue(Protocol):
    """What a pool asks of the order in which it hands out blocks that nobody holds."""

    num_free_blocks: int

    def popleft_n(self, n: int) -> list[KVCacheBlock]: ...

    def remove(self, block: KVCacheBlock) -> None: ...

    def append_n(self, blocks: Sequence[KVCacheBlock]) -> None: ...

    def prepend_n(self, blocks: Sequence[KVCacheBlock]) -> None: ...

    def put_back(self, blocks: Sequence[KVCacheBlock]) -> None: ...

    def clear(self) -> None: ...

    def get_all_free_blocks(self) -> list[KVCacheBlock]: ...

    def iter_blocks_after(self, cursor: KVCacheBlock | None) -> Iterator[KVCacheBlock]: ...


class PythonLinkedQueue:
    """The operations on the links; the native queue has the same. A block is queued if and only if its links are set.

    `last_blank` is the last of the blocks in front that are known to have no hash, the head sentinel without any: so
    that nobody has to walk over them. Blocks behind it may have lost their hash while they were queued.
    """

    __slots__ = (
        "_ages",
        "_next_age",
        "fake_free_list_head",
        "fake_free_list_tail",
        "last_blank",
        "num_free_blocks",
    )

    def __init__(self, head: KVCacheBlock, tail: KVCacheBlock, blocks: Sequence[KVCacheBlock]) -> None:
        self.num_free_blocks = 0
        self.fake_free_list_head = head
        self.fake_free_list_tail = tail
        self.last_blank = head
        self._ages: dict[int, int] | None = None  # by block id, of those that came to the tail
        self._next_age = 1
        head.next_free_block = tail
        tail.prev_free_block = head
        self.prepend_n(blocks)

    def popleft(self) -> KVCacheBlock:
        """Take the block at the front. ValueError when the queue is empty."""
        return self.popleft_n(1)[0]

    def popleft_n(self, n: int) -> list[KVCacheBlock]:
        """Take `n` blocks from the front, in order. ValueError, and no change, if there are fewer."""
        if not 0 <= n <= self.num_free_blocks:
            raise ValueError(f"{n} free blocks wanted, {self.num_free_blocks} left")
        head = self.fake_free_list_head
        taken: list[KVCacheBlock] = []
        block = head.next_free_block
        for _ in range(n):
            assert block is not None
            following = block.next_free_block
            block.prev_free_block = block.next_free_block = None
            taken.append(block)
            block = following
        assert block is not None
        head.next_free_block = block
        block.prev_free_block = head
        if self.last_blank.next_free_block is None:
            self.last_blank = head
        self.num_free_blocks -= n
        return taken

    def remove(self, block: KVCacheBlock) -> None:
        """Take `block` out of the middle. RuntimeError if it is not queued."""
        before, after = block.prev_free_block, block.next_free_block
        if before is None or after is None:
            raise RuntimeError(f"block {block.block_id} is not in the free queue")
        before.next_free_block = after
        after.prev_free_block = before
        block.prev_free_block = block.next_free_block = None
        if block is self.last_blank:
            self.last_blank = before if before.block_hash is None else self.fake_free_list_head
        self.num_free_blocks -= 1

    def append(self, block: KVCacheBlock) -> None:
        """Put `block` at the tail: it is handed out last."""
        self.append_n((block,))

    def append_n(self, blocks: Sequence[KVCacheBlock]) -> None:
        """Put `blocks` at the tail, in order."""
        last = self.fake_free_list_tail.prev_free_block
        assert last is not None
        self.insert_n_after(last, blocks)
        if self._ages is not None:
            self._start_ages(blocks)

    def prepend_n(self, blocks: Sequence[KVCacheBlock]) -> None:
        """Put `blocks` at the front, in order: the first of them is handed out next."""
        head = self.fake_free_list_head
        self.insert_n_after(head, blocks)
        if self.last_blank is head:
            for block in blocks:
                if block.block_hash is not None:
                    break
                self.last_blank = block

    def put_back(self, blocks: Sequence[KVCacheBlock]) -> None:
        """Put `blocks` at the front, in order, but behind blocks there without a hash: reusing those costs nothing.

        Walks only over blocks that have joined them since the last time.
        """
        self.insert_n_after(self._find_last_blank(), blocks)

    def put_by_age(self, blocks: Sequence[KVCacheBlock]) -> None:
        """As `put_back`, but each behind what came to the tail before it, as far as that still is where it was.

        So blocks that come back in the order in which they were queued get their old places. Nothing is known of the
        ages of blocks before `keep_ages`.
        """
        ages = {} if self._ages is None else self._ages
        tail, last = self.fake_free_list_tail, self._find_last_blank()
        for block in blocks:
            age, following = ages.get(block.block_id, 0), last.next_free_block
            while following is not None and following is not tail and ages.get(following.block_id, 0) < age:
                last, following = following, following.next_free_block
            self.insert_n_after(last, (block,))
            last = block

    def keep_ages(self, num_blocks: int) -> None:
        """Remember from now on in which order blocks came to the tail; those of now came in their order.

        Ids of blocks are below `num_blocks`.
        """
        if num_blocks < 0:
            raise ValueError(f"ages of {num_blocks} blocks")
        if self._ages is None:
            self._ages = {}
            self._start_ages(self.get_all_free_blocks())

    def _start_ages(self, blocks: Sequence[KVCacheBlock]) -> None:
        assert self._ages is not None
        for block in blocks:
            self._ages[block.block_id] = self._next_age
            self._next_age += 1

    def _find_last_blank(self) -> KVCacheBlock:
        tail, following = self.fake_free_list_tail, self.last_blank.next_free_block
        while following is not None and following is not tail and following.block_hash is None:
            self.last_blank = following
            following = following.next_free_block
        return self.last_blank

    def look_again(self) -> None:
        """A queued block may have got a hash where it is: `put_back` walks from the front next time."""
        self.last_blank = self.fake_free_list_head

    def clear(self) -> None:
        """No queued block has a hash any more."""
        last = self.fake_free_list_tail.prev_free_block
        assert last is not None
        self.last_blank = last

    def insert_n_after(self, cursor: KVCacheBlock, blocks: Sequence[KVCacheBlock]) -> None:
        """Put `blocks` behind `cursor`, a queued block or the head sentinel, in order.

        RuntimeError if one of them is queued already, or `cursor` is not.
        """
        following = cursor.next_free_block
        if following is None:
            raise RuntimeError("the place to insert at is not in the free queue")
        last = cursor
        for block in blocks:
            if block.prev_free_block is not None:
                raise RuntimeError(f"block {block.block_id} is already in the free queue")
            block.prev_free_block = last
            last.next_free_block = block
            last = block
        last.next_free_block = following
        following.prev_free_block = last
        self.num_free_blocks += len(blocks)

    def get_all_free_blocks(self) -> list[KVCacheBlock]:
        """All queued blocks from front to tail. Walks the whole queue."""
        return list(self.iter_blocks_after(None))

    def iter_blocks_after(self, cursor: KVCacheBlock | None) -> Iterator[KVCacheBlock]:
        """Queued blocks behind `cursor` (from the front if None), in eviction order.

        `cursor` must be queued, else RuntimeError. The queue must not change while the iterator runs.
        """
        if cursor is not None and cursor.next_free_block is None:
            raise RuntimeError(f"block {cursor.block_id} is not in the free queue")
        return self._walk(cursor or self.fake_free_list_head)

    def _walk(self, start: KVCacheBlock) -> Iterator[KVCacheBlock]:
        tail = self.fake_free_list_tail
        block = start.next_free_block
        while block is not None and block is not tail:
            yield block
            block = block.next_free_block


if TYPE_CHECKING:
    LinkedQueue = PythonLinkedQueue
else:
    LinkedQueue = PythonLinkedQueue if native_core is None else native_core.FreeQueue


class FreeKVCacheBlockQueue(LinkedQueue):
    """Doubly linked through the blocks themselves: every operation is O(1) per block and allocates no nodes.

    `fake_free_list_head` and `fake_free_list_tail` are sentinels with id -1, so that no operation has a special
    case at the ends.
    """

    __slots__ = ()

    def __init__(self, blocks: Sequence[KVCacheBlock]) -> None:
        super().__init__(KVCacheBlock(block_id=-1), KVCacheBlock(block_id=-1), blocks)


def is_plain(queue: FreeQueue) -> bool:
    """Whether blocks are taken and removed as `FreeKVCacheBlockQueue` does: by its links alone."""
    plain: object = FreeKVCacheBlockQueue  # an object: the methods are compared, not typed
    return isinstance(queue, FreeKVCacheBlockQueue) and all(
        getattr(type(queue), name) is getattr(plain, name) for name in ("popleft_n", "remove")
    )
