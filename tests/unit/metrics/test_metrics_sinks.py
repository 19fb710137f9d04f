"""The log line and the Prometheus metrics: names, values, and that a defect in them disturbs nothing."""

import logging
from typing import Any

import pytest
from prometheus_client import CollectorRegistry

from tests.helpers.engine_configs import engine_config
from vllm.config import KVEventsConfig
from vllm.v1.message_types import FinishReason
from vllm.v1.metrics.cache_hit_source import CacheHitSource
from vllm.v1.metrics.loggers import LoggingStatLogger, StatLoggerBase, StatLoggerManager
from vllm.v1.metrics.prometheus import PrometheusMetrics, one_two_five_buckets
from vllm.v1.metrics.reader import Counter, Gauge, Histogram, Vector, get_metrics_snapshot
from vllm.v1.metrics.stats import (
    IterationStats,
    KVCacheEvictionEvent,
    KVEventStats,
    PrefillStats,
    PrefixCacheStats,
    RequestStateStats,
    SchedulerStats,
    SpecDecodingStats,
)


class Hand:
    """A clock that is moved by hand."""

    now = 100.0

    def monotonic(self) -> float:
        return self.now

    def time(self) -> float:
        return self.now


def iteration(prompt: int = 20, local: int = 8, external: int = 4, new_tokens: int = 1) -> IterationStats:
    stats = IterationStats(10.0)
    prefill = PrefillStats()
    prefill.set(prompt, local, external, {CacheHitSource.HOST: 3})
    state = RequestStateStats(arrival_time=9.0)
    stats.observe_tokens(state, new_tokens, 1.0, prefill)
    stats.observe_prompt(prefill)
    stats.observe_finish(state, FinishReason.LENGTH, prompt, 16, local + external)
    return stats


def scheduler() -> SchedulerStats:
    return SchedulerStats(
        num_running_reqs=3,
        num_waiting_reqs=5,
        num_skipped_waiting_reqs=2,
        kv_cache_usage=0.25,
        prefix_cache_stats=PrefixCacheStats(requests=2, queries=100, hits=50),
        connector_prefix_cache_stats=PrefixCacheStats(
            requests=2, queries=50, hits=12, hits_by_source={CacheHitSource.HOST: 8}
        ),
    )


@pytest.fixture
def registry() -> CollectorRegistry:
    return CollectorRegistry()


def values(registry: CollectorRegistry) -> dict[str, float]:
    found = {}
    for family in registry.collect():
        for sample in family.samples:
            extra = {k: v for k, v in sample.labels.items() if k not in ("model_name", "engine")}
            found[sample.name + "".join(f"|{v}" for v in extra.values())] = sample.value
    return found


def test_kept_contents_are_shown_and_refusals_add_up(registry: CollectorRegistry) -> None:
    metrics = PrometheusMetrics(engine_config(), [0], registry)
    for protected, refused in ((4, 2), (3, 0), (3, 5)):
        stats = SchedulerStats(num_protected_contents=protected, num_protections_refused=refused)
        metrics.record(stats, None, 0)
    got = values(registry)
    assert got["vllm:kv_retention_protected_blocks"] == 3
    assert got["vllm:kv_retention_refused_blocks_total"] == 7


def test_what_the_event_publisher_did_adds_up(registry: CollectorRegistry) -> None:
    events = KVEventsConfig(enable_kv_cache_events=True)
    metrics = PrometheusMetrics(engine_config(kv_events_config=events), [0], registry)
    for sent, dropped, depth in ((5, 0, 3), (2, 1, 0)):
        stats = KVEventStats(sent, dropped, 1, {"BlockStored": 4, "SomebodyElses": 9}, depth)
        metrics.record(SchedulerStats(kv_event_stats=stats), None, 0)
    got = {
        name: value
        for name, value in values(registry).items()
        if "kv_event" in name and "created" not in name
    }
    assert got == {
        "vllm:kv_event_batches_sent_total": 7,
        "vllm:kv_event_batches_dropped_total": 1,
        "vllm:kv_event_replay_requests_total": 2,
        "vllm:kv_event_queue_depth": 0,
        "vllm:kv_events_sent_total|BlockStored": 8,
        "vllm:kv_events_sent_total|BlockRemoved": 0,
        "vllm:kv_events_sent_total|AllBlocksCleared": 0,
    }


