"""Token ids in, token ids out: `/inference/v1/generate` and `/inference/v1/abort_requests`. Layer: L8.

For callers that tokenise themselves, such as routers and trainers.
"""

from __future__ import annotations

import math
import re
from collections.abc import AsyncGenerator
from contextlib import aclosing
from difflib import get_close_matches
from typing import Any

import msgspec
from fastapi import APIRouter, Request
from fastapi.responses import JSONResponse, Response
from pydantic import BaseModel, model_validator

from vllm.entrypoints.openai.bodies import StrictRoute
from vllm.entrypoints.openai.completion.serving import OpenAIServingCompletion
from vllm.entrypoints.openai.fan_in import Primed
from vllm.entrypoints.openai.field_types import Texts, TokenIds
from vllm.entrypoints.openai.late_json import LateJson
from vllm.entrypoints.openai.render import RenderedPrompt
from vllm.entrypoints.openai.replies import reply
from vllm.entrypoints.openai.request_fields import GenerationFields
from vllm.entrypoints.openai.serving_base import (
    LOGPROB_MIN,
    Caller,
    check_finish,
    guarded_stream,
    positions_body,
    prompt_logprobs_body,
)
from vllm.entrypoints.openai.sse import sse_event
from vllm.entrypoints.openai.state import serving
from vllm.entrypoints.openai.usage import UsageCounter, UsageInfo
from vllm.exceptions import VLLMValidationError
from vllm.outputs import CompletionOutput, RequestOutput
from vllm.sampling_params import RequestOutputKind, SamplingParams

router = APIRouter(route_class=StrictRoute)
# Fields of SamplingParams that are computed from the others: the engine trusts them unchecked.
COMPUTED_PARAMS = {
    name
    for name in SamplingParams.__struct_fields__
    if name.startswith("_") or name == "output_text_buffer_length"
}
# Fields that are read beside `sampling_params`. `user` means nothing to an engine, and token ids are always returned.
ENVELOPE = {
    "cache_control",
    "cache_salt",
    "kv_retention",
    "kv_transfer_params",
    "model",
    "priority",
    "request_id",
    "return_token_ids",
    "sampling_params",
    "session_id",
    "stream",
    "stream_options",
    "token_ids",
    "user",
    "vllm_xargs",
}

_FIELD_AT_FAULT = re.compile(r"`\$\.(\w+)")


class GenerateRequest(GenerationFields):
    """A prompt as token ids, with the engine's own parameters."""

    token_ids: TokenIds
    sampling_params: dict[str, Any] = {}
    features: Any = None

    @model_validator(mode="after")
    def _check_place(self) -> GenerateRequest:
        for name in self.model_fields_set - ENVELOPE:
            field = type(self).model_fields.get(name)
            if field is None or getattr(self, name) == field.default:
                continue
            if name in SamplingParams.__struct_fields__:
                raise VLLMValidationError(f"{name} belongs into sampling_params", parameter=name)
            raise VLLMValidationError(f"{name} is not offered with token ids", parameter=name)
        return self


class GenerateChoice(BaseModel):
    """One sample, or a piece of it."""

    index: int
    token_ids: list[int]
    logprobs: list[dict[int, Any] | None] | LateJson | None = None
    finish_reason: str | None = None
    stop_reason: int | str | None = None


class GenerateResponse(BaseModel):
    """The samples, or pieces of them."""

    request_id: str
    choices: list[GenerateChoice]
    prompt_logprobs: list[dict[int, Any] | None] | LateJson | None = None
    prompt_token_id_logprobs: list[list[float | None]] | None = None
    kv_transfer_params: dict[str, Any] | None = None
    usage: UsageInfo | None = None


class AbortRequest(BaseModel):
    """Requests to end."""

    request_ids: Texts


