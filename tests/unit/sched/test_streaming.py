"""Sessions that get further input after they have answered."""

from __future__ import annotations

import pytest

from tests.helpers.sched import (
    Driver,
    expected_output,
    full,
    make_request,
    make_scheduler,
    mamba,
    ring,
    window,
)
from vllm.sampling_params import StructuredOutputsParams
from vllm.v1.kv_cache_interface import KVCacheSpec
from vllm.v1.message_types import FinishReason
from vllm.v1.request import RequestStatus


def prompt(length: int, seed: int = 0) -> list[int]:
    return [(seed * 7 + i * 3) % 50 for i in range(length)]


@pytest.fixture(params=[1, 2])
def driver(request: pytest.FixtureRequest) -> Driver:
    depth: int = request.param
    return Driver(make_scheduler([full(4)], 40, looks_ahead=depth > 1), depth=depth)


def drain(driver: Driver) -> None:
    """Step until only paused sessions are left."""
    for _ in range(60):
        if not driver.scheduler.has_unfinished_requests() and not driver.in_flight:
            return
        driver.step()
        while driver.in_flight and not driver.scheduler.has_unfinished_requests():
            driver.apply()
    raise AssertionError("the session does not pause")


def test_a_session_pauses_keeps_its_blocks_and_goes_on_with_the_next_input(driver: Driver) -> None:
    scheduler = driver.scheduler
    request = driver.add("s", prompt(9), max_tokens=4, resumable=True)
    drain(driver)
    first = expected_output(prompt(9), 4)
    assert driver.outputs["s"] == first
    assert driver.ends.pop("s").finish_reason is FinishReason.LENGTH
    assert request.status is RequestStatus.WAITING_FOR_STREAMING_REQ
    assert scheduler.has_request("s")
    assert scheduler.num_waiting_for_streaming_input == 1
    assert not scheduler.has_unfinished_requests()
    assert driver.free_blocks() < 39

    extended = prompt(9) + first[:-1] + prompt(6, 3)
    scheduler.add_request(make_request(scheduler, "s", prompt(6, 3), 3, resumable=False))
    assert scheduler.num_waiting_for_streaming_input == 0
    output = driver.step()
    new = next(entry for step in [output, *driver.steps] for entry in step.scheduled_new_reqs[-1:])
    assert new.prefill_token_ids == extended
    assert new.num_computed_tokens == 12, "what was computed is kept"
    driver.run()
    assert driver.outputs["s"] == first + expected_output(extended, 3)
    driver.assert_at_rest()


def test_input_that_came_early_is_taken_without_a_pause(driver: Driver) -> None:
    scheduler = driver.scheduler
    driver.add("s", prompt(9), max_tokens=4, resumable=True)
    driver.step()
    scheduler.add_request(make_request(scheduler, "s", prompt(6, 3), 3, resumable=False))
    first = expected_output(prompt(9), 4)
    while "s" not in driver.ends:
        driver.step()
    driver.ends.clear()
    driver.run()
    assert driver.outputs["s"] == first + expected_output(prompt(9) + first[:-1] + prompt(6, 3), 3)
    driver.assert_at_rest()


def test_an_empty_last_input_closes_the_session(driver: Driver) -> None:
    scheduler = driver.scheduler
    driver.add("s", prompt(9), max_tokens=4, resumable=True)
    drain(driver)
    scheduler.add_request(make_request(scheduler, "s", [], 3, resumable=False))
    assert not scheduler.has_request("s")
    driver.ends.clear()
    driver.run()
    driver.assert_at_rest()


def test_a_paused_session_can_be_aborted_and_takes_a_seat_until_then() -> None:
    driver = Driver(make_scheduler([full(4)], 40, max_num_seqs=1))
    scheduler = driver.scheduler
    driver.add("s", prompt(9), max_tokens=2, resumable=True)
    drain(driver)
    driver.add("b", prompt(5), max_tokens=1)
    assert driver.step().num_scheduled_tokens == {}
    scheduler.finish_requests("s", RequestStatus.FINISHED_ABORTED)
    driver.ends.clear()
    driver.run()
    assert driver.outputs["b"] == expected_output(prompt(5), 1)
    driver.assert_at_rest()


def test_hashes_of_a_session_follow_its_tokens() -> None:
    driver = Driver(make_scheduler([full(4)], 40))
    scheduler = driver.scheduler
    request = driver.add("s", prompt(9), max_tokens=3, resumable=True)
    drain(driver)
    scheduler.add_request(make_request(scheduler, "s", prompt(6, 3), 1, resumable=True))
    fresh = make_request(scheduler, "fresh", list(request.all_token_ids))
    assert request.block_hashes == fresh.block_hashes
    assert len(request.block_hashes) == 17 // 4


