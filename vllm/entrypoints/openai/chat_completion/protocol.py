"""Bodies of `/v1/chat/completions`. Layer: L8."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from typing import Annotated, Any, Literal

from pydantic import BaseModel, Field, model_validator

from vllm.entrypoints.openai.completion.protocol import RequestMetrics
from vllm.entrypoints.openai.field_types import Objects
from vllm.entrypoints.openai.late_json import LateJson
from vllm.entrypoints.openai.request_fields import GenerationFields, OpenAIBaseModel
from vllm.entrypoints.openai.usage import UsageInfo
from vllm.exceptions import VLLMValidationError
from vllm.kv_retention import last_cache_control
from vllm.sampling_params import SamplingParams, StructuredOutputsParams


class FunctionDefinition(OpenAIBaseModel):
    """A function that the model may call."""

    name: str
    description: str | None = None
    parameters: dict[str, Any] | None = None
    strict: bool | None = None


class ToolDefinition(OpenAIBaseModel):
    """A tool; functions are the only kind."""

    type: Literal["function"] = "function"
    function: FunctionDefinition


Tools = Annotated[list[ToolDefinition], Field(fail_fast=True)]


def shown_tools(tools: Sequence[ToolDefinition]) -> list[dict[str, Any]]:
    """Tools as a template sees them."""
    return [tool.model_dump(exclude_none=True) for tool in tools]


class NamedFunction(OpenAIBaseModel):
    """The name of a function."""

    name: str


class NamedToolChoice(OpenAIBaseModel):
    """The one tool that must be called."""

    type: Literal["function"] = "function"
    function: NamedFunction


ToolChoice = Literal["none", "auto", "required"] | NamedToolChoice


class _ChatFields(GenerationFields):
    """Everything but the messages."""

    max_tokens: int | None = None
    max_completion_tokens: int | None = None
    logprobs: bool | None = False
    top_logprobs: int | None = 0
    tools: Tools | None = None
    tool_choice: ToolChoice | None = None
    parallel_tool_calls: bool | None = True
    reasoning_effort: str | None = None
    include_reasoning: bool = True
    echo: bool = False
    add_generation_prompt: bool = True
    continue_final_message: bool = False
    add_special_tokens: bool = False
    documents: Objects | None = None
    chat_template: str | None = None
    chat_template_kwargs: dict[str, Any] | None = None
    media_io_kwargs: dict[str, Any] | None = None
    mm_processor_kwargs: dict[str, Any] | None = None
    return_prompt_text: bool = False
    modalities: list[str] | None = None

    @model_validator(mode="after")
    def _check_chat(self) -> _ChatFields:
        for name, value in (
            ("media_io_kwargs", self.media_io_kwargs),
            ("mm_processor_kwargs", self.mm_processor_kwargs),
        ):
            if value:
                raise VLLMValidationError(
                    f"{name} is about media, but this model takes text only", parameter=name
                )
        if self.modalities not in (None, ["text"]):
            raise VLLMValidationError(
                f"modalities must be ['text'], got {self.modalities}", parameter="modalities"
            )
        if self.top_logprobs is not None and self.top_logprobs != 0:
            if not self.logprobs:
                raise VLLMValidationError("top_logprobs needs logprobs=True", parameter="top_logprobs")
            if self.top_logprobs < -1:
                raise VLLMValidationError(
                    f"top_logprobs must be at least -1, got {self.top_logprobs}", parameter="top_logprobs"
                )
        for name in ("max_tokens", "max_completion_tokens"):
            value = getattr(self, name)
            if value is not None and value < 1:
                raise VLLMValidationError(
                    f"{name} must be at least 1, got {value}", parameter=name, value=value
                )
        if self.continue_final_message and self.add_generation_prompt:
            raise VLLMValidationError(
                "continue_final_message needs add_generation_prompt=False", parameter="continue_final_message"
            )
        self._check_tools()
        return self

    def _check_tools(self) -> None:
        if not self.tools:
            if isinstance(self.tool_choice, NamedToolChoice) or self.tool_choice in ("auto", "required"):
                raise VLLMValidationError("tool_choice needs tools", parameter="tool_choice")
            return
        names = [tool.function.name for tool in self.tools]
        if len(set(names)) < len(names):
            twice = next(name for name, count in Counter(names).items() if count > 1)
            raise VLLMValidationError(f"tools hold the name {twice!r} twice", parameter="tools")
        if isinstance(self.tool_choice, NamedToolChoice) and self.tool_choice.function.name not in names:
            raise VLLMValidationError(
                f"tool_choice names {self.tool_choice.function.name!r}, which is none of the tools {names}",
                parameter="tool_choice",
            )
        if self._forces_tool and (self.response_format is not None or self.structured_outputs is not None):
            raise VLLMValidationError(
                "a forced tool_choice excludes response_format and structured_outputs",
                parameter="tool_choice",
            )

    @property
    def _forces_tool(self) -> bool:
        return isinstance(self.tool_choice, NamedToolChoice) or self.tool_choice == "required"

    @property
    def effective_tool_choice(self) -> ToolChoice:
        """The choice with its default filled in: `auto` with tools, `none` without."""
        if self.tool_choice is not None:
            return self.tool_choice
        return "auto" if self.tools else "none"

    @property
    def requested_max_tokens(self) -> tuple[str, int | None]:
        """Name and value of the field that limits the output."""
        if self.max_completion_tokens is not None:
            return "max_completion_tokens", self.max_completion_tokens
        return "max_tokens" if self.max_tokens is not None else "max_completion_tokens", self.max_tokens

    def to_sampling_params(
        self,
        max_tokens: int,
        default_sampling_params: dict[str, Any],
        constraint: StructuredOutputsParams | None = None,
    ) -> SamplingParams:
        """The engine's parameters; `constraint` is what a forced tool call must look like.

        Raises VLLMValidationError naming field and value.
        """
        logprobs = self.top_logprobs or 0 if self.logprobs else None
        return self.build_sampling_params(
            max_tokens, default_sampling_params, logprobs, self.prompt_logprobs, constraint
        )


class ChatCompletionRequest(_ChatFields):
    """A request for the next message of a conversation."""

    messages: Objects

    @model_validator(mode="after")
    def _check_marks(self) -> ChatCompletionRequest:
        self.take_mark_of_messages()
        return self

    def take_mark_of_messages(self) -> None:
        """A `cache_control` within the messages counts for the request, as the last one says."""
        if self.kv_retention is None and self.cache_control is None:
            self.cache_control = last_cache_control(self.messages)
            self._retention()


class BatchChatCompletionRequest(_ChatFields):
    """A request for the next message of each of several conversations; without streaming."""

    messages: Annotated[list[Objects], Field(fail_fast=True)] = Field(min_length=1)

    @model_validator(mode="after")
    def _check_batch(self) -> BatchChatCompletionRequest:
        if self.stream:
            raise VLLMValidationError("a batch of conversations cannot be streamed", parameter="stream")
        self.check_prompt_count("messages", len(self.messages))
        if len(self.messages) > 1:
            for name in ("prompt_logprobs", "return_prompt_text"):
                if getattr(self, name) not in (None, False):
                    raise VLLMValidationError(
                        f"{name} needs one conversation: a reply has one place for it", parameter=name
                    )
        return self

    def single(self, index: int) -> ChatCompletionRequest:
        """The request for one of the conversations, with the fields that were checked for all of them."""
        shared = {name: getattr(self, name) for name in self.model_fields_set}
        one = ChatCompletionRequest.model_construct(**{**shared, "messages": self.messages[index]})
        one.take_mark_of_messages()
        return one


class FunctionCall(BaseModel):
    """A call of a function; `arguments` is JSON text."""

    name: str
    arguments: str


class ToolCall(BaseModel):
    """One tool call of a message."""

    id: str
    type: Literal["function"] = "function"
    function: FunctionCall


class ChatMessage(BaseModel):
    """The message that was generated."""

    role: str
    content: str | None = None
    refusal: str | None = None
    annotations: Any = None
    audio: Any = None
    function_call: Any = None
    tool_calls: list[ToolCall] = Field(default_factory=list)
    reasoning: str | None = None


class ChatTopLogprob(BaseModel):
    """A token that could have stood at a position."""

    token: str
    logprob: float
    bytes: list[int] | None = None


class ChatLogprobPosition(ChatTopLogprob):
    """The token that stands at a position."""

    top_logprobs: list[ChatTopLogprob] | LateJson = Field(default_factory=list)


class ChatLogprobs(BaseModel):
    """Log probabilities of a choice."""

    content: list[ChatLogprobPosition] = Field(default_factory=list)


class ChatChoice(BaseModel):
    """One generated message."""

    index: int
    message: ChatMessage
    logprobs: ChatLogprobs | None = None
    finish_reason: str | None = "stop"
    stop_reason: int | str | None = None
    token_ids: list[int] | None = None
    routed_experts: Any = None
    weight_versions: list[dict[str, Any]] | None = None


class ChatCompletionResponse(BaseModel):
    """The whole answer."""

    id: str
    object: Literal["chat.completion"] = "chat.completion"
    created: int
    model: str
    choices: list[ChatChoice]
    service_tier: str | None = None
    system_fingerprint: str | None = None
    usage: UsageInfo
    prompt_logprobs: list[dict[int, Any] | None] | LateJson | None = None
    prompt_token_ids: list[int] | None = None
    prompt_text: str | None = None
    kv_transfer_params: dict[str, Any] | None = None
    ec_transfer_params: dict[str, Any] | None = None
    metrics: RequestMetrics | None = None


class DeltaFunctionCall(BaseModel):
    """A piece of a function call."""

    name: str | None = None
    arguments: str | None = None


class DeltaToolCall(BaseModel):
    """A piece of a tool call; id, type and name come with the first piece."""

    index: int
    id: str | None = None
    type: Literal["function"] | None = None
    function: DeltaFunctionCall | None = None


class DeltaMessage(BaseModel):
    """A piece of a message."""

    role: str | None = None
    content: str | None = None
    reasoning: str | None = None
    tool_calls: list[DeltaToolCall] = Field(default_factory=list)


class ChatStreamChoice(BaseModel):
    """A piece of one choice."""

    index: int
    delta: DeltaMessage
    logprobs: ChatLogprobs | None = None
    finish_reason: str | None = None
    stop_reason: int | str | None = None
    token_ids: list[int] | None = None
    weight_versions: list[dict[str, Any]] | None = None


class ChatStreamResponse(BaseModel):
    """One chunk of a stream."""

    id: str
    object: Literal["chat.completion.chunk"] = "chat.completion.chunk"
    created: int
    model: str
    choices: list[ChatStreamChoice]
    usage: UsageInfo | None = None
    prompt_token_ids: list[int] | None = None
    kv_transfer_params: dict[str, Any] | None = None
    metrics: RequestMetrics | None = None
