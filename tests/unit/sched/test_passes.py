"""What one pass hands out: budgets, chunks, caps, seats, pauses, preemption, priorities."""

from __future__ import annotations

import pytest

from tests.helpers.sched import Driver, expected_output, full, make_request, make_scheduler, mamba, window
from vllm.lora.request import LoRARequest
from vllm.v1.core.sched.interface import PauseState
from vllm.v1.request import RequestStatus


def prompt(length: int, seed: int = 0) -> list[int]:
    return [(seed * 7 + i * 3) % 50 for i in range(length)]


def test_an_idle_scheduler_returns_an_empty_step() -> None:
    scheduler = make_scheduler()
    output = scheduler.schedule()
    assert output.total_num_scheduled_tokens == 0
    assert output.num_scheduled_tokens == {}
    assert not scheduler.has_requests()


def test_the_worked_example_of_continuous_batching() -> None:
    """Budget 512, three decodes, prompts of 300 and 400: 3 + 300 + 209 tokens, then 191."""
    scheduler = make_scheduler([full(16)], 200, max_num_batched_tokens=512)
    driver = Driver(scheduler)
    for i in range(3):
        driver.add(f"d{i}", prompt(5, i), max_tokens=30)
    driver.step()
    driver.add("a", prompt(300, 8))
    driver.add("b", prompt(400, 9))
    first = driver.step()
    assert first.num_scheduled_tokens == {"d0": 1, "d1": 1, "d2": 1, "a": 300, "b": 209}
    second = driver.step()
    assert second.num_scheduled_tokens == {"d0": 1, "d1": 1, "d2": 1, "a": 1, "b": 191}
    driver.run()
    assert driver.outputs["b"] == expected_output(prompt(400, 9), 8)


def test_without_chunked_prefill_a_prompt_waits_for_room() -> None:
    scheduler = make_scheduler([full(16)], 100, max_num_batched_tokens=64, enable_chunked_prefill=False)
    driver = Driver(scheduler)
    driver.add("a", prompt(40))
    driver.add("b", prompt(40, 1))
    assert driver.step().num_scheduled_tokens == {"a": 40}
    assert driver.step().num_scheduled_tokens == {"a": 1, "b": 40}
    driver.run()
    driver.assert_at_rest()


def test_the_long_prefill_cap_spares_a_request_that_is_alone() -> None:
    scheduler = make_scheduler([full(16)], 100, max_num_batched_tokens=64, long_prefill_token_threshold=16)
    driver = Driver(scheduler)
    driver.add("a", prompt(60))
    assert driver.step().num_scheduled_tokens == {"a": 60}
    driver.add("b", prompt(60, 1))
    assert driver.step().num_scheduled_tokens == {"a": 1, "b": 16}


def test_seats_are_limited_by_active_sequences() -> None:
    scheduler = make_scheduler(max_num_seqs=4, max_num_active_seqs=2)
    driver = Driver(scheduler)
    for i in range(4):
        driver.add(f"r{i}", prompt(5, i), max_tokens=2)
    assert list(driver.step().num_scheduled_tokens) == ["r0", "r1"]
    assert scheduler.get_request_counts() == (2, 2)
    driver.run()
    assert set(driver.ends) == {"r0", "r1", "r2", "r3"}


def test_scheduled_tokens_may_be_limited_below_the_input_size() -> None:
    scheduler = make_scheduler(max_num_batched_tokens=64, max_num_scheduled_tokens=10)
    driver = Driver(scheduler)
    driver.add("a", prompt(30))
    assert driver.step().num_scheduled_tokens == {"a": 10}
    scheduler.max_num_scheduled_tokens = 12
    assert driver.step().num_scheduled_tokens == {"a": 12}


