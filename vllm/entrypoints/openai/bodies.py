"""Request bodies, read strictly: what JSON can spell but no part behind the routes could carry is refused here. Layer: L8.

Unpaired surrogates are no text (they cannot be encoded), integers beyond 64 bits and very deep nesting cannot be sent to
the engine, NaN and infinities are no JSON. All are reported like a syntax error, with the place in the body. Large bodies are read in a
thread by a quicker reader, so that streams of others go on, and must not hold more values than can be looked at quickly.
Queries of control routes are read as strictly: a name that is unknown, or a body where none is taken, was meant to change
something.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import math
import re
from collections.abc import Callable, Coroutine
from typing import Any, get_args, get_origin

import msgspec
from fastapi import Request, Response
from fastapi.routing import APIRoute
from starlette.exceptions import HTTPException

from vllm.exceptions import VLLMValidationError

# Only bodies in which these occur are looked into: an escape of a surrogate, a number of 19 digits and more or with a large
# exponent, the names of what is no number.
_SUSPECT = re.compile(rb"\\u[dD][89a-fA-F]|\d{19}|\d[eE]\+?\d{3}|NaN|Infinity")
_INTEGERS = range(-(2**63), 2**64)
# Copying and encoding recurse a few frames per level.
DEPTH_MAX = 128
# Levels of a place that are told.
PLACE_PARTS_MAX = 8
# Bytes up to which a body is read without leaving the event loop.
INLINE_BODY_MAX = 1 << 16
# Of one body: a million token ids are read in a moment, a million objects are not.
VALUES_MAX = 1 << 20
CONTAINERS_MAX = 1 << 15
# Bodies that say nothing; clients send them with calls that take none.
EMPTY_BODIES = (b"", b"{}", b"null")
_TEXT_OR_MARK = re.compile(rb'"[^"\\]*(?:\\.[^"\\]*)*"|[\[{,\]}]', re.DOTALL)


class UnfitValue(json.JSONDecodeError):
    """Something in a body cannot be carried; `place` says where, "" for the body itself."""

    def __init__(self, reason: str, place: str) -> None:
        super().__init__(f"{place}: {reason}" if place else reason, "", 0)
        self.place = place


class BodyRefusal(HTTPException):
    """The reply to it. `parameter` is the field at fault, if it is known."""

    def __init__(self, message: str, parameter: str | None) -> None:
        super().__init__(400, f"the request body is not valid JSON: {message}")
        self.parameter = parameter


def body_bytes_default(max_model_len: int) -> int:
    """Bytes of the largest body that is accepted if no size was set: batches, tools and the longest prompt many times."""
    return min(32 << 20, (4 << 20) + 128 * max_model_len)


def parse_body(raw: bytes) -> Any:
    """The value of a JSON text.

    Raises:
        json.JSONDecodeError: it is no JSON, or holds something that cannot be carried.
    """
    try:
        value = json.loads(raw)
        if _SUSPECT.search(raw) or raw.count(b"[") + raw.count(b"{") > DEPTH_MAX:
            _check(value)
    except json.JSONDecodeError:
        raise
    except RecursionError:
        raise _refusal("it is nested too deeply") from None
    except ValueError as error:  # a wrong encoding, an integer of thousands of digits, or a refusal of ours
        raise _refusal(str(error)) from None
    return value


def parse_large_body(raw: bytes) -> Any:
    """Like `parse_body`, quickly and without holding other threads up for long.

    Raises:
        json.JSONDecodeError: as `parse_body`.
        HTTPException: the body holds too many values (413).
    """
    encoding = json.detect_encoding(raw)
    if encoding != "utf-8":
        with contextlib.suppress(UnicodeDecodeError):
            raw = raw.decode(encoding, "surrogatepass").encode("utf-8", "surrogatepass")
    _refuse_too_many(raw)
    try:
        value = msgspec.json.decode(raw)
        if _SUSPECT.search(raw) or raw.count(b"[") + raw.count(b"{") > DEPTH_MAX:
            _check(value)
    except (msgspec.MsgspecError, ValueError, RecursionError):
        # The fault is told in the usual words.
        return parse_body(raw)
    return value


def _refuse_too_many(raw: bytes) -> None:
    """Count what stands outside of texts, if all of it could be too much."""
    if raw.count(b",") <= VALUES_MAX and raw.count(b"[") + raw.count(b"{") <= CONTAINERS_MAX:
        return
    values = containers = depth = 0
    for match in _TEXT_OR_MARK.finditer(raw):
        mark = raw[match.start()]
        values += mark == ord(",")
        containers += mark in b"[{"
        depth += (mark in b"[{") - (mark in b"]}")
        if depth > DEPTH_MAX:
            raise _refusal(f"it is nested more than {DEPTH_MAX} levels deep")
        if values > VALUES_MAX or containers > CONTAINERS_MAX:
            raise HTTPException(
                413,
                f"The request body holds too many values: at most {VALUES_MAX}, {CONTAINERS_MAX} of them objects and lists",
            )


def _refusal(reason: str) -> json.JSONDecodeError:
    return json.JSONDecodeError(reason, "", 0)


def _check(value: Any) -> None:
    """Raises UnfitValue for text, numbers or nesting anywhere in `value` that cannot be carried."""
    found = _unfit(value, 0)
    if found is not None:
        reason, place = found
        raise UnfitValue(reason, ".".join(reversed(place)))


def _unfit(value: Any, depth: int) -> tuple[str, list[str]] | None:
    """What is wrong with the first value that cannot be carried, and its place from the inside out; None if all can."""
    if depth > DEPTH_MAX:
        return f"it is nested more than {DEPTH_MAX} levels deep", []
    if isinstance(value, str):
        return _unfit_text(value)
    if isinstance(value, int):
        return None if value in _INTEGERS else ("an integer does not fit into 64 bits", [])
    if isinstance(value, float):
        return None if math.isfinite(value) else (f"{json.dumps(value)} is not a JSON number", [])
    entries = (
        enumerate(value) if isinstance(value, list) else value.items() if isinstance(value, dict) else ()
    )
    for name, item in entries:
        found = (_unfit_text(name) if isinstance(name, str) else None) or _unfit(item, depth + 1)
        if found is not None:
            # A place that cannot be written, or is deeper than anyone reads, is left out.
            if depth < PLACE_PARTS_MAX and not (isinstance(name, str) and _unfit_text(name)):
                found[1].append(str(name))
            return found
    return None


def _unfit_text(text: str) -> tuple[str, list[str]] | None:
    try:
        text.encode()
    except UnicodeEncodeError as error:
        return f"text holds the unpaired surrogate \\u{ord(text[error.start]):04x}", []
    return None


class StrictRequest(Request):
    """A request whose JSON body is read by `parse_body`."""

    async def json(self) -> Any:
        """The body's value, parsed once."""
        if not hasattr(self, "_json"):
            raw = await self.body()
            try:
                if len(raw) <= INLINE_BODY_MAX:
                    self._json = parse_body(raw)
                else:
                    self._json = await asyncio.to_thread(parse_large_body, raw)
            except UnfitValue as error:
                raise BodyRefusal(error.msg, error.place or None) from None
        return self._json


