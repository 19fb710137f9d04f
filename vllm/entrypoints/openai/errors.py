"""Error bodies: one shape and one stable `type` per HTTP status, whatever went wrong. Layer: L8.

Owns the mapping from exceptions to bodies and the cleaning of messages. Must not know any route.
"""

from __future__ import annotations

import re
import reprlib
from collections.abc import Iterable, Mapping
from http import HTTPStatus
from typing import Any

from fastapi import Request
from fastapi.exceptions import RequestValidationError
from fastapi.responses import JSONResponse
from pydantic import BaseModel, ValidationError
from starlette.exceptions import HTTPException

from vllm.entrypoints.openai.bodies import BodyRefusal
from vllm.exceptions import VLLMError
from vllm.logger import init_logger
from vllm.v1.engine.exceptions import EngineDeadError

logger = init_logger(__name__)

VALIDATION_ENTRIES_MAX = 10
MESSAGE_CHARACTERS_MAX = 2000
RETRY_AFTER_S = 1
_TYPES = {
    400: "BadRequestError",
    401: "AuthenticationError",
    403: "PermissionDeniedError",
    404: "NotFoundError",
    405: "MethodNotAllowedError",
    413: "PayloadTooLargeError",
    422: "UnprocessableEntityError",
    500: "InternalServerError",
    501: "NotImplementedError",
    503: "ServiceUnavailableError",
}
_ADDRESS = re.compile(r"\s*(?:\bat\s+)?0x[0-9a-fA-F]{6,}")
# An absolute path of at least two parts; the server's own routes are no secret.
_PATH = re.compile(r"(?<![\w/:.])/(?!v\d/|inference/)(?:[\w.+@-]+/)+[\w.+@-]+")


# How the schema library names the alternatives of a field.
_FORM = re.compile(
    r"str|int|float|bool|none|(?:list|dict|literal|function-\w+|constrained-\w+)\[.*\]|[A-Z]\w+", re.DOTALL
)

# A refused value can be as long as a body.
_SHORT = reprlib.Repr()
_SHORT.maxstring = _SHORT.maxother = 80


class ErrorLog:
    """Whether the stack of every server error's reply is logged (`--log-error-stack`), not only of unexpected ones.

    What a client did wrong is in its reply, and no stack of ours says more.
    """

    every_stack = False


class ErrorInfo(BaseModel):
    """What went wrong. `param` is the request field at fault, if one is."""

    message: str
    type: str
    param: str | None = None
    code: int


class ErrorResponse(BaseModel):
    """Body of every error reply."""

    error: ErrorInfo


def error_type(status: int) -> str:
    """The `type` that always goes with an HTTP status."""
    return _TYPES.get(status, "BadRequestError" if status < 500 else "InternalServerError")


def clean_message(message: str) -> str:
    """`message` without memory addresses and file-system paths, which are nobody's business outside; a long one cut."""
    cleaned = _PATH.sub("<path>", _ADDRESS.sub("", message[: 2 * MESSAGE_CHARACTERS_MAX]))
    cleaned = cleaned.encode(errors="replace").decode()
    return cleaned if len(cleaned) <= MESSAGE_CHARACTERS_MAX else cleaned[:MESSAGE_CHARACTERS_MAX] + " …"


def create_error_response(
    message: str | BaseException,
    err_type: str | None = None,
    status_code: int | HTTPStatus = HTTPStatus.BAD_REQUEST,
    param: str | None = None,
) -> ErrorResponse:
    """The body for a message, or for an exception (which knows its own status and field).

    An unexpected exception is logged with its stack trace.
    """
    if isinstance(message, BaseException):
        error = message
        status_code, param, message = _describe(error)
        expected = isinstance(error, VLLMError | EngineDeadError) and not ErrorLog.every_stack
        if status_code >= 500 and not expected:
            logger.error("A request failed with status %d", status_code, exc_info=error)
    status = int(status_code)
    info = ErrorInfo(
        message=clean_message(message), type=err_type or error_type(status), param=param, code=status
    )
    return ErrorResponse(error=info)


def _describe(error: BaseException) -> tuple[int, str | None, str]:
    """(status, field, message) of an exception."""
    if isinstance(error, VLLMError):
        return error.http_status, error.parameter, str(error)
    if isinstance(error, EngineDeadError):
        return 500, None, str(error)
    if isinstance(error, RequestValidationError | ValidationError):
        return 400, _first_field(error.errors()), describe_validation(error.errors())
    if isinstance(error, BodyRefusal):
        return error.status_code, error.parameter, str(error.detail)
    if isinstance(error, HTTPException):
        return error.status_code, None, str(error.detail)
    return 500, None, "Internal server error"


def _field(location: Iterable[Any]) -> str:
    """The field as its sender knows it: without the part of the request, and without the forms that a field may have."""
    parts = [str(part) for part in location]
    if parts and parts[0] in ("body", "query", "path", "header"):
        del parts[0]
    return ".".join(part for part in parts if _FORM.fullmatch(part) is None)


def _first_field(errors: Iterable[Mapping[str, Any]]) -> str | None:
    for entry in errors:
        name = _field(entry.get("loc", ()))
        if name and entry.get("type") != "json_invalid":
            return name
    return None


def describe_validation(errors: Iterable[Mapping[str, Any]]) -> str:
    """Up to ten schema violations in words, each with its field and the value that was given."""
    entries = list(errors)
    lines = []
    for entry in entries[:VALIDATION_ENTRIES_MAX]:
        lines.append(_describe_entry(entry))
    if len(entries) > VALIDATION_ENTRIES_MAX:
        lines.append(f"and {len(entries) - VALIDATION_ENTRIES_MAX} more")
    return "; ".join(lines)


def _describe_entry(entry: Mapping[str, Any]) -> str:
    if entry.get("type") == "json_invalid":
        detail = entry.get("ctx", {}).get("error", entry.get("msg"))
        return f"the request body is not valid JSON: {detail}"
    if isinstance(entry.get("input"), bytes):
        return "the request body must be a JSON object, sent with Content-Type: application/json"
    name = _field(entry.get("loc", ()))
    value = "" if entry.get("type") == "missing" else f" (got {_SHORT.repr(entry.get('input'))[:80]})"
    return f"{name}: {entry.get('msg')}{value}" if name else f"{entry.get('msg')}{value}"


def to_http_response(body: ErrorResponse) -> JSONResponse:
    """The HTTP reply with the status that the body states."""
    status = body.error.code
    headers = {"Retry-After": str(RETRY_AFTER_S)} if status == 503 else None
    return JSONResponse(body.model_dump(), status_code=status, headers=headers)


def error_reply(error: BaseException) -> JSONResponse:
    """The HTTP reply for an exception."""
    return to_http_response(create_error_response(error))


async def validation_exception_handler(request: Request, exc: RequestValidationError) -> JSONResponse:
    """FastAPI handler: the body does not fit the schema of its route."""
    return error_reply(exc)


async def http_exception_handler(request: Request, exc: HTTPException) -> JSONResponse:
    """FastAPI handler: no such route or method, or a refusal by the framework.

    `app.state.development_paths` are those that exist only in development mode, and not now.
    """
    path = request.url.path.removeprefix(request.scope.get("root_path", ""))
    if exc.status_code == 404 and path in request.app.state.development_paths:
        text = f"{path} is a development route: start the server with VLLM_SERVER_DEV_MODE=1"
        return error_reply(HTTPException(404, text))
    return error_reply(exc)


async def exception_handler(request: Request, exc: Exception) -> JSONResponse:
    """FastAPI handler: everything else."""
    return error_reply(exc)
