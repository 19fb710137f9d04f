"""Separates a model's reasoning, `<think>…</think>`, from its answer, in pieces. Layer: L8.

The pieces depend on the text alone, never on how it is cut.
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum, auto

from vllm.entrypoints.openai.tool_parsers.base import held_back

OPEN = "<think>"
CLOSE = "</think>"
# Parser name → whether the text begins inside the reasoning, without the opening tag.
REASONING_PARSERS = {"deepseek_r1": True, "qwen3": False, "glm45": False}


class _Where(Enum):
    START = auto()
    REASONING = auto()
    ANSWER = auto()


@dataclass(frozen=True)
class Split:
    """New text of each kind."""

    reasoning: str = ""
    answer: str = ""


def check_reasoning_parser(name: str) -> None:
    """Raise ValueError for an unknown parser name; the empty name means none."""
    if name and name not in REASONING_PARSERS:
        raise ValueError(f"--reasoning-parser {name!r} is not known; known: {', '.join(REASONING_PARSERS)}")


class ReasoningParser:
    """Parses one message. `prompt` is the rendered prompt: a template may have opened the reasoning already."""

    def __init__(self, name: str, prompt: str | None) -> None:
        # Some models repeat the tag that the template wrote; either way the first words tell.
        self._opened = REASONING_PARSERS[name] or (prompt or "").rstrip().endswith(OPEN)
        self._where = _Where.START
        self._waiting = ""

    def feed(self, text: str) -> Split:
        """Take more of the model's text."""
        reasoning = answer = ""
        self._waiting += text
        if self._where is _Where.START:
            self._leave_start()
        if self._where is _Where.REASONING:
            reasoning = self._take_reasoning()
        if self._where is _Where.ANSWER:
            answer, self._waiting = self._waiting, ""
        return Split(reasoning, answer)

    def finish(self) -> Split:
        """The text is complete: give what was held back."""
        rest, self._waiting = self._waiting, ""
        thinks = self._where is _Where.REASONING or (self._where is _Where.START and self._opened)
        return Split(reasoning=rest) if thinks else Split(answer=rest)

    def _leave_start(self) -> None:
        seen = self._waiting.lstrip()
        if seen.startswith(OPEN):
            self._waiting = seen[len(OPEN) :]
            self._where = _Where.REASONING
        elif not OPEN.startswith(seen):
            self._where = _Where.REASONING if self._opened else _Where.ANSWER

    def _take_reasoning(self) -> str:
        waiting = self._waiting
        end = waiting.find(CLOSE)
        if end >= 0:
            self._waiting = waiting[end + len(CLOSE) :]
            self._where = _Where.ANSWER
            return waiting[:end]
        keep = held_back(waiting, (CLOSE,))
        self._waiting = waiting[len(waiting) - keep :]
        return waiting[: len(waiting) - keep]
