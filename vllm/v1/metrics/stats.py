"""Counters as data: what scheduler and front end count per step, per request and over a window.

Owns the records and the arithmetic on them.  Must not know who reads them (sinks) nor read a clock: every timestamp
is an argument.  Layer: L2 (values).
"""

from collections import deque
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from vllm.v1.message_types import EngineCoreEvent, EngineCoreEventType, FinishReason
from vllm.v1.metrics.cache_hit_source import CacheHitSource, limit_by_source

KV_FETCH_STAGES = ("waiting_to_start", "in_progress", "completed_waiting")
"""Stages of a request whose KV is fetched from outside the device, in order."""


@dataclass
class PrefixCacheStats:
    """Prefix cache use since the last report.

    A request counts once per admission, however often scheduling it was tried.  Admissions after a preemption are
    kept apart (``preempted_*``): a request that finds its own earlier blocks says nothing about reuse.
    """

    reset: bool = False
    """The cache was reset in this interval."""
    requests: int = 0
    queries: int = 0
    """Tokens looked up."""
    hits: int = 0
    """Tokens found."""
    preempted_requests: int = 0
    preempted_queries: int = 0
    preempted_hits: int = 0
    hits_by_source: dict[CacheHitSource, int] = field(default_factory=dict)

    def record(
        self,
        num_tokens: int,
        num_hits: int,
        preempted: bool,
        hits_by_source: dict[CacheHitSource, int] | None = None,
    ) -> None:
        """Count one admission of ``num_tokens`` tokens of which ``num_hits`` were found."""
        if preempted:
            self.preempted_requests += 1
            self.preempted_queries += num_tokens
            self.preempted_hits += num_hits
            return
        self.requests += 1
        self.queries += num_tokens
        self.hits += num_hits
        for source, tokens in (hits_by_source or {}).items():
            self.hits_by_source[source] = self.hits_by_source.get(source, 0) + tokens


@dataclass
class CacheUse:
    """Tokens looked up and found since the start: the sums of all `PrefixCacheStats`, never reset.

    ``local_queries`` were looked up on the device, ``external_queries`` (those not found there) through the connector.
    Admissions after a preemption are left out.
    """

    requests: int = 0
    local_queries: int = 0
    external_queries: int = 0
    hits_by_source: dict[CacheHitSource, int] = field(default_factory=dict)

    def record(
        self, local_queries: int, external_queries: int, hits_by_source: Mapping[CacheHitSource, int]
    ) -> None:
        """Count one admission."""
        self.requests += 1
        self.local_queries += local_queries
        self.external_queries += external_queries
        for source, tokens in hits_by_source.items():
            self.hits_by_source[source] = self.hits_by_source.get(source, 0) + tokens


class CachingMetrics:
    """Hit rate over the most recent requests."""

    def __init__(self, max_recent_requests: int = 1000) -> None:
        self.max_recent_requests = max_recent_requests
        self.aggregated_requests = 0
        self.aggregated_query_total = 0
        self.aggregated_query_hit = 0
        self._intervals: deque[tuple[int, int, int]] = deque()

    def observe(self, stats: PrefixCacheStats) -> None:
        """Add one interval; the oldest intervals leave while more than the wanted number of requests is covered."""
        if stats.reset:
            self.reset()
        if stats.requests == 0:
            return
        self._intervals.append((stats.requests, stats.queries, stats.hits))
        self._add(stats.requests, stats.queries, stats.hits)
        while len(self._intervals) > 1 and self.aggregated_requests > self.max_recent_requests:
            requests, queries, hits = self._intervals.popleft()
            self._add(-requests, -queries, -hits)

    def reset(self) -> None:
        """Forget everything."""
        self._intervals.clear()
        self.aggregated_requests = self.aggregated_query_total = self.aggregated_query_hit = 0

    @property
    def empty(self) -> bool:
        """True if no request was observed."""
        return self.aggregated_requests == 0

    @property
    def hit_rate(self) -> float:
        """Found tokens per looked-up token, 0.0 without lookups."""
        if self.aggregated_query_total == 0:
            return 0.0
        return self.aggregated_query_hit / self.aggregated_query_total

    def _add(self, requests: int, queries: int, hits: int) -> None:
        self.aggregated_requests += requests
        self.aggregated_query_total += queries
        self.aggregated_query_hit += hits


