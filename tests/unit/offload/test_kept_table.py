"""The table of a kept disk file: its format, and what is left of it after whatever happened."""

from __future__ import annotations

import os
import struct
from pathlib import Path

import pytest

from vllm.v1.core.block_hash import BlockHashWithGroupId
from vllm.v1.simple_kv_offload.copy_backends import kept_table
from vllm.v1.simple_kv_offload.copy_backends.kept_table import HEADER_BYTES, RECORD_BYTES, KeptTable, Row


def rows(count: int, start: int = 1) -> list[Row]:
    return [
        Row(slot, slot * 7, ((BlockHashWithGroupId(bytes([slot % 251]) * 36), 16 * slot),))
        for slot in range(start, start + count)
    ]


def test_the_table_gives_back_what_was_written_last(tmp_path: Path) -> None:
    path = str(tmp_path / "kv.index")
    table = KeptTable(path, bytes(32), 5000, 4096)
    table.write(rows(20))
    table.write([Row(3, 0, ()), *rows(1, start=4500)])
    table.close()
    found = KeptTable(path, bytes(32), 5000, 4096).rows()
    assert found == [*rows(2), *rows(17, start=4), *rows(1, start=4500)]


def test_rows_come_back_in_the_order_in_which_they_were_written_whatever_their_slots(tmp_path: Path) -> None:
    path = str(tmp_path / "kv.index")
    table = KeptTable(path, bytes(32), 100, 4096)
    for start in (50, 3, 7):
        table.write(rows(2, start=start))
    table.write(rows(1, start=50))
    table.close()
    again = KeptTable(path, bytes(32), 100, 4096)
    assert again.rows() == [*rows(1, start=51), *rows(2, start=3), *rows(2, start=7), *rows(1, start=50)]
    again.write(rows(1, start=51))  # numbers go on behind those that were found
    assert again.rows()[-1] == rows(1, start=51)[0]


def test_a_table_of_another_digest_is_emptied(tmp_path: Path) -> None:
    path = str(tmp_path / "kv.index")
    table = KeptTable(path, b"a" * 32, 100, 4096)
    table.write(rows(5))
    table.close()
    assert KeptTable(path, b"b" * 32, 100, 4096).rows() == []
    assert KeptTable(path, b"a" * 32, 100, 4096).rows() == [], "also for the one whose it was"


def test_the_table_drops_keys_that_do_not_fit_from_the_end(tmp_path: Path) -> None:
    keys = tuple((BlockHashWithGroupId(bytes([i]) * 36), None if i == 2 else i) for i in range(9))
    table = KeptTable(str(tmp_path / "kv.index"), bytes(32), 8, 4096)
    table.write([Row(1, 5, keys)])
    (row,) = table.rows()
    assert len(row.keys) >= 4
    assert row.keys == keys[: len(row.keys)]


def test_neighbours_are_written_together(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    table = KeptTable(str(tmp_path / "kv.index"), bytes(32), 100, 4096)
    sizes: list[int] = []
    real = os.pwrite

    def pwrite(fd: int, data: bytes, at: int) -> int:
        sizes.append(len(data))
        return real(fd, data[:100], at)

    monkeypatch.setattr(kept_table.os, "pwrite", pwrite)
    table.write([*rows(4), *rows(2, start=50)])
    assert max(sizes) == 4 * RECORD_BYTES
    assert table.rows() == [*rows(4), *rows(2, start=50)]


def test_the_header_is_as_documented(tmp_path: Path) -> None:
    path = tmp_path / "kv.index"
    KeptTable(str(path), b"d" * 32, 3, 8192).close()
    data = path.read_bytes()
    assert len(data) == HEADER_BYTES + 3 * RECORD_BYTES
    assert struct.unpack_from("<8sIIQQ32s", data, 8) == (b"vllm-kv\0", 1, 256, 8192, 1, b"d" * 32)
