"""Request fields that completions and chat share, their checks, and how they become `SamplingParams`. Layer: L8.

A bad value raises `VLLMValidationError` (400) naming the field, or a schema error. Unknown fields are accepted, reported
once as a warning and by name in the debug log.
"""

from __future__ import annotations

import json
from functools import cache
from typing import Any, Literal, get_args

from pydantic import BaseModel, ConfigDict, Field, model_validator

from vllm import envs
from vllm.entrypoints.openai.field_types import LogitBias, Texts, TokenIds, Xargs
from vllm.exceptions import VLLMValidationError
from vllm.kv_retention import EXTRA_ARG, from_cache_control, parse_retention
from vllm.logger import init_logger
from vllm.sampling_params import (
    RepetitionDetectionParams,
    RequestOutputKind,
    SamplingParams,
    StructuredOutputsParams,
)

logger = init_logger(__name__)


class OpenAIBaseModel(BaseModel):
    """Base of all request bodies."""

    model_config = ConfigDict(extra="allow", arbitrary_types_allowed=True)

    @model_validator(mode="after")
    def _report_unknown_fields(self) -> OpenAIBaseModel:
        if self.model_extra:
            logger.warning_once(
                "Requests with unknown fields arrive; the fields are ignored (names in the debug log)"
            )
            logger.debug("Ignored request fields: %s", ", ".join(self.model_extra))
        return self


class StreamOptions(OpenAIBaseModel):
    """Usage in streams: once at the end, or also on every chunk."""

    include_usage: bool | None = True
    continuous_usage_stats: bool | None = False


class JsonSchemaFormat(OpenAIBaseModel):
    """A named JSON schema."""

    name: str
    description: str | None = None
    json_schema: dict[str, Any] | None = Field(default=None, alias="schema")
    strict: bool | None = None


class ResponseFormat(OpenAIBaseModel):
    """Form of the answer."""

    type: Literal["text", "json_object", "json_schema", "structural_tag"]
    json_schema: JsonSchemaFormat | None = None

    def to_structured_outputs(self) -> dict[str, Any]:
        """The constraint, by the fields of `StructuredOutputsParams`; empty for plain text."""
        if self.type == "text":
            return {}
        if self.type == "json_object":
            return {"json_object": True}
        if self.type == "structural_tag":
            return {"structural_tag": json.dumps(self.model_dump(exclude_unset=True))}
        if self.json_schema is None or self.json_schema.json_schema is None:
            raise VLLMValidationError(
                "response_format of type json_schema needs json_schema.schema", parameter="response_format"
            )
        return {"json": self.json_schema.json_schema}


# Fields of earlier interfaces that would change the answer, and what says the same now.
FORMER_FIELDS = {
    **{
        f"guided_{name}": f"use structured_outputs.{name}"
        for name in ("json", "regex", "choice", "grammar", "json_object")
    },
    "guided_decoding_backend": "the constraint library is chosen by the server",
    "guided_whitespace_pattern": "use structured_outputs.whitespace_pattern",
    "functions": "use tools",
    "function_call": "use tool_choice",
    "audio": "answers are text",
    "web_search_options": "there is no search",
}


@cache
def _number_fields(model: type[BaseModel]) -> frozenset[str]:
    """Fields that take a number, and neither a boolean nor anything else."""
    return frozenset(
        name
        for name, field in model.model_fields.items()
        if set(get_args(field.annotation) or [field.annotation]) <= {int, float, type(None)}
    )


