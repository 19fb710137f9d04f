"""The segment that engines of a node share: its shape, its locks, what death leaves behind, and many processes at once."""

import json
import multiprocessing
import os
import random
import signal
import time
from collections import Counter
from pathlib import Path

import pytest

from tests.helpers.shared_engines import Killed, MiniEngine, hammer, key_of, shape
from vllm.utils.clock import MonotonicClock
from vllm.v1.core.block_lease import Lease
from vllm.v1.simple_kv_offload.copy_backends import shared_segment
from vllm.v1.simple_kv_offload.copy_backends.shared_host import remove_stale_segments, segment_path
from vllm.v1.simple_kv_offload.copy_backends.shared_places import PlaceLocks
from vllm.v1.simple_kv_offload.copy_backends.shared_segment import (
    SegmentShape,
    SharedSegment,
)
from vllm.v1.simple_kv_offload.shared_pool import SharedPool

FORK = multiprocessing.get_context("fork")


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / "segment"


def test_regions_lie_behind_the_records_each_on_a_page_of_its_own() -> None:
    size = SegmentShape(b"d", 1000, 3, (100, 4096))
    starts = size.region_starts
    assert starts[0] >= 8 * (512 + shared_segment.LOG_SLOTS + 1000 * size.slot_words)
    assert starts[1] - starts[0] >= 1000 * 100
    assert starts[2] - starts[1] == 1000 * 4096
    assert all(start % 4096 == 0 for start in starts)


def test_the_file_is_private_and_goes_with_the_last_engine(path: Path) -> None:
    first, second = MiniEngine(path, shape()), MiniEngine(path, shape())
    assert path.stat().st_mode & 0o777 == 0o600
    first.segment.close()
    assert path.exists()
    second.segment.close()
    second.segment.close()
    assert not path.exists()


def test_what_one_stores_the_other_finds_and_does_not_store_again(path: Path) -> None:
    a, b = MiniEngine(path, shape()), MiniEngine(path, shape())
    assert a.stage(key_of(1))
    assert not b.read(key_of(1)), "half of a content is never found"
    assert not b.stage(key_of(1)), "a live peer is storing it"
    a.finish(0)
    assert b.read(key_of(1))
    assert not b.stage(key_of(1))


def test_dropping_nothing_from_a_slot_leaves_what_a_peer_has_announced(path: Path) -> None:
    a, b = MiniEngine(path, shape()), MiniEngine(path, shape())
    assert a.stage(key_of(1))
    b.evict(a.stores[0][0].blocks[0].block_id)
    assert not b.stage(key_of(1))
    a.finish(0)
    assert b.read(key_of(1))


def test_a_slot_that_another_engine_holds_is_never_taken(path: Path) -> None:
    a, b = MiniEngine(path, shape(3)), MiniEngine(path, shape(3))
    for number in (1, 2):
        assert a.stage(key_of(number))
        a.finish(0)
    assert b.read(key_of(1))
    assert a.stage(key_of(3)), "the other slot is free"
    assert not a.stage(key_of(4))
    b.end_read(0)
    assert a.stage(key_of(4))
    assert b.view() == ({}, {1, 2})


def test_an_engine_that_comes_later_sees_what_is_held(path: Path) -> None:
    a = MiniEngine(path, shape(4))
    with a.pool as pool:
        pool.get_new_blocks(2)  # nothing is known of what they are for
    b = MiniEngine(path, shape(4))
    assert b.view() == ({}, {1, 2})
    assert b.stage(key_of(1))
    assert not b.stage(key_of(2))


def test_the_least_recently_used_slot_of_all_engines_goes_first(path: Path) -> None:
    a, b = MiniEngine(path, shape(4)), MiniEngine(path, shape(4))
    for number in (1, 2, 3):
        a.stage(key_of(number))
        a.finish(0)
    b.read(key_of(1))
    b.end_read(0)
    a.stage(key_of(4))
    assert not a.read(key_of(2))
    assert a.read(key_of(1))


def test_a_store_from_before_a_reset_is_never_found(path: Path) -> None:
    a, b = MiniEngine(path, shape()), MiniEngine(path, shape())
    a.stage(key_of(1))
    a.finish(0)
    a.stage(key_of(2))
    b.reset()
    assert not a.read(key_of(1))
    a.finish(0)
    assert not a.read(key_of(2))
    assert not b.read(key_of(2))
    assert b.stage(key_of(2))


