"""Several threads at the parts of one job: all done, the first error told, nobody left behind."""

from __future__ import annotations

import threading
import time
from functools import partial

import pytest

from vllm.v1.simple_kv_offload.copy_backends.gang import Gang


def test_parts_run_at_the_same_time() -> None:
    gang = Gang(3)
    meeting = threading.Barrier(3, timeout=5)
    gang.run([lambda: meeting.wait() and None for _ in range(3)])
    gang.close(5.0)


def test_all_parts_run_in_any_number_of_threads() -> None:
    for size in (1, 2, 4):
        gang = Gang(size)
        for count in (0, 1, 2, 17):
            seen: list[int] = []
            gang.run([partial(seen.append, i) for i in range(count)])
            assert sorted(seen) == list(range(count))
        gang.close(5.0)


@pytest.mark.parametrize("size", [1, 3])
def test_the_error_is_raised_when_no_part_runs_any_more(size: int) -> None:
    gang = Gang(size)
    running: list[int] = []

    def slow() -> None:
        running.append(1)
        time.sleep(0.05)
        running.pop()

    def bad() -> None:
        raise OSError(28, "No space left on device")

    with pytest.raises(OSError, match="No space"):
        gang.run([slow, bad, slow, slow])
    assert not running
    done: list[int] = []
    gang.run([lambda: done.append(1), lambda: done.append(2)])
    assert sorted(done) == [1, 2], "the next job knows nothing of it"
    gang.close(5.0)


def test_a_closed_gang_leaves_no_thread() -> None:
    before = threading.active_count()
    gang = Gang(4)
    gang.run([lambda: time.sleep(0.01)] * 8)
    gang.close(5.0)
    assert threading.active_count() == before
