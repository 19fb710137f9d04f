"""A message that is nothing but calls, `{"name": …, "parameters": …}; …`, as Llama 3 models write it. Layer: L8."""

from __future__ import annotations

from vllm.entrypoints.openai.tool_parsers.base import CallWriter, Piece, TextPiece, ToolParser, joined
from vllm.entrypoints.openai.tool_parsers.json_scanner import CallScanner, MalformedCall
from vllm.utils.ids import IdSource

TAG = "<|python_tag|>"


class LlamaJsonToolParser(ToolParser):
    """A message that begins with `{` is calls; any other one is content. A call that is none is content."""

    marks = (TAG,)

    def __init__(self, ids: IdSource) -> None:
        super().__init__(ids)
        self._is_content = False
        self._raw = ""
        self._scanner: CallScanner | None = None
        self._writer = CallWriter(self)

    def feed(self, text: str) -> list[Piece]:
        pieces: list[Piece] = []
        for char in text:
            pieces += self._take(char)
        return joined(pieces)

    def finish(self) -> list[Piece]:
        started = self._writer.has_started
        rest, self._raw = self._raw, ""
        if self._is_content or started or not rest.strip():
            return [TextPiece(rest)] if rest and not self.started else []
        return [TextPiece(rest)]

    def _take(self, char: str) -> list[Piece]:
        if self._is_content:
            return [TextPiece(char)]
        self._raw += char
        if self._scanner is None:
            return self._between(char)
        try:
            self._scanner.feed(char)
        except MalformedCall:
            return self._give_up()
        pieces = self._writer.write(self._scanner)
        if self._writer.has_started:
            self._raw = ""  # whatever follows, this is a call
        if self._scanner.done:
            self._scanner = None
        return pieces

    def _between(self, char: str) -> list[Piece]:
        """Before a call: white space, a separator or the tag; anything else makes the rest content."""
        if char == "{":
            self._scanner, self._writer = CallScanner(), CallWriter(self)
            self._scanner.feed(char)
            return []
        seen = self._raw.lstrip()
        if TAG.startswith(seen) or seen == TAG or (self.started and not seen.strip("; \t\r\n")):
            return []
        return self._give_up()

    def _give_up(self) -> list[Piece]:
        self._scanner = None
        self._is_content = True
        raw, self._raw = self._raw, ""
        return [] if self._writer.has_started and not self.ends_in_call else [TextPiece(raw)]
