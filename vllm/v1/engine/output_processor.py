"""Outputs of the core → outputs of requests.  Layer L7.

Owns the table of living requests in the front end. Must not know sockets or HTTP. Every entry leaves with its request:
when it finished, when it was aborted, or when the engine died. One event loop or one thread; not thread-safe.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any

from vllm.logger import init_logger
from vllm.v1.engine.output_collector import Output, RequestOutputCollector, StreamingInputOutputCollector
from vllm.v1.engine.parallel_sampling import ParentRequest
from vllm.v1.engine.request_state import RequestState
from vllm.v1.messages import EngineCoreOutput, EngineCoreRequest, FinishReason
from vllm.v1.metrics.cache_hit_source import CacheHitSource
from vllm.v1.metrics.stats import IterationStats, PrefillStats, SchedulerStats

logger = init_logger(__name__)


@dataclass
class OutputProcessorOutput:
    """`request_outputs`: outputs of requests without a queue. `reqs_to_abort`: ended here (stop string), not yet there."""

    request_outputs: list[Output] = field(default_factory=list)
    reqs_to_abort: list[str] = field(default_factory=list)


class OutputProcessor:
    """See the module. `request_states`, `parent_requests` by internal id; `external_req_ids` by the caller's id."""

    def __init__(
        self,
        tokenizer: Any | None,
        *,
        log_stats: bool,
        stream_interval: int = 1,
        tracing_enabled: bool = False,
        admission_stats: Any = None,
        packs_wide_logprobs: bool = False,
    ) -> None:
        self.tokenizer = tokenizer
        self.log_stats = log_stats
        self.stream_interval = stream_interval
        self.tracing_enabled = tracing_enabled
        self.admission_stats = admission_stats
        self.packs_wide_logprobs = packs_wide_logprobs
        self.scheduler_stats: SchedulerStats | None = None
        self.request_states: dict[str, RequestState] = {}
        self.parent_requests: dict[str, ParentRequest] = {}
        self.external_req_ids: dict[str, list[str]] = {}
        self._reported: dict[tuple[int, CacheHitSource], int] = {}
        """By engine and tier, cached tokens that requests have reported since the start."""

    # -- the table -----------------------------------------------------------------------------------------------

    def get_num_unfinished_requests(self) -> int:
        return len(self.request_states)

    def has_unfinished_requests(self) -> bool:
        return bool(self.request_states)

    def has_request(self, request_id: str) -> bool:
        """True for the internal or external id of a living request."""
        return request_id in self.request_states or request_id in self.external_req_ids

    def is_followed(self, request_id: str) -> bool:
        """True for the internal id of a living request, or of one whose children live."""
        return request_id in self.request_states or request_id in self.parent_requests

    def get_num_queued_requests(self) -> int:
        """Requests that have not given a token yet."""
        return sum(state.is_prefilling for state in self.request_states.values())

    def get_num_queued_tokens(self) -> int:
        """Prompt tokens of these requests."""
        return sum(state.prompt_len for state in self.request_states.values() if state.is_prefilling)

    def add_request(
        self,
        request: EngineCoreRequest,
        prompt: str | None,
        parent_req: ParentRequest | None = None,
        request_index: int = 0,
        queue: RequestOutputCollector | None = None,
    ) -> None:
        """Start to follow a request. Raises ValueError if its id is in use."""
        request_id = request.request_id
        if request_id in self.request_states:
            raise ValueError(f"request id {request_id!r} is in use by an unfinished request")
        state = RequestState.from_new_request(
            self.tokenizer,
            request,
            prompt,
            parent_req,
            request_index,
            queue,
            self.log_stats,
            self.stream_interval,
        )
        params = request.sampling_params
        state.logprobs_processor.packs_wide = (
            self.packs_wide_logprobs and params is not None and not params.flat_logprobs
        )
        self.request_states[request_id] = state
        self.external_req_ids.setdefault(state.external_req_id, []).append(request_id)
        if parent_req is not None:
            self.parent_requests[parent_req.request_id] = parent_req

    def abort_requests(self, request_ids: Iterable[str], internal: bool) -> list[str]:
        """Forget requests; returns the internal ids that the core has to abort.

        `internal`: the ids are internal ones (also of parents); otherwise they are the callers' ids. Readers of the
        requests get a last output with finish reason "abort". Unknown ids are ignored.
        """
        aborted: list[str] = []
        for request_id in request_ids:
            for child_id in self._living_ids(request_id, internal):
                self._end_aborted(child_id)
                aborted.append(child_id)
        return aborted

    def _living_ids(self, request_id: str, internal: bool) -> list[str]:
        if not internal:
            return list(self.external_req_ids.get(request_id, ()))
        parent = self.parent_requests.get(request_id)
        if parent is not None:
            return sorted(parent.child_requests)
        return [request_id] if request_id in self.request_states else []

    def _end_aborted(self, request_id: str) -> None:
        state = self.request_states[request_id]
        if state.queue is not None:
            output = state.make_request_output(FinishReason.ABORT, None)
            if output is not None:
                state.deliver(output)
        self._forget(state)

    def _forget(self, state: RequestState) -> None:
        del self.request_states[state.request_id]
        siblings = self.external_req_ids[state.external_req_id]
        siblings.remove(state.request_id)
        if not siblings:
            del self.external_req_ids[state.external_req_id]
        parent = state.parent_req
        if parent is not None:
            parent.drop_child(state.request_id)
            if not parent.child_requests:
                self.parent_requests.pop(parent.request_id, None)

    def propagate_error(self, error: Exception) -> None:
        """The engine is dead: every reader gets the error, and the table is empty afterwards."""
        for state in list(self.request_states.values()):
            state.deliver(error)
            self._forget(state)

    # -- one batch of outputs ------------------------------------------------------------------------------------

    def process_outputs(
        self,
        engine_core_outputs: Iterable[EngineCoreOutput],
        engine_core_timestamp: float | None = None,
        iteration_stats: IterationStats | None = None,
        weight_version: str | None = None,
        *,
        engine_index: int = 0,
    ) -> OutputProcessorOutput:
        """Take the outputs of one step. A defect in one request's output ends that request only."""
        result = OutputProcessorOutput()
        for output in engine_core_outputs:
            state = self.request_states.get(output.request_id)
            if state is None:
                continue
            self._observe_events(state, output, iteration_stats)
            try:
                is_report = state.note_prefill(output)
                told = state.num_told_tokens
                stop_string = state.apply(output)
                self._observe_tokens(state, told, output, engine_core_timestamp, iteration_stats)
                state.note_weight_version(weight_version)
                self._process(state, output, stop_string, iteration_stats, result)
                if is_report and output.prefill_stats is not None:
                    self._observe_report(state, output.prefill_stats, iteration_stats, engine_index)
            except Exception as error:
                logger.exception("The output of request %s could not be processed.", state.request_id)
                self._end_broken(state, error, result)
        return result

    def _process(
        self,
        state: RequestState,
        output: EngineCoreOutput,
        stop_string: str | None,
        stats: IterationStats | None,
        result: OutputProcessorOutput,
    ) -> None:
        finish_reason, stop_reason = output.finish_reason, output.stop_reason
        if stop_string is not None:
            finish_reason, stop_reason = FinishReason.STOP, stop_string
        made = self._make(state, output, finish_reason, stop_reason)
        if made is not None and not state.deliver(made) and not isinstance(made, Exception):
            result.request_outputs.append(made)
        if finish_reason is None:
            return
        if not output.finished:
            result.reqs_to_abort.append(state.request_id)
        self._observe_finish(state, finish_reason, stats)
        self._forget(state)

    def _make(
        self,
        state: RequestState,
        output: EngineCoreOutput,
        finish_reason: FinishReason | None,
        stop_reason: int | str | None,
    ) -> Output | Exception | None:
        if output.error is not None and state.queue is not None:
            return output.error.to_exception()
        if output.pooling_output is not None:
            return state.make_pooling_output(output.pooling_output)
        if output.error is not None:
            stop_reason = output.error.message
        return state.make_request_output(finish_reason, stop_reason)

    def _end_broken(self, state: RequestState, error: Exception, result: OutputProcessorOutput) -> None:
        result.reqs_to_abort.append(state.request_id)
        if not state.deliver(error):
            made = state.make_failed_output(error)
            if made is not None:
                result.request_outputs.append(made)
        if state.request_id in self.request_states:
            self._forget(state)

    # -- statistics ----------------------------------------------------------------------------------------------

    def update_scheduler_stats(self, stats: SchedulerStats | None) -> None:
        """Keep the last report of the scheduler."""
        if stats is not None:
            self.scheduler_stats = stats

    @staticmethod
    def _observe_events(state: RequestState, output: EngineCoreOutput, stats: IterationStats | None) -> None:
        if stats is not None and state.stats is not None and output.events is not None:
            stats.observe_events(state.stats, output.events)

    @staticmethod
    def _observe_tokens(
        state: RequestState,
        told_before: int,
        output: EngineCoreOutput,
        timestamp: float | None,
        stats: IterationStats | None,
    ) -> None:
        """Count what the request tells of: not a token behind a stop string, nor one that nobody asked for."""
        if stats is None or state.stats is None or timestamp is None:
            return
        stats.observe_tokens(
            state.stats,
            state.num_told_tokens - told_before,
            timestamp,
            output.prefill_stats,
            output.num_nans_in_logits,
            ends_prefill=bool(output.new_token_ids),
        )

    def with_reported(self, report: Mapping[str, Any], engine_index: int) -> dict[str, Any]:
        """An engine's `KVCacheReport`, and of each tier how many cached tokens requests have reported, `tokens_reported`."""
        hits = [
            {**hit, "tokens_reported": self._reported.get((engine_index, hit["tier"]), 0)}
            for hit in report["hits"]
        ]
        return {**report, "hits": hits}

    def _observe_report(
        self, state: RequestState, reported: PrefillStats, stats: IterationStats | None, engine_index: int
    ) -> None:
        for source, tokens in reported.cached_tokens_by_source.items():
            key = engine_index, source
            self._reported[key] = self._reported.get(key, 0) + tokens
        if stats is not None:
            stats.observe_prompt(reported, state.num_completing_tokens)

    def _observe_finish(
        self, state: RequestState, finish_reason: FinishReason, stats: IterationStats | None
    ) -> None:
        if stats is None or state.stats is None:
            return
        cached = 0 if state.prefill_stats is None else state.prefill_stats.num_cached_tokens
        stats.observe_finish(state.stats, finish_reason, state.prompt_len, state.max_tokens_param, cached)
        if state.parent_req is not None:
            state.parent_req.observe_finished_child(state.num_told_tokens, stats)
        else:
            stats.n_params_iter.append(1)
            stats.max_num_generation_tokens_iter.append(state.num_told_tokens)


__all__ = [
    "OutputProcessor",
    "OutputProcessorOutput",
    "RequestOutputCollector",
    "RequestState",
    "StreamingInputOutputCollector",
]
