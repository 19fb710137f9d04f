"""Structured output: requests that wait for their grammar, which is ready, or turns out to be none, some time later.

The grammar of a request allows its right answer and nothing else, and remembers how far it has got: a token that the
scheduler shows it twice, or not at all, ends the request. Drawn apart, so that worlds without grammars stay as they are.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Iterable
from typing import Any
from unittest.mock import patch

import numpy as np
import numpy.typing as npt

from tests.sim.failure import require
from tests.sim.rng import Streams
from vllm.config import VllmConfig
from vllm.sampling_params import StructuredOutputsParams
from vllm.v1.core.sched.admission import Verdict
from vllm.v1.core.sched.output import GrammarOutput, SchedulerOutput
from vllm.v1.core.sched.waiting_pass import WaitingPass
from vllm.v1.messages import EngineCoreOutputs
from vllm.v1.request import Request, RequestStatus
from vllm.v1.structured_output import StructuredOutputManager

GOOD, BAD = "good", "bad"
_SHARE = 0.25
"""Of the worlds in which some requests have a grammar."""
_CONSTRAINED = 0.5
"""Of the requests of such a world."""
_VOCABULARY = 128


def draw_grammars(seed: int) -> bool:
    """Whether some requests of the seed's world have a grammar."""
    return Streams(seed).stream("grammars").random() < _SHARE


class Constraints:
    """Which requests of a world have a grammar: `GOOD`, `BAD` (it cannot be compiled) or None."""

    def __init__(self, seed: int, has_grammars: bool) -> None:
        self._rng = Streams(seed).stream("constraints")
        self._is_on = has_grammars

    def draw(self) -> str | None:
        """What the next request has."""
        if not self._is_on or self._rng.random() >= _CONSTRAINED:
            return None
        return BAD if self._rng.random() < 0.25 else GOOD


def constraint_of(kind: str, output: list[int]) -> StructuredOutputsParams:
    """The parameters of such a request; what they say is read by `_Compiler`."""
    return StructuredOutputsParams(choice=[kind, ",".join(map(str, output))])


class AnswerGrammar:
    """Allows one answer."""

    def __init__(self, answer: list[int]) -> None:
        self._answer = answer
        self._position = 0

    def accept_tokens(self, token_ids: list[int]) -> bool:
        """See `Grammar`."""
        if self.validate_tokens(token_ids) != token_ids:
            return False
        self._position += len(token_ids)
        return True

    def validate_tokens(self, token_ids: list[int]) -> list[int]:
        """See `Grammar`."""
        allowed = self._answer[self._position :]
        right = next(
            (i for i, pair in enumerate(zip(token_ids, allowed, strict=False)) if pair[0] != pair[1]), None
        )
        return token_ids[: min(len(token_ids), len(allowed)) if right is None else right]

    def rollback(self, num_tokens: int) -> None:
        """See `Grammar`."""
        self._position -= num_tokens

    def fill_bitmask(self, row: npt.NDArray[np.int32]) -> None:
        """See `Grammar`."""
        following = self._answer[self._position : self._position + 1]
        row[:] = 0 if following else -1  # what comes behind the answer is cut off by its length
        for token in following:
            row[token // 32] |= np.int32(1 << token % 32)

    def is_terminated(self) -> bool:
        """See `Grammar`."""
        return self._position == len(self._answer)

    def reset(self) -> None:
        """See `Grammar`."""
        self._position = 0

    def failure(self) -> str | None:
        """See `Grammar`."""
        return None


class _Compiler:
    """The grammar library."""

    def compile(self, params: StructuredOutputsParams) -> AnswerGrammar:
        """``ValueError`` for a bad one."""
        assert params.choice is not None
        kind, answer = params.choice
        if kind == BAD:
            raise ValueError("no grammar")
        return AnswerGrammar([int(token) for token in answer.split(",")])


class Grammars(StructuredOutputManager):
    """The real manager, whose compilations end when the simulator says so."""

    def __init__(self, config: VllmConfig) -> None:
        super().__init__(config, run=self._start)
        self._backend = _Compiler()
        self.pending: list[Callable[[], None]] = []

    def _start(self, compilation: Callable[[], None]) -> None:
        self.pending.append(compilation)

    def compile_one(self, rng: random.Random) -> None:
        """One compilation ends."""
        self.pending.pop(rng.randrange(len(self.pending)))()

    def _vocab_size(self) -> int:
        return _VOCABULARY


def check_masks(
    masks: GrammarOutput | None, step: SchedulerOutput, messages: Iterable[EngineCoreOutputs]
) -> None:
    """I9: what a step told the clients was allowed, as seen when all earlier steps had been processed."""
    told = {output.request_id: output.new_token_ids for message in messages for output in message.outputs}
    row = 0
    for request_id in masks.structured_output_request_ids if masks is not None else ():
        rows = 1 + len(step.scheduled_spec_decode_tokens.get(request_id, ()))
        for token, mask in zip(told.get(request_id, ()), masks.grammar_bitmask[row:], strict=False):
            allowed = int(mask[token // 32]) >> token % 32 & 1
            require(bool(allowed), "I9", f"{request_id} says {token}, which its mask forbids")
        row += rows


def masks_move_grammars_on(original: Any) -> Any:
    """The state in which a grammar made the masks for drafts is kept."""

    def fill(request: Request, drafts: list[int], rows: Any) -> None:
        with patch.object(AnswerGrammar, "rollback", lambda self, count: None):
            original(request, drafts, rows)

    return staticmethod(fill)


def grammar_is_not_waited_for(original: Any) -> Any:
    """A request starts before its grammar is there."""
    del original

    def check(self: WaitingPass, request: Request) -> None:
        request.move_to(RequestStatus.WAITING)

    return check


def grammar_never_fails(original: Any) -> Any:
    """Nobody hears that a grammar is none."""
    del original

    def check(self: WaitingPass, request: Request) -> Verdict | None:
        structured = request.structured_output_request
        if structured is None or structured.grammar is None:
            return Verdict.SKIP
        request.move_to(RequestStatus.WAITING)
        return None

    return check
