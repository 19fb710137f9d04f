"""External loads: hits, waiting, promotion, failures, delayed release, events of the connector's life."""

from __future__ import annotations

import random
from types import SimpleNamespace
from typing import Any

import pytest

from tests.helpers.sched import (
    Driver,
    compressed,
    expected_output,
    full,
    make_scheduler,
    mamba,
    replayed_window,
    window,
)
from tests.helpers.sched_connector import FakeConnector, LoadRunner, with_connector
from vllm.distributed.kv_event_publisher import EventPublisherFactory
from vllm.v1.core.sched.interface import PauseState
from vllm.v1.outputs import EMPTY_MODEL_RUNNER_OUTPUT, KVConnectorOutput, ModelRunnerOutput
from vllm.v1.request import RequestStatus


def prompt(length: int, seed: int = 0) -> list[int]:
    return [(seed * 7 + i * 3) % 50 for i in range(length)]


def machine(
    specs: list[Any] | None = None,
    num_blocks: int = 60,
    *,
    load_async: bool = True,
    policy: str = "recompute",
    consumer: bool = True,
    **config: Any,
) -> tuple[Driver, FakeConnector, LoadRunner]:
    specs = specs or [full(4)]
    groups = tuple(i for i, spec in enumerate(specs) if spec.prefix_cacheable)
    connector = FakeConnector(max(specs[i].block_size for i in groups), groups, load_async)
    transfer = SimpleNamespace(kv_connector=None, is_kv_consumer=consumer, kv_load_failure_policy=policy)
    scheduler = make_scheduler(specs, num_blocks, connector=connector, kv_transfer_config=transfer, **config)
    driver = Driver(scheduler, depth=2 if config.get("looks_ahead") else 1)
    return driver, connector, LoadRunner(driver.worker, connector)


def test_an_async_load_waits_holds_its_blocks_and_is_promoted() -> None:
    driver, connector, loads = machine(log_stats=True)
    scheduler = driver.scheduler
    connector.remember(prompt(32))
    loads.hold = True
    request = driver.add("a", prompt(33), max_tokens=3)
    assert driver.step().num_scheduled_tokens == {}
    assert request.status is RequestStatus.WAITING_FOR_REMOTE_KVS
    assert request.num_computed_tokens == 32
    assert [r.request_id for r in scheduler.kv_holding_waiting] == ["a"]
    assert scheduler._kv_fetch_counts["in_progress"] == 1
    assert scheduler.get_request_counts() == (0, 1)
    assert driver.step().num_scheduled_tokens == {}
    loads.hold = False
    driver.step()
    assert scheduler.finished_recving_kv_req_ids == {"a"}
    output = driver.step()
    assert output.num_scheduled_tokens == {"a": 1}
    assert output.scheduled_new_reqs[0].num_computed_tokens == 32
    assert connector.allocations == [("a", 32), ("a", 0)]
    driver.run()
    assert driver.outputs["a"] == expected_output(prompt(33), 3)
    driver.assert_at_rest()


def test_a_load_of_the_whole_prompt_leaves_its_last_token_to_compute() -> None:
    driver, connector, _ = machine()
    connector.get_num_new_matched_tokens = lambda request, computed: (16 - computed, True)  # type: ignore[method-assign]
    connector.local_hits["a"] = 0
    driver.add("a", prompt(16), max_tokens=3)
    driver.step()
    assert driver.scheduler.requests["a"].num_computed_tokens == 16
    output = driver.step()
    assert output.scheduled_new_reqs[0].num_computed_tokens == 15
    driver.run()
    assert driver.outputs["a"] == expected_output(prompt(16), 3)


def test_a_whole_prompt_is_not_accepted_where_computing_starts_at_boundaries_only() -> None:
    driver, connector, _ = machine([compressed(8, 4)])
    connector.get_num_new_matched_tokens = lambda request, computed: (16 - computed, True)  # type: ignore[method-assign]
    connector.local_hits["a"] = 0
    driver.add("a", prompt(16), max_tokens=3)
    driver.step()
    assert connector.allocations == [("a", 8)]
    driver.run()
    assert driver.outputs["a"] == expected_output(prompt(16), 3)


