"""A file in shared memory that engines of one node attach: what each slot holds, who holds it, and the slots' bytes.

Owns the file, its locks and its records. Every change is a row of writes that may stop anywhere: an engine killed in the
middle leaves a table that means what it meant before, or means that its own slot is empty. The kernel drops the locks
of a dead process, so nobody is taken for dead who may still write. Must not know requests or pools. Layer L6.

Words of 8 bytes: header, attachers, log of changed slots, slots; then, page-aligned, the bytes of the slots.
"""

from __future__ import annotations

import hashlib
import mmap
import os
import stat
import struct
import time
from collections.abc import Iterable
from dataclasses import dataclass

from vllm.logger import init_logger
from vllm.utils.clock import Clock, MonotonicClock
from vllm.v1.core.block_hash import BlockHashWithGroupId
from vllm.v1.simple_kv_offload.copy_backends.shared_places import (
    MAX_PLACES,
    SCHEDULER,
    PlaceLocks,
    is_at,
    reserve,
)
from vllm.v1.simple_kv_offload.shared_pool import Keys, SlotRecord, SlotState

logger = init_logger(__name__)

MAGIC = int.from_bytes(b"KVSHARE1", "little")
FORMAT = 2
PAGE = 4096
LOG_SLOTS = 1 << 16
"""Changes that an engine may miss before it has to look at every slot."""
KEY_BYTES = 40
"""A hash of 32 bytes and a group fit."""

# Header words. Signed where marked.
_MAGIC, _FORMAT, _NUM_SLOTS, _KEYS_PER_SLOT, _SIZE, _DIGEST = 0, 1, 2, 3, 4, 5  # the digest takes 4 words
_NUM_PARTS = 9
_EPOCH, _CHANGES, _LAST, _FIRST = 16, 17, 18, 19  # _LAST and _FIRST: greatest and least stamp, signed
_ATTACHERS, _ATTACHER_WORDS = 64, 4
_ACTIVE, _PID, _ENGINE, _LEFT_NS = range(_ATTACHER_WORDS)
_LOG = 512
_SLOTS = _LOG + LOG_SLOTS
HEAD_BYTES = 8 * _SLOTS
"""What a file has before the slots' records."""
# A slot: generation and state, epoch of its keys, who holds it (a bit each), stamp (signed), number of keys, keys.
_CONTROL, _BORN, _HOLDERS, _STAMP, _NUM_KEYS, _KEYS = range(6)
_KEY_WORDS = 6  # length and key, tokens (signed, -1 = unknown)
_STATE_BITS = 2

LOCK_PATIENCE_S = 5.0
START_PATIENCE_S = 120.0
"""The first engine clears the memory while the others wait; longer, as long as it gets on."""
LOOK_FOR_DEAD_S = 1.0
GRACE_S = 2.0
"""Between the death of a process and the reuse of its slots: copies that a device was given may still end."""


