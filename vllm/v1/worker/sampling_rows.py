"""The rows of logits of a step and their sampling parameters. Layer: L6.

Owns: which request has which row, kept as stable as possible from step to step, and the `SamplingMetadata` made of the
rows' parameters. In a steady decode phase nothing is rebuilt. Must not know: the forward pass, block tables.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import numpy as np
import torch
from torch import Tensor

from vllm.sampling_params import SamplingParams, SamplingType
from vllm.v1.sample.logits_processor import (
    BatchUpdate,
    BatchUpdateBuilder,
    LogitsProcessors,
    MoveDirectionality,
)
from vllm.v1.sample.metadata import SamplingMetadata
from vllm.v1.sample.ops.draws import row_draws
from vllm.v1.sample.ops.token_counts import TokenCounter, gather_counts
from vllm.v1.worker.input_batch import Int64Array, RequestState, RequestStates


def has_penalties(params: SamplingParams) -> bool:
    """Whether logits depend on what the request produced before."""
    return bool(params.frequency_penalty or params.presence_penalty or params.repetition_penalty != 1.0)


class SamplingRows:
    """Rows 0 … n−1 belong to the requests that sample in this step.

    `update` keeps each request's row where it can; a row that became free is given to a new request or filled from
    the end. Logits processors are told with the same `BatchUpdate`.
    """

    def __init__(self, vocab_size: int, device: torch.device, logitsprocs: LogitsProcessors) -> None:
        self._vocab_size = vocab_size
        self._device = device
        self._logitsprocs = logitsprocs
        self._builder = BatchUpdateBuilder()
        self._row_of: dict[str, int] = {}
        self._counters: dict[str, TokenCounter] = {}
        self._seeds = np.empty(0, dtype=np.uint64)
        self._replaying: list[int] = []
        self._metadata: SamplingMetadata | None = None
        self.requests: list[RequestState] = []
        self.slots: Int64Array = np.empty(0, dtype=np.int64)

    def __len__(self) -> int:
        return len(self.requests)

    def row_of(self, req_id: str) -> int | None:
        """The row of a request in this step."""
        return self._row_of.get(req_id)

    # -- which rows -------------------------------------------------------------------------------

    def update(self, sampling: Sequence[RequestState]) -> None:
        """Make the rows those of `sampling`, and let the logits processors follow."""
        self._remove_absent(sampling)
        arrived = self._add_new(sampling)
        self._close_gaps()
        changed = self._builder.batch_changed or arrived
        update = self._builder.get_and_reset(len(self.requests))
        # A request may have got another slot in between, so slots are always read anew.
        self.slots = np.fromiter((state.slot for state in self.requests), dtype=np.int64)
        if changed or self._metadata is None:
            self._rebuild()
        self._tell_processors(update)

    def _tell_processors(self, update: BatchUpdate | None) -> None:
        """Every processor hears of every change, also behind one that fails: the next steps depend on it."""
        failures: list[Exception] = []
        for processor in self._logitsprocs.all:
            try:
                processor.update_state(update)
            except Exception as error:  # a processor may be anybody's
                failures.append(error)
        if failures:
            raise failures[0]

    def _remove_absent(self, sampling: Sequence[RequestState]) -> None:
        present = {id(state) for state in sampling}
        for row, state in enumerate(self.requests):
            if id(state) not in present:  # a request that was replaced by a new one of its name is absent too
                del self._row_of[state.req_id]
                self._counters.pop(state.req_id, None)
                self._builder.removed_append(row)

    def _add_new(self, sampling: Sequence[RequestState]) -> bool:
        arrived = False
        for state in sampling:
            if state.req_id in self._row_of:
                continue
            arrived = True
            row = self._builder.pop_removed()
            if row is None:
                row = len(self.requests)
                self.requests.append(state)
            else:
                self.requests[row] = state
            self._row_of[state.req_id] = row
            self._builder.added.append(
                (row, state.sampling_params, state.prompt_token_ids, state.output_token_ids)
            )
        return arrived

    def _close_gaps(self) -> None:
        while (gap := self._builder.peek_removed()) is not None:
            while self.requests and self._row_of.get(self.requests[-1].req_id) != len(self.requests) - 1:
                self.requests.pop()
            last = len(self.requests) - 1
            if gap >= last:
                break
            self._builder.pop_removed()
            moving = self.requests.pop()
            self.requests[gap] = moving
            self._row_of[moving.req_id] = gap
            self._builder.moved.append((last, gap, MoveDirectionality.UNIDIRECTIONAL))

    # -- their parameters -------------------------------------------------------------------------

    def _rebuild(self) -> None:
        params = [state.sampling_params for state in self.requests]
        self._seeds = np.fromiter((state.seed for state in self.requests), dtype=np.uint64)
        random = [p.sampling_type is not SamplingType.GREEDY for p in params]
        top_p = [p.top_p for p in params]
        top_k = [p.top_k if 0 < p.top_k < self._vocab_size else self._vocab_size for p in params]
        self._replaying = [row for row, p in enumerate(params) if p.trace_decode_token_ids]
        counts = [p.num_logprobs for p in params if p.num_logprobs is not None]
        penalised = any(has_penalties(p) for p in params)
        self._metadata = SamplingMetadata(
            temperature=self._floats([p.temperature for p in params]) if any(random) else None,
            all_greedy=not any(random),
            all_random=all(random) and bool(random),
            top_p=self._floats(top_p) if any(p < 1.0 for p in top_p) else None,
            top_k=self._longs(top_k) if any(k < self._vocab_size for k in top_k) else None,
            generators={},
            max_num_logprobs=None if not counts else -1 if -1 in counts else max(counts),
            num_logprobs=[p.num_logprobs for p in params] if counts else None,
            no_penalties=not penalised,
            prompt_token_ids=None,
            frequency_penalties=self._floats([p.frequency_penalty for p in params] if penalised else []),
            presence_penalties=self._floats([p.presence_penalty for p in params] if penalised else []),
            repetition_penalties=self._floats([p.repetition_penalty for p in params] if penalised else []),
            output_token_ids=[state.output_token_ids for state in self.requests],
            allowed_token_ids_mask=self._banned_by_allow_list(params),
            bad_words_token_ids={
                row: p.bad_words_token_ids for row, p in enumerate(params) if p.bad_words_token_ids
            },
            logitsprocs=self._logitsprocs,
            logprob_token_ids={
                row: ids for row, p in enumerate(params) if (ids := self._inside(p.logprob_token_ids))
            }
            or None,
        )

    def _floats(self, values: Sequence[float]) -> Tensor:
        return torch.tensor(values, dtype=torch.float32, device=self._device)

    def _longs(self, values: Sequence[int]) -> Tensor:
        return torch.tensor(values, dtype=torch.int64, device=self._device)

    def _inside(self, token_ids: Sequence[int] | None) -> list[int]:
        return [token for token in token_ids or () if 0 <= token < self._vocab_size]

    def _banned_by_allow_list(self, params: Sequence[SamplingParams]) -> Tensor | None:
        if not any(p.allowed_token_ids for p in params):
            return None
        banned = torch.zeros(len(params), self._vocab_size, dtype=torch.bool)
        for row, p in enumerate(params):
            if p.allowed_token_ids:
                banned[row] = True
                banned[row, self._inside(p.allowed_token_ids)] = False
        return banned.to(self._device)

    def metadata(self, states: RequestStates) -> SamplingMetadata:
        """The metadata of this step: the rows' parameters with this step's draws and token counts."""
        metadata = self._metadata
        if metadata is None:
            raise RuntimeError("update() must come before metadata()")
        if not metadata.all_greedy:
            positions = states.num_tokens[self.slots].astype(np.uint64)
            draws = torch.from_numpy(row_draws(self._seeds, positions)).to(self._device)
            metadata = replace(metadata, draws=draws)
        if not metadata.no_penalties:
            counters = {
                row: self._counter(state)
                for row, state in enumerate(self.requests)
                if has_penalties(state.sampling_params)
            }
            metadata = replace(metadata, counted_tokens=gather_counts(counters, self._device))
        if self._replaying:
            metadata = replace(metadata, forced_token_ids=self._forced_tokens())
        return metadata

    def _forced_tokens(self) -> dict[int, int]:
        """The next token of each recorded output that is not used up."""
        forced = {}
        for row in self._replaying:
            request = self.requests[row]
            recorded, place = request.sampling_params.trace_decode_token_ids, len(request.output_token_ids)
            if recorded is not None and place < len(recorded) and 0 <= recorded[place] < self._vocab_size:
                forced[row] = recorded[place]
        return forced

    def _counter(self, state: RequestState) -> TokenCounter:
        """The counter of a request, brought up to its last token."""
        counter, outputs = self._counters.get(state.req_id), state.output_token_ids
        if counter is None or counter.num_counted > len(outputs):  # new, or outputs were taken back
            # Only the repetition penalty looks at the prompt.
            prompt = state.prompt_token_ids if state.sampling_params.repetition_penalty != 1.0 else []
            counter = self._counters[state.req_id] = TokenCounter(self._vocab_size, prompt, outputs)
        for token in outputs[counter.num_counted :]:
            counter.add(token)
        return counter
