"""Planted bugs of drafts beside states and rings, and of content that steps in flight still compute; see mutants.py."""

from __future__ import annotations

from contextlib import AbstractContextManager, ExitStack
from typing import Any
from unittest.mock import patch

from tests.sim.planting import Mutant, replaced
from vllm.v1.core.block_lease import Lease
from vllm.v1.core.kv_kinds.circular import CircularBufferManager
from vllm.v1.core.kv_kinds.mamba import MambaManager
from vllm.v1.core.sched.budget import StepBudget
from vllm.v1.core.sched.lifecycle import RequestLifecycle
from vllm.v1.simple_kv_offload.unsettled import Unsettled


def _a_row_too_few(original: Any) -> Any:
    """The last draft has no block for its state."""

    def init(self: Any, *args: Any, **kwargs: Any) -> None:
        original(self, *args, **kwargs)
        self.num_speculative_blocks = max(0, self.num_speculative_blocks - 1)

    return init


def _state_leaves_with_the_drafts(original: Any) -> Any:
    """Drafts count as computed when states are let go: where they are refused, the state to go on from is gone."""

    def skipped(self: Any, num_computed_tokens: int) -> int:
        return int(original(self, num_computed_tokens + self.num_speculative_blocks))

    return skipped


def _states_of_drafts_are_hashed(original: Any) -> Any:
    """What drafts under way fill gets its hash before they are accepted."""

    def offer(self: Any, request: Any, num_tokens: int) -> None:
        drafts = self.params.num_spec_tokens
        original(self, request, min(num_tokens + drafts, request.num_tokens) if drafts else num_tokens)

    return offer


def _drafts_leave_no_room(original: Any) -> Any:
    """A chunk is thought possible for which the rows of the drafts leave no room."""

    def init(self: Any, tokens: int, *args: Any, **kwargs: Any) -> None:
        original(self, tokens, *args, **kwargs)
        self.largest = tokens

    return init


def _ring_grows_with_drafts(original: Any) -> Any:
    """The lookahead of a drafter gets another block of the ring."""

    def allocate(
        self: Any, request_id: str, num_tokens: int, num_main: int, *args: Any, **kwargs: Any
    ) -> Any:
        fresh = original(self, request_id, num_tokens, num_main, *args, **kwargs)
        if (
            num_tokens > num_main
            and len(self.req_to_blocks[request_id]) == 1
            and self.block_pool.get_num_free_blocks()
        ):
            more = self._new_blocks(1)
            self.req_to_blocks[request_id] += more
            return [*fresh, *more]
        return fresh

    return allocate


def _spoilt_content_is_copied() -> AbstractContextManager[object]:
    """Content is stored as soon as it can be found, and its copy keeps its keys when the step that computes it fails.

    Two bugs: either of the two guards is enough where the other one stands.
    """
    stack = ExitStack()
    stack.enter_context(patch.object(Unsettled, "settle", lambda self, requests, scheduled, step: None))
    trusted = property(lambda self: frozenset(), lambda self, evicted: None)
    stack.enter_context(patch.object(Lease, "evicted", trusted))
    return stack


DRAFT_MUTANTS: dict[str, Mutant] = {
    "a row too few for drafts": replaced(MambaManager, "__init__", _a_row_too_few),
    "state leaves with the drafts": replaced(
        MambaManager, "get_num_skipped_tokens", _state_leaves_with_the_drafts
    ),
    "states of drafts are hashed": replaced(RequestLifecycle, "_offer_hashes", _states_of_drafts_are_hashed),
    "drafts leave no room": replaced(StepBudget, "__init__", _drafts_leave_no_room),
    "ring grows with drafts": replaced(CircularBufferManager, "allocate_new_blocks", _ring_grows_with_drafts),
    "spoilt content is copied": _spoilt_content_is_copied,
}
