"""Counters and results with one step of look-ahead."""

from __future__ import annotations

import pytest

from tests.helpers.sched import STEP_FAILED, Driver, expected_output, full, make_request, make_scheduler
from vllm.v1.outputs import DraftTokenIds, ModelRunnerOutput
from vllm.v1.request import RequestStatus


def prompt(length: int, seed: int = 0) -> list[int]:
    return [(seed * 7 + i * 3) % 50 for i in range(length)]


def ahead(num_blocks: int = 40, **config: object) -> Driver:
    return Driver(make_scheduler([full(4)], num_blocks, looks_ahead=True, **config), depth=2)  # type: ignore[arg-type]


def test_placeholders_stand_for_tokens_under_way() -> None:
    driver = ahead()
    request = driver.add("a", prompt(10), max_tokens=5)
    driver.schedule()
    assert (request.num_computed_tokens, request.num_in_flight_tokens, request.num_output_placeholders) == (
        10,
        10,
        1,
    )
    driver.schedule()
    assert (request.num_computed_tokens, request.num_in_flight_tokens, request.num_output_placeholders) == (
        11,
        11,
        2,
    )
    assert request.num_confirmed_tokens == 0
    driver.apply()
    assert (request.num_in_flight_tokens, request.num_output_placeholders) == (1, 1)
    assert request.num_tokens == 11
    assert driver.steps[1].scheduled_cached_reqs.num_output_tokens == [1]


def test_a_prefill_chunk_gets_no_placeholder() -> None:
    driver = ahead(max_num_batched_tokens=8)
    request = driver.add("a", prompt(20), max_tokens=3)
    driver.schedule()
    assert request.is_prefill_chunk
    assert request.num_output_placeholders == 0
    driver.run()
    assert driver.outputs["a"] == expected_output(prompt(20), 3)


def test_a_request_certain_to_reach_its_limit_is_not_scheduled_again() -> None:
    driver = ahead()
    driver.add("a", prompt(10), max_tokens=2)
    sizes = [driver.schedule().num_scheduled_tokens.get("a", 0) for _ in range(3)]
    assert sizes == [10, 1, 0]
    driver.run()
    assert driver.outputs["a"] == expected_output(prompt(10), 2)
    driver.assert_at_rest()


def test_decode_blocks_are_hashed_when_their_tokens_arrive() -> None:
    driver = ahead()
    request = driver.add("a", prompt(7), max_tokens=12)
    manager = driver.scheduler.kv_cache_manager

    def cached() -> int:
        return sum(block.block_hash is not None for block in manager.get_blocks("a").blocks[0])

    driver.schedule()
    driver.schedule()
    assert cached() == 1
    driver.apply()
    driver.schedule()
    assert request.num_computed_tokens == 9
    driver.apply()
    assert request.num_confirmed_tokens == 8
    assert cached() == 2


def test_a_stopped_request_ignores_the_step_that_ran_ahead() -> None:
    driver = ahead()
    answer = expected_output(prompt(10), 8)
    driver.add("a", prompt(10), max_tokens=8, stop_token_ids=[answer[2]])
    driver.run()
    assert driver.outputs["a"] == answer[: answer.index(answer[2]) + 1]
    assert driver.ends["a"].stop_reason == answer[2]
    driver.assert_at_rest()


def test_tokens_under_way_at_a_preemption_are_delivered_and_become_part_of_the_prompt() -> None:
    driver = ahead()
    scheduler = driver.scheduler
    request = driver.add("a", prompt(10), max_tokens=6)
    driver.schedule()
    driver.schedule()
    scheduler._preempt_request(request, 0.0)
    assert request.num_stale_output_tokens == 2
    assert driver.schedule().num_scheduled_tokens == {}, "the ids of its last tokens are not known yet"
    driver.apply()
    assert driver.schedule().num_scheduled_tokens == {}
    driver.apply()
    assert request.num_stale_output_tokens == 0
    output = driver.schedule()
    assert output.scheduled_new_reqs[0].prefill_token_ids == prompt(10) + expected_output(prompt(10), 2)
    driver.run()
    assert driver.outputs["a"] == expected_output(prompt(10), 6)
    driver.assert_at_rest()


def test_a_forced_restart_drops_the_tokens_under_way() -> None:
    driver = ahead()
    scheduler = driver.scheduler
    request = driver.add("a", prompt(10), max_tokens=6)
    driver.schedule()
    driver.schedule()
    scheduler.reset_prefix_cache(reset_running_requests=True)
    assert request.drop_stale_output
    assert request.num_stale_output_tokens == 0
    output = driver.schedule()
    assert output.preempted_req_ids == {"a"}
    assert output.scheduled_new_reqs[0].prefill_token_ids == prompt(10)
    driver.run()
    assert driver.outputs["a"] == expected_output(prompt(10), 6)
    driver.assert_at_rest()