def test_a_sync_load_runs_in_the_same_step() -> None:
    driver, connector, _ = machine(load_async=False)
    connector.remember(prompt(32))
    driver.add("a", prompt(40), max_tokens=3)
    output = driver.step()
    assert output.has_sync_kv_loads
    assert output.num_scheduled_tokens == {"a": 8}
    assert output.kv_connector_block_state is None
    driver.run()
    assert driver.outputs["a"] == expected_output(prompt(40), 3)


def test_the_local_tail_inside_a_scheduler_block_gives_way_to_a_longer_load() -> None:
    """Block sizes 4 and 8 with state: local hits may end on 4, loads on 8."""
    driver, connector, _ = machine([full(4), mamba(8)], num_blocks=80)
    connector.stores_on_finish = False
    driver.add("warm", prompt(15), max_tokens=1)
    driver.run()
    connector.remember(prompt(24))
    driver.add("a", prompt(30), max_tokens=3)
    driver.step()
    local = driver.scheduler.requests["a"].num_computed_tokens - connector.allocations[-1][1]
    assert local % 8 == 0
    driver.run()
    assert driver.outputs["a"] == expected_output(prompt(30), 3)


def test_a_load_no_longer_than_the_local_tail_is_declined() -> None:
    driver, connector, _ = machine()
    driver.add("warm", prompt(20), max_tokens=1)
    driver.run()
    connector.store.clear()
    connector.remember(prompt(16))
    driver.add("a", prompt(22), max_tokens=3)
    assert driver.step().num_scheduled_tokens == {"a": 2}
    assert connector.allocations[-1] == ("a", 0)


def test_a_connector_that_is_not_ready_is_asked_again_and_others_go_ahead() -> None:
    driver, connector, _ = machine()
    connector.not_ready.add("a")
    driver.add("a", prompt(9), max_tokens=1)
    driver.add("b", prompt(9, 1), max_tokens=1)
    assert driver.step().num_scheduled_tokens == {"b": 9}
    assert [r.request_id for r in driver.scheduler.deferred_waiting] == ["a"]
    connector.not_ready.clear()
    assert driver.step().num_scheduled_tokens == {"a": 9}
    assert connector.asked.count("a") == 2
    driver.run()
    driver.assert_at_rest()


def test_reading_skipped_means_the_connector_is_not_asked() -> None:
    driver, connector, _ = machine()
    driver.add("a", prompt(9), max_tokens=1, skip_reading_prefix_cache=True)
    driver.run()
    assert connector.asked == []


@pytest.mark.parametrize(
    "specs", [[full(4)], [full(8), window(8, 12)], [full(8), mamba(8)], [full(8), replayed_window(8, 8)]]
)
@pytest.mark.parametrize("load_async", [True, False])
@pytest.mark.parametrize("by_block", [True, False])
@pytest.mark.parametrize("looks_ahead", [True, False])
def test_failed_loads_are_recomputed_on_every_kind_of_model(
    specs: list[Any], load_async: bool, by_block: bool, looks_ahead: bool
) -> None:
    driver, connector, loads = machine(specs, 80, load_async=load_async, looks_ahead=looks_ahead)
    loads.by_block = by_block
    loads.fail_ids = {"a", "b"}
    connector.remember(prompt(40))
    for name, length in (("a", 45), ("b", 43), ("c", 30)):
        driver.add(name, prompt(length), max_tokens=4)
    driver.add("other", prompt(11, 5), max_tokens=4)
    driver.run()
    for name, length in (("a", 45), ("b", 43), ("c", 30)):
        assert driver.outputs[name] == expected_output(prompt(length), 4)
    assert driver.outputs["other"] == expected_output(prompt(11, 5), 4)
    driver.assert_at_rest()


