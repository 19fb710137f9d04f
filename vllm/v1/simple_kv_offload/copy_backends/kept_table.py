"""Which slots of a kept file hold what: a table of one record per slot in a file of its own, readable after any crash.

Owns the table's format. A record is written after the bytes it tells of and carries a checksum of itself and of those
bytes, so that whatever a crash left half written is recognised. It must not know blocks, orders or threads. Layer L6.
"""

from __future__ import annotations

import errno
import os
import struct
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass

import numpy as np
import xxhash

from vllm.logger import init_logger
from vllm.v1.core.block_hash import BlockHashWithGroupId
from vllm.v1.simple_kv_offload.copy_backends.disk_file import check_private
from vllm.v1.simple_kv_offload.metadata import KeptKeys

logger = init_logger(__name__)

FORMAT_VERSION = 1
HEADER_BYTES = 4096
RECORD_BYTES = 256
_MAGIC = b"vllm-kv\0"
_RECORDS_PER_READ = 4096
# Own checksum of what follows; magic, version, bytes per record, bytes per slot, generation, digest.
_HEADER = struct.Struct("<Q8sIIQQ32s")
# Own checksum of what follows; slot, generation, sequence, checksum of the slot's bytes, number of keys.
_RECORD = struct.Struct("<QQQQQB")
# Length of the key, tokens of the prefix that it covers (-1: unknown); the key follows.
_KEY = struct.Struct("<Bq")
_CHECKSUM = struct.Struct("<Q")
_FIELDS = np.dtype([("head", "<u8", 5), ("rest", "V", RECORD_BYTES - 40)])
_GENERATION = 2


@dataclass(frozen=True, slots=True)
class Row:
    """What a slot holds; without keys: nothing that anybody may find."""

    slot: int
    checksum: int
    keys: KeptKeys