def test_requests_with_too_many_adapters_are_skipped_not_stopped_at() -> None:
    from types import SimpleNamespace

    scheduler = make_scheduler(lora_config=SimpleNamespace(max_loras=1))
    driver = Driver(scheduler)
    adapters = [LoRARequest(f"l{i}", i + 1, "/nowhere") for i in range(2)]
    driver.add("a", prompt(5), max_tokens=3, lora_request=adapters[0])
    driver.add("b", prompt(5, 1), max_tokens=3, lora_request=adapters[1])
    driver.add("c", prompt(5, 2), max_tokens=3)
    assert list(driver.step().num_scheduled_tokens) == ["a", "c"]
    assert [request.request_id for request in scheduler.deferred_waiting] == ["b"]
    driver.run()
    assert set(driver.ends) == {"a", "b", "c"}


def test_paused_new_lets_running_requests_go_on() -> None:
    scheduler = make_scheduler()
    driver = Driver(scheduler)
    driver.add("a", prompt(5), max_tokens=3)
    driver.step()
    driver.add("b", prompt(5, 1), max_tokens=3)
    scheduler.set_pause_state(PauseState.PAUSED_NEW)
    assert list(driver.step().num_scheduled_tokens) == ["a"]
    driver.step()
    assert driver.step().num_scheduled_tokens == {}
    assert scheduler.has_unfinished_requests()
    scheduler.set_pause_state(PauseState.UNPAUSED)
    assert list(driver.step().num_scheduled_tokens) == ["b"]


def test_paused_all_freezes_everything_but_still_tells_about_the_dead() -> None:
    scheduler = make_scheduler()
    driver = Driver(scheduler)
    driver.add("a", prompt(5))
    driver.add("b", prompt(5, 1))
    driver.step()
    scheduler.set_pause_state(PauseState.PAUSED_ALL)
    scheduler.finish_requests("a", RequestStatus.FINISHED_ABORTED)
    output = driver.step()
    assert output.num_scheduled_tokens == {}
    assert output.finished_req_ids == {"a"}
    assert scheduler.pause_state is PauseState.PAUSED_ALL
    scheduler.set_pause_state(PauseState.UNPAUSED)
    driver.run()
    assert driver.outputs["b"] == expected_output(prompt(5, 1), 8)


def test_prefill_cadence_holds_prompts_while_decodes_run() -> None:
    scheduler = make_scheduler(prefill_schedule_interval=3)
    driver = Driver(scheduler)
    driver.add("a", prompt(5), max_tokens=20)
    driver.step()
    driver.add("b", prompt(5, 1), max_tokens=20)
    carried = ["b" in driver.step().num_scheduled_tokens for _ in range(4)]
    assert carried == [False, False, True, True]
    assert scheduler.local_prefill_interval == 3
    assert scheduler.num_executed_steps == 5
    assert scheduler.last_prefill_step == 3


def test_throttled_prefills_wait_only_while_decodes_run() -> None:
    scheduler = make_scheduler()
    driver = Driver(scheduler)
    driver.add("a", prompt(5), max_tokens=20)
    assert scheduler.schedule(throttle_prefills=True).num_scheduled_tokens == {"a": 5}


def test_preempted_last_in_first_out_and_resumed_from_the_cache() -> None:
    scheduler = make_scheduler([full(4)], 13)
    driver = Driver(scheduler)
    driver.add("a", prompt(15), max_tokens=12)
    driver.add("b", prompt(15, 1), max_tokens=12)
    preempted: list[str] = []
    while not driver.ends:
        output = driver.step()
        preempted += sorted(output.preempted_req_ids or ())
    assert preempted == ["b"]
    driver.run()
    assert driver.outputs["a"] == expected_output(prompt(15), 12)
    assert driver.outputs["b"] == expected_output(prompt(15, 1), 12)
    resumed = next(new for step in driver.steps[1:] for new in step.scheduled_new_reqs if new.req_id == "b")
    assert resumed.num_computed_tokens > 0, "its own blocks were still cached"
    assert resumed.num_computed_tokens % 4 == 0
    assert resumed.prefill_token_ids is not None
    assert resumed.prefill_token_ids[:15] == prompt(15, 1)