@pytest.mark.parametrize("load_async", [True, False])
def test_failed_loads_end_only_the_requests_concerned_where_that_is_the_policy(load_async: bool) -> None:
    driver, connector, loads = machine(load_async=load_async, policy="fail")
    connector.remember(prompt(32))
    loads.fail_ids = {"a"}
    driver.add("a", prompt(40), max_tokens=4)
    driver.add("b", prompt(10, 3), max_tokens=4)
    driver.run()
    error = driver.ends["a"].error
    assert error is not None
    assert error.code == "kv_load_failed"
    assert "kv_load_failure_policy='recompute'" in error.message, "and what would help"
    assert connector.finished["a"][0] is RequestStatus.FINISHED_ERROR
    assert driver.outputs["b"] == expected_output(prompt(10, 3), 4)
    driver.add("again", prompt(40), max_tokens=4)
    driver.run()
    assert driver.outputs["again"] == expected_output(prompt(40), 4)
    driver.assert_at_rest()


def test_a_load_behind_spoilt_blocks_starts_again_whatever_the_policy_for_failed_loads() -> None:
    driver, connector, loads = machine(policy="fail", looks_ahead=True)
    loads.hold = True
    driver.add("fails", prompt(17), max_tokens=4)
    driver.schedule(fails=True)
    connector.remember(prompt(32))
    request = driver.add("loads", prompt(33), max_tokens=3)
    driver.schedule()
    assert request.status is RequestStatus.WAITING_FOR_REMOTE_KVS
    assert connector.local_hits["loads"] == 16, "it counts on blocks of the failing step"
    driver.apply()
    loads.hold = False
    driver.run()
    assert driver.ends["fails"].error is not None
    assert driver.outputs["loads"] == expected_output(prompt(33), 3), "its own load did not fail"
    driver.assert_at_rest()


def test_a_cut_load_keeps_its_good_part() -> None:
    """Block 4, three loaded blocks, the second is invalid: computing goes on after the first."""
    driver, connector, loads = machine()
    scheduler = driver.scheduler
    connector.remember(prompt(12))
    loads.hold = True
    request = driver.add("a", prompt(14), max_tokens=3)
    driver.step()
    blocks = scheduler.kv_cache_manager.get_block_ids("a")[0]
    driver.schedule()
    output, result = driver.in_flight.popleft()
    result.kv_connector_output = KVConnectorOutput(invalid_block_ids={blocks[1]})
    scheduler.update_from_output(output, result)
    assert request.num_computed_tokens == 4
    assert request.status is RequestStatus.WAITING_FOR_REMOTE_KVS, "the rest of the load still writes"
    assert scheduler.failed_recving_kv_req_ids == {"a"}
    loads.hold = False
    driver.run()
    assert driver.outputs["a"] == expected_output(prompt(14), 3)


def test_a_cut_load_that_fails_as_a_whole_starts_again_in_other_blocks() -> None:
    """Who says that it has failed may not be able to say that nothing of it writes any more."""
    driver, connector, loads = machine()
    scheduler = driver.scheduler
    connector.remember(prompt(12))
    loads.hold = True
    driver.add("a", prompt(14), max_tokens=3)
    driver.step()
    blocks = scheduler.kv_cache_manager.get_block_ids("a")[0]
    driver.schedule()
    output, result = driver.in_flight.popleft()
    result.kv_connector_output = KVConnectorOutput(invalid_block_ids={blocks[1]})
    scheduler.update_from_output(output, result)
    driver.schedule()
    output, result = driver.in_flight.popleft()
    result.kv_connector_output = KVConnectorOutput(finished_recving={"a"}, failed_recving={"a"})
    scheduler.update_from_output(output, result)
    held = scheduler.kv_cache_manager.block_pool
    held.touch([held.blocks[block] for block in blocks])
    connector.store.clear()
    loads.open.clear()
    loads.hold = False
    driver.step()
    assert set(blocks).isdisjoint(scheduler.kv_cache_manager.get_block_ids("a")[0])
    held.free_blocks([held.blocks[block] for block in blocks])
    driver.run()
    assert driver.outputs["a"] == expected_output(prompt(14), 3)


