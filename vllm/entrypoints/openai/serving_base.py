"""What all generating endpoints share: names, ids, priorities, the call of the engine, the event stream. Layer: L8."""

from __future__ import annotations

import sys
from collections.abc import AsyncGenerator, Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

from fastapi import Request

from vllm.entrypoints.openai.completion.protocol import RequestMetrics
from vllm.entrypoints.openai.errors import create_error_response
from vllm.entrypoints.openai.fan_in import Primed, fan_in
from vllm.entrypoints.openai.field_types import plain_int
from vllm.entrypoints.openai.late_json import SLICE, LateJson, object_text, rows_text
from vllm.entrypoints.openai.models.serving import OpenAIServingModels
from vllm.entrypoints.openai.render import OnlineRenderer, RenderedPrompt, Truncation
from vllm.entrypoints.openai.request_fields import GenerationFields
from vllm.entrypoints.openai.sse import SSE_DONE, sse_error
from vllm.entrypoints.serve.utils.request_logger import RequestLogger
from vllm.exceptions import GenerationError, VLLMValidationError
from vllm.logger import init_logger
from vllm.logprobs import Logprob, LogprobsOnePosition
from vllm.outputs import RequestOutput
from vllm.sampling_params import SamplingParams
from vllm.utils.clock import Clock, MonotonicClock
from vllm.utils.ids import IdSource, RandomIds

logger = init_logger(__name__)

LOGPROB_MIN = -9999.0
# Log probabilities of one reply; they are held until it is written.
LOGPROB_ENTRIES_MAX = 1 << 25


@dataclass(frozen=True)
class ServingOptions:
    """Server flags that shape replies."""

    return_tokens_as_token_ids: bool = False
    enable_prompt_tokens_details: bool = False
    enable_force_include_usage: bool = False
    enable_per_request_metrics: bool = False
    enable_log_outputs: bool = False
    enable_log_deltas: bool = True
    sse_keep_alive_interval: float = 0.0
    clock: Clock = field(default_factory=MonotonicClock)
    ids: IdSource = field(default_factory=RandomIds)


@dataclass(frozen=True)
class Caller:
    """What the headers of a request say."""

    request_id: str | None = None
    priority: int | None = None
    session_id: str | None = None
    data_parallel_rank: int | None = None

    @staticmethod
    def from_request(raw_request: Request | None) -> Caller:
        """Read the headers. Raises VLLMValidationError for a number that is none."""
        if raw_request is None:
            return Caller()
        headers = raw_request.headers
        return Caller(
            request_id=headers.get("x-request-id"),
            priority=_header_number(headers, "X-Vllm-Priority"),
            session_id=headers.get("x-session-id"),
            data_parallel_rank=_header_number(headers, "X-data-parallel-rank"),
        )


def _header_number(headers: Mapping[str, str], name: str) -> int | None:
    text = headers.get(name.lower())
    if text is None:
        return None
    try:
        return plain_int(text)
    except ValueError as error:
        raise VLLMValidationError(f"header {name} {error}", parameter=name, value=text) from None


@dataclass(frozen=True)
class UsageChoice:
    """Which chunks of a stream carry usage."""

    final: bool
    continuous: bool


class OpenAIServing:
    """Base of the endpoint classes. One object serves all requests of its endpoint."""

    def __init__(
        self,
        engine_client: Any,
        models: OpenAIServingModels,
        online_renderer: OnlineRenderer,
        request_logger: RequestLogger | None,
        options: ServingOptions,
    ) -> None:
        self.engine_client = engine_client
        self.models = models
        self.renderer = online_renderer
        self.request_logger = request_logger
        self.options = options
        self.model_config = engine_client.vllm_config.model_config
        self.default_sampling_params: dict[str, Any] = self.model_config.get_diff_sampling_param()

    # --- before the engine --------------------------------------------------------------------------------------

    def check_request(self, request: GenerationFields) -> None:
        """Raise for an engine that is gone, an unknown model, or a constraint nobody can honour."""
        if self.engine_client.errored:
            raise self.engine_client.dead_error
        self.models.check_model(request.model)
        if request.priority and self.engine_client.vllm_config.scheduler_config.policy == "fcfs":
            logger.warning_once(
                "Requests with a priority arrive, but --scheduling-policy is fcfs: it has no effect"
            )

    def new_id(self, prefix: str, request: GenerationFields, caller: Caller) -> str:
        """The id of a reply: the caller's own, if it has one, behind the endpoint's prefix."""
        return f"{prefix}-{caller.request_id or request.request_id or self.options.ids.next_id()}"

    def created(self) -> int:
        """Seconds since the epoch."""
        return int(self.options.clock.time())

    def tokens_as_ids(self, request: GenerationFields) -> bool:
        """Whether tokens in log probabilities are shown as `token_id:N`."""
        given = request.return_tokens_as_token_ids
        return self.options.return_tokens_as_token_ids if given is None else given

    def usage_choice(self, request: GenerationFields) -> UsageChoice:
        """Which chunks carry usage. The server's flag forces the final one only."""
        wanted = request.stream_options
        final = bool(wanted and wanted.include_usage)
        continuous = final and bool(wanted and wanted.continuous_usage_stats)
        return UsageChoice(final or self.options.enable_force_include_usage, continuous)

    # --- the engine ---------------------------------------------------------------------------------------------

    def generate(
        self,
        rendered: RenderedPrompt,
        params: SamplingParams,
        request_id: str,
        request: GenerationFields,
        caller: Caller,
    ) -> AsyncGenerator[RequestOutput, None]:
        """Start one engine request; nothing happens before the stream is read.

        Raises VLLMValidationError for more log probabilities than a reply may hold.
        """
        _check_logprob_entries(params, self.model_config.get_vocab_size())
        if self.request_logger is not None:
            self.request_logger.log_inputs(request_id, rendered.text, rendered.token_ids, params)
        prompt: dict[str, Any] = {"prompt_token_ids": rendered.token_ids}
        if rendered.text is not None:
            prompt["prompt"] = rendered.text
        stream: AsyncGenerator[RequestOutput, None] = self.engine_client.generate(
            prompt,
            params,
            request_id,
            priority=request.priority if caller.priority is None else caller.priority,
            data_parallel_rank=caller.data_parallel_rank,
            session_id=request.session_id or caller.session_id,
            cache_salt=request.cache_salt,
        )
        return stream

    async def start(
        self, streams: list[AsyncGenerator[RequestOutput, None]]
    ) -> Primed[tuple[int, RequestOutput]]:
        """Join the streams and wait until the engine has accepted them, so that a refusal still has its HTTP status."""
        primed = Primed(fan_in(streams))
        interval = self.options.sse_keep_alive_interval
        await primed.wait(interval if interval > 0 else None)
        return primed

    def log_output(self, request_id: str, text: str, finish_reason: str | None, is_delta: bool) -> None:
        """Log what goes out, as far as the flags ask for it."""
        if self.request_logger is None or not self.options.enable_log_outputs:
            return
        if not is_delta or self.options.enable_log_deltas:
            self.request_logger.log_outputs(request_id, text, finish_reason, is_delta)


