"""Requests that wait for memory: no admission that only leads to a preemption, and no look-up that cannot help."""

from __future__ import annotations

import pytest

from tests.helpers.sched import Driver, expected_output, full, make_scheduler, mamba, ring, window
from tests.helpers.sched_connector import FakeConnector
from vllm.v1.core.sched.params import MISFIT_PASSES_MAX
from vllm.v1.core.sched.pressure import MemoryPressure

SPECS = {
    "full": [full(4)],
    "window and state": [full(4), window(4, 8), mamba(4)],
    "two rows, ring and state": [full(4), full(4), ring(8), mamba(8)],
}


def prompt(length: int, seed: int = 0) -> list[int]:
    return [(seed * 7 + i * 3 + i * i * seed % 11) % 50 for i in range(length)]


def test_room_doubles_with_each_pass_that_preempts_and_ends_take_it_back() -> None:
    pressure = MemoryPressure()
    assert pressure.reserve(3, 2) == 0
    pressure.note_preemption(5)
    pressure.note_preemption(5)
    assert pressure.reserve(3, 2) == 6
    pressure.note_preemption(6)
    pressure.note_preemption(7)
    assert pressure.reserve(3, 2) == 24
    assert pressure.reserve(0, 2) == 0, "where nothing runs, nothing is kept from anybody"
    pressure.note_end()
    assert pressure.reserve(3, 2) == 6
    pressure.note_relief()
    pressure.note_end()
    assert pressure.reserve(3, 2) == 0


@pytest.mark.parametrize("looks_ahead", [False, True])
@pytest.mark.parametrize("num_blocks", [40, 60])
@pytest.mark.parametrize("kind", SPECS)
def test_nobody_is_admitted_and_preempted_again_and_again(
    kind: str, num_blocks: int, looks_ahead: bool
) -> None:
    scheduler = make_scheduler(SPECS[kind], num_blocks, looks_ahead=looks_ahead, max_num_batched_tokens=32)
    driver = Driver(scheduler, depth=2 if looks_ahead else 1)
    lengths = {f"r{i}": (10 + i % 3, 24 + 3 * i) for i in range(8)}
    requests = [driver.add(name, prompt(n, i), out) for i, (name, (n, out)) in enumerate(lengths.items())]
    passes_since_end = num_ends = preemptions = 0
    while len(driver.ends) < len(requests):
        driver.step()
        if len(driver.ends) > num_ends:
            num_ends, passes_since_end = len(driver.ends), 0
        now = sum(request.num_preemptions for request in requests)
        passes_since_end += now > preemptions
        preemptions = now
        assert passes_since_end <= num_blocks.bit_length() + 1
    assert max(request.num_preemptions for request in requests) <= 4
    driver.run()
    for i, (name, (n, out)) in enumerate(lengths.items()):
        assert driver.outputs[name] == expected_output(prompt(n, i), out)
    driver.assert_at_rest()


@pytest.mark.parametrize("kind", SPECS)
def test_nobody_is_admitted_into_the_blocks_that_admitted_prompts_still_lack(kind: str) -> None:
    num_blocks = {"full": 21, "window and state": 30, "two rows, ring and state": 40}[kind]
    scheduler = make_scheduler(SPECS[kind], num_blocks, long_prefill_token_threshold=8)
    driver = Driver(scheduler)
    requests = [driver.add("a", prompt(48), max_tokens=2), driver.add("b", prompt(40, 1), max_tokens=2)]
    driver.step()
    assert list(driver.steps[-1].num_scheduled_tokens) == ["a"], (
        "b fits beside what a has, not beside what it needs"
    )
    while "a" in [r.request_id for r in scheduler._inflight_prefills]:
        driver.step()
    driver.run()
    assert [request.num_preemptions for request in requests] == [0, 0]
    driver.assert_at_rest()


def test_where_prompts_need_not_fit_whole_nothing_is_kept_for_their_rest() -> None:
    scheduler = make_scheduler([full(4)], 21, long_prefill_token_threshold=8, reserve_full_isl=False)
    driver = Driver(scheduler)
    driver.add("a", prompt(48), max_tokens=2)
    driver.add("b", prompt(40, 1), max_tokens=2)
    driver.step()
    assert list(driver.steps[-1].num_scheduled_tokens) == ["a", "b"]
    driver.run()


def test_a_misfit_is_not_looked_up_again_before_something_has_changed() -> None:
    connector = FakeConnector(4)
    scheduler = make_scheduler([full(4)], 16, connector=connector, max_num_batched_tokens=64)
    driver = Driver(scheduler)
    driver.add("runs", prompt(37), max_tokens=20)
    driver.step()
    driver.add("waits", prompt(30, 1), max_tokens=2)
    passes = 0
    connector.asked.clear()
    while "runs" not in driver.ends:
        driver.step()
        passes += 1
    assert passes >= 2 * MISFIT_PASSES_MAX
    assert connector.asked.count("waits") <= 1 + passes // MISFIT_PASSES_MAX
    driver.step()
    assert "waits" in driver.steps[-1].num_scheduled_tokens, "blocks came free"
    driver.run()
    driver.assert_at_rest()


def test_a_misfit_is_looked_up_again_once_more_of_its_prefix_is_cached() -> None:
    scheduler = make_scheduler([full(4)], 16, max_num_batched_tokens=8, reserve_full_isl=True)
    driver = Driver(scheduler)
    driver.add("first", prompt(40), max_tokens=8)
    driver.step()
    driver.add("second", prompt(41), max_tokens=2)
    steps = 0
    while "second" not in driver.steps[-1].num_scheduled_tokens:
        driver.step()
        steps += 1
        assert steps < MISFIT_PASSES_MAX, "it shares the first one's blocks as soon as they are there"
    assert "first" not in driver.ends
    driver.run()
    driver.assert_at_rest()