def test_a_reset_is_done_when_this_engine_holds_nothing(path: Path) -> None:
    a, b = MiniEngine(path, shape()), MiniEngine(path, shape())
    a.stage(key_of(1))
    a.finish(0)
    assert b.read(key_of(1))
    with a.pool:
        assert a.pool.invalidate_prefix_cache() == 0
    with b.pool:
        assert b.pool.invalidate_prefix_cache() == 1
    b.end_read(0)


def test_each_engine_tells_of_what_it_stored_itself(path: Path) -> None:
    a, b = MiniEngine(path, shape(3), events=True), MiniEngine(path, shape(3), events=True)
    a.stage(key_of(1))
    a.finish(0)
    b.view()
    assert [type(event).__name__ for event in a.pool.take_events()] == ["BlockStored"]
    assert b.pool.take_events() == []
    for number in (2, 3):
        b.stage(key_of(number))
        b.finish(0)
    a.view()
    assert [type(event).__name__ for event in a.pool.take_events()] == ["BlockRemoved"]
    assert [type(event).__name__ for event in b.pool.take_events()] == ["BlockStored", "BlockStored"]
    b.reset()
    a.view()
    assert [type(event).__name__ for event in a.pool.take_events()] == ["AllBlocksCleared"]


def test_a_pool_is_not_used_outside_its_turn(path: Path) -> None:
    engine = MiniEngine(path, shape())
    with pytest.raises(AssertionError, match="outside its turn"):
        engine.pool.get_new_blocks(1)
    with pytest.raises(AssertionError, match="outside its turn"):
        Lease(engine.pool, [engine.pool.blocks[1]], "read")


