"""`/v1/completions`: from a request to engine requests, and from their outputs to the reply. Layer: L8."""

from __future__ import annotations

from collections.abc import AsyncGenerator
from contextlib import aclosing
from dataclasses import dataclass
from typing import Any

from fastapi import Request

from vllm import envs
from vllm.entrypoints.openai.completion.choices import ChoiceBuilder, ChoiceFormat
from vllm.entrypoints.openai.completion.protocol import (
    CompletionLogProbs,
    CompletionRequest,
    CompletionResponse,
    CompletionResponseChoice,
    CompletionResponseStreamChoice,
    CompletionStreamResponse,
    RequestMetrics,
)
from vllm.entrypoints.openai.completion.scoring import as_prompt, fills_model, force_last_token
from vllm.entrypoints.openai.errors import ErrorResponse, create_error_response
from vllm.entrypoints.openai.fan_in import Primed
from vllm.entrypoints.openai.models.serving import OpenAIServingModels
from vllm.entrypoints.openai.render import OnlineRenderer, RenderedPrompt, resolve_max_tokens
from vllm.entrypoints.openai.serving_base import (
    Caller,
    OpenAIServing,
    ServingOptions,
    check_finish,
    guarded_stream,
    prompt_logprobs_body,
    request_metrics,
    truncation_of,
)
from vllm.entrypoints.openai.sse import sse_event
from vllm.entrypoints.openai.usage import UsageCounter
from vllm.entrypoints.serve.utils.request_logger import RequestLogger
from vllm.exceptions import VLLMError
from vllm.outputs import RequestOutput
from vllm.v1.engine.exceptions import EngineDeadError

DEFAULT_MAX_TOKENS = 16
# How a tokenizer shows a piece of a character.
REPLACEMENT = "\ufffd"

Outputs = Primed[tuple[int, RequestOutput]]


@dataclass
class _Reply:
    """What all chunks of one reply share."""

    request: CompletionRequest
    id: str
    created: int
    model: str
    builders: dict[int, ChoiceBuilder]
    usage: UsageCounter