def test_priority_decides_admission_and_preemption() -> None:
    scheduler = make_scheduler([full(4)], 13, policy="priority", max_num_seqs=2)
    driver = Driver(scheduler)
    driver.add("low", prompt(15), max_tokens=12, priority=5, arrival_time=1.0)
    driver.add("mid", prompt(15, 1), max_tokens=12, priority=3, arrival_time=2.0)
    driver.add("high", prompt(15, 2), max_tokens=12, priority=1, arrival_time=3.0)
    assert list(driver.step().num_scheduled_tokens) == ["high", "mid"]
    preempted: list[str] = []
    for _ in range(60):
        preempted += sorted(driver.step().preempted_req_ids or ())
    driver.run()
    assert preempted[0] == "mid"
    assert list(driver.ends) == ["high", "mid", "low"]


def test_twins_that_arrive_at_the_same_moment_do_not_preempt_each_other_for_ever() -> None:
    scheduler = make_scheduler(
        [full(2)],
        15,
        policy="priority",
        max_num_seqs=2,
        enable_prefix_caching=False,
        looks_ahead=True,
        max_num_batched_tokens=8,
        long_prefill_token_threshold=6,
    )
    driver = Driver(scheduler, depth=2)
    twins = [driver.add(name, prompt(20, i), max_tokens=7, arrival_time=1.0) for i, name in enumerate("ab")]
    for _ in range(80):
        driver.step()
    assert list(driver.ends) == ["a", "b"]
    assert [twin.num_preemptions for twin in twins] <= [0, 2]


def test_a_small_request_overtakes_one_that_does_not_fit_but_not_for_ever() -> None:
    scheduler = make_scheduler([full(4)], 13, max_num_seqs=8)
    driver = Driver(scheduler)
    driver.add("runs", prompt(20), max_tokens=60)
    driver.step()
    big = driver.add("big", prompt(35, 1), max_tokens=1)
    driver.add("small", prompt(5, 2), max_tokens=1)
    assert "small" in driver.step().num_scheduled_tokens
    assert big.num_overtaken == 1
    for i in range(40):
        driver.add(f"s{i}", prompt(3, i + 3), max_tokens=1)
    for _ in range(20):
        driver.step()
    assert big.num_overtaken <= 16 + 8
    driver.run()
    assert driver.outputs["big"] == expected_output(prompt(35, 1), 1)


def test_priority_admission_is_strict() -> None:
    scheduler = make_scheduler([full(4)], 13, policy="priority")
    driver = Driver(scheduler)
    driver.add("runs", prompt(20), max_tokens=30)
    driver.step()
    driver.add("big", prompt(35, 1), max_tokens=1, priority=0)
    driver.add("small", prompt(5, 2), max_tokens=1, priority=1)
    assert "small" not in driver.step().num_scheduled_tokens


def test_a_request_larger_than_the_pool_ends_with_an_error_and_nobody_else_suffers() -> None:
    scheduler = make_scheduler([full(4)], 9, log_stats=True)
    driver = Driver(scheduler)
    driver.add("huge", prompt(40), max_tokens=1)
    driver.add("ok", prompt(5, 1), max_tokens=2)
    driver.run()
    error = driver.ends["huge"].error
    assert error is not None
    assert error.code == "kv_cache_too_small"
    assert "40 tokens" in error.message
    assert driver.outputs["ok"] == expected_output(prompt(5, 1), 2)
    driver.assert_at_rest()


def test_a_request_that_outgrows_the_pool_keeps_its_output_and_ends_with_an_error() -> None:
    scheduler = make_scheduler([full(4)], 9, reserve_full_isl=False)
    driver = Driver(scheduler)
    driver.add("grows", prompt(20), max_tokens=100)
    driver.run()
    assert driver.ends["grows"].error is not None
    assert driver.outputs["grows"] == expected_output(prompt(20), len(driver.outputs["grows"]))
    assert len(driver.outputs["grows"]) >= 12
    driver.assert_at_rest()


def test_a_second_request_of_the_same_step_shares_the_prefix() -> None:
    scheduler = make_scheduler([full(4)], 30)
    driver = Driver(scheduler)
    driver.add("a", prompt(10))
    driver.add("b", [*prompt(9), 3, 4])
    new = driver.step().scheduled_new_reqs
    assert new[1].num_computed_tokens == 8
    assert new[1].block_ids[0][:2] == new[0].block_ids[0][:2]
    driver.run()
    assert driver.outputs["b"] == expected_output([*prompt(9), 3, 4], 8)


