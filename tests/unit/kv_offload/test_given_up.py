"""Workers from outside that do not tell the end of a job: what fails, what stays held, and what late ends change."""

from __future__ import annotations

from typing import Any

import pytest

from tests.helpers.offload_rig import Rig, full, prompt, window
from tests.helpers.scripted_offload import Job, Script, ScriptedWorker, new_script
from tests.helpers.scripted_rig import TOKENS, half, make, settle, stored
from vllm.distributed.kv_transfer.kv_connector.v1.offloading.worker import OffloadingConnectorWorker
from vllm.v1.request import Request, RequestStatus

LATE = 60.5


def rig_with_clock(specs: Any = (), **changes: Any) -> Rig:
    rig = make(specs, **changes)
    for rank in range(rig.ranks):
        worker = rig.worker(rank)
        assert isinstance(worker, OffloadingConnectorWorker)
        assert worker._mover is not None
        worker._mover._clock = rig.clock
    return rig


def loading(rig: Rig, script: Script, **fields: Any) -> tuple[Request, list[Job]]:
    """A request whose load is under way on every rank."""
    stored(rig, script)
    request = rig.add(TOKENS, **fields)
    for _ in range(20):
        if all(worker.jobs for worker in script.workers):
            break
        rig.step(copies=False)
    return request, [next(iter(worker.jobs.values())) for worker in script.workers]


def store_begins(rig: Rig, script: Script) -> None:
    for _ in range(20):
        if script.workers[0].jobs:
            return
        rig.step(copies=False)
    raise AssertionError("nothing is stored")


def give_up(rig: Rig) -> None:
    """The deadline passes, and the workers' reports are heard."""
    rig.clock.now += LATE
    rig.step(copies=False)


def run_without_copies(rig: Rig, request: Request, max_steps: int = 60) -> None:
    for _ in range(max_steps):
        if request.is_finished():
            return
        rig.step(copies=False)
    raise AssertionError(f"{request.request_id} does not end: {request.status}")


def end_after_all(rig: Rig, worker: ScriptedWorker) -> None:
    """The jobs of the worker end, and the next step hears of it."""
    worker.run()
    rig.step(copies=False)


def scribble(worker: ScriptedWorker, job: Job) -> None:
    """The job copies after all: something else lies on its places by now."""
    for block in job.blocks.block_ids:
        for tensor in worker.caches.tensors:
            tensor[block] = 77


@pytest.mark.parametrize("specs", [[full()], [full(), window()]])
def test_a_load_that_never_ends_is_computed_in_other_blocks(specs: list[Any]) -> None:
    script = new_script()
    rig = rig_with_clock(specs)
    request, (job,) = loading(rig, script)
    give_up(rig)
    assert rig.manager.load_side.failures == 1
    run_without_copies(rig, request)
    rig.check_output(request)
    assert request.num_cached_tokens == 0
    pool = rig.manager.store_side.stores.device
    held = {pool.blocks[block].ref_cnt for block in job.blocks.block_ids}
    assert held == {1}, "the request has ended, the load has not"
    (worker,) = script.workers
    scribble(worker, job)  # nobody reads there
    other = rig.add([*TOKENS, 5], max_tokens=3)
    run_without_copies(rig, other)
    rig.check_output(other)
    end_after_all(rig, worker)
    settle(rig, script)
    assert {pool.blocks[block].ref_cnt for block in job.blocks.block_ids} == {0}


def test_nobody_else_gets_the_blocks_of_a_load_that_never_ends() -> None:
    script = new_script()
    rig = rig_with_clock(device_blocks=24)
    request, (job,) = loading(rig, script)
    give_up(rig)
    run_without_copies(rig, request)
    written = set(job.blocks.block_ids)
    for seed in range(8):
        other = rig.add(prompt(29, seed=20 + seed), max_tokens=2)
        for _ in range(20):
            if other.is_finished():
                break
            give_up(rig)  # or its blocks would wait for their stores
            for ids in rig.scheduler.kv_cache_manager.get_block_ids(other.request_id):
                assert written.isdisjoint(ids)
        assert other.is_finished()
        rig.check_output(other)
    end_after_all(rig, script.workers[0])
    settle(rig, script)


