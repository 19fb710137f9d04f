"""Which tokens a request has seen and how often it produced them, kept up to date token by token. Layer: L6.

Owns: the counter of one request and the flat form in which the rows of a step are handed to the penalties. Only tokens
that occur are stored, so neither memory nor time depends on the vocabulary. Must not know: penalties' formulas, rows.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

_FIRST_CAPACITY = 64


@dataclass(slots=True)
class CountedTokens:
    """Seen tokens of all rows of a step: entry i says that row `rows[i]` produced `tokens[i]` `counts[i]` times.

    A count of 0 means that the token is in the prompt only. `rows`, `tokens` int64 `[n]`, `counts` float32 `[n]`.
    """

    rows: Tensor
    tokens: Tensor
    counts: Tensor


class TokenCounter:
    """Tokens of one request, of which `num_counted` were produced. Ids outside the vocabulary are not kept."""

    def __init__(self, vocab_size: int, prompt_ids: Sequence[int], output_ids: Iterable[int]) -> None:
        self._vocab_size = vocab_size
        self.num_counted = 0
        self._position: dict[int, int] = {}
        self.tokens = np.empty(_FIRST_CAPACITY, dtype=np.int64)
        self.counts = np.empty(_FIRST_CAPACITY, dtype=np.float32)
        for token in dict.fromkeys(prompt_ids):
            self._find(token)
        for token in output_ids:
            self.add(token)

    def __len__(self) -> int:
        return len(self._position)

    def add(self, token: int) -> None:
        """The request produced `token`."""
        self.num_counted += 1
        where = self._find(token)
        if where >= 0:
            self.counts[where] += 1

    def _find(self, token: int) -> int:
        where = self._position.get(token)
        if where is not None:
            return where
        if not 0 <= token < self._vocab_size:
            return -1
        where = len(self._position)
        if where == len(self.tokens):
            self.tokens = np.concatenate([self.tokens, np.empty_like(self.tokens)])
            self.counts = np.concatenate([self.counts, np.empty_like(self.counts)])
        self._position[token] = where
        self.tokens[where] = token
        self.counts[where] = 0.0
        return where


def gather_counts(counters: dict[int, TokenCounter], device: torch.device) -> CountedTokens:
    """The flat form of row → counter."""
    sizes = [len(counter) for counter in counters.values()]
    rows = np.repeat(np.fromiter(counters, dtype=np.int64, count=len(counters)), sizes)
    parts = [(counter.tokens[:size], counter.counts[:size]) for counter, size in _sized(counters, sizes)]
    tokens = np.concatenate([part[0] for part in parts]) if parts else np.empty(0, dtype=np.int64)
    counts = np.concatenate([part[1] for part in parts]) if parts else np.empty(0, dtype=np.float32)
    return CountedTokens(
        torch.from_numpy(rows).to(device),
        torch.from_numpy(tokens).to(device),
        torch.from_numpy(counts).to(device),
    )


def _sized(counters: dict[int, TokenCounter], sizes: list[int]) -> Iterable[tuple[TokenCounter, int]]:
    return zip(counters.values(), sizes, strict=True)
