"""Checks of sampling parameters, one small function per group of fields. Layer: L1.

Every refusal is a `VLLMValidationError` that names the field and the value. The parameters are seen through a protocol,
so this module does not import the class it checks.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from typing import Any, Protocol

from vllm import envs
from vllm.exceptions import VLLMValidationError

MAX_LOGIT_BIAS = 100.0
# Logits are scaled by it in single precision.
REPETITION_PENALTY_MAX = 1e20


class CheckedParams(Protocol):
    """The fields of `SamplingParams` that are checked here."""

    n: int
    presence_penalty: float
    frequency_penalty: float
    repetition_penalty: float
    temperature: float
    watermarking: Any
    top_p: float
    top_k: int
    min_p: float
    seed: int | None
    stop: str | list[str] | None
    stop_token_ids: list[int] | None
    ignore_eos: bool
    max_tokens: int | None
    min_tokens: int
    logprobs: int | None
    prompt_logprobs: int | None
    prompt_logprob_token_ids: list[int] | None
    prompt_logprob_start: int | None
    logprob_token_ids: list[int] | None
    flat_logprobs: bool
    detokenize: bool
    skip_special_tokens: bool
    spaces_between_special_tokens: bool
    include_stop_str_in_output: bool
    skip_clone: bool
    skip_reading_prefix_cache: bool | None
    stream_interval: int | None
    logit_bias: dict[int, float] | None
    allowed_token_ids: list[int] | None
    bad_words: list[str] | None
    extra_args: dict[str, Any] | None
    thinking_token_budget: int | None
    routed_experts_prompt_start: int
    trace_decode_token_ids: list[int] | None


def _refuse(parameter: str, value: object, rule: str) -> VLLMValidationError:
    return VLLMValidationError(f"{parameter} {rule}, got {value!r}", parameter=parameter, value=value)


def _number(parameter: str, value: object) -> float:
    if isinstance(value, bool) or not isinstance(value, int | float):
        raise _refuse(parameter, value, "must be a number")
    if not math.isfinite(value):
        raise _refuse(parameter, value, "must be finite")
    return value


def _integer(parameter: str, value: object, minimum: int) -> int:
    if isinstance(value, bool) or not isinstance(value, int):
        raise _refuse(parameter, value, "must be an integer")
    if value < minimum:
        raise _refuse(parameter, value, f"must be at least {minimum}")
    return value


def validate_thinking_token_budget(value: object) -> int | None:
    """The budget as it is, or None for "no budget" (None or −1). Anything else is refused."""
    if value is None or (value == -1 and isinstance(value, int) and not isinstance(value, bool)):
        return None
    return _integer("thinking_token_budget", value, 0)


def check_structured_outputs(constraints: Mapping[str, object]) -> None:
    """Exactly one constraint, and not an empty one."""
    names = ", ".join(constraints) or "none"
    if len(constraints) != 1:
        raise VLLMValidationError(
            "structured_outputs needs exactly one of json, regex, choice, grammar, json_object, structural_tag; "
            f"given: {names}",
            parameter="structured_outputs",
        )
    ((name, value),) = constraints.items()
    if value is False or value in ("", []):
        raise _refuse(
            f"structured_outputs.{name}", value, "must be true" if value is False else "must not be empty"
        )
    if not _has_form(name, value):
        raise _refuse(f"structured_outputs.{name}", value, f"must be {CONSTRAINT_FORMS[name]}")


CONSTRAINT_FORMS = {
    "json": "a JSON schema, as text or as an object",
    "regex": "a text",
    "choice": "a list of texts",
    "grammar": "a text",
    "json_object": "true",
    "structural_tag": "a text",
}


def _has_form(name: str, value: object) -> bool:
    if name == "json":
        return isinstance(value, str | dict)
    if name == "choice":
        return isinstance(value, list) and all(isinstance(item, str) for item in value)
    return value is True if name == "json_object" else isinstance(value, str)


def check_optional_text(name: str, value: object) -> None:
    """A text, or not given."""
    if value is not None and not isinstance(value, str):
        raise _refuse(name, value, "must be a text")


def check_repetition_detection(max_pattern_size: int, min_pattern_size: int, min_count: int) -> None:
    """Sizes and count make sense together; all zero means off."""
    if max_pattern_size < 0 or min_pattern_size < 0 or min_pattern_size > max_pattern_size:
        raise VLLMValidationError(
            f"repetition_detection needs 0 <= min_pattern_size <= max_pattern_size, got {min_pattern_size} and "
            f"{max_pattern_size}",
            parameter="repetition_detection",
        )
    if max_pattern_size > 0 and min_count < 2:
        raise _refuse("repetition_detection.min_count", min_count, "must be at least 2")


def check_flag(name: str, value: object) -> None:
    """A boolean."""
    if not isinstance(value, bool):
        raise _refuse(name, value, "must be true or false")


def check_flags(params: CheckedParams) -> None:
    """Flags are booleans: a text such as "false" would count as true."""
    for name, value in (
        ("ignore_eos", params.ignore_eos),
        ("flat_logprobs", params.flat_logprobs),
        ("detokenize", params.detokenize),
        ("skip_special_tokens", params.skip_special_tokens),
        ("spaces_between_special_tokens", params.spaces_between_special_tokens),
        ("include_stop_str_in_output", params.include_stop_str_in_output),
        ("skip_clone", params.skip_clone),
    ):
        check_flag(name, value)
    if not isinstance(params.skip_reading_prefix_cache, bool | None):
        raise _refuse(
            "skip_reading_prefix_cache", params.skip_reading_prefix_cache, "must be true, false or None"
        )


def check_numbers(params: CheckedParams) -> None:
    """Ranges of the numeric fields."""
    _integer("n", params.n, 1)
    if params.n > envs.VLLM_MAX_N_SEQUENCES:
        raise _refuse("n", params.n, f"must be at most {envs.VLLM_MAX_N_SEQUENCES}")
    for name, value in (
        ("presence_penalty", params.presence_penalty),
        ("frequency_penalty", params.frequency_penalty),
    ):
        if not -2.0 <= _number(name, value) <= 2.0:
            raise _refuse(name, value, "must be in [-2, 2]")
    if _number("repetition_penalty", params.repetition_penalty) <= 0.0:
        raise _refuse("repetition_penalty", params.repetition_penalty, "must be greater than zero")
    if not 1.0 / REPETITION_PENALTY_MAX <= params.repetition_penalty <= REPETITION_PENALTY_MAX:
        raise _refuse(
            "repetition_penalty",
            params.repetition_penalty,
            f"must be within {1.0 / REPETITION_PENALTY_MAX:g} and {REPETITION_PENALTY_MAX:g}, where logits stay finite",
        )
    if not 0.0 <= _number("temperature", params.temperature) <= 2.0:
        raise _refuse("temperature", params.temperature, "must be in [0, 2]")
    if not 0.0 < _number("top_p", params.top_p) <= 1.0:
        raise _refuse("top_p", params.top_p, "must be in (0, 1]")
    _integer("top_k", params.top_k, -1)
    if not 0.0 <= _number("min_p", params.min_p) <= 1.0:
        raise _refuse("min_p", params.min_p, "must be in [0, 1]")
    if params.max_tokens is not None:
        _integer("max_tokens", params.max_tokens, 1)
    _integer("min_tokens", params.min_tokens, 0)
    if params.max_tokens is not None and params.min_tokens > params.max_tokens:
        raise _refuse("min_tokens", params.min_tokens, f"must be at most max_tokens={params.max_tokens}")
    for name, number in (("logprobs", params.logprobs), ("prompt_logprobs", params.prompt_logprobs)):
        if number is not None:
            _integer(name, number, -1)
    if params.prompt_logprob_start is not None:
        _integer("prompt_logprob_start", params.prompt_logprob_start, 0)
    if params.stream_interval is not None:
        _integer("stream_interval", params.stream_interval, 1)
    if params.seed is not None:
        _check_seed(params.seed)


def _check_seed(seed: object) -> None:
    if isinstance(seed, bool) or not isinstance(seed, int) or not -(2**63) <= seed < 2**63:
        raise _refuse("seed", seed, "must be a 64-bit integer")


def check_tokens_and_texts(params: CheckedParams) -> None:
    """Lists of token ids and texts are well formed."""
    stop = params.stop or []
    for name, texts in (("stop", stop), ("bad_words", params.bad_words or [])):
        if not isinstance(texts, list | tuple):
            raise _refuse(name, texts, "must be a list of strings")
    if any(not isinstance(text, str) or not text for text in stop):
        raise _refuse("stop", stop, "must hold non-empty strings")
    if stop and not params.detokenize:
        raise VLLMValidationError(
            "stop strings need detokenize=True: without text they could never be found; use stop_token_ids",
            parameter="stop",
            value=stop,
        )
    for name, ids in (
        ("stop_token_ids", params.stop_token_ids),
        ("prompt_logprob_token_ids", params.prompt_logprob_token_ids),
        ("logprob_token_ids", params.logprob_token_ids),
        ("allowed_token_ids", params.allowed_token_ids),
        ("trace_decode_token_ids", params.trace_decode_token_ids),
    ):
        for token_id in ids or ():
            if isinstance(token_id, bool) or not isinstance(token_id, int):
                raise _refuse(name, token_id, "must hold integers")
    if params.allowed_token_ids is not None and not params.allowed_token_ids:
        raise _refuse("allowed_token_ids", params.allowed_token_ids, "must not be empty")
    if any(not isinstance(word, str) or not word.strip() for word in params.bad_words or ()):
        raise _refuse("bad_words", params.bad_words, "must hold non-empty strings")
    if params.extra_args is not None and not isinstance(params.extra_args, dict):
        raise _refuse("extra_args", params.extra_args, "must be a mapping")


def normal_logit_bias(logit_bias: object) -> dict[int, float]:
    """Keys as integers, values clamped to ±100."""
    if not isinstance(logit_bias, Mapping):
        raise _refuse("logit_bias", logit_bias, "must be a mapping from token id to a number")
    result: dict[int, float] = {}
    for key, value in logit_bias.items():
        try:
            token_id = int(key)
        except (TypeError, ValueError):
            raise _refuse("logit_bias", key, "must have token ids as keys") from None
        result[token_id] = max(-MAX_LOGIT_BIAS, min(MAX_LOGIT_BIAS, float(_number("logit_bias", value))))
    return result


def bad_words_to_token_ids(bad_words: Iterable[str], tokenizer: Any) -> list[list[int]]:
    """Token sequences of each word, with and without a leading space where that is another sequence of one length."""
    result: list[list[int]] = []
    for word in bad_words:
        inside = list(tokenizer.encode(text=word.lstrip(), add_special_tokens=False))
        if not inside:
            raise _refuse("bad_words", word, "must hold words that the tokenizer can encode")
        result.append(inside)
        at_start = list(tokenizer.encode(text=f" {word.lstrip()}", add_special_tokens=False))
        if at_start and at_start[0] != inside[0] and len(at_start) == len(inside):
            result.append(at_start)
    return result


def check_logprob_limits(params: CheckedParams, max_logprobs: int, vocab: int) -> None:
    """Requested numbers of log probabilities are allowed, whether they are the most likely ones or given ones."""
    limit = vocab if max_logprobs == -1 else max_logprobs
    for name, ids in (
        ("logprob_token_ids", params.logprob_token_ids),
        ("prompt_logprob_token_ids", params.prompt_logprob_token_ids),
    ):
        if len(ids or ()) > limit:
            raise VLLMValidationError(
                f"{name} asks for {len(ids or ())} log probabilities per token, more than the allowed {limit} "
                "(--max-logprobs)",
                parameter=name,
                value=len(ids or ()),
            )
    for name, number in (("logprobs", params.logprobs), ("prompt_logprobs", params.prompt_logprobs)):
        if number is None:
            continue
        count = vocab if number == -1 else number
        if count > limit:
            raise VLLMValidationError(
                f"{name}={number} asks for {count} log probabilities per token, more than the allowed {limit} "
                "(--max-logprobs)",
                parameter=name,
                value=number,
            )


def check_token_ids(params: CheckedParams, vocab: int) -> None:
    """Every token id that the sampler would use as an index lies within the vocabulary."""
    for name, ids in (
        ("logit_bias", params.logit_bias),
        ("allowed_token_ids", params.allowed_token_ids),
        ("stop_token_ids", params.stop_token_ids),
        ("logprob_token_ids", params.logprob_token_ids),
        ("prompt_logprob_token_ids", params.prompt_logprob_token_ids),
        ("trace_decode_token_ids", params.trace_decode_token_ids),
    ):
        bad = [token_id for token_id in ids or () if not 0 <= token_id < vocab]
        if bad:
            raise VLLMValidationError(
                f"{name} holds token ids outside the vocabulary of {vocab}: {bad[:10]}",
                parameter=name,
                value=bad[:10],
            )


def check_features(params: CheckedParams, model_config: Any, speculative_config: Any, tokenizer: Any) -> None:
    """Nothing is asked for that this engine, or this configuration of it, cannot do."""
    if params.watermarking is not None:
        raise VLLMValidationError("watermarking is not supported", parameter="watermarking")
    if params.routed_experts_prompt_start:
        raise VLLMValidationError("routed experts are not reported", parameter="routed_experts_prompt_start")
    if params.thinking_token_budget is not None:
        raise VLLMValidationError(
            "thinking_token_budget is not supported",
            parameter="thinking_token_budget",
            value=params.thinking_token_budget,
        )
    if params.trace_decode_token_ids is not None and not model_config.enable_trace_replay:
        raise VLLMValidationError("needs --enable-trace-replay", parameter="trace_decode_token_ids")
    if params.bad_words and tokenizer is None:
        raise VLLMValidationError(
            "bad_words needs a tokenizer (skip_tokenizer_init is set)", parameter="bad_words"
        )
    if speculative_config is not None and params.min_p > 1e-5:
        raise VLLMValidationError("min_p cannot be used with speculative decoding", parameter="min_p")