def test_a_running_request_is_cut_in_place() -> None:
    driver, connector, loads = machine(load_async=False)
    connector.remember(prompt(12))
    loads.fail_ids = {"a"}
    request = driver.add("a", prompt(14), max_tokens=3)
    driver.step()
    assert request.status is RequestStatus.RUNNING
    assert request.num_computed_tokens == 0
    assert driver.outputs == {}
    assert driver.step().num_scheduled_tokens == {"a": 14}
    driver.run()
    assert driver.outputs["a"] == expected_output(prompt(14), 3)


def test_a_connector_that_always_fails_is_not_asked_for_ever() -> None:
    driver, connector, loads = machine()
    connector.remember(prompt(12))
    loads.fail_rate, loads.rng = 1.0, random.Random(1)
    driver.add("a", prompt(14), max_tokens=3)
    assert driver.run(60) < 40
    assert driver.outputs["a"] == expected_output(prompt(14), 3)
    assert connector.asked.count("a") == 3


def test_unknown_ids_in_reports_are_ignored() -> None:
    driver, connector, _ = machine()
    driver.add("a", prompt(9), max_tokens=4)
    output = driver.scheduler.schedule()
    result = driver.worker.execute(output)
    result.kv_connector_output = KVConnectorOutput(
        finished_sending={"x", "a"}, finished_recving={"y", "a"}, failed_recving={"y"}, invalid_block_ids={55}
    )
    driver.collect(driver.scheduler.update_from_output(output, result))
    driver.run()
    assert driver.outputs["a"] == expected_output(prompt(9), 4)
    driver.assert_at_rest()


def test_a_delayed_release_keeps_blocks_and_id_until_the_send_ends() -> None:
    driver, connector, loads = machine()
    scheduler = driver.scheduler
    connector.delay_finish = True
    loads.hold = True
    driver.add("a", prompt(9), max_tokens=1)
    free = driver.free_blocks()
    driver.step()
    assert driver.ends["a"].finish_reason is not None
    assert driver.free_blocks() == free - 3
    assert scheduler.has_request("a")
    assert scheduler.has_requests()
    with pytest.raises(ValueError, match="already in use"):
        driver.add("a", prompt(5))
    loads.hold = False
    driver.run()
    driver.assert_at_rest()


def test_blocks_freed_under_a_step_in_flight_return_after_it() -> None:
    """XFER-02: a load must not land in a block that a launched forward still reads."""
    driver, connector, _ = machine(looks_ahead=True, num_blocks=20)
    scheduler = driver.scheduler
    driver.add("a", prompt(9), max_tokens=5)
    driver.schedule()
    driver.schedule()
    free = driver.free_blocks()
    scheduler.finish_requests("a", RequestStatus.FINISHED_ABORTED)
    assert driver.free_blocks() == free
    assert len(scheduler.deferred_frees) == 1
    driver.apply()
    assert driver.free_blocks() == free
    driver.apply()
    assert driver.free_blocks() == free + 3
    driver.run()
    driver.assert_at_rest()


def test_without_a_consumer_blocks_return_at_once() -> None:
    driver, _, _ = machine(looks_ahead=True, consumer=False)
    assert not driver.scheduler.defer_block_free


def test_a_paused_scheduler_still_admits_requests_that_hold_blocks() -> None:
    driver, connector, _ = machine()
    connector.remember(prompt(12))
    driver.add("a", prompt(14), max_tokens=3)
    driver.step()
    driver.add("b", prompt(5, 1), max_tokens=3)
    driver.scheduler.set_pause_state(PauseState.PAUSED_NEW)
    assert list(driver.step().num_scheduled_tokens) == ["a"]


