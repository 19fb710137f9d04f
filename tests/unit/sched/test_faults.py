"""Fault cases of the scheduler, each named after its id in the catalogue."""

from __future__ import annotations

import random
from functools import partial
from typing import Any

import pytest

from tests.helpers.sched import (
    Driver,
    compressed,
    expected_output,
    full,
    make_request,
    make_scheduler,
    mamba,
    ring,
    window,
)
from tests.helpers.sched_connector import prompt, with_connector
from vllm.v1.core.sched.results import NAN_LOGITS
from vllm.v1.kv_cache_interface import KVCacheSpec
from vllm.v1.outputs import KVConnectorOutput
from vllm.v1.request import RequestStatus


def test_sch_01_a_loaded_request_is_promoted_whatever_the_queue_head_does() -> None:
    driver, connector, loads = with_connector(20)
    scheduler = driver.scheduler
    connector.remember(prompt(24, 1))
    connector.remember(prompt(60, 2))
    loads.hold = True
    driver.add("b", [*prompt(24, 1), 1, 2], max_tokens=2)
    driver.step()
    assert len(scheduler.kv_holding_waiting) == 1
    driver.add("a", [*prompt(60, 2), 1], max_tokens=2)
    driver.step()
    assert [request.request_id for request in scheduler.waiting] == ["a"], "a cannot be allocated beside b"
    loads.hold = False
    driver.step()
    assert list(driver.step().num_scheduled_tokens) == ["b"]
    driver.run()
    assert set(driver.ends) == {"a", "b"}
    driver.assert_at_rest()


@pytest.mark.parametrize("looks_ahead", [False, True])
@pytest.mark.parametrize("reported_first", [False, True])
def test_sch_02_abort_during_an_async_load_frees_exactly_once(
    looks_ahead: bool, reported_first: bool
) -> None:
    driver, connector, loads = with_connector(400, looks_ahead=looks_ahead)
    scheduler = driver.scheduler
    connector.stores_on_finish = False
    connector.remember(prompt(16, 1))
    driver.add("other", prompt(5), max_tokens=1000)
    driver.step()
    for attempt in range(200):
        loads.hold = not reported_first
        name = f"r{attempt}"
        driver.add(name, [*prompt(16, 1), 7], max_tokens=2)
        driver.schedule()
        if reported_first:
            while driver.in_flight:
                driver.apply()
            assert name in scheduler.finished_recving_kv_req_ids
        free = driver.free_blocks()
        scheduler.finish_requests(name, RequestStatus.FINISHED_ABORTED)
        if reported_first:
            assert driver.free_blocks() == free + 4
        else:
            assert driver.free_blocks() == free, "the copy still writes into the blocks"
            assert scheduler.has_request(name)
            loads.hold = False
        while scheduler.has_request(name):
            driver.step()
        scheduler.reset_prefix_cache()
    scheduler.finish_requests("other", RequestStatus.FINISHED_ABORTED)
    driver.run()
    assert driver.outputs["other"] == expected_output(prompt(5), len(driver.outputs["other"]))
    driver.assert_at_rest()


@pytest.mark.parametrize("looks_ahead", [False, True])
def test_pfx_20_after_a_thousand_aborts_the_next_answer_is_right(looks_ahead: bool) -> None:
    driver = Driver(make_scheduler([full(4), window(4, 8)], 40, looks_ahead=looks_ahead))
    free = driver.free_blocks()
    for number in range(1000):
        driver.add(f"r{number}", prompt(16, number % 7), max_tokens=2)
        driver.schedule()
        driver.scheduler.finish_requests(f"r{number}", RequestStatus.FINISHED_ABORTED)
        while driver.in_flight:
            driver.apply()
    driver.run()
    assert driver.free_blocks() == free
    driver.add("next", prompt(16, 3), max_tokens=8)
    driver.run()
    assert driver.outputs["next"] == expected_output(prompt(16, 3), 8)
    driver.assert_at_rest()


