"""Blocks of a shared pool that take several slots: which slots belong together, and a look ahead that knows of them.

The first slot of such a block has its keys and is the one that leases, plans and orders name; the others are its
*companions*, held and let go of with it. Owns that table; it must not know files, engines or requests. Layer L4.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from itertools import islice

from vllm.utils.checks import check
from vllm.v1.core.block_hash import BlockHashWithGroupId, get_group_id
from vllm.v1.core.kv_cache_block import KVCacheBlock
from vllm.v1.simple_kv_offload.eviction import Victims

NO_COMPANIONS: Mapping[int, Sequence[int]] = {}


class WideBlocks:
    """Which slots are companions of which. ``widths``: by group, how many slots its blocks take; empty = one each."""

    def __init__(self, blocks: Sequence[KVCacheBlock], widths: Sequence[int] = ()) -> None:
        self.widths = tuple(widths)
        self.exist = any(width > 1 for width in self.widths)
        """Whether any block takes several slots."""
        self.held: set[int] = set()
        """First slots of those that this engine holds: they stay together until it lets go of them."""
        self._blocks = blocks
        self._companions: dict[int, tuple[int, ...]] = {}
        self._first: dict[int, int] = {}

    def width(self, key: BlockHashWithGroupId | None) -> int:
        """How many slots content of this key takes."""
        return 1 if key is None or not self.exist else self.widths[get_group_id(key)]

    def companions(self, first: int) -> tuple[int, ...]:
        """The further slots of a block, in order."""
        return self._companions.get(first, ())

    def first_of(self, slot: int) -> int:
        """The slot that has the keys of what this one holds."""
        return self._first.get(slot, slot)

    def join(self, first: int, companions: tuple[int, ...]) -> None:
        """From now on these are the companions of that slot."""
        if self._companions.get(first, ()) == companions:
            return
        check(first not in self.held, f"slot {first} is held and gets other companions")
        self.part(first)
        if companions:
            self._companions[first] = companions
            self._first.update(dict.fromkeys(companions, first))

    def part(self, first: int) -> None:
        """The slots are no block any more, unless this engine holds it."""
        if first in self.held:
            return
        for slot in self._companions.pop(first, ()):
            if self._first.get(slot) == first:
                del self._first[slot]

    def part_all(self) -> None:
        """So are all."""
        for first in list(self._companions):
            self.part(first)

    def with_companions(self, blocks: Iterable[KVCacheBlock]) -> list[KVCacheBlock]:
        """The blocks, each behind its companions: the order in which they are let go of, and evicted."""
        if not self._companions:
            return list(blocks)
        found: list[KVCacheBlock] = []
        for block in blocks:
            found += [self._blocks[slot] for slot in self._companions.get(block.block_id, ())]
            found.append(block)
        return found

    def note_held(self, blocks: Iterable[KVCacheBlock], is_held: Callable[[KVCacheBlock], bool]) -> None:
        """References of these first slots have changed. Slots that nobody can find nor holds here part."""
        if not self._companions:
            return
        for block in blocks:
            first = block.block_id
            if first not in self._companions:
                continue
            if is_held(block):
                self.held.add(first)
                continue
            self.held.discard(first)
            if block.block_hash is None:
                self.part(first)


class CompanionHold:
    """What is held as companions, as a recount of a pool's references sees it: as often as the first slots."""

    owner = "companions"
    to_front = False

    def __init__(self, wide: WideBlocks, blocks: Sequence[KVCacheBlock], own: Callable[[int], int]) -> None:
        """``own``: this engine's references to a slot."""
        self._wide, self._blocks, self._own = wide, blocks, own

    @property
    def blocks(self) -> Sequence[KVCacheBlock]:
        """The companions."""
        return [
            self._blocks[slot]
            for first in sorted(self._wide.held)
            for slot in self._wide.companions(first)
            for _ in range(self._own(first))
        ]

    def note_evicted(self, block_ids: frozenset[int]) -> None:
        """Nothing is committed into a companion."""


class WideVictims(Victims):
    """The slots of a queue, in order, as what they hold: of a companion, the first slot of its block."""

    def __init__(
        self, queue: Iterator[KVCacheBlock], wide: WideBlocks, blocks: Sequence[KVCacheBlock]
    ) -> None:
        self._queue, self._wide, self._blocks = queue, wide, blocks
        self._ahead: deque[KVCacheBlock] = deque()

    def peek(self) -> KVCacheBlock | None:
        return next(iter(self.peek_for(None)), None)

    def peek_for(self, key: BlockHashWithGroupId | None) -> Sequence[KVCacheBlock]:
        width = self._wide.width(key)
        found = self._look(width)
        return found if len(found) == width else ()

    def peek_widest(self) -> Sequence[KVCacheBlock]:
        return self._look(max(self._wide.widths))

    def _look(self, count: int) -> Sequence[KVCacheBlock]:
        self._ahead.extend(islice(self._queue, max(0, count - len(self._ahead))))
        return [self._blocks[self._wide.first_of(slot.block_id)] for slot in islice(self._ahead, count)]

    def take(self, key: BlockHashWithGroupId | None) -> None:
        for _ in self.peek_for(key):
            self._ahead.popleft()
