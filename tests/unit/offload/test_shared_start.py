"""The start of a segment takes as long as the system needs for its memory: that is told, and waited for."""

import errno
import mmap
import os
from pathlib import Path
from typing import Any

import pytest

from tests.helpers.sched import ManualClock
from tests.helpers.shared_engines import MiniEngine, shape
from vllm.v1.simple_kv_offload.copy_backends import shared_places, shared_segment
from vllm.v1.simple_kv_offload.copy_backends.shared_places import PlaceLocks
from vllm.v1.simple_kv_offload.copy_backends.shared_segment import SegmentShape, SharedSegment


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / "segment"


def test_a_long_reservation_says_how_far_it_is(
    path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    clock, reserve = ManualClock(), os.posix_fallocate

    def slow(fd: int, offset: int, size: int) -> None:
        clock.now += 1.5
        reserve(fd, offset, size)

    monkeypatch.setattr(os, "posix_fallocate", slow)
    monkeypatch.setattr(shared_places, "RESERVE_BYTES", 1 << 17)
    caplog.set_level("INFO", logger=shared_places.logger.name)
    big = SegmentShape(b"d" * 32, 9, 1, (1000,))
    segment = SharedSegment(str(path), big, clock)
    size = big.region_starts[-1]
    assert path.stat().st_blocks * 512 >= size
    words = [record.message for record in caplog.records if "reserving" in record.message]
    assert len(words) == -(-size // (1 << 17)) // 2
    assert all(f"of {size / 2**30:.1f} GiB" in word for word in words)
    segment.close()


@pytest.mark.parametrize(("grows", "waits"), [(True, 6), (False, 1)])
def test_an_engine_waits_for_another_ones_start_as_long_as_that_gets_on(
    path: Path, monkeypatch: pytest.MonkeyPatch, grows: bool, waits: int
) -> None:
    MiniEngine(path, shape()).die()
    waited: list[float] = []
    wait, size = PlaceLocks.wait_for_mutex, path.stat().st_size

    def other_has_it(self: PlaceLocks, patience_s: float) -> bool:
        if len(waited) >= 6:
            return wait(self, patience_s)
        if grows:
            os.posix_fallocate(self._fd, size + (len(waited) << 16), 1 << 16)
        waited.append(patience_s)
        return False

    monkeypatch.setattr(PlaceLocks, "wait_for_mutex", other_has_it)
    if grows:
        assert MiniEngine(path, shape()).view() == ({}, set())
    else:
        with pytest.raises(ValueError, match=r"has kept .* locked for 120 s"):
            MiniEngine(path, shape())
    assert waited == [shared_segment.START_PATIENCE_S] * waits


class Mapping(mmap.mmap):
    """A mapping that tells what is asked of the system for it."""

    asked: list[tuple[int, ...]]
    refuses = False

    def madvise(self, *args: Any) -> None:
        self.asked.append(args)
        if self.refuses:
            raise OSError(errno.EINVAL, "unknown advice")
        super().madvise(*args)


BIG = SegmentShape(b"d" * 32, 9, 1, (1000,))


@pytest.fixture
def mapping(monkeypatch: pytest.MonkeyPatch) -> type[Mapping]:
    Mapping.asked, Mapping.refuses = [], False
    monkeypatch.setattr(shared_places.mmap, "mmap", Mapping)
    return Mapping


@pytest.mark.parametrize("refuses", [False, True])
def test_huge_pages_are_asked_for_where_the_mount_gives_them_to_who_asks(
    path: Path, mapping: type[Mapping], monkeypatch: pytest.MonkeyPatch, refuses: bool
) -> None:
    """They come while the memory is reserved, as that alone gives the kernel's own pages; without them all goes on."""
    device = os.stat(path.parent).st_dev
    mounts = path.parent / "mounts"
    mounts.write_text(
        f"1 0 9999:9 / /elsewhere rw - tmpfs tmpfs rw\n"
        f"2 1 {os.major(device)}:{os.minor(device)} / /dev/shm rw - tmpfs tmpfs rw,size=9k,huge=advise\n"
    )
    monkeypatch.setattr(shared_places, "MOUNTS", mounts)
    mapping.refuses = refuses
    segment = SharedSegment(str(path), BIG)
    size = BIG.region_starts[-1]
    populate = [(shared_places.MADV_POPULATE_WRITE, 0, size)]
    assert mapping.asked == [(mmap.MADV_HUGEPAGE,), *([] if refuses else populate)]
    assert path.stat().st_blocks * 512 >= size
    segment.close()


def test_memory_of_other_mounts_is_only_reserved(
    path: Path, mapping: type[Mapping], monkeypatch: pytest.MonkeyPatch
) -> None:
    for mounts in (path.parent / "no such file", path.parent / "mounts"):
        (path.parent / "mounts").write_text("2 1 9999:9 / /elsewhere rw - tmpfs tmpfs rw,huge=advise\n")
        monkeypatch.setattr(shared_places, "MOUNTS", mounts)
        SharedSegment(str(path), BIG).close()
    assert mapping.asked == []


@pytest.mark.parametrize("nodes", [0, 2])
def test_a_segment_comes_from_all_memory_nodes_whether_or_not_the_system_lets_it(
    path: Path, monkeypatch: pytest.MonkeyPatch, nodes: int
) -> None:
    """Before any of it is there: memory that is there already stays where it is."""
    asked: list[tuple[int, int, int]] = []

    def spread(address: int, num_bytes: int) -> int:
        asked.append((address % mmap.PAGESIZE, num_bytes, path.stat().st_blocks))
        return nodes

    monkeypatch.setattr(shared_places, "spread_over_nodes", spread)
    segment = SharedSegment(str(path), BIG)
    assert asked == [(0, BIG.region_starts[-1], 0)]
    segment.close()
