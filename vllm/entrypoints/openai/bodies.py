"""Request bodies, read strictly: what JSON can spell but no part behind the routes could carry is refused here. Layer: L8.

Unpaired surrogates are no text (they cannot be encoded), integers beyond 64 bits and very deep nesting cannot be sent to
the engine, NaN and infinities are no JSON. All are reported like any other syntax error.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Coroutine
from typing import Any, NoReturn

from fastapi import Request, Response
from fastapi.routing import APIRoute

# Only bodies in which these occur are looked into: an escape of a surrogate, an integer of 19 digits and more.
_SUSPECT = re.compile(rb"\\u[dD][89a-fA-F]|\d{19}")
_INTEGERS = range(-(2**63), 2**64)
# Copying and encoding recurse a few frames per level.
DEPTH_MAX = 128


def parse_body(raw: bytes) -> Any:
    """The value of a JSON text.

    Raises:
        json.JSONDecodeError: it is no JSON, or holds something that cannot be carried.
    """
    try:
        value = json.loads(raw, parse_constant=_refuse_constant)
        if _SUSPECT.search(raw) or raw.count(b"[") + raw.count(b"{") > DEPTH_MAX:
            _check(value, 0)
    except json.JSONDecodeError:
        raise
    except RecursionError:
        raise _refusal("it is nested too deeply") from None
    except ValueError as error:  # a wrong encoding, an integer of thousands of digits, or a refusal of ours
        raise _refusal(str(error)) from None
    return value


def _refusal(reason: str) -> json.JSONDecodeError:
    return json.JSONDecodeError(reason, "", 0)


def _refuse_constant(name: str) -> NoReturn:
    raise ValueError(f"{name} is not a JSON number")


def _check(value: Any, depth: int) -> None:
    """Raises ValueError for text, integers or nesting anywhere in `value` that cannot be carried."""
    if depth > DEPTH_MAX:
        raise ValueError(f"it is nested more than {DEPTH_MAX} levels deep")
    if isinstance(value, str):
        _check_text(value)
    elif isinstance(value, int):
        if value not in _INTEGERS:
            raise ValueError("an integer does not fit into 64 bits")
    elif isinstance(value, list):
        for item in value:
            _check(item, depth + 1)
    elif isinstance(value, dict):
        for key, item in value.items():
            _check_text(key)
            _check(item, depth + 1)


def _check_text(text: str) -> None:
    try:
        text.encode()
    except UnicodeEncodeError as error:
        surrogate = f"\\u{ord(text[error.start]):04x}"
        raise ValueError(f"text holds the unpaired surrogate {surrogate}") from None


class StrictRequest(Request):
    """A request whose JSON body is read by `parse_body`."""

    async def json(self) -> Any:
        """The body's value, parsed once."""
        if not hasattr(self, "_json"):
            self._json = parse_body(await self.body())
        return self._json


class StrictRoute(APIRoute):
    """A route that reads its body strictly: the kind of every route that takes one."""

    def get_route_handler(self) -> Callable[[Request], Coroutine[Any, Any, Response]]:
        """The handler, given a strict request."""
        handler = super().get_route_handler()

        async def strict(request: Request) -> Response:
            return await handler(StrictRequest(request.scope, request.receive))

        return strict