def test_a_victim_of_the_same_pass_leaves_no_hashes_of_bytes_never_computed() -> None:
    """The victim was scheduled for a chunk before another request took its place."""
    scheduler = make_scheduler(
        [full(4)], 12, policy="priority", max_num_batched_tokens=8, reserve_full_isl=False
    )
    driver = Driver(scheduler)
    driver.add("victim", prompt(24), max_tokens=1, priority=9, arrival_time=1.0)
    driver.step()
    driver.add("keeps", prompt(11, 3), max_tokens=20, priority=1, arrival_time=2.0)
    for _ in range(30):
        driver.step()
        index = scheduler.kv_cache_manager.block_pool.cached_block_hash_to_block
        for block in scheduler.kv_cache_manager.block_pool.blocks:
            if block.block_hash is not None:
                assert index.contain(block.block_hash, block.block_id)
                assert driver.worker.memory.get(block.block_id), "a hashed block was never written"
    driver.run()
    assert driver.outputs["victim"] == expected_output(prompt(24), 1)


@pytest.mark.parametrize("specs", [[full(8), mamba(8)], [full(4), mamba(8)], [full(8), window(8, 12)]])
def test_hybrid_models_give_the_same_answers_with_and_without_hits(specs: list) -> None:  # type: ignore[type-arg]
    scheduler = make_scheduler(specs, 60, max_num_batched_tokens=24)
    driver = Driver(scheduler)
    for round_number in range(3):
        for length in (7, 16, 17, 33):
            driver.add(f"{round_number}-{length}", prompt(length), max_tokens=5)
        driver.run()
    for round_number in range(3):
        for length in (7, 16, 17, 33):
            assert driver.outputs[f"{round_number}-{length}"] == expected_output(prompt(length), 5)
    driver.assert_at_rest()


def test_finish_requests_tolerates_unknown_and_finished_ids_and_none_means_all() -> None:
    scheduler = make_scheduler()
    driver = Driver(scheduler)
    driver.add("a", prompt(5))
    driver.add("b", prompt(6))
    driver.step()
    driver.add("c", prompt(7))
    ended = scheduler.finish_requests(["a", "nobody", "a"], RequestStatus.FINISHED_ABORTED)
    assert [request.request_id for request in ended] == ["a"]
    assert scheduler.finish_requests("a", RequestStatus.FINISHED_ABORTED) == []
    ended = scheduler.finish_requests(None, RequestStatus.FINISHED_ABORTED)
    assert [request.request_id for request in ended] == ["b", "c"]
    with pytest.raises(ValueError, match="final state"):
        scheduler.finish_requests(None, RequestStatus.RUNNING)
    assert scheduler.has_finished_requests()
    driver.run()
    driver.assert_at_rest()


def test_finished_sets_are_told_per_client() -> None:
    scheduler = make_scheduler(include_finished_set=True)
    driver = Driver(scheduler)
    driver.add("a", prompt(5), max_tokens=1, client_index=3)
    driver.schedule()
    messages = driver.apply()
    assert messages[3].finished_requests == {"a"}
    assert messages[3].timestamp == 1000.0


def test_the_first_runner_form_extends_tables_and_resends_tokens() -> None:
    scheduler = make_scheduler([full(4)], 13)
    scheduler.use_v2_model_runner = False
    for name, seed in (("a", 0), ("b", 1)):
        scheduler.add_request(make_request(scheduler, name, prompt(15, seed), 12))
    output = scheduler.schedule()
    assert [new.prefill_token_ids for new in output.scheduled_new_reqs] == [None, None]
    request = scheduler.requests["b"]
    scheduler._preempt_request(request, 0.0)
    assert request.status is RequestStatus.PREEMPTED
    assert request.num_computed_tokens == 0
    assert scheduler.waiting.peek_request() is request
    assert request not in scheduler.running
