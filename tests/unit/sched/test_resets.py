"""Resets, events, statistics."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

from tests.helpers.sched import (
    Driver,
    ManualClock,
    NoGrammar,
    expected_output,
    full,
    kv_config,
    make_request,
    make_scheduler,
    sched_config,
)
from tests.helpers.sched_connector import FakeConnector, LoadRunner
from vllm.config import KVEventsConfig
from vllm.distributed.kv_event_publisher import EventPublisher, PublisherCounters
from vllm.distributed.kv_event_types import AllBlocksCleared, BlockStored, EventBatch
from vllm.v1.core.sched.scheduler import Scheduler
from vllm.v1.metrics.stats import KVEventStats
from vllm.v1.request import RequestStatus


def prompt(length: int, seed: int = 0) -> list[int]:
    return [(seed * 7 + i * 3) % 50 for i in range(length)]


def with_connector(num_blocks: int = 40, **config: Any) -> tuple[Driver, FakeConnector, LoadRunner]:
    connector = FakeConnector(4)
    transfer = SimpleNamespace(kv_connector=None, is_kv_consumer=True, kv_load_failure_policy="recompute")
    scheduler = make_scheduler(
        [full(4)], num_blocks, connector=connector, kv_transfer_config=transfer, **config
    )
    driver = Driver(scheduler, depth=2 if config.get("looks_ahead") else 1)
    return driver, connector, LoadRunner(driver.worker, connector)


def local_hit(driver: Driver, tokens: list[int]) -> int:
    probe = make_request(driver.scheduler, "probe", tokens)
    return driver.scheduler.kv_cache_manager.get_computed_blocks(probe)[1]


def test_an_idle_reset_empties_device_and_connector() -> None:
    driver, connector, _ = with_connector()
    driver.add("a", prompt(20), max_tokens=1)
    driver.run()
    assert local_hit(driver, prompt(21)) == 20
    assert driver.scheduler.reset_prefix_cache(reset_connector=True)
    assert local_hit(driver, prompt(21)) == 0
    assert connector.store == set()
    assert driver.scheduler.last_reset is not None
    assert driver.scheduler.last_reset.connector_reset is True


def test_a_reset_asks_the_connector_only_if_told_to_and_says_so() -> None:
    driver, connector, _ = with_connector()
    driver.add("a", prompt(20), max_tokens=1)
    driver.run()
    assert driver.scheduler.reset_prefix_cache()
    assert connector.store
    assert driver.scheduler.reset_prefix_cache_report["connector_reset"] is None  # type: ignore[index]


def test_a_failed_connector_reset_is_reported() -> None:
    driver, connector, _ = with_connector()
    connector.reset_result = False
    assert driver.scheduler.reset_prefix_cache(reset_connector=True) is False
    assert "connector" in driver.scheduler.last_reset.reason  # type: ignore[union-attr]
    connector.reset_result = None
    assert driver.scheduler.reset_prefix_cache(reset_connector=True) is True


def test_without_a_connector_its_reset_is_true() -> None:
    assert make_scheduler().reset_connector_cache() is True


def test_a_reset_beside_running_requests_hides_old_entries_and_lets_them_store_again() -> None:
    scheduler = make_scheduler([full(4)], 40)
    driver = Driver(scheduler)
    driver.add("a", prompt(10), max_tokens=20)
    driver.step()
    driver.step()
    assert scheduler.reset_prefix_cache() is False
    assert local_hit(driver, prompt(11)) == 0
    driver.run()
    assert driver.outputs["a"] == expected_output(prompt(10), 20)
    cached = sum(block.block_hash is not None for block in scheduler.kv_cache_manager.block_pool.blocks)
    assert cached >= 4, "what it computed after the reset is cached again"
    assert scheduler.reset_prefix_cache() is True
    driver.assert_at_rest()


def test_a_reset_of_running_requests_restarts_them_in_their_order() -> None:
    scheduler = make_scheduler([full(4)], 40, max_num_seqs=2)
    driver = Driver(scheduler)
    for i in range(3):
        driver.add(f"r{i}", prompt(9, i), max_tokens=6)
    driver.step()
    driver.step()
    assert scheduler.reset_prefix_cache(reset_running_requests=True) is True
    assert [request.request_id for request in scheduler.waiting] == ["r0", "r1", "r2"]
    output = driver.step()
    assert output.preempted_req_ids == {"r0", "r1"}
    assert [new.req_id for new in output.scheduled_new_reqs] == ["r0", "r1"]
    driver.run()
    for i in range(3):
        assert driver.outputs[f"r{i}"] == expected_output(prompt(9, i), 6)
    driver.assert_at_rest()


def test_a_load_under_way_at_a_reset_brings_nothing_back() -> None:
    driver, connector, loads = with_connector()
    scheduler = driver.scheduler
    connector.remember(prompt(20))
    loads.hold = True
    driver.add("a", prompt(22), max_tokens=3)
    driver.step()
    assert scheduler.reset_prefix_cache(reset_running_requests=True, reset_connector=True) is False
    assert scheduler.last_reset.requests_waiting_with_blocks == 1  # type: ignore[union-attr]
    loads.hold = False
    driver.step()
    output = driver.step()
    assert output.scheduled_new_reqs[0].num_computed_tokens == 0
    driver.run()
    assert driver.outputs["a"] == expected_output(prompt(22), 3)
    driver.assert_at_rest()


def test_a_finished_load_that_waits_starts_again_after_a_forced_reset() -> None:
    driver, connector, _ = with_connector(max_num_seqs=1)
    scheduler = driver.scheduler
    connector.remember(prompt(20))
    driver.add("a", prompt(22), max_tokens=3)
    driver.add("b", prompt(6, 4), max_tokens=9)
    driver.step()
    driver.step()
    connector.store.clear()
    assert scheduler.reset_prefix_cache(reset_running_requests=True)
    driver.run()
    assert driver.outputs["a"] == expected_output(prompt(22), 3)
    driver.assert_at_rest()


class Recorder(EventPublisher):
    """Keeps what is published."""

    def __init__(self) -> None:
        super().__init__()
        self.batches: list[EventBatch] = []
        self.closed = False

    def publish(self, events: EventBatch) -> None:
        self.batches.append(events)

    def shutdown(self) -> None:
        self.closed = True


def test_events_are_flushed_with_results_resets_idleness_and_shutdown() -> None:
    make_scheduler()
    config = sched_config()
    config.kv_events_config = SimpleNamespace(enable_kv_cache_events=True)
    recorder = Recorder()
    connector = FakeConnector(4)
    scheduler = Scheduler(
        config,  # type: ignore[arg-type]
        kv_config([full(4)], 30),
        NoGrammar(),  # type: ignore[arg-type]
        4,
        4,
        clock=ManualClock(),
        connector=connector,
        event_publisher=recorder,
    )
    driver = Driver(scheduler)
    LoadRunner(driver.worker, connector)
    driver.add("a", prompt(9), max_tokens=1)
    driver.step()
    assert len(recorder.batches) == 1
    assert recorder.batches[0].ts == 1000.0
    scheduler.flush_events()
    assert len(recorder.batches) == 1, "nothing new, nothing sent"
    scheduler.reset_prefix_cache()
    assert isinstance(recorder.batches[1].events[0], AllBlocksCleared)
    connector.take_events = lambda: [AllBlocksCleared()]  # type: ignore[method-assign]
    scheduler.flush_events()
    assert len(recorder.batches) == 3
    scheduler.shutdown()
    assert len(recorder.batches) == 4
    assert recorder.closed


class Asked(Recorder):
    """Somebody wants to know what is cached now."""

    def __init__(self) -> None:
        super().__init__()
        self.wanted = False
        self.snapshots: list[tuple[int, EventBatch]] = []

    @property
    def wants_snapshot(self) -> bool:
        return self.wanted

    def publish_snapshot(self, events: EventBatch) -> None:
        self.wanted = False
        self.snapshots.append((len(self.batches), events))


def test_a_snapshot_is_told_once_and_behind_everything_that_came_up_before_it() -> None:
    make_scheduler()
    config = sched_config()
    config.kv_events_config = SimpleNamespace(enable_kv_cache_events=True)
    asked, connector = Asked(), FakeConnector(4)
    scheduler = Scheduler(
        config,  # type: ignore[arg-type]
        kv_config([full(4)], 30),
        NoGrammar(),  # type: ignore[arg-type]
        4,
        4,
        clock=ManualClock(),
        connector=connector,
        event_publisher=asked,
    )
    driver = Driver(scheduler)
    LoadRunner(driver.worker, connector)
    below = BlockStored([7], None, [1, 2, 3, 4], 4, None, "CPU", None)
    connector.present_events = lambda: [below]  # type: ignore[method-assign]
    asked.wanted = True
    driver.add("a", prompt(9), max_tokens=1)
    driver.step()
    ((place, snapshot),) = asked.snapshots
    assert place == len(asked.batches) == 1
    assert snapshot.events == [*asked.batches[0].events, below]
    asked.wanted = True
    scheduler.flush_events()
    assert len(asked.batches) == 1
    assert [batch.events for _, batch in asked.snapshots] == [snapshot.events] * 2
    scheduler.wake_for_events(driver.step)
    assert asked.wake_core == driver.step


def test_statistics_tell_what_the_event_publisher_did_since_the_last_ones() -> None:
    scheduler = make_scheduler(log_stats=True)
    stats = scheduler.make_stats()
    assert stats is not None
    assert stats.kv_event_stats is None
    told = (
        PublisherCounters(3, 1, {"BlockStored": 5}, 2, 7),
        PublisherCounters(5, 1, {"BlockStored": 9}, 2, 0),
    )

    class Counting(Recorder):
        def get_publisher_config(self) -> KVEventsConfig:
            return KVEventsConfig()

        def get_counters(self) -> PublisherCounters:
            return told[len(seen)]

    seen: list[KVEventStats | None] = []
    scheduler.kv_event_publisher = Counting()
    for _ in told:
        stats = scheduler.make_stats()
        assert stats is not None
        seen.append(stats.kv_event_stats)
    assert seen == [
        KVEventStats(3, 1, 2, {"BlockStored": 5}, 7),
        KVEventStats(2, 0, 0, {"BlockStored": 4}, 0),
    ]


def test_statistics_cost_nothing_unless_asked_for() -> None:
    scheduler = make_scheduler()
    driver = Driver(scheduler)
    driver.add("a", prompt(5), max_tokens=1)
    driver.schedule()
    assert driver.apply()[0].scheduler_stats is None
    assert scheduler.make_stats() is None
    assert driver.ends["a"].events is None


def test_statistics_go_to_one_client_and_count_from_the_last_report() -> None:
    scheduler = make_scheduler([full(4)], 40, log_stats=True, max_num_seqs=1)
    driver = Driver(scheduler)
    driver.add("a", prompt(9), max_tokens=2, client_index=1)
    driver.add("b", prompt(9, 1), max_tokens=2, client_index=2)
    driver.schedule()
    messages = driver.apply()
    stats = messages[1].scheduler_stats
    assert stats is not None
    assert (stats.num_running_reqs, stats.num_waiting_reqs) == (1, 1)
    assert stats.prefix_cache_stats.requests == 1
    assert 0 < stats.kv_cache_usage < 1
    assert [event.type.name for event in messages[1].outputs[0].events or ()] == ["QUEUED", "SCHEDULED"]
    assert messages[1].outputs[0].prefill_stats is not None
    again = scheduler.make_stats()
    assert again is not None
    assert again.prefix_cache_stats.requests == 0
    scheduler.finish_requests(None, RequestStatus.FINISHED_ABORTED)
    driver.schedule()
    assert driver.apply()[0].scheduler_stats is not None
