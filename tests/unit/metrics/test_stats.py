"""Counters as data."""

from __future__ import annotations

import pytest

from vllm.v1.message_types import EngineCoreEvent, EngineCoreEventType, FinishReason
from vllm.v1.metrics.cache_hit_source import CacheHitSource, outermost
from vllm.v1.metrics.stats import (
    KV_FETCH_STAGES,
    CachingMetrics,
    IterationStats,
    PrefillStats,
    PrefixCacheStats,
    RequestSpecDecodeMetrics,
    RequestStateStats,
    SpecDecodingStats,
)


def test_sources_are_ordered_outwards() -> None:
    assert [source.value for source in CacheHitSource] == [
        "device",
        "host",
        "p2p",
        "disk",
        "external_unspecified",
    ]
    assert outermost([CacheHitSource.HOST, CacheHitSource.DISK, CacheHitSource.DEVICE]) is CacheHitSource.DISK
    assert CacheHitSource.outermost([CacheHitSource.DEVICE]) is CacheHitSource.DEVICE
    with pytest.raises(ValueError, match="at least one"):
        outermost([])
    assert KV_FETCH_STAGES == ("waiting_to_start", "in_progress", "completed_waiting")


def test_prefix_cache_stats_keep_preempted_requests_apart() -> None:
    stats = PrefixCacheStats()
    stats.record(100, 40, preempted=False, hits_by_source={CacheHitSource.HOST: 40})
    stats.record(50, 50, preempted=True, hits_by_source={CacheHitSource.HOST: 50})
    stats.record(10, 5, preempted=False, hits_by_source={CacheHitSource.HOST: 5})
    assert (stats.requests, stats.queries, stats.hits) == (2, 110, 45)
    assert (stats.preempted_requests, stats.preempted_queries, stats.preempted_hits) == (1, 50, 50)
    assert stats.hits_by_source == {CacheHitSource.HOST: 45}


def test_hit_rate_covers_the_most_recent_requests() -> None:
    metrics = CachingMetrics(max_recent_requests=3)
    assert metrics.empty
    assert metrics.hit_rate == 0.0
    metrics.observe(PrefixCacheStats(requests=2, queries=20, hits=20))
    metrics.observe(PrefixCacheStats())
    metrics.observe(PrefixCacheStats(requests=2, queries=20, hits=0))
    assert metrics.aggregated_requests == 2
    assert metrics.hit_rate == 0.0
    metrics.observe(PrefixCacheStats(requests=1, queries=20, hits=10))
    assert metrics.hit_rate == 0.25
    metrics.observe(PrefixCacheStats(reset=True))
    assert metrics.empty


def test_prefill_figures_add_up() -> None:
    stats = PrefillStats()
    stats.set(100, 32, 16)
    assert (stats.num_cached_tokens, stats.num_computed_tokens) == (48, 52)


@pytest.mark.parametrize(
    ("position", "device", "host", "disk"),
    [(90, 32, 16, 8), (50, 32, 16, 2), (40, 32, 8, 0), (20, 20, 0, 0), (0, 0, 0, 0)],
)
def test_what_was_found_and_is_of_no_use_is_not_reported(
    position: int, device: int, host: int, disk: int
) -> None:
    stats = PrefillStats()
    stats.set(100, 32, 24, {CacheHitSource.HOST: 16, CacheHitSource.DISK: 8})
    stats.limit(position)
    assert stats.cached_tokens_by_source == {
        CacheHitSource.DEVICE: device,
        CacheHitSource.HOST: host,
        CacheHitSource.DISK: disk,
    }
    cached = device + host + disk
    assert (stats.num_cached_tokens, stats.num_computed_tokens) == (cached, 100 - cached)
    assert (stats.num_local_cached_tokens, stats.num_external_cached_tokens) == (device, host + disk)


@pytest.mark.parametrize("kind", [SpecDecodingStats, RequestSpecDecodeMetrics])
def test_draft_counters(kind: type) -> None:
    stats = kind.new(3)
    stats.observe_draft(3, 2)
    stats.observe_draft(1, 0)
    assert (stats.num_drafts, stats.num_draft_tokens, stats.num_accepted_tokens) == (2, 4, 2)
    assert stats.num_accepted_tokens_per_pos == [1, 1, 0]


def test_an_iteration_counts_tokens_latencies_and_ends() -> None:
    state = RequestStateStats(arrival_time=10.0)
    first = IterationStats(iteration_timestamp=12.0)
    first.observe_events(
        state,
        [
            EngineCoreEvent(EngineCoreEventType.QUEUED, 1.0),
            EngineCoreEvent(EngineCoreEventType.SCHEDULED, 1.5),
            EngineCoreEvent(EngineCoreEventType.PREEMPTED, 1.6),
            EngineCoreEvent(EngineCoreEventType.SCHEDULED, 1.9),
        ],
    )
    prefill = PrefillStats()
    prefill.set(20, 8, 0)
    first.observe_tokens(state, 1, 2.0, prefill_stats=prefill)
    assert (first.num_computed_prompt_tokens, first.num_prompt_tokens) == (12, 0), "work, but no report yet"
    first.observe_prompt(prefill)
    assert (first.num_prompt_tokens, first.num_cached_prompt_tokens, first.num_generation_tokens) == (
        20,
        8,
        1,
    )
    assert first.time_to_first_tokens_iter == [2.0]
    assert first.num_preempted_reqs == 1
    second = IterationStats(iteration_timestamp=13.0)
    second.observe_tokens(state, 2, 3.0, num_nans_in_logits=4)
    second.observe_tokens(state, 0, 3.0, num_nans_in_logits=4)
    assert second.inter_token_latencies_iter == [1.0]
    assert second.num_corrupted_reqs == 1
    second.observe_finish(state, FinishReason.STOP, 20, 50, 8)
    (finished,) = second.finished_requests
    assert finished.e2e_latency == 3.0
    assert (finished.queued_time, finished.prefill_time, finished.decode_time) == (0.5, 0.5, 1.0)
    assert finished.mean_time_per_output_token == 0.5
    assert finished.num_cached_tokens == 8