def _check_logprob_entries(params: SamplingParams, vocab_size: int) -> None:
    count = params.num_logprobs
    if count is None or params.max_tokens is None:
        return
    per_token = vocab_size if count == -1 else count + 1
    if params.n * params.max_tokens * per_token > LOGPROB_ENTRIES_MAX:
        raise VLLMValidationError(
            f"logprobs={count} asks for {per_token} values at each of up to {params.max_tokens} tokens of {params.n} "
            f"samples, more than the allowed {LOGPROB_ENTRIES_MAX} in one reply; lower max_tokens, n or logprobs",
            parameter="logprobs",
            value=count,
        )


def truncation_of(request: GenerationFields) -> Truncation:
    """The request's wish about long prompts."""
    return Truncation(request.truncate_prompt_tokens, request.truncation_side)


def check_finish(output: RequestOutput) -> None:
    """Raise GenerationError if a sample ended because the engine failed."""
    for completion in output.outputs:
        if completion.finish_reason == "error":
            raise GenerationError(str(completion.stop_reason or "Internal server error during generation"))


async def guarded_stream(chunks: AsyncGenerator[str, None]) -> AsyncGenerator[str, None]:
    """Chunks, then `[DONE]`; an error becomes a last event, as the HTTP status is sent already."""
    try:
        async for chunk in chunks:
            yield chunk
    except Exception as error:
        yield sse_error(create_error_response(error))
    finally:
        await chunks.aclose()
    yield SSE_DONE


def prompt_logprobs_body(output: RequestOutput) -> list[dict[int, Any] | None] | LateJson | None:
    """Prompt log probabilities as the reply carries them; infinities are not JSON."""
    if output.prompt_logprobs is None:
        return None
    return positions_body(
        output.prompt_logprobs,
        lambda entry: {
            "logprob": max(entry.logprob, LOGPROB_MIN),
            "rank": entry.rank,
            "decoded_token": entry.decoded_token,
        },
    )


def positions_body(
    positions: Iterable[LogprobsOnePosition | None], show: Callable[[Logprob], dict[str, Any]]
) -> list[dict[int, Any] | None] | LateJson:
    """Positions as objects by token id; many entries are written late."""
    kept = list(positions)

    def entries(position: LogprobsOnePosition) -> Iterator[tuple[int, dict[str, Any]]]:
        return ((token_id, show(entry)) for token_id, entry in position.items())

    if not are_many(kept):
        return [dict(entries(position)) if position else None for position in kept]
    return LateJson(
        lambda: rows_text(object_text(entries(position)) if position else ("null",) for position in kept)
    )


def are_many(positions: Iterable[LogprobsOnePosition | None], shown: int = -1) -> bool:
    """Whether their entries, of each position at most `shown` and the token itself, are too many to write at once."""
    limit = shown + 1 if shown >= 0 else sys.maxsize
    return sum(min(limit, len(position)) for position in positions if position is not None) > SLICE


def request_metrics(output: RequestOutput) -> RequestMetrics | None:
    """Times of a finished request; None if the engine keeps none."""
    stats = output.metrics
    if stats is None or not stats.first_token_ts:
        return None
    tokens = stats.num_generation_tokens
    generation = stats.last_token_ts - stats.first_token_ts
    return RequestMetrics(
        time_to_first_token_ms=stats.first_token_latency * 1e3,
        generation_time_ms=generation * 1e3,
        queue_time_ms=(stats.scheduled_ts - stats.queued_ts) * 1e3,
        mean_itl_ms=generation / (tokens - 1) * 1e3 if tokens > 1 else None,
        tokens_per_second=(tokens - 1) / generation if tokens > 1 and generation > 0 else None,
    )


def weight_versions_body(spans: Any) -> list[dict[str, Any]] | None:
    """Weight versions of a sample as the reply carries them."""
    if spans is None:
        return None
    return [{"version": span.version, "start": span.start, "end": span.end} for span in spans]
