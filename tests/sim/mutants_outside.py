"""Planted bugs in the offload whose manager and workers come from outside; see mutants.py."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from tests.sim.planting import Mutant, replaced
from vllm.distributed.kv_transfer.kv_connector.v1.offloading.events import OffloadingEventsTracker
from vllm.distributed.kv_transfer.kv_connector.v1.offloading.given_up import GivenUpJobs
from vllm.distributed.kv_transfer.kv_connector.v1.offloading.guarded_manager import GuardedManager
from vllm.distributed.kv_transfer.kv_connector.v1.offloading.plugin_tier import MirrorPool
from vllm.distributed.kv_transfer.kv_connector.v1.offloading.scheduler import OffloadingConnectorScheduler
from vllm.distributed.kv_transfer.kv_connector.v1.offloading.worker import JobMover
from vllm.distributed.kv_transfer.kv_connector.v1.offloading_connector import OffloadingConnector
from vllm.v1.kv_offload.base import LookupResult


def failed_jobs_count_as_done(original: Any) -> Any:
    """A job whose worker says that it failed is taken for one that ended well."""

    def finish(self: Any, ended: Any) -> None:
        original(self, replace(ended, success=True))

    return finish


def withdrawn_content_is_asked_for(original: Any) -> Any:
    """The manager still has what a failed request has left with it, and is asked for it."""
    del original
    return lambda self, keys, until=0.0: None


def flushed_before_the_copies_end(original: Any) -> Any:
    """After a reset the manager hears at once that nothing uses its memory any more."""

    def complete(self: Any) -> None:
        self._flushed_stores.clear()
        self._flushed_loads.clear()
        original(self)

    return complete


def blocks_are_swapped(original: Any) -> Any:
    """Blocks of a job do not stand in the order of its keys."""

    def spec(self: Any, keys: Any, block_ids: Any, request: Any) -> Any:
        return original(self, keys, list(block_ids)[::-1], request)

    return spec


def reset_is_not_told(original: Any) -> Any:
    """Consumers of events hear of a reset only what the manager says of it."""

    def clear(self: Any) -> None:
        original(self)
        self._void.clear()

    return clear


def pending_counts_as_there(original: Any) -> Any:
    """Content that is still on its way to the manager is loaded."""

    def lookup(self: Any, key: Any, ctx: Any) -> Any:
        answer = original(self, key, ctx)
        return LookupResult.HIT if answer is LookupResult.HIT_PENDING else answer

    return lookup


def waiting_stores_are_forgotten(original: Any) -> Any:
    """A store that waits for the device never starts."""

    def submit(self: Any, *, must_wait: bool = False) -> None:
        self._waiting.clear()
        original(self, must_wait=must_wait)

    return submit


def the_first_job_ends_a_copy(original: Any) -> Any:
    """A copy of several jobs has ended with the first of them."""

    def finish(self: Any, ended: Any) -> None:
        known = self._open.get(ended.job_id)
        if known is not None and known[1] in self._missing:
            self._missing[known[1]] = 1
        if known is None or known[1] in self._missing:
            original(self, ended)

    return finish


def given_up_loads_are_let_go(original: Any) -> Any:
    """What a load that was given up may still write goes to others."""
    del original
    return lambda self, job, lease: lease.release()


def given_up_blocks_are_waited_for(original: Any) -> Any:
    """A request that needs what copies hold which were given up waits until they end, and they never do."""
    del original
    return lambda self: ()


OUTSIDE_MUTANTS: dict[str, Mutant] = {
    "given up loads are let go": replaced(GivenUpJobs, "hold", given_up_loads_are_let_go),
    "given up blocks are waited for": replaced(
        OffloadingConnector, "given_up_blocks", given_up_blocks_are_waited_for
    ),
    "failed jobs count as done": replaced(JobMover, "_finish", failed_jobs_count_as_done),
    "withdrawn content is asked for": replaced(MirrorPool, "ban", withdrawn_content_is_asked_for),
    "flushed before the copies end": replaced(
        OffloadingConnectorScheduler, "_complete", flushed_before_the_copies_end
    ),
    "blocks of a job are swapped": replaced(OffloadingConnectorScheduler, "_device_spec", blocks_are_swapped),
    "a reset is not told": replaced(OffloadingEventsTracker, "clear", reset_is_not_told),
    "pending counts as there": replaced(GuardedManager, "lookup", pending_counts_as_there),
    "waiting stores are forgotten": replaced(JobMover, "_submit_ready", waiting_stores_are_forgotten),
    "the first job ends a copy": replaced(JobMover, "_finish", the_first_job_ends_a_copy),
}