KINDS = [[mamba()], [full(), mamba()], [full(), mamba(), ring()], [full(), window()], [full()]]


@pytest.mark.parametrize("specs", KINDS)
@pytest.mark.parametrize("depth", [1, 2])
@pytest.mark.parametrize("is_early", [False, True])
def test_a_session_goes_on_from_what_belongs_to_its_tokens(
    specs: list[KVCacheSpec], depth: int, is_early: bool
) -> None:
    """With look-ahead a step computes the token that stopped the answer, which is not part of the session."""
    for length in range(7, 12):
        driver = Driver(make_scheduler(specs, 60, looks_ahead=depth > 1), depth=depth)
        scheduler = driver.scheduler
        first = expected_output(prompt(length), 3)
        driver.add("s", prompt(length), max_tokens=14, resumable=True, stop_token_ids=[first[-1]])
        update = make_request(scheduler, "s", prompt(6, 3), 3, resumable=False)
        if is_early:
            scheduler.add_request(update)
        while "s" not in driver.ends:
            driver.step()
        del driver.ends["s"]
        if not is_early:
            drain(driver)
            scheduler.add_request(update)
        driver.run()
        extended = prompt(length) + first[:-1] + prompt(6, 3)
        assert driver.outputs["s"] == first + expected_output(extended, 3)
        driver.assert_at_rest()


def test_an_input_without_tokens_that_is_not_the_last_is_refused(driver: Driver) -> None:
    scheduler = driver.scheduler
    request = driver.add("s", prompt(9), max_tokens=4, resumable=True)
    drain(driver)
    with pytest.raises(ValueError, match="'s' has no tokens"):
        scheduler.add_request(make_request(scheduler, "s", [], 3, resumable=True))
    assert request.status is RequestStatus.WAITING_FOR_STREAMING_REQ
    driver.ends.clear()
    scheduler.add_request(make_request(scheduler, "s", prompt(5), 3, resumable=False))
    driver.run()
    assert len(driver.outputs["s"]) == 4 + 3
    driver.assert_at_rest()


def test_an_input_brings_its_own_wish_for_log_probabilities(driver: Driver) -> None:
    request = driver.add("s", prompt(9), max_tokens=4, resumable=True)
    drain(driver)
    assert not request.wants_logprobs
    update = make_request(driver.scheduler, "s", prompt(5), 3, resumable=False, logprobs=1)
    driver.scheduler.add_request(update)
    assert request.wants_logprobs
    assert not request.has_plain_output


def test_only_the_first_answer_of_a_session_can_follow_a_grammar(driver: Driver) -> None:
    request = driver.add("s", prompt(9), max_tokens=4, resumable=True)
    drain(driver)
    grammar = StructuredOutputsParams(regex="a+")
    constrained = make_request(driver.scheduler, "s", prompt(5), structured_outputs=grammar)
    with pytest.raises(ValueError, match="'s': only the answer to its first input"):
        driver.scheduler.add_request(constrained)
    assert request.status is RequestStatus.WAITING_FOR_STREAMING_REQ
    # As if the first answer had one.
    request.structured_output_request = constrained.structured_output_request
    driver.ends.clear()
    driver.scheduler.add_request(make_request(driver.scheduler, "s", prompt(5), 3, resumable=False))
    assert not request.use_structured_output
    driver.run()
    driver.assert_at_rest()


def test_a_reset_of_what_runs_takes_the_blocks_of_a_paused_session_too(driver: Driver) -> None:
    scheduler = driver.scheduler
    driver.add("s", prompt(9), max_tokens=4, resumable=True)
    drain(driver)
    first = driver.outputs["s"].copy()
    assert scheduler.reset_prefix_cache(reset_running_requests=True)
    assert driver.free_blocks() == 39
    driver.ends.clear()
    scheduler.add_request(make_request(scheduler, "s", prompt(6, 3), 3, resumable=False))
    output = driver.step()
    assert output.scheduled_new_reqs[0].num_computed_tokens == 0, "nothing from before the reset is used"
    driver.run()
    extended = prompt(9) + first[:-1] + prompt(6, 3)
    assert driver.outputs["s"] == first + expected_output(extended, 3)
    driver.assert_at_rest()
