"""Log probabilities of one request: arrays of the core → `Logprob` records with text.  Layer L7.

Owns how the columns of a row become the dictionary of a position, and the text shown for a single token. Must not know
how the numbers were computed, nor HTTP.
"""

from __future__ import annotations

import itertools
from collections.abc import Mapping, Sequence
from typing import Any
from weakref import WeakKeyDictionary, ref

import numpy as np

from vllm.logprobs import Logprob, create_prompt_logprobs, create_sample_logprobs
from vllm.v1.engine.detokenizer import REPLACEMENT
from vllm.v1.engine.packed_logprobs import WIDE_ROW, PackedPosition
from vllm.v1.messages import EngineCoreOutput, EngineCoreRequest
from vllm.v1.outputs import LogprobsLists, LogprobsTensors

# A character has at most four bytes: at most three earlier tokens hold its beginning.
CHARACTER_CONTEXT = 3


class TokenTexts:
    """Text of single tokens, remembered per tokenizer; at most one entry per vocabulary item.

    A token is decoded behind an ordinary one, so that a leading space is not lost.
    """

    _by_tokenizer: WeakKeyDictionary[Any, TokenTexts] = WeakKeyDictionary()

    def __init__(self, tokenizer: Any) -> None:
        self._tokenizer = ref(tokenizer)
        anchor: list[int] = tokenizer.encode("a", add_special_tokens=False)[-1:]
        self._anchor = anchor
        self._anchor_length = len(tokenizer.decode(anchor))
        self._texts: dict[int, str] = {}
        self._last_tail: tuple[tuple[int, ...], list[tuple[list[int], str]]] | None = None

    @classmethod
    def of(cls, tokenizer: Any) -> TokenTexts:
        texts = cls._by_tokenizer.get(tokenizer)
        if texts is None:
            texts = cls._by_tokenizer[tokenizer] = cls(tokenizer)
        return texts

    def text(self, token_id: int, context: Sequence[int]) -> str:
        """Text of a token that follows `context`.

        A token that ends inside a character has no text of its own; the one that completes it has the whole character.
        """
        text = self._texts.get(token_id)
        if text is None:
            text = self._decode([*self._anchor, token_id])[self._anchor_length :]
            self._texts[token_id] = text
        return self._completed(token_id, context, text) if REPLACEMENT in text else text

    def _decode(self, token_ids: list[int]) -> str:
        tokenizer = self._tokenizer()
        return "" if tokenizer is None else str(tokenizer.decode(token_ids))

    def _completed(self, token_id: int, context: Sequence[int], text: str) -> str:
        for before, known in self._beginnings(tuple(context[-CHARACTER_CONTEXT:])):
            whole = self._decode([*before, token_id])
            if REPLACEMENT not in whole and whole.startswith(known):
                return whole[len(known) :]
        return text.rstrip(REPLACEMENT)

    def _beginnings(self, tail: tuple[int, ...]) -> list[tuple[list[int], str]]:
        """What can stand before the rest of a character: tokens that end inside one, with their complete text.

        All tokens of a wide position ask for the same tail.
        """
        if self._last_tail is None or self._last_tail[0] != tail:
            found = []
            for size in range(1, len(tail) + 1):
                before = [*self._anchor, *tail[-size:]]
                text = self._decode(before)
                if text.endswith(REPLACEMENT):
                    found.append((before, text.rstrip(REPLACEMENT)))
            self._last_tail = tail, found
        return self._last_tail[1]