@dataclass(frozen=True, slots=True)
class SegmentShape:
    """What all engines of a segment must have in common. ``row_bytes``: bytes of one part of a slot in each region;
    a slot has ``num_parts`` of them."""

    digest: bytes
    num_slots: int
    keys_per_slot: int
    row_bytes: tuple[int, ...]
    num_parts: int = 1

    @property
    def slot_words(self) -> int:
        """Words of one slot's record."""
        return _KEYS + self.keys_per_slot * _KEY_WORDS

    @property
    def record_bytes(self) -> int:
        """Bytes of one slot's record."""
        return 8 * self.slot_words

    @property
    def region_starts(self) -> tuple[int, ...]:
        """First byte of each region, and the end of the last: the size of the file."""
        starts = [_aligned(HEAD_BYTES + self.num_slots * self.record_bytes)]
        for size in self.row_bytes:
            starts.append(_aligned(starts[-1] + size * self.num_slots * self.num_parts))
        return tuple(starts)


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
        self._known_keys: dict[
            int, tuple[int, Keys]
        ] = {}  # by slot, with the control word that they belong to
        self._next_search = 0.0
        self._index = -1
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
        problem = self._mismatch()
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

    def _mismatch(self) -> str | None:
        """What is wrong with the file for this engine."""
        raw = os.pread(self._fd, 8 * _ATTACHERS, 0)
        if len(raw) < 8 * _ATTACHERS:
            return "no content"
        words = struct.unpack(f"={_ATTACHERS}Q", raw)
        size, shape = os.fstat(self._fd).st_size, self.shape
        if words[_MAGIC] != MAGIC or words[_FORMAT] != FORMAT:
            return "another format"
        if raw[8 * _DIGEST : 8 * _DIGEST + 32] != _padded(shape.digest):
            return "another model or layout"
        if (words[_NUM_SLOTS], words[_KEYS_PER_SLOT]) != (shape.num_slots, shape.keys_per_slot):
            return f"{words[_NUM_SLOTS]} blocks instead of {shape.num_slots}"
        if words[_NUM_PARTS] != shape.num_parts:
            return f"blocks of {words[_NUM_PARTS]} parts instead of {shape.num_parts}"
        if not shape.row_bytes:  # only the table is wanted
            return None
        if size != shape.region_starts[-1] or words[_SIZE] != size:
            return f"{size} bytes instead of {shape.region_starts[-1]}"
        return None

    def _make(self) -> None:
        """Clear the file and reserve its memory; the magic comes last, so that half a file is none."""
        size, shape = self.shape.region_starts[-1], self.shape
        try:
            reserve(self._fd, size, self._clock, self.path)
        except OSError as error:
            os.unlink(self.path)
            raise ValueError(
                f"shared_pool: {os.path.dirname(self.path)} has no room for {size} bytes ({error.strerror}); lower "
                "cpu_bytes_to_use or num_cpu_blocks, or enlarge that file system"
            ) from error
        header = struct.pack("=5Q", 0, FORMAT, shape.num_slots, shape.keys_per_slot, size)
        parts = struct.pack("=Q", shape.num_parts)
        os.pwrite(self._fd, header + _padded(shape.digest) + parts, 0)
        os.pwrite(self._fd, struct.pack("=Q", MAGIC), 0)

    def _join(self, engine_id: str | None, member: int) -> int:
        tag = engine_tag(engine_id) if engine_id is not None else int.from_bytes(os.urandom(8), "little")
        for index in range(MAX_PLACES):
            is_ours = self._attacher(index, _ACTIVE) and self._attacher(index, _ENGINE) == tag
            if is_ours and self._locks.is_alive(index):
                return self._join_at(index, member, engine_id)
        for index in range(MAX_PLACES):
            if not self._attacher(index, _ACTIVE) and not self._locks.is_alive(index):
                self._set_attacher(index, _PID, os.getpid())
                self._set_attacher(index, _ENGINE, tag)
                self._set_attacher(index, _LEFT_NS, 0)
                self._set_attacher(index, _ACTIVE, 1)
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
    def epoch(self) -> int:
        return self._words[_EPOCH]

    def acquire(self) -> bool:
        if self._fd < 0 or not self._locks.wait_for_mutex(self._patience_s):
            return False
        self._free_dead()
        return True

    def release(self) -> None:
        self._seen = self._words[_CHANGES]
        self._locks.release_mutex()

    def take_changes(self) -> Iterable[int]:
        now, seen = self._words[_CHANGES], self._seen
        if seen is None:  # slots that nobody has ever used are as this engine thinks they are
            return [slot for slot in range(1, self.num_slots) if self._is_used(slot)]
        if now - seen > LOG_SLOTS:
            return range(1, self.num_slots)
        return sorted({self._words[_LOG + n % LOG_SLOTS] for n in range(seen, now)})

    def read(self, slot: int) -> SlotRecord:
        at, words = self._at(slot), self._words
        state = SlotState(words[at + _CONTROL] & ((1 << _STATE_BITS) - 1))
        if words[at + _BORN] != words[_EPOCH]:
            state = SlotState.EMPTY
        keys: Keys = ()
        if state is not SlotState.EMPTY:
            control, keys = self._known_keys.get(slot, (0, ()))
            if control != words[at + _CONTROL]:
                keys = self._read_keys(at)
                self._known_keys[slot] = (words[at + _CONTROL], keys)
        holders = words[at + _HOLDERS]
        here = bool(holders & self._bit)
        return SlotRecord(state, keys, here, bool(holders & ~self._bit), self._signed[at + _STAMP])

    def write_content(self, slot: int, state: SlotState, keys: Keys) -> None:
        at, old = self._at(slot), self.read(slot)
        if (old.state, old.keys) == (state, keys):
            return
        self._log(slot)
        if old.keys != keys or old.state is SlotState.EMPTY:
            self._set_state(at, SlotState.EMPTY)
            if state is SlotState.EMPTY:
                return
            self._write_keys(at, keys)
            self._put(at + _BORN, self._words[_EPOCH])
        self._set_state(at, state)
        self._known_keys[slot] = (self._words[at + _CONTROL], keys)

    def write_hold(self, slot: int, held: bool, stamp: int) -> None:
        at = self._at(slot)
        holders = self._words[at + _HOLDERS]
        now = holders | self._bit if held else holders & ~self._bit
        is_moved = self._signed[at + _STAMP] != stamp
        if now == holders and not is_moved:
            return
        self._log(slot)
        if is_moved:
            self._put_signed(at + _STAMP, stamp)
        if now != holders:
            self._put(at + _HOLDERS, now)

    def next_stamp(self, *, front: bool) -> int:
        where, step = (_FIRST, -1) if front else (_LAST, 1)
        self._put_signed(where, self._signed[where] + step)
        return self._signed[where]

    def start_epoch(self) -> int:
        self._put(_EPOCH, self._words[_EPOCH] + 1)
        return self._words[_EPOCH]

    # -- records ------------------------------------------------------------------------------

    # All changes of a file in use pass through these: each is one store of an aligned word, but for keys.
    def _put(self, word: int, value: int) -> None:
        self._words[word] = value

    def _put_signed(self, word: int, value: int) -> None:
        self._signed[word] = value

    def _put_key(self, word: int, key: bytes) -> None:
        self._bytes[8 * word : 8 * word + len(key)] = key

    def _at(self, slot: int) -> int:
        return _SLOTS + slot * self.shape.slot_words

    def _is_used(self, slot: int) -> bool:
        at, words = self._at(slot), self._words
        return bool(words[at + _CONTROL] or words[at + _HOLDERS] or words[at + _STAMP])

    def _attacher(self, index: int, field: int) -> int:
        return self._words[_ATTACHERS + index * _ATTACHER_WORDS + field]

    def _set_attacher(self, index: int, field: int, value: int) -> None:
        self._put(_ATTACHERS + index * _ATTACHER_WORDS + field, value)

    def _log(self, slot: int) -> None:
        """Others look at the slot again, however far its change gets."""
        count = self._words[_CHANGES]
        self._put(_LOG + count % LOG_SLOTS, slot)
        self._put(_CHANGES, count + 1)

    def _set_state(self, at: int, state: SlotState) -> None:
        generation = (self._words[at + _CONTROL] >> _STATE_BITS) + 1
        self._put(at + _CONTROL, generation << _STATE_BITS | state)

    def _read_keys(self, at: int) -> Keys:
        keys = []
        for number in range(self._words[at + _NUM_KEYS]):
            start = at + _KEYS + number * _KEY_WORDS
            raw = self._bytes[8 * start : 8 * start + KEY_BYTES]
            tokens = self._signed[start + _KEY_WORDS - 1]
            key = BlockHashWithGroupId(bytes(raw[1 : 1 + raw[0]]))
            keys.append((key, None if tokens < 0 else tokens))
        return tuple(keys)

    def _write_keys(self, at: int, keys: Keys) -> None:
        """Only while the slot is EMPTY."""
        for number, (key, tokens) in enumerate(keys):
            start = at + _KEYS + number * _KEY_WORDS
            self._put_key(start, bytes((len(key),)) + key)
            self._put_signed(start + _KEY_WORDS - 1, -1 if tokens is None else tokens)
        self._put(at + _NUM_KEYS, len(keys))

    # -- the dead -----------------------------------------------------------------------------

    def _free_dead(self, *, search_now: bool = False) -> None:
        """Take back what engines that are gone have held, some time after their end. The mutex is held."""
        now = self._clock.monotonic()
        if now < self._next_search and not search_now:
            return
        self._next_search = now + LOOK_FOR_DEAD_S
        for index in range(MAX_PLACES):
            if not self._attacher(index, _ACTIVE) or index == self._index or self._locks.is_alive(index):
                continue
            moment = time.monotonic_ns()
            if not self._attacher(index, _LEFT_NS):
                self._set_attacher(index, _LEFT_NS, moment)
            if moment - self._attacher(index, _LEFT_NS) < self._grace_s * 1e9:
                continue
            logger.info(
                "KV offload: process %d is gone; its slots are free again.", self._attacher(index, _PID)
            )
            self._drop_holds(index)
            self._set_attacher(index, _ACTIVE, 0)

    def _drop_holds(self, index: int) -> None:
        """What the engine in this place was filling is empty; what it was reading stays."""
        bit, words = 1 << index, self._words
        for slot in range(1, self.num_slots):
            at = self._at(slot)
            if not words[at + _HOLDERS] & bit:
                continue
            self._log(slot)
            findable = words[at + _CONTROL] & ((1 << _STATE_BITS) - 1) == SlotState.FINDABLE
            if not findable:
                self._set_state(at, SlotState.EMPTY)
            self._put_signed(at + _STAMP, self.next_stamp(front=not findable))
            self._put(at + _HOLDERS, words[at + _HOLDERS] & ~bit)

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
                    self._set_attacher(self._index, _ACTIVE, 0)
                if not self.attached() and is_at(self.path, os.fstat(self._fd)):
                    os.unlink(self.path)
        finally:
            # A place that could not be given back is found to be a dead one's.
            fd, self._fd = self._fd, -1
            self._locks.drop_all()
            os.close(fd)


