"""Development routes (`VLLM_SERVER_DEV_MODE=1`): caches, pause, sleep, aborts, the server's configuration. Layer: L8."""

from __future__ import annotations

import dataclasses
import math
import os
import platform
import sys
from collections.abc import Awaitable, Callable
from functools import wraps
from typing import Annotated, Any, Literal

from fastapi import APIRouter, Query, Request
from fastapi.responses import JSONResponse, Response
from pydantic import BaseModel, Field

from vllm import envs
from vllm.entrypoints.openai.bodies import ControlRoute
from vllm.entrypoints.openai.errors import create_error_response, error_reply, to_http_response
from vllm.entrypoints.openai.field_types import QueryInt, Texts
from vllm.entrypoints.openai.state import serving
from vllm.logger import init_logger
from vllm.transformers_utils.config_record import ConfigRecord
from vllm.v1.engine.exceptions import UtilityRefusedError
from vllm.version import __version__

logger = init_logger(__name__)

router = APIRouter(route_class=ControlRoute)
PauseMode = Literal["abort", "wait", "keep"]
WakeTag = Literal["weights", "kv_cache", "scheduling"]
SECRETS = ("VLLM_API_KEY",)
RPC_TIMEOUT_MAX_S = 86_400.0
# What the engine calls in its own order; out of order they leave a server that only fails requests.
ENGINE_METHODS = frozenset(
    {
        "compile_or_warm_up_model",
        "execute_dummy_batch",
        "execute_method",
        "execute_model",
        "init_device",
        "init_worker",
        "initialize_from_config",
        "load_model",
        "sample_tokens",
        "shutdown",
        "sleep",
        "update_max_model_len",
        "wake_up",
    }
)


class RpcRequest(BaseModel):
    """A call of a worker method."""

    method: str | None = None
    args: list[Any] = Field(default_factory=list)
    kwargs: dict[str, Any] = Field(default_factory=dict)
    timeout: float | None = Field(default=None, gt=0, le=RPC_TIMEOUT_MAX_S)


class AbortRequest(BaseModel):
    """Requests to end, by the ids that clients know."""

    request_ids: Texts


def _answers_errors(route: Callable[..., Awaitable[Response]]) -> Callable[..., Awaitable[Response]]:
    """A failure in the engine becomes an error body that says why."""

    @wraps(route)
    async def guarded(*args: Any, **kwargs: Any) -> Response:
        try:
            return await route(*args, **kwargs)
        except UtilityRefusedError as error:
            return to_http_response(create_error_response(str(error)))
        except RuntimeError as error:  # how the engine reports that a control call failed
            return to_http_response(create_error_response(str(error), status_code=500))
        except Exception as error:
            return error_reply(error)

    return guarded


@router.post("/reset_prefix_cache")
async def reset_prefix_cache(
    raw_request: Request,
    reset_running_requests: bool = False,
    reset_external: bool = False,
    tiers: Annotated[list[str] | None, Query()] = None,
) -> Response:
    """Forget what is cached, on the device and, with `reset_external`, in the tiers below.

    `tiers`, given once for each, empties those alone; `reset_external` adds all below the device. 400 for one that is not
    there. Else always 200: `success` tells whether nothing is held any more, `reason` why not.
    """
    engine = serving(raw_request).engine_client
    try:
        report: dict[str, Any] = await engine.reset_prefix_cache_detailed(
            reset_running_requests, reset_external, tiers
        )
    except UtilityRefusedError as error:
        return to_http_response(create_error_response(str(error), param="tiers"))
    except Exception as error:
        logger.warning("Resetting the prefix cache failed: %s", error)
        report = {"success": False, "reason": str(error)}
    shown = _with_reason(report)
    if "engines" in report:
        shown["engines"] = [_with_reason(answer) for answer in report["engines"]]
    return JSONResponse(shown)


def _with_reason(report: dict[str, Any]) -> dict[str, Any]:
    """Null where there is nothing to say."""
    return {**report, "reason": report.get("reason") or None}


@router.post("/reset_mm_cache")
@_answers_errors
async def reset_mm_cache(raw_request: Request) -> Response:
    """Nothing is cached for media; kept for callers of the interface."""
    await serving(raw_request).engine_client.reset_mm_cache()
    return Response(status_code=200)


@router.post("/reset_encoder_cache")
@_answers_errors
async def reset_encoder_cache(raw_request: Request) -> Response:
    """Nothing is cached for encoders; kept for callers of the interface."""
    await serving(raw_request).engine_client.reset_encoder_cache()
    return Response(status_code=200)