class GenerationFields(OpenAIBaseModel):
    """Fields that completions and chat share; see the interface's documentation for their meaning."""

    model: str | None = None
    n: int = 1
    temperature: float | None = None
    top_p: float | None = None
    seed: int | None = Field(None, ge=-(2**63), lt=2**63)
    stop: str | Texts | None = []
    stream: bool = False
    stream_options: StreamOptions | None = None
    frequency_penalty: float | None = 0.0
    presence_penalty: float | None = 0.0
    logit_bias: LogitBias | None = None
    response_format: ResponseFormat | None = None
    user: str | None = None

    top_k: int | None = None
    min_p: float | None = None
    repetition_penalty: float | None = None
    stop_token_ids: TokenIds | None = []
    include_stop_str_in_output: bool = False
    ignore_eos: bool = False
    min_tokens: int = 0
    skip_special_tokens: bool | None = None
    spaces_between_special_tokens: bool = True
    return_weight_versions: bool = False
    truncate_prompt_tokens: int | None = Field(None, ge=-1)
    truncation_side: Literal["left", "right"] | None = None
    allowed_token_ids: TokenIds | None = None
    bad_words: Texts = []
    prompt_logprobs: int | None = None
    logprob_token_ids: TokenIds | None = None
    use_beam_search: bool = False
    length_penalty: float = 1.0
    structured_outputs: dict[str, Any] | None = None
    priority: int = 0
    request_id: str | None = None
    session_id: str | None = None
    return_tokens_as_token_ids: bool | None = None
    return_token_ids: bool | None = None
    return_token_offsets: bool = False
    cache_salt: str | None = None
    kv_transfer_params: dict[str, Any] | None = None
    kv_retention: Any = None
    cache_control: Any = None
    ec_transfer_params: dict[str, Any] | None = None
    vllm_xargs: Xargs | None = None
    thinking_token_budget: Any = None
    repetition_detection: dict[str, int] | None = None
    watermarking: Any = None
    stream_interval: int | None = None
    routed_experts_prompt_start: int = 0

    @model_validator(mode="before")
    @classmethod
    def _check_given(cls, given: Any) -> Any:
        """What the schema library would let through: former fields, and booleans as numbers. A null may mean the default."""
        if not isinstance(given, dict):
            return given
        for name in given.keys() & FORMER_FIELDS.keys():
            if given[name] not in (None, [], {}):
                raise VLLMValidationError(
                    f"{name} is not a field of this interface: {FORMER_FIELDS[name]}", parameter=name
                )
        for name in given.keys() & _number_fields(cls):
            if isinstance(given[name], bool):
                raise VLLMValidationError(f"{name} must be a number, got {given[name]}", parameter=name)
        return {
            name: value for name, value in given.items() if value is not None or name not in ("n", "stream")
        }

    @model_validator(mode="after")
    def _check_common(self) -> GenerationFields:
        if self.stream_options is not None and not self.stream:
            raise VLLMValidationError("stream_options needs stream=True", parameter="stream_options")
        if self.cache_salt is not None and not self.cache_salt:
            raise VLLMValidationError(
                "cache_salt must be a non-empty string", parameter="cache_salt", value=""
            )
        if self.prompt_logprobs is not None:
            self._check_prompt_logprobs(self.prompt_logprobs)
        self._retention()
        if self.use_beam_search:
            raise VLLMValidationError(
                "beam search is offered by the LLM class only", parameter="use_beam_search"
            )
        if self.length_penalty != 1.0:
            raise VLLMValidationError(
                "length_penalty belongs to beam search, which is offered by the LLM class only",
                parameter="length_penalty",
                value=self.length_penalty,
            )
        if self.ec_transfer_params is not None:
            raise VLLMValidationError("there is no encoder cache to transfer", parameter="ec_transfer_params")
        if self.return_token_offsets:
            raise VLLMValidationError("token offsets are not reported", parameter="return_token_offsets")
        self._check_counts()
        return self

    def _check_prompt_logprobs(self, count: int) -> None:
        if count < -1:
            raise VLLMValidationError(
                f"prompt_logprobs must be at least -1, got {count}", parameter="prompt_logprobs", value=count
            )
        if self.stream and count != 0:
            raise VLLMValidationError(
                "prompt_logprobs are not available in streams", parameter="prompt_logprobs", value=count
            )

    def _check_counts(self) -> None:
        stops = [self.stop] if isinstance(self.stop, str) else self.stop or []
        for name, items, limit, variable in (
            ("stop", stops, envs.VLLM_MAX_STOP_STRINGS, "VLLM_MAX_STOP_STRINGS"),
            ("bad_words", self.bad_words, envs.VLLM_MAX_NUM_BAD_WORDS, "VLLM_MAX_NUM_BAD_WORDS"),
        ):
            if len(items) > limit:
                raise VLLMValidationError(
                    f"{name} has {len(items)} entries, at most {limit} are allowed ({variable})",
                    parameter=name,
                    value=len(items),
                )

    def check_prompt_count(self, field: str, count: int) -> None:
        """So many prompts in one request, each with `n` samples, are not too many."""
        if count > envs.VLLM_MAX_COMPLETION_PROMPTS:
            raise VLLMValidationError(
                f"{field} holds {count} prompts, at most {envs.VLLM_MAX_COMPLETION_PROMPTS} are allowed "
                "(VLLM_MAX_COMPLETION_PROMPTS)",
                parameter=field,
                value=count,
            )
        if count * self.n > envs.VLLM_MAX_N_SEQUENCES:
            raise VLLMValidationError(
                f"{count} prompts with n={self.n} are {count * self.n} samples, at most {envs.VLLM_MAX_N_SEQUENCES} are "
                "allowed (VLLM_MAX_N_SEQUENCES)",
                parameter="n",
                value=self.n,
            )

    # --- into the engine's parameters ---------------------------------------------------------------------------

    def _constraint(self) -> StructuredOutputsParams | None:
        """`structured_outputs` and `response_format` as one constraint."""
        from_format = {} if self.response_format is None else self.response_format.to_structured_outputs()
        given = dict(self.structured_outputs or {})
        if from_format and given:
            raise VLLMValidationError(
                "response_format and structured_outputs exclude each other", parameter="structured_outputs"
            )
        values = from_format or given
        if not values and self.structured_outputs is None:
            return None
        known = StructuredOutputsParams.__struct_fields__
        unknown = [name for name in values if name not in known]
        if unknown:
            raise VLLMValidationError(
                f"structured_outputs has unknown fields {unknown}; known: {', '.join(known)}",
                parameter="structured_outputs",
            )
        return StructuredOutputsParams(**values)

    def _retention(self) -> dict[str, Any] | None:
        """`kv_retention`, or what `cache_control` stands for, checked."""
        if self.kv_retention is None and self.cache_control is None:
            return None
        if self.kv_retention is not None and self.cache_control is not None:
            raise VLLMValidationError(
                "kv_retention and cache_control exclude each other", parameter="cache_control"
            )
        field = "cache_control" if self.kv_retention is None else "kv_retention"
        try:
            value = from_cache_control(self.cache_control) if self.kv_retention is None else self.kv_retention
            parse_retention(value)
        except ValueError as error:
            raise VLLMValidationError(str(error), parameter=field) from error
        return dict(value)

    def extra_args(self) -> dict[str, Any] | None:
        """What connectors, plugins and the cache are told about the request; None if nothing."""
        extra: dict[str, Any] = dict(self.vllm_xargs or {})
        if self.kv_transfer_params is not None:
            extra["kv_transfer_params"] = self.kv_transfer_params
        retention = self._retention()
        if retention is not None:
            extra[EXTRA_ARG] = retention
        return extra or None

    def build_sampling_params(
        self,
        max_tokens: int,
        defaults: dict[str, Any],
        logprobs: int | None,
        prompt_logprobs: int | None,
        constraint: StructuredOutputsParams | None = None,
    ) -> SamplingParams:
        """The engine's parameters. A value of the request wins over `defaults`, which win over the neutral value.

        Raises VLLMValidationError naming field and value.
        """

        def chosen(name: str, neutral: float) -> Any:
            value = getattr(self, name)
            return defaults.get(name, neutral) if value is None else value

        repetition = self.repetition_detection
        return SamplingParams(
            n=self.n,
            presence_penalty=self.presence_penalty or 0.0,
            frequency_penalty=self.frequency_penalty or 0.0,
            repetition_penalty=chosen("repetition_penalty", 1.0),
            temperature=chosen("temperature", 1.0),
            top_p=chosen("top_p", 1.0),
            top_k=chosen("top_k", 0),
            min_p=chosen("min_p", 0.0),
            seed=self.seed,
            stop=self.stop,
            stop_token_ids=self.stop_token_ids,
            ignore_eos=self.ignore_eos,
            max_tokens=max_tokens,
            min_tokens=self.min_tokens,
            logprobs=logprobs,
            prompt_logprobs=prompt_logprobs,
            logprob_token_ids=self.logprob_token_ids,
            skip_special_tokens=self.skip_special_tokens is not False,
            spaces_between_special_tokens=self.spaces_between_special_tokens,
            include_stop_str_in_output=self.include_stop_str_in_output,
            output_kind=RequestOutputKind.DELTA if self.stream else RequestOutputKind.FINAL_ONLY,
            stream_interval=self.stream_interval,
            structured_outputs=constraint or self._constraint(),
            logit_bias=self.logit_bias,  # type: ignore[arg-type]  # the parameters turn text keys into integers
            allowed_token_ids=self.allowed_token_ids,
            bad_words=self.bad_words,
            extra_args=self.extra_args(),
            thinking_token_budget=self.thinking_token_budget,
            repetition_detection=None if repetition is None else _repetition_params(repetition),
            watermarking=self.watermarking,
            routed_experts_prompt_start=self.routed_experts_prompt_start,
        )


def _repetition_params(values: dict[str, int]) -> RepetitionDetectionParams:
    try:
        return RepetitionDetectionParams(**values)
    except TypeError as error:
        raise VLLMValidationError(
            f"repetition_detection: {error}", parameter="repetition_detection"
        ) from None
