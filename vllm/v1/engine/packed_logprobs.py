"""One wide position of log probabilities as the arrays it came in.  Layer L7.

Owns how a row of arrays is read as the mapping of a position, entry by entry, so that a row as wide as the vocabulary
costs its reader time and not the loop that serves everybody. Must not know how texts are made, nor HTTP.
"""

from __future__ import annotations

import heapq
from collections.abc import Callable, ItemsView, Iterator, Mapping, Sequence, ValuesView
from itertools import islice
from typing import Any

from vllm.logprobs import Logprob

# A tuple of arrays costs less than its records from this many on; only such rows are kept as they came.
WIDE_ROW = 1024

TextOf = Callable[[int, Sequence[int]], str]


class PackedPosition(Mapping[int, Logprob]):
    """Equal to the dict of the same position, which is made while it is read.

    `token_ids`, `logprobs`: arrays, column 0 the token that stands there with `rank`, the others by falling
    probability. `text_of` gives a token's text behind `context`; None leaves texts out.
    """

    __slots__ = ("_context", "_logprobs", "_rank", "_text_of", "_token_ids")

    def __init__(
        self, token_ids: Any, logprobs: Any, rank: int, text_of: TextOf | None, context: Sequence[int]
    ) -> None:
        self._token_ids = token_ids
        self._logprobs = logprobs
        self._rank = rank
        self._text_of = text_of
        self._context = context

    def __getitem__(self, token_id: int) -> Logprob:
        column = next(iter((self._token_ids == token_id).nonzero()[0]), None)
        if column is None or token_id < 0:
            raise KeyError(token_id)
        return self._entry(int(column), token_id, float(self._logprobs[column]))

    def _entry(self, column: int, token_id: int, logprob: float) -> Logprob:
        text = None if self._text_of is None else self._text_of(token_id, self._context)
        return Logprob(logprob, column or self._rank, text)

    def __iter__(self) -> Iterator[int]:
        return (token_id for token_id, _ in self.entries())

    def __len__(self) -> int:
        ids = self._token_ids
        return int((ids >= 0).sum()) - int((ids[1:] == ids[0]).sum())

    def items(self) -> ItemsView[int, Logprob]:
        return _Entries(self)

    def values(self) -> ValuesView[Logprob]:
        return _Records(self)

    def entries(self) -> Iterator[tuple[int, Logprob]]:
        """Token and record: the token that stands there first, then the others by falling probability."""
        token_ids, logprobs = self._token_ids.tolist(), self._logprobs.tolist()
        first, text_of, context = token_ids[0], self._text_of, self._context
        yield first, self._entry(0, first, logprobs[0])
        for column in range(1, len(token_ids)):
            token_id = token_ids[column]
            if token_id >= 0 and token_id != first:
                text = None if text_of is None else text_of(token_id, context)
                yield token_id, Logprob(logprobs[column], column, text)


def ranked(position: Mapping[int, Logprob]) -> Iterator[tuple[int, Logprob]]:
    """Entries of any position by falling probability; of equals the token that stands there is first."""
    if not isinstance(position, PackedPosition):
        return iter(sorted(position.items(), key=_falling))
    others = position.entries()
    return heapq.merge(islice(others, 1), others, key=_falling)


def _falling(entry: tuple[int, Logprob]) -> float:
    return -entry[1].logprob


class _Entries(ItemsView[int, Logprob]):
    def __init__(self, position: PackedPosition) -> None:
        super().__init__(position)
        self._position = position

    def __iter__(self) -> Iterator[tuple[int, Logprob]]:
        return self._position.entries()


class _Records(ValuesView[Logprob]):
    def __init__(self, position: PackedPosition) -> None:
        super().__init__(position)
        self._position = position

    def __iter__(self) -> Iterator[Logprob]:
        return (record for _, record in self._position.entries())
