"""A file in shared memory that engines of one node attach: what each slot holds, who holds it, and the slots' bytes.

Owns the file, its locks and its records. Every change is a row of writes that may stop anywhere: an engine killed in the
middle leaves a table that means what it meant before, or means that its own slot is empty. The kernel drops the locks
of a dead process, so nobody is taken for dead who may still write. Must not know requests or pools. Layer L6.

Where everything lies: see `shared_format`.
"""

from __future__ import annotations

import mmap
import os
import stat
import time
from collections.abc import Iterable
from typing import Any

import numpy as np
import numpy.typing as npt

from vllm.logger import init_logger
from vllm.utils.clock import Clock, MonotonicClock
from vllm.v1.core.block_hash import BlockHashWithGroupId
from vllm.v1.simple_kv_offload.copy_backends.shared_format import (
    ACTIVE,
    ATTACHER_WORDS,
    ATTACHERS,
    BORN,
    CHANGES,
    CONTROL,
    ENGINE,
    EPOCH,
    FIRST,
    HOLDERS,
    KEY_BYTES,
    KEY_WORDS,
    KEYS,
    LAST,
    LEFT_NS,
    LOG,
    LOG_SLOTS,
    NUM_KEYS,
    PID,
    SLOTS,
    STAMP,
    STATE_BITS,
    SegmentShape,
    engine_tag,
    find_mismatch,
    read_shape,
    write_header,
)
from vllm.v1.simple_kv_offload.copy_backends.shared_places import (
    MAX_PLACES,
    SCHEDULER,
    PlaceLocks,
    is_at,
    reserve,
)
from vllm.v1.simple_kv_offload.shared_pool import Keys, SlotRecord, SlotState

logger = init_logger(__name__)

Words = npt.NDArray[np.integer[Any]]

LOCK_PATIENCE_S = 5.0
START_PATIENCE_S = 120.0
"""The first engine clears the memory while the others wait; longer, as long as it gets on."""
LOOK_FOR_DEAD_S = 1.0
GRACE_S = 2.0
"""Between the death of a process and the reuse of its slots: copies that a device was given may still end."""


