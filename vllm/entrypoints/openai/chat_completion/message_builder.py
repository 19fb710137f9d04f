"""Builds one chat choice from engine outputs, the same way for streams and whole replies. Layer: L8.

A whole reply is one big delta, so both forms agree by construction. Must not know HTTP.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from itertools import islice
from typing import Any

from vllm.entrypoints.openai.chat_completion.protocol import (
    ChatLogprobPosition,
    ChatLogprobs,
    ChatStreamChoice,
    ChatTopLogprob,
    DeltaFunctionCall,
    DeltaMessage,
    DeltaToolCall,
)
from vllm.entrypoints.openai.late_json import LateJson, list_text
from vllm.entrypoints.openai.reasoning import ReasoningParser, Split
from vllm.entrypoints.openai.serving_base import LOGPROB_MIN, are_many, weight_versions_body
from vllm.entrypoints.openai.tool_parsers.base import CallArguments, CallStart, Piece, TextPiece, ToolParser
from vllm.logprobs import Logprob, LogprobsOnePosition
from vllm.outputs import CompletionOutput
from vllm.v1.engine.packed_logprobs import ranked


@dataclass(frozen=True)
class MessageFormat:
    """How the messages of a request are shown. `top_logprobs` None: no log probabilities."""

    role: str
    top_logprobs: int | None = None
    tokens_as_ids: bool = False
    token_ids: bool = False
    weight_versions: bool = False
    include_reasoning: bool = True
    single_call: bool = False
    call_ends_reply: bool = False


@dataclass
class MessageBuilder:
    """One sample. `echoed` stands before the first text."""

    index: int
    form: MessageFormat
    echoed: str = ""
    tools: ToolParser | None = None
    reasoning: ReasoningParser | None = None
    reasoning_tokens: int = 0
    _token_ids: list[int] = field(default_factory=list)
    _positions: list[LogprobsOnePosition] = field(default_factory=list)

    def delta(self, completion: CompletionOutput) -> ChatStreamChoice | None:
        """The chunk for what is new; None if there is nothing to show yet (its tokens go with the next chunk)."""
        self._token_ids += completion.token_ids
        if completion.logprobs is not None:
            self._positions.extend(position for position in completion.logprobs)
        message = self._message(completion)
        finished = completion.finish_reason is not None
        if not message.model_fields_set and not finished:
            return None
        choice = ChatStreamChoice(
            index=self.index, delta=message, finish_reason=self._finish_reason(completion.finish_reason)
        )
        if finished:
            choice.stop_reason = completion.stop_reason
            if self.form.weight_versions:
                choice.weight_versions = weight_versions_body(completion.weight_versions)
        if self.form.top_logprobs is not None:
            choice.logprobs = self._logprobs(self.form.top_logprobs)
        if self.form.token_ids:
            choice.token_ids = self._token_ids
        self._token_ids, self._positions = [], []
        return choice

    def opening(self) -> ChatStreamChoice:
        """The chunk that begins a streamed message."""
        delta = DeltaMessage(role=self.form.role, content="")
        return ChatStreamChoice(index=self.index, delta=delta, finish_reason=None)

    # --- text ---------------------------------------------------------------------------------------------------

    def _message(self, completion: CompletionOutput) -> DeltaMessage:
        finished = completion.finish_reason is not None
        split = self._split(completion.text, finished)
        if split.reasoning:
            self.reasoning_tokens += len(completion.token_ids)
        pieces: list[Piece] = [TextPiece(split.answer)] if split.answer else []
        if self.tools is not None:
            pieces = self.tools.feed(split.answer)
            if finished:
                pieces += self.tools.finish()
        message = DeltaMessage()
        if split.reasoning and self.form.include_reasoning:
            message.reasoning = split.reasoning
        text = "".join(piece.text for piece in pieces if isinstance(piece, TextPiece))
        if text or (self.echoed and finished):
            message.content, self.echoed = self.echoed + text, ""
        calls = self._calls(pieces)
        if calls:
            message.tool_calls = calls
        return message

    def _split(self, text: str, finished: bool) -> Split:
        if self.reasoning is None:
            return Split(answer=text)
        first = self.reasoning.feed(text)
        if not finished:
            return first
        rest = self.reasoning.finish()
        return Split(first.reasoning + rest.reasoning, first.answer + rest.answer)

    def _calls(self, pieces: Sequence[Piece]) -> list[DeltaToolCall]:
        """The tool call deltas of one chunk, one per call."""
        calls: dict[int, DeltaToolCall] = {}
        for piece in pieces:
            if isinstance(piece, TextPiece) or (self.form.single_call and piece.index > 0):
                continue
            if isinstance(piece, CallStart):
                function = DeltaFunctionCall(name=piece.name, arguments="")
                calls[piece.index] = DeltaToolCall(
                    index=piece.index, id=piece.id, type="function", function=function
                )
            elif isinstance(piece, CallArguments):
                call = calls.get(piece.index)
                if call is None or call.function is None:
                    function = DeltaFunctionCall(arguments=piece.text)
                    calls[piece.index] = DeltaToolCall(index=piece.index, function=function)
                else:
                    call.function.arguments = (call.function.arguments or "") + piece.text
        return list(calls.values())

    def _finish_reason(self, reason: str | None) -> str | None:
        """`tool_calls` only if the model ended by itself behind a complete call."""
        if (
            reason == "stop"
            and self.form.call_ends_reply
            and self.tools is not None
            and self.tools.ends_in_call
        ):
            return "tool_calls"
        return reason

    # --- log probabilities --------------------------------------------------------------------------------------

    def _logprobs(self, count: int) -> ChatLogprobs:
        pairs = zip(self._token_ids, self._positions, strict=False)
        return ChatLogprobs(
            content=[self._position(token_id, position, count) for token_id, position in pairs]
        )

    def _position(self, token_id: int, position: LogprobsOnePosition, count: int) -> ChatLogprobPosition:
        taken: dict[str, Any] = self._shown(token_id, position[token_id])

        def top() -> Iterator[dict[str, Any]]:
            return (self._shown(*item) for item in islice(ranked(position), None if count == -1 else count))

        if are_many([position], count):
            return ChatLogprobPosition(**taken, top_logprobs=LateJson(lambda: list_text(top())))
        return ChatLogprobPosition(**taken, top_logprobs=[ChatTopLogprob(**item) for item in top()])

    def _shown(self, token_id: int, entry: Logprob) -> dict[str, Any]:
        text = entry.decoded_token
        name = f"token_id:{token_id}" if self.form.tokens_as_ids or text is None else text
        return {
            "token": name,
            "logprob": max(entry.logprob, LOGPROB_MIN),
            "bytes": None if text is None else list(text.encode("utf-8", errors="replace")),
        }