def test_sch_03_output_after_the_abort_of_a_sending_request_changes_nothing() -> None:
    driver, connector, loads = with_connector(20, looks_ahead=True)
    scheduler = driver.scheduler
    connector.delay_finish = True
    loads.hold = True
    driver.add("a", prompt(9))
    driver.schedule()
    driver.schedule()
    scheduler.finish_requests("a", RequestStatus.FINISHED_ABORTED)
    scheduler.finish_requests("a", RequestStatus.FINISHED_ABORTED)
    held = driver.free_blocks()
    driver.apply()
    driver.apply()
    assert driver.free_blocks() == held
    assert driver.outputs == {}
    loads.hold = False
    driver.run()
    driver.assert_at_rest()


@pytest.mark.parametrize("passed_over", [False, True])
def test_sch_07_nobody_loses_a_step_to_a_victim_that_stood_before_it(passed_over: bool) -> None:
    """The victim was scheduled, or passed over, earlier in the same pass; removing it moves the requests behind it."""
    scheduler = make_scheduler(
        [full(4)], 10, policy="priority", max_num_batched_tokens=34, reserve_full_isl=False
    )
    driver = Driver(scheduler)
    # Three of the nine blocks each; the victim's are not full when the others need a fourth.
    driver.add("victim", prompt(30 if passed_over else 9), max_tokens=9, priority=9, arrival_time=1.0)
    driver.add("first", prompt(11, 1), max_tokens=9, priority=1, arrival_time=2.0)
    driver.add("second", prompt(11, 2), max_tokens=9, priority=1, arrival_time=3.0)
    driver.step()
    # Priority admission puts the victim last; a list with it in front is what went wrong.
    scheduler.running.sort(key=lambda request: request.request_id != "victim")
    scheduler.schedule = partial(scheduler.schedule, throttle_prefills=True)  # type: ignore[method-assign]
    before = driver.step()
    assert set(before.num_scheduled_tokens) == (
        {"first", "second"} if passed_over else {"victim", "first", "second"}
    )
    output = driver.step()
    assert output.preempted_req_ids == {"victim"}
    assert list(output.num_scheduled_tokens) == ["first", "second"]


def test_sch_08_delivery_recomputes_a_request_preempted_in_its_last_step() -> None:
    driver, connector, _ = with_connector(40, looks_ahead=True)
    scheduler = driver.scheduler
    scheduler.requires_kv_delivery = True
    driver.add("a", prompt(9), max_tokens=1)
    driver.schedule()
    scheduler._preempt_request(scheduler.requests["a"], 0.0)
    driver.apply()
    assert driver.ends == {}, "the token came from KV that is gone"
    driver.run()
    assert driver.outputs["a"] == expected_output(prompt(9), 1)
    status, blocks = connector.finished["a"]
    assert status is RequestStatus.FINISHED_LENGTH_CAPPED
    assert len(blocks[0]) == 3, "the receiver gets every block"


def test_sch_08_a_mere_cache_just_lets_it_finish() -> None:
    driver, connector, _ = with_connector(40, looks_ahead=True)
    driver.add("a", prompt(9), max_tokens=1)
    driver.schedule()
    driver.scheduler._preempt_request(driver.scheduler.requests["a"], 0.0)
    driver.apply()
    assert driver.outputs["a"] == expected_output(prompt(9), 1)
    driver.run()
    assert list(connector.finished) == ["a"]
    driver.assert_at_rest()


def test_sch_09_a_second_request_with_a_live_id_is_refused() -> None:
    scheduler = make_scheduler()
    driver = Driver(scheduler)
    driver.add("test-0", prompt(5), max_tokens=3)
    driver.step()
    with pytest.raises(ValueError, match="test-0"):
        driver.add("test-0", prompt(9))
    driver.run()
    assert driver.outputs["test-0"] == expected_output(prompt(5), 3)
    assert not scheduler.has_request("test-0")
    driver.ends.clear()
    driver.outputs.clear()
    driver.add("test-0", prompt(9), max_tokens=2)
    driver.run()
    assert driver.outputs["test-0"] == expected_output(prompt(9), 2)


