"""Looking into the caches through the scheduler: what any connector and any shape of cache would give a request."""

from __future__ import annotations

import random
from types import SimpleNamespace
from typing import Any

import pytest

from tests.helpers.sched import (
    Driver,
    compressed,
    full,
    make_request,
    make_scheduler,
    mamba,
    replayed_window,
    ring,
    window,
)
from tests.helpers.sched_connector import FakeConnector, LoadRunner
from vllm.v1.kv_cache_interface import KVCacheSpec
from vllm.v1.kv_cache_report import CacheLookup, ExternalHit
from vllm.v1.metrics.cache_hit_source import CacheHitSource
from vllm.v1.request import Request

DEVICE, BELOW = CacheHitSource.DEVICE, CacheHitSource.EXTERNAL_UNSPECIFIED
SHAPES: dict[str, list[KVCacheSpec]] = {
    "full": [full()],
    "window": [full(), window()],
    "state": [full(), mamba()],
    "ring": [full(), ring()],
    "compressed": [compressed(), ring(4)],
    "replayed": [full(), replayed_window()],
}


class TellingConnector(FakeConnector):
    """Answers look-ups too."""

    def peek_matched_tokens(self, request: Request, num_computed_tokens: int) -> ExternalHit | None:
        asked, hits = list(self.asked), dict(self.local_hits)
        found, is_async = self.get_num_new_matched_tokens(request, num_computed_tokens)
        self.asked, self.local_hits = asked, hits
        return ExternalHit({BELOW: found or 0}, {BELOW: found or 0}, is_async)


def prompt(length: int, seed: int = 0) -> list[int]:
    return [(seed * 7 + i * 3) % 50 for i in range(length)]


def peek(driver: Driver, tokens: list[int]) -> CacheLookup:
    return driver.scheduler.peek_kv_cache(make_request(driver.scheduler, "probe", tokens))


def with_connector(connector: FakeConnector) -> Driver:
    transfer = SimpleNamespace(kv_connector=None, is_kv_consumer=True, kv_load_failure_policy="recompute")
    driver = Driver(make_scheduler([full(4)], 60, connector=connector, kv_transfer_config=transfer))
    LoadRunner(driver.worker, connector)
    return driver


def reported(driver: Driver, name: str, tokens: list[int], **options: Any) -> dict[CacheHitSource, int]:
    driver.add(name, tokens, max_tokens=1, **options)
    driver.run()
    figures = driver.ends[name].prefill_stats
    assert figures is not None
    return figures.cached_tokens_by_source


@pytest.mark.parametrize("shape", SHAPES)
def test_a_look_up_agrees_with_the_admission_for_every_shape_of_cache(shape: str) -> None:
    rng = random.Random(shape)
    driver = Driver(make_scheduler(SHAPES[shape], 80))
    hits = 0
    for number in range(40):
        tokens = prompt(rng.randint(1, 60), seed=rng.randint(0, 2))
        found = peek(driver, tokens)
        assert found.complete
        assert reported(driver, f"r{number}", tokens) == found.cached_tokens_by_source
        assert set(found.tokens_by_tier) == {DEVICE}
        hits += found.cached_tokens
    assert hits > 0


@pytest.mark.parametrize("load_async", [True, False])
def test_a_look_up_agrees_with_the_admission_behind_a_connector(load_async: bool) -> None:
    rng = random.Random(load_async)
    connector = TellingConnector(4, load_async=load_async)
    driver = with_connector(connector)
    below = 0
    for number in range(30):
        tokens = prompt(rng.randint(1, 40), seed=rng.randint(0, 2))
        if rng.random() < 0.3:
            driver.scheduler.reset_prefix_cache()
        found = peek(driver, tokens)
        assert reported(driver, f"r{number}", tokens) == found.cached_tokens_by_source
        below += found.cached_tokens_by_source[BELOW]
    assert below > 0


def test_a_look_up_does_not_ask_the_connector_in_a_way_that_counts() -> None:
    connector = FakeConnector(4)
    connector.remember(prompt(40))
    driver = with_connector(connector)
    found = peek(driver, prompt(40))
    assert connector.asked == []
    assert found == CacheLookup(40, 0, {DEVICE: 0}, {DEVICE: 0}, complete=False)


def test_met_07_hits_of_a_remote_prefill_have_no_known_tier() -> None:
    connector = FakeConnector(4)
    connector.remember(prompt(100))
    driver = with_connector(connector)
    params = {"kv_transfer_params": {"do_remote_prefill": True, "remote_prefill_cached_tokens": 12}}
    assert reported(driver, "cold", prompt(100), extra_args=params) == {DEVICE: 0, BELOW: 12}


def test_a_request_that_skips_the_cache_is_counted_as_asking_nothing_of_the_device() -> None:
    driver = Driver(make_scheduler([full(4)], 40))
    reported(driver, "a", prompt(20))
    reported(driver, "b", prompt(20), skip_reading_prefix_cache=True)
    use = driver.scheduler.cache_use
    assert (use.requests, use.local_queries, use.hits_by_source) == (2, 20, {DEVICE: 0})
