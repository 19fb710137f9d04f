"""Grammar matching with the llguidance library.

Owns compiled grammars and the matcher state of each request.  Must not know the scheduler.  Layer: L5 (scheduler).
"""

from __future__ import annotations

from collections import OrderedDict
from typing import Any, Protocol

import numpy as np
import numpy.typing as npt
from llguidance import LLMatcher, LLTokenizer

from vllm.sampling_params import StructuredOutputsParams
from vllm.v1.structured_output.grammar_text import grammar_text

COMPILED_GRAMMARS_MAX = 64
"""Compiled grammars kept for further requests; the least recently used one goes first."""


class BackedTokenizer(Protocol):
    """A tokenizer whose definition can be written out."""

    @property
    def eos_token_id(self) -> int | None: ...

    @property
    def backend_tokenizer(self) -> Any: ...  # a `tokenizers.Tokenizer`


class GuidanceGrammar:
    """The matcher of one request.

    The library stops a matcher whose grammar admits nothing more; from then on only end-of-sequence tokens follow,
    which are counted here because the library does not take them.
    """

    def __init__(self, matcher: LLMatcher, eos_token_ids: frozenset[int]) -> None:
        self._matcher = matcher
        self._eos_token_ids = eos_token_ids
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
            matcher = LLMatcher(self._tokenizer, text, log_level=0)
            if matcher.is_error():
                raise ValueError(matcher.get_error())
            self._compiled[text] = matcher
            if len(self._compiled) > COMPILED_GRAMMARS_MAX:
                self._compiled.popitem(last=False)
        else:
            self._compiled.move_to_end(text)
        return GuidanceGrammar(matcher.deep_copy(), self._eos_token_ids)


def check_constraint(params: StructuredOutputsParams) -> None:
    """Raise ``ValueError`` with a message for the user if the constraint cannot be compiled."""
    message = LLMatcher.validate_grammar(grammar_text(params))
    if message and not message.startswith("WARNING"):
        raise ValueError(message)