class LogprobsProcessor:
    """Collects the log probabilities of one request.

    `logprobs`: one entry per output token, None if not asked for. `prompt_logprobs`: one entry per prompt token, the
    first of them None. `num_logprobs`: alternatives per position, −1 = all that arrive. `packs_wide`: what is wide is
    kept as it came, to be read later (`PackedPosition`), where containers are lists.
    """

    def __init__(
        self,
        tokenizer: Any | None,
        logprobs: Any | None,
        prompt_logprobs: Any | None,
        cumulative_logprob: float | None,
        num_logprobs: int | None,
        num_prompt_logprobs: int | None,
        logprob_token_ids: Sequence[int] | None = None,
    ) -> None:
        self.tokenizer = tokenizer
        self.logprobs = logprobs
        self.prompt_logprobs = prompt_logprobs
        self.cumulative_logprob = cumulative_logprob
        self.num_logprobs = num_logprobs
        self.num_prompt_logprobs = num_prompt_logprobs
        self._wanted_ids = frozenset(logprob_token_ids) if logprob_token_ids else None
        self._texts = TokenTexts.of(tokenizer) if tokenizer is not None else None
        self._sampled: list[int] = []
        self.packs_wide = False

    @classmethod
    def from_new_request(cls, tokenizer: Any | None, request: EngineCoreRequest) -> LogprobsProcessor:
        """The processor for a request; one that does nothing if no log probabilities were asked for."""
        params = request.sampling_params
        if params is None:
            return cls(None, None, None, None, None, None)
        wanted, wanted_prompt = params.num_logprobs, params.prompt_logprobs
        return cls(
            tokenizer if wanted is not None or wanted_prompt is not None else None,
            None if wanted is None else create_sample_logprobs(params.flat_logprobs),
            None if wanted_prompt is None else create_prompt_logprobs(params.flat_logprobs),
            None if wanted is None else 0.0,
            wanted,
            wanted_prompt,
            params.logprob_token_ids,
        )

    def update_from_output(self, output: EngineCoreOutput, *, num_tokens: int | None = None) -> None:
        """Take what arrived for this request; of the output only the first `num_tokens` positions (None = all)."""
        if output.new_logprobs is not None and self.num_logprobs is not None:
            self._add_sampled(output.new_logprobs, num_tokens)
        if output.new_prompt_logprobs_tensors is not None and self.num_prompt_logprobs is not None:
            self._add_prompt(output.new_prompt_logprobs_tensors)

    def pop_prompt_logprobs(self) -> Any | None:
        """All prompt positions so far. Later calls give what arrived since, so that deltas do not repeat it."""
        prompt_logprobs = self.prompt_logprobs
        if prompt_logprobs:
            self.prompt_logprobs = []
        return prompt_logprobs

    def _add_sampled(self, new: LogprobsLists, num_tokens: int | None) -> None:
        rows = zip(new.logprob_token_ids, new.logprobs, new.sampled_token_ranks, strict=False)
        assert self.logprobs is not None
        assert self.cumulative_logprob is not None
        for ids, values, rank in itertools.islice(rows, num_tokens):
            position = self._position(ids, values, int(rank), self.num_logprobs, self._sampled)
            self.cumulative_logprob += float(values[0])
            self.logprobs.append(position)
            self._sampled = [*self._sampled[1 - CHARACTER_CONTEXT :], int(ids[0])]

    def _add_prompt(self, new: LogprobsTensors) -> None:
        assert self.prompt_logprobs is not None
        context: list[int] = []
        ids, values = np.asarray(new.logprob_token_ids), np.asarray(new.logprobs)
        ranks = np.asarray(new.selected_token_ranks).tolist()
        # A long prompt is as much as one wide position.
        wide = ids.size > WIDE_ROW
        for row, rank in enumerate(ranks):
            position = self._position(ids[row], values[row], rank, self.num_prompt_logprobs, context, wide)
            self.prompt_logprobs.append(position)
            context = [*context[1 - CHARACTER_CONTEXT :], int(ids[row][0])]

    def _position(
        self,
        ids: Any,
        values: Any,
        rank: int,
        count: int | None,
        context: list[int],
        wide: bool = False,
    ) -> Mapping[int, Logprob]:
        """The entry of one position; column 0 is the token that stands there, the others are by falling probability.

        `ids`, `values`: arrays or lists. `wide`: the position is one of many.
        """
        columns = len(ids) if count is None or count < 0 or self._wanted_ids else min(count + 1, len(ids))
        if self._packs(columns, wide):
            return PackedPosition(
                np.asarray(ids)[:columns],
                np.asarray(values)[:columns],
                rank,
                None if self._texts is None else self._texts.text,
                context,
            )
        token_ids, logprobs = _plain(ids[:columns]), _plain(values[:columns])
        position: dict[int, Logprob] = {}
        for column in range(columns):
            token_id = token_ids[column]
            if token_id < 0 or token_id in position:
                continue
            if column and self._wanted_ids is not None and token_id not in self._wanted_ids:
                continue
            text = None if self._texts is None else self._texts.text(token_id, context)
            # Named tokens stand in no order, so their place says nothing about their rank.
            other_rank = None if self._wanted_ids is not None else column
            position[token_id] = Logprob(logprobs[column], rank if column == 0 else other_rank, text)
        return position

    def _packs(self, columns: int, wide: bool) -> bool:
        return self.packs_wide and self._wanted_ids is None and (wide or columns > WIDE_ROW)


def _plain(values: Any) -> Any:
    """Nested lists of an array or tensor."""
    return values if isinstance(values, list) else values.tolist()