def test_sch_09_output_of_an_aborted_request_never_reaches_its_namesake() -> None:
    scheduler = make_scheduler(looks_ahead=True)
    driver = Driver(scheduler, depth=2)
    driver.add("x", prompt(5), max_tokens=5)
    driver.schedule()
    driver.schedule()
    scheduler.finish_requests("x", RequestStatus.FINISHED_ABORTED)
    driver.add("x", prompt(9, 4), max_tokens=3)
    driver.apply()
    driver.run()
    assert driver.outputs["x"] == expected_output(prompt(9, 4), 3)


@pytest.mark.parametrize("num_lookahead_tokens", [0, 3])
@pytest.mark.parametrize("total", [-2, -1, 0, 1, 2])
def test_sch_11_two_full_prompt_loads_never_fill_the_pool_exactly(
    total: int, num_lookahead_tokens: int
) -> None:
    rng = random.Random(total * 10 + num_lookahead_tokens)
    usable = 24
    first = rng.randint(8, usable - 8)
    second = usable + total - first
    driver, connector, loads = with_connector(
        usable + 1, num_lookahead_tokens=num_lookahead_tokens, max_num_batched_tokens=256
    )
    for name, blocks, seed in (("a", first, 1), ("b", second, 2)):
        tokens = prompt(blocks * 4 - 1, seed)
        connector.remember(tokens)
        driver.add(name, tokens, max_tokens=3)
    loads.rng = random.Random(total)
    steps = driver.run(100)
    assert steps < 60
    loaded = [name for name, num_tokens in connector.allocations if num_tokens]
    assert sorted(loaded) == ["a", "b"], "nobody had to give a load back"
    for name, blocks, seed in (("a", first, 1), ("b", second, 2)):
        assert driver.outputs[name] == expected_output(prompt(blocks * 4 - 1, seed), 3)
    driver.assert_at_rest()


@pytest.mark.parametrize("total", [-2, -1, 0, 1, 2])
def test_sch_11_loads_of_whole_prompts_leave_room_for_the_drafts_of_the_first_step(total: int) -> None:
    """Loads may cover every token of prompts that end with a block; only the drafts need one more."""
    usable = 511
    driver, connector, loads = with_connector(
        usable + 1, num_lookahead_tokens=3, num_speculative_tokens=3, max_model_len=2048
    )
    connector.offers_all = True
    prompts = {"a": prompt(256 * 4, 1), "b": prompt((usable + total - 256) * 4, 2)}
    for name, tokens in prompts.items():
        connector.remember(tokens)
        driver.add(name, tokens, max_tokens=3)
    assert driver.run(100) < 30
    loaded = sorted((name, num_tokens) for name, num_tokens in connector.allocations if num_tokens)
    assert loaded == [(name, len(tokens)) for name, tokens in prompts.items()], (
        "nobody had to give a load back"
    )
    for name, tokens in prompts.items():
        assert driver.outputs[name] == expected_output(tokens, 3)
    driver.assert_at_rest()


