"""Types of request fields that may be long, checked without a walk that holds the server up. Layer: L8.

The schema library takes a good look at every item, and lists every item that is wrong. A list of a million token ids is
looked at as a whole here, and at most one item of a list is reported.
"""

from __future__ import annotations

import re
from typing import Annotated, Any

from pydantic import (
    BeforeValidator,
    Field,
    PlainValidator,
    ValidatorFunctionWrapHandler,
    WithJsonSchema,
    WrapValidator,
)

from vllm import envs

# Lists up to this length are left to the schema library whatever they hold, which converts "5" and 5.0 to 5.
CONVERTED_ITEMS_MAX = 4096
XARGS_MAX = 1024
LOGIT_BIASES_MAX = 65_536


# What `int` also reads, "1_0", "+1", " 1" or digits of other scripts, is a slip in a header or a query. At most 64 bits.
_PLAIN_NUMBER = re.compile(r"-?[0-9]{1,18}")


def plain_int(text: str) -> int:
    """The number that a header or a query states. Raises ValueError for anything but ASCII digits behind at most a minus."""
    if _PLAIN_NUMBER.fullmatch(text) is None:
        raise ValueError(f"must be an integer, got {text!r}")
    return int(text)


QueryInt = Annotated[
    int, BeforeValidator(lambda value: plain_int(value) if isinstance(value, str) else value)
]
"""An integer in a query."""


def _holds_only(items: Any, kind: type) -> bool:
    return type(items) is list and set(map(type, items)) <= {kind}


def _refuse_booleans(items: Any) -> None:
    """The schema library takes true for 1."""
    if type(items) is list and bool in set(map(type, items)):
        raise ValueError("token ids must be integers, not booleans")


def _check_ids(value: Any, check: ValidatorFunctionWrapHandler) -> Any:
    _refuse_booleans(value)
    return value if _holds_only(value, int) else check(value)


def _check_prompt(value: Any, check: ValidatorFunctionWrapHandler) -> Any:
    """A text, texts, token ids or lists of token ids; long lists are not converted."""
    if isinstance(value, str) or type(value) is not list:
        return check(value)
    if value and _holds_only(value, int):
        return value
    _refuse_booleans(value)
    limit = envs.VLLM_MAX_COMPLETION_PROMPTS
    if len(value) > limit:
        raise ValueError(
            f"prompt holds {len(value)} prompts, at most {limit} are allowed (VLLM_MAX_COMPLETION_PROMPTS); token ids "
            "must all be integers"
        )
    if value and all(_holds_only(item, int) for item in value):
        return value
    for item in value:
        _refuse_booleans(item)
    if max((len(item) for item in value if isinstance(item, list)), default=0) > CONVERTED_ITEMS_MAX:
        raise ValueError("prompt must be a text, token ids, a list of texts or a list of lists of token ids")
    return check(value)


def _check_biases(value: Any, check: ValidatorFunctionWrapHandler) -> Any:
    if isinstance(value, dict):
        if len(value) > LOGIT_BIASES_MAX:
            raise ValueError(f"has {len(value)} entries, at most {LOGIT_BIASES_MAX} are allowed")
        if len(value) > CONVERTED_ITEMS_MAX and not set(map(type, value.values())) <= {int, float}:
            raise ValueError("must hold numbers")
    return check(value)


def _check_xargs(value: Any) -> dict[str, Any]:
    if not isinstance(value, dict):
        raise ValueError("must be an object")
    if len(value) > XARGS_MAX:
        raise ValueError(f"has {len(value)} entries, at most {XARGS_MAX} are allowed")
    for name, item in value.items():
        items = item if isinstance(item, list) else [item]
        if not set(map(type, items)) <= {str, int, float}:
            raise ValueError(f"{name!r} must be a text, a number or a list of texts and numbers")
    return value


Prompt = Annotated[str | list[str] | list[int] | list[list[int]], WrapValidator(_check_prompt)]
TokenIds = Annotated[list[int], Field(fail_fast=True), WrapValidator(_check_ids)]
Texts = Annotated[list[str], Field(fail_fast=True)]
Objects = Annotated[list[dict[str, Any]], Field(fail_fast=True)]
LogitBias = Annotated[dict[str, float], WrapValidator(_check_biases)]
Xargs = Annotated[dict[str, Any], PlainValidator(_check_xargs), WithJsonSchema({"type": "object"})]