class OpenAIServingCompletion(OpenAIServing):
    """The endpoint's logic; see `create_completion`."""

    def __init__(
        self,
        engine_client: Any,
        models: OpenAIServingModels,
        *,
        online_renderer: OnlineRenderer,
        request_logger: RequestLogger | None,
        return_tokens_as_token_ids: bool = False,
        **options: Any,
    ) -> None:
        shown = ServingOptions(return_tokens_as_token_ids=return_tokens_as_token_ids, **options)
        super().__init__(engine_client, models, online_renderer, request_logger, shown)

    async def create_completion(
        self, request: CompletionRequest, raw_request: Request | None = None
    ) -> AsyncGenerator[str, None] | CompletionResponse | ErrorResponse:
        """The whole reply, an event stream, or an error body. Cancelling the call aborts the engine's requests."""
        try:
            return await self._create(request, Caller.from_request(raw_request))
        except (VLLMError, EngineDeadError) as error:
            return create_error_response(error)

    async def _create(
        self, request: CompletionRequest, caller: Caller
    ) -> AsyncGenerator[str, None] | CompletionResponse:
        self.check_request(request)
        request_id = self.new_id("cmpl", request, caller)
        prompts = request.prompts()
        characters = sum(len(prompt) for prompt in prompts if isinstance(prompt, str))
        rendered = [
            await self.renderer.render_prompt(
                prompt, request.add_special_tokens, truncation_of(request), characters
            )
            for prompt in prompts
        ]
        streams = [
            self._start_one(request, prompt, _engine_id(request_id, index, len(rendered)), caller)
            for index, prompt in enumerate(rendered)
        ]
        reply = _Reply(
            request=request,
            id=request_id,
            created=self.created(),
            model=self.models.model_name(),
            builders=self._builders(request, rendered),
            usage=UsageCounter(self.options.enable_prompt_tokens_details),
        )
        for index, prompt in enumerate(rendered):
            reply.usage.set_prompt_length(index, len(prompt.token_ids))
        outputs = await self.start(streams)
        if request.stream:
            return guarded_stream(self._stream(reply, outputs))
        return await self._whole(reply, outputs)

    def _start_one(
        self, request: CompletionRequest, rendered: RenderedPrompt, request_id: str, caller: Caller
    ) -> AsyncGenerator[RequestOutput, None]:
        if request.is_scoring and fills_model(rendered, self.model_config):
            params = request.to_sampling_params(1, self.default_sampling_params)
            shorter = force_last_token(rendered, params, self.model_config)
            return as_prompt(self.generate(shorter, params, request_id, request, caller), rendered)
        given = "max_tokens" in request.model_fields_set
        max_tokens = resolve_max_tokens(
            self.model_config,
            len(rendered.token_ids),
            request.max_tokens if given else None,
            None if given else self.default_sampling_params.get("max_tokens", DEFAULT_MAX_TOKENS),
            "max_tokens",
            "prompt",
        )
        params = request.to_sampling_params(max(1, max_tokens), self.default_sampling_params)
        if request.is_scoring:
            params.score_prompt()
        return self.generate(rendered, params, request_id, request, caller)

    def _builders(
        self, request: CompletionRequest, rendered: list[RenderedPrompt]
    ) -> dict[int, ChoiceBuilder]:
        tokenizer = self.renderer.tokenizer
        form = ChoiceFormat.of(request, self.tokens_as_ids(request), tokenizer)
        builders = {}
        for prompt_index, prompt in enumerate(rendered):
            text, first = self._echoed_texts(request, prompt) if request.echo else ("", "")
            for sample in range(request.n):
                index = prompt_index * request.n + sample
                builders[index] = ChoiceBuilder(index, form, prompt, text, not request.is_scoring, first)
        return builders

    def _echoed_texts(self, request: CompletionRequest, prompt: RenderedPrompt) -> tuple[str, str]:
        """Text of the prompt, and of its first token."""
        tokenizer = self.renderer.tokenizer
        if tokenizer is None:
            return prompt.text or "", ""
        first = str(tokenizer.decode(prompt.token_ids[:1])).rstrip(REPLACEMENT)
        if prompt.text is not None:
            return prompt.text, first
        hides = request.skip_special_tokens is not False
        return str(tokenizer.decode(prompt.token_ids, skip_special_tokens=hides)), first

    # --- replies ------------------------------------------------------------------------------------------------

    def _take(
        self, reply: _Reply, prompt_index: int, output: RequestOutput
    ) -> list[CompletionResponseStreamChoice]:
        """Chunks of one output; counts its tokens."""
        check_finish(output)
        reply.usage.see_prompt(prompt_index, output)
        choices = []
        for completion in output.outputs:
            builder = reply.builders[prompt_index * reply.request.n + completion.index]
            if builder.keeps_output:
                reply.usage.add_generated(prompt_index, completion.index, len(completion.token_ids))
            choice = builder.delta(completion, output)
            if choice is not None:
                self.log_output(reply.id, choice.text, choice.finish_reason, reply.request.stream)
                choices.append(choice)
        return choices

    async def _whole(self, reply: _Reply, outputs: Outputs) -> CompletionResponse:
        request = reply.request
        choices: dict[int, CompletionResponseChoice] = {}
        last: RequestOutput | None = None
        async with aclosing(outputs.read()) as items:
            async for prompt_index, output in items:
                last = output
                for delta in self._take(reply, prompt_index, output):
                    choice = CompletionResponseChoice(**dict(delta))
                    if request.prompt_logprobs is not None:
                        choice.prompt_logprobs = prompt_logprobs_body(output)
                    choices[choice.index] = choice
        response = CompletionResponse(
            id=reply.id,
            created=reply.created,
            model=reply.model,
            choices=[choices[index] for index in sorted(choices)],
            usage=reply.usage.usage(),
        )
        if last is not None and len(request.prompts()) == 1:
            response.kv_transfer_params = last.kv_transfer_params
            response.metrics = self._metrics(reply, last)
        return response

    def _metrics(self, reply: _Reply, last: RequestOutput | None) -> RequestMetrics | None:
        if last is None or not self.options.enable_per_request_metrics or len(reply.builders) > 1:
            return None
        return request_metrics(last)

    async def _stream(self, reply: _Reply, outputs: Outputs) -> AsyncGenerator[str, None]:
        shown = self.usage_choice(reply.request)
        last: RequestOutput | None = None
        async with aclosing(outputs.read()) as items:
            async for prompt_index, output in items:
                last = output
                for choice in self._take(reply, prompt_index, output):
                    yield await self._chunk(reply, choice, output, shown.continuous)
        if shown.final:
            final = CompletionStreamResponse(
                id=reply.id, object="text_completion", created=reply.created, model=reply.model, choices=[]
            )
            final.usage = reply.usage.usage()
            metrics = self._metrics(reply, last)
            if metrics is not None:
                final.metrics = metrics
            yield await sse_event(final)

    async def _chunk(
        self, reply: _Reply, choice: CompletionResponseStreamChoice, output: RequestOutput, with_usage: bool
    ) -> str:
        chunk = CompletionStreamResponse(
            id=reply.id, object="text_completion", created=reply.created, model=reply.model, choices=[choice]
        )
        if with_usage:
            chunk.usage = reply.usage.usage()
        if choice.finish_reason is not None and output.kv_transfer_params is not None:
            chunk.kv_transfer_params = output.kv_transfer_params
        return await sse_event(chunk)


def _engine_id(request_id: str, index: int, count: int) -> str:
    """The engine's id of one prompt: the reply's own, so that it can be aborted by it, as long as that is unique."""
    if count == 1 or not envs.VLLM_DISABLE_REQUEST_ID_RANDOMIZATION:
        return request_id
    return f"{request_id}-{index}"


__all__ = ["CompletionLogProbs", "OpenAIServingCompletion"]
