"""What the worker remembers of its requests: tokens, progress, block tables. Layer: L6.

Owns: `RequestStates`, the worker's own copy of every running request, changed only by scheduler outputs and by the
tokens sampled here. Must not know: the order of rows in a step, sampling rules, devices.

A request has a *slot* from the step that brings it until it ends or is preempted. Arrays are indexed by slot, so a
step's inputs are gathered with a few array operations whatever the order of its rows.
"""

from __future__ import annotations

import heapq
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field

import numpy as np
import numpy.typing as npt

from vllm.sampling_params import SamplingParams
from vllm.v1.core.sched.output import CachedRequestData, NewRequestData, SchedulerOutput
from vllm.v1.sample.ops.draws import seed_of_request, seed_to_word
from vllm.v1.worker.block_table import MultiGroupBlockTable
from vllm.v1.worker.prompt_logprobs import PromptLogprobs

Int32Array = npt.NDArray[np.int32]
Int64Array = npt.NDArray[np.int64]

_FIRST_WIDTH = 1024


@dataclass(slots=True)
class RequestState:
    """One request on this worker. `slot` is −1 while it is preempted.

    `output_token_ids` is a live list: sampling rules hold on to it and see every new token.
    """

    req_id: str
    slot: int
    prompt_token_ids: list[int]
    sampling_params: SamplingParams
    seed: int
    """64-bit word that the request's draws come from."""
    output_token_ids: list[int] = field(default_factory=list)
    prompt_logprobs: PromptLogprobs | None = None
    """What was collected so far, while prompt log probabilities are under way."""

    @property
    def num_prompt_tokens(self) -> int:
        """Length of the prompt."""
        return len(self.prompt_token_ids)