@dataclass
class PrefillStats:
    """Where the tokens of a prompt came from.  Set at the first admission, sent with the first output."""

    num_prompt_tokens: int = 0
    num_computed_tokens: int = 0
    """Prompt tokens that had to be computed."""
    num_cached_tokens: int = 0
    """``num_local_cached_tokens + num_external_cached_tokens``"""
    num_local_cached_tokens: int = 0
    num_external_cached_tokens: int = 0
    num_cache_creation_tokens: int = 0
    """Prompt tokens newly written to the prefix cache."""
    cached_tokens_by_source: dict[CacheHitSource, int] = field(default_factory=dict)
    """``num_cached_tokens`` by where they came from; every tier that was looked in is named."""

    def set(
        self,
        num_prompt_tokens: int,
        num_local_cached_tokens: int,
        num_external_cached_tokens: int,
        external_by_source: Mapping[CacheHitSource, int] | None = None,
    ) -> None:
        """Fill in all figures; cached tokens are clamped to the prompt, so no figure is ever negative.

        ``external_by_source`` splits the external tokens.
        """
        local = max(0, min(num_local_cached_tokens, num_prompt_tokens))
        external = max(0, min(num_external_cached_tokens, num_prompt_tokens - local))
        self.num_prompt_tokens = num_prompt_tokens
        self.num_local_cached_tokens = local
        self.num_external_cached_tokens = external
        self.num_cached_tokens = local + external
        self.num_computed_tokens = num_prompt_tokens - self.num_cached_tokens
        self.cached_tokens_by_source = {
            CacheHitSource.DEVICE: local,
            **limit_by_source(external_by_source or {}, external),
        }

    def limit(self, num_tokens: int) -> None:
        """What lies behind the first ``num_tokens`` tokens turned out to be of no use: it was computed after all."""
        if num_tokens >= self.num_cached_tokens:
            return
        local = min(self.num_local_cached_tokens, num_tokens)
        external = self.cached_tokens_by_source.copy()
        external.pop(CacheHitSource.DEVICE, None)
        self.set(self.num_prompt_tokens, local, num_tokens - local, external)


@dataclass
class KVCacheEvictionEvent:
    """Life of one sampled block, in seconds."""

    lifetime_seconds: float
    idle_seconds: float
    reuse_gaps_seconds: tuple[float, ...]


@dataclass
class SpecDecodingStats:
    """Draft tokens of one step."""

    num_spec_tokens: int
    num_drafts: int = 0
    num_draft_tokens: int = 0
    num_accepted_tokens: int = 0
    num_accepted_tokens_per_pos: list[int] = field(default_factory=list)

    @classmethod
    def new(cls, num_spec_tokens: int) -> "SpecDecodingStats":
        """Empty counters for drafts of up to ``num_spec_tokens`` tokens."""
        return cls(num_spec_tokens, num_accepted_tokens_per_pos=[0] * num_spec_tokens)

    def observe_draft(self, num_draft_tokens: int, num_accepted_tokens: int) -> None:
        """Count one draft."""
        self.num_drafts += 1
        self.num_draft_tokens += num_draft_tokens
        self.num_accepted_tokens += num_accepted_tokens
        for position in range(min(num_accepted_tokens, self.num_spec_tokens)):
            self.num_accepted_tokens_per_pos[position] += 1


@dataclass
class RequestSpecDecodeMetrics:
    """Draft tokens of one request over its whole life."""

    num_spec_tokens: int
    num_drafts: int = 0
    num_draft_tokens: int = 0
    num_accepted_tokens: int = 0
    num_accepted_tokens_per_pos: list[int] = field(default_factory=list)

    @classmethod
    def new(cls, num_spec_tokens: int) -> "RequestSpecDecodeMetrics":
        """Empty counters for drafts of up to ``num_spec_tokens`` tokens."""
        return cls(num_spec_tokens, num_accepted_tokens_per_pos=[0] * num_spec_tokens)

    def observe_draft(self, num_draft_tokens: int, num_accepted_tokens: int) -> None:
        """Count one draft."""
        self.num_drafts += 1
        self.num_draft_tokens += num_draft_tokens
        self.num_accepted_tokens += num_accepted_tokens
        for position in range(min(num_accepted_tokens, self.num_spec_tokens)):
            self.num_accepted_tokens_per_pos[position] += 1


