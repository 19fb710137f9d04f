"""Prompts and parameters of callers → requests of the core.  Layer L7.

Owns tokenisation and every check that needs the model's limits: whatever passes here cannot harm the core. Must not know
sockets or HTTP. Refusals are `VLLMValidationError`s that name the field and the values. Changes no state; usable from
several threads at once.
"""

from __future__ import annotations

import array
from collections.abc import Mapping
from typing import Any, NamedTuple

from vllm import envs
from vllm.config import ModelConfig, VllmConfig
from vllm.exceptions import VLLMNotImplementedError, VLLMValidationError
from vllm.kv_retention import EXTRA_ARG, parse_retention
from vllm.lora.request import LoRARequest
from vllm.pooling_params import PoolingParams
from vllm.sampling_params import SamplingParams
from vllm.utils.clock import MonotonicClock
from vllm.utils.ids import random_uuid
from vllm.utils.registry import resolve_object
from vllm.v1.kv_offload.base import parse_tier_filter
from vllm.v1.messages import EngineCoreRequest
from vllm.v1.structured_output import validate_structured_outputs

# Prompt log probabilities are kept for all positions at once: 2**25 entries of 8 bytes are 256 MiB.
PROMPT_LOGPROB_ENTRIES_MAX = 1 << 25
_LOGITS_PROCESSOR_CHECK = "vllm.v1.sample.logits_processor:validate_logits_processors_parameters"
TRANSFER_ARGS = ("kv_transfer_params", "ec_transfer_params")
TOKENIZATION_OPTIONS = ("add_special_tokens", "truncation", "max_length")


class ParsedPrompt(NamedTuple):
    """A prompt in pieces; either text or token ids may be missing."""

    text: str | None
    token_ids: list[int] | None
    cache_salt: str | None


