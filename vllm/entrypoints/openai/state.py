"""What the routes of one server share. Built once by `api_server`, read through `request.app.state.serving`. Layer: L8."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from fastapi import Request

from vllm.entrypoints.openai.chat_completion.serving import OpenAIServingChat
from vllm.entrypoints.openai.completion.serving import OpenAIServingCompletion
from vllm.entrypoints.openai.middleware import ServerLoad
from vllm.entrypoints.openai.models.serving import OpenAIServingModels
from vllm.entrypoints.openai.render import OnlineRenderer


@dataclass
class ServingState:
    """Engine, endpoints and flags of one server. `engine_client` is an `AsyncLLM` or what behaves like one."""

    engine_client: Any
    models: OpenAIServingModels
    renderer: OnlineRenderer
    completion: OpenAIServingCompletion
    chat: OpenAIServingChat
    load: ServerLoad = field(default_factory=ServerLoad)
    tracks_load: bool = False
    keep_alive_s: float = 0.0


def serving(request: Request) -> ServingState:
    """The state of the app that serves `request`."""
    state: ServingState = request.app.state.serving
    return state
