"""ARC, the adaptive replacement cache (Megiddo and Modha, FAST 2003), over the slots of a tier.

Owns which slots were wanted once and which again, and the keys of what was evicted lately. It must not know requests,
copies or media. Layer L4.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterable, Iterator, Sequence

from vllm.v1.core.block_hash import BlockHashWithGroupId
from vllm.v1.core.free_block_queue import FreeKVCacheBlockQueue
from vllm.v1.core.kv_cache_block import KVCacheBlock
from vllm.v1.simple_kv_offload.eviction import EvictionQueue, Victims

BLANK, ONCE, AGAIN = range(3)
"""Lists a slot may belong to: without content, wanted once (T1 of the paper), wanted again (T2)."""


class ArcQueue(EvictionQueue):
    """Splits the slots between content that was wanted once and content that was wanted again, and learns the split.

    Keys of evicted content stay as *ghosts* (B1, B2), as many as there are slots at most. A request that wants a
    ghost moves the split towards the list that it was evicted from. Content of a wanted ghost comes back as wanted
    again. A slot belongs to its list while it is held as well; of that list the least recently let go of goes first.

    As in the paper, except that a miss (`missed`) and the store of what was missed are two events, with others between.
    """

    __slots__ = (
        "_coming",
        "_ghosts",
        "_home",
        "_lists",
        "_size",
        "_tie",
        "capacity",
        "num_free_blocks",
        "target",
    )

    hears_misses = True

    def __init__(self, blocks: Sequence[KVCacheBlock]) -> None:
        self.capacity = len(blocks)
        self.num_free_blocks = 0
        self.target = 0.0
        """How many slots the content that was wanted once should have."""
        self._lists = tuple(FreeKVCacheBlockQueue([]) for _ in range(3))
        self._home: dict[int, int] = {}
        self._size = [0, 0, 0]
        # Evicted keys, oldest first, each with whether a request has asked for it since.
        self._ghosts: tuple[OrderedDict[BlockHashWithGroupId, bool], ...] = tuple(
            OrderedDict() for _ in range(3)
        )
        self._tie = False
        self._coming: Sequence[BlockHashWithGroupId | None] = ()
        self.append_n(blocks)

    # -- what requests want -------------------------------------------------------------------

    def missed(self, keys: Iterable[BlockHashWithGroupId]) -> None:
        for key in keys:
            self._tie = False
            for which in (ONCE, AGAIN):
                if key in self._ghosts[which]:
                    self._miss_ghost(key, which)

    def _miss_ghost(self, key: BlockHashWithGroupId, which: int) -> None:
        ghosts = self._ghosts[which]
        if not ghosts[key]:
            once, again = len(self._ghosts[ONCE]), len(self._ghosts[AGAIN])
            if which == ONCE:
                self.target = min(float(self.capacity), self.target + max(1.0, again / once))
            else:
                self.target = max(0.0, self.target - max(1.0, once / again))
        self._tie = which == AGAIN
        ghosts[key] = True
        ghosts.move_to_end(key)

    def used(self, blocks: Iterable[KVCacheBlock]) -> None:
        for block in blocks:
            if block.block_hash is None or block.is_null:
                continue
            is_idle = block.prev_free_block is not None
            if is_idle:
                self.remove(block)
            self._settle(block, AGAIN)
            if is_idle:
                self.append_n((block,))

    # -- slots --------------------------------------------------------------------------------

    def incoming(self, keys: Sequence[BlockHashWithGroupId | None]) -> None:
        self._coming = keys

    def popleft_n(self, n: int) -> list[KVCacheBlock]:
        coming, self._coming = self._coming, ()
        if not 0 <= n <= self.num_free_blocks:
            raise ValueError(f"{n} free blocks wanted, {self.num_free_blocks} left")
        # All homes first: what is evicted on the way must not change what was shown by `victims`.
        homes = [self.home_of(key) for key in coming] or [ONCE] * n
        for key in coming:
            if key is not None:
                self._ghosts[ONCE].pop(key, None)
                self._ghosts[AGAIN].pop(key, None)
        return [self._take(home) for home in homes[:n]]

    def _take(self, home: int) -> KVCacheBlock:
        which = self.next_list(self._size[ONCE], [queue.num_free_blocks > 0 for queue in self._lists])
        block = self._lists[which].popleft()
        self.num_free_blocks -= 1
        if block.block_hash is not None:
            self._ghosts[which][block.block_hash] = False
        self._settle(block, home)
        self._trim()
        return block

    def next_list(self, once: int, has_idle: Sequence[bool]) -> int:
        """The list whose first slot is given away, when so many slots are for content that was wanted once."""
        if has_idle[BLANK]:
            return BLANK
        if not has_idle[AGAIN]:
            return ONCE
        is_over = once > self.target or (self._tie and once == self.target)
        return ONCE if is_over and has_idle[ONCE] else AGAIN

    def home_of(self, key: BlockHashWithGroupId | None) -> int:
        """The list that new content of this key joins."""
        wanted = key is not None and any(ghosts.get(key, False) for ghosts in self._ghosts)
        return AGAIN if wanted else ONCE

    def _settle(self, block: KVCacheBlock, home: int) -> None:
        before = self._home.pop(block.block_id, BLANK)
        if before != BLANK:
            self._size[before] -= 1
        if home != BLANK:
            self._size[home] += 1
            self._home[block.block_id] = home

    def _trim(self) -> None:
        """At most as many ghosts as slots, and of content wanted once no more than fill its share of both."""
        once, again = self._ghosts[ONCE], self._ghosts[AGAIN]
        while once and self._size[ONCE] + len(once) > self.capacity:
            once.popitem(last=False)
        while again and len(once) + len(again) > self.capacity:
            again.popitem(last=False)

    def remove(self, block: KVCacheBlock) -> None:
        self._lists[self._home.get(block.block_id, BLANK)].remove(block)
        self.num_free_blocks -= 1

    def append_n(self, blocks: Sequence[KVCacheBlock]) -> None:
        for block in blocks:
            self._list_for(block).append(block)
        self.num_free_blocks += len(blocks)

    def prepend_n(self, blocks: Sequence[KVCacheBlock]) -> None:
        for block in reversed(blocks):
            self._list_for(block).prepend_n((block,))
        self.num_free_blocks += len(blocks)

    def put_back(self, blocks: Sequence[KVCacheBlock]) -> None:
        self.prepend_n(blocks)

    def _list_for(self, block: KVCacheBlock) -> FreeKVCacheBlockQueue:
        """The list of a slot that nobody holds any more."""
        home = self._home.get(block.block_id, BLANK)
        if block.prev_free_block is None and (block.block_hash is None) != (home == BLANK):
            home = BLANK if block.block_hash is None else ONCE
            self._settle(block, home)
        return self._lists[home]

    def clear(self) -> None:
        idle = [block for queue in self._lists for block in queue.popleft_n(queue.num_free_blocks)]
        for ghosts in self._ghosts:
            ghosts.clear()
        self._home.clear()
        self._size = [0, 0, 0]
        self.target, self._tie = 0.0, False
        self.num_free_blocks = 0
        self.append_n(idle)

    # -- views --------------------------------------------------------------------------------

    def victims(self) -> Victims:
        return _ArcVictims(self, self._size[ONCE], [queue.iter_blocks_after(None) for queue in self._lists])

    def get_all_free_blocks(self) -> list[KVCacheBlock]:
        return list(self.iter_blocks_after(None))

    def iter_blocks_after(self, cursor: KVCacheBlock | None) -> Iterator[KVCacheBlock]:
        """In the order in which content that nobody has asked for before would take the slots."""
        if cursor is not None and cursor.next_free_block is None:
            raise RuntimeError(f"block {cursor.block_id} is not in the free queue")
        victims = self.victims()
        is_behind = cursor is None
        while (block := victims.peek()) is not None:
            victims.take(None)
            if is_behind:
                yield block
            is_behind = is_behind or block is cursor

    @property
    def sizes(self) -> tuple[int, int, int, int]:
        """Slots wanted once and again, held ones included, and ghosts of either."""
        return self._size[ONCE], self._size[AGAIN], len(self._ghosts[ONCE]), len(self._ghosts[AGAIN])


class _ArcVictims(Victims):
    """The queue's own choice, replayed on copies of what it depends on."""

    def __init__(self, queue: ArcQueue, once: int, lists: Sequence[Iterator[KVCacheBlock]]) -> None:
        self._queue = queue
        self._once = once
        self._lists = lists
        self._next = [next(blocks, None) for blocks in lists]

    @property
    def _which(self) -> int:
        return self._queue.next_list(self._once, [block is not None for block in self._next])

    def peek(self) -> KVCacheBlock | None:
        return self._next[self._which]

    def take(self, key: BlockHashWithGroupId | None) -> None:
        which = self._which
        self._once -= which == ONCE
        self._once += self._queue.home_of(key) == ONCE
        self._next[which] = next(self._lists[which], None)
