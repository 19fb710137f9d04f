"""Paths of the public interface that this server does not offer: a clear 501 instead of a puzzling 404. Layer: L8."""

from __future__ import annotations

from typing import Final

from fastapi import APIRouter
from fastapi.responses import Response

from vllm.entrypoints.openai.errors import create_error_response, to_http_response

_POOLING: Final = "pooling models are not part of this build"
_AUDIO: Final = "audio models are not part of this build"
_LORA: Final = "LoRA adapters are not part of this build"
_ONE_ENGINE: Final = "one server runs one engine"
_RENDER: Final = "use /tokenize, or return_token_ids in a request"

PATHS: Final = {
    "/v1/responses": "use /v1/chat/completions",
    "/v1/responses/{response_id}/cancel": "responses are not stored",
    "/v1/messages": "use /v1/chat/completions",
    "/v1/messages/count_tokens": "use /tokenize",
    **{
        f"/v1/{endpoint}/{action}": _RENDER
        for endpoint in ("completions", "chat/completions", "messages", "responses")
        for action in ("render", "derender")
    },
    "/invocations": "use the route of the endpoint itself",
    "/v1/audio/transcriptions": _AUDIO,
    "/v1/audio/translations": _AUDIO,
    "/v1/embeddings": _POOLING,
    "/v2/embed": _POOLING,
    "/pooling": _POOLING,
    "/classify": _POOLING,
    "/score": _POOLING,
    "/v1/score": _POOLING,
    "/rerank": _POOLING,
    "/v1/rerank": _POOLING,
    "/v2/rerank": _POOLING,
    "/v1/load_lora_adapter": _LORA,
    "/v1/unload_lora_adapter": _LORA,
    "/scale_elastic_ep": _ONE_ENGINE,
    "/is_scaling_elastic_ep": _ONE_ENGINE,
    "/start_profile": "there is no built-in profiler",
    "/stop_profile": "there is no built-in profiler",
}

router = APIRouter(include_in_schema=False)


def _refuse(path: str, reason: str, method: str = "POST") -> None:
    async def refuse() -> Response:
        return to_http_response(create_error_response(f"{path} is not offered: {reason}", status_code=501))

    router.add_api_route(path, refuse, methods=[method])


for _path, _reason in PATHS.items():
    _refuse(_path, _reason)
_refuse("/v1/responses/{response_id}", "responses are not stored", "GET")