@pytest.mark.parametrize(("tail", "num_lookahead_tokens"), [(1, 0), (1, 3), (30, 0)])
def test_sch_11_a_load_that_just_fits_is_not_refused(tail: int, num_lookahead_tokens: int) -> None:
    tokens = prompt(32 + tail, 1)
    usable = -(-(len(tokens) + num_lookahead_tokens) // 4)
    driver, connector, _ = with_connector(usable + 1, num_lookahead_tokens=num_lookahead_tokens)
    connector.remember(tokens[:32])
    driver.add("a", tokens, max_tokens=1)
    driver.run()
    assert connector.allocations[0] == ("a", 32), "what follows the load is counted once"
    assert driver.outputs["a"] == expected_output(tokens, 1)
    driver.assert_at_rest()


def test_sch_12_deferred_frees_are_waited_for_instead_of_preempting_everybody() -> None:
    driver, connector, _ = with_connector(17, looks_ahead=True)
    scheduler = driver.scheduler
    connector.stores_on_finish = False
    assert scheduler.defer_block_free
    for i in range(4):
        driver.add(f"r{i}", prompt(13, i), max_tokens=6)
    most = 0
    for _ in range(200):
        if not scheduler.has_requests() and not driver.in_flight:
            break
        output = driver.step()
        most = max(most, len(output.preempted_req_ids or ()))
    driver.run()
    assert most <= 1, "one victim's blocks cover what one request needs"
    assert set(driver.ends) == {"r0", "r1", "r2", "r3"}
    total = sum(request.num_tokens for request in scheduler.requests.values())
    assert total == 0
    driver.assert_at_rest()


def test_sch_12_blocks_on_their_way_back_count_before_anybody_gives_way() -> None:
    driver, _, _ = with_connector(10, looks_ahead=True, max_num_batched_tokens=34, reserve_full_isl=False)
    scheduler = driver.scheduler
    needy = driver.add("needy", prompt(11), max_tokens=9)
    driver.add("gone", prompt(11, 1), max_tokens=9)
    idle = driver.add(
        "idle", prompt(40, 2), max_tokens=2
    )  # a prefill that is held, so no step in flight has it
    driver.schedule()
    scheduler.schedule = partial(scheduler.schedule, throttle_prefills=True)  # type: ignore[method-assign]
    driver.schedule()
    driver.apply()
    scheduler.finish_requests("gone", RequestStatus.FINISHED_ABORTED)
    assert scheduler.deferred_frees
    output = driver.schedule()
    assert not output.preempted_req_ids
    assert not output.num_scheduled_tokens, "the requester waits one step"
    driver.apply()
    assert list(driver.schedule().num_scheduled_tokens) == ["needy"]
    assert scheduler.running == [needy, idle]


def test_sch_12_a_connector_with_pending_frees_makes_the_pass_wait() -> None:
    driver, connector, _ = with_connector(8)
    driver.add("a", prompt(11), max_tokens=9)
    driver.add("b", prompt(11, 1), max_tokens=9)
    driver.step()
    connector.pending_frees = True
    for _ in range(4):
        assert not driver.step().preempted_req_ids
    connector.pending_frees = False
    driver.run()
    assert driver.outputs["b"] == expected_output(prompt(11, 1), 9)


@pytest.mark.parametrize("specs", [[full(4)], [full(8), mamba(8)], [full(4), ring(8)], [compressed(8, 4)]])
@pytest.mark.parametrize("length", [1, 7, 8, 9, 16, 17])
def test_pfx_09_at_least_one_token_is_scheduled_after_a_full_hit(specs: list[Any], length: int) -> None:
    scheduler = make_scheduler(specs, 40)
    driver = Driver(scheduler)
    for name in ("first", "second"):
        driver.add(name, prompt(length), max_tokens=1)
        driver.run()
    assert driver.outputs["first"] == driver.outputs["second"] == expected_output(prompt(length), 1)
    second = next(new for step in driver.steps for new in step.scheduled_new_reqs if new.req_id == "second")
    assert second.num_computed_tokens % max(spec.block_size for spec in specs if spec.prefix_cacheable) == 0
    driver.assert_at_rest()


@pytest.mark.parametrize("load_async", [False, True])
@pytest.mark.parametrize("length", [4, 5, 8, 16])
def test_pfx_09_a_load_of_the_whole_prompt_leaves_a_token_to_compute(length: int, load_async: bool) -> None:
    driver, connector, _ = with_connector(40, load_async=load_async)
    connector.offers_all = True
    connector.remember(prompt(length))
    driver.add("a", prompt(length), max_tokens=2)
    driver.run(20)
    assert driver.outputs["a"] == expected_output(prompt(length), 2)
    assert driver.steps[0].total_num_scheduled_tokens > 0 or load_async
    driver.assert_at_rest()


@pytest.mark.parametrize("looks_ahead", [False, True])
def test_pfx_12_requests_sharing_blocks_of_a_failed_load_go_back_together(looks_ahead: bool) -> None:
    driver, connector, loads = with_connector(60, load_async=False, looks_ahead=looks_ahead)
    tokens = prompt(40, 3)
    connector.remember(tokens[:32])
    loads.fail_ids = {"owner"}
    driver.add("owner", tokens, max_tokens=6)
    driver.add("sharer", tokens, max_tokens=6)
    driver.add("third", [*tokens[:20], 1, 2, 3], max_tokens=6)
    driver.add("other", prompt(9, 5), max_tokens=6)
    driver.run()
    for name in ("owner", "sharer"):
        assert driver.outputs[name] == expected_output(tokens, 6)
    assert driver.outputs["third"] == expected_output([*tokens[:20], 1, 2, 3], 6)
    assert driver.outputs["other"] == expected_output(prompt(9, 5), 6)
    driver.assert_at_rest()


def test_pfx_12_all_go_back_to_the_same_valid_prefix_and_no_block_has_two_writers() -> None:
    driver, connector, loads = with_connector(60, load_async=False)
    scheduler = driver.scheduler
    tokens = prompt(40, 3)
    connector.remember(tokens[:32])
    requests = [driver.add(name, tokens, max_tokens=6) for name in ("owner", "sharer")]
    output = scheduler.schedule()
    result = driver.worker.execute(output)
    tables = [scheduler.kv_cache_manager.get_block_ids(name)[0] for name in ("owner", "sharer")]
    assert tables[0][:8] == tables[1][:8]
    result.kv_connector_output = KVConnectorOutput(invalid_block_ids={tables[0][3], tables[0][5]})
    scheduler.update_from_output(output, result)
    assert [request.num_computed_tokens for request in requests] == [12, 12]
    assert [r.prefill_stats and r.prefill_stats.num_cached_tokens for r in requests] == [12, 12]
    assert [r.prefill_stats and r.prefill_stats.num_cache_creation_tokens for r in requests] == [28, 28]
    assert scheduler.running == requests
    assert [request.num_output_tokens for request in requests] == [0, 0]
    after = driver.schedule()
    tables = [scheduler.kv_cache_manager.get_block_ids(name)[0] for name in ("owner", "sharer")]
    assert tables[0][:3] == tables[1][:3]
    assert not set(tables[0][3:]) & set(tables[1][3:])
    assert [new.req_id for new in after.scheduled_new_reqs] == ["sharer"]
    driver.run()
    assert driver.outputs["owner"] == driver.outputs["sharer"] == expected_output(tokens, 6)
    driver.assert_at_rest()


def test_pfx_13_prompt_logprobs_never_skip_cached_tokens() -> None:
    scheduler = make_scheduler([full(4)], 40)
    driver = Driver(scheduler)
    driver.add("plain", prompt(33), max_tokens=1)
    driver.run()
    driver.add("logprobs", prompt(33), max_tokens=1, prompt_logprobs=1)
    driver.run()
    sent = [new for step in driver.steps for new in step.scheduled_new_reqs]
    assert [new.num_computed_tokens for new in sent] == [0, 0]
    assert make_request(scheduler, "x", prompt(5), prompt_logprobs=0).skip_reading_prefix_cache


def test_pfx_15_a_refused_reset_says_why() -> None:
    scheduler = make_scheduler([full(4)], 40)
    driver = Driver(scheduler)
    driver.add("a", prompt(9), max_tokens=3)
    driver.step()
    assert scheduler.reset_prefix_cache() is False
    report = scheduler.reset_prefix_cache_report
    assert report is not None
    assert report["success"] is False
    assert report["held_blocks"] == 3
    assert report["requests_running"] == 1
    assert "3 device blocks" in report["reason"]
    driver.run()
    assert scheduler.reset_prefix_cache() is True
    assert scheduler.reset_prefix_cache_report["reason"] == ""  # type: ignore[index]


def test_off_20_the_engine_keeps_stepping_while_a_transfer_is_open_and_then_stops() -> None:
    driver, connector, _ = with_connector(20)
    scheduler = driver.scheduler
    driver.add("a", prompt(5), max_tokens=1)
    driver.step()
    connector.push_work = True
    driver.step()
    assert not scheduler.has_unfinished_requests()
    assert not scheduler.has_finished_requests()
    assert scheduler.has_requests()
    assert driver.step().total_num_scheduled_tokens == 0
    connector.push_work = False
    assert not scheduler.has_requests()


def test_off_21_a_new_request_is_scheduled_in_the_next_step_beside_open_transfers() -> None:
    driver, connector, loads = with_connector(20)
    connector.delay_finish = True
    loads.hold = True
    connector.push_work = True
    driver.add("a", prompt(5), max_tokens=1)
    driver.step()
    driver.step()
    driver.add("b", prompt(6, 1), max_tokens=1)
    assert list(driver.step().num_scheduled_tokens) == ["b"]
    loads.hold = False
    connector.push_work = False
    driver.run()
    driver.assert_at_rest()


def test_off_11_abort_of_a_request_that_was_never_scheduled() -> None:
    driver, connector, _ = with_connector(20, max_num_seqs=1)
    driver.add("a", prompt(9), max_tokens=4)
    driver.add("b", prompt(9, 1), max_tokens=4)
    driver.step()
    driver.scheduler.finish_requests("b", RequestStatus.FINISHED_ABORTED)
    driver.run()
    assert driver.outputs["a"] == expected_output(prompt(9), 4)
    assert connector.finished["b"][1] == ([],)
    driver.assert_at_rest()


def test_val_10_a_request_with_nan_logits_ends_alone_and_leaves_no_cache() -> None:
    driver, connector, _ = with_connector(40, log_stats=True)
    scheduler = driver.scheduler
    driver.add("bad", prompt(20), max_tokens=4)
    driver.add("good", prompt(21, 1), max_tokens=4)
    driver.worker.corrupt.add("bad")
    driver.schedule()
    messages = driver.apply()
    end = driver.ends["bad"]
    assert end.error is not None
    assert end.error.code == "nan_logits"
    assert end.num_nans_in_logits > 0
    assert messages[0].scheduler_stats.num_corrupted_reqs == 1
    assert connector.finished["bad"][0] is RequestStatus.FINISHED_ERROR
    driver.worker.corrupt.clear()
    driver.run()
    assert driver.outputs["good"] == expected_output(prompt(21, 1), 4)
    again = make_request(scheduler, "again", prompt(20))
    assert scheduler.kv_cache_manager.get_computed_blocks(again)[1] == 0
    driver.assert_at_rest()


@pytest.mark.parametrize("specs", [[window()], [mamba()], [full(), mamba()], [full(), window()]])
def test_val_10_what_a_request_with_nan_logits_left_behind_is_not_found(specs: list[KVCacheSpec]) -> None:
    driver = Driver(make_scheduler(specs, 60, max_num_batched_tokens=8))
    manager = driver.scheduler.kv_cache_manager
    driver.add("bad", prompt(39), max_tokens=4)
    for _ in range(4):
        driver.step()
    driver.worker.corrupt.add("bad")  # only the chunk that ends the prompt has logits
    driver.run()
    assert driver.ends["bad"].error == NAN_LOGITS
    assert len(manager.block_pool.cached_block_hash_to_block) == 0
    driver.assert_at_rest()
