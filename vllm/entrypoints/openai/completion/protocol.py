"""Bodies of `/v1/completions`. Layer: L8."""

from __future__ import annotations

from typing import Any, Literal

from pydantic import BaseModel, Field, model_validator

from vllm.entrypoints.openai.field_types import Prompt
from vllm.entrypoints.openai.late_json import LateJson
from vllm.entrypoints.openai.request_fields import GenerationFields
from vllm.entrypoints.openai.usage import UsageInfo
from vllm.exceptions import VLLMValidationError
from vllm.sampling_params import SamplingParams


class CompletionRequest(GenerationFields):
    """A request for continuations of one or several prompts."""

    prompt: Prompt | None = None
    prompt_embeds: Any = None
    max_tokens: int | None = 16
    logprobs: int | None = None
    echo: bool | None = False
    suffix: str | None = None
    best_of: int | None = None
    add_special_tokens: bool = True

    @model_validator(mode="after")
    def _check_completion(self) -> CompletionRequest:
        if self.prompt_embeds is not None:
            raise VLLMValidationError("prompts are text or token ids", parameter="prompt_embeds")
        if self.prompt is None or self.prompt in ("", []):
            raise VLLMValidationError(
                "prompt must be given and must not be empty", parameter="prompt", value=self.prompt
            )
        if self.suffix:
            raise VLLMValidationError("suffix is not supported", parameter="suffix", value=self.suffix)
        if self.best_of is not None and self.best_of != self.n:
            raise VLLMValidationError("best_of is not supported", parameter="best_of", value=self.best_of)
        if self.logprobs is not None and self.logprobs < -1:
            raise VLLMValidationError(
                f"logprobs must be at least -1, got {self.logprobs}",
                parameter="logprobs",
                value=self.logprobs,
            )
        if self.max_tokens is not None and self.max_tokens < 0:
            raise VLLMValidationError(
                f"max_tokens must be at least 0, got {self.max_tokens}",
                parameter="max_tokens",
                value=self.max_tokens,
            )
        self.check_prompt_count("prompt", len(self.prompts()))
        return self

    def prompts(self) -> list[str | list[int]]:
        """The prompts, each as text or token ids."""
        prompt = self.prompt
        if prompt is None or isinstance(prompt, str):
            return [prompt or ""]
        if prompt and isinstance(prompt[0], int):
            return [prompt]
        return list(prompt)  # type: ignore[arg-type]

    @property
    def is_scoring(self) -> bool:
        """Whether no token is wanted: the log probabilities of the prompt are all that is asked for."""
        return self.max_tokens == 0

    def to_sampling_params(self, max_tokens: int, default_sampling_params: dict[str, Any]) -> SamplingParams:
        """The engine's parameters. Raises VLLMValidationError naming field and value."""
        prompt_logprobs = self.prompt_logprobs
        if prompt_logprobs is None and self.echo:
            prompt_logprobs = self.logprobs
        return self.build_sampling_params(max_tokens, default_sampling_params, self.logprobs, prompt_logprobs)


class CompletionLogProbs(BaseModel):
    """Log probabilities of a choice, in parallel lists. Offsets count code points of the choice's text."""

    text_offset: list[int] = Field(default_factory=list)
    token_logprobs: list[float | None] = Field(default_factory=list)
    tokens: list[str] = Field(default_factory=list)
    top_logprobs: list[dict[str, float] | None] | LateJson = Field(default_factory=list)


class CompletionResponseChoice(BaseModel):
    """One continuation. `index` = prompt index × n + sample index."""

    index: int
    text: str
    logprobs: CompletionLogProbs | None = None
    finish_reason: str | None = None
    stop_reason: int | str | None = None
    token_ids: list[int] | None = None
    prompt_token_ids: list[int] | None = None
    prompt_logprobs: list[dict[int, Any] | None] | LateJson | None = None
    routed_experts: Any = None
    weight_versions: list[dict[str, Any]] | None = None


class RequestMetrics(BaseModel):
    """Times of a request (`--enable-per-request-metrics`)."""

    time_to_first_token_ms: float | None = None
    generation_time_ms: float | None = None
    queue_time_ms: float | None = None
    mean_itl_ms: float | None = None
    tokens_per_second: float | None = None
    speculative_decoding: Any = None


class CompletionResponse(BaseModel):
    """The whole answer."""

    id: str
    object: Literal["text_completion"] = "text_completion"
    created: int
    model: str
    choices: list[CompletionResponseChoice]
    service_tier: str | None = None
    system_fingerprint: str | None = None
    usage: UsageInfo
    kv_transfer_params: dict[str, Any] | None = None
    ec_transfer_params: dict[str, Any] | None = None
    metrics: RequestMetrics | None = None


class CompletionResponseStreamChoice(BaseModel):
    """A piece of one continuation."""

    index: int
    text: str
    logprobs: CompletionLogProbs | None = None
    finish_reason: str | None = None
    stop_reason: int | str | None = None
    token_ids: list[int] | None = None
    prompt_token_ids: list[int] | None = None
    weight_versions: list[dict[str, Any]] | None = None


class CompletionStreamResponse(BaseModel):
    """One chunk of a stream."""

    id: str
    object: Literal["text_completion"] = "text_completion"
    created: int
    model: str
    choices: list[CompletionResponseStreamChoice]
    usage: UsageInfo | None = None
    kv_transfer_params: dict[str, Any] | None = None
    metrics: RequestMetrics | None = None
