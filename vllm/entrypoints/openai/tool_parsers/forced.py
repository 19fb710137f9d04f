"""Calls that a grammar has forced: a JSON list of calls (`required`), or one call's arguments (a named tool). Layer: L8.

Also makes the JSON schemas of those grammars.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from vllm.entrypoints.openai.tool_parsers.base import (
    CallArguments,
    CallStart,
    CallWriter,
    Piece,
    ToolParser,
    joined,
)
from vllm.entrypoints.openai.tool_parsers.json_scanner import CallScanner, MalformedCall
from vllm.exceptions import VLLMValidationError
from vllm.utils.ids import IdSource

_ANY_OBJECT = {"type": "object"}
_DEFINITIONS = ("$defs", "definitions")


def named_schema(parameters: dict[str, Any] | None) -> dict[str, Any]:
    """Schema of the arguments of one function."""
    return parameters or _ANY_OBJECT


def required_schema(functions: Sequence[tuple[str, dict[str, Any] | None]], parallel: bool) -> dict[str, Any]:
    """Schema of a list with at least one call of these functions (name, parameters); one only unless `parallel`.

    References count from the root, so what the functions define moves there. Raises VLLMValidationError if two of them
    define one name in different ways.
    """
    shared: dict[str, dict[str, Any]] = {key: {} for key in _DEFINITIONS}
    calls = []
    for name, parameters in functions:
        schema = dict(parameters or _ANY_OBJECT)
        for key, definitions in shared.items():
            if isinstance(schema.get(key), dict):
                _add_definitions(definitions, schema.pop(key), name)
        calls.append(
            {
                "type": "object",
                "properties": {"name": {"type": "string", "enum": [name]}, "parameters": schema},
                "required": ["name", "parameters"],
                "additionalProperties": False,
            }
        )
    items: dict[str, Any] = calls[0] if len(calls) == 1 else {"anyOf": calls}
    result: dict[str, Any] = {"type": "array", "minItems": 1, "items": items}
    if not parallel:
        result["maxItems"] = 1
    return result | {key: definitions for key, definitions in shared.items() if definitions}


def _add_definitions(known: dict[str, Any], new: dict[str, Any], function: str) -> None:
    for name, definition in new.items():
        if known.setdefault(name, definition) != definition:
            raise VLLMValidationError(
                f"the function {function!r} defines {name!r} unlike another function", parameter="tools"
            )


class NamedToolParser(ToolParser):
    """The whole text is the arguments of one known function."""

    def __init__(self, ids: IdSource, name: str) -> None:
        super().__init__(ids)
        self._name = name

    def feed(self, text: str) -> list[Piece]:
        pieces: list[Piece] = []
        if text and not self.started:
            self.started = self.called = 1
            pieces.append(CallStart(0, self.new_call_id(), self._name))
        if text:
            pieces.append(CallArguments(0, text))
        return pieces

    def finish(self) -> list[Piece]:
        return []


class RequiredToolParser(ToolParser):
    """The text is a JSON list of calls."""

    def __init__(self, ids: IdSource) -> None:
        super().__init__(ids)
        self._scanner: CallScanner | None = None
        self._writer = CallWriter(self)

    def feed(self, text: str) -> list[Piece]:
        pieces: list[Piece] = []
        for char in text:
            if self._scanner is None and char == "{":
                self._scanner, self._writer = CallScanner(), CallWriter(self)
            if self._scanner is None:
                continue
            try:
                self._scanner.feed(char)
            except MalformedCall:  # the grammar rules this out; without one, the rest is no call
                self._scanner = None
                continue
            pieces += self._writer.write(self._scanner)
            if self._scanner.done:
                self._scanner = None
        return joined(pieces)

    def finish(self) -> list[Piece]:
        return []
