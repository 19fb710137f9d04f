"""Tool parsers: from the model's text to contents and tool calls, in pieces. Layer: L8.

A parser is fed text and gives pieces. It must give the same pieces, joined, however the text is cut; a whole reply is
parsed by the same code as a stream, so both agree by construction.
"""

from __future__ import annotations

import importlib.util
import itertools
import sys
from abc import ABC, abstractmethod
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar, cast

from vllm.entrypoints.openai.tool_parsers.json_scanner import CallScanner
from vllm.utils.ids import IdSource
from vllm.utils.registry import Registry


@dataclass(frozen=True)
class TextPiece:
    """A piece of the message's content."""

    text: str


@dataclass(frozen=True)
class CallStart:
    """A tool call begins: its place in the message, id and function name."""

    index: int
    id: str
    name: str


@dataclass(frozen=True)
class CallArguments:
    """A piece of a call's arguments, as JSON text."""

    index: int
    text: str


Piece = TextPiece | CallStart | CallArguments


class ToolParser(ABC):
    """Parses one message. `called` counts the calls that are complete.

    `marks`: tokens that the parser looks for; where they are special ones, the text must keep special tokens.
    """

    marks: ClassVar[tuple[str, ...]] = ()

    def __init__(self, ids: IdSource) -> None:
        self._ids = ids
        self.started = 0
        self.called = 0

    @abstractmethod
    def feed(self, text: str) -> list[Piece]:
        """Take more of the model's text."""

    @abstractmethod
    def finish(self) -> list[Piece]:
        """The text is complete: give what was held back."""

    @property
    def ends_in_call(self) -> bool:
        """Whether the last call that began is complete; False without any."""
        return 0 < self.called == self.started

    def new_call_id(self) -> str:
        """An id for a call."""
        return f"call_{self._ids.next_id()}"


class CallWriter:
    """Turns the progress of a `CallScanner` into pieces. Arguments that come before the name wait for it."""

    def __init__(self, parser: ToolParser) -> None:
        self._parser = parser
        self._index: int | None = None
        self._sent = 0

    @property
    def has_started(self) -> bool:
        """Whether the call has been announced."""
        return self._index is not None

    def write(self, scanner: CallScanner) -> list[Piece]:
        """What is new since the last time."""
        pieces: list[Piece] = []
        if scanner.name is not None and self._index is None:
            self._index = self._parser.started
            self._parser.started += 1
            pieces.append(CallStart(self._index, self._parser.new_call_id(), scanner.name))
        if self._index is not None:
            fresh = scanner.arguments_behind(self._sent)
            self._sent += len(fresh)
            if fresh:
                pieces.append(CallArguments(self._index, fresh))
        if scanner.done:
            self._parser.called += 1
        return pieces


def joined(pieces: list[Piece]) -> list[Piece]:
    """The same pieces with neighbours of one kind joined."""
    result: list[Piece] = []
    for key, group in itertools.groupby(pieces, key=_kind):
        if isinstance(key, CallStart):
            result += group
        elif key is None:
            result.append(TextPiece("".join(piece.text for piece in group if isinstance(piece, TextPiece))))
        else:
            text = "".join(piece.text for piece in group if isinstance(piece, CallArguments))
            result.append(CallArguments(key, text))
    return result


def _kind(piece: Piece) -> CallStart | int | None:
    """What neighbours have in common that can be joined."""
    if isinstance(piece, CallStart):
        return piece
    return piece.index if isinstance(piece, CallArguments) else None


def held_back(text: str, marks: tuple[str, ...]) -> int:
    """Length of the longest end of `text` that could still become one of `marks`."""
    longest = max(map(len, marks)) - 1
    for size in range(min(longest, len(text)), 0, -1):
        if any(mark.startswith(text[-size:]) for mark in marks):
            return size
    return 0


def marks_are_special(parser_class: type[ToolParser], tokenizer: Any) -> bool:
    """Whether a mark of the parser would vanish from the text if special tokens were skipped."""
    special = set(tokenizer.all_special_ids)
    return any(tokenizer.convert_tokens_to_ids(mark) in special for mark in parser_class.marks)


_FOLDER = "vllm.entrypoints.openai.tool_parsers"
TOOL_PARSERS = Registry(
    "tool parser",
    {
        "hermes": f"{_FOLDER}.hermes:HermesToolParser",
        "llama3_json": f"{_FOLDER}.llama_json:LlamaJsonToolParser",
    },
    entry_point_group="vllm.tool_parsers",
)


def get_tool_parser(name: str) -> type[ToolParser]:
    """The parser class called `name`. Raises ValueError listing the known names."""
    return cast(type[ToolParser], TOOL_PARSERS.resolve(name))


def load_tool_parser_plugin(path: str) -> None:
    """Run a Python file that adds parsers to `TOOL_PARSERS`. Raises ValueError if it is no readable file."""
    file = Path(path)
    if not file.is_file():
        raise ValueError(f"--tool-parser-plugin {path!r} is not a file")
    spec = importlib.util.spec_from_file_location(file.stem, file)
    if spec is None or spec.loader is None:
        raise ValueError(f"--tool-parser-plugin {path!r} is not a Python file")
    module = importlib.util.module_from_spec(spec)
    sys.modules[file.stem] = module
    spec.loader.exec_module(module)