def test_an_engine_that_cannot_lock_the_pool_goes_on_without_it(
    path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    stopped, engine = MiniEngine(path, shape()), MiniEngine(path, shape())
    engine.stage(key_of(1))
    engine.finish(0)
    engine.read(key_of(1))
    with stopped.pool, engine.pool as pool:
        assert pool.is_off
        assert pool.get_num_free_blocks() == 0
        assert pool.invalidate_prefix_cache() > 0, "the others could not be told"
    assert not engine.read(key_of(1))
    assert not engine.stage(key_of(2))
    engine.end_read(0)
    assert not engine.read(key_of(1)), "off for good"
    assert stopped.read(key_of(1))
    assert "could not be locked" in caplog.text


def test_a_process_stopped_in_its_turn_costs_the_others_a_bounded_wait(path: Path) -> None:
    def stop_in_turn() -> None:
        engine = MiniEngine(path, shape())
        with engine.pool as pool:
            pool.get_new_blocks(1)
            os.kill(os.getpid(), signal.SIGSTOP)

    engine = MiniEngine(path, shape(), MonotonicClock())
    engine.segment._patience_s = 0.3
    process = FORK.Process(target=stop_in_turn)
    process.start()
    assert process.pid is not None
    os.waitid(os.P_PID, process.pid, os.WSTOPPED | os.WNOWAIT)
    started = time.monotonic()
    assert not engine.stage(key_of(1))
    assert engine.pool.is_off
    assert time.monotonic() - started < 5.0
    process.kill()
    process.join()
    heir = MiniEngine(path, shape())
    assert heir.view() == ({}, set())
    assert heir.stage(key_of(1))


def test_another_shape_is_refused_while_the_file_is_in_use_and_made_anew_after(path: Path) -> None:
    engine = MiniEngine(path, shape(9))
    for other in (shape(10), shape(digest=b"e"), SegmentShape(b"d" * 32, 9, 2, (1,))):
        with pytest.raises(ValueError, match=r"shared_pool: .*in use with"):
            MiniEngine(path, other)
    engine.die()
    assert MiniEngine(path, shape(10)).pool.num_gpu_blocks == 10


def test_no_room_is_a_clear_error_and_leaves_no_file(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(fd: int, offset: int, size: int) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(os, "posix_fallocate", full)
    with pytest.raises(ValueError, match=r"no room for \d+ bytes .*cpu_bytes_to_use"):
        MiniEngine(path, shape())
    assert not path.exists()


def test_half_a_file_and_foreign_bytes_are_made_anew(path: Path) -> None:
    for content in (b"", b"x" * 100, b"x" * (1 << 20)):
        path.write_bytes(content)
        engine = MiniEngine(path, shape())
        assert engine.view() == ({}, set())
        engine.segment.close()


def test_a_link_is_not_followed(path: Path, tmp_path: Path) -> None:
    (tmp_path / "target").write_bytes(b"precious")
    path.symlink_to(tmp_path / "target")
    with pytest.raises(ValueError, match="cannot be opened"):
        MiniEngine(path, shape())
    assert (tmp_path / "target").read_bytes() == b"precious"


def test_a_busy_engine_keeps_its_slots_until_its_process_ends(path: Path) -> None:
    a, b = MiniEngine(path, shape()), MiniEngine(path, shape())
    a.stage(key_of(1))
    a.segment.close(busy=True)
    assert b.view() == ({}, {1})
    a.die()
    assert b.view() == ({}, set())


def test_slots_of_the_dead_rest_for_a_while(path: Path) -> None:
    a = MiniEngine(path, shape())
    b = MiniEngine(path, shape())
    b.segment._grace_s = 0.2
    a.stage(key_of(1))
    a.die()
    assert b.view() == ({}, {1})
    time.sleep(0.25)
    assert b.view() == ({}, set())


def _everything(engine: MiniEngine) -> None:
    """A life that uses every kind of change: stores, evictions, reads, a failed store, a reset."""
    for number in (1, 2, 3, 4):
        if engine.stage(key_of(number)):
            engine.finish(0, ok=number != 3)
    assert engine.read(key_of(4))
    engine.evict(1)
    engine.end_read(0)
    engine.reset()
    engine.stage(key_of(5))
    engine.finish(0)


def test_a_death_between_any_two_writes_leaves_a_pool_that_works(tmp_path: Path) -> None:
    num_deaths = 0
    while True:
        path = tmp_path / f"segment{num_deaths}"
        peer = MiniEngine(path, shape(4))
        victim = MiniEngine(path, shape(4))
        victim.kill_after(num_deaths)
        try:
            _everything(victim)
            break
        except Killed:
            victim.die()
        found, held = peer.view()
        assert not held, "what the dead one held is free"
        for slot, key in found.items():
            peer.check(slot, key)
        _everything(peer)
        assert peer.read(key_of(5))
        peer.die()
        path.unlink()
        num_deaths += 1
    assert num_deaths > 90


def test_a_death_while_taking_over_from_the_dead_is_taken_over_too(tmp_path: Path) -> None:
    for num_stores in range(60):
        path = tmp_path / f"segment{num_stores}"
        first, second, third = (MiniEngine(path, shape()) for _ in range(3))
        for number in (1, 2, 3):
            first.stage(key_of(number))
        first.finish(0)
        first.read(key_of(1))
        first.die()
        second.kill_after(num_stores)
        try:
            second.view()
        except Killed:
            second.die()
        found, held = third.view()
        assert not held
        assert list(found.values()) == [key_of(1)]
        third.check(*found.popitem())
        path.unlink()


def test_a_death_while_joining_leaves_a_place_that_is_free_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    put, num_joins = SharedSegment._put, 0
    for num_stores in range(8):
        path, left = tmp_path / f"segment{num_stores}", [num_stores]
        peer = MiniEngine(path, shape())

        def dying_put(self: SharedSegment, word: int, value: int, left: list[int] = left) -> None:
            left[0] -= 1
            if left[0] < 0:
                raise Killed
            put(self, word, value)

        monkeypatch.setattr(SharedSegment, "_put", dying_put)
        try:
            MiniEngine(path, shape(), engine_id="victim").die()
            num_joins += 1
        except Killed:
            pass
        monkeypatch.setattr(SharedSegment, "_put", put)
        heir = MiniEngine(path, shape(), engine_id="victim")
        assert heir.stage(key_of(1))
        heir.finish(0)
        assert peer.read(key_of(1))
        assert len(peer.segment.attached()) == 1
        heir.die()
        peer.die()
    assert 0 < num_joins < 8


def test_tier_09_kill_and_restart_leaves_one_segment_and_always_starts(tmp_path: Path) -> None:
    path = Path(segment_path(str(tmp_path), "pool", b"d" * 32))

    def life(ready: object) -> None:
        engine = MiniEngine(path, shape())
        engine.stage(key_of(1))
        ready.set()  # type: ignore[attr-defined]
        time.sleep(60)

    for _ in range(20):
        ready = FORK.Event()
        process = FORK.Process(target=life, args=(ready,))
        process.start()
        assert ready.wait(10)
        assert process.pid is not None
        os.kill(process.pid, signal.SIGKILL)
        process.join()
        assert len(list(tmp_path.iterdir())) == 1
    engine = MiniEngine(path, shape())
    assert engine.view() == ({}, set())


def test_tier_09_segments_of_dead_engines_go_and_those_of_live_ones_stay(tmp_path: Path) -> None:
    def at(name: str, digest: bytes) -> Path:
        return Path(segment_path(str(tmp_path), name, digest * 32))

    own, dead, live, other = at("pool", b"a"), at("pool", b"b"), at("pool", b"c"), at("pool-2", b"b")
    MiniEngine(dead, shape()).die()
    MiniEngine(other, shape()).die()
    engine = MiniEngine(live, shape())
    (tmp_path / "notes").write_text("not ours")
    assert remove_stale_segments(str(own)) == [str(dead)]
    assert sorted(p.name for p in tmp_path.iterdir()) == sorted([live.name, other.name, "notes"])
    assert engine.stage(key_of(1))


def test_an_engine_that_was_about_to_open_a_removed_file_makes_its_own(
    path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    last = MiniEngine(path, shape())
    wait = PlaceLocks.wait_for_mutex

    def slow(self: PlaceLocks, patience_s: float) -> bool:
        if self is not last.segment._locks:
            monkeypatch.setattr(PlaceLocks, "wait_for_mutex", wait)
            last.segment.close()
        return wait(self, patience_s)

    monkeypatch.setattr(PlaceLocks, "wait_for_mutex", slow)
    engine = MiniEngine(path, shape())
    assert os.stat(path).st_ino == os.fstat(engine.segment._fd).st_ino
    assert engine.view() == ({}, set())


def test_more_changes_than_the_log_keeps_are_seen_too(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(shared_segment, "LOG_SLOTS", 64)
    a, b = MiniEngine(path, shape(30)), MiniEngine(path, shape(30))
    b.view()
    rng = random.Random(0)
    for _ in range(200):
        a.random_step(rng, 60)
    assert a.segment._words[shared_segment.CHANGES] > shared_segment.LOG_SLOTS
    assert a.view() == b.view()
    assert a.order() == b.order()


# However slow the machine is at starting processes.
KILLS_MIN = 6


@pytest.mark.parametrize("num_slots", [6, 40])
def test_processes_that_are_killed_at_random_never_leave_wrong_bytes(tmp_path: Path, num_slots: int) -> None:
    path, size, rng = tmp_path / "segment", shape(num_slots), random.Random(num_slots)

    def start(seed: int, steps: int | None = None, report: Path | None = None) -> multiprocessing.Process:
        process = FORK.Process(target=hammer, args=(path, size, seed, steps, report))
        process.start()
        return process  # type: ignore[return-value]

    survivor = start(1)
    num_killed, victims = 0, [start(seed) for seed in (2, 3)]
    started = time.monotonic()
    while (passed_s := time.monotonic() - started) < 3.0 or num_killed < KILLS_MIN:
        assert passed_s < 120.0, f"only {num_killed} processes could be started"
        time.sleep(rng.uniform(0.0, 0.1))
        place = rng.randrange(len(victims))
        victim = victims[place]
        assert victim.exitcode is None, "a process found wrong bytes or a broken pool"
        assert victim.pid is not None
        os.kill(victim.pid, signal.SIGKILL)
        victim.join()
        num_killed += 1
        victims[place] = start(100 + num_killed)
    assert survivor.exitcode is None
    for process in (survivor, *victims):
        process.kill()
        process.join()
    last = start(7, 400, tmp_path / "report")
    last.join()
    assert last.exitcode == 0
    counts = Counter(json.loads((tmp_path / "report").read_text()))
    assert counts["hit"] > 0
    assert counts["finish"] > 0
    assert not path.exists(), "the last engine removes it"


def test_a_pool_needs_no_events(path: Path) -> None:
    segment = SharedSegment(str(path), shape())
    assert SharedPool(segment, 16).take_events() == []
    segment.close()
