"""`/v1/chat/completions`: from a conversation to an engine request, and from its outputs to the reply. Layer: L8."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator
from contextlib import aclosing
from dataclasses import dataclass
from typing import Any

from fastapi import Request

from vllm.entrypoints.chat_utils import ChatOptions, ContentFormatOption
from vllm.entrypoints.openai.chat_completion.message_builder import MessageBuilder, MessageFormat
from vllm.entrypoints.openai.chat_completion.protocol import (
    BatchChatCompletionRequest,
    ChatChoice,
    ChatCompletionRequest,
    ChatCompletionResponse,
    ChatMessage,
    ChatStreamChoice,
    ChatStreamResponse,
    FunctionCall,
    NamedToolChoice,
    ToolCall,
)
from vllm.entrypoints.openai.chat_completion.tool_use import ToolUse
from vllm.entrypoints.openai.completion.protocol import RequestMetrics
from vllm.entrypoints.openai.errors import ErrorResponse, create_error_response
from vllm.entrypoints.openai.fan_in import Primed
from vllm.entrypoints.openai.models.serving import OpenAIServingModels
from vllm.entrypoints.openai.reasoning import ReasoningParser
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
from vllm.entrypoints.openai.usage import CompletionTokensDetails, UsageCounter, UsageInfo, joined_details
from vllm.entrypoints.serve.utils.request_logger import RequestLogger
from vllm.exceptions import VLLMError
from vllm.outputs import RequestOutput
from vllm.v1.engine.exceptions import EngineDeadError


@dataclass(frozen=True)
class ChatSettings:
    """Server flags of the chat endpoint."""

    chat_template_content_format: ContentFormatOption = "auto"
    enable_auto_tools: bool = False
    tool_parser: str | None = None
    exclude_tools_when_tool_choice_none: bool = False
    reasoning_parser: str = ""


@dataclass
class _Reply:
    """What all chunks of one reply share."""

    request: ChatCompletionRequest
    id: str
    created: int
    model: str
    rendered: RenderedPrompt
    builders: list[MessageBuilder]
    usage: UsageCounter


class OpenAIServingChat(OpenAIServing):
    """The endpoint's logic; see `create_chat_completion`."""

    def __init__(
        self,
        engine_client: Any,
        models: OpenAIServingModels,
        response_role: str,
        *,
        online_renderer: OnlineRenderer,
        request_logger: RequestLogger | None,
        chat_template: str | None = None,
        chat_template_content_format: ContentFormatOption = "auto",
        return_tokens_as_token_ids: bool = False,
        enable_auto_tools: bool = False,
        tool_parser: str | None = None,
        exclude_tools_when_tool_choice_none: bool = False,
        reasoning_parser: str = "",
        **options: Any,
    ) -> None:
        shown = ServingOptions(return_tokens_as_token_ids=return_tokens_as_token_ids, **options)
        super().__init__(engine_client, models, online_renderer, request_logger, shown)
        self.response_role = response_role
        if chat_template is not None:
            online_renderer.set_chat_template(chat_template)
        self.settings = ChatSettings(
            chat_template_content_format,
            enable_auto_tools,
            tool_parser,
            exclude_tools_when_tool_choice_none,
            reasoning_parser,
        )

    async def create_chat_completion(
        self, request: ChatCompletionRequest, raw_request: Request | None = None
    ) -> AsyncGenerator[str, None] | ChatCompletionResponse | ErrorResponse:
        """The whole reply, an event stream, or an error body. Cancelling the call aborts the engine's request."""
        try:
            return await self._create(request, Caller.from_request(raw_request))
        except (VLLMError, EngineDeadError) as error:
            return create_error_response(error)

    async def create_batch(
        self, request: BatchChatCompletionRequest, raw_request: Request | None = None
    ) -> ChatCompletionResponse | ErrorResponse:
        """The replies to several conversations in one body; choice index = conversation × n + sample."""
        try:
            parts = await self._create_all(request, Caller.from_request(raw_request))
        except (VLLMError, EngineDeadError) as error:
            return create_error_response(error)
        return _joined(parts, request.n)

    async def _create_all(
        self, request: BatchChatCompletionRequest, caller: Caller
    ) -> list[ChatCompletionResponse]:
        """The replies to all conversations, made together; the first error ends the others."""
        tasks: list[asyncio.Task[Any]] = []
        try:
            for index in range(len(request.messages)):
                tasks.append(asyncio.create_task(self._create(request.single(index), caller, f"-{index}")))
                await asyncio.sleep(0)  # other requests have their turn
            parts = await asyncio.gather(*tasks)
        finally:
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)
        return [part for part in parts if isinstance(part, ChatCompletionResponse)]

    async def _create(
        self, request: ChatCompletionRequest, caller: Caller, id_suffix: str = ""
    ) -> AsyncGenerator[str, None] | ChatCompletionResponse:
        self.check_request(request)
        tools = ToolUse.of(request, self.settings, self.options.ids, self.renderer.tokenizer)
        rendered = await self._render(request, tools)
        field_name, wanted = request.requested_max_tokens
        default = self.default_sampling_params.get("max_tokens")
        prompt_tokens = len(rendered.token_ids)
        max_tokens = resolve_max_tokens(
            self.model_config, prompt_tokens, wanted, default, field_name, "messages"
        )
        params = request.to_sampling_params(max_tokens, self.default_sampling_params, tools.constraint)
        if tools.keep_special_tokens and request.skip_special_tokens is None:
            params.skip_special_tokens = False
        request_id = self.new_id("chatcmpl", request, caller) + id_suffix
        reply = _Reply(
            request=request,
            id=request_id,
            created=self.created(),
            model=self.models.model_name(),
            rendered=rendered,
            builders=self._builders(request, rendered, tools, params.structured_outputs is not None),
            usage=UsageCounter(self.options.enable_prompt_tokens_details),
        )
        reply.usage.set_prompt_length(0, prompt_tokens)
        outputs = await self.start([self.generate(rendered, params, request_id, request, caller)])
        if request.stream:
            return guarded_stream(self._stream(reply, outputs))
        return await self._whole(reply, outputs)

    async def render(self, request: ChatCompletionRequest) -> RenderedPrompt:
        """The prompt of a conversation, as the model would get it. Raises VLLMError for what would be refused."""
        tools = ToolUse.of(request, self.settings, self.options.ids, self.renderer.tokenizer)
        return await self._render(request, tools)

    async def _render(self, request: ChatCompletionRequest, tools: ToolUse) -> RenderedPrompt:
        variables = {**self.renderer.templates.default_kwargs, **(request.chat_template_kwargs or {})}
        if request.reasoning_effort is not None:
            variables.setdefault("reasoning_effort", request.reasoning_effort)
        options = ChatOptions(
            tools=tools.shown,
            documents=request.documents,
            add_generation_prompt=request.add_generation_prompt,
            continue_final_message=request.continue_final_message,
            content_format=self.settings.chat_template_content_format,
            variables=variables,
        )
        return await self.renderer.render_messages(
            request.messages,
            options,
            request.chat_template,
            request.add_special_tokens,
            truncation_of(request),
        )

    def _builders(
        self, request: ChatCompletionRequest, rendered: RenderedPrompt, tools: ToolUse, constrained: bool
    ) -> list[MessageBuilder]:
        last = request.messages[-1]
        role = self.response_role if request.add_generation_prompt else str(last.get("role"))
        content = last.get("content")
        echoed = content if request.echo and isinstance(content, str) and last.get("role") == role else ""
        form = MessageFormat(
            role=role,
            top_logprobs=_shown_logprobs(request),
            tokens_as_ids=self.tokens_as_ids(request),
            token_ids=bool(request.return_token_ids),
            weight_versions=request.return_weight_versions,
            include_reasoning=request.include_reasoning,
            single_call=request.parallel_tool_calls is False,
            call_ends_reply=not isinstance(request.effective_tool_choice, NamedToolChoice),
        )
        name = self.settings.reasoning_parser if not constrained else ""
        return [
            MessageBuilder(
                index=index,
                form=form,
                echoed=echoed,
                tools=tools.new_parser(),
                reasoning=ReasoningParser(name, rendered.text) if name else None,
            )
            for index in range(request.n)
        ]

    # --- replies ------------------------------------------------------------------------------------------------

    def _take(self, reply: _Reply, output: RequestOutput) -> list[ChatStreamChoice]:
        """Chunks of one output; counts its tokens."""
        check_finish(output)
        reply.usage.see_prompt(0, output)
        choices = []
        for completion in output.outputs:
            reply.usage.add_generated(0, completion.index, len(completion.token_ids))
            choice = reply.builders[completion.index].delta(completion)
            if choice is not None:
                self.log_output(
                    reply.id, choice.delta.content or "", choice.finish_reason, reply.request.stream
                )
                choices.append(choice)
        if self.settings.reasoning_parser:
            reply.usage.reasoning_tokens = sum(builder.reasoning_tokens for builder in reply.builders)
        return choices

    async def _whole(
        self, reply: _Reply, outputs: Primed[tuple[int, RequestOutput]]
    ) -> ChatCompletionResponse:
        request = reply.request
        choices: dict[int, ChatChoice] = {}
        last: RequestOutput | None = None
        async with aclosing(outputs.read()) as items:
            async for _, output in items:
                last = output
                for delta in self._take(reply, output):
                    choices[delta.index] = _whole_choice(delta, reply.builders[delta.index].form.role)
        response = ChatCompletionResponse(
            id=reply.id,
            created=reply.created,
            model=reply.model,
            choices=[choices[index] for index in sorted(choices)],
            usage=reply.usage.usage(),
            metrics=self._metrics(reply, last),
        )
        if request.return_token_ids:
            response.prompt_token_ids = reply.rendered.token_ids
        if request.return_prompt_text:
            response.prompt_text = reply.rendered.text
        if last is not None:
            response.kv_transfer_params = last.kv_transfer_params
            if request.prompt_logprobs is not None:
                response.prompt_logprobs = prompt_logprobs_body(last)
        return response

    async def _stream(
        self, reply: _Reply, outputs: Primed[tuple[int, RequestOutput]]
    ) -> AsyncGenerator[str, None]:
        shown = self.usage_choice(reply.request)
        opened: set[int] = set()
        last: RequestOutput | None = None
        async with aclosing(outputs.read()) as items:
            async for _, output in items:
                last = output
                async for chunk in self._chunks(reply, output, shown.continuous, opened):
                    yield chunk
        if shown.final:
            final = ChatStreamResponse(
                id=reply.id,
                object="chat.completion.chunk",
                created=reply.created,
                model=reply.model,
                choices=[],
            )
            final.usage = reply.usage.usage()
            metrics = self._metrics(reply, last)
            if metrics is not None:
                final.metrics = metrics
            yield await sse_event(final)

    async def _chunks(
        self, reply: _Reply, output: RequestOutput, with_usage: bool, opened: set[int]
    ) -> AsyncGenerator[str, None]:
        """Events of one output; samples that are not in `opened` yet begin with their role."""
        choices = self._take(reply, output)
        for completion in output.outputs:
            if completion.index not in opened:
                opening = reply.builders[completion.index].opening()
                yield await self._chunk(reply, opening, with_usage, first=not opened)
                opened.add(completion.index)
        for choice in choices:
            params = output.kv_transfer_params if choice.finish_reason is not None else None
            yield await self._chunk(reply, choice, with_usage, kv_transfer_params=params)

    async def _chunk(
        self,
        reply: _Reply,
        choice: ChatStreamChoice,
        with_usage: bool,
        first: bool = False,
        kv_transfer_params: dict[str, Any] | None = None,
    ) -> str:
        chunk = ChatStreamResponse(
            id=reply.id,
            object="chat.completion.chunk",
            created=reply.created,
            model=reply.model,
            choices=[choice],
        )
        if with_usage:
            chunk.usage = reply.usage.usage()
        if first and reply.request.return_token_ids:
            chunk.prompt_token_ids = reply.rendered.token_ids
        if kv_transfer_params is not None:
            chunk.kv_transfer_params = kv_transfer_params
        return await sse_event(chunk)

    def _metrics(self, reply: _Reply, last: RequestOutput | None) -> RequestMetrics | None:
        if last is None or not self.options.enable_per_request_metrics or len(reply.builders) > 1:
            return None
        return request_metrics(last)