def test_what_may_still_be_written_is_not_loaded_again_nor_asked_for() -> None:
    script = new_script()
    rig = rig_with_clock()
    loading(rig, script)
    give_up(rig)
    script.calls.clear()
    again = rig.add(TOKENS)
    assert rig.connector.get_num_new_matched_tokens(again, 0) == (0, False)
    peeked = rig.connector.peek_matched_tokens(again, 0)
    assert peeked is not None
    assert peeked.num_tokens == 0
    assert script.calls["lookup"] == 0, "a worker that does not get on with a load would not with another one"
    end_after_all(rig, script.workers[0])
    rig.run()
    settle(rig, script)
    rig.clock.now += LATE  # content of a failed load is not asked for during a minute
    rig.evict_device()
    assert rig.generate(TOKENS).num_cached_tokens > 0
    settle(rig, script)


@pytest.mark.parametrize("late", [True, False])
def test_a_load_is_over_when_all_ranks_have_ended_it(late: bool) -> None:
    script = new_script()
    rig = rig_with_clock(ranks=2)
    request, (job, _) = loading(rig, script)
    first, second = script.workers
    if late:
        give_up(rig)
        second.run()
    else:
        second.run()
        rig.step(copies=False)
        give_up(rig)
    run_without_copies(rig, request)
    rig.check_output(request)
    pool = rig.manager.store_side.stores.device
    assert {pool.blocks[block].ref_cnt for block in job.blocks.block_ids} == {1}
    assert script.manager.reading, "the manager must keep what is read"
    end_after_all(rig, first)
    settle(rig, script)


def test_a_request_with_the_policy_fail_ends() -> None:
    script = new_script()
    rig = rig_with_clock()
    rig.scheduler.recompute_kv_load_failures = False
    request, (job,) = loading(rig, script)
    give_up(rig)
    run_without_copies(rig, request)
    assert request.status is RequestStatus.FINISHED_ERROR
    pool = rig.manager.store_side.stores.device
    assert {pool.blocks[block].ref_cnt for block in job.blocks.block_ids} == {1}
    end_after_all(rig, script.workers[0])
    settle(rig, script)


def test_an_aborted_request_leaves_its_load_to_the_deadline() -> None:
    script = new_script()
    rig = rig_with_clock()
    request, (job,) = loading(rig, script)
    rig.abort(request)
    assert rig.manager.has_pending_work()
    give_up(rig)
    assert not rig.manager.has_pending_work(), "an engine with nothing to do does not run for it"
    pool = rig.manager.store_side.stores.device
    assert {pool.blocks[block].ref_cnt for block in job.blocks.block_ids} == {1}
    end_after_all(rig, script.workers[0])
    settle(rig, script)


def test_a_store_that_never_ends_is_not_found_and_its_place_stays_taken() -> None:
    script = new_script()
    rig = rig_with_clock()
    request = rig.add(TOKENS)
    store_begins(rig, script)
    run_without_copies(rig, request)
    blocks = {block for job in script.workers[0].jobs.values() for block in job.blocks.block_ids}
    give_up(rig)
    assert not rig.manager.has_pending_work()
    assert rig.manager.store_side.ledger.failed > 0
    pool = rig.manager.store_side.stores.device
    assert {pool.blocks[block].ref_cnt for block in blocks} == {0}, "reading them late harms nobody"
    storing = dict(script.manager.storing)
    assert storing, "but what lies below must not be used for something else: it may be written still"
    offers = script.calls["prepare_store"]
    other = rig.add(prompt(17, seed=3), max_tokens=1)
    run_without_copies(rig, other)
    assert script.calls["prepare_store"] == offers, "nor is anything else handed to that worker"
    end_after_all(rig, script.workers[0])
    assert not script.manager.storing
    assert not set(storing) & set(script.manager.ready), "it has read blocks that others had by then"
    settle(rig, script)
    rig.generate(prompt(17, seed=4), max_tokens=1)
    assert script.calls["prepare_store"] > offers
    settle(rig, script)


@pytest.mark.parametrize("what", ["load", "store"])
@pytest.mark.parametrize("first", ["reset", "deadline"])
def test_a_reset_is_flushed_when_what_was_given_up_is_over(what: str, first: str) -> None:
    script = new_script()
    rig = rig_with_clock()
    if what == "load":
        request, _ = loading(rig, script)
    else:
        request = rig.add(TOKENS)
        store_begins(rig, script)
    if first == "deadline":
        give_up(rig)
    assert not half(rig).reset(), "something may be copied still"
    if first == "reset":
        give_up(rig)
    run_without_copies(rig, request)
    rig.check_output(request)
    assert script.calls["on_reset_flushed"] == 0
    assert script.manager.leaving
    end_after_all(rig, script.workers[0])
    assert script.calls["on_reset_flushed"] == 1
    settle(rig, script)


