"""How the disk backend talks to the kernel: direct where that works, aligned, joined, on several threads."""

from __future__ import annotations

import errno
import fcntl
import logging
import os
import threading
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from vllm.v1.simple_kv_offload.copy_backends import disk, disk_file
from vllm.v1.simple_kv_offload.copy_backends.base import CopyResult
from vllm.v1.simple_kv_offload.copy_backends.disk import PIECE_BYTES, THREADS_MAX
from vllm.v1.simple_kv_offload.copy_backends.disk_file import DIRECT_IO_ALIGNMENT, SlotFile, staging
from vllm.v1.simple_kv_offload.disk_backend import DiskBackend

SLOT = 65536
COUNT = 64


@pytest.fixture(autouse=True)
def loud(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(logging.getLogger("vllm"), "propagate", True)


def takes_direct_io(folder: Path) -> bool:
    """What the file system of the folder says by itself."""
    try:
        fd = os.open(folder / "probe", os.O_RDWR | os.O_CREAT | os.O_DIRECT)
    except OSError:
        return False
    finally:
        (folder / "probe").unlink(missing_ok=True)
    os.close(fd)
    return True


class Calls:
    """Each transfer to or from a file: where, how much, from which address, on which thread."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.offsets: list[int] = []
        self.sizes: list[int] = []
        self.addresses: list[int] = []
        self.threads: set[int] = set()
        write, read = os.pwrite, os.preadv

        def pwrite(fd: int, data: Any, at: int) -> int:
            self._note(data, at)
            return write(fd, data, at)

        def preadv(fd: int, buffers: Sequence[Any], at: int) -> int:
            self._note(buffers[0], at)
            return read(fd, buffers, at)

        monkeypatch.setattr(disk_file.os, "pwrite", pwrite)
        monkeypatch.setattr(disk_file.os, "preadv", preadv)

    def _note(self, data: Any, at: int) -> None:
        view = np.frombuffer(data, dtype=np.uint8)
        self.offsets.append(at)
        self.sizes.append(view.size)
        self.addresses.append(view.ctypes.data)
        self.threads.add(threading.get_ident())


def backend_on(path: Path, device: dict[str, torch.Tensor], *, use_page_cache: bool = False) -> DiskBackend:
    backend = DiskBackend()
    cpu = torch.device("cpu")
    backend.init(device, cpu, None, None, str(path), 2 * COUNT, SLOT, 2, use_page_cache)
    return backend


def move(backend: DiskBackend, blocks: Sequence[int], slots: Sequence[int], *, is_store: bool) -> None:
    events: list[tuple[int, CopyResult]] = []
    pair = (blocks, slots) if is_store else (slots, blocks)
    backend.launch_copy(*pair, is_store, 0, events)  # type: ignore[arg-type]
    assert events[0][1].synchronize(10.0)
    assert events[0][1].error is None


def random_blocks() -> dict[str, torch.Tensor]:
    return {"a": torch.randint(-100, 100, (COUNT, SLOT), dtype=torch.int8)}


@pytest.mark.parametrize("use_page_cache", [False, True])
def test_direct_io_is_used_where_the_file_system_takes_it_and_not_where_it_is_unwanted(
    tmp_path: Path, use_page_cache: bool
) -> None:
    file = SlotFile(str(tmp_path / "kv"), 4, SLOT, use_page_cache=use_page_cache)
    expected = takes_direct_io(tmp_path) and not use_page_cache
    assert file.is_direct == expected
    assert bool(fcntl.fcntl(file._fd, fcntl.F_GETFL) & os.O_DIRECT) == expected
    file.close()


def test_every_transfer_is_aligned_in_memory_and_on_disk(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    device = random_blocks()
    before = device["a"].clone()
    backend = backend_on(tmp_path / "kv", device)
    calls = Calls(monkeypatch)
    slots = [*range(40), *range(50, 2 * COUNT, 3)][:COUNT]
    move(backend, range(COUNT), slots, is_store=True)
    device["a"].zero_()
    move(backend, range(COUNT), slots, is_store=False)
    assert torch.equal(device["a"], before)
    for numbers in (calls.offsets, calls.sizes, calls.addresses):
        assert not [number for number in numbers if number % DIRECT_IO_ALIGNMENT]
    backend.shutdown()


@pytest.mark.parametrize("is_store", [True, False])
def test_neighbours_are_one_transfer_and_several_threads_share_a_job(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, is_store: bool
) -> None:
    device = random_blocks()
    backend = backend_on(tmp_path / "kv", device)
    slots = list(range(COUNT))
    move(backend, slots, slots, is_store=True)
    calls = Calls(monkeypatch)
    all_at_work = threading.Barrier(THREADS_MAX)
    name = "pwrite" if is_store else "preadv"
    real = getattr(disk_file.os, name)

    def together(*args: Any) -> int:
        all_at_work.wait(10.0)
        count: int = real(*args)
        return count

    monkeypatch.setattr(disk_file.os, name, together)
    # In no order: what lies side by side on disk goes there together all the same.
    shuffled = slots[::-1]
    move(backend, shuffled, shuffled, is_store=is_store)
    assert sorted(zip(calls.offsets, calls.sizes, strict=True)) == [
        (at, PIECE_BYTES) for at in range(0, COUNT * SLOT, PIECE_BYTES)
    ]
    assert len(calls.threads) == THREADS_MAX
    backend.shutdown()


@pytest.mark.parametrize("is_kept", [False, True])
@pytest.mark.parametrize("refuses", ["open", "transfer"])
def test_a_file_system_without_direct_io_gets_the_page_cache_and_a_message(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
    refuses: str,
    is_kept: bool,
) -> None:
    if not takes_direct_io(tmp_path):
        refuses = "nothing more"
    real_open, real_read = os.open, os.preadv

    def refuse_to_open(path: Any, flags: int, mode: int = 0o777) -> int:
        if flags & os.O_DIRECT:
            # As the kernel does: the file is made before its flags are looked at.
            os.close(real_open(path, flags & ~os.O_DIRECT, mode))
            raise OSError(errno.EINVAL, "Invalid argument", path)
        return real_open(path, flags, mode)

    def refuse_to_read(fd: int, buffers: Any, at: int) -> int:
        if fcntl.fcntl(fd, fcntl.F_GETFL) & os.O_DIRECT:
            raise OSError(errno.EINVAL, "Invalid argument")
        return real_read(fd, buffers, at)

    if refuses == "open":
        monkeypatch.setattr(disk_file.os, "open", refuse_to_open)
    elif refuses == "transfer":
        monkeypatch.setattr(disk_file.os, "preadv", refuse_to_read)
    path = tmp_path / "kv"
    file = SlotFile(str(path), 4, SLOT, use_page_cache=False, is_kept=is_kept)
    assert not file.is_direct
    assert "does not support direct I/O; the page cache is used" in caplog.text
    assert path.stat().st_mode & 0o777 == 0o600
    data, found = staging(2, SLOT), staging(2, SLOT)
    data[:] = 7
    file.write(1, data)
    file.read(1, found)
    assert np.array_equal(data, found)
    file.close()
    assert path.exists() == is_kept


def test_a_disk_that_cannot_be_read_at_all_is_no_lack_of_direct_io(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def broken(fd: int, buffers: Any, at: int) -> int:
        raise OSError(errno.EIO, "Input/output error")

    if not takes_direct_io(tmp_path):
        return
    monkeypatch.setattr(disk_file.os, "preadv", broken)
    with pytest.raises(OSError, match="Input/output"):
        SlotFile(str(tmp_path / "kv"), 4, SLOT, use_page_cache=False)
    assert not list(tmp_path.iterdir())


def test_parts_of_a_store_let_a_load_go_first_and_not_for_ever(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    device = random_blocks()
    backend = backend_on(tmp_path / "kv.e.rank_0", device, use_page_cache=True)
    move(backend, [0], [0], is_store=True)
    reading, go_on = threading.Event(), threading.Event()
    read = SlotFile.read

    def slow_read(file: SlotFile, first_slot: int, data: Any) -> None:
        reading.set()
        assert go_on.wait(10.0)
        read(file, first_slot, data)

    monkeypatch.setattr(SlotFile, "read", slow_read)
    monkeypatch.setattr(disk, "STORE_PATIENCE_S", 5.0)
    loads: list[tuple[int, CopyResult]] = []
    stores: list[tuple[int, CopyResult]] = []
    backend.launch_copy([0], [1], False, 0, loads)  # type: ignore[arg-type]
    assert reading.wait(10.0)
    backend.launch_copy([2], [2], True, 1, stores)  # type: ignore[arg-type]
    assert not stores[0][1].synchronize(0.3), "it stands back while something is loaded"
    go_on.set()
    assert loads[0][1].synchronize(10.0)
    assert stores[0][1].synchronize(3.0)
    go_on.clear()
    reading.clear()
    monkeypatch.setattr(disk, "STORE_PATIENCE_S", 0.01)
    backend.launch_copy([0], [1], False, 2, loads)  # type: ignore[arg-type]
    assert reading.wait(10.0)
    move(backend, [3], [3], is_store=True)
    assert not loads[1][1].query(), "a load that hangs does not keep stores from the disk"
    go_on.set()
    assert loads[1][1].synchronize(10.0)
    backend.shutdown()
