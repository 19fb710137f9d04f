"""How the file of a shared pool is laid out: its words, the shape that its engines have in common, and who is in it.

Owns where everything lies and what the header says. It must not know how records change. Layer L6.

Words of 8 bytes: header, attachers, log of changed slots, slots; then, page-aligned, the bytes of the slots.
"""

from __future__ import annotations

import hashlib
import os
import struct
from dataclasses import dataclass

from vllm.utils.clock import MonotonicClock
from vllm.v1.simple_kv_offload.copy_backends.shared_places import MAX_PLACES, PlaceLocks

MAGIC = int.from_bytes(b"KVSHARE1", "little")
FORMAT = 3
PAGE = 4096
LOG_SLOTS = 1 << 16
"""Changes that an engine may miss before it has to look at every slot."""
KEY_BYTES = 40
"""A hash of 32 bytes and a group fit."""

# Header words. Signed where marked.
AT_MAGIC, AT_FORMAT, NUM_SLOTS, KEYS_PER_SLOT, SIZE, DIGEST = 0, 1, 2, 3, 4, 5  # the digest takes 4 words
NUM_PARTS, MAX_WIDTH = 9, 10
EPOCH, CHANGES, LAST, FIRST = 16, 17, 18, 19  # LAST and FIRST: greatest and least stamp, signed
ATTACHERS, ATTACHER_WORDS = 64, 4
ACTIVE, PID, ENGINE, LEFT_NS = range(ATTACHER_WORDS)
LOG = 512
SLOTS = LOG + LOG_SLOTS
HEAD_BYTES = 8 * SLOTS
"""What a file has before the slots' records."""
# A slot: generation and state, epoch of its keys, who holds it (a bit each), stamp (signed), number of keys, keys,
# companions (0: none).
CONTROL, BORN, HOLDERS, STAMP, NUM_KEYS, KEYS = range(6)
KEY_WORDS = 6  # length and key, tokens (signed, -1 = unknown)
STATE_BITS = 2


@dataclass(frozen=True, slots=True)
class SegmentShape:
    """What all engines of a segment must have in common. ``row_bytes``: bytes of one part of a slot in each region;
    a slot has ``num_parts`` of them. ``max_width``: slots that the widest block takes."""

    digest: bytes
    num_slots: int
    keys_per_slot: int
    row_bytes: tuple[int, ...]
    num_parts: int = 1
    max_width: int = 1

    @property
    def slot_words(self) -> int:
        """Words of one slot's record."""
        return self.companion_word + self.max_width - 1

    @property
    def companion_word(self) -> int:
        """Where the companions are in it."""
        return KEYS + self.keys_per_slot * KEY_WORDS

    @property
    def record_bytes(self) -> int:
        """Bytes of one slot's record."""
        return 8 * self.slot_words

    @property
    def region_starts(self) -> tuple[int, ...]:
        """First byte of each region, and the end of the last: the size of the file."""
        starts = [aligned(HEAD_BYTES + self.num_slots * self.record_bytes)]
        for size in self.row_bytes:
            starts.append(aligned(starts[-1] + size * self.num_slots * self.num_parts))
        return tuple(starts)


def write_header(fd: int, shape: SegmentShape) -> None:
    """The header of a file of zeros; the magic comes last, so that half a file is none."""
    size = shape.region_starts[-1]
    header = struct.pack("=5Q", 0, FORMAT, shape.num_slots, shape.keys_per_slot, size)
    rest = struct.pack("=2Q", shape.num_parts, shape.max_width)
    os.pwrite(fd, header + padded(shape.digest) + rest, 0)
    os.pwrite(fd, struct.pack("=Q", MAGIC), 0)


def find_mismatch(fd: int, shape: SegmentShape) -> str | None:
    """What is wrong with the file for an engine that wants this shape; None if nothing is."""
    raw = os.pread(fd, 8 * ATTACHERS, 0)
    if len(raw) < 8 * ATTACHERS:
        return "no content"
    words = struct.unpack(f"={ATTACHERS}Q", raw)
    size = os.fstat(fd).st_size
    if words[AT_MAGIC] != MAGIC or words[AT_FORMAT] != FORMAT:
        return "another format"
    if raw[8 * DIGEST : 8 * DIGEST + 32] != padded(shape.digest):
        return "another model or layout"
    if (words[NUM_SLOTS], words[KEYS_PER_SLOT]) != (shape.num_slots, shape.keys_per_slot):
        return f"{words[NUM_SLOTS]} blocks instead of {shape.num_slots}"
    if words[NUM_PARTS] != shape.num_parts:
        return f"blocks of {words[NUM_PARTS]} parts instead of {shape.num_parts}"
    if words[MAX_WIDTH] != shape.max_width:
        return f"blocks of up to {words[MAX_WIDTH]} slots instead of {shape.max_width}"
    if not shape.row_bytes:  # only the table is wanted
        return None
    if size != shape.region_starts[-1] or words[SIZE] != size:
        return f"{size} bytes instead of {shape.region_starts[-1]}"
    return None


def read_shape(fd: int, path: str) -> SegmentShape:
    """What the header of a segment says, without its regions. ``ValueError`` if it is none."""
    raw = os.pread(fd, 8 * ATTACHERS, 0)
    words = struct.unpack(f"={ATTACHERS}Q", raw.ljust(8 * ATTACHERS, b"\0"))
    if words[AT_MAGIC] != MAGIC or words[AT_FORMAT] != FORMAT:
        raise ValueError(f"shared_pool: {path} is no pool of this version")
    digest = raw[8 * DIGEST : 8 * DIGEST + 32]
    return SegmentShape(
        digest, words[NUM_SLOTS], words[KEYS_PER_SLOT], (), words[NUM_PARTS], words[MAX_WIDTH]
    )


def engine_tag(engine_id: str) -> int:
    """By what the processes of an engine know each other in the file."""
    return int.from_bytes(hashlib.sha256(engine_id.encode()).digest()[:8], "little")


def members_of(path: str, engine_id: str, num_members: int) -> list[int] | None:
    """Which of an engine's processes use the segment now; None if the engine has no place in it.

    ``OSError`` if the file cannot be read.
    """
    fd = os.open(path, os.O_RDWR | os.O_NOFOLLOW | os.O_CLOEXEC)
    try:
        raw = os.pread(fd, 8 * ATTACHER_WORDS * MAX_PLACES, 8 * ATTACHERS)
        locks, tag = PlaceLocks(fd, MonotonicClock()), engine_tag(engine_id)
        for place, record in enumerate(struct.iter_unpack(f"={ATTACHER_WORDS}Q", raw)):
            if record[ACTIVE] and record[ENGINE] == tag and locks.is_alive(place):
                return [member for member in range(num_members) if locks.is_there(place, member)]
    finally:
        os.close(fd)
    return None


def padded(digest: bytes) -> bytes:
    return digest[:32].ljust(32, b"\0")


def aligned(size: int) -> int:
    return -(-size // PAGE) * PAGE
