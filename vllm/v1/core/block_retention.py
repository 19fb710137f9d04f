"""Keeps what requests asked to be kept: where freed blocks go in the queue, by the level of their content. Layer: L3.

Owns the holds that requests left behind, keyed by content, and the places of blocks that are not ordinary. Everything
stays in the free queue: what is held is handed out last, never kept back, so that no allocation waits for it. A pool
without hints has none of this. It must not know requests, groups or tiers.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Container, Iterable, Sequence, Set
from dataclasses import dataclass
from heapq import heapify, heappop, heappush
from math import inf

from vllm.kv_retention import RetentionHint, RetentionLevel
from vllm.utils.checks import check
from vllm.utils.clock import Clock
from vllm.v1.core.block_hash import BlockHashWithGroupId
from vllm.v1.core.block_pool import BlockPool
from vllm.v1.core.free_block_queue import FreeKVCacheBlockQueue
from vllm.v1.core.kv_cache_block import KVCacheBlock

TRIES = 64
"""Old claims on contents that are still there, looked at in vain for one new hold when the limit is reached."""
Name = tuple[str | None, str]
"""A prompt's name within its scope: names of different cache salts never meet."""


@dataclass(slots=True, eq=False)
class Hold:
    """One request's claim on contents, shortest prefix first, until it expires (seconds of the clock)."""

    level: RetentionLevel
    expires_at: float
    keys: list[BlockHashWithGroupId]
    names: tuple[Name, ...]
    hold_id: int