def read_shape(fd: int, path: str) -> SegmentShape:
    """What the header of a segment says, without its regions. ``ValueError`` if it is none."""
    raw = os.pread(fd, 8 * _ATTACHERS, 0)
    words = struct.unpack(f"={_ATTACHERS}Q", raw.ljust(8 * _ATTACHERS, b"\0"))
    if words[_MAGIC] != MAGIC or words[_FORMAT] != FORMAT:
        raise ValueError(f"shared_pool: {path} is no pool of this version")
    digest = raw[8 * _DIGEST : 8 * _DIGEST + 32]
    return SegmentShape(digest, words[_NUM_SLOTS], words[_KEYS_PER_SLOT], (), words[_NUM_PARTS])


def engine_tag(engine_id: str) -> int:
    """By what the processes of an engine know each other in the file."""
    return int.from_bytes(hashlib.sha256(engine_id.encode()).digest()[:8], "little")


def members_of(path: str, engine_id: str, num_members: int) -> list[int] | None:
    """Which of an engine's processes use the segment now; None if the engine has no place in it.

    ``OSError`` if the file cannot be read.
    """
    fd = os.open(path, os.O_RDWR | os.O_NOFOLLOW | os.O_CLOEXEC)
    try:
        raw = os.pread(fd, 8 * _ATTACHER_WORDS * MAX_PLACES, 8 * _ATTACHERS)
        locks, tag = PlaceLocks(fd, MonotonicClock()), engine_tag(engine_id)
        for place, record in enumerate(struct.iter_unpack(f"={_ATTACHER_WORDS}Q", raw)):
            if record[_ACTIVE] and record[_ENGINE] == tag and locks.is_alive(place):
                return [member for member in range(num_members) if locks.is_there(place, member)]
    finally:
        os.close(fd)
    return None


def _padded(digest: bytes) -> bytes:
    return digest[:32].ljust(32, b"\0")


def _aligned(size: int) -> int:
    return -(-size // PAGE) * PAGE
