"""Planted bugs in the scheduler: ends of requests, loads and steps, drafts, grammars; see mutants.py."""

from __future__ import annotations

from contextlib import AbstractContextManager
from typing import Any
from unittest.mock import patch

from tests.sim.grammar import grammar_is_not_waited_for, grammar_never_fails, masks_move_grammars_on
from tests.sim.planting import Mutant, replaced
from vllm.v1.core.sched import results
from vllm.v1.core.sched.lifecycle import RequestLifecycle
from vllm.v1.core.sched.remote_wait import RemoteWaits
from vllm.v1.core.sched.results import Results
from vllm.v1.core.sched.scheduler import Scheduler
from vllm.v1.core.sched.waiting_pass import WaitingPass
from vllm.v1.structured_output import StructuredOutputManager


def _double_free_on_abort(original: Any) -> Any:
    """SCH-03: the end of a request runs twice."""

    def release(self: Any, request: Any) -> None:
        blocks = [
            block
            for manager in self.kv_cache_manager.coordinator.single_type_managers
            for block in manager.req_to_blocks.get(request.request_id, ())
            if not block.is_null and block.ref_cnt > 1
        ]
        original(self, request)
        self.kv_cache_manager.block_pool.free_blocks(b for b in blocks if b.ref_cnt > 0)

    return release


def _stop_at_the_first_misfit(original: Any) -> Any:
    """SCH-01: finished loads wait behind a queue head that cannot fit."""

    def end_loads(self: Any) -> None:
        if not self.waiting:
            original(self)

    return end_loads


def _failed_load_counts_as_done(original: Any) -> Any:
    """PFX-12: a request goes on with blocks whose load failed."""

    def report(self: Any, request_id: str, failed: bool) -> Any:
        return original(self, request_id, False)

    return report


def _frees_at_once(original: Any) -> Any:
    """XFER-02: blocks of a step in flight become the target of a load."""

    def free(self: Any, request: Any) -> None:
        self.defer_block_free = False
        original(self, request)

    return free


def _abort_frees_under_a_load(original: Any) -> Any:
    """SCH-02, first variant: an aborted load's blocks are free while the copy still writes them."""

    def release(self: Any, request: Any) -> None:
        for manager in self.kv_cache_manager.coordinator.single_type_managers:
            manager.free(request.request_id)
        for lease in list(self.kv_cache_manager.block_pool.leases.values()):
            if lease.owner == f"load of {request.request_id}":
                blocks = list(lease.blocks)
                self.kv_cache_manager.block_pool.free_blocks(blocks)
        original(self, request)

    return release


def _end_of_an_aborted_load_is_lost(original: Any) -> Any:
    """SCH-02, second variant: nobody listens to the end of an aborted load."""

    def end(self: Any, request_id: str, failed: bool) -> None:
        request = self.requests.get(request_id)
        if request is None or not request.is_finished():
            original(self, request_id, failed)

    return end


def _refused_drafts_count_as_computed() -> AbstractContextManager[object]:
    """Positions of refused drafts are never computed again."""
    original = results.settle_counters

    def settle(request: Any, *args: Any) -> Any:
        drafted = original(request, *args)
        if drafted is not None:
            request.num_computed_tokens += drafted.num_drafts - drafted.num_accepted
        return drafted

    return patch.object(results, "settle_counters", settle)


SCHED_MUTANTS: dict[str, Mutant] = {
    "double free on abort": replaced(RequestLifecycle, "_free_blocks", _double_free_on_abort),
    "stop at the first misfit": replaced(Scheduler, "_end_loads", _stop_at_the_first_misfit),
    "failed load counts as done": replaced(RemoteWaits, "report", _failed_load_counts_as_done),
    "frees at once": replaced(RequestLifecycle, "_free_blocks", _frees_at_once),
    "abort frees under a load": replaced(RequestLifecycle, "_release_finished", _abort_frees_under_a_load),
    "end of an aborted load is lost": replaced(Results, "_end_receiving", _end_of_an_aborted_load_is_lost),
    "grammar is not waited for": replaced(WaitingPass, "_check_grammar", grammar_is_not_waited_for),
    "masks move grammars on": replaced(StructuredOutputManager, "_fill", masks_move_grammars_on),
    "grammar never fails": replaced(WaitingPass, "_check_grammar", grammar_never_fails),
    "refused drafts count as computed": _refused_drafts_count_as_computed,
}
