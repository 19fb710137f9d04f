"""Copy lanes: a dead or hanging thread fails its jobs, is replaced, and can do no harm afterwards."""

from __future__ import annotations

import os
import sys
import threading
import time
from collections.abc import Iterator

import pytest

from tests.helpers.sched import ManualClock
from vllm.v1.simple_kv_offload.copy_backends.base import CopyError, CopyJob, CopyResult
from vllm.v1.simple_kv_offload.copy_backends.lane import CopyLane


class Work:
    """Jobs hang while the gate is closed; each writes its number under the guard, as movers do."""

    def __init__(self) -> None:
        self.gate = threading.Event()
        self.started = threading.Semaphore(0)
        self.written: list[int] = []
        self.kill = False

    def __call__(self, job: CopyJob) -> None:
        self.started.release()
        if self.kill:
            raise SystemExit  # not an Exception: the thread dies
        self.gate.wait(10.0)
        with job.result.guard:
            if job.result.query():
                return
            self.written.append(job.event_idx)
        job.result.resolve()


def job(number: int) -> CopyJob:
    return CopyJob((), (), True, number)


@pytest.fixture
def work() -> Iterator[Work]:
    work = Work()
    yield work
    work.gate.set()


@pytest.fixture
def clock() -> ManualClock:
    return ManualClock()


@pytest.fixture
def lane(work: Work, clock: ManualClock) -> Iterator[CopyLane]:
    lane = CopyLane("test-lane", work, clock, deadline_s=5.0)
    yield lane
    work.gate.set()
    lane.shutdown()


def test_only_the_lane_stands_back_also_after_a_restart(clock: ManualClock) -> None:
    seen: list[int] = []

    def work(job: CopyJob) -> None:
        seen.append(os.getpriority(os.PRIO_PROCESS, threading.get_native_id()))
        job.result.resolve()

    own = os.getpriority(os.PRIO_PROCESS, threading.get_native_id())
    lane = CopyLane("test-lane", work, clock, deadline_s=5.0, niceness=own + 3)
    for number in range(2):
        done = job(number)
        lane.submit(done)
        assert done.result.synchronize(5.0)
        assert lane._thread is not None
        if number == 0:
            lane._thread.close()
            assert lane._thread.join(5.0)
        lane.check_health()
    lane.shutdown()
    # Elsewhere a thread has no priority of its own.
    assert seen == [own + 3 if sys.platform == "linux" else own] * 2
    assert lane.restarts == 1
    assert os.getpriority(os.PRIO_PROCESS, threading.get_native_id()) == own


def test_a_hanging_job_fails_at_its_deadline_and_the_lane_goes_on(
    lane: CopyLane, work: Work, clock: ManualClock
) -> None:
    stuck, queued = job(1), job(2)
    lane.submit(stuck)
    lane.submit(queued)
    assert work.started.acquire(timeout=5.0)
    clock.now += 4.0
    lane.check_health()
    assert not stuck.result.query()
    clock.now += 2.0
    lane.check_health()
    assert stuck.result.query()
    assert queued.result.query()
    assert "within 5 s" in str(stuck.result.error)
    assert lane.restarts == 1
    work.gate.set()
    fresh = job(3)
    lane.submit(fresh)
    assert fresh.result.synchronize(5.0)
    assert fresh.result.error is None
    assert work.written == [3], "the replaced thread wakes up and writes nothing"


@pytest.mark.filterwarnings("ignore::pytest.PytestUnhandledThreadExceptionWarning")
def test_a_dead_thread_fails_its_jobs_and_is_replaced(lane: CopyLane, work: Work) -> None:
    work.kill = True
    lost = job(1)
    lane.submit(lost)
    assert work.started.acquire(timeout=5.0)
    for _ in range(200):
        lane.check_health()
        if lost.result.synchronize(0.01):
            break
    assert "died" in str(lost.result.error)
    work.kill = False
    work.gate.set()
    fresh = job(2)
    lane.submit(fresh)
    assert fresh.result.synchronize(5.0)
    assert fresh.result.error is None


def test_a_job_in_the_middle_of_a_write_stays_open(clock: ManualClock) -> None:
    writing, go = threading.Event(), threading.Event()

    def slow_write(copy: CopyJob) -> None:
        with copy.result.guard:
            writing.set()
            go.wait(10.0)
        copy.result.resolve()

    lane = CopyLane("test-lane", slow_write, clock, deadline_s=1.0)
    stuck = job(1)
    lane.submit(stuck)
    assert writing.wait(5.0)
    clock.now += 2.0
    lane.check_health()
    assert not stuck.result.query(), "bytes still arrive: its targets must not be handed on"
    began = time.monotonic()
    for _ in range(20):
        lane.check_health()
    assert time.monotonic() - began < 1.0, "steps ask several times each and do not wait for it again"
    assert not stuck.result.query()
    go.set()
    assert stuck.result.synchronize(5.0)
    lane.shutdown()


def test_a_job_that_hangs_on_behind_the_write_it_was_found_in_fails_when_that_is_over(
    clock: ManualClock,
) -> None:
    writing, go, hangs = threading.Event(), threading.Event(), threading.Event()

    def write_and_hang(copy: CopyJob) -> None:
        with copy.result.guard:
            writing.set()
            go.wait(10.0)
        hangs.wait(10.0)

    lane = CopyLane("test-lane", write_and_hang, clock, deadline_s=1.0)
    stuck = job(1)
    lane.submit(stuck)
    assert writing.wait(5.0)
    clock.now += 2.0
    lane.check_health()
    assert not stuck.result.query()
    go.set()
    deadline = time.monotonic() + 5.0
    while not stuck.result.query() and time.monotonic() < deadline:
        lane.check_health()
    assert "hung in a write" in str(stuck.result.error)
    hangs.set()
    lane.shutdown()


def test_shutdown_fails_what_is_open(lane: CopyLane, work: Work) -> None:
    running, queued = job(1), job(2)
    lane.submit(running)
    lane.submit(queued)
    assert work.started.acquire(timeout=5.0)
    threading.Timer(0.1, work.gate.set).start()
    assert lane.shutdown()
    assert isinstance(queued.result.error, CopyError)
    late = job(3)
    lane.submit(late)
    assert "shut down" in str(late.result.error)


def test_a_result_is_resolved_once() -> None:
    result = CopyResult()
    result.resolve(CopyError("first", frozenset({3})))
    result.resolve()
    assert str(result.error) == "first"
    assert result.bad_blocks == {3}