class InputProcessor:
    """Makes `EngineCoreRequest`s. `tokenizer` may be None: then only token ids are accepted as prompts."""

    def __init__(self, vllm_config: VllmConfig, tokenizer: Any | None) -> None:
        assert vllm_config.model_config is not None
        self.vllm_config = vllm_config
        self.model_config: ModelConfig = vllm_config.model_config
        self.tokenizer = tokenizer
        self.vocab_size = self.model_config.get_vocab_size()
        self.generation_config: dict[str, Any] = self.model_config.try_get_generation_config() or {}
        self._clock = MonotonicClock()

    @property
    def max_model_len(self) -> int:
        """Read late: the core may lower it to what fits into memory."""
        limit = self.model_config.max_model_len
        assert limit is not None
        return limit

    @property
    def eos_token_id(self) -> int | None:
        """The tokenizer's end token; without a tokenizer the one in the model's configuration."""
        eos = (
            self.tokenizer.eos_token_id
            if self.tokenizer is not None
            else self.model_config.hf_config.get("eos_token_id")
        )
        return eos if isinstance(eos, int) else None

    def process_inputs(
        self,
        request_id: str,
        prompt: Any,
        params: SamplingParams | PoolingParams,
        arrival_time: float | None = None,
        lora_request: LoRARequest | None = None,
        tokenization_kwargs: Mapping[str, Any] | None = None,
        trace_headers: Mapping[str, str] | None = None,
        priority: int = 0,
        data_parallel_rank: int | None = None,
        cache_salt: str | None = None,
        session_id: str | None = None,
        reasoning_ended: bool | None = None,
    ) -> tuple[str | None, EngineCoreRequest]:
        """The prompt as text (if known) and the request, complete but for its internal id (`assign_request_id`)."""
        self._check_envelope(request_id, params, lora_request, priority, data_parallel_rank)
        parsed = parse_prompt(prompt)
        token_ids = parsed.token_ids
        if token_ids is None:
            token_ids = self._tokenize(parsed.text or "", tokenization_kwargs or {})
        token_ids = self._checked_token_ids(token_ids)
        assert isinstance(params, SamplingParams)
        request = EngineCoreRequest(
            request_id=request_id,
            prompt_token_ids=token_ids,
            mm_features=None,
            sampling_params=self._complete_params(params, len(token_ids)),
            pooling_params=None,
            arrival_time=self._clock.time() if arrival_time is None else arrival_time,
            lora_request=lora_request,
            cache_salt=_checked_salt(cache_salt if cache_salt is not None else parsed.cache_salt),
            data_parallel_rank=data_parallel_rank,
            priority=priority,
            trace_headers=None if trace_headers is None else dict(trace_headers),
            session_id=session_id,
            reasoning_ended=reasoning_ended,
        )
        return parsed.text, request

    @staticmethod
    def assign_request_id(request: EngineCoreRequest) -> None:
        """Give the request an internal id that nobody else has; the caller's id stays as `external_req_id`."""
        request.external_req_id = request.request_id
        if not envs.VLLM_DISABLE_REQUEST_ID_RANDOMIZATION:
            request.request_id = f"{request.request_id}-{random_uuid()[:8]}"

    # -- checks --------------------------------------------------------------------------------------------------

    def _check_envelope(
        self,
        request_id: str,
        params: SamplingParams | PoolingParams,
        lora_request: LoRARequest | None,
        priority: int,
        data_parallel_rank: int | None,
    ) -> None:
        if not isinstance(request_id, str) or not request_id:
            raise _refuse("request_id", request_id, "must be a non-empty string")
        if isinstance(params, PoolingParams):
            raise VLLMNotImplementedError("this model generates text and cannot be used for pooling")
        if not isinstance(params, SamplingParams):
            raise _refuse("params", type(params).__name__, "must be SamplingParams")
        if isinstance(priority, bool) or not isinstance(priority, int) or not -(2**63) <= priority < 2**63:
            raise _refuse("priority", priority, "must be a 64-bit integer")
        if lora_request is not None and self.vllm_config.lora_config is None:
            raise _refuse("lora_request", lora_request.lora_name, "needs an engine with adapters enabled")
        ranks = self.vllm_config.parallel_config.data_parallel_size
        if data_parallel_rank is not None and not 0 <= data_parallel_rank < ranks:
            raise _refuse("data_parallel_rank", data_parallel_rank, f"must be in [0, {ranks})")

    def _tokenize(self, text: str, options: Mapping[str, Any]) -> list[int]:
        if self.tokenizer is None:
            raise VLLMValidationError(
                "a text prompt needs a tokenizer (skip_tokenizer_init is set); give prompt_token_ids",
                parameter="prompt",
            )
        unknown = sorted(set(options) - set(TOKENIZATION_OPTIONS))
        if unknown:
            raise _refuse("tokenization_kwargs", unknown, f"may only hold {', '.join(TOKENIZATION_OPTIONS)}")
        ids: list[int] = self.tokenizer.encode(text, **options)
        return ids

    def _checked_token_ids(self, token_ids: list[int]) -> list[int]:
        """The ids as plain integers, all within the vocabulary, at least one, and with room for one output token."""
        if len(token_ids) == 0:
            raise VLLMValidationError("The prompt is empty: at least one token is needed", parameter="prompt")
        limit = self.max_model_len
        if len(token_ids) >= limit:
            raise VLLMValidationError(
                f"The prompt has {len(token_ids)} tokens, but max_model_len is {limit}: at most {limit - 1} prompt tokens "
                "leave room for one output token",
                parameter="prompt",
                value=len(token_ids),
            )
        try:
            plain = array.array("q", token_ids)
        except (TypeError, OverflowError) as error:
            raise VLLMValidationError(
                f"prompt_token_ids must hold integers: {error}", parameter="prompt"
            ) from None
        for token_id in (min(plain), max(plain)):
            if not 0 <= token_id < self.vocab_size:
                raise VLLMValidationError(
                    f"Token id {token_id} is out of the vocabulary of {self.vocab_size}",
                    parameter="prompt",
                    value=token_id,
                )
        return plain.tolist()

    def _complete_params(self, params: SamplingParams, prompt_length: int) -> SamplingParams:
        """A copy of the parameters with the model's end tokens and a definite `max_tokens`, checked against the model."""
        params = params.clone()
        params.verify(
            self.model_config,
            self.vllm_config.speculative_config,
            self.vllm_config.structured_outputs_config,
            self.tokenizer,
        )
        if params.stop and self.tokenizer is None:
            raise _refuse("stop", params.stop, "needs a tokenizer (skip_tokenizer_init is set)")
        self._check_prompt_logprobs(params, prompt_length)
        self._check_logits_processors(params)
        _check_extra_args(params.extra_args or {})
        if params.structured_outputs is not None:
            if self.tokenizer is None:
                raise VLLMValidationError(
                    "structured outputs need a tokenizer", parameter="structured_outputs"
                )
            validate_structured_outputs(params.structured_outputs, self.tokenizer)
        if params.max_tokens is None:
            params.max_tokens = room = self.max_model_len - prompt_length
            if params.min_tokens > room:
                raise _refuse(
                    "min_tokens", params.min_tokens, f"must be at most the {room} that fit behind the prompt"
                )
        params.update_from_generation_config(self.generation_config, self.eos_token_id)
        if self.tokenizer is not None:
            params.update_from_tokenizer(self.tokenizer)
        return params

    def _check_logits_processors(self, params: SamplingParams) -> None:
        """Let configured logits processors look at the parameters; they live with torch, hence loaded only if there are any."""
        configured = self.model_config.logits_processors
        if not configured:
            return
        validate: Any = resolve_object(_LOGITS_PROCESSOR_CHECK)
        try:
            validate(configured, params)
        except ValueError as error:
            raise VLLMValidationError(str(error), parameter="extra_args") from error

    def _check_prompt_logprobs(self, params: SamplingParams, prompt_length: int) -> None:
        wanted = params.prompt_logprobs
        ranked = 0 if wanted is None else self.vocab_size if wanted == -1 else wanted + 1
        for name, per_position in (
            ("prompt_logprobs", ranked),
            ("prompt_logprob_token_ids", len(params.prompt_logprob_token_ids or ())),
        ):
            if per_position * prompt_length > PROMPT_LOGPROB_ENTRIES_MAX:
                raise VLLMValidationError(
                    f"{name} asks for {per_position} values at each of {prompt_length} prompt tokens, more than the "
                    f"allowed {PROMPT_LOGPROB_ENTRIES_MAX} in one request",
                    parameter=name,
                    value=per_position,
                )


