"""Reads one JSON object of the form `{"name": …, "arguments": {…}}` character by character. Layer: L8.

Gives the name once it is complete and the arguments as the raw text that stands there, as it arrives. What it gives
depends on the text alone, never on how the text is cut into pieces.
"""

from __future__ import annotations

import json
from enum import Enum, auto

NAME_KEYS = ("name",)
ARGUMENT_KEYS = ("arguments", "parameters")
_SPACE = " \t\r\n"


class _Expect(Enum):
    """What comes next at the top level of the object."""

    OPEN = auto()
    KEY = auto()
    COLON = auto()
    VALUE = auto()
    COMMA = auto()
    DONE = auto()


class MalformedCall(ValueError):
    """The text is no such object."""


class ValueScanner:
    """Follows one JSON value; `feed` returns True with the value's last character (for numbers: the one behind it)."""

    def __init__(self) -> None:
        self.characters: list[str] = []  # a text would be copied for every character
        self._depth = 0
        self._in_string = False
        self._escaped = False
        self._scalar = False

    def feed(self, char: str) -> bool:
        """Take a character. True: the value is complete (`consumed` tells whether this character belongs to it)."""
        self.consumed = True
        if self._in_string:
            self.characters.append(char)
            return self._feed_string(char)
        if self._scalar and (char in ",]}" or char in _SPACE):
            self.consumed = False
            return True
        self.characters.append(char)
        if char == '"':
            self._in_string = True
        elif char in "{[":
            self._depth += 1
        elif char in "}]":
            self._depth -= 1
            if self._depth < 0:
                raise MalformedCall(f"unexpected {char!r}")
            return self._depth == 0
        elif self._depth == 0:
            self._scalar = True
        return False

    @property
    def text(self) -> str:
        """The value as far as it is known."""
        return "".join(self.characters)

    def _feed_string(self, char: str) -> bool:
        if self._escaped:
            self._escaped = False
        elif char == "\\":
            self._escaped = True
        elif char == '"':
            self._in_string = False
            return self._depth == 0
        return False


class CallScanner:
    """State of one call. After each `feed`: `name` (or None), and what `arguments_behind` gives."""

    def __init__(self) -> None:
        self.name: str | None = None
        self.done = False
        self._arguments: str | None = None
        self._expect = _Expect.OPEN
        self._value: ValueScanner | None = None
        self._key = ""
        self._first = True

    def feed(self, char: str) -> None:
        """Take a character. Raises MalformedCall if the text cannot be a call any more."""
        if self._value is not None:
            self._feed_value(char)
        elif char not in _SPACE:
            self._feed_mark(char)

    def _feed_mark(self, char: str) -> None:
        match self._expect, char:
            case _Expect.OPEN, "{":
                self._expect = _Expect.KEY
            case _Expect.KEY, '"':
                self._value = ValueScanner()
                self._value.feed(char)
            case _Expect.KEY, "}" if self._first:
                self._close()
            case _Expect.COLON, ":":
                self._expect = _Expect.VALUE
            case _Expect.VALUE, _:
                self._value = ValueScanner()
                self._feed_value(char)
            case _Expect.COMMA, ",":
                self._expect, self._first = _Expect.KEY, False
            case _Expect.COMMA, "}":
                self._close()
            case _:
                raise MalformedCall(f"unexpected {char!r}")

    def _feed_value(self, char: str) -> None:
        value = self._value
        assert value is not None
        if not value.feed(char):
            return
        self._value = None
        if self._expect is _Expect.KEY:
            self._key = str(_parsed(value.text))
            self._expect = _Expect.COLON
        else:
            self._take(value.text)
            self._expect = _Expect.COMMA
            if not value.consumed:
                self.feed(char)

    def arguments_behind(self, start: int) -> str:
        """The raw text of the arguments so far, without its first `start` characters."""
        value = self._value
        if value is not None and self._expect is _Expect.VALUE and self._key in ARGUMENT_KEYS:
            return "".join(value.characters[start:]) if value.characters[0] == "{" else ""
        return "" if self._arguments is None else self._arguments[start:]

    def _take(self, text: str) -> None:
        value = _parsed(text)
        if self._key in NAME_KEYS:
            if not isinstance(value, str) or not value:
                raise MalformedCall("the name is no text")
            self.name = value
        elif self._key in ARGUMENT_KEYS:
            if value is None:
                return
            if isinstance(value, str):  # some models write the object as text
                text, value = value, _parsed(value)
            if not isinstance(value, dict):
                raise MalformedCall("the arguments are no object")
            self._arguments = text

    def _close(self) -> None:
        if self.name is None:
            raise MalformedCall("there is no name")
        if self._arguments is None:
            self._arguments = "{}"
        self._expect = _Expect.DONE
        self.done = True


def _parsed(text: str) -> object:
    try:
        value: object = json.loads(text)
    except (ValueError, RecursionError) as error:
        raise MalformedCall(str(error)) from None
    return value