def test_a_step_that_raised_ends_its_requests_and_spares_the_others() -> None:
    driver = ahead()
    driver.add("a", prompt(10), max_tokens=6)
    driver.schedule()
    driver.add("b", prompt(11, 1), max_tokens=6)
    driver.schedule(fails=True)
    driver.apply()
    messages = driver.apply()
    assert {output.request_id for output in messages[0].outputs} == {"a", "b"}
    assert driver.ends["a"].error == STEP_FAILED
    driver.add("c", prompt(11, 1), max_tokens=4)
    driver.run()
    assert driver.outputs["c"] == expected_output(prompt(11, 1), 4), "nothing of the failed step may be hit"
    driver.assert_at_rest()


def test_whoever_found_blocks_of_a_failed_step_starts_again() -> None:
    driver = ahead()
    driver.add("a", prompt(16), max_tokens=6)
    driver.schedule(fails=True)
    driver.add("b", [*prompt(16), 3], max_tokens=6)
    second = driver.schedule()
    assert second.scheduled_new_reqs[0].num_computed_tokens == 16
    driver.scheduler.finish_requests("a", RequestStatus.FINISHED_ABORTED)
    driver.apply()
    assert driver.scheduler.requests["b"].status is RequestStatus.PREEMPTED
    driver.run()
    assert driver.outputs["b"] == expected_output([*prompt(16), 3], 6)
    driver.assert_at_rest()


def test_drafts_without_look_ahead_are_verified_and_refused_ones_taken_back() -> None:
    scheduler = make_scheduler([full(4)], 40, num_speculative_tokens=2)
    driver = Driver(scheduler)
    answer = expected_output(prompt(10), 8)
    request = driver.add("a", prompt(10), max_tokens=8)
    driver.step()
    scheduler.update_draft_token_ids(DraftTokenIds(["a", "gone"], [[answer[1], 49], [1]]))
    output = driver.schedule()
    assert output.num_scheduled_tokens == {"a": 3}
    assert output.scheduled_spec_decode_tokens == {"a": [answer[1], 49]}
    driver.apply()
    assert request.num_tokens == 13
    assert request.num_computed_tokens == 12
    driver.run()
    assert driver.outputs["a"] == answer


def test_drafts_with_look_ahead_are_placeholders_that_the_worker_fills() -> None:
    driver = ahead(num_speculative_tokens=2)
    scheduler = driver.scheduler
    request = make_request(scheduler, "a", prompt(10), 20)
    scheduler.add_request(request)
    first = scheduler.schedule()
    assert request.spec_token_ids == [-1, -1]
    second = scheduler.schedule()
    assert second.num_scheduled_tokens == {"a": 3}
    assert second.scheduled_spec_decode_tokens == {"a": [-1, -1]}
    assert request.num_output_placeholders == 4
    scheduler.update_from_output(first, ModelRunnerOutput(["a"], {"a": 0}, [[1]]))
    assert request.num_output_placeholders == 3
    third = scheduler.schedule()
    assert third.num_scheduled_tokens == {"a": 3}
    scheduler.update_from_output(second, ModelRunnerOutput(["a"], {"a": 0}, [[2, 3]]))
    assert request.num_tokens == 13
    assert request.num_confirmed_tokens == 12
    assert request.num_output_placeholders == 3


def test_an_admitted_decode_is_padded_to_the_shape_of_the_batch() -> None:
    scheduler = make_scheduler([full(4)], 40, num_speculative_tokens=2, num_lookahead_tokens=2)
    driver = Driver(scheduler)
    driver.add("a", prompt(5), max_tokens=3)
    driver.run()
    driver.add("b", prompt(1, 3), max_tokens=3)
    output = driver.schedule()
    assert output.num_scheduled_tokens == {"b": 3}
    assert output.scheduled_spec_decode_tokens == {"b": [-1, -1]}


def test_refused_drafts_of_a_scheduled_step_keep_their_places() -> None:
    scheduler = make_scheduler([full(4)], 40, num_speculative_tokens=2)
    driver = Driver(scheduler)
    driver.add("a", prompt(5), max_tokens=9)
    driver.step()
    scheduler.update_draft_token_ids(DraftTokenIds(["a"], [[1, 2]]))
    output = scheduler.schedule()
    scheduler.structured_output_manager.allowed_drafts = lambda request, drafts: drafts[:1]  # type: ignore[method-assign]
    scheduler.update_draft_token_ids_in_output(DraftTokenIds(["a"], [[7, 8]]), output)
    assert output.scheduled_spec_decode_tokens == {"a": [7, -1]}
    assert output.num_invalid_spec_tokens == {"a": 1}


@pytest.mark.parametrize(("max_tokens", "unused"), [(1, True), (2, False), (9, False)])
def test_drafts_are_unused_where_the_request_certainly_ends(max_tokens: int, unused: bool) -> None:
    scheduler = make_scheduler([full(4)], 40, num_speculative_tokens=2)
    request = make_request(scheduler, "a", prompt(5), max_tokens)
    scheduler.add_request(request)
    assert scheduler._drafts_unused(request, 0, 5) is unused
    assert scheduler._drafts_unused(request, 0, 4) is False
    assert scheduler.schedule().skip_drafts is unused
