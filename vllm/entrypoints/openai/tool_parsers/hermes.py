"""Calls between `<tool_call>` and `</tool_call>`, as Hermes and Qwen models write them. Layer: L8."""

from __future__ import annotations

from vllm.entrypoints.openai.tool_parsers.base import (
    CallWriter,
    Piece,
    TextPiece,
    ToolParser,
    held_back,
    joined,
)
from vllm.entrypoints.openai.tool_parsers.json_scanner import CallScanner, MalformedCall
from vllm.utils.ids import IdSource

OPEN = "<tool_call>"
CLOSE = "</tool_call>"


class HermesToolParser(ToolParser):
    """Text outside of the tags is content; inside stands one JSON object with name and arguments.

    What stands between tags but is no call is content too, tags included; once a name was given, a broken rest is
    dropped. White space around calls is not content.
    """

    marks = (OPEN, CLOSE)

    def __init__(self, ids: IdSource) -> None:
        super().__init__(ids)
        self._waiting = ""  # may still become an opening tag
        self._spaces = ""  # may still turn out to stand beside a call
        self._scanner: CallScanner | None = None
        self._writer = CallWriter(self)
        self._raw = ""
        self._broken = False

    def feed(self, text: str) -> list[Piece]:
        pieces: list[Piece] = []
        for char in text:
            pieces += self._outside(char) if self._scanner is None else self._inside(self._scanner, char)
        return joined(pieces)

    def finish(self) -> list[Piece]:
        pieces: list[Piece] = []
        if self._scanner is None:
            pieces += self._content(self._waiting)
        elif not self._writer.has_started:
            pieces += self._give_up()
        if self._spaces and not self.started:
            pieces.append(TextPiece(self._spaces))
        self._waiting = self._spaces = ""
        return joined(pieces)

    # --- content ------------------------------------------------------------------------------------------------

    def _outside(self, char: str) -> list[Piece]:
        waiting = self._waiting + char
        if waiting == OPEN:
            self._waiting = ""
            self._scanner, self._writer = CallScanner(), CallWriter(self)
            self._raw, self._broken = "", False
            return []
        keep = held_back(waiting, (OPEN,))
        ready, self._waiting = waiting[: len(waiting) - keep], waiting[len(waiting) - keep :]
        return self._content(ready)

    def _content(self, text: str) -> list[Piece]:
        """What is certain to be content: white space at the end is kept back."""
        whole = self._spaces + text
        ready = whole.rstrip()
        self._spaces = whole[len(ready) :]
        return [TextPiece(ready)] if ready else []

    # --- a call -------------------------------------------------------------------------------------------------

    def _inside(self, scanner: CallScanner, char: str) -> list[Piece]:
        # Once the call has begun, only the end of the text is asked for.
        self._raw = (self._raw[-len(CLOSE) :] if self._writer.has_started else self._raw) + char
        if scanner.done or self._broken:
            return self._behind_object()
        try:
            scanner.feed(char)
        except MalformedCall:
            self._broken = True
            return self._behind_object()
        pieces = self._writer.write(scanner)
        if self._writer.has_started:
            self._spaces = ""
        return pieces

    def _behind_object(self) -> list[Piece]:
        """Only the closing tag matters now."""
        if not self._raw.endswith(CLOSE):
            return []
        if not self._writer.has_started:
            return self._give_up()
        self._scanner = None
        return []

    def _give_up(self) -> list[Piece]:
        """What looked like a call was none: it is content as it stands."""
        self._scanner = None
        return self._content(OPEN + self._raw)
