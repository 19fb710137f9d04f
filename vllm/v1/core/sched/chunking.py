"""How many tokens of a prompt go into one step.

Owns the pure rules (caps, boundaries of recurrent state, lookahead of drafters) and the cadence of prefills.
Must not know queues or blocks.  Layer: L5 (scheduler).
"""

from __future__ import annotations

from dataclasses import dataclass

from vllm.v1.core.sched.params import SchedulerParams
from vllm.v1.kv_cache_interface import get_mamba_prefill_checkpoint_position
from vllm.v1.request import Request

NO_CAP = 1 << 60


def long_prefill_cap(params: SchedulerParams, num_eligible: int) -> int:
    """The most tokens one request may get in a pass in which ``num_eligible`` requests run or wait.

    A cap below the distance of kept recurrent states would never reach a boundary, so it is raised to it.
    """
    threshold = params.long_prefill_token_threshold
    if threshold == 0 or num_eligible <= 1:
        return NO_CAP
    if params.long_prefill_token_threshold_adaptive:
        threshold = max(threshold, params.max_num_batched_tokens // num_eligible)
    return max(threshold, params.cache.state_block_tokens or 0)


@dataclass(frozen=True, slots=True)
class ChunkLimits:
    """What bounds a chunk besides the budget (tokens).

    ``largest``: the largest chunk any request may get in this pass.
    ``fine_grained``: prefix hits may end inside a block, on a multiple of the hash size.
    """

    largest: int
    fine_grained: bool


def fit_chunk(
    request: Request, start: int, num_new: int, params: SchedulerParams, limits: ChunkLimits
) -> int:
    """Shorten the chunk ``[start, start + num_new)`` so that it ends where the model's caches allow it.

    0 means "not in this step".
    """
    end = start + num_new
    end = _leave_lookahead(request, start, end, params.num_prefill_lookahead_tokens)
    block = params.cache.state_block_tokens
    if block is not None:
        end = _end_at_state_boundary(request, (start, end), block, params, limits)
    return end - start


def _leave_lookahead(request: Request, start: int, end: int, lookahead: int) -> int:
    """A drafter reads ``lookahead`` tokens past the chunk: either they are known, or the chunk ends the prompt."""
    last_with_lookahead = request.num_tokens - lookahead
    if lookahead > 1 and last_with_lookahead < end < request.num_tokens and last_with_lookahead > start:
        return last_with_lookahead
    return end


def _end_at_state_boundary(
    request: Request, chunk: tuple[int, int], block: int, params: SchedulerParams, limits: ChunkLimits
) -> int:
    start, end = chunk
    prefill_end = max(request.num_prompt_tokens, request.num_tokens - 1)
    if start >= prefill_end:
        return end
    if end < prefill_end:
        aligned = end // block * block
        if aligned > start:
            end = aligned
        elif block <= limits.largest:
            # Mid-block chunks would end without a state that can be kept; a later step has more room.
            reaches_boundary = start % block and end >= _next_boundary(start, block)
            end = _next_boundary(start, block) if reaches_boundary else start
    stops = _mandatory_stops(request, start, block, params, limits)
    return min([stop for stop in stops if start < stop < end], default=end)


def _next_boundary(start: int, block: int) -> int:
    return (start // block + 1) * block


def _mandatory_stops(
    request: Request, start: int, block: int, params: SchedulerParams, limits: ChunkLimits
) -> list[int]:
    """Positions where a state has to be kept, whatever the budget."""
    num_tokens = request.num_tokens
    last_cacheable = (num_tokens - 1) // block * block
    if params.drops_eagle_block:
        last_cacheable -= block
    stops = [last_cacheable, request.shared_prefix_boundary]
    if start % block:
        stops.append(_next_boundary(start, block))
    if limits.fine_grained:
        stops.append(
            get_mamba_prefill_checkpoint_position(
                num_tokens, params.cache.hash_tokens, params.drops_eagle_block, params.hash_lookahead_tokens
            )
        )
    return stops


class PrefillCadence:
    """Lets prefills into every n-th executed step only, while decodes run.

    Prefills are held until ``interval`` steps that scheduled tokens have passed since the last step that carried a
    prefill, unless the last release could not drain the waiting requests.
    """

    def __init__(self, interval: int) -> None:
        self.interval = interval
        self.num_executed_steps = 0
        self.last_prefill_step = -interval
        self._last_release_drained = True

    def holds(self, decode_runs: bool) -> bool:
        """True if this pass must not schedule prefills."""
        if self.interval <= 1 or not decode_runs or not self._last_release_drained:
            return False
        return self.num_executed_steps - self.last_prefill_step < self.interval

    def note_step(self, num_tokens: int, carried_prefill: bool, requests_left_waiting: bool) -> None:
        """Count a scheduled step; empty ones do not count."""
        if num_tokens == 0:
            return
        if carried_prefill:
            self.last_prefill_step = self.num_executed_steps
            self._last_release_drained = not requests_left_waiting
        self.num_executed_steps += 1