@dataclass
class KVEventStats:
    """What the publisher of KV events did in an interval; ``queue_depth`` is the present one, in batches."""

    batches_sent: int = 0
    batches_dropped: int = 0
    replay_requests: int = 0
    events_by_type: dict[str, int] = field(default_factory=dict)
    queue_depth: int = 0


@dataclass
class SchedulerStats:
    """State and counters of the scheduler for one interval."""

    num_running_reqs: int = 0
    num_waiting_reqs: int = 0
    """All waiting requests, whatever they wait for."""
    num_skipped_waiting_reqs: int = 0
    """Those of them that were looked at and could not be tried (grammar, adapter limit, connector not ready)."""
    num_kv_fetch_reqs_by_stage: dict[str, int] = field(default_factory=dict)
    kv_cache_usage: float = 0.0
    """Share of blocks in use, 0 to 1."""
    prefix_cache_stats: PrefixCacheStats = field(default_factory=PrefixCacheStats)
    connector_prefix_cache_stats: PrefixCacheStats | None = None
    kv_cache_eviction_events: list[KVCacheEvictionEvent] = field(default_factory=list)
    spec_decoding_stats: SpecDecodingStats | None = None
    kv_connector_stats: dict[str, Any] | None = None  # payload is the connector's own
    waiting_lora_adapters: dict[str, int] = field(default_factory=dict)
    running_lora_adapters: dict[str, int] = field(default_factory=dict)
    cudagraph_stats: Any = None  # passed through from the runner
    num_corrupted_reqs: int = 0
    """Requests that ended because their logits were not finite."""
    num_preempted_reqs: int = 0
    num_stalled_reqs: int = 0
    """Requests that ended because they can never fit into the KV cache."""
    num_protected_contents: int = 0
    """Contents of the device's cache that requests had pinned or kept before others."""
    num_protections_refused: int = 0
    """Contents for which that was refused, as the share for them was used up."""
    kv_event_stats: KVEventStats | None = None
    """None where no KV events are published."""


@dataclass
class RequestStateStats:
    """What the front end remembers of a request while it lives.  All times in seconds."""

    num_generation_tokens: int = 0
    arrival_time: float = 0.0
    """Wall clock of the front end."""
    queued_ts: float = 0.0
    """Monotonic clock of the core, like the other ``_ts``."""
    scheduled_ts: float = 0.0
    first_token_ts: float = 0.0
    last_token_ts: float = 0.0
    first_token_latency: float = 0.0
    is_corrupted: bool = False
    num_preemptions: int = 0


@dataclass
class FinishedRequestStats:
    """Summary of a finished request.  All times in seconds."""

    finish_reason: FinishReason
    e2e_latency: float = 0.0
    num_prompt_tokens: int = 0
    num_generation_tokens: int = 0
    max_tokens_param: int | None = None
    queued_time: float = 0.0
    prefill_time: float = 0.0
    inference_time: float = 0.0
    decode_time: float = 0.0
    mean_time_per_output_token: float = 0.0
    is_corrupted: bool = False
    num_cached_tokens: int = 0
    num_preemptions: int = 0


