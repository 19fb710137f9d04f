"""A tier's pool whose slots several engines use: this engine's view of a table that all of them change.

Owns the view: which slots others hold, what they hold, and what of this engine's own changes is not written yet. The
table itself (`SlotTable`) is given; this module must not know files, locks or processes. Layer L4.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence, Set
from enum import IntEnum
from itertools import islice
from types import TracebackType
from typing import NamedTuple, Protocol

from vllm.distributed.kv_event_types import MEDIUM_CPU
from vllm.logger import init_logger
from vllm.utils.checks import check
from vllm.v1.core.block_hash import BlockHashWithGroupId
from vllm.v1.core.block_index import StoredBlockInfo
from vllm.v1.core.block_pool import BlockPool
from vllm.v1.core.kv_cache_block import KVCacheBlock
from vllm.v1.simple_kv_offload.eviction import LruQueue, Victims
from vllm.v1.simple_kv_offload.wide_blocks import CompanionHold, WideBlocks, WideVictims

logger = init_logger(__name__)

Keys = tuple[tuple[BlockHashWithGroupId, int | None], ...]
"""Index keys of a slot, each with the prefix tokens it covers."""


class SlotState(IntEnum):
    """What a slot is to the engines: nothing, about to hold its keys, holding them."""

    EMPTY = 0
    STAGED = 1
    FINDABLE = 2


class SlotRecord(NamedTuple):
    """A slot as the table has it. A slot of an earlier epoch is EMPTY. `stamp`: the order of eviction, least first;
    negative ones went to the front, positive ones to the tail. `companions`: further slots with bytes of its content."""

    state: SlotState
    keys: Keys
    held_here: bool
    held_elsewhere: bool
    stamp: int
    companions: tuple[int, ...] = ()


class SlotTable(Protocol):
    """One engine's access to the shared table. All but `acquire` only between `acquire` and `release`."""

    @property
    def num_slots(self) -> int: ...
    @property
    def keys_per_slot(self) -> int: ...
    @property
    def num_parts(self) -> int:
        """How many ranks' different bytes a slot holds."""
        ...

    @property
    def max_width(self) -> int:
        """How many slots the widest block takes."""
        ...

    @property
    def epoch(self) -> int:
        """How often everything was made unfindable."""
        ...

    def acquire(self) -> bool:
        """Keep the other engines out; False if that cannot be had."""
        ...

    def release(self) -> None:
        """Let the others in. What this engine wrote counts as seen by it."""
        ...

    def take_changes(self) -> Iterable[int]:
        """Slots that may have changed since this engine looked last, ascending; at first all that were ever used."""
        ...

    def read(self, slot: int) -> SlotRecord: ...

    def write_content(
        self, slot: int, state: SlotState, keys: Keys, companions: tuple[int, ...] = ()
    ) -> None:
        """Say what a slot is, that this engine holds or that nobody does."""
        ...

    def write_hold(self, slot: int, held: bool, stamp: int) -> None:
        """Say whether this engine holds the slot, and where it is in the order of eviction."""
        ...

    def next_stamp(self, *, front: bool) -> int:
        """A stamp before, or behind, all that were given out."""
        ...

    def start_epoch(self) -> int:
        """Make everything unfindable for every engine at once; returns the new epoch."""
        ...


class ForeignHold:
    """What other engines hold, as a recount of this pool's references sees it: one reference a slot."""

    owner = "other engines"
    to_front = False

    def __init__(self, pool: BlockPool) -> None:
        self._pool = pool
        self.slots: set[int] = set()

    @property
    def blocks(self) -> Sequence[KVCacheBlock]:
        """The slots."""
        return [self._pool.blocks[slot] for slot in sorted(self.slots)]

    def note_evicted(self, block_ids: frozenset[int]) -> None:
        """Nothing of it is committed here."""