class SharedSegment:
    """One process's place in a segment; see `SlotTable`. Not for several threads.

    Makes the file if there is none, or if nobody uses it and it is of another shape. Processes that give the same
    ``engine_id`` have one place together, in which each is another ``member``; only the scheduler uses the table.
    Without ``engine_id`` the process is an engine by itself. Without ``shape`` the file must be there, and its bytes
    are not mapped. ``ValueError`` naming the setting if the file cannot be made, or is in use with another shape.
    """

    def __init__(
        self,
        path: str,
        shape: SegmentShape | None,
        clock: Clock | None = None,
        *,
        engine_id: str | None = None,
        member: int = SCHEDULER,
        patience_s: float = LOCK_PATIENCE_S,
        grace_s: float = GRACE_S,
    ) -> None:
        self.path = path
        self._clock = clock or MonotonicClock()
        self._patience_s = patience_s
        self._grace_s = grace_s
        self._seen: int | None = None
        # Keys and companions by slot, with the control word that they belong to.
        self._known: dict[int, tuple[int, Keys, tuple[int, ...]]] = {}
        self._next_search = 0.0
        self._index, self._bit = -1, 0
        self._fd = self._open(may_make=shape is not None)
        try:
            try:
                self.shape = shape or read_shape(self._fd, path)
                self._map = self._use_or_make()
                view = memoryview(self._map)
                self._bytes, self._words, self._signed = view, view.cast("Q"), view.cast("q")
                self._free_dead(search_now=True)
                self._index = self._join(engine_id, member)
            finally:
                self._locks.release_mutex()
        except BaseException:
            os.close(self._fd)
            raise
        self._bit = 1 << self._index

    # -- opening ------------------------------------------------------------------------------

    def _open(self, *, may_make: bool) -> int:
        """A descriptor of the file that lies at the path now, with the mutex held."""
        flags = os.O_RDWR | os.O_CLOEXEC | os.O_NOFOLLOW | (os.O_CREAT if may_make else 0)
        while True:
            try:
                fd = os.open(self.path, flags, 0o600)
            except OSError as error:
                raise ValueError(f"shared_pool: {self.path} cannot be opened: {error}") from error
            try:
                info = os.fstat(fd)
                if not stat.S_ISREG(info.st_mode) or info.st_uid != os.geteuid():
                    raise ValueError(f"shared_pool: {self.path} is not a file of this user")
                self._locks = PlaceLocks(fd, self._clock)
                if not self._locks.wait_for_start(START_PATIENCE_S):
                    raise ValueError(
                        f"shared_pool: another engine has kept {self.path} locked for {START_PATIENCE_S:g} s"
                    )
                if is_at(self.path, info):
                    return fd
            except BaseException:
                os.close(fd)
                raise
            os.close(fd)  # the last engine removed it meanwhile

    def _use_or_make(self) -> mmap.mmap:
        problem = find_mismatch(self._fd, self.shape)
        if problem is not None and self.attached():
            raise ValueError(
                f"shared_pool: {self.path} is in use with {problem}; all engines of a pool need the same model "
                "and the same cpu_bytes_to_use or num_cpu_blocks"
            )
        if problem is not None:
            self._make()
        # A mapping keeps its descriptor's locks alive: it gets one of its own.
        own = os.open(f"/proc/self/fd/{self._fd}", os.O_RDWR | os.O_CLOEXEC)
        try:
            return mmap.mmap(own, self.shape.region_starts[-1])
        finally:
            os.close(own)

    def _make(self) -> None:
        """Clear the file and reserve its memory."""
        size, shape = self.shape.region_starts[-1], self.shape
        try:
            reserve(self._fd, size, self._clock, self.path)
        except OSError as error:
            os.unlink(self.path)
            raise ValueError(
                f"shared_pool: {os.path.dirname(self.path)} has no room for {size} bytes ({error.strerror}); lower "
                "cpu_bytes_to_use or num_cpu_blocks, or enlarge that file system"
            ) from error
        write_header(self._fd, shape)

    def _join(self, engine_id: str | None, member: int) -> int:
        tag = engine_tag(engine_id) if engine_id is not None else int.from_bytes(os.urandom(8), "little")
        for index in range(MAX_PLACES):
            is_ours = self._attacher(index, ACTIVE) and self._attacher(index, ENGINE) == tag
            if is_ours and self._locks.is_alive(index):
                return self._join_at(index, member, engine_id)
        for index in range(MAX_PLACES):
            if not self._attacher(index, ACTIVE) and not self._locks.is_alive(index):
                self._set_attacher(index, PID, os.getpid())
                self._set_attacher(index, ENGINE, tag)
                self._set_attacher(index, LEFT_NS, 0)
                self._set_attacher(index, ACTIVE, 1)
                return self._join_at(index, member, engine_id)
        raise ValueError(f"shared_pool: {self.path} is used by {MAX_PLACES} engines, the most there may be")

    def _join_at(self, index: int, member: int, engine_id: str | None) -> int:
        if self._locks.take(index, member):
            return index
        what = "the scheduler" if member == SCHEDULER else f"rank {member - 1}"
        raise ValueError(
            f"shared_pool: another process is {what} of engine_id={engine_id!r} in {self.path}; engines need "
            "ids of their own"
        )

    def attached(self) -> list[int]:
        """Places in which other processes are alive, those of this engine included."""
        return [index for index in range(MAX_PLACES) if self._locks.is_alive(index)]

    def num_other_engines(self) -> int:
        """Engines beside this one that are alive."""
        return sum(index != self._index for index in self.attached())

    # -- SlotTable ----------------------------------------------------------------------------

    @property
    def num_slots(self) -> int:
        return self.shape.num_slots

    @property
    def keys_per_slot(self) -> int:
        return self.shape.keys_per_slot

    @property
    def num_parts(self) -> int:
        return self.shape.num_parts

    @property
    def max_width(self) -> int:
        return self.shape.max_width

    @property
    def epoch(self) -> int:
        return self._words[EPOCH]

    def acquire(self) -> bool:
        if self._fd < 0 or not self._locks.wait_for_mutex(self._patience_s):
            return False
        self._free_dead()
        return True

    def release(self) -> None:
        self._seen = self._words[CHANGES]
        self._locks.release_mutex()

    def take_changes(self) -> Iterable[int]:
        now, seen = self._words[CHANGES], self._seen
        if seen is None:  # slots that nobody has ever used are as this engine thinks they are
            return [slot for slot in range(1, self.num_slots) if self._is_used(slot)]
        if now - seen > LOG_SLOTS:
            return range(1, self.num_slots)
        return sorted({self._words[LOG + n % LOG_SLOTS] for n in range(seen, now)})

    def read(self, slot: int) -> SlotRecord:
        at, words = self._at(slot), self._words
        state = SlotState(words[at + CONTROL] & ((1 << STATE_BITS) - 1))
        if words[at + BORN] != words[EPOCH]:
            state = SlotState.EMPTY
        keys: Keys = ()
        companions: tuple[int, ...] = ()
        if state is not SlotState.EMPTY:
            control, keys, companions = self._known.get(slot, (0, (), ()))
            if control != words[at + CONTROL]:
                keys, companions = self._read_keys(at), self._read_companions(at)
                self._known[slot] = (words[at + CONTROL], keys, companions)
        holders = words[at + HOLDERS]
        here, elsewhere = bool(holders & self._bit), bool(holders & ~self._bit)
        return SlotRecord(state, keys, here, elsewhere, self._signed[at + STAMP], companions)

    def write_content(
        self, slot: int, state: SlotState, keys: Keys, companions: tuple[int, ...] = ()
    ) -> None:
        at, old = self._at(slot), self.read(slot)
        is_same = (old.keys, old.companions) == (keys, companions)
        if old.state is state and is_same:
            return
        self._log(slot)
        if not is_same or old.state is SlotState.EMPTY:
            self._set_state(at, SlotState.EMPTY)
            if state is SlotState.EMPTY:
                return
            self._write_keys(at, keys)
            self._write_companions(at, companions)
            self._put(at + BORN, self._words[EPOCH])
        self._set_state(at, state)
        self._known[slot] = (self._words[at + CONTROL], keys, companions)

    def write_hold(self, slot: int, held: bool, stamp: int) -> None:
        at = self._at(slot)
        holders = self._words[at + HOLDERS]
        now = holders | self._bit if held else holders & ~self._bit
        is_moved = self._signed[at + STAMP] != stamp
        if now == holders and not is_moved:
            return
        self._log(slot)
        if is_moved:
            self._put_signed(at + STAMP, stamp)
        if now != holders:
            self._put(at + HOLDERS, now)

    def next_stamp(self, *, front: bool) -> int:
        where, step = (FIRST, -1) if front else (LAST, 1)
        self._put_signed(where, self._signed[where] + step)
        return self._signed[where]

    def start_epoch(self) -> int:
        self._put(EPOCH, self._words[EPOCH] + 1)
        return self._words[EPOCH]

    # -- records ------------------------------------------------------------------------------

    # All changes of a file in use pass through these: each is one store of an aligned word, but for keys.
    def _put(self, word: int, value: int) -> None:
        self._words[word] = value

    def _put_signed(self, word: int, value: int) -> None:
        self._signed[word] = value

    def _put_key(self, word: int, key: bytes) -> None:
        self._bytes[8 * word : 8 * word + len(key)] = key

    def _at(self, slot: int) -> int:
        return SLOTS + slot * self.shape.slot_words

    def _is_used(self, slot: int) -> bool:
        at, words = self._at(slot), self._words
        return bool(words[at + CONTROL] or words[at + HOLDERS] or words[at + STAMP])

    def _attacher(self, index: int, field: int) -> int:
        return self._words[ATTACHERS + index * ATTACHER_WORDS + field]

    def _set_attacher(self, index: int, field: int, value: int) -> None:
        self._put(ATTACHERS + index * ATTACHER_WORDS + field, value)

    def _log(self, slot: int) -> None:
        """Others look at the slot again, however far its change gets."""
        count = self._words[CHANGES]
        self._put(LOG + count % LOG_SLOTS, slot)
        self._put(CHANGES, count + 1)

    def _set_state(self, at: int, state: SlotState) -> None:
        generation = (self._words[at + CONTROL] >> STATE_BITS) + 1
        self._put(at + CONTROL, generation << STATE_BITS | state)

    def _read_keys(self, at: int) -> Keys:
        keys = []
        for number in range(self._words[at + NUM_KEYS]):
            start = at + KEYS + number * KEY_WORDS
            raw = self._bytes[8 * start : 8 * start + KEY_BYTES]
            tokens = self._signed[start + KEY_WORDS - 1]
            key = BlockHashWithGroupId(bytes(raw[1 : 1 + raw[0]]))
            keys.append((key, None if tokens < 0 else tokens))
        return tuple(keys)

    def _write_keys(self, at: int, keys: Keys) -> None:
        """Only while the slot is EMPTY."""
        for number, (key, tokens) in enumerate(keys):
            start = at + KEYS + number * KEY_WORDS
            self._put_key(start, bytes((len(key),)) + key)
            self._put_signed(start + KEY_WORDS - 1, -1 if tokens is None else tokens)
        self._put(at + NUM_KEYS, len(keys))

    def _read_companions(self, at: int) -> tuple[int, ...]:
        start = at + self.shape.companion_word
        found = self._words[start : start + self.shape.max_width - 1]
        return tuple(slot for slot in found if slot)

    def _write_companions(self, at: int, companions: tuple[int, ...]) -> None:
        """Only while the slot is EMPTY."""
        start = at + self.shape.companion_word
        for number in range(self.shape.max_width - 1):
            self._put(start + number, companions[number] if number < len(companions) else 0)

    # -- the dead -----------------------------------------------------------------------------

    def _free_dead(self, *, search_now: bool = False) -> None:
        """Take back what engines that are gone have held, some time after their end. The mutex is held."""
        now = self._clock.monotonic()
        if now < self._next_search and not search_now:
            return
        self._next_search = now + LOOK_FOR_DEAD_S
        for index in range(MAX_PLACES):
            if not self._attacher(index, ACTIVE) or index == self._index or self._locks.is_alive(index):
                continue
            moment = time.monotonic_ns()
            if not self._attacher(index, LEFT_NS):
                self._set_attacher(index, LEFT_NS, moment)
            if moment - self._attacher(index, LEFT_NS) < self._grace_s * 1e9:
                continue
            logger.info(
                "KV offload: process %d is gone; its slots are free again.", self._attacher(index, PID)
            )
            self._drop_holds(index)
            self._set_attacher(index, ACTIVE, 0)

    def _drop_holds(self, index: int) -> None:
        """What the engine in this place was filling is empty; what it was reading stays."""
        bit, words = 1 << index, self._words
        records = self._records()
        held = np.flatnonzero(records[:, HOLDERS] & np.uint64(bit)).astype(np.uint64)
        first_of = self._find_firsts(records, held)
        for slot in sorted(held.tolist(), key=lambda slot: (first_of.get(slot, slot), slot not in first_of)):
            at = self._at(slot)
            self._log(slot)
            findable = words[at + CONTROL] & ((1 << STATE_BITS) - 1) == SlotState.FINDABLE
            if not findable:
                self._set_state(at, SlotState.EMPTY)
            stays = findable or slot in first_of
            self._put_signed(at + STAMP, self.next_stamp(front=not stays))
            self._put(at + HOLDERS, words[at + HOLDERS] & ~bit)

    def _records(self) -> Words:
        """All slots' records, a row each: whoever looks at every slot keeps the others waiting."""
        shape = self.shape
        flat = np.frombuffer(self._map, np.uint64, shape.num_slots * shape.slot_words, 8 * SLOTS)
        return flat.reshape(shape.num_slots, shape.slot_words)

    def _find_firsts(self, records: Words, slots: Words) -> dict[int, int]:
        """The first slot of those that are companions in what can be found."""
        is_found = (records[:, CONTROL] & np.uint64((1 << STATE_BITS) - 1)) == SlotState.FINDABLE
        firsts = np.flatnonzero(is_found & (records[:, BORN] == self._words[EPOCH]))
        companions = records[firsts, self.shape.companion_word :]
        rows, columns = np.nonzero(np.isin(companions, slots) & (companions != 0))
        return dict(zip(companions[rows, columns].tolist(), firsts[rows].tolist(), strict=True))

    # -- bytes and end ------------------------------------------------------------------------

    @property
    def data(self) -> mmap.mmap:
        """The mapped file; region r begins at ``shape.region_starts[r]``."""
        return self._map

    def close(self, *, busy: bool = False) -> None:
        """Leave; the last process of an engine gives up its place, the last of all removes the file. Idempotent.

        ``busy``: a copy may still write. Then the place stays taken until the process ends.
        """
        if self._fd < 0 or busy:
            return
        try:
            if self._locks.wait_for_mutex(self._patience_s):
                if not self._locks.is_alive(self._index):
                    self._drop_holds(self._index)
                    self._set_attacher(self._index, ACTIVE, 0)
                if not self.attached() and is_at(self.path, os.fstat(self._fd)):
                    os.unlink(self.path)
        finally:
            # A place that could not be given back is found to be a dead one's.
            fd, self._fd = self._fd, -1
            self._locks.drop_all()
            os.close(fd)