def parse_prompt(prompt: Any) -> ParsedPrompt:
    """Text or token ids of any accepted form of prompt."""
    if isinstance(prompt, str):
        return ParsedPrompt(prompt, None, None)
    if isinstance(prompt, (list, tuple, array.array)):
        return ParsedPrompt(None, list(prompt), None)
    if not isinstance(prompt, Mapping):
        raise _refuse(
            "prompt", type(prompt).__name__, "must be a text, a list of token ids or a prompt mapping"
        )
    if prompt.get("multi_modal_data"):
        raise VLLMNotImplementedError("multimodal prompts are not supported by this model")
    if prompt.get("prompt_embeds") is not None:
        raise VLLMNotImplementedError("prompts as embeddings are not supported")
    text, token_ids = prompt.get("prompt"), prompt.get("prompt_token_ids")
    if text is None and token_ids is None:
        raise _refuse("prompt", sorted(prompt), "needs `prompt` or `prompt_token_ids`")
    if text is not None and not isinstance(text, str):
        raise _refuse("prompt", type(text).__name__, "must be a text")
    if token_ids is not None and not hasattr(token_ids, "__len__"):
        raise _refuse("prompt_token_ids", type(token_ids).__name__, "must be a list of token ids")
    return ParsedPrompt(text, None if token_ids is None else list(token_ids), prompt.get("cache_salt"))


def _check_extra_args(extra_args: Mapping[str, Any]) -> None:
    """The options that the core itself reads; all others are for connectors and plugins."""
    for name in TRANSFER_ARGS:
        value = extra_args.get(name)
        if value is not None and not isinstance(value, dict):
            raise _refuse(name, value, "must be a mapping")
    try:
        parse_tier_filter(extra_args.get("kv_transfer_params"))
    except ValueError as error:
        raise VLLMValidationError(str(error), parameter="kv_transfer_params") from error
    if EXTRA_ARG in extra_args:
        try:
            parse_retention(extra_args[EXTRA_ARG])
        except ValueError as error:
            raise VLLMValidationError(str(error), parameter=EXTRA_ARG) from error


def _checked_salt(salt: Any) -> str | None:
    if salt is not None and (not isinstance(salt, str) or not salt):
        raise _refuse("cache_salt", salt, "must be a non-empty string")
    return salt


def _refuse(parameter: str, value: object, rule: str) -> VLLMValidationError:
    return VLLMValidationError(f"{parameter} {rule}, got {value!r}", parameter=parameter, value=value)
