"""The start of a segment takes as long as the system needs for its memory: that is told, and waited for."""

import os
from pathlib import Path

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
