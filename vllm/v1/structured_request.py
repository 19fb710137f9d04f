"""The structured-output state that hangs on one request.

Owns the record and the small protocol a grammar fulfils.  Must not know how a grammar is compiled or how masks are
applied.  Layer: L2 (values).
"""

from dataclasses import dataclass
from typing import Protocol

import numpy as np
import numpy.typing as npt

from vllm.sampling_params import StructuredOutputsParams


class Grammar(Protocol):
    """Matcher state of one request."""

    def accept_tokens(self, token_ids: list[int]) -> bool:
        """Advance by ``token_ids``; False (state unchanged) if the grammar does not allow them."""
        ...

    def validate_tokens(self, token_ids: list[int]) -> list[int]:
        """The longest prefix of ``token_ids`` that the grammar allows; the state stays as it is."""
        ...

    def rollback(self, num_tokens: int) -> None:
        """Take back the last ``num_tokens`` accepted tokens."""
        ...

    def fill_bitmask(self, row: npt.NDArray[np.int32]) -> None:
        """Write the packed mask of the tokens allowed next (bit 1 = allowed) into ``row``."""
        ...

    def is_terminated(self) -> bool:
        """True if the grammar has been matched to its end, so that only end of sequence may follow."""
        ...

    def reset(self) -> None:
        """Back to the start state."""
        ...

    def failure(self) -> str | None:
        """Why the grammar can be followed no further (it became too complex); None as long as it can."""
        ...


@dataclass(slots=True)
class StructuredOutputRequest:
    """What a request has to obey, and the matcher once it is compiled.

    ``error`` is set instead of ``grammar`` where compilation failed; it ends only this request.  ``is_compiling``:
    compilation was asked for, so that nobody asks twice.
    """

    params: StructuredOutputsParams
    grammar: Grammar | None = None
    error: str | None = None
    is_compiling: bool = False

    @property
    def is_grammar_ready(self) -> bool:
        """True once compilation has ended, well or not."""
        return self.grammar is not None or self.error is not None

    @classmethod
    def from_params(cls, params: StructuredOutputsParams | None) -> "StructuredOutputRequest | None":
        """The record for ``params``; None where nothing is constrained."""
        return None if params is None else cls(params)
