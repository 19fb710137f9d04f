"""Drafts beside a recurrent state, which has a row for each of them and cannot take a token back."""

from __future__ import annotations

import pytest

from tests.helpers.sched import Driver, expected_output, full, make_scheduler, mamba, ring, with_draft_rows
from vllm.config import SpeculativeConfig
from vllm.v1.kv_cache_interface import KVCacheSpec
from vllm.v1.outputs import DraftTokenIds


def prompt(length: int, seed: int = 0) -> list[int]:
    return [(seed * 7 + i * 3) % 50 for i in range(length)]


def guesses(right: int, count: int):
    """Drafts of which the first ones are what the model says."""

    def guess(tokens: list[int]) -> list[int]:
        return [*expected_output(tokens, right), *[49] * (count - right)]

    return guess


def with_drafts(specs: list[KVCacheSpec], count: int, right: int = 0, **config: object) -> Driver:
    specs = [with_draft_rows(spec, count) for spec in specs]
    scheduler = make_scheduler(specs, 60, num_speculative_tokens=count, num_lookahead_tokens=count, **config)  # type: ignore[arg-type]
    return Driver(scheduler, guess=guesses(right, count))


@pytest.mark.parametrize("right", range(4))
@pytest.mark.parametrize("specs", [[full(4), mamba(4)], [mamba(4), full(8), mamba(8)], [full(4), ring(8)]])
def test_answers_are_right_whatever_number_of_drafts_is(specs: list[KVCacheSpec], right: int) -> None:
    driver = with_drafts(specs, 3, right)
    for name, length in (("a", 10), ("b", 7), ("c", 13)):
        driver.add(name, prompt(length), max_tokens=17)
    driver.run()
    for name, length in (("a", 10), ("b", 7), ("c", 13)):
        assert driver.outputs[name] == expected_output(prompt(length), 17)
    driver.assert_at_rest()
    assert driver.worker.checks > 50


def test_a_whole_block_of_states_that_leaves_no_room_for_drafts_is_reached_in_shorter_chunks() -> None:
    driver = with_drafts([full(8), mamba(8)], 1, max_num_batched_tokens=8)
    driver.add("a", prompt(20), max_tokens=4)
    driver.run()
    assert driver.outputs["a"] == expected_output(prompt(20), 4)


def test_a_padded_request_has_a_row_for_each_of_its_void_drafts() -> None:
    driver = with_drafts([full(4), mamba(2)], 2)
    driver.add("a", prompt(1), max_tokens=3)
    output = driver.schedule()
    assert output.scheduled_spec_decode_tokens == {"a": [-1, -1]}
    # The step ends at 3 tokens, in column 1, and two more states follow.
    assert len(output.scheduled_new_reqs[0].block_ids[1]) == 4
    assert len(output.scheduled_new_reqs[0].block_ids[0]) == 1
    driver.apply()
    driver.run()
    assert driver.outputs["a"] == expected_output(prompt(1), 3)


def test_a_chunk_of_one_token_of_a_longer_prompt_is_not_padded() -> None:
    driver = with_drafts([full(4)], 2, long_prefill_token_threshold=1)
    for name in ("a", "b"):
        driver.add(name, prompt(6, ord(name)), max_tokens=3)
    output = driver.schedule()
    assert output.num_scheduled_tokens == {"a": 1, "b": 1}
    assert not output.scheduled_spec_decode_tokens
    driver.apply()
    driver.run()
    for name in ("a", "b"):
        assert driver.outputs[name] == expected_output(prompt(6, ord(name)), 3)


def test_drafts_of_a_step_that_a_request_has_left_behind_are_void() -> None:
    scheduler = make_scheduler([full(4)], 40, num_speculative_tokens=1)
    driver = Driver(scheduler, depth=2)
    request = driver.add("a", prompt(5), max_tokens=6)
    driver.schedule()
    scheduler.reset_prefix_cache(True)
    driver.schedule()
    driver.apply()
    assert request.num_tokens == 5, "its step was dropped"
    scheduler.update_draft_token_ids(DraftTokenIds(["a"], [[3]]))
    assert driver.schedule().num_scheduled_tokens == {}
    driver.run()
    assert driver.outputs["a"] == expected_output(prompt(5), 6)


@pytest.mark.parametrize("right", [0, 1, 3])
def test_pfx_01_the_output_behind_a_hit_is_that_of_a_cold_run_for_every_prompt_length(right: int) -> None:
    """Lengths of one to five blocks and a token less or more; each is sent twice, and reads what the first one left."""
    lengths = [n for blocks in range(1, 6) for n in (4 * blocks - 1, 4 * blocks, 4 * blocks + 1)]
    for length in lengths:
        drafter = SpeculativeConfig(method="mtp", num_speculative_tokens=3)
        driver = with_drafts([full(4), mamba(4)], 3, right, speculative_config=drafter)
        for name in ("first", "again"):
            driver.add(name, prompt(length), max_tokens=9)
            driver.run()
        assert driver.outputs["first"] == driver.outputs["again"] == expected_output(prompt(length), 9)
        sent = {
            new.req_id: new.num_computed_tokens for step in driver.steps for new in step.scheduled_new_reqs
        }
        assert sent == {"first": 0, "again": max(0, (length - 1) // 4 - 1) * 4}
        driver.assert_at_rest()
