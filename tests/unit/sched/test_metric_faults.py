"""Fault cases of the scheduler's figures, each named after its id in the catalogue."""

from __future__ import annotations

from collections import Counter

from tests.helpers.sched import Driver, full, make_scheduler
from tests.helpers.sched_connector import prompt, with_connector
from vllm.v1.metrics.stats import PrefillStats
from vllm.v1.request import RequestStatus


def test_met_01_recomputing_after_preemption_is_no_hit() -> None:
    scheduler = make_scheduler([full(4)], 13, log_stats=True)
    driver = Driver(scheduler)
    driver.add("a", prompt(15), max_tokens=12)
    driver.add("b", prompt(15, 1), max_tokens=12)
    queries = hits = preempted_hits = preemptions = 0
    for _ in range(60):
        driver.schedule()
        for message in driver.apply().values():
            stats = message.scheduler_stats
            if stats is not None:
                queries += stats.prefix_cache_stats.queries
                hits += stats.prefix_cache_stats.hits
                preempted_hits += stats.prefix_cache_stats.preempted_hits
                preemptions += stats.num_preempted_reqs
    assert preemptions == 1
    assert (queries, hits) == (30, 0)
    assert preempted_hits > 0


def test_met_02_retries_of_an_admission_count_once() -> None:
    scheduler = make_scheduler([full(4)], 36, log_stats=True)
    driver = Driver(scheduler)
    driver.add("warm", prompt(49), max_tokens=1)
    driver.run()
    driver.add("blocker", prompt(60, 9), max_tokens=20)
    driver.step()
    assert scheduler.make_stats() is not None
    driver.add("a", [*prompt(48), *prompt(52, 5)], max_tokens=1)
    totals = Counter()  # type: ignore[var-annotated]
    for attempt in range(10):
        if attempt == 9:
            scheduler.finish_requests("blocker", RequestStatus.FINISHED_ABORTED)
        driver.schedule()
        for message in driver.apply().values():
            if message.scheduler_stats is not None:
                figures = message.scheduler_stats.prefix_cache_stats
                totals.update(requests=figures.requests, queries=figures.queries, hits=figures.hits)
        assert len(scheduler.waiting) == (attempt < 9)
    assert totals == {"requests": 1, "queries": 100, "hits": 48}


def test_met_02_a_connector_that_is_not_ready_counts_nothing() -> None:
    driver, connector, _ = with_connector(40, log_stats=True)
    connector.remember(prompt(16))
    connector.not_ready.add("a")
    driver.add("a", prompt(20), max_tokens=1)
    for _ in range(3):
        driver.schedule()
        driver.apply()
        assert driver.scheduler.connector_prefix_cache_stats.requests == 0  # type: ignore[union-attr]
    assert driver.scheduler.deferred_loads == ["a"]
    connector.not_ready.clear()
    driver.schedule()
    stats = driver.scheduler.connector_prefix_cache_stats
    assert stats is not None
    assert (stats.requests, stats.queries, stats.hits) == (1, 20, 16)
    driver.apply()
    driver.run()
    driver.assert_at_rest()


def test_met_04_figures_of_a_prefill_are_never_negative() -> None:
    stats = PrefillStats()
    stats.set(100, 768, 8448)
    assert (stats.num_local_cached_tokens, stats.num_external_cached_tokens) == (100, 0)
    stats.set(100, -5, 40)
    assert (stats.num_cached_tokens, stats.num_computed_tokens) == (40, 60)


def test_met_07_a_decode_node_reports_the_hits_of_the_prefill_side() -> None:
    driver, connector, _ = with_connector(40)
    connector.remember(prompt(100))
    params = {"kv_transfer_params": {"do_remote_prefill": True, "remote_prefill_cached_tokens": 0}}
    driver.add("cold", prompt(100), max_tokens=1, extra_args=params)
    driver.run()
    figures = driver.ends["cold"].prefill_stats
    assert figures is not None
    assert figures.num_cached_tokens == 0


def test_met_07_hits_that_are_no_number_count_as_none() -> None:
    driver, _, _ = with_connector(40)
    params = {"kv_transfer_params": {"do_remote_prefill": True, "remote_prefill_cached_tokens": "many"}}
    driver.add("odd", prompt(100), max_tokens=1, extra_args=params)
    driver.run()
    figures = driver.ends["odd"].prefill_stats
    assert figures is not None
    assert figures.num_cached_tokens == 0


def test_met_07_the_prefill_side_tells_its_hits_with_the_transfer() -> None:
    driver, connector, _ = with_connector(40)
    driver.add("warm", prompt(20), max_tokens=1)
    driver.run()
    connector.store.clear()
    original = connector.request_finished_all_groups
    connector.request_finished_all_groups = lambda request, ids: (original(request, ids)[0], {"x": 1})  # type: ignore[method-assign]
    driver.add("again", prompt(20), max_tokens=1)
    driver.run()
    assert driver.ends["again"].kv_transfer_params == {"x": 1, "remote_prefill_cached_tokens": 16}
