"""The disk backend's file: private, checked, cleaned up after use and after a crash."""

from __future__ import annotations

import fcntl
import os
import stat
import time
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch

from tests.helpers.sched import ManualClock
from vllm.v1.simple_kv_offload.copy_backends import disk_file
from vllm.v1.simple_kv_offload.copy_backends.base import CopyError, CopyResult
from vllm.v1.simple_kv_offload.copy_backends.disk_file import (
    STALE_AFTER_S,
    SlotFile,
    remove_stale_files,
    staging,
)
from vllm.v1.simple_kv_offload.disk_backend import DiskBackend, disk_file_path

SLOT = 4096


def pattern(value: int, slots: int = 1) -> Any:
    data = staging(slots, SLOT)
    data[:] = value
    return data


def test_the_file_is_private_exclusive_and_gone_after_use(tmp_path: Path) -> None:
    path = tmp_path / "kv"
    file = SlotFile(str(path), 4, SLOT, use_page_cache=False)
    assert stat.S_IMODE(path.stat().st_mode) == 0o600
    assert path.stat().st_size == 4 * SLOT
    with pytest.raises(FileExistsError):
        SlotFile(str(path), 4, SLOT, use_page_cache=False)
    file.close()
    file.close()
    assert not path.exists()


def test_direct_io_wants_aligned_blocks(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="multiple of 4096 bytes, got 100"):
        SlotFile(str(tmp_path / "kv"), 4, 100, use_page_cache=False)
    SlotFile(str(tmp_path / "kv"), 4, 100, use_page_cache=True).close()


def test_tier_06_one_flipped_byte_is_found(tmp_path: Path) -> None:
    path = tmp_path / "kv"
    file = SlotFile(str(path), 4, SLOT, use_page_cache=True)
    file.write(0, pattern(5, slots=3))
    with path.open("r+b") as raw:
        raw.seek(SLOT + 17)
        raw.write(b"\x06")
    buffer = staging(3, SLOT)
    with pytest.raises(CopyError, match="checksum") as error:
        file.read(0, buffer)
    assert error.value.bad_blocks == {1}
    file.read(0, buffer[:1])
    assert (buffer[0] == 5).all()
    file.close()


def test_tier_01_a_truncated_file_names_its_bad_slots(tmp_path: Path) -> None:
    path = tmp_path / "kv"
    file = SlotFile(str(path), 4, SLOT, use_page_cache=True)
    file.write(0, pattern(5, slots=2))
    os.truncate(path, SLOT)
    file.read(0, staging(1, SLOT))
    with pytest.raises(CopyError, match="failed") as error:
        file.read(1, staging(1, SLOT))
    assert error.value.bad_blocks == {1}
    file.close()


def test_a_slot_never_written_is_not_readable(tmp_path: Path) -> None:
    file = SlotFile(str(tmp_path / "kv"), 4, SLOT, use_page_cache=True)
    with pytest.raises(CopyError, match="checksum"):
        file.read(2, staging(1, SLOT))
    file.close()