class StrictRoute(APIRoute):
    """A route that reads its body strictly: the kind of every route that takes one."""

    def get_route_handler(self) -> Callable[[Request], Coroutine[Any, Any, Response]]:
        """The handler, given a strict request."""
        handler = super().get_route_handler()

        async def strict(request: Request) -> Response:
            return await handler(StrictRequest(request.scope, request.receive))

        return strict


class ControlRoute(StrictRoute):
    """A route of this engine's own: it also refuses what it would not look at, before it does anything.

    That is a query parameter that it does not take or takes but once, and a body where it takes none.
    """

    def get_route_handler(self) -> Callable[[Request], Coroutine[Any, Any, Response]]:
        """The handler, behind a look at the query and the body."""
        handler = super().get_route_handler()
        is_list = {
            field.alias: _is_list(field.field_info.annotation) for field in self.dependant.query_params
        }
        known = ", ".join(sorted(is_list)) or "none"
        takes_body = self.body_field is not None

        async def checked(request: Request) -> Response:
            given = request.query_params
            unknown = [name for name in given if name not in is_list]
            if unknown:
                raise VLLMValidationError(
                    f"unknown query parameter {', '.join(map(repr, unknown))}; this call takes {known}",
                    parameter=unknown[0],
                )
            for name in given:
                if not is_list[name] and len(given.getlist(name)) > 1:
                    raise VLLMValidationError(
                        f"query parameter {name!r} is given more than once", parameter=name
                    )
            if (
                not takes_body
                and request.method != "GET"
                and (await request.body()).strip() not in EMPTY_BODIES
            ):
                raise VLLMValidationError(f"this call takes no body; its query parameters: {known}")
            return await handler(request)

        return checked


def _is_list(annotation: Any) -> bool:
    return any(get_origin(part) is list for part in (annotation, *get_args(annotation)))
