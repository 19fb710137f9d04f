"""The routes that every server has: generation, models, tokens, health and figures. Layer: L8."""

from __future__ import annotations

from typing import Any

from fastapi import APIRouter, Request
from fastapi.responses import JSONResponse, Response
from prometheus_client import CONTENT_TYPE_LATEST, REGISTRY, generate_latest

from vllm.entrypoints.openai.bodies import StrictRoute
from vllm.entrypoints.openai.chat_completion.protocol import BatchChatCompletionRequest, ChatCompletionRequest
from vllm.entrypoints.openai.completion.protocol import CompletionRequest
from vllm.entrypoints.openai.errors import create_error_response, to_http_response
from vllm.entrypoints.openai.replies import reply
from vllm.entrypoints.openai.state import serving
from vllm.entrypoints.openai.tokenization import (
    DetokenizeRequest,
    TokenizeRequest,
    detokenize,
    tokenize,
    tokenizer_info,
)
from vllm.v1.engine.exceptions import EngineDeadError
from vllm.version import __version__

router = APIRouter(route_class=StrictRoute)
tokenizer_router = APIRouter(route_class=StrictRoute)


@router.post("/v1/completions")
async def create_completion(request: CompletionRequest, raw_request: Request) -> Response:
    """Continuations of prompts."""
    state = serving(raw_request)
    work = state.completion.create_completion(request, raw_request)
    return await reply(work, raw_request, state.keep_alive_s)


@router.post("/v1/chat/completions")
async def create_chat_completion(request: ChatCompletionRequest, raw_request: Request) -> Response:
    """The next message of a conversation."""
    state = serving(raw_request)
    work = state.chat.create_chat_completion(request, raw_request)
    return await reply(work, raw_request, state.keep_alive_s)


@router.post("/v1/chat/completions/batch")
async def create_chat_batch(request: BatchChatCompletionRequest, raw_request: Request) -> Response:
    """The next messages of several conversations."""
    return await reply(serving(raw_request).chat.create_batch(request, raw_request), raw_request)


@router.get("/v1/models")
async def show_models(raw_request: Request) -> Response:
    """The served names."""
    models = await serving(raw_request).models.show_available_models()
    return JSONResponse(models.model_dump())


@router.post("/tokenize")
async def tokenize_route(request: TokenizeRequest, raw_request: Request) -> Response:
    """Text or conversation → token ids."""
    state = serving(raw_request)
    return await reply(tokenize(request, state.models, state.renderer), raw_request)


@router.post("/detokenize")
async def detokenize_route(request: DetokenizeRequest, raw_request: Request) -> Response:
    """Token ids → text."""
    state = serving(raw_request)
    return await reply(detokenize(request, state.models, state.renderer), raw_request)


@tokenizer_router.get("/tokenizer_info")
async def tokenizer_info_route(raw_request: Request) -> Response:
    """What is known about the tokenizer."""
    return JSONResponse(tokenizer_info(serving(raw_request).renderer).model_dump())


@router.get("/health")
async def health(raw_request: Request) -> Response:
    """200 while the engine lives, else 503."""
    try:
        await serving(raw_request).engine_client.check_health()
    except EngineDeadError as error:
        return to_http_response(create_error_response(str(error), status_code=503))
    return Response(status_code=200)


@router.get("/ping")
@router.post("/ping")
async def ping(raw_request: Request) -> Response:
    """The same as /health."""
    return await health(raw_request)


@router.get("/version")
async def version() -> dict[str, str]:
    """The version of the interface."""
    return {"version": __version__}


@router.get("/load")
async def load(raw_request: Request) -> Response:
    """Generating requests in flight; needs --enable-server-load-tracking."""
    state = serving(raw_request)
    if not state.tracks_load:
        return to_http_response(
            create_error_response(
                "the load is counted only with --enable-server-load-tracking", status_code=501
            )
        )
    return JSONResponse({"server_load": state.load.in_flight})


@router.get("/metrics")
async def metrics() -> Response:
    """Prometheus text."""
    return Response(generate_latest(REGISTRY), media_type=CONTENT_TYPE_LATEST)


@router.get("/kv_event_sources")
async def kv_event_sources(raw_request: Request) -> dict[str, Any]:
    """Where each engine publishes its KV events, and how the hashes in them are made; empty if none does."""
    sources: dict[str, Any] = await serving(raw_request).engine_client.get_kv_event_sources()
    return sources