class KeptTable:
    """The table of ``num_slots`` slots of ``slot_bytes`` bytes, private, beside a file that its caller has locked.

    ``digest`` (32 bytes) says whose content it is: a table of another one, or a damaged one, is emptied. ``OSError``
    if the file cannot be opened or written.
    """

    def __init__(self, path: str, digest: bytes, num_slots: int, slot_bytes: int) -> None:
        self.path = path
        self._identity = (_MAGIC, FORMAT_VERSION, RECORD_BYTES, slot_bytes)
        self._digest = digest
        self._num_slots = num_slots
        self._sequence = 0
        self._fd = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC | os.O_NOFOLLOW, 0o600)
        try:
            check_private(self._fd, path)
            self._generation = self._open()
        except OSError:
            os.close(self._fd)
            raise

    def _open(self) -> int:
        """The generation of the rows that count."""
        found = os.pread(self._fd, _HEADER.size, 0)
        generation = self._read_header(found)
        if generation is None:
            if found:
                logger.warning(
                    "KV offload: the table %s is damaged or of another model, layout or version; "
                    "what was kept is not used.",
                    self.path,
                )
            os.ftruncate(self._fd, 0)
            generation = 1
            self._write_header(generation)
        # A smaller file than before: the rows of the slots that went are dropped for good.
        os.ftruncate(self._fd, HEADER_BYTES + self._num_slots * RECORD_BYTES)
        return generation

    def _read_header(self, header: bytes) -> int | None:
        if len(header) < _HEADER.size:
            return None
        checksum, *identity, generation, digest = _HEADER.unpack(header)
        intact = checksum == _hash(header[_CHECKSUM.size :])
        if not intact or tuple(identity) != self._identity or digest != self._digest:
            return None
        return int(generation)

    def _write_header(self, generation: int) -> None:
        body = _HEADER.pack(0, *self._identity, generation, self._digest)[_CHECKSUM.size :]
        self._write(_CHECKSUM.pack(_hash(body)) + body, 0)
        os.fdatasync(self._fd)

    def rows(self) -> list[Row]:
        """Every intact row that counts, the one written first in front. One pass over the table; no slot is read."""
        found: list[tuple[int, Row]] = []
        for first in range(0, self._num_slots, _RECORDS_PER_READ):
            count = min(_RECORDS_PER_READ, self._num_slots - first)
            data = os.pread(self._fd, count * RECORD_BYTES, HEADER_BYTES + first * RECORD_BYTES)
            heads = np.frombuffer(data[: len(data) // RECORD_BYTES * RECORD_BYTES], dtype=_FIELDS)["head"]
            for index in np.flatnonzero(heads[:, _GENERATION] == self._generation).tolist():
                record = data[index * RECORD_BYTES : (index + 1) * RECORD_BYTES]
                entry = _decode(record)
                if entry is not None and entry[1].slot == first + index and entry[1].keys:
                    found.append(entry)
        found.sort(key=lambda entry: entry[0])
        self._sequence = found[-1][0] + 1 if found else 0
        return [row for _, row in found]

    def write(self, rows: Iterable[Row]) -> None:
        """Replace the rows of these slots; neighbours go in one write."""
        for first, records in _runs({row.slot: self._encode(row) for row in rows}):
            self._write(b"".join(records), HEADER_BYTES + first * RECORD_BYTES)

    def clear(self) -> None:
        """None of the rows counts any more, even after a loss of power.

        After an error nothing that is written counts, until a later call succeeds.
        """
        self._generation += 1
        self._write_header(self._generation)

    def sync(self) -> None:
        """What was written stays, even after a loss of power."""
        os.fdatasync(self._fd)

    def close(self, *, remove: bool = False) -> None:
        """Let go of the file, or remove it. Idempotent."""
        if self._fd < 0:
            return
        os.close(self._fd)
        self._fd = -1
        if remove:
            os.unlink(self.path)

    def _encode(self, row: Row) -> bytes:
        if not row.keys:
            return bytes(RECORD_BYTES)
        keys, room = [], RECORD_BYTES - _RECORD.size
        for key, num_tokens in row.keys:
            entry = _KEY.pack(len(key), -1 if num_tokens is None else num_tokens) + key
            room -= len(entry)
            # A prefix that ends inside a block is no loss.
            if room < 0:
                break
            keys.append(entry)
        head = _RECORD.pack(0, row.slot, self._generation, self._sequence, row.checksum, len(keys))
        self._sequence += 1
        body = (head + b"".join(keys)).ljust(RECORD_BYTES, b"\0")[_CHECKSUM.size :]
        return _CHECKSUM.pack(_hash(body)) + body

    def _write(self, data: bytes, offset: int) -> None:
        done = 0
        while done < len(data):
            count = os.pwrite(self._fd, data[done:], offset + done)
            if count <= 0:
                raise OSError(errno.EIO, f"only {done} of {len(data)} bytes written to {self.path}")
            done += count


def _hash(data: bytes) -> int:
    return xxhash.xxh3_64_intdigest(data)


def _decode(record: bytes) -> tuple[int, Row] | None:
    """Sequence and row; None for a record that was not written to its end."""
    checksum, slot, _, sequence, data_checksum, num_keys = _RECORD.unpack_from(record)
    if checksum != _hash(record[_CHECKSUM.size :]):
        return None
    keys: list[tuple[BlockHashWithGroupId, int | None]] = []
    position = _RECORD.size
    for _ in range(num_keys):
        length, num_tokens = _KEY.unpack_from(record, position)
        position += _KEY.size
        key = BlockHashWithGroupId(record[position : position + length])
        keys.append((key, None if num_tokens < 0 else num_tokens))
        position += length
    return sequence, Row(slot, data_checksum, tuple(keys))


def _runs(records: dict[int, bytes]) -> Iterator[tuple[int, Sequence[bytes]]]:
    """Neighbouring slots together: the first of each run, and the run's records."""
    run: list[bytes] = []
    first = 0
    for slot in sorted(records):
        if run and slot != first + len(run):
            yield first, run
            run = []
        if not run:
            first = slot
        run.append(records[slot])
    if run:
        yield first, run