def test_without_events_there_are_no_figures_of_them(registry: CollectorRegistry) -> None:
    metrics = PrometheusMetrics(engine_config(), [0], registry)
    metrics.record(SchedulerStats(kv_event_stats=KVEventStats(1)), None, 0)
    assert not [name for name in values(registry) if "kv_event" in name]


def test_figures_of_a_step(registry: CollectorRegistry) -> None:
    metrics = PrometheusMetrics(engine_config(), [0], registry)
    metrics.record(scheduler(), iteration(), 0)
    metrics.record(None, iteration(new_tokens=2), 0)
    got = values(registry)
    expected = {
        "vllm:num_requests_running": 3,
        "vllm:num_requests_waiting": 5,
        "vllm:num_requests_waiting_by_reason|capacity": 3,
        "vllm:num_requests_waiting_by_reason|deferred": 2,
        "vllm:kv_cache_usage_perc": 0.25,
        "vllm:prefix_cache_queries_total": 100,
        "vllm:prefix_cache_hits_total": 50,
        "vllm:external_prefix_cache_queries_total": 50,
        "vllm:external_prefix_cache_hits_total": 12,
        "vllm:prompt_tokens_total": 40,
        "vllm:prompt_tokens_cached_total": 24,
        "vllm:prompt_tokens_by_source_total|local_compute": 16,
        "vllm:prompt_tokens_by_source_total|local_cache_hit": 16,
        "vllm:prompt_tokens_by_source_total|external_kv_transfer": 8,
        "vllm:prompt_tokens_cached_by_source_total|device": 16,
        "vllm:prompt_tokens_cached_by_source_total|host": 6,
        "vllm:prompt_tokens_cached_by_source_total|external_unspecified": 2,
        "vllm:generation_tokens_total": 3,
        "vllm:request_success_total|length": 2,
        "vllm:request_success_total|error": 0,
        "vllm:request_prompt_tokens_sum": 40,
        "vllm:request_prefill_kv_computed_tokens_sum": 16,
        "vllm:request_params_max_tokens_count": 2,
        "vllm:e2e_request_latency_seconds_sum": 2,
        "vllm:time_to_first_token_seconds_count": 2,
        "vllm:iteration_tokens_total_sum": 19,
        "vllm:engine_sleep_state|awake": 1,
        "vllm:engine_sleep_state|discard_all": 0,
    }
    assert {name: got.get(name) for name in expected} == expected


def test_met_04_no_figure_can_make_a_counter_fall_or_raise(registry: CollectorRegistry) -> None:
    metrics = PrometheusMetrics(engine_config(), [0], registry)
    stats = IterationStats(1.0)
    stats.num_prompt_tokens, stats.num_cached_prompt_tokens, stats.num_external_cached_prompt_tokens = (
        768,
        768,
        8448,
    )
    metrics.record(SchedulerStats(prefix_cache_stats=PrefixCacheStats(queries=-5, hits=-5)), stats, 0)
    assert values(registry)["vllm:prompt_tokens_by_source_total|local_cache_hit"] == 0
    assert all(value >= 0 for value in values(registry).values())


def test_engines_are_kept_apart(registry: CollectorRegistry) -> None:
    metrics = PrometheusMetrics(engine_config(), [0, 1], registry)
    metrics.record(scheduler(), None, 1)
    running = {
        m.labels["engine"]: m.value
        for m in get_metrics_snapshot(registry)
        if m.name == "vllm:num_requests_running"
    }
    assert running == {"0": 0.0, "1": 3.0}