def _shown_logprobs(request: ChatCompletionRequest) -> int | None:
    """How many log probabilities stand beside a token, −1 for all that come; None for none, and not its own either."""
    if request.logprob_token_ids:
        return -1
    return (request.top_logprobs or 0) if request.logprobs else None


def _whole_choice(delta: ChatStreamChoice, role: str) -> ChatChoice:
    """The choice of a whole reply from its one delta."""
    calls = [
        ToolCall(
            id=call.id or "",
            function=FunctionCall(name=call.function.name or "", arguments=call.function.arguments or ""),
        )
        for call in delta.delta.tool_calls
        if call.function is not None
    ]
    content = delta.delta.content
    if content is None and not calls:
        content = ""
    message = ChatMessage(role=role, content=content, tool_calls=calls, reasoning=delta.delta.reasoning)
    return ChatChoice(
        index=delta.index,
        message=message,
        logprobs=delta.logprobs,
        finish_reason=delta.finish_reason,
        stop_reason=delta.stop_reason,
        token_ids=delta.token_ids,
        weight_versions=delta.weight_versions,
    )


def _joined(parts: list[ChatCompletionResponse], n: int) -> ChatCompletionResponse:
    """Several replies as one, usage summed. What a reply can say of one prompt only is said of none."""
    first = parts[0]
    whole_id = first.id.rpartition("-")[0]
    if len(parts) == 1:
        return first.model_copy(update={"id": whole_id})
    choices = []
    for index, part in enumerate(parts):
        for choice in part.choices:
            choice.index += index * n
            choices.append(choice)
    usage = UsageInfo(
        prompt_tokens=sum(part.usage.prompt_tokens for part in parts),
        completion_tokens=sum(part.usage.completion_tokens or 0 for part in parts),
        total_tokens=sum(part.usage.total_tokens for part in parts),
    )
    usage.prompt_tokens_details = joined_details(part.usage for part in parts)
    reasoning = [part.usage.completion_tokens_details for part in parts]
    if any(reasoning):
        tokens = sum(details.reasoning_tokens for details in reasoning if details is not None)
        usage.completion_tokens_details = CompletionTokensDetails(reasoning_tokens=tokens)
    return ChatCompletionResponse(
        id=whole_id, created=first.created, model=first.model, choices=choices, usage=usage
    )