class SharedPool(BlockPool):
    """A `BlockPool` that may be read at any time, and used only inside ``with pool:``.

    Entering keeps the other engines out and brings the view up to date; leaving writes what changed. So nothing that
    was found inside can go away before it is held inside. If the table cannot be had, the pool is *off* for good:
    nothing is found, nothing can be staged, and what this engine holds stays held until it ends.
    """

    can_place = False  # the order of eviction belongs to all engines

    def __init__(
        self,
        table: SlotTable,
        hash_block_size: int,
        enable_kv_cache_events: bool = False,
        num_hash_lookahead_tokens: int = 0,
        medium: str = MEDIUM_CPU,
        widths: Sequence[int] = (),
    ) -> None:
        """``widths``: how many slots a block takes, by group; empty = one each."""
        super().__init__(
            table.num_slots,
            enable_caching=True,
            hash_block_size=hash_block_size,
            enable_kv_cache_events=enable_kv_cache_events,
            num_hash_lookahead_tokens=num_hash_lookahead_tokens,
            medium=medium,
            make_free_queue=LruQueue,
        )
        self.is_off = False
        self._table = table
        self._depth = 0
        self._table_epoch: int | None = None
        self._foreign = ForeignHold(self)
        self.wide = WideBlocks(self.blocks, widths)
        self._companion_hold = CompanionHold(
            self.wide, self.blocks, lambda slot: self._own_references(self.blocks[slot])
        )
        self._own: set[int] = set()  # slots whose present content this engine stored, and told of in events
        self._expected: dict[BlockHashWithGroupId, int] = {}  # keys that others are storing, and where
        self._staged_by_others: dict[int, Keys] = {}
        self._staged: dict[
            int, tuple[int, Keys]
        ] = {}  # slots taken here: epoch, and the keys that were announced
        self._stamps = [0] * table.num_slots
        self._dirty: dict[
            int, bool
        ] = {}  # slots to write when the turn ends, and whether their content changed

    # A turn

    def __enter__(self) -> SharedPool:
        if self._depth == 0 and not self.is_off:
            if self._table.acquire():
                try:
                    self._look()
                except BaseException:
                    self._table.release()
                    raise
            else:
                self._switch_off()
        self._depth += 1
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._depth -= 1
        if self._depth or self.is_off:
            return
        try:
            for slot, has_new_content in self._dirty.items():
                self._write(slot, has_new_content)
            self._dirty.clear()
        finally:
            self._table.release()

    def _require_turn(self) -> None:
        check(self._depth > 0, "a shared pool is used outside its turn: what was found may be gone")

    def _switch_off(self) -> None:
        self.is_off = True
        self._own.clear()
        self._expected.clear()
        self.index.clear()
        self.wide.part_all()
        logger.error(
            "KV offload: the shared pool could not be locked; another engine of it may be stopped. This engine goes "
            "on without the pool until it is restarted."
        )

    # The view

    def _look(self) -> None:
        """Take over what the other engines did."""
        epoch = self._table.epoch
        if epoch != self._table_epoch:
            if self._table_epoch is not None:
                self._forget_all()
            self._table_epoch = epoch
        moved: list[tuple[int, KVCacheBlock]] = []
        for slot in self._table.take_changes():
            self._adopt(self.blocks[slot], self._table.read(slot), moved)
        moved.sort(key=lambda entry: entry[0])
        self.free_block_queue.append_n([block for stamp, block in moved if stamp > 0])
        self.free_block_queue.prepend_n([block for stamp, block in moved if stamp <= 0])
        if self._foreign.slots:
            self.leases[id(self._foreign)] = self._foreign
        else:
            self.leases.pop(id(self._foreign), None)

    def _adopt(self, block: KVCacheBlock, record: SlotRecord, moved: list[tuple[int, KVCacheBlock]]) -> None:
        slot = block.block_id
        keys = record.keys if record.state is SlotState.FINDABLE else ()
        if keys != self.get_keys(block):
            self.num_evicted += self._forget_keys(block)
            for key, num_tokens in keys:
                self.index.add(key, block, num_tokens)
        if keys:
            self.wide.join(slot, record.companions)
        for key, _ in self._staged_by_others.pop(slot, ()):
            self._expected.pop(key, None)
            if not keys:
                self.num_evicted += 1  # it may be missing now: whoever passed it over looks again
        if record.state is SlotState.STAGED and record.held_elsewhere:
            self._staged_by_others[slot] = record.keys
            self._expected.update((key, slot) for key, _ in record.keys)
        was_idle = block.ref_cnt == 0
        block.ref_cnt += record.held_elsewhere - (slot in self._foreign.slots)
        (self._foreign.slots.add if record.held_elsewhere else self._foreign.slots.discard)(slot)
        is_idle = block.ref_cnt == 0
        if was_idle and (not is_idle or record.stamp != self._stamps[slot]):
            self.free_block_queue.remove(block)
        if is_idle and (not was_idle or record.stamp != self._stamps[slot]):
            moved.append((record.stamp, block))
        self._stamps[slot] = record.stamp

    def _write(self, slot: int, has_new_content: bool) -> None:
        """A slot is held while its content changes: the hold is written first, or given up last."""
        block, stamp = self.blocks[slot], self._stamps[slot]
        held = self._own_references(block) > 0
        if held:
            self._table.write_hold(slot, True, stamp)
        if has_new_content:
            state, keys = SlotState.EMPTY, self.get_keys(block)
            if keys:
                state = SlotState.FINDABLE
            elif held and slot in self._staged:
                epoch, keys = self._staged[slot]
                if keys and epoch == self._table_epoch:
                    state = SlotState.STAGED
            is_empty = state is SlotState.EMPTY
            companions = () if is_empty else self.wide.companions(slot)
            self._table.write_content(slot, state, () if is_empty else keys, companions)
        if not held:
            self._table.write_hold(slot, False, stamp)

    def _forget_keys(self, block: KVCacheBlock) -> bool:
        """Take the keys off a slot; told to consumers of events only if they were told of the content."""
        known = block.block_id in self._own
        self._own.discard(block.block_id)
        dropped = self.index.drop(block, report=known)
        self.wide.part(block.block_id)
        return dropped

    def _forget_all(self) -> None:
        super().invalidate_prefix_cache()
        self._own.clear()
        self._expected.clear()
        self._staged_by_others.clear()
        self.wide.part_all()

    def _own_references(self, block: KVCacheBlock) -> int:
        return block.ref_cnt - (block.block_id in self._foreign.slots)

    def _note_held(self, blocks: Iterable[KVCacheBlock]) -> None:
        """References of these blocks have changed."""
        self.wide.note_held(blocks, lambda block: self._own_references(block) > 0)
        if self.wide.held:
            self.leases[id(self._companion_hold)] = self._companion_hold
        else:
            self.leases.pop(id(self._companion_hold), None)

    # What others are doing

    @property
    def own_slots(self) -> Set[int]:
        """Slots with content that this engine stored, and of which its events tell."""
        return self._own

    def is_expected(self, key: BlockHashWithGroupId) -> bool:
        """Whether another engine was storing this content when this one looked last."""
        return key in self._expected

    def announce(self, block: KVCacheBlock, keys: Keys) -> None:
        """Tell the others what a slot, just taken, is to hold, so that they do not store it too."""
        self._require_turn()
        epoch, _ = self._staged[block.block_id]
        self._staged[block.block_id] = (epoch, keys[: self._table.keys_per_slot])
        self._dirty[block.block_id] = True

    def victims(self) -> Victims:
        """A look ahead at the slots that new contents would get; the queue must not change meanwhile."""
        if not self.wide.exist:
            queue = self.free_block_queue
            assert isinstance(queue, LruQueue)
            return queue.victims()
        return WideVictims(self.free_block_queue.iter_blocks_after(None), self.wide, self.blocks)

    # BlockPool

    def get_new_blocks(self, num_blocks: int) -> list[KVCacheBlock]:
        """As `BlockPool.get_new_blocks`; slots that others hold are not among them."""
        return self.get_blocks_for((None,) * num_blocks)

    def get_blocks_for(self, keys: Sequence[BlockHashWithGroupId | None]) -> list[KVCacheBlock]:
        """A block for content of each of these keys, of as many slots as that takes: the first slot of each."""
        self._require_turn()
        widths = [self.wide.width(key) for key in keys]
        num_slots = sum(widths)
        if self.is_off:
            raise ValueError(f"Cannot get {num_slots} free blocks from the pool, it is off")
        if num_slots <= self.free_block_queue.num_free_blocks:
            self._vacate(islice(self.free_block_queue.iter_blocks_after(None), num_slots))
        slots = super().get_new_blocks(num_slots)
        assert self._table_epoch is not None
        taken: list[KVCacheBlock] = []
        rest = iter(slots)
        for width in widths:
            first, *companions = islice(rest, width)
            taken.append(first)
            self._staged[first.block_id] = (self._table_epoch, ())
            self.wide.join(first.block_id, tuple(block.block_id for block in companions))
        for block in slots:
            self._dirty[block.block_id] = True
        self._note_held(taken)
        return taken

    def _vacate(self, slots: Iterable[KVCacheBlock]) -> None:
        """These slots get new content: what they hold, or hold a piece of, cannot be found any more."""
        for slot in slots:
            block = self.blocks[self.wide.first_of(slot.block_id)]
            if block is not slot:
                self._dirty[block.block_id] = True
            self.num_evicted += self._forget_keys(block)

    def touch(self, blocks: Sequence[KVCacheBlock]) -> None:
        self._require_turn()
        slots = self.wide.with_companions(blocks)
        super().touch(slots)
        for slot in slots:
            if not slot.is_null:
                self._dirty.setdefault(slot.block_id, False)
        self._note_held(blocks)

    def free_blocks(self, ordered_blocks: Iterable[KVCacheBlock]) -> None:
        self._require_turn()
        blocks = list(ordered_blocks)
        slots = self.wide.with_companions(blocks)
        idle: list[KVCacheBlock] = []
        self._release(slots, idle, idle)
        has_content = {slot.block_id: self._has_content(slot) for slot in idle}
        hashed = [slot for slot in idle if has_content[slot.block_id]]
        unhashed = [slot for slot in idle if not has_content[slot.block_id]]
        self.free_block_queue.append_n(hashed)
        self.free_block_queue.prepend_n(unhashed)
        self._note_release(slots)
        self._note_held(blocks)
        self._stamp(hashed, unhashed)

    def _has_content(self, slot: KVCacheBlock) -> bool:
        return self.blocks[self.wide.first_of(slot.block_id)].block_hash is not None

    def free_blocks_to_front(self, ordered_blocks: Iterable[KVCacheBlock]) -> None:
        blocks = list(ordered_blocks)
        self._require_turn()
        slots = self.wide.with_companions(blocks)
        super().free_blocks_to_front(slots)
        self._stamp((), self._note_release(slots))
        self._note_held(blocks)

    def _note_release(self, blocks: Sequence[KVCacheBlock]) -> list[KVCacheBlock]:
        """References of these blocks were dropped; returns those that nobody holds now, in the order in which they
        became so."""
        real = [block for block in blocks if not block.is_null]
        for block in real:
            self._dirty.setdefault(block.block_id, False)
        idle = {block.block_id: block for block in reversed(real) if block.ref_cnt == 0}
        for slot in idle:
            if self._staged.pop(slot, None) is not None:
                self._dirty[slot] = True
        return list(idle.values())[::-1]

    def _stamp(self, to_tail: Sequence[KVCacheBlock], to_front: Sequence[KVCacheBlock]) -> None:
        if self.is_off:
            return
        for block in to_tail:
            self._stamps[block.block_id] = self._table.next_stamp(front=False)
        for block in reversed(to_front):
            self._stamps[block.block_id] = self._table.next_stamp(front=True)

    def commit_staged(
        self,
        block: KVCacheBlock,
        key: BlockHashWithGroupId,
        num_tokens: int | None,
        info: StoredBlockInfo | None,
    ) -> None:
        """As `BlockPool.commit_staged`; nothing happens for a slot that was taken before somebody's reset."""
        self._require_turn()
        epoch, _ = self._staged.get(block.block_id, (None, ()))
        if self.is_off or epoch != self._table_epoch:
            return
        if len(self.get_keys(block)) >= self._table.keys_per_slot:
            return
        super().commit_staged(block, key, num_tokens, info)
        self._own.add(block.block_id)
        self._dirty[block.block_id] = True

    def _maybe_evict_cached_block(self, block: KVCacheBlock) -> bool:
        self._require_turn()
        if block.block_hash is None:  # it may be what another engine is storing
            return False
        self._dirty[block.block_id] = True
        return self._forget_keys(block)

    def invalidate_prefix_cache(self) -> int:
        """Drop the whole index, of all engines. Returns how many slots this engine still holds.

        Never 0 if the pool is off: then the other engines could not be told.
        """
        self._require_turn()
        if not self.is_off:
            self._table_epoch = self._table.start_epoch()
        self._forget_all()
        own = sum(block.ref_cnt > (block.block_id in self._foreign.slots) for block in self.blocks[1:])
        return max(own, int(self.is_off))

    def get_num_free_blocks(self) -> int:
        """Slots that no engine holds; 0 if the pool is off."""
        return 0 if self.is_off else super().get_num_free_blocks()
