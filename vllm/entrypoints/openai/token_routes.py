"""Token ids in, token ids out: `/inference/v1/generate` and `/inference/v1/abort_requests`. Layer: L8.

For callers that tokenise themselves, such as routers and trainers.
"""

from __future__ import annotations

from collections.abc import AsyncGenerator
from contextlib import aclosing
from typing import Any

import msgspec
from fastapi import APIRouter, Request
from fastapi.responses import JSONResponse, Response
from pydantic import BaseModel

from vllm.entrypoints.openai.bodies import StrictRoute
from vllm.entrypoints.openai.completion.serving import OpenAIServingCompletion
from vllm.entrypoints.openai.fan_in import Primed
from vllm.entrypoints.openai.field_types import Texts, TokenIds
from vllm.entrypoints.openai.render import RenderedPrompt
from vllm.entrypoints.openai.replies import reply
from vllm.entrypoints.openai.request_fields import GenerationFields, StreamOptions
from vllm.entrypoints.openai.serving_base import (
    LOGPROB_MIN,
    Caller,
    check_finish,
    guarded_stream,
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


class GenerateRequest(GenerationFields):
    """A prompt as token ids, with the engine's own parameters."""

    token_ids: TokenIds
    sampling_params: dict[str, Any] = {}
    stream_options: StreamOptions | None = None


class GenerateChoice(BaseModel):
    """One sample, or a piece of it."""

    index: int
    token_ids: list[int]
    logprobs: list[dict[int, Any]] | None = None
    finish_reason: str | None = None
    stop_reason: int | str | None = None


class GenerateResponse(BaseModel):
    """The samples, or pieces of them."""

    request_id: str
    choices: list[GenerateChoice]
    prompt_logprobs: list[dict[int, Any] | None] | None = None
    kv_transfer_params: dict[str, Any] | None = None
    usage: UsageInfo | None = None


class AbortRequest(BaseModel):
    """Requests to end."""

    request_ids: Texts


def sampling_params_from(values: dict[str, Any], stream: bool) -> SamplingParams:
    """The engine's parameters from a JSON object. Raises VLLMValidationError for what does not fit."""
    kind = RequestOutputKind.DELTA if stream else RequestOutputKind.FINAL_ONLY
    if values.get("stop"):
        raise VLLMValidationError(
            "stop strings need text; use stop_token_ids", parameter="sampling_params.stop"
        )
    for name in values:
        if name in COMPUTED_PARAMS:
            raise VLLMValidationError("the engine sets it", parameter=f"sampling_params.{name}")
    try:
        return msgspec.convert({**values, "output_kind": int(kind), "detokenize": False}, SamplingParams)
    except msgspec.ValidationError as error:
        raise VLLMValidationError(f"sampling_params: {error}", parameter="sampling_params") from None


def _choice(completion: CompletionOutput) -> GenerateChoice:
    logprobs = None
    if completion.logprobs is not None:
        logprobs = [
            {
                token_id: {"logprob": max(entry.logprob, LOGPROB_MIN), "rank": entry.rank}
                for token_id, entry in position.items()
            }
            for position in completion.logprobs
        ]
    return GenerateChoice(
        index=completion.index,
        token_ids=list(completion.token_ids),
        logprobs=logprobs,
        finish_reason=completion.finish_reason,
        stop_reason=completion.stop_reason,
    )


async def generate(
    request: GenerateRequest, endpoint: OpenAIServingCompletion, raw_request: Request
) -> GenerateResponse | AsyncGenerator[str, None]:
    """The whole reply or an event stream. Raises VLLMError for what cannot be served."""
    endpoint.check_request(request)
    caller = Caller.from_request(raw_request)
    params = sampling_params_from(request.sampling_params, request.stream)
    request_id = request.request_id or endpoint.new_id("gen", request, caller)
    stream = endpoint.generate(RenderedPrompt(request.token_ids, None), params, request_id, request, caller)
    outputs = await endpoint.start([stream])
    if request.stream:
        return guarded_stream(_stream(request, request_id, outputs, endpoint))
    response = GenerateResponse(request_id=request_id, choices=[])
    async with aclosing(outputs.read()) as items:
        async for _, output in items:
            check_finish(output)
            response.choices = [_choice(completion) for completion in output.outputs]
            response.prompt_logprobs = prompt_logprobs_body(output)
            response.kv_transfer_params = output.kv_transfer_params
    return response


async def _stream(
    request: GenerateRequest,
    request_id: str,
    outputs: Primed[tuple[int, RequestOutput]],
    endpoint: OpenAIServingCompletion,
) -> AsyncGenerator[str, None]:
    usage = UsageCounter(endpoint.options.enable_prompt_tokens_details)
    async with aclosing(outputs.read()) as items:
        async for _, output in items:
            check_finish(output)
            usage.see_prompt(0, output)
            for completion in output.outputs:
                usage.add_generated(0, completion.index, len(completion.token_ids))
            chunk = GenerateResponse(request_id=request_id, choices=[_choice(c) for c in output.outputs])
            if output.kv_transfer_params is not None and output.finished:
                chunk.kv_transfer_params = output.kv_transfer_params
            yield sse_event(chunk)
    if endpoint.usage_choice(request).final:
        final = GenerateResponse(request_id=request_id, choices=[])
        final.usage = usage.usage()
        yield sse_event(final)


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
