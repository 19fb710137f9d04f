"""The Prometheus metrics of the engine.  Layer L7.

Owns names, labels and buckets, as one table each. Must not know requests or the core. Nothing is registered at import:
the object registers its metrics when it is built, and takes them away with `unregister`.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from prometheus_client import REGISTRY, CollectorRegistry, Counter, Gauge, Histogram

from vllm import envs
from vllm.config import VllmConfig
from vllm.distributed.kv_transfer.kv_connector.v1.metrics import KVConnectorPrometheus
from vllm.v1.message_types import FinishReason
from vllm.v1.metrics.cache_hit_source import CacheHitSource
from vllm.v1.metrics.stats import (
    KV_FETCH_STAGES,
    FinishedRequestStats,
    IterationStats,
    KVEventStats,
    PrefixCacheStats,
    SchedulerStats,
    SpecDecodingStats,
)

PREFIX = "vllm:"
LABELS = ["model_name", "engine"]
SLEEP_STATES = ("awake", "weights_offloaded", "discard_all")
WAITING_REASONS = ("capacity", "deferred")
PROMPT_SOURCES = ("local_compute", "local_cache_hit", "external_kv_transfer")
REJECTION_REASONS = ("max_num_queued_reqs", "max_num_queued_tokens")

GAUGES = {
    "num_requests_running": "Requests in the running batch.",
    "num_requests_waiting": "Requests that wait, whatever they wait for.",
    "kv_cache_usage_perc": "Share of KV cache blocks in use, 0 to 1.",
    "kv_retention_protected_blocks": "Blocks of content that requests had pinned or kept before others.",
}
COUNTERS = {
    "prefix_cache_queries": "Tokens looked up in the device's prefix cache.",
    "prefix_cache_hits": "Tokens found in the device's prefix cache.",
    "external_prefix_cache_queries": "Tokens looked up through the KV connector.",
    "external_prefix_cache_hits": "Tokens that the KV connector loads.",
    "prompt_tokens": "Prompt tokens of requests that have given a token; a prompt counts once for all its samples.",
    "prompt_tokens_cached": "Those of them that came from a cache, as the requests report it.",
    "generation_tokens": "Generated tokens.",
    "num_preemptions": "Preemptions of running requests.",
    "kv_retention_refused_blocks": "Blocks whose protection was refused, as the share for it was used up.",
}
COUNTERS_BY: dict[str, tuple[str, str, tuple[str, ...]]] = {
    "prompt_tokens_by_source": ("source", "Prompt tokens by where they came from.", PROMPT_SOURCES),
    "prompt_tokens_cached_by_source": (
        "source",
        "Cached prompt tokens by tier, as the requests report them.",
        tuple(source.value for source in CacheHitSource),
    ),
    "request_success": (
        "finished_reason",
        "Requests that ended, by reason; aborted and failed ones too, in spite of the name.",
        tuple(str(reason) for reason in FinishReason),
    ),
}
_SECONDS_SHORT = (
    0.001,
    0.005,
    0.01,
    0.02,
    0.04,
    0.06,
    0.08,
    0.1,
    0.25,
    0.5,
    0.75,
    1,
    2.5,
    5,
    7.5,
    10,
    20,
    40,
    80,
    160,
    640,
    2560,
)
_SECONDS_TOKEN = (
    0.01,
    0.025,
    0.05,
    0.075,
    0.1,
    0.15,
    0.2,
    0.3,
    0.4,
    0.5,
    0.75,
    1,
    2.5,
    5,
    7.5,
    10,
    20,
    40,
    80,
)
_SECONDS_LONG = (0.3, 0.5, 0.8, 1, 1.5, 2, 2.5, 5, 10, 15, 20, 30, 40, 50, 60, 120, 240, 480, 960, 1920, 7680)
_SECONDS_BLOCK = (0.001, 0.01, 0.1, 0.5, 1, 2, 5, 10, 20, 30, 60, 120, 300, 600, 1200, 1800)
_STEP_TOKENS = (1, 8, 16, 32, 64, 128, 256, 512, 1024, 2048, 4096, 8192, 16384)
# Buckets None: 1, 2, 5, 10, … up to the model's length.
HISTOGRAMS: dict[str, tuple[str, tuple[float, ...] | None]] = {
    "request_prompt_tokens": ("Prompt tokens per request.", None),
    "request_generation_tokens": ("Generated tokens per request.", None),
    "request_max_num_generation_tokens": ("Longest output of a request's samples.", None),
    "request_params_n": ("Parameter n of requests.", (1, 2, 5, 10, 20)),
    "request_params_max_tokens": ("Parameter max_tokens of requests.", None),
    "iteration_tokens_total": ("Tokens per step.", _STEP_TOKENS),
    "request_prefill_kv_computed_tokens": ("Prompt tokens whose KV was computed, per request.", None),
    "request_num_preemptions": ("Preemptions per request.", (0, 1, 2, 3, 5, 10, 20, 50)),
    "time_to_first_token_seconds": ("Time to the first token.", _SECONDS_SHORT),
    "inter_token_latency_seconds": ("Time between two outputs of a request.", _SECONDS_TOKEN),
    "request_time_per_output_token_seconds": ("Mean time per output token of a request.", _SECONDS_TOKEN),
    "e2e_request_latency_seconds": ("Time from arrival to the end of a request.", _SECONDS_LONG),
    "request_queue_time_seconds": ("Time in the queue.", _SECONDS_LONG),
    "request_inference_time_seconds": ("Time from the first scheduling to the last token.", _SECONDS_LONG),
    "request_prefill_time_seconds": ("Time from the first scheduling to the first token.", _SECONDS_LONG),
    "request_decode_time_seconds": ("Time from the first token to the last.", _SECONDS_LONG),
}
BLOCK_HISTOGRAMS = {
    "kv_block_lifetime_seconds": "Life of sampled KV blocks, from allocation to eviction.",
    "kv_block_idle_before_evict_seconds": "Time since the last use of sampled KV blocks when they were evicted.",
    "kv_block_reuse_gap_seconds": "Time between two uses of sampled KV blocks.",
}
EVENT_COUNTERS = {
    "kv_event_batches_sent": "Batches of KV events that were published.",
    "kv_event_batches_dropped": "Batches of KV events that were lost: the queue was full, or they could not be sent.",
    "kv_event_replay_requests": "Requests for a replay or for the present state.",
}
EVENT_TYPES = ("BlockStored", "BlockRemoved", "AllBlocksCleared")
DRAFT_COUNTERS = {
    "spec_decode_num_drafts": "Drafts.",
    "spec_decode_num_draft_tokens": "Draft tokens.",
    "spec_decode_num_accepted_tokens": "Accepted draft tokens.",
}


def one_two_five_buckets(largest: int) -> list[float]:
    """1, 2, 5, 10, 20, 50, … up to `largest`."""
    buckets: list[float] = []
    power = 1
    while power <= largest:
        buckets += [mantissa * power for mantissa in (1, 2, 5) if mantissa * power <= largest]
        power *= 10
    return buckets


class PrometheusMetrics:
    """All metrics of the engines of one front end. Values never go down: what would be negative counts as 0."""

    def __init__(
        self, vllm_config: VllmConfig, engine_idxs: list[int], registry: CollectorRegistry = REGISTRY
    ) -> None:
        unregister_engine_metrics(registry)
        self._registry = registry
        self._vllm_config = vllm_config
        self._collectors: list[Any] = []
        model = vllm_config.model_config
        name = served_name(vllm_config)
        self._labels = {index: [name, str(index)] for index in engine_idxs}
        self._longest = (model.max_model_len if model is not None else None) or 1
        self._gauges = {key: self._engines(self._make(Gauge, key, doc)) for key, doc in GAUGES.items()}
        self._counters = {key: self._engines(self._make(Counter, key, doc)) for key, doc in COUNTERS.items()}
        self._counters_by = {
            key: self._engines_by(self._make(Counter, key, doc, [label]), values)
            for key, (label, doc, values) in COUNTERS_BY.items()
        }
        self._histograms = {
            key: self._engines(self._make(Histogram, key, doc, buckets=self._buckets(buckets)))
            for key, (doc, buckets) in HISTOGRAMS.items()
        }
        self._waiting_by_reason = self._engines_by(
            self._make(Gauge, "num_requests_waiting_by_reason", "Waiting requests by reason.", ["reason"]),
            WAITING_REASONS,
        )
        self._sleep_state = self._engines_by(
            self._make(
                Gauge, "engine_sleep_state", "1 for the state that the engine is in.", ["sleep_state"]
            ),
            SLEEP_STATES,
        )
        self._rejections = self._make_rejections(name)
        self._optional(vllm_config)
        self.record_sleep_state(0)

    # -- construction --------------------------------------------------------------------------------------------

    def _make(
        self,
        kind: type[Any],
        name: str,
        doc: str,
        labels: Iterable[str] = (),
        buckets: list[float] | None = None,
    ) -> Any:
        options: dict[str, Any] = {} if buckets is None else {"buckets": buckets}
        metric = kind(PREFIX + name, doc, labelnames=[*LABELS, *labels], registry=self._registry, **options)
        self._collectors.append(metric)
        return metric

    def _engines(self, metric: Any) -> dict[int, Any]:
        return {index: metric.labels(*values) for index, values in self._labels.items()}

    def _engines_by(self, metric: Any, values: Iterable[str]) -> dict[int, dict[str, Any]]:
        values = tuple(values)
        return {
            index: {value: metric.labels(*labels, value) for value in values}
            for index, labels in self._labels.items()
        }

    def _buckets(self, buckets: tuple[float, ...] | None) -> list[float]:
        return one_two_five_buckets(self._longest) if buckets is None else list(buckets)

    def _make_rejections(self, model_name: str) -> dict[str, Any]:
        """Without an engine: the limits are those of all together, and who is refused has been given to none."""
        metric = Counter(
            PREFIX + "admission_rejections",
            "Requests refused because too much waited.",
            labelnames=["model_name", "reason"],
            registry=self._registry,
        )
        self._collectors.append(metric)
        return {reason: metric.labels(model_name, reason) for reason in REJECTION_REASONS}

    def _optional(self, vllm_config: VllmConfig) -> None:
        """Metrics of features that are on."""
        self._rejected: dict[str, int] = {}
        self._kv_fetch: dict[int, dict[str, Any]] = {}
        transfer = vllm_config.kv_transfer_config
        if transfer is not None and transfer.is_kv_consumer:
            metric = self._make(
                Gauge, "num_requests_kv_fetch_by_stage", "Requests whose KV is fetched.", ["stage"]
            )
            self._kv_fetch = self._engines_by(metric, KV_FETCH_STAGES)
        self._corrupted: dict[int, Any] = {}
        if envs.VLLM_COMPUTE_NANS_IN_LOGITS:
            metric = self._make(Counter, "corrupted_requests", "Requests with NaN logits.")
            self._corrupted = self._engines(metric)
        self._blocks: dict[str, dict[int, Any]] = {}
        if vllm_config.observability_config.kv_cache_metrics:
            for key, doc in BLOCK_HISTOGRAMS.items():
                self._blocks[key] = self._engines(
                    self._make(Histogram, key, doc, buckets=list(_SECONDS_BLOCK))
                )
        self._events: dict[str, dict[int, Any]] = {}
        self._events_by_type: dict[int, dict[str, Any]] = {}
        if vllm_config.kv_events_config is not None and vllm_config.kv_events_config.enable_kv_cache_events:
            for key, doc in EVENT_COUNTERS.items():
                self._events[key] = self._engines(self._make(Counter, key, doc))
            depth = self._make(Gauge, "kv_event_queue_depth", "Batches of KV events that wait to be sent.")
            self._events["kv_event_queue_depth"] = self._engines(depth)
            self._events_by_type = self._engines_by(
                self._make(Counter, "kv_events_sent", "KV events that were published.", ["type"]), EVENT_TYPES
            )
        self._drafts: dict[str, dict[int, Any]] = {}
        self._accepted_at: Any = None
        if vllm_config.speculative_config is not None:
            for key, doc in DRAFT_COUNTERS.items():
                self._drafts[key] = self._engines(self._make(Counter, key, doc))
            self._accepted_at = self._make(
                Counter,
                "spec_decode_num_accepted_tokens_per_pos",
                "Accepted draft tokens by position.",
                ["position"],
            )
        self._lora: Any = None
        if vllm_config.lora_config is not None:
            self._max_lora = str(vllm_config.lora_config.max_loras)
            self._lora = self._make(
                Gauge,
                "lora_requests_info",
                "Adapters in use; the value is the time of the last change.",
                ["max_lora", "waiting_lora_adapters", "running_lora_adapters"],
            )
        before = set(self._registry._collector_to_names)
        per_engine = {index: list[object](values) for index, values in self._labels.items()}
        self._connector = KVConnectorPrometheus(vllm_config, self._connector_types(), LABELS, per_engine)
        self._collectors += [metric for metric in self._registry._collector_to_names if metric not in before]

    def _connector_types(self) -> dict[type[Any], Any]:
        """The classes that a connector's sink instantiates, tied to this registry."""

        def tied(kind: type[Any]) -> Any:
            def make(*args: Any, **kwargs: Any) -> Any:
                return kind(*args, **{"registry": self._registry, **kwargs})

            return make

        return {kind: tied(kind) for kind in (Gauge, Counter, Histogram)}

    # -- values --------------------------------------------------------------------------------------------------

    def record(
        self,
        scheduler_stats: SchedulerStats | None,
        iteration_stats: IterationStats | None,
        engine_idx: int = 0,
    ) -> None:
        """Take one step's figures."""
        if scheduler_stats is not None:
            self._record_scheduler(scheduler_stats, engine_idx)
        if iteration_stats is not None:
            self._record_iteration(iteration_stats, engine_idx)

    @property
    def wants_cache_reports(self) -> bool:
        """Whether figures of the cache change while an engine is idle, so that it must be asked."""
        return self._connector.wants_reports

    def record_cache_report(self, report: Mapping[str, Any], engine_idx: int) -> None:
        """What an engine's cache holds now: the fields of `KVCacheReport`."""
        self._connector.observe_report(report, engine_idx)

    def _record_scheduler(self, stats: SchedulerStats, index: int) -> None:
        self._gauges["num_requests_running"][index].set(stats.num_running_reqs)
        self._gauges["num_requests_waiting"][index].set(stats.num_waiting_reqs)
        deferred = min(stats.num_skipped_waiting_reqs, stats.num_waiting_reqs)
        self._waiting_by_reason[index]["capacity"].set(stats.num_waiting_reqs - deferred)
        self._waiting_by_reason[index]["deferred"].set(deferred)
        self._gauges["kv_cache_usage_perc"][index].set(stats.kv_cache_usage)
        self._gauges["kv_retention_protected_blocks"][index].set(stats.num_protected_contents)
        _add(self._counters["kv_retention_refused_blocks"][index], stats.num_protections_refused)
        for stage, gauge in self._kv_fetch.get(index, {}).items():
            gauge.set(stats.num_kv_fetch_reqs_by_stage.get(stage, 0))
        self._record_cache("", stats.prefix_cache_stats, index)
        if stats.connector_prefix_cache_stats is not None:
            self._record_cache("external_", stats.connector_prefix_cache_stats, index)
        if stats.kv_connector_stats:
            self._connector.observe(stats.kv_connector_stats, index)
        if stats.spec_decoding_stats is not None and self._drafts:
            self._record_drafts(stats.spec_decoding_stats, index)
        if stats.kv_event_stats is not None and self._events:
            self._record_events(stats.kv_event_stats, index)
        if self._blocks:
            self._record_blocks(stats, index)
        if self._lora is not None:
            running, waiting = stats.running_lora_adapters, stats.waiting_lora_adapters
            labels = [self._max_lora, ",".join(sorted(waiting)), ",".join(sorted(running))]
            self._lora.labels(*self._labels[index], *labels).set_to_current_time()

    def _record_cache(self, prefix: str, stats: PrefixCacheStats, index: int) -> None:
        _add(self._counters[f"{prefix}prefix_cache_queries"][index], stats.queries)
        _add(self._counters[f"{prefix}prefix_cache_hits"][index], stats.hits)

    def _record_drafts(self, stats: SpecDecodingStats, index: int) -> None:
        _add(self._drafts["spec_decode_num_drafts"][index], stats.num_drafts)
        _add(self._drafts["spec_decode_num_draft_tokens"][index], stats.num_draft_tokens)
        _add(self._drafts["spec_decode_num_accepted_tokens"][index], stats.num_accepted_tokens)
        for position, tokens in enumerate(stats.num_accepted_tokens_per_pos):
            _add(self._accepted_at.labels(*self._labels[index], str(position)), tokens)

    def _record_events(self, stats: KVEventStats, index: int) -> None:
        _add(self._events["kv_event_batches_sent"][index], stats.batches_sent)
        _add(self._events["kv_event_batches_dropped"][index], stats.batches_dropped)
        _add(self._events["kv_event_replay_requests"][index], stats.replay_requests)
        self._events["kv_event_queue_depth"][index].set(stats.queue_depth)
        for kind, count in stats.events_by_type.items():
            if kind in self._events_by_type[index]:
                _add(self._events_by_type[index][kind], count)

    def _record_blocks(self, stats: SchedulerStats, index: int) -> None:
        for event in stats.kv_cache_eviction_events:
            self._blocks["kv_block_lifetime_seconds"][index].observe(event.lifetime_seconds)
            self._blocks["kv_block_idle_before_evict_seconds"][index].observe(event.idle_seconds)
            for gap in event.reuse_gaps_seconds:
                self._blocks["kv_block_reuse_gap_seconds"][index].observe(gap)

    def _record_iteration(self, stats: IterationStats, index: int) -> None:
        computed = stats.num_prompt_tokens - stats.num_cached_prompt_tokens
        external = stats.num_external_cached_prompt_tokens
        _add(self._counters["prompt_tokens"][index], stats.num_prompt_tokens)
        _add(self._counters["prompt_tokens_cached"][index], stats.num_cached_prompt_tokens)
        _add(self._counters["generation_tokens"][index], stats.num_generation_tokens)
        _add(self._counters["num_preemptions"][index], stats.num_preempted_reqs)
        by_source = self._counters_by["prompt_tokens_by_source"][index]
        _add(by_source["local_compute"], computed)
        _add(by_source["local_cache_hit"], stats.num_cached_prompt_tokens - external)
        _add(by_source["external_kv_transfer"], external)
        cached_by_source = self._counters_by["prompt_tokens_cached_by_source"][index]
        for source, tokens in stats.cached_prompt_tokens_by_source.items():
            _add(cached_by_source[source.value], tokens)
        if stats.cached_prompt_tokens_by_source:
            self._connector.observe_hits(stats.cached_prompt_tokens_by_source, index)
        if self._corrupted:
            _add(self._corrupted[index], stats.num_corrupted_reqs)
        self._observe(
            "iteration_tokens_total", index, [stats.num_computed_prompt_tokens + stats.num_generation_tokens]
        )
        self._observe("time_to_first_token_seconds", index, stats.time_to_first_tokens_iter)
        self._observe("inter_token_latency_seconds", index, stats.inter_token_latencies_iter)
        self._observe("request_params_n", index, stats.n_params_iter)
        self._observe("request_max_num_generation_tokens", index, stats.max_num_generation_tokens_iter)
        for finished in stats.finished_requests:
            self._record_finished(finished, index)

    def _record_finished(self, finished: FinishedRequestStats, index: int) -> None:
        _add(self._counters_by["request_success"][index][str(finished.finish_reason)], 1)
        values: dict[str, float | None] = {
            "request_prompt_tokens": finished.num_prompt_tokens,
            "request_generation_tokens": finished.num_generation_tokens,
            "request_params_max_tokens": finished.max_tokens_param,
            "request_prefill_kv_computed_tokens": finished.num_prompt_tokens - finished.num_cached_tokens,
            "request_num_preemptions": finished.num_preemptions,
            "e2e_request_latency_seconds": finished.e2e_latency,
            "request_queue_time_seconds": finished.queued_time,
            "request_inference_time_seconds": finished.inference_time,
            "request_prefill_time_seconds": finished.prefill_time,
            "request_decode_time_seconds": finished.decode_time,
        }
        if finished.num_generation_tokens > 1:
            values["request_time_per_output_token_seconds"] = finished.mean_time_per_output_token
        for name, value in values.items():
            if value is not None:
                self._observe(name, index, [value])

    def _observe(self, name: str, index: int, values: Iterable[float]) -> None:
        histogram = self._histograms[name][index]
        for value in values:
            histogram.observe(max(0.0, value))

    def record_rejections(self, rejections: dict[str, int]) -> None:
        """Take the running totals of refused requests."""
        for reason, total in rejections.items():
            _add(self._rejections[reason], total - self._rejected.get(reason, 0))
            self._rejected[reason] = total

    def record_sleep_state(self, level: int) -> None:
        """0 awake, 1 weights on the host, 2 everything dropped."""
        for states in self._sleep_state.values():
            for position, state in enumerate(SLEEP_STATES):
                states[state].set(1 if position == level else 0)

    def record_cache_config(self, resolved: Sequence[Mapping[str, Any]] = ()) -> None:
        """Every field of the cache configuration as a label of one gauge; call it once sizes are known.

        `resolved`: per engine, the fields that it has decided for itself.
        """
        info = self._vllm_config.cache_config.metrics_info()
        metric = Gauge(
            PREFIX + "cache_config_info",
            "The cache configuration, as labels.",
            labelnames=[*info, "engine"],
            registry=self._registry,
        )
        self._collectors.append(metric)
        for index in self._labels:
            own = resolved[index] if index < len(resolved) else {}
            values = info | {key: str(value) for key, value in own.items() if key in info}
            metric.labels(*values.values(), str(index)).set(1)

    def unregister(self) -> None:
        """Take the metrics out of the registry. Idempotent."""
        collectors, self._collectors = self._collectors, []
        for collector in collectors:
            if collector in self._registry._collector_to_names:
                self._registry.unregister(collector)


def _add(counter: Any, amount: float) -> None:
    if amount > 0:
        counter.inc(amount)


def served_name(vllm_config: VllmConfig) -> str:
    """The name that the model is served under."""
    model = vllm_config.model_config
    if model is None:
        return ""
    served = model.served_model_name
    if isinstance(served, list):
        served = served[0] if served else None
    return served or model.model


def unregister_engine_metrics(registry: CollectorRegistry = REGISTRY) -> None:
    """Remove metrics of an earlier engine of this process."""
    names_of = dict(registry._collector_to_names)
    for collector, names in names_of.items():
        if names and names[0].startswith(PREFIX):
            registry.unregister(collector)
