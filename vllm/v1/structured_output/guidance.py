"""Grammar matching with the llguidance library.

Owns compiled grammars and the matcher state of each request.  Must not know the scheduler.  Layer: L5 (scheduler).
"""

from __future__ import annotations

import re
from collections import OrderedDict
from collections.abc import Callable
from functools import partial
from typing import Any, Protocol

import numpy as np
import numpy.typing as npt
from llguidance import LLMatcher, LLParserLimits, LLTokenizer

from vllm.sampling_params import StructuredOutputsParams
from vllm.v1.structured_output.grammar_text import grammar_text

COMPILED_GRAMMARS_MAX = 64
"""Compiled grammars kept for further requests; the least recently used one goes first."""

ROW_ITEMS_MAX = 2000
"""Parser items per row of a generated grammar: an object needs four for each optional property."""
FREE_ROW_ITEMS_MAX = 500
"""The same for a grammar of the user's own, which may be ambiguous: work grows with the square of this, and over time."""
PROBE_TOKENS = 4
"""Allowed tokens that a new grammar is tried with: most of those too complex to be followed show it at once."""

_STATE_DUMP = re.compile(r"\s*<(state|non-verbose/?)>.*", re.DOTALL)


class BackedTokenizer(Protocol):
    """A tokenizer whose definition can be written out."""

    @property
    def eos_token_id(self) -> int | None: ...

    @property
    def backend_tokenizer(self) -> Any: ...  # a `tokenizers.Tokenizer`


def limits_for(params: StructuredOutputsParams) -> LLParserLimits:
    """What one grammar may cost; every limit is a count, so that a verdict does not depend on the machine.

    They keep a compilation well below a second and one mask within the time of a few steps.  Past them the library
    gives up.
    """
    return LLParserLimits(
        initial_lexer_fuel=300_000,
        step_lexer_fuel=100_000,
        step_max_items=20_000,
        max_items_in_row=ROW_ITEMS_MAX if params.grammar is None else FREE_ROW_ITEMS_MAX,
        max_grammar_size=20_000,
        verbose_errors=False,
    )


class GuidanceGrammar:
    """The matcher of one request.

    The library stops a matcher whose grammar admits nothing more; from then on only end-of-sequence tokens follow,
    which are counted here because the library does not take them.
    """

    def __init__(
        self, matcher: LLMatcher, eos_token_ids: frozenset[int], on_failure: Callable[[], object]
    ) -> None:
        self._matcher = matcher
        self._eos_token_ids = eos_token_ids
        self._on_failure = on_failure
        self._num_trailing_eos = 0

    def accept_tokens(self, token_ids: list[int]) -> bool:
        for accepted, token_id in enumerate(token_ids):
            if not self._accept(token_id):
                self.rollback(accepted)
                return False
        return True

    def _accept(self, token_id: int) -> bool:
        if self._matcher.is_stopped():
            if token_id not in self._eos_token_ids:
                return False
            self._num_trailing_eos += 1
            return True
        return bool(self._matcher.try_consume_tokens([token_id]) == 1)

    def validate_tokens(self, token_ids: list[int]) -> list[int]:
        accepted = 0
        while accepted < len(token_ids) and self._accept(token_ids[accepted]):
            accepted += 1
        self.rollback(accepted)
        return token_ids[:accepted]

    def rollback(self, num_tokens: int) -> None:
        trailing = min(num_tokens, self._num_trailing_eos)
        self._num_trailing_eos -= trailing
        if num_tokens > trailing:
            self._matcher.rollback(num_tokens - trailing)

    def fill_bitmask(self, row: npt.NDArray[np.int32]) -> None:
        self._matcher.unsafe_compute_mask_ptr(row.ctypes.data, row.nbytes)
        if self._matcher.is_error():
            # The request ends with its next token; until then one must be samplable.
            row.fill(-1)

    def failure(self) -> str | None:
        if not self._matcher.is_error():
            return None
        self._on_failure()
        return _message_of(self._matcher)

    def is_terminated(self) -> bool:
        return bool(self._matcher.is_stopped())

    def reset(self) -> None:
        self._num_trailing_eos = 0
        self._matcher.reset()


class GuidanceBackend:
    """Compiles constraints for one tokenizer.

    ``vocab_size`` is the model's, which may be larger than the tokenizer's.  ``eos_token_ids`` may end any grammar.
    """

    def __init__(self, tokenizer: BackedTokenizer, vocab_size: int, eos_token_ids: frozenset[int]) -> None:
        eos = sorted(
            eos_token_ids | ({tokenizer.eos_token_id} if tokenizer.eos_token_id is not None else set())
        )
        self._eos_token_ids = frozenset(eos)
        definition = tokenizer.backend_tokenizer.to_str()
        self._vocab_size = vocab_size
        self._tokenizer = LLTokenizer(definition, n_vocab=vocab_size, eos_token=eos or None)
        self._compiled: OrderedDict[str, LLMatcher] = OrderedDict()

    def compile(self, params: StructuredOutputsParams) -> GuidanceGrammar:
        """A fresh matcher.

        Raises:
            ValueError: the constraint cannot be compiled; the message is meant for the user.
        """
        text = grammar_text(params)
        matcher = self._compiled.get(text)
        if matcher is None:
            matcher = LLMatcher(self._tokenizer, text, log_level=0, limits=limits_for(params))
            self._probe(matcher)
            self._compiled[text] = matcher
            if len(self._compiled) > COMPILED_GRAMMARS_MAX:
                self._compiled.popitem(last=False)
        else:
            self._compiled.move_to_end(text)
        # Matchers of one grammar share what the library has worked out, and with it what is left of its limits.
        forget = partial(self._compiled.pop, text, None)
        return GuidanceGrammar(matcher.deep_copy(), self._eos_token_ids, forget)

    def _probe(self, matcher: LLMatcher) -> None:
        """Raise ``ValueError`` for a grammar that is wrong, or too complex from the start."""
        if matcher.is_error():
            raise ValueError(_message_of(matcher))
        walker = matcher.deep_copy()
        row = np.zeros(-(-self._vocab_size // 32), dtype=np.int32)
        for _ in range(PROBE_TOKENS):
            walker.unsafe_compute_mask_ptr(row.ctypes.data, row.nbytes)
            allowed = np.flatnonzero(np.unpackbits(row.view(np.uint8), bitorder="little"))
            candidates = allowed[: len(self._eos_token_ids) + 1].tolist()
            token = next((token for token in candidates if token not in self._eos_token_ids), None)
            if token is not None:
                walker.try_consume_tokens([token])
            if walker.is_error():
                raise ValueError(f"the grammar is too complex: {_message_of(walker)}")
            if token is None or walker.is_stopped():
                return


def _message_of(matcher: LLMatcher) -> str:
    """The library's message without the dump of its state."""
    return _STATE_DUMP.sub("", str(matcher.get_error())).strip()


def check_constraint(params: StructuredOutputsParams) -> None:
    """Raise ``ValueError`` with a message for the user if the constraint cannot be compiled."""
    message = LLMatcher.validate_grammar(grammar_text(params), limits=limits_for(params))
    if message and not message.startswith("WARNING"):
        raise ValueError(message)