@router.post("/sleep")
@_answers_errors
async def sleep(
    raw_request: Request, level: Annotated[QueryInt, Query(ge=0, le=2)] = 1, mode: PauseMode = "abort"
) -> Response:
    """Pause and give memory back."""
    await serving(raw_request).engine_client.sleep(level, mode)
    return JSONResponse({"status": "sleeping", "level": level})


@router.post("/wake_up")
@_answers_errors
async def wake_up(raw_request: Request, tags: Annotated[list[WakeTag] | None, Query()] = None) -> Response:
    """Take memory back and go on; with `tags`, those parts only."""
    engine = serving(raw_request).engine_client
    await engine.wake_up(tags)
    still_sleeping = await engine.is_sleeping()
    return JSONResponse({"status": "sleeping" if still_sleeping else "awake", "tags": tags or []})


@router.get("/is_sleeping")
@_answers_errors
async def is_sleeping(raw_request: Request) -> Response:
    """Whether the engine sleeps."""
    return JSONResponse({"is_sleeping": await serving(raw_request).engine_client.is_sleeping()})


@router.post("/release_kv_cache_memory")
@_answers_errors
async def release_kv_cache_memory(raw_request: Request) -> Response:
    """Give the KV cache's memory back; the engine must be paused."""
    await serving(raw_request).engine_client.release_kv_cache_memory()
    return JSONResponse({"status": "kv_cache_released"})


@router.post("/pause")
@_answers_errors
async def pause(raw_request: Request, mode: PauseMode = "abort", clear_cache: bool = True) -> Response:
    """Stop scheduling."""
    await serving(raw_request).engine_client.pause_generation(mode, clear_cache)
    return JSONResponse({"status": "paused"})


@router.post("/resume")
@_answers_errors
async def resume(raw_request: Request) -> Response:
    """Go on scheduling."""
    await serving(raw_request).engine_client.resume_generation()
    return JSONResponse({"status": "resumed"})


@router.get("/is_paused")
@_answers_errors
async def is_paused(raw_request: Request) -> Response:
    """Whether scheduling is stopped."""
    return JSONResponse({"is_paused": await serving(raw_request).engine_client.is_paused()})


@router.post("/abort_requests")
@_answers_errors
async def abort_requests(request: AbortRequest, raw_request: Request) -> Response:
    """End requests; unknown ids are ignored."""
    await serving(raw_request).engine_client.abort(request.request_ids)
    return JSONResponse({"status": "aborted", "aborted": len(request.request_ids)})


@router.post("/collective_rpc")
@_answers_errors
async def collective_rpc(request: RpcRequest, raw_request: Request) -> Response:
    """Call a method on every worker; results that are no JSON are shown as text."""
    if not request.method:
        return to_http_response(create_error_response("method is missing", param="method"))
    if request.method in ENGINE_METHODS:
        message = f"{request.method} is called by the engine itself, not over HTTP"
        return to_http_response(create_error_response(message, param="method"))
    engine = serving(raw_request).engine_client
    results = await engine.collective_rpc(
        request.method, request.timeout, tuple(request.args), request.kwargs
    )
    return JSONResponse({"results": [plain(result) for result in results]})


@router.get("/server_info")
@_answers_errors
async def server_info(raw_request: Request, config_format: Literal["text", "json"] = "text") -> Response:
    """The configuration, the environment variables of the engine, the machine, and the KV cache groups."""
    engine = serving(raw_request).engine_client
    config = engine.vllm_config
    groups = await engine.get_kv_cache_group_metadata()
    return JSONResponse(
        {
            "vllm_config": plain(config) if config_format == "json" else str(config),
            "vllm_env": {
                name: os.environ[name]
                for name in envs.VARIABLES
                if name in os.environ and name not in SECRETS
            },
            "system_env": system_info(),
            "kv_cache_groups": plain(groups),
        }
    )


def system_info() -> dict[str, str]:
    """Versions and machine, as in `vllm collect-env`."""
    return {"python": sys.version, "platform": platform.platform(), "vllm": __version__}


def plain(value: Any) -> Any:
    """A JSON value: records become objects, anything else that JSON lacks becomes text. Secret fields are left out."""
    if isinstance(value, float) and not math.isfinite(value):
        return str(value)
    if value is None or isinstance(value, bool | int | float | str):
        return value
    if isinstance(value, ConfigRecord):
        return plain(value.to_dict())
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        shown = [field.name for field in dataclasses.fields(value) if field.repr]
        return {name: plain(getattr(value, name)) for name in shown}
    if isinstance(value, dict):
        return {str(key): plain(item) for key, item in value.items()}
    if isinstance(value, list | tuple | set | frozenset):
        return [plain(item) for item in value]
    return str(value)
