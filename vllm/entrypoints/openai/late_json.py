"""Values of a reply that are written while it is sent: piece by piece, with a turn for everybody else in between. Layer: L8.

Owns how such a value stands in a model of pydantic (by a name that is replaced in the text) and how the text is put
together. Must not know what the values are.
"""

from __future__ import annotations

import asyncio
import json
import re
from collections.abc import AsyncGenerator, Callable, Iterable, Iterator
from itertools import islice
from typing import Any

from pydantic import BaseModel, GetCoreSchemaHandler
from pydantic_core import CoreSchema, core_schema

from vllm.utils.ids import random_uuid

# Entries of a late value that are written without giving others a turn.
SLICE = 1024

# Characters that are worth a message to the client.
SENT_AT_ONCE = 1 << 15

_NAME = re.compile(r'"(late:[0-9a-f]{32})"')

Held = dict[str, "LateJson"]


class LateJson:
    """A value whose JSON text comes in pieces; each call of `pieces` makes it anew."""

    def __init__(self, pieces: Callable[[], Iterator[str]]) -> None:
        self.pieces = pieces

    @classmethod
    def __get_pydantic_core_schema__(cls, source: Any, handler: GetCoreSchemaHandler) -> CoreSchema:
        written = core_schema.plain_serializer_function_ser_schema(_name_or_value, info_arg=True)
        return core_schema.is_instance_schema(cls, serialization=written)


def _name_or_value(late: LateJson, info: core_schema.SerializationInfo) -> Any:
    """The name under which the writer holds the value; without a writer the value itself."""
    if info.context is None:
        return json.loads("".join(late.pieces()))
    name = f"late:{random_uuid()}"
    info.context[name] = late
    return name


def list_text(items: Iterable[Any]) -> Iterator[str]:
    """Pieces of a list; items are made while it is written."""
    lead = "["
    for part in _slices(items):
        yield lead + dump_json(part)[1:-1]
        lead = ","
    yield "]" if lead == "," else "[]"


def object_text(entries: Iterable[tuple[Any, Any]]) -> Iterator[str]:
    """Pieces of an object; entries are made while it is written. Every name must come once."""
    lead = "{"
    for part in _slices(entries):
        yield lead + dump_json(dict(part))[1:-1]
        lead = ","
    yield "}" if lead == "," else "{}"


def rows_text(rows: Iterable[Iterable[str]]) -> Iterator[str]:
    """Pieces of a list from the pieces of its items."""
    lead = "["
    for row in rows:
        yield lead
        yield from row
        lead = ","
    yield "]" if lead == "," else "[]"


def _slices(items: Iterable[Any]) -> Iterator[list[Any]]:
    rest = iter(items)
    while part := list(islice(rest, SLICE)):
        yield part


def dump_json(value: Any) -> str:
    """JSON as all replies are written."""
    return json.dumps(value, ensure_ascii=False, allow_nan=False, separators=(",", ":"))


async def in_pieces(text: str, held: Held) -> AsyncGenerator[str, None]:
    """`text` with its names replaced by the values they stand for. Others have their turn after each piece."""
    waiting: list[str] = []
    size = 0
    for piece in _pieces(text, held):
        waiting.append(piece)
        size += len(piece)
        if size >= SENT_AT_ONCE:
            yield "".join(waiting)
            waiting, size = [], 0
        await asyncio.sleep(0)
    yield "".join(waiting)


def _pieces(text: str, held: Held) -> Iterator[str]:
    for index, part in enumerate(_NAME.split(text)):
        if index % 2 == 0:
            yield part
        elif part in held:
            yield from held[part].pieces()
        else:
            yield f'"{part}"'


async def model_text(body: BaseModel) -> str:
    """The JSON of a model whose unset fields are left out."""
    held: Held = {}
    text = body.model_dump_json(exclude_unset=True, context=held)
    return "".join([piece async for piece in in_pieces(text, held)]) if held else text