def test_sch_01_a_loaded_request_that_does_not_fit_holds_up_no_other_loaded_one() -> None:
    driver, connector, loads = with_connector(40)
    scheduler = driver.scheduler
    pool = scheduler.kv_cache_manager.block_pool
    connector.remember(prompt(24, 1))
    connector.remember(prompt(8, 2))
    driver.add("runs", prompt(5), max_tokens=30)
    driver.step()
    loads.hold = True
    driver.add("large", [*prompt(24, 1), *range(20)], max_tokens=2)
    driver.add("small", [*prompt(8, 2), 1], max_tokens=2)
    driver.step()
    assert [request.request_id for request in scheduler.kv_holding_waiting] == ["large", "small"]
    taken = pool.get_new_blocks(pool.get_num_free_blocks() - 2)  # what was left for their first steps is gone
    loads.hold = False
    driver.step()
    assert "small" in driver.step().num_scheduled_tokens
    assert [request.request_id for request in scheduler.kv_holding_waiting] == ["large"]
    pool.free_blocks(taken)
    driver.run()
    assert set(driver.ends) == {"runs", "large", "small"}
    driver.assert_at_rest()


def test_sch_12_whose_blocks_a_step_in_flight_still_uses_gives_nothing_back_and_is_spared() -> None:
    driver, _, _ = with_connector(8, looks_ahead=True)
    requests = [driver.add(name, prompt(11, i), max_tokens=9) for i, name in enumerate("ab")]
    assert driver.scheduler.defer_block_free
    for _ in range(20):
        if driver.free_blocks():
            driver.step()
    for _ in range(8):  # both are in the step that runs: the one that lacks a block waits for it
        in_flight = {name for step, _ in driver.in_flight for name in step.num_scheduled_tokens}
        output = driver.schedule()
        assert not in_flight.intersection(output.preempted_req_ids or ())
        while len(driver.in_flight) > 1:
            driver.apply()
    driver.run()
    assert max(request.num_preemptions for request in requests) >= 1
    driver.assert_at_rest()


def test_a_shrunken_pool_makes_a_holder_give_its_blocks_back_rather_than_stall() -> None:
    """R10: two finished loads that cannot go on beside each other."""
    driver, connector, loads = machine(num_blocks=13, max_num_batched_tokens=256)
    scheduler = driver.scheduler
    for name, seed in (("a", 1), ("b", 2)):
        connector.remember(prompt(20, seed))
        driver.add(name, prompt(23, seed), max_tokens=4)
    # Admission would keep them apart; what it reserves is taken away to reach the state that must not stall.
    scheduler._blocks_spoken_for = lambda request, hit: 0  # type: ignore[method-assign]
    driver.run(60)
    for name, seed in (("a", 1), ("b", 2)):
        assert driver.outputs[name] == expected_output(prompt(23, seed), 4)
    driver.assert_at_rest()


def test_a_report_without_a_scheduled_step_is_processed() -> None:
    driver, connector, loads = machine()
    connector.remember(prompt(12))
    driver.add("a", prompt(14), max_tokens=1)
    output = driver.scheduler.schedule()
    driver.scheduler.update_from_output(output, EMPTY_MODEL_RUNNER_OUTPUT)
    driver.worker.before_forward(output)
    output = driver.scheduler.schedule()
    report = driver.worker.connector_report(output)
    driver.scheduler.update_from_output(output, ModelRunnerOutput.with_kv_conn_output_only(report))
    assert driver.scheduler.finished_recving_kv_req_ids == {"a"}


def test_a_scheduler_that_cannot_be_made_shuts_its_connector_down(monkeypatch: pytest.MonkeyPatch) -> None:
    connector, ended = FakeConnector(4), []
    monkeypatch.setattr(connector, "shutdown", lambda: ended.append(True))

    def refuse(*_: object) -> None:
        raise ValueError("the port is taken")

    monkeypatch.setattr(EventPublisherFactory, "create", refuse)
    transfer = SimpleNamespace(kv_connector=None, is_kv_consumer=True, kv_load_failure_policy="fail")
    with pytest.raises(ValueError, match="the port is taken"):
        make_scheduler([full(4)], 40, connector=connector, kv_transfer_config=transfer)
    assert ended == [True]
