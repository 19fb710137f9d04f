"""Open sessions: requests that get further input after they have answered.

Owns the pending inputs of every session and the rule how an input extends one.  Must not know queues or blocks.
Layer: L5 (scheduler).
"""

from __future__ import annotations

from collections import deque

from vllm.utils.checks import check
from vllm.v1.request import Request, RequestStatus


class StreamingSessions:
    """Sessions by request id.

    A session that has answered pauses in ``WAITING_FOR_STREAMING_REQ`` with its blocks until the next input arrives.
    The input without ``resumable`` is the last one; where it has no tokens it only closes the session.
    """

    def __init__(self) -> None:
        self._inputs: dict[str, deque[Request]] = {}
        self._paused: set[str] = set()

    @property
    def num_paused(self) -> int:
        """Sessions that wait for input."""
        return len(self._paused)

    def open(self, request: Request) -> None:
        """Start a session with its first request."""
        self._inputs[request.request_id] = deque()

    def is_open(self, request: Request) -> bool:
        """True until the session ends."""
        return request.request_id in self._inputs

    def close(self, request: Request) -> None:
        """Forget the session and inputs it will not get any more."""
        self._inputs.pop(request.request_id, None)
        self._paused.discard(request.request_id)

    def push(self, request: Request, update: Request) -> None:
        """Queue a further input."""
        self._inputs[request.request_id].append(update)

    def has_input(self, request: Request) -> bool:
        """True if an input waits."""
        return bool(self._inputs.get(request.request_id))

    def pause(self, request: Request) -> None:
        """The session has answered and has no further input yet."""
        self._paused.add(request.request_id)

    def resume(self, request: Request, hash_block_size: int) -> bool:
        """Extend the session by its next input and make it ready for admission.

        False if that input only closes the session; nothing has changed then but the input is consumed.
        """
        check(self.has_input(request), f"session {request.request_id!r} has no input to go on with")
        update = self._inputs[request.request_id].popleft()
        if not update.resumable and update.num_prompt_tokens == 0:
            return False
        self._paused.discard(request.request_id)
        _extend(request, update, hash_block_size)
        request.move_to(RequestStatus.WAITING)
        return True


def _extend(request: Request, update: Request, hash_block_size: int) -> None:
    """The session goes on as one longer prompt; the token sampled last is not part of it."""
    kept = request._all_token_ids[:-1] if request.num_output_tokens else request._all_token_ids[:]
    prompt = kept + update._all_token_ids
    request._all_token_ids[:] = prompt
    request._output_token_ids.clear()
    request.prompt_token_ids = prompt.copy()
    request.num_prompt_tokens = len(prompt)
    request.num_computed_tokens = min(request.num_confirmed_tokens, len(kept))
    request.num_hash_offered_tokens = min(request.num_hash_offered_tokens, request.num_computed_tokens)
    request.num_in_flight_tokens = 0
    request.num_output_placeholders = 0
    request.spec_token_ids = []
    request.sampling_params = update.sampling_params
    request.structured_output_request = None  # its grammar was for the first answer
    request.wants_logprobs, request.plain_output = update.wants_logprobs, update.plain_output
    request.max_tokens = update.max_tokens
    request.resumable = update.resumable
    request.arrival_time = update.arrival_time
    request.stop_reason = None
    # The hash of a block that held the dropped token is void.
    del request.block_hashes[len(kept) // hash_block_size :]
    request.update_block_hashes()