class IterationStats:
    """What one batch of outputs means for the counters of the front end."""

    def __init__(self, iteration_timestamp: float = 0.0) -> None:
        """``iteration_timestamp`` is the wall clock in seconds at which the outputs are processed."""
        self.iteration_timestamp = iteration_timestamp
        self.num_generation_tokens = 0
        self.num_computed_prompt_tokens = 0  # of every sample, while what follows counts a prompt once
        self.num_prompt_tokens = 0
        self.num_cached_prompt_tokens = 0
        self.num_external_cached_prompt_tokens = 0  # the part of them that a connector loaded
        self.cached_prompt_tokens_by_source: dict[CacheHitSource, int] = {}
        self.num_preempted_reqs = 0
        self.num_corrupted_reqs = 0
        self.finished_requests: list[FinishedRequestStats] = []
        self.max_num_generation_tokens_iter: list[int] = []
        self.n_params_iter: list[int] = []
        self.time_to_first_tokens_iter: list[float] = []
        self.inter_token_latencies_iter: list[float] = []

    def observe_tokens(
        self,
        state: RequestStateStats,
        num_new_tokens: int,
        core_timestamp: float,
        prefill_stats: PrefillStats | None = None,
        num_nans_in_logits: int = 0,
        ends_prefill: bool | None = None,
    ) -> None:
        """Count new tokens of one request; the first ones also end its prefill.

        ``ends_prefill``: whether the core made any, where it may have made some that do not count.
        """
        self.num_generation_tokens += num_new_tokens
        if prefill_stats is not None:
            self.num_computed_prompt_tokens += prefill_stats.num_computed_tokens
        if num_nans_in_logits > 0 and not state.is_corrupted:
            state.is_corrupted = True
            self.num_corrupted_reqs += 1
        if not (num_new_tokens > 0 if ends_prefill is None else ends_prefill):
            return
        if state.num_generation_tokens == 0:
            state.first_token_latency = max(0.0, self.iteration_timestamp - state.arrival_time)
            self.time_to_first_tokens_iter.append(state.first_token_latency)
            state.first_token_ts = core_timestamp
        else:
            self.inter_token_latencies_iter.append(max(0.0, core_timestamp - state.last_token_ts))
        state.num_generation_tokens += num_new_tokens
        state.last_token_ts = core_timestamp

    def observe_prompt(self, reported: PrefillStats, num_completing_tokens: int = 0) -> None:
        """Count a prompt as its request reports it, once for all of its samples.

        ``num_completing_tokens`` of it were not in the prompt that the core got.
        """
        self.num_prompt_tokens += reported.num_prompt_tokens + num_completing_tokens
        self.num_cached_prompt_tokens += reported.num_cached_tokens
        self.num_external_cached_prompt_tokens += reported.num_external_cached_tokens
        for source, tokens in reported.cached_tokens_by_source.items():
            by_source = self.cached_prompt_tokens_by_source
            by_source[source] = by_source.get(source, 0) + tokens

    def observe_events(self, state: RequestStateStats, events: list[EngineCoreEvent]) -> None:
        """Take over queueing, scheduling and preemption times of one request."""
        for event in events:
            if event.type == EngineCoreEventType.QUEUED:
                state.queued_ts = event.timestamp
            elif event.type == EngineCoreEventType.SCHEDULED:
                # The wait ends with the first admission; later ones follow a preemption.
                if state.scheduled_ts == 0.0:
                    state.scheduled_ts = event.timestamp
            elif event.type == EngineCoreEventType.PREEMPTED:
                self.num_preempted_reqs += 1
                state.num_preemptions += 1

    def observe_finish(
        self,
        state: RequestStateStats,
        finish_reason: FinishReason,
        num_prompt_tokens: int,
        max_tokens_param: int | None = None,
        num_cached_tokens: int = 0,
    ) -> None:
        """Add the summary of a request that ended."""
        decode_time = max(0.0, state.last_token_ts - state.first_token_ts)
        decode_tokens = state.num_generation_tokens - 1
        self.finished_requests.append(
            FinishedRequestStats(
                finish_reason=finish_reason,
                e2e_latency=max(0.0, self.iteration_timestamp - state.arrival_time),
                num_prompt_tokens=num_prompt_tokens,
                num_generation_tokens=state.num_generation_tokens,
                max_tokens_param=max_tokens_param,
                queued_time=max(0.0, state.scheduled_ts - state.queued_ts),
                prefill_time=max(0.0, state.first_token_ts - state.scheduled_ts),
                inference_time=max(0.0, state.last_token_ts - state.scheduled_ts),
                decode_time=decode_time,
                mean_time_per_output_token=decode_time / decode_tokens if decode_tokens > 0 else 0.0,
                is_corrupted=state.is_corrupted,
                num_cached_tokens=num_cached_tokens,
                num_preemptions=state.num_preemptions,
            )
        )