def test_metrics_of_optional_features(registry: CollectorRegistry, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("VLLM_COMPUTE_NANS_IN_LOGITS", "1")
    config = engine_config(kv_cache_metrics=True)
    config.speculative_config = object()
    metrics = PrometheusMetrics(config, [0], registry)
    drafts = SpecDecodingStats.new(2)
    drafts.observe_draft(2, 1)
    events = [KVCacheEvictionEvent(2.0, 1.0, (0.5, 0.5))]
    metrics.record(SchedulerStats(spec_decoding_stats=drafts, kv_cache_eviction_events=events), None, 0)
    got = values(registry)
    assert got["vllm:kv_block_lifetime_seconds_sum"] == 2
    assert got["vllm:kv_block_reuse_gap_seconds_count"] == 2
    assert got["vllm:spec_decode_num_draft_tokens_total"] == 2
    assert got["vllm:corrupted_requests_total"] == 0
    (vector,) = [m for m in get_metrics_snapshot(registry) if isinstance(m, Vector)]
    assert vector.values == [1, 0]


def test_absent_features_have_no_metrics(registry: CollectorRegistry) -> None:
    PrometheusMetrics(engine_config(), [0], registry)
    names = " ".join(values(registry))
    for part in ("kv_block", "spec_decode", "lora", "corrupted", "kv_fetch"):
        assert part not in names


def test_rejections_are_totals(registry: CollectorRegistry) -> None:
    metrics = PrometheusMetrics(engine_config(), [0], registry)
    for total in (1, 1, 3):
        metrics.record_rejections({"max_num_queued_reqs": total, "max_num_queued_tokens": 0})
    assert values(registry)["vllm:admission_rejections_total|max_num_queued_reqs"] == 3


def test_cache_config_and_sleep_state(registry: CollectorRegistry) -> None:
    config = engine_config()
    config.cache_config.num_gpu_blocks = 77
    metrics = PrometheusMetrics(config, [0], registry)
    metrics.record_cache_config()
    metrics.record_sleep_state(2)
    info = next(m for m in get_metrics_snapshot(registry) if m.name == "vllm:cache_config_info")
    assert info.labels["num_gpu_blocks"] == "77"
    assert values(registry)["vllm:engine_sleep_state|discard_all"] == 1


def test_each_engine_tells_its_own_sizes(registry: CollectorRegistry) -> None:
    config = engine_config()
    config.cache_config.num_gpu_blocks = 77
    metrics = PrometheusMetrics(config, [0, 1], registry)
    metrics.record_cache_config([{"num_gpu_blocks": 77}, {"num_gpu_blocks": 78, "no_such_field": 1}])
    infos = [m for m in get_metrics_snapshot(registry) if m.name == "vllm:cache_config_info"]
    assert {info.labels["engine"]: info.labels["num_gpu_blocks"] for info in infos} == {"0": "77", "1": "78"}


def test_a_second_engine_replaces_the_first_and_closing_leaves_nothing(registry: CollectorRegistry) -> None:
    PrometheusMetrics(engine_config(), [0], registry)
    second = PrometheusMetrics(engine_config(), [0], registry)
    second.record_cache_config()
    second.unregister()
    second.unregister()
    assert not list(registry.collect())


def test_snapshot_kinds(registry: CollectorRegistry) -> None:
    metrics = PrometheusMetrics(engine_config(), [0], registry)
    metrics.record(scheduler(), iteration(), 0)
    by_name = {metric.name: metric for metric in get_metrics_snapshot(registry)}
    assert by_name["vllm:prompt_tokens"] == Counter(
        "vllm:prompt_tokens",
        {"model_name": by_name["vllm:prompt_tokens"].labels["model_name"], "engine": "0"},
        20,
    )
    assert isinstance(by_name["vllm:num_requests_running"], Gauge)
    histogram = by_name["vllm:request_prompt_tokens"]
    assert isinstance(histogram, Histogram)
    assert (histogram.count, histogram.sum, histogram.buckets["20.0"], histogram.buckets["10.0"]) == (
        1,
        20.0,
        1,
        0,
    )


def test_buckets() -> None:
    assert one_two_five_buckets(256) == [1, 2, 5, 10, 20, 50, 100, 200]
    assert one_two_five_buckets(1) == [1]


# -- log line --------------------------------------------------------------------------------------------------------


@pytest.fixture
def lines(monkeypatch: pytest.MonkeyPatch) -> list[tuple[int, str]]:
    written: list[tuple[int, str]] = []
    target = logging.getLogger("vllm.v1.metrics.loggers")
    monkeypatch.setattr(target, "level", logging.DEBUG)
    handler = logging.Handler()
    handler.emit = lambda record: written.append((record.levelno, record.getMessage()))  # type: ignore[method-assign]
    target.addHandler(handler)
    yield written
    target.removeHandler(handler)


def test_line_of_an_interval(lines: list[tuple[int, str]]) -> None:
    clock = Hand()
    sink = LoggingStatLogger(engine_config(), 0, clock)
    sink.record(scheduler(), iteration(new_tokens=10))
    clock.now += 2
    sink.log()
    assert lines[-1] == (
        logging.INFO,
        "Engine 000: Avg prompt throughput: 4.0 tokens/s, Avg generation throughput: 5.0 tokens/s, Running: 3 reqs, "
        "Waiting: 5 reqs, Deferred: 2 reqs, CPU KV cache usage: 25.0%, Prefix cache hit rate: 50.0%, "
        "External prefix cache hit rate: 24.0%",
    )
    clock.now += 2
    sink.log()
    sink.log()
    assert [level for level, _ in lines[-2:]] == [logging.INFO, logging.DEBUG]


def test_line_with_kv_fetch_and_preemptions(lines: list[tuple[int, str]]) -> None:
    clock = Hand()
    sink = LoggingStatLogger(engine_config(), 3, clock)
    stats = IterationStats(1.0)
    stats.num_preempted_reqs = 2
    sink.record(
        SchedulerStats(num_kv_fetch_reqs_by_stage={"waiting_to_start": 1, "completed_waiting": 3}), stats
    )
    sink.log()
    assert (
        "KV fetch: 1 waiting to start, 0 in progress, 3 completed waiting, Preemptions: 2, CPU"
        in lines[-1][1]
    )
    assert lines[-1][1].startswith("Engine 003: ")


class Broken(StatLoggerBase):
    def __init__(self, vllm_config: Any, engine_index: int = 0) -> None:
        self.calls = 0

    def record(self, scheduler_stats: Any, iteration_stats: Any, engine_idx: int = 0) -> None:
        self.calls += 1
        raise ValueError("counters can only be incremented by non-negative amounts")

    def log_engine_initialized(self) -> None:
        raise ValueError("broken")


def test_met_04_a_broken_sink_is_reported_once_and_disturbs_nothing(lines: list[tuple[int, str]]) -> None:
    manager = StatLoggerManager(engine_config(), [0], [Broken], Hand())
    manager.log_engine_initialized()
    for _ in range(3):
        manager.record(scheduler(), iteration(), 0, {"max_num_queued_reqs": 0})
    manager.log()
    manager.close()
    assert [message for _, message in lines if "Broken" in message] == [
        "Statistics sink Broken failed; further failures of it are not logged."
    ]
    (broken,) = [sink for sink in manager.per_engine[0] if isinstance(sink, Broken)]
    assert broken.calls == 3


def test_each_engines_line_has_its_own_sizes(lines: list[tuple[int, str]]) -> None:
    resolved = [{"num_gpu_blocks": 77, "block_size": 16}, {"num_gpu_blocks": 78, "block_size": 16}]
    manager = StatLoggerManager(engine_config(), [0, 1], None, Hand(), resolved)
    manager.log_engine_initialized()
    manager.close()
    told = [message for _, message in lines if "KV cache blocks" in message]
    assert told == [
        "Engine 000: 77 KV cache blocks of 16 tokens.",
        "Engine 001: 78 KV cache blocks of 16 tokens.",
    ]


def test_lines_are_due_by_the_clock(lines: list[tuple[int, str]], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("VLLM_LOG_STATS_INTERVAL", "5")
    clock = Hand()
    manager = StatLoggerManager(engine_config(), [0], None, clock)
    count = len(lines)
    for now, expected in ((104.0, 0), (105.0, 1), (106.0, 1), (110.0, 2)):
        clock.now = now
        manager.log_if_due()
        assert len(lines) - count == expected
    manager.close()
