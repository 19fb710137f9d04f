"""Requests that wait for external loads: which loads ended, how, and what becomes of the request.

Owns the ids reported by the workers and the stage of every fetch.  Decides; the scheduler applies.
Layer: L5 (scheduler).
"""

from __future__ import annotations

from enum import Enum, auto

from vllm.v1.core.sched.params import CacheShape
from vllm.v1.metrics.stats import KV_FETCH_STAGES
from vllm.v1.request import Request

WAITING_TO_START, IN_PROGRESS, COMPLETED_WAITING = KV_FETCH_STAGES


class LoadEnd(Enum):
    """How the load of a waiting request ended."""

    PROMOTE = auto()
    """Its blocks hold what was promised, at least up to ``num_computed_tokens``."""
    RETRY = auto()
    """Nothing of it can be used: start again."""
    FAIL = auto()
    """The request ends with an error."""


class RemoteWaits:
    """Loads in progress and their ends.

    ``finished`` and ``failed`` hold ids reported by the workers until the next pass consumes them; ``unwanted`` holds
    loads that became useless while they were under way: a reset made their bytes stale, or what lies in front of them
    was spoilt.  A load that failed in part is ``failed`` too, but what comes before the failure can be used.
    """

    def __init__(self) -> None:
        self.finished: set[str] = set()
        self.failed: set[str] = set()
        self.unwanted: set[str] = set()
        self.loading: dict[str, Request] = {}
        self._cut: set[str] = set()
        self._stages: dict[Request, str] = {}
        self._counts: dict[str, int] = dict.fromkeys(KV_FETCH_STAGES, 0)

    @property
    def stages(self) -> dict[Request, str]:
        """The stage of every tracked fetch."""
        return self._stages

    @property
    def counts(self) -> dict[str, int]:
        """How many fetches are in each stage."""
        return self._counts

    def enter_stage(self, request: Request, stage: str | None) -> None:
        """Track the request in ``stage``; None ends tracking."""
        old = self._stages.pop(request, None)
        if old is not None:
            self._counts[old] -= 1
        if stage is not None:
            self._stages[request] = stage
            self._counts[stage] += 1

    def waiting_to_start(self) -> list[Request]:
        """Requests that were offered a load which has not been ordered yet, oldest first."""
        return [request for request, stage in self._stages.items() if stage == WAITING_TO_START]

    def has_ended(self, request_id: str) -> bool:
        """True unless a load of the request still writes into its blocks."""
        return request_id not in self.loading or request_id in self.finished

    def start(self, request: Request) -> None:
        """The request's load has been ordered."""
        self.loading[request.request_id] = request
        self.enter_stage(request, IN_PROGRESS)

    def note_cut(self, request_id: str) -> None:
        """A load under way has failed in part; its request will go on from before the failure."""
        if request_id in self.loading:
            self.failed.add(request_id)
            self._cut.add(request_id)

    def report(self, request_id: str, failed: bool) -> bool:
        """The workers say that a load has ended.  False if no such load is known (the report is ignored)."""
        if request_id not in self.loading:
            return False
        self.finished.add(request_id)
        if failed:
            self.failed.add(request_id)
        if failed and request_id in self._cut:
            # Its blocks may be written still, so that nothing can be computed in them.
            self._cut.discard(request_id)
            self.unwanted.add(request_id)
        return True

    def take(self, request_id: str, recompute_failures: bool) -> LoadEnd:
        """Consume the end of a load."""
        del self.loading[request_id]
        self.finished.discard(request_id)
        failed = request_id in self.failed and request_id not in self._cut
        unwanted = request_id in self.unwanted
        for ids in (self.failed, self.unwanted, self._cut):
            ids.discard(request_id)
        if unwanted:
            return LoadEnd.RETRY
        if not failed:
            return LoadEnd.PROMOTE
        return LoadEnd.RETRY if recompute_failures else LoadEnd.FAIL

    def forget(self, request: Request) -> None:
        """The request has left; nothing of it stays."""
        request_id = request.request_id
        self.loading.pop(request_id, None)
        for ids in (self.finished, self.failed, self.unwanted, self._cut):
            ids.discard(request_id)
        self.enter_stage(request, None)


def start_after_load(request: Request, cache: CacheShape) -> tuple[int, int]:
    """Where a request starts after its load: ``(num_computed_tokens, replay_start)``.

    One token at least is left to compute; a window that no tier keeps is computed again.
    """
    computed = request.num_computed_tokens
    if computed >= request.num_tokens:
        computed = cache.restart_position(request.num_tokens - 1)
    if cache.replay_tokens and computed > 0:
        computed = max(0, computed - cache.replay_tokens)
        return computed, computed
    return computed, 0
