from vllm.utils.clock import MonotonicClock
from vllm.utils.ids import CountingIds, RandomIds


def test_monotonic_clock_does_not_go_back():
    clock = MonotonicClock()
    assert clock.monotonic() <= clock.monotonic()
    assert clock.time() > 1.5e9


def test_random_ids_differ():
    ids = RandomIds()
    assert len({ids.next_id() for _ in range(100)}) == 100


def test_counting_ids_are_reproducible():
    ids = CountingIds("r")
    assert [ids.next_id() for _ in range(3)] == ["r0", "r1", "r2"]