def sampling_params_from(
    values: dict[str, Any], stream: bool, extra_args: dict[str, Any] | None = None
) -> SamplingParams:
    """The engine's parameters from a JSON object. Raises VLLMValidationError for what does not fit.

    `extra_args` are added to those of `values`.
    """
    kind = RequestOutputKind.DELTA if stream else RequestOutputKind.FINAL_ONLY
    if values.get("stop"):
        raise VLLMValidationError(
            "stop strings need text; use stop_token_ids", parameter="sampling_params.stop"
        )
    for name in values:
        if name in COMPUTED_PARAMS:
            raise VLLMValidationError("the engine sets it", parameter=f"sampling_params.{name}")
        if name not in SamplingParams.__struct_fields__:
            near = get_close_matches(name, SamplingParams.__struct_fields__, n=1)
            hint = f"; did you mean {near[0]!r}?" if near else ""
            raise VLLMValidationError(
                f"there is no such parameter{hint}", parameter=f"sampling_params.{name}"
            )
    fixed = {"output_kind": int(kind), "detokenize": False}
    try:
        params = msgspec.convert({**values, **fixed}, SamplingParams, str_keys=True)
    except msgspec.ValidationError as error:
        field = _FIELD_AT_FAULT.search(str(error))
        name = f"sampling_params.{field[1]}" if field else "sampling_params"
        raise VLLMValidationError(f"sampling_params: {error}", parameter=name) from None
    # How positions are kept does not show in a reply.
    params.flat_logprobs = False
    if extra_args is not None:
        params.extra_args = {**(params.extra_args or {}), **extra_args}
    return params


def _choice(completion: CompletionOutput) -> GenerateChoice:
    logprobs = None
    if completion.logprobs is not None:
        logprobs = positions_body(
            completion.logprobs,
            lambda entry: {"logprob": max(entry.logprob, LOGPROB_MIN), "rank": entry.rank},
        )
    return GenerateChoice(
        index=completion.index,
        token_ids=list(completion.token_ids),
        logprobs=logprobs,
        finish_reason=completion.finish_reason,
        stop_reason=completion.stop_reason,
    )


def _response(request_id: str, output: RequestOutput) -> GenerateResponse:
    scores = output.prompt_token_id_logprobs
    return GenerateResponse(
        request_id=request_id,
        choices=[_choice(completion) for completion in output.outputs],
        prompt_logprobs=prompt_logprobs_body(output) or None,
        prompt_token_id_logprobs=None if scores is None else [[_number(x) for x in row] for row in scores],
        kv_transfer_params=output.kv_transfer_params if output.finished else None,
    )


def _number(logprob: float) -> float | None:
    """A log probability as JSON can have it; None if it is no number."""
    return None if math.isnan(logprob) else max(logprob, LOGPROB_MIN)


async def generate(
    request: GenerateRequest, endpoint: OpenAIServingCompletion, raw_request: Request
) -> GenerateResponse | AsyncGenerator[str, None]:
    """The whole reply or an event stream. Raises VLLMError for what cannot be served."""
    endpoint.check_request(request)
    caller = Caller.from_request(raw_request)
    params = sampling_params_from(request.sampling_params, request.stream, request.extra_args())
    request_id = request.request_id or endpoint.new_id("gen", request, caller)
    stream = endpoint.generate(RenderedPrompt(request.token_ids, None), params, request_id, request, caller)
    outputs = await endpoint.start([stream])
    if request.stream:
        return guarded_stream(_stream(request, request_id, outputs, endpoint))
    response = GenerateResponse(request_id=request_id, choices=[])
    async with aclosing(outputs.read()) as items:
        async for _, output in items:
            check_finish(output)
            response = _response(request_id, output)
    return response


async def _stream(
    request: GenerateRequest,
    request_id: str,
    outputs: Primed[tuple[int, RequestOutput]],
    endpoint: OpenAIServingCompletion,
) -> AsyncGenerator[str, None]:
    usage = UsageCounter(endpoint.options.enable_prompt_tokens_details)
    choice = endpoint.usage_choice(request)
    async with aclosing(outputs.read()) as items:
        async for _, output in items:
            check_finish(output)
            usage.see_prompt(0, output)
            for completion in output.outputs:
                usage.add_generated(0, completion.index, len(completion.token_ids))
            chunk = _response(request_id, output)
            if choice.continuous:
                chunk.usage = usage.usage()
            yield await sse_event(chunk)
    if choice.final:
        final = GenerateResponse(request_id=request_id, choices=[])
        final.usage = usage.usage()
        yield await sse_event(final)


@router.post("/inference/v1/generate")
async def generate_route(request: GenerateRequest, raw_request: Request) -> Response:
    """Token ids → token ids."""
    state = serving(raw_request)
    return await reply(generate(request, state.completion, raw_request), raw_request, state.keep_alive_s)


@router.post("/inference/v1/abort_requests")
async def abort_route(request: AbortRequest, raw_request: Request) -> Response:
    """End requests; unknown ids are ignored."""
    await serving(raw_request).engine_client.abort(request.request_ids)
    return JSONResponse({"status": "aborted", "aborted": len(request.request_ids)})
