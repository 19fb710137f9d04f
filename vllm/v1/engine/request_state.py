"""What the front end knows of one living request.  Layer L7.

Owns the text, log probabilities and counters of a request and how they become a `RequestOutput`. Must not know sockets,
other requests, or when a request ends.
"""

from __future__ import annotations

from typing import Any

from vllm.outputs import (
    CompletionOutput,
    PoolingOutput,
    PoolingRequestOutput,
    RequestOutput,
    WeightVersionSpan,
)
from vllm.sampling_params import RequestOutputKind
from vllm.v1.engine.detokenizer import IncrementalDetokenizer
from vllm.v1.engine.logprobs import LogprobsProcessor
from vllm.v1.engine.output_collector import Output, RequestOutputCollector
from vllm.v1.engine.parallel_sampling import ParentRequest
from vllm.v1.messages import EngineCoreOutput, EngineCoreRequest, FinishReason
from vllm.v1.metrics.stats import PrefillStats, RequestStateStats


class RequestState:
    """One request (of a request with n > 1: one child) from `add_request` until its last output."""

    def __init__(
        self,
        request: EngineCoreRequest,
        prompt: str | None,
        parent_req: ParentRequest | None,
        request_index: int,
        queue: RequestOutputCollector | None,
        log_stats: bool,
        stream_interval: int,
    ) -> None:
        params = request.sampling_params
        self.request_id = request.request_id
        self.external_req_id = (
            parent_req.external_req_id if parent_req else request.external_req_id or request.request_id
        )
        self.parent_req = parent_req
        self.request_index = request_index
        self.lora_request = request.lora_request
        self.prompt = prompt
        self.prompt_token_ids = request.prompt_token_ids
        self.prompt_len = _prompt_length(request)
        self.output_kind = params.output_kind if params is not None else RequestOutputKind.FINAL_ONLY
        self.max_tokens_param = params.max_tokens if params is not None else None
        self.num_completing_tokens = 0
        """Tokens of the prompt, as its caller knows it, that the core makes."""
        if params is not None and params.scores_prompt:
            self.max_tokens_param = 0
            self.num_completing_tokens = int(params.completes_prompt)
            self.prompt_len += self.num_completing_tokens
        self._keeps_output = params is None or not params.scores_prompt
        self.queue = queue
        self.stream_interval = (params.stream_interval if params is not None else None) or stream_interval
        self.detokenizer = IncrementalDetokenizer()
        self.logprobs_processor = LogprobsProcessor(None, None, None, None, None, None)
        self.is_prefilling = True
        self.prefill_stats: PrefillStats | None = None
        self.kv_transfer_params: dict[str, Any] | None = None
        self.prompt_token_id_logprobs: Any = None
        self.stats = RequestStateStats(arrival_time=request.arrival_time) if log_stats else None
        self._tokens_sent = 0
        self._weight_spans: list[WeightVersionSpan] = []

    @classmethod
    def from_new_request(
        cls,
        tokenizer: Any | None,
        request: EngineCoreRequest,
        prompt: str | None,
        parent_req: ParentRequest | None,
        request_index: int,
        queue: RequestOutputCollector | None,
        log_stats: bool,
        stream_interval: int,
    ) -> RequestState:
        """The state of a new request, with its detokenizer and log probability processor."""
        state = cls(request, prompt, parent_req, request_index, queue, log_stats, stream_interval)
        if request.sampling_params is not None:
            text_tokenizer = tokenizer if request.sampling_params.detokenize else None
            state.logprobs_processor = LogprobsProcessor.from_new_request(text_tokenizer, request)
            state.detokenizer = IncrementalDetokenizer.from_new_request(text_tokenizer, request)
        return state

    @property
    def num_output_tokens(self) -> int:
        return self.detokenizer.num_output_tokens()

    @property
    def num_told_tokens(self) -> int:
        """Those of them that the caller counts as output."""
        return self.num_output_tokens if self._keeps_output else 0

    def apply(self, output: EngineCoreOutput) -> str | None:
        """Take the tokens of one step; returns the stop string they completed, if any."""
        if output.kv_transfer_params is not None:
            self.kv_transfer_params = output.kv_transfer_params
        if output.prompt_token_id_logprobs is not None:
            self.prompt_token_id_logprobs = output.prompt_token_id_logprobs
        if output.new_token_ids:
            self.is_prefilling = False
        before = self.num_output_tokens
        stopped_by_token = output.finish_reason == FinishReason.STOP
        stop_string = self.detokenizer.update(output.new_token_ids, stopped_by_token)
        self.logprobs_processor.update_from_output(output, num_tokens=self.num_output_tokens - before)
        return stop_string

    def note_prefill(self, output: EngineCoreOutput) -> bool:
        """Take what a first output says of its prompt; True if it is what the request reports from now on.

        Of several samples that is the first one with an output: the others find what that one has computed. Where an
        error is the first output there is nothing to report.
        """
        if output.prefill_stats is None or output.error is not None:
            return False
        self.prefill_stats = output.prefill_stats
        if self.parent_req is None:
            return True
        is_first = self.parent_req.prefill_stats is None
        if is_first:
            self.parent_req.prefill_stats = output.prefill_stats
        return is_first

    @property
    def _reported(self) -> PrefillStats | None:
        return self.prefill_stats if self.parent_req is None else self.parent_req.prefill_stats

    def note_weight_version(self, version: str | None) -> None:
        """The tokens since the last note were made with these weights."""
        end = self.num_output_tokens
        start = self._weight_spans[-1].end if self._weight_spans else 0
        if version is None or end == start:
            return
        if self._weight_spans and self._weight_spans[-1].version == version:
            start = self._weight_spans.pop().start
        self._weight_spans.append(WeightVersionSpan(version, start, end))

    # -- outputs -------------------------------------------------------------------------------------------------

    def make_request_output(
        self, finish_reason: FinishReason | None, stop_reason: int | str | None
    ) -> RequestOutput | None:
        """What the caller gets now; None if that is nothing yet."""
        finished = finish_reason is not None
        if not finished and not self._is_due():
            return None
        outputs = [self._completion(finish_reason, stop_reason)]
        if self.parent_req is not None:
            outputs, finished = self.parent_req.get_outputs(self.request_id, outputs[0])
        return self._request_output(outputs, finished) if outputs else None

    def make_failed_output(self, error: Exception) -> RequestOutput | None:
        """The last output of a request whose outputs cannot be processed; it uses nothing that may be broken."""
        failed = CompletionOutput(
            index=self.request_index,
            text="",
            token_ids=[],
            cumulative_logprob=None,
            logprobs=None,
            finish_reason=str(FinishReason.ERROR),
            stop_reason=f"{type(error).__name__}: {error}",
        )
        outputs, finished = [failed], True
        if self.parent_req is not None:
            outputs, finished = self.parent_req.get_outputs(self.request_id, failed)
        if not outputs:
            return None
        return RequestOutput(
            self.external_req_id, self.prompt, self.prompt_token_ids, None, outputs, finished
        )

    def make_pooling_output(self, data: Any, error: Any = None) -> PoolingRequestOutput[PoolingOutput]:
        """The one output of a pooling request."""
        return PoolingRequestOutput(
            request_id=self.external_req_id,
            outputs=PoolingOutput(data=data),
            prompt_token_ids=self.prompt_token_ids or [],
            num_cached_tokens=self._cached_tokens() or 0,
            finished=True,
            error=error,
        )

    def _is_due(self) -> bool:
        if self.output_kind == RequestOutputKind.FINAL_ONLY:
            return False
        unsent = self.num_output_tokens - self._tokens_sent
        return self._tokens_sent == 0 or unsent >= self.stream_interval

    def _completion(
        self, finish_reason: FinishReason | None, stop_reason: int | str | None
    ) -> CompletionOutput:
        delta = self.output_kind == RequestOutputKind.DELTA
        start = self._tokens_sent if delta else 0
        self._tokens_sent = self.num_output_tokens
        token_ids = self.detokenizer.output_token_ids[start:]
        logprobs = self.logprobs_processor.logprobs
        if delta and logprobs is not None:
            logprobs = logprobs[start:]
        return CompletionOutput(
            index=self.request_index,
            text=self.detokenizer.get_next_output_text(finish_reason is not None, delta),
            token_ids=token_ids,
            cumulative_logprob=self.logprobs_processor.cumulative_logprob,
            logprobs=logprobs,
            finish_reason=None if finish_reason is None else str(finish_reason),
            stop_reason=stop_reason if finish_reason is not None else None,
            weight_versions=list(self._weight_spans) or None,
        )

    def _request_output(self, outputs: list[CompletionOutput], finished: bool) -> RequestOutput:
        delta = self.output_kind == RequestOutputKind.DELTA
        prompt_logprobs = (
            self.logprobs_processor.pop_prompt_logprobs()
            if delta
            else self.logprobs_processor.prompt_logprobs
        )
        token_id_logprobs = self.prompt_token_id_logprobs
        if delta:
            self.prompt_token_id_logprobs = None
        reported = self._reported
        return RequestOutput(
            request_id=self.external_req_id,
            prompt=self.prompt,
            prompt_token_ids=self.prompt_token_ids,
            prompt_logprobs=prompt_logprobs,
            outputs=outputs,
            finished=finished,
            metrics=self.stats,
            lora_request=self.lora_request,
            num_cached_tokens=self._cached_tokens(),
            num_cache_creation_tokens=None if reported is None else reported.num_cache_creation_tokens,
            kv_transfer_params=self.kv_transfer_params,
            prompt_token_id_logprobs=token_id_logprobs,
            cached_tokens_by_source=None if reported is None else _by_tier(reported),
        )

    def _cached_tokens(self) -> int | None:
        reported = self._reported
        return None if reported is None else reported.num_cached_tokens

    def deliver(self, output: Output | Exception) -> bool:
        """Put an output into the caller's queue; False if the caller collects outputs itself."""
        if self.queue is None:
            return False
        self.queue.put(output)
        return True


def _by_tier(stats: PrefillStats) -> dict[str, int]:
    return {source.value: tokens for source, tokens in stats.cached_tokens_by_source.items()}


def _prompt_length(request: EngineCoreRequest) -> int:
    if request.prompt_token_ids is not None:
        return len(request.prompt_token_ids)
    return 0 if request.prompt_embeds is None else len(request.prompt_embeds)