def test_a_deadline_of_ones_own() -> None:
    new_script()
    rig = rig_with_clock(options={"transfer_timeout_s": 3})
    worker = rig.worker()
    assert isinstance(worker, OffloadingConnectorWorker)
    assert worker._mover is not None
    assert worker._mover._deadline_s == 3
    with pytest.raises(ValueError, match="transfer_timeout_s"):
        make(options={"transfer_timeout_s": 0})


def stuck(rig: Rig, script: Script) -> set[int]:
    """Ids of the device blocks that a load holds which was given up; its request has ended."""
    request, (job,) = loading(rig, script)
    give_up(rig)
    run_without_copies(rig, request)
    return set(job.blocks.block_ids)


def test_a_request_that_needs_the_blocks_of_a_load_that_never_ends_is_ended() -> None:
    script = new_script()
    rig = rig_with_clock(device_blocks=14)  # thirteen to give
    held = stuck(rig, script)
    assert rig.connector.given_up_blocks() == held
    big, small = rig.add(prompt(50, seed=31)), rig.add(prompt(12, seed=32), max_tokens=2)
    run_without_copies(rig, big, max_steps=3)
    run_without_copies(rig, small)
    rig.check_output(small)
    error = rig.ends[big.request_id].error
    assert (error.code, error.retryable) == ("kv_cache_blocked", True)
    assert "of 50 tokens" in error.message
    assert "13 blocks" in error.message
    assert f"hold {len(held)}" in error.message
    end_after_all(rig, script.workers[0])
    settle(rig, script)
    assert rig.connector.given_up_blocks() == set()
    rig.generate(prompt(50, seed=33), max_tokens=1)


def test_a_running_request_that_grows_into_blocks_that_never_come_back_is_ended() -> None:
    script = new_script()
    rig = rig_with_clock(device_blocks=14)
    held = stuck(rig, script)
    growing = rig.add(prompt(4 * (13 - len(held)) - 2, seed=41), max_tokens=12)
    for _ in range(6):
        rig.step(copies=False)
    assert growing.status is RequestStatus.RUNNING, "its own blocks are stored: that may give some back"
    give_up(rig)
    run_without_copies(rig, growing, max_steps=4)
    assert growing.status is RequestStatus.FINISHED_ERROR
    assert rig.ends[growing.request_id].error.code == "kv_cache_blocked"
    assert rig.outputs[growing.request_id], "it went on as far as there was room"
    end_after_all(rig, script.workers[0])
    settle(rig, script)


def test_what_no_pool_could_hold_is_the_fault_of_the_request_alone() -> None:
    script = new_script()
    rig = rig_with_clock(device_blocks=14)
    big = rig.add(prompt(60, seed=51))
    run_without_copies(rig, big, max_steps=3)
    error = rig.ends[big.request_id].error
    assert (error.code, error.retryable) == ("kv_cache_too_small", False)
    settle(rig, script)


def test_a_request_waits_for_a_load_that_may_still_end_in_time() -> None:
    script = new_script()
    rig = rig_with_clock(device_blocks=14)
    request, _ = loading(rig, script)
    rig.abort(request)
    big = rig.add(prompt(50, seed=61), max_tokens=1)
    for _ in range(10):
        rig.step(copies=False)
    assert big.status is RequestStatus.WAITING
    end_after_all(rig, script.workers[0])
    rig.run()
    rig.check_output(big)
    settle(rig, script)


@pytest.mark.parametrize("what", ["load", "store"])
def test_the_workers_are_to_be_asked_while_a_job_may_end_late(what: str) -> None:
    script = new_script()
    rig = rig_with_clock()
    assert not rig.scheduler.awaits_late_ends()
    if what == "load":
        request, _ = loading(rig, script)
    else:
        request = rig.add(TOKENS)
        store_begins(rig, script)
    give_up(rig)
    run_without_copies(rig, request)
    rig.step(copies=False)
    assert rig.scheduler.awaits_late_ends()
    assert not rig.scheduler.has_requests(), "now and then is enough"
    end_after_all(rig, script.workers[0])
    assert not rig.scheduler.awaits_late_ends()
    settle(rig, script)