class BlockRetention:
    """Levels of a pool's contents. At most ``share`` of the blocks may be protected; what is beyond that is refused.

    The free queue is, from the front: blocks without content, low, ordinary, high, pinned; each part in the order in
    which its blocks came. A content belongs to one hold: the one with the higher level, then the later expiry.
    ``expected`` contains contents that are on their way into the pool.
    """

    def __init__(
        self,
        pool: BlockPool,
        share: float,
        clock: Clock,
        expected: Container[BlockHashWithGroupId] = frozenset(),
    ) -> None:
        check(can_retain(pool), "this pool's order of eviction has no levels")
        assert isinstance(pool.free_block_queue, FreeKVCacheBlockQueue)
        self._pool = pool
        self._queue = pool.free_block_queue
        self._clock = clock
        self._expected = expected
        self.limit = int(share * (pool.num_gpu_blocks - 1))
        self.num_protected = 0
        """Contents that outlive ordinary ones now."""
        self.num_refused = 0
        """Contents that were to be protected beyond the limit, so far."""
        self._owners: OrderedDict[BlockHashWithGroupId, Hold] = OrderedDict()
        self._by_name: dict[Name, list[Hold]] = {}
        self._holds: OrderedDict[int, Hold] = OrderedDict()
        self._expiries: list[tuple[float, int]] = []
        self._next_id = 0
        self._tries = 0
        # Blocks of a level in the order of the queue; one that somebody holds has left the queue meanwhile.
        self._places: dict[RetentionLevel, OrderedDict[int, KVCacheBlock]] = {
            level: OrderedDict() for level in RetentionLevel if level is not RetentionLevel.NORMAL
        }

    # Hints

    def hold(
        self, contents: Iterable[tuple[int, BlockHashWithGroupId]], hint: RetentionHint, scope: str | None
    ) -> None:
        """A request ended and left these contents, each with the prefix tokens it covers."""
        self.expire()
        keys = [key for _, key in sorted(contents)]
        names = [(scope, name) for name in (hint.name, hint.superseded_by) if name is not None]
        if hint.name is not None:
            self._supersede((scope, hint.name), set(keys))
        if hint.level is RetentionLevel.NORMAL and hint.ttl_s is None and not names:
            return
        expires_at = inf if hint.ttl_s is None else self._clock.monotonic() + hint.ttl_s
        self._next_id += 1
        hold = Hold(hint.level, expires_at, keys, tuple(names), self._next_id)
        self._tries = TRIES
        for key in keys:
            self._claim(key, hold)
        self._register(hold)
        if hint.level is not RetentionLevel.NORMAL:
            self._move(hold, self.place)

    def level_of(self, key: BlockHashWithGroupId) -> RetentionLevel:
        """The level of a content."""
        hold = self._owners.get(key)
        return RetentionLevel.NORMAL if hold is None else hold.level

    def expire(self) -> None:
        """End the holds whose time is over: what is idle of their contents goes first from now on."""
        if not self._expiries:
            return
        now = self._clock.monotonic()
        while self._expiries and self._expiries[0][0] <= now:
            hold = self._holds.get(heappop(self._expiries)[1])
            if hold is not None:
                self._end(hold, frozenset())

    def clear(self) -> None:
        """All contents of the pool are gone."""
        self._owners.clear()
        self._by_name.clear()
        self._holds.clear()
        self._expiries.clear()
        self.num_protected = 0
        for places in self._places.values():
            places.clear()

    def _claim(self, key: BlockHashWithGroupId, hold: Hold) -> None:
        owner = self._owners.get(key)
        if owner is not None and (owner.level, owner.expires_at) > (hold.level, hold.expires_at):
            return
        was_protected = owner is not None and owner.level.is_protected
        if hold.level.is_protected and not was_protected:
            if self.num_protected >= self.limit and not self._drop_vanished(hold):
                self.num_refused += 1
                return
            self.num_protected += 1
        self._owners[key] = hold
        self._owners.move_to_end(key)

    def _drop_vanished(self, asking: Hold) -> bool:
        """Look whether some of the oldest claims of others are on contents that were evicted, and drop those."""
        before = self.num_protected
        for _ in range(min(8, len(self._owners))):
            if self._tries <= 0:
                break
            key = next(iter(self._owners))
            is_own = self._owners[key] is asking
            if is_own or key in self._expected or self._pool.index.map.get_one_block(key) is not None:
                self._owners.move_to_end(key)
                self._tries -= 1
            else:
                self._disown(key)
        return self.num_protected < before

    def _register(self, hold: Hold) -> None:
        self._holds[hold.hold_id] = hold
        if hold.expires_at < inf:
            heappush(self._expiries, (hold.expires_at, hold.hold_id))
            if len(self._expiries) > 2 * len(self._holds) + 64:
                self._expiries = [
                    (one.expires_at, one.hold_id) for one in self._holds.values() if one.expires_at < inf
                ]
                heapify(self._expiries)
        for name in hold.names:
            self._by_name.setdefault(name, []).append(hold)
        # Bounded by the pool: the oldest claims are the first that are forgotten.
        while len(self._owners) > self._pool.num_gpu_blocks:
            self._disown(next(iter(self._owners)))
        while len(self._holds) > self._pool.num_gpu_blocks:
            self._forget(next(iter(self._holds.values())))

    def _supersede(self, name: Name, still_wanted: set[BlockHashWithGroupId]) -> None:
        for hold in self._by_name.pop(name, ()):
            self._end(hold, still_wanted)

    def _end(self, hold: Hold, spared: Set[BlockHashWithGroupId]) -> None:
        """Drop the hold; what it alone kept goes to the front."""
        self._move(hold, self._put_in_front, spared)
        self._forget(hold)

    def _move(
        self,
        hold: Hold,
        put: Callable[[Sequence[KVCacheBlock]], None],
        spared: Set[BlockHashWithGroupId] = frozenset(),
    ) -> None:
        """Give the idle blocks of the hold's own contents another place, longest prefix first."""
        idle: list[KVCacheBlock] = []
        for key in reversed(hold.keys):
            if self._owners.get(key) is not hold or key in spared:
                continue
            block = self._pool.index.map.get_one_block(key)
            if block is not None and block.ref_cnt == 0 and block.block_hash == key:
                self._queue.remove(block)
                idle.append(block)
        if idle:
            self.leave(idle)
            put(idle)

    def _forget(self, hold: Hold) -> None:
        for key in hold.keys:
            if self._owners.get(key) is hold:
                self._disown(key)
        for name in hold.names:
            others = [other for other in self._by_name.pop(name, ()) if other is not hold]
            if others:
                self._by_name[name] = others
        self._holds.pop(hold.hold_id, None)

    def _disown(self, key: BlockHashWithGroupId) -> None:
        if self._owners.pop(key).level.is_protected:
            self.num_protected -= 1

    # Places in the queue

    def place(self, blocks: Sequence[KVCacheBlock]) -> None:
        """Queue cached blocks that nobody holds any more, each in the part of its level, in the order given."""
        if not self._owners and not any(self._places.values()):
            self._queue.append_n(blocks)
            return
        ordinary: list[KVCacheBlock] = []
        by_level: dict[RetentionLevel, list[KVCacheBlock]] = {}
        find, normal = self._owners.get, RetentionLevel.NORMAL
        for block in blocks:
            key = block.block_hash
            hold = None if key is None else find(key)
            if hold is None or hold.level is normal:
                ordinary.append(block)
            else:
                by_level.setdefault(hold.level, []).append(block)
        if ordinary:
            self._insert(normal, ordinary)
        for level, those in by_level.items():
            self._insert(level, those)

    def place_protected(self, blocks: Sequence[KVCacheBlock]) -> list[KVCacheBlock]:
        """Queue those whose content is protected, though they were to go first; the others are returned.

        They are the first of their level to go, in the order given: being copied changes no place.
        """
        levels = [
            RetentionLevel.NORMAL if block.block_hash is None else self.level_of(block.block_hash)
            for block in blocks
        ]
        for level in (RetentionLevel.HIGH, RetentionLevel.PINNED):
            those = [block for block, own in zip(blocks, levels, strict=True) if own is level]
            if those:
                self._insert_below(level, those, in_front=True)
                places = self._places[level]
                for block in reversed(those):
                    places[block.block_id] = block
                    places.move_to_end(block.block_id, last=False)
        return [block for block, level in zip(blocks, levels, strict=True) if not level.is_protected]

    def leave(self, blocks: Sequence[KVCacheBlock]) -> None:
        """These blocks have left the queue, and get other places."""
        for places in self._places.values():
            if places:
                for block in blocks:
                    places.pop(block.block_id, None)

    def _insert(self, level: RetentionLevel, blocks: list[KVCacheBlock]) -> None:
        if level is RetentionLevel.LOW:
            last = self._at_end_of(level, first=False)
            if last is None:
                self._put_in_front(blocks)
            else:
                self._queue.insert_n_after(last, blocks)
        else:
            self._insert_below(level, blocks)
        if level is not RetentionLevel.NORMAL:
            self._places[level].update((block.block_id, block) for block in blocks)

    def _insert_below(
        self, level: RetentionLevel, blocks: list[KVCacheBlock], *, in_front: bool = False
    ) -> None:
        """Before the first block of a higher level (``in_front``: of its own one), else at the tail."""
        for higher in (RetentionLevel.HIGH, RetentionLevel.PINNED):
            is_behind = higher > level or (in_front and higher is level)
            following = self._at_end_of(higher, first=True) if is_behind else None
            if following is not None:
                before = following.prev_free_block
                assert before is not None
                self._queue.insert_n_after(before, blocks)
                return
        self._queue.append_n(blocks)

    def _put_in_front(self, blocks: Sequence[KVCacheBlock]) -> None:
        self._queue.put_back(blocks)

    def _at_end_of(self, level: RetentionLevel, *, first: bool) -> KVCacheBlock | None:
        """The first or last queued block of a level; those of blocks that were taken or emptied are dropped."""
        places = self._places[level]
        while places:
            block = next(iter(places.values()) if first else reversed(places.values()))
            if block.ref_cnt == 0 and block.block_hash is not None:
                return block
            del places[block.block_id]
        return None


def can_retain(pool: BlockPool) -> bool:
    """Whether levels can be kept in the pool's order of eviction."""
    return pool.can_place and isinstance(pool.free_block_queue, FreeKVCacheBlockQueue)