def test_partial_transfers_are_continued(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    file = SlotFile(str(tmp_path / "kv"), 2, SLOT, use_page_cache=True)
    real_write, real_read = os.pwrite, os.preadv
    monkeypatch.setattr(disk_file.os, "pwrite", lambda fd, data, at: real_write(fd, data[:1000], at))
    monkeypatch.setattr(disk_file.os, "preadv", lambda fd, bufs, at: real_read(fd, [bufs[0][:700]], at))
    data = staging(2, SLOT)
    data[:] = np.arange(2 * SLOT).reshape(2, SLOT) % 101
    file.write(0, data)
    buffer = staging(2, SLOT)
    file.read(0, buffer)
    assert (buffer == data).all()
    file.close()


def test_a_full_disk_is_a_failed_store(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    device = {"a": torch.zeros(4, SLOT, dtype=torch.int8)}
    backend = DiskBackend()
    backend.init(device, torch.device("cpu"), None, None, str(tmp_path / "kv"), 4, SLOT, 2, True)

    def no_space(fd: int, data: object, at: int) -> int:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(disk_file.os, "pwrite", no_space)
    events: list[tuple[int, CopyResult]] = []
    backend.launch_copy([0], [0], True, 0, events)  # type: ignore[arg-type]
    assert events[0][1].synchronize(5.0)
    assert "No space" in str(events[0][1].error)
    backend.shutdown()
    assert not list(tmp_path.iterdir())


def test_a_failed_load_names_all_its_bad_slots_in_whatever_order_they_are_read(tmp_path: Path) -> None:
    device = {"a": torch.ones(16, SLOT, dtype=torch.int8)}
    backend = DiskBackend()
    path = tmp_path / "kv"
    backend.init(device, torch.device("cpu"), None, None, str(path), 16, SLOT, 1, True)
    slots = list(range(0, 16, 2))  # no neighbours: a part for each
    for bad in ({0, 4, 12}, {14}):
        events: list[tuple[int, CopyResult]] = []
        backend.launch_copy(slots, slots, True, 0, events)  # type: ignore[arg-type]
        assert events[0][1].synchronize(5.0)
        with path.open("r+b") as raw:
            for slot in bad:
                raw.seek(slot * SLOT)
                raw.write(b"\x07")
        backend.launch_copy(slots, slots, False, 1, events)  # type: ignore[arg-type]
        assert events[1][1].synchronize(5.0)
        assert events[1][1].bad_blocks == bad
    backend.shutdown()


def age(path: Path) -> None:
    old = time.time() - 3600
    os.utime(path, (old, old))


def test_tier_07_files_of_dead_engines_are_removed_and_nothing_else(tmp_path: Path) -> None:
    own = tmp_path / "kv.me.rank_0"
    dead, fresh, live = (tmp_path / f"kv.{name}.rank_0" for name in ("dead", "fresh", "live"))
    foreign, other = tmp_path / "kv.txt", tmp_path / "other.dead.rank_0"
    for path in (dead, fresh, live, foreign, other):
        path.write_bytes(b"x")
    link = tmp_path / "kv.link.rank_0"
    link.symlink_to(foreign)
    for path in (dead, live, foreign, other):
        age(path)
    with live.open("rb") as held:
        fcntl.flock(held, fcntl.LOCK_EX)
        assert remove_stale_files(str(own)) == [str(dead)]
    assert sorted(path.name for path in tmp_path.iterdir()) == sorted(
        ["kv.fresh.rank_0", "kv.live.rank_0", "kv.link.rank_0", "kv.txt", "other.dead.rank_0"]
    )


def test_tier_09_kill_and_restart_leaves_at_most_one_file(tmp_path: Path) -> None:
    for number in range(20):
        path = disk_file_path(str(tmp_path / "kv"), engine(f"engine{number}"))
        remove_stale_files(path)
        file = SlotFile(path, 2, SLOT, use_page_cache=True)
        os.close(file._fd)  # kill -9: the lock goes, the file stays
        age(Path(path))
        assert len(list(tmp_path.iterdir())) == 1


def test_tier_07_a_file_that_was_fresh_at_the_start_goes_when_it_is_old_enough(tmp_path: Path) -> None:
    """An engine that is started again right after a kill -9 lives with the dead one's file otherwise."""
    clock, device = ManualClock(), {"a": torch.zeros(4, SLOT, dtype=torch.int8)}
    dead = tmp_path / "kv.dead.rank_0"
    dead.write_bytes(b"x" * SLOT)
    backend = DiskBackend(clock=clock)
    backend.init(
        device, torch.device("cpu"), None, None, str(tmp_path / "kv.me.rank_0"), 4, SLOT, use_page_cache=True
    )

    def store(event: int) -> None:
        events: list[Any] = []
        backend.launch_copy([1], [1], True, event, events)
        assert events[0][1].synchronize(5.0)
        assert events[0][1].error is None

    store(0)
    assert dead.exists(), "it may be just starting up"
    age(dead)
    store(1)
    assert dead.exists(), "one look a minute later is enough"
    clock.now += STALE_AFTER_S + 1
    store(2)
    assert [path.name for path in tmp_path.iterdir()] == ["kv.me.rank_0"]
    backend.shutdown()


def engine(engine_id: str | None) -> Any:
    return SimpleNamespace(kv_transfer_config=SimpleNamespace(engine_id=engine_id))


def test_two_engines_never_share_a_file() -> None:
    assert disk_file_path("/d/kv", engine("a")) != disk_file_path("/d/kv", engine("b"))
    assert disk_file_path("/d/kv", engine("a")) == "/d/kv.a.rank_0"
    assert disk_file_path("/d/kv", None) == "/d/kv.rank_0"


@pytest.mark.parametrize(
    ("slots", "block_bytes", "message"),
    [(0, SLOT, "disk_buffer_slots must be at least 1, got 0"), (2, 2 * SLOT, "4096 bytes on the device")],
)
def test_impossible_sizes_are_refused(tmp_path: Path, slots: int, block_bytes: int, message: str) -> None:
    device = {"a": torch.zeros(4, SLOT, dtype=torch.int8)}
    with pytest.raises(ValueError, match=message):
        DiskBackend().init(
            device, torch.device("cpu"), None, None, str(tmp_path / "kv"), 4, block_bytes, slots, True
        )