class RequestStates:
    """All requests of this worker.

    Arrays by slot: `tokens[slot, i]` is token i of the request; `num_tokens` how many are known; `num_computed` how
    many were computed before the step being prepared; `replay_end` the position up to which cached blocks are only
    read again (0: none).
    """

    def __init__(
        self,
        num_slots: int,
        max_model_len: int,
        widths: Sequence[int],
        engine_seed: int,
        replay_tokens: int = 0,
    ) -> None:
        self.max_model_len = max_model_len
        self.engine_seed = engine_seed
        self.replay_tokens = replay_tokens
        self.by_id: dict[str, RequestState] = {}
        self.block_tables = MultiGroupBlockTable(num_slots, widths)
        self.tokens: Int32Array = np.zeros((num_slots, min(_FIRST_WIDTH, max_model_len + 1)), dtype=np.int32)
        self.num_tokens: Int64Array = np.zeros(num_slots, dtype=np.int64)
        self.num_computed: Int64Array = np.zeros(num_slots, dtype=np.int64)
        self.replay_start: Int64Array = np.zeros(num_slots, dtype=np.int64)
        self.replay_end: Int64Array = np.zeros(num_slots, dtype=np.int64)
        self._free_slots = list(range(num_slots))
        # Ids of requests in a step that failed. They get no more rows until the scheduler has ended them, so that
        # steps queued behind the failed one still serve the others.
        self._given_up: set[str] = set()

    # -- following the scheduler ------------------------------------------------------------------

    def give_up(self, req_ids: Iterable[str]) -> None:
        """The step of these requests failed; leave them out of later steps until they are ended or sent anew."""
        self._given_up.update(req_ids)

    def runnable(self, num_scheduled_tokens: Mapping[str, int]) -> Mapping[str, int]:
        """What is scheduled, without the requests that were given up."""
        if not self._given_up:
            return num_scheduled_tokens
        return {req_id: n for req_id, n in num_scheduled_tokens.items() if req_id not in self._given_up}

    def apply(self, output: SchedulerOutput) -> None:
        """Follow one scheduler output. On `ValueError` (it does not match what is known) nothing but ends happened."""
        self._given_up -= output.finished_req_ids
        for req_id in output.finished_req_ids:
            self.remove(req_id)
        for req_id in output.preempted_req_ids or ():
            self.preempt(req_id)
        self._check(output)
        for new in output.scheduled_new_reqs:
            self._add(new)
        self._update(output.scheduled_cached_reqs)

    def _check(self, output: SchedulerOutput) -> None:
        arriving = set()
        for new in output.scheduled_new_reqs:
            if new.prompt_token_ids is None or new.sampling_params is None:
                raise ValueError(
                    f"request {new.req_id}: this runner needs prompt_token_ids and sampling_params; "
                    "prompt embeddings and pooling are not served"
                )
            self.block_tables.check(new.req_id, new.block_ids)
            arriving.add(new.req_id)
        cached = output.scheduled_cached_reqs
        for req_id, block_ids in zip(cached.req_ids, cached.new_block_ids, strict=True):
            if req_id in self._given_up:
                continue
            state = self.by_id.get(req_id)
            if state is None:
                raise ValueError(f"request {req_id} is scheduled as known, but this worker does not know it")
            if state.slot < 0 and req_id not in cached.resumed_req_ids:
                raise ValueError(f"request {req_id} was preempted and must be resumed with all of its blocks")
            if block_ids is not None:
                self.block_tables.check(req_id, block_ids)
        known = set(cached.req_ids) | arriving
        unknown = [req_id for req_id in output.num_scheduled_tokens if req_id not in known]
        if unknown:
            raise ValueError(f"requests {', '.join(unknown)} have scheduled tokens but no request data")

    def _add(self, new: NewRequestData) -> None:
        """A request seen for the first time, or again after a preemption with all of its tokens."""
        self.remove(new.req_id)
        self._given_up.discard(new.req_id)
        params = new.sampling_params
        prompt = new.prompt_token_ids
        # Both were checked before anything was changed.
        assert params is not None
        assert prompt is not None
        seed = params.seed
        word = seed_of_request(new.req_id, self.engine_seed) if seed is None else seed_to_word(seed)
        state = RequestState(new.req_id, self._take_slot(), prompt, params, word)
        self.by_id[new.req_id] = state
        if new.prefill_token_ids is not None:
            state.output_token_ids.extend(new.prefill_token_ids[len(prompt) :])
        self._write_tokens(state)
        slot = state.slot
        self.num_computed[slot] = new.num_computed_tokens
        self.replay_start[slot] = new.replay_start
        self.replay_end[slot] = new.replay_start + self.replay_tokens if new.replay_start else 0
        self.block_tables.replace(slot, new.block_ids)

    def _update(self, cached: CachedRequestData) -> None:
        for index, req_id in enumerate(cached.req_ids):
            if req_id in self._given_up:
                continue
            state = self.by_id[req_id]
            new_blocks = cached.new_block_ids[index]
            all_tokens = cached.all_token_ids.get(req_id)
            resumed = req_id in cached.resumed_req_ids
            if state.slot < 0:
                state.slot = self._take_slot()
                all_tokens = all_tokens or [*state.prompt_token_ids, *state.output_token_ids]
            if all_tokens is not None:
                state.output_token_ids[:] = all_tokens[state.num_prompt_tokens :]
                self._write_tokens(state)
            slot = state.slot
            if resumed:
                self.replay_start[slot] = self.replay_end[slot] = 0
                self.block_tables.replace(slot, new_blocks or [[]] * len(self.block_tables))
            elif new_blocks is not None:
                self.block_tables.append(slot, new_blocks)
            self.num_computed[slot] = cached.num_computed_tokens[index]
            if cached.num_output_tokens[index] < len(state.output_token_ids):
                self._truncate(state, cached.num_output_tokens[index])

    def _truncate(self, state: RequestState, num_output_tokens: int) -> None:
        """The scheduler discarded the last outputs (of a failed step or load); they will be computed again."""
        del state.output_token_ids[num_output_tokens:]
        self.num_tokens[state.slot] = state.num_prompt_tokens + num_output_tokens

    def remove(self, req_id: str) -> None:
        """Forget a request; unknown ids are fine (they ended before this worker saw them)."""
        self.preempt(req_id)
        self.by_id.pop(req_id, None)

    def preempt(self, req_id: str) -> None:
        """Give up the slot and the blocks of a request; it may come back."""
        state = self.by_id.get(req_id)
        if state is None or state.slot < 0:
            return
        self.block_tables.clear(state.slot)
        heapq.heappush(self._free_slots, state.slot)
        state.slot = -1
        state.prompt_logprobs = None

    # -- tokens -----------------------------------------------------------------------------------

    def append_sampled(
        self, states: Sequence[RequestState], slots: Int64Array, tokens: Sequence[int]
    ) -> None:
        """One new token per request, in the order of `slots`."""
        places = self.num_tokens[slots]
        if len(places) and int(places.max()) >= self.tokens.shape[1]:
            self._widen(int(places.max()) + 1)
        self.tokens[slots, places] = tokens
        self.num_tokens[slots] = places + 1
        for state, token in zip(states, tokens, strict=True):
            state.output_token_ids.append(token)

    def _write_tokens(self, state: RequestState) -> None:
        prompt, outputs = state.prompt_token_ids, state.output_token_ids
        total = len(prompt) + len(outputs)
        if total > self.tokens.shape[1]:
            self._widen(total)
        row = self.tokens[state.slot]
        row[: len(prompt)] = prompt
        row[len(prompt) : total] = outputs
        self.num_tokens[state.slot] = total

    def _widen(self, needed: int) -> None:
        width = max(needed, min(2 * self.tokens.shape[1], self.max_model_len + 1))
        wider = np.zeros((self.tokens.shape[0], width), dtype=np.int32)
        wider[:, : self.tokens.shape[1]] = self.tokens
        self.tokens = wider

    # -- slots ------------------------------------------------------------------------------------

    def _take_slot(self) -> int:
        if not self._free_slots:
            self._add_slots(len(self.num_tokens))
        return heapq.heappop(self._free_slots)

    def _add_slots(self, count: int) -> None:
        """Streaming sessions may wait on the worker beside a full batch."""
        first = len(self.num_tokens)
        self.tokens = np.concatenate([self.tokens, np.zeros((count, self.tokens.shape[1]), dtype=np.int32)])
        zeros = np.zeros(count, dtype=np.int64)
        self.num_tokens = np.concatenate([self.num_tokens, zeros])
        self.num_computed = np.concatenate([self.num_computed, zeros])
        self.replay_start = np.concatenate([self.replay_start, zeros])
        self.replay_end = np.concatenate([self.replay_end, zeros])
        self.block_tables.add_slots(count)
        for slot in range(first, first + count):
            heapq.heappush(self._free_slots, slot)

    def slots_of(self, req_ids: Iterable[str]) -> Int64Array:
        """Slots of scheduled requests, in their order."""
        return np.fromiter((self.by_id[req_id].slot for req_id in req_ids), dtype=np.int64)
