"""Builds one completion choice from engine outputs, the same way for streams and whole replies. Layer: L8.

A whole reply is one big delta, so both forms agree by construction. Must not know HTTP.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from vllm.entrypoints.openai.completion.protocol import (
    CompletionLogProbs,
    CompletionRequest,
    CompletionResponseStreamChoice,
)
from vllm.entrypoints.openai.render import RenderedPrompt
from vllm.entrypoints.openai.serving_base import LOGPROB_MIN, weight_versions_body
from vllm.logprobs import LogprobsOnePosition
from vllm.outputs import CompletionOutput, RequestOutput


@dataclass(frozen=True)
class ChoiceFormat:
    """How the choices of a request are shown."""

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
            logprobs=request.logprobs,
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

    `first_text`: text of the first prompt token, which has no log probability and so comes without its text.
    """

    form: ChoiceFormat
    first_text: str = ""
    offset: int = 0

    def write(
        self, token_ids: Sequence[int], positions: Sequence[LogprobsOnePosition | None]
    ) -> CompletionLogProbs:
        """The entries of these tokens."""
        body = CompletionLogProbs()
        for token_id, position in zip(token_ids, positions, strict=False):
            self._write_one(body, token_id, position)
        return body

    def _write_one(
        self, body: CompletionLogProbs, token_id: int, position: LogprobsOnePosition | None
    ) -> None:
        entry = position.get(token_id) if position else None
        text = self.first_text if entry is None else entry.decoded_token or ""
        body.text_offset.append(self.offset)
        if token_id not in self.form.special_ids:
            self.offset += len(text)
        body.tokens.append(self._name(token_id, text))
        body.token_logprobs.append(None if entry is None else max(entry.logprob, LOGPROB_MIN))
        body.top_logprobs.append(self._top(position) if position else None)

    def _name(self, token_id: int, text: str | None) -> str:
        return f"token_id:{token_id}" if self.form.tokens_as_ids or text is None else text

    def _top(self, position: LogprobsOnePosition) -> dict[str, float]:
        """The taken token and the most probable ones. Two tokens of the same text keep the higher value."""
        count = self.form.logprobs or 0
        top: dict[str, float] = {}
        for order, (token_id, entry) in enumerate(position.items()):
            if 0 <= count < order:
                break
            name = self._name(token_id, entry.decoded_token)
            value = max(entry.logprob, LOGPROB_MIN)
            top[name] = max(value, top.get(name, value))
        return top


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
        logprobs = CompletionLogProbs()
        if echoed:
            choice.text = self.text_of_prompt + text
            logprobs.extend(self._prompt_logprobs(output))
        logprobs.extend(self._take_logprobs())
        if self.form.logprobs is not None:
            choice.logprobs = logprobs
        if self.form.token_ids:
            choice.token_ids = self._token_ids if self.keeps_output else []
            if first:
                choice.prompt_token_ids = self.prompt.token_ids
        self._token_ids = []
        return choice

    def _prompt_logprobs(self, output: RequestOutput) -> CompletionLogProbs:
        if self.form.logprobs is None or output.prompt_logprobs is None:
            self._writer.offset = len(self.text_of_prompt)
            return CompletionLogProbs()
        # Special tokens of the prompt are part of an echoed text only if the text was given with them.
        written = self._writer.write(self.prompt.token_ids, list(output.prompt_logprobs))
        self._writer.offset = len(self.text_of_prompt)
        return written

    def _take_logprobs(self) -> CompletionLogProbs:
        if self.form.logprobs is None or not self.keeps_output:
            return CompletionLogProbs()
        written = self._writer.write(self._token_ids, self._positions)
        self._positions = []
        return written
