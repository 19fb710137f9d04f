"""Log probabilities as results carry them: one small dict per position, or flat arrays. Layer: L1."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, MutableSequence
from dataclasses import dataclass, field
from typing import TypeAlias, overload


@dataclass
class Logprob:
    """Log probability of one token at one position; `rank` counts from 1."""

    logprob: float
    rank: int | None = None
    decoded_token: str | None = None


LogprobsOnePosition: TypeAlias = dict[int, Logprob]


@dataclass
class FlatLogprobs(MutableSequence[LogprobsOnePosition | None]):
    """The same as a list of dicts, kept in flat arrays: far fewer objects for the garbage collector to visit.

    Reading an item builds its dict. Items can be appended, never changed or removed.
    """

    start_indices: list[int] = field(default_factory=list)
    end_indices: list[int] = field(default_factory=list)
    token_ids: list[int] = field(default_factory=list)
    logprobs: list[float] = field(default_factory=list)
    ranks: list[int | None] = field(default_factory=list)
    decoded_tokens: list[str | None] = field(default_factory=list)

    def append(self, value: LogprobsOnePosition | None) -> None:
        """Add a position; None adds an empty one."""
        entries = value or {}
        self.append_fast(
            list(entries),
            [entry.logprob for entry in entries.values()],
            [entry.rank for entry in entries.values()],
            [entry.decoded_token for entry in entries.values()],
        )

    def append_fast(
        self,
        token_ids: list[int],
        logprobs: list[float],
        ranks: Iterable[int | None],
        decoded_tokens: Iterable[str | None],
    ) -> None:
        """Add a position from parallel lists, without building its dict."""
        self.start_indices.append(len(self.token_ids))
        self.token_ids.extend(token_ids)
        self.logprobs.extend(logprobs)
        self.ranks.extend(ranks)
        self.decoded_tokens.extend(decoded_tokens)
        self.end_indices.append(len(self.token_ids))

    def extend(self, values: Iterable[LogprobsOnePosition | None]) -> None:
        """Add several positions."""
        for value in values:
            self.append(value)

    def __len__(self) -> int:
        return len(self.start_indices)

    @overload
    def __getitem__(self, index: int) -> LogprobsOnePosition: ...
    @overload
    def __getitem__(self, index: slice) -> FlatLogprobs: ...
    def __getitem__(self, index: int | slice) -> LogprobsOnePosition | FlatLogprobs:
        if isinstance(index, slice):
            part = FlatLogprobs()
            for position in range(*index.indices(len(self))):
                part.append(self[position])
            return part
        begin, end = self.start_indices[index], self.end_indices[index]
        return {
            self.token_ids[i]: Logprob(self.logprobs[i], self.ranks[i], self.decoded_tokens[i])
            for i in range(begin, end)
        }

    def __iter__(self) -> Iterator[LogprobsOnePosition]:
        return (self[position] for position in range(len(self)))

    def __setitem__(self, index: object, value: object) -> None:
        raise TypeError("FlatLogprobs can only grow")

    def __delitem__(self, index: object) -> None:
        raise TypeError("FlatLogprobs can only grow")

    def insert(self, index: int, value: LogprobsOnePosition | None) -> None:
        raise TypeError("FlatLogprobs can only grow at its end")


PromptLogprobs: TypeAlias = FlatLogprobs | list[LogprobsOnePosition | None]
SampleLogprobs: TypeAlias = FlatLogprobs | list[LogprobsOnePosition]


def create_prompt_logprobs(flat_logprobs: bool) -> PromptLogprobs:
    """An empty container whose first entry stands for the first prompt token, which has no log probability."""
    result: PromptLogprobs = FlatLogprobs() if flat_logprobs else []
    result.append(None)
    return result


def create_sample_logprobs(flat_logprobs: bool) -> SampleLogprobs:
    """An empty container."""
    return FlatLogprobs() if flat_logprobs else []


def append_logprobs_for_next_position(
    request_logprobs: PromptLogprobs | SampleLogprobs,
    token_ids: list[int],
    logprobs: list[float],
    decoded_tokens: Iterable[str | None],
    rank: int,
    num_logprobs: int,
) -> None:
    """Add one position. Item 0 of the lists is the token that was taken, with its `rank`; the top ones follow.

    `num_logprobs` top tokens are kept (−1: all given). A taken token that is also among them appears once.
    """
    count = len(logprobs) if num_logprobs == -1 else num_logprobs
    ranks: list[int | None] = [rank, *range(1, count + 1)]
    if isinstance(request_logprobs, FlatLogprobs):
        request_logprobs.append_fast(token_ids, logprobs, ranks[: len(token_ids)], decoded_tokens)
        return
    request_logprobs.append(
        {
            token_id: Logprob(logprob, token_rank, token)
            for token_id, logprob, token_rank, token in zip(
                token_ids, logprobs, ranks, decoded_tokens, strict=False
            )
        }
    )
