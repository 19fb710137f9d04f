"""Builds one completion choice from engine outputs, the same way for streams and whole replies. Layer: L8.

A whole reply is one big delta, so both forms agree by construction. Must not know HTTP.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from itertools import islice
from typing import Any

from vllm.entrypoints.openai.completion.protocol import (
    CompletionLogProbs,
    CompletionRequest,
    CompletionResponseStreamChoice,
)
from vllm.entrypoints.openai.late_json import SLICE, LateJson, object_text, rows_text
from vllm.entrypoints.openai.render import RenderedPrompt
from vllm.entrypoints.openai.serving_base import LOGPROB_MIN, are_many, weight_versions_body
from vllm.logprobs import LogprobsOnePosition
from vllm.outputs import CompletionOutput, RequestOutput
from vllm.v1.engine.detokenizer import REPLACEMENT


@dataclass(frozen=True)
class ChoiceFormat:
    """How the choices of a request are shown. `logprobs` −1: all that come, as of given token ids."""

    echo: bool
    logprobs: int | None
    tokens_as_ids: bool
    token_ids: bool
    weight_versions: bool
    special_ids: frozenset[int] = frozenset()

    @staticmethod
    def of(request: CompletionRequest, tokens_as_ids: bool, tokenizer: Any | None) -> ChoiceFormat:
        """The format a request asks for."""
        hides = request.skip_special_tokens is not False
        return ChoiceFormat(
            echo=bool(request.echo),
            logprobs=-1 if request.logprob_token_ids else request.logprobs,
            tokens_as_ids=tokens_as_ids,
            token_ids=bool(request.return_token_ids),
            weight_versions=request.return_weight_versions,
            special_ids=frozenset(tokenizer.all_special_ids)
            if tokenizer is not None and hides
            else frozenset(),
        )


@dataclass
class LogprobsWriter:
    """Turns positions into the parallel lists of the reply; remembers the offset of the next token's text.

    `first_text`: text of the first prompt token, which has no log probability and so comes without its text. `_tail`:
    the end of the shown text, from `_tail_start` on.
    """

    form: ChoiceFormat
    first_text: str = ""
    offset: int = 0
    _tail: str = ""
    _tail_start: int = 0

    def show(self, text: str) -> None:
        """Note text of the reply, before its tokens are written."""
        done = self.offset - self._tail_start
        self._tail_start += min(done, len(self._tail))
        self._tail = self._tail[done:] + text

    def end(self, body: CompletionLogProbs) -> None:
        """The reply is complete: tokens whose text is not shown, as those of a stop string, stand at its end."""
        length = self._tail_start + len(self._tail)
        body.text_offset = [min(offset, length) for offset in body.text_offset]

    def write(
        self,
        body: CompletionLogProbs,
        token_ids: Sequence[int],
        positions: Iterable[LogprobsOnePosition | None],
    ) -> None:
        """Append the entries of these tokens, but for the most probable ones."""
        for token_id, position in zip(token_ids, positions, strict=False):
            entry = position.get(token_id) if position else None
            text = self.first_text if entry is None else entry.decoded_token or ""
            shows = bool(text) and token_id not in self.form.special_ids
            if shows and not text.startswith(REPLACEMENT):
                # Bytes that are no character are shown as replacements, but are no text of their tokens.
                while self._tail.startswith(REPLACEMENT, self.offset - self._tail_start):
                    self.offset += 1
            body.text_offset.append(self.offset)
            if shows:
                self.offset += len(text)
            body.tokens.append(self._name(token_id, text))
            body.token_logprobs.append(None if entry is None else max(entry.logprob, LOGPROB_MIN))

    def tops(
        self, positions: Sequence[LogprobsOnePosition | None]
    ) -> list[dict[str, float] | None] | LateJson:
        """The most probable tokens of these positions."""
        if not are_many(positions, self.form.logprobs or 0):
            return [self._top(position) if position else None for position in positions]
        return LateJson(
            lambda: rows_text(self._top_text(position) if position else ("null",) for position in positions)
        )

    def _name(self, token_id: int, text: str | None) -> str:
        return f"token_id:{token_id}" if self.form.tokens_as_ids or text is None else text

    def _top(self, position: LogprobsOnePosition) -> dict[str, float]:
        """The taken token and the most probable ones. Two tokens of the same text keep the higher value."""
        top: dict[str, float] = {}
        for name, value in self._named(position):
            top[name] = max(value, top.get(name, value))
        return top

    def _top_text(self, position: LogprobsOnePosition) -> Iterator[str]:
        """The same in pieces; making it takes turns too."""
        top: dict[str, float] = {}
        named = self._named(position)
        while part := list(islice(named, SLICE)):
            for name, value in part:
                # By falling probability but for the token that stands there.
                if value > top.get(name, LOGPROB_MIN) or name not in top:
                    top[name] = value
            yield ""
        yield from object_text(top.items())

    def _named(self, position: LogprobsOnePosition) -> Iterator[tuple[str, float]]:
        count = self.form.logprobs or 0
        shown = islice(position.items(), None if count < 0 else count + 1)
        if self.form.tokens_as_ids:
            return ((f"token_id:{token_id}", max(entry.logprob, LOGPROB_MIN)) for token_id, entry in shown)
        return (
            (
                f"token_id:{token_id}" if entry.decoded_token is None else entry.decoded_token,
                max(entry.logprob, LOGPROB_MIN),
            )
            for token_id, entry in shown
        )


@dataclass
class ChoiceBuilder:
    """One sample of one prompt. `text_of_prompt` is echoed in front of the first delta.

    `keeps_output` False: what is generated is not shown. `first_text`: as in `LogprobsWriter`.
    """

    index: int
    form: ChoiceFormat
    prompt: RenderedPrompt
    text_of_prompt: str
    keeps_output: bool = True
    first_text: str = ""
    _started: bool = False
    _token_ids: list[int] = field(default_factory=list)
    _positions: list[LogprobsOnePosition] = field(default_factory=list)

    def __post_init__(self) -> None:
        self._writer = LogprobsWriter(self.form, self.first_text)

    def delta(
        self, completion: CompletionOutput, output: RequestOutput
    ) -> CompletionResponseStreamChoice | None:
        """The chunk for what is new; None if there is nothing to show yet (its tokens go with the next chunk)."""
        self._token_ids += completion.token_ids
        if completion.logprobs is not None:
            self._positions.extend(position for position in completion.logprobs)
        text = completion.text if self.keeps_output else ""
        first = not self._started
        echoed = first and self.form.echo
        if not text and not echoed and completion.finish_reason is None:
            return None
        self._started = True
        choice = CompletionResponseStreamChoice(
            index=self.index, text=text, finish_reason=completion.finish_reason
        )
        if completion.finish_reason is not None:
            choice.stop_reason = completion.stop_reason
            if self.form.weight_versions:
                choice.weight_versions = weight_versions_body(completion.weight_versions)
        logprobs = CompletionLogProbs(text_offset=[], token_logprobs=[], tokens=[], top_logprobs=[])
        positions: list[LogprobsOnePosition | None] = []
        if echoed:
            choice.text = self.text_of_prompt + text
            positions += self._write_prompt(logprobs, output)
        if self.form.logprobs is not None:
            self._writer.show(text)
            positions += self._write_output(logprobs)
            if completion.finish_reason is not None:
                self._writer.end(logprobs)
            logprobs.top_logprobs = self._writer.tops(positions)
            choice.logprobs = logprobs
        if self.form.token_ids:
            choice.token_ids = self._token_ids if self.keeps_output else []
            if first:
                choice.prompt_token_ids = self.prompt.token_ids
        self._token_ids = []
        return choice

    def _write_prompt(
        self, body: CompletionLogProbs, output: RequestOutput
    ) -> Sequence[LogprobsOnePosition | None]:
        positions: Sequence[LogprobsOnePosition | None] = []
        self._writer.show(self.text_of_prompt)
        if self.form.logprobs is not None and output.prompt_logprobs is not None:
            # Special tokens of the prompt are part of an echoed text only if the text was given with them.
            positions = list(output.prompt_logprobs)[: len(self.prompt.token_ids)]
            self._writer.write(body, self.prompt.token_ids, positions)
        self._writer.offset = len(self.text_of_prompt)
        return positions

    def _write_output(self, body: CompletionLogProbs) -> Sequence[LogprobsOnePosition | None]:
        if self.form.logprobs is None or not self.keeps_output:
            return []
        positions = self._positions[: len(self._token_ids)]
        self._writer.write(body, self._token_ids, positions)
        self._positions = []
        return positions
