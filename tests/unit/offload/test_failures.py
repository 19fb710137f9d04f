"""What goes wrong below the scheduler: failed and lost copies, failed steps, requests that end in errors, resets."""

from __future__ import annotations

import pytest

from tests.helpers.offload_rig import BLOCK, STEP_FAILED, Rig, full, mamba, prompt, ring, window
from vllm.v1.core.sched.output import SchedulerOutput
from vllm.v1.message_types import FinishReason
from vllm.v1.outputs import KVConnectorOutput
from vllm.v1.request import RequestStatus
from vllm.v1.simple_kv_offload.copy_backends.base import CopyError
from vllm.v1.simple_kv_offload.metadata import SimpleCPUOffloadWorkerMetadata


def stored_then_evicted(rig: Rig, length: int = 16, seed: int = 0) -> None:
    """The tier holds the prompt, the device does not."""
    rig.generate(prompt(length, seed), max_tokens=1)
    rig.evict_device()


def test_a_failed_load_is_recomputed() -> None:
    rig = Rig()
    stored_then_evicted(rig)
    rig.mover().fail_next = [RuntimeError("lane died")]
    request = rig.generate(prompt(17))
    loads = [job for job in rig.mover().launched if not job.is_store]
    assert len(loads) == 1, "the failed source is not promised again"
    assert rig.manager.load_side.failures == 1
    assert len(rig.in_tier(request)) == 5, "what was computed again is stored again"
    rig.assert_at_rest()


def test_a_failed_load_ends_the_request_under_the_fail_policy_and_no_other() -> None:
    rig = Rig(config_changes={"policy": "fail"})
    stored_then_evicted(rig)
    rig.mover().fail_next = [RuntimeError("lane died")]
    doomed = rig.add(prompt(17))
    other = rig.add(prompt(9, seed=5))
    rig.run()
    assert str(rig.ends[doomed.request_id].finish_reason) == "error"
    rig.check_output(other)
    rig.assert_at_rest()


def test_tier_01_a_bad_block_is_forgotten_and_the_rest_is_used() -> None:
    rig = Rig()
    stored_then_evicted(rig, length=13)
    known = rig.make_request(prompt(13))
    bad = rig.manager.tier.get(rig.key(known, 1))
    assert bad is not None
    rig.mover().fail_next = [CopyError("checksum", frozenset({bad.block_id}))]
    request = rig.add(prompt(13))
    rig.run()
    rig.check_output(request)
    assert request.num_cached_tokens == BLOCK, "h0 is used, h1 is recomputed"
    loads = [job for job in rig.mover().launched if not job.is_store]
    assert sum(bad.block_id in job.src_blocks for job in loads) == 1
    rig.assert_at_rest()


def test_one_failed_load_does_not_touch_the_other_loads_of_its_step() -> None:
    rig = Rig(device_blocks=64, host_blocks=64)
    stored_then_evicted(rig, seed=1)
    stored_then_evicted(rig, seed=2)
    first, second = rig.add(prompt(17, seed=1)), rig.add(prompt(17, seed=2))
    rig.step(copies=False)
    assert [job.is_store for job in rig.mover().jobs] == [False, False], "one copy per request"
    rig.mover().fail_next = [RuntimeError("bad")]
    rig.run()
    rig.check_output(first)
    rig.check_output(second)
    assert rig.manager.load_side.failures == 1
    rig.assert_at_rest()


def test_a_failed_store_vanishes_without_a_trace() -> None:
    rig = Rig(ranks=2)
    request = rig.add(prompt(16), max_tokens=1)
    rig.mover(1).fail_next = [RuntimeError("no space")]
    rig.run()
    assert rig.in_tier(request) == [], "one rank failed, so nobody has it"
    assert rig.manager.store_side.ledger.failed == 4
    rig.assert_at_rest()


def test_ranks_report_at_different_steps() -> None:
    rig = Rig(ranks=3)
    request = rig.add(prompt(16), max_tokens=1)
    rig.step(copies=False)
    for rank in (2, 0):
        rig.step(copies=False)
        rig.mover(rank).release()
        rig.step(copies=False)
        assert rig.in_tier(request) == []
    rig.mover(1).release()
    rig.run()
    assert rig.in_tier(request) == [0, 1, 2, 3]
    rig.evict_device()
    again = rig.generate(prompt(17))
    assert again.num_cached_tokens == 16
    rig.assert_at_rest()


def test_orders_of_a_failed_step_end_as_failed() -> None:
    rig = Rig()
    stored_then_evicted(rig)
    finished = rig.add(prompt(8, seed=3), max_tokens=1)
    rig.step()  # its blocks are planned for the next step
    loading = rig.add(prompt(17))
    rig.fail_step()  # carries the load of one and the store of the other
    assert rig.manager._reqs_to_load
    assert rig.manager.has_pending_work()
    rig.run()
    assert rig.in_tier(finished) == []
    rig.check_output(loading)
    assert rig.manager.load_side.failures == 1
    rig.assert_at_rest()


def test_orders_of_a_step_that_never_reached_a_rank_end_as_failed() -> None:
    rig = Rig(ranks=2)
    stored_then_evicted(rig)
    finished = rig.add(prompt(8, seed=3), max_tokens=1)
    rig.step()
    loading = rig.add(prompt(17))
    output = rig.scheduler.schedule()
    rig._follow(output)
    rig.workers[0].begin(output)  # the second rank died before it read the step
    rig.workers[0].abandon()
    rig._collect(rig.scheduler.fail_step(output, STEP_FAILED))
    rig.run()
    assert rig.in_tier(finished) == []
    rig.check_output(loading)
    rig.assert_at_rest()


def test_val_10_nothing_of_a_request_with_nan_logits_stays_below() -> None:
    rig = Rig()
    request = rig.add(prompt(10), max_tokens=20)
    for _ in range(3):
        rig.step()
    assert rig.in_tier(request) == [0, 1]
    rig.step(nan=[request.request_id])
    assert str(rig.ends[request.request_id].finish_reason) == "error"
    assert rig.in_tier(request) == []
    rig.run()
    assert rig.in_tier(request) == []
    rig.assert_at_rest()


def test_val_10_a_store_in_flight_of_a_corrupted_request_is_not_committed() -> None:
    rig = Rig()
    request = rig.add(prompt(10), max_tokens=20)
    rig.step(copies=False)
    rig.step(copies=False)
    assert rig.mover().jobs
    rig.step(copies=False, nan=[request.request_id])
    rig.run()
    assert rig.in_tier(request) == []
    ledger = rig.manager.store_side.ledger
    assert (ledger.done, ledger.dropped) == (0, 2)
    rig.assert_at_rest()


def test_val_10_what_others_stored_of_a_corrupted_prefix_goes_too() -> None:
    rig = Rig()
    bad = rig.add(prompt(10), max_tokens=20)
    rig.step(copies=False)
    other = rig.add(prompt(10), max_tokens=2)
    rig.step(copies=False)
    rig.step(copies=False, nan=[bad.request_id])
    rig.run()
    assert rig.in_tier(bad) in ([], rig.in_tier(other))
    rig.assert_at_rest()


@pytest.mark.parametrize("lazy", [False, True])
def test_reset_makes_everything_unfindable_at_once(lazy: bool) -> None:
    rig = Rig(lazy=lazy, device_blocks=12, host_blocks=32)
    for seed in range(4):
        rig.generate(prompt(24, seed), max_tokens=1)
    assert len(rig.manager.tier.pool.cached_block_hash_to_block) > 0
    assert rig.scheduler.reset_prefix_cache(reset_connector=True)
    assert len(rig.manager.tier.pool.cached_block_hash_to_block) == 0
    assert rig.generate(prompt(24), max_tokens=1).num_cached_tokens == 0
    rig.assert_at_rest()


def test_reset_abandons_stores_in_flight() -> None:
    rig = Rig()
    request = rig.add(prompt(16), max_tokens=1)
    rig.step(copies=False)
    rig.step(copies=False)
    held = rig.manager._in_flight_store_gpu_blocks
    assert rig.manager.reset() is False, "copies are under way"
    assert list(rig.manager._abandoned_store_event_to_blocks) == [0]
    assert rig.manager._store_event_to_blocks == {}
    pool = rig.scheduler.kv_cache_manager.block_pool
    assert all(pool.blocks[block].ref_cnt == 1 for block in held), "still read by the copy"
    rig.run()
    assert rig.in_tier(request) == []
    assert rig.manager.reset() is True
    rig.assert_at_rest()


def test_running_requests_are_stored_again_after_a_reset() -> None:
    rig = Rig()
    request = rig.add(prompt(10), max_tokens=30)
    for _ in range(3):
        rig.step()
    assert rig.in_tier(request) == [0, 1]
    assert rig.manager.reset() is True
    assert rig.in_tier(request) == []
    assert rig.manager._reqs_to_store == {}
    rig.step()
    rig.step()
    assert rig.in_tier(request)[:2] == [0, 1], "tracked again, from the start"
    rig.run()
    rig.check_output(request)
    rig.assert_at_rest()


def test_reset_during_a_load_keeps_its_blocks_until_it_ends() -> None:
    rig = Rig()
    stored_then_evicted(rig)
    request = rig.add(prompt(17))
    rig.step(copies=False)
    assert rig.scheduler.reset_prefix_cache(reset_running_requests=True, reset_connector=True) is False
    assert list(rig.manager._abandoned_reqs_to_load) == [request.request_id]
    assert rig.manager.get_num_new_matched_tokens(request, 0) == (None, False), "ask later"
    rig.step(copies=False)
    rig.run()
    rig.check_output(request)
    assert request.num_cached_tokens == 0, "the old entry must not be used"
    rig.assert_at_rest()


@pytest.mark.parametrize("specs", [[full()], [full(), window()], [full(), mamba()]])
def test_preemption_in_every_state(specs: list[object]) -> None:
    rig = Rig(specs=specs, device_blocks=40, host_blocks=40)  # type: ignore[arg-type]
    request = rig.add(prompt(17), max_tokens=12)
    for step in range(8):
        rig.step(copies=step % 3 == 0)
        if step % 2 and request in rig.scheduler.running:
            rig.scheduler._preempt_request(request, 0.0)
    rig.run()
    rig.check_output(request)
    rig.assert_at_rest()


def test_xfer_04_a_preempted_request_stores_its_own_bytes() -> None:
    rig = Rig(device_blocks=6)  # 5 usable
    request = rig.add(prompt(8), max_tokens=4)
    rig.step(copies=False)
    rig.step(copies=False)  # both blocks are queued for their copy
    (store,) = rig.mover().jobs
    rig.scheduler._preempt_request(request, 0.0)
    rig.scheduler.finish_requests(request.request_id, RequestStatus.FINISHED_ABORTED)
    other = rig.add(prompt(16, seed=1), max_tokens=1)  # wants four blocks and would write them
    for _ in range(3):
        output = rig.step(copies=False)
        taken = {block for new in output.scheduled_new_reqs for block in new.block_ids[0]}
        assert not taken & set(store.src_blocks)
    rig.run()
    rig.check_output(other)
    rig.evict_device()
    again = rig.generate(prompt(9), max_tokens=1)
    assert again.num_cached_tokens == 8
    rig.assert_at_rest()


def test_xfer_06_every_rank_reports_every_transfer_and_all_blocks_come_back() -> None:
    """Ranks that are late, or on which a copy fails, hold up nothing for good."""
    rig = Rig(ranks=4, device_blocks=24, host_blocks=24)
    free = rig.scheduler.kv_cache_manager.block_pool.get_num_free_blocks()
    requests = [rig.add(prompt(17, seed % 9), max_tokens=2) for seed in range(35)]
    for late in range(400):
        if not rig.scheduler.has_requests():
            break
        rig.step(copies=False)
        # In each step another two of the four ranks get on with their copies.
        for rank in (late % 4, (late + 1) % 4):
            if late % 7 == 0 and rig.mover(rank).jobs:
                rig.mover(rank).fail_next = [RuntimeError("this rank only")]
            rig.mover(rank).release()
    for request in requests:
        rig.check_output(request)
        assert rig.ends[request.request_id].finish_reason is FinishReason.LENGTH
    assert rig.manager.load_side.ledger.done > 0
    assert rig.manager.store_side.ledger.failed > 0
    rig.assert_at_rest()
    assert rig.scheduler.kv_cache_manager.block_pool.get_num_free_blocks() == free


def test_a_shorter_prefix_than_promised_is_accepted() -> None:
    rig = Rig()
    stored_then_evicted(rig, length=17)
    request = rig.make_request(prompt(17))
    assert rig.manager.get_num_new_matched_tokens(request, 0) == (16, True)
    manager = rig.scheduler.kv_cache_manager
    manager.allocate_slots(request, 0, num_external_computed_tokens=8, delay_cache_blocks=True)
    rig.manager.update_state_after_alloc(request, manager.get_blocks(request.request_id), 8)
    state = rig.manager._reqs_to_load[request.request_id]
    assert len(state.transfer_meta.gpu_block_ids) == 2
    assert len(rig.manager.promises) == 0
    assert rig.manager.tier.num_held == 3, "two sources and the null slot"


def test_a_prefix_that_cannot_be_delivered_fails_as_a_load() -> None:
    rig = Rig(specs=[full(4), window(4, size=5)], device_blocks=64, host_blocks=64)
    stored_then_evicted(rig, length=33)
    request = rig.make_request(prompt(33))
    offered, _ = rig.manager.get_num_new_matched_tokens(request, 0)
    assert offered == 32
    manager = rig.scheduler.kv_cache_manager
    manager.allocate_slots(request, 0, num_external_computed_tokens=8, delay_cache_blocks=True)
    rig.manager.update_state_after_alloc(request, manager.get_blocks(request.request_id), 8)
    load = rig.manager.load_side.loads[request.request_id]
    assert not load.deliverable, "the window's blocks end at 32"
    metadata = rig.manager.build_connector_meta(SchedulerOutput.make_empty())
    assert metadata.failed_load_reqs == [request.request_id]
    assert metadata.load_event == 0, "so that a lost step is noticed"
    assert len(rig.manager.promises) == 0
    manager.free(request)


def test_unknown_ids_in_reports_are_ignored() -> None:
    rig = Rig()
    report = SimpleCPUOffloadWorkerMetadata({99: 1}, {98: 1}, {5}, {97})
    rig.manager.update_connector_output(
        KVConnectorOutput(
            finished_recving={"ghost"}, failed_recving={"ghost"}, kv_connector_worker_meta=report
        )
    )
    rig.assert_at_rest()


def test_scratch_groups_take_no_part() -> None:
    rig = Rig(specs=[full(4), ring(8), mamba(4)], device_blocks=64, host_blocks=64, events=True)
    assert rig.manager.prefix_cacheable_group_ids == (0, 2)
    request = rig.generate(prompt(21), max_tokens=3)
    rings = {new.block_ids[1][0] for step in rig.steps for new in step.scheduled_new_reqs}
    stored = {block for job in rig.mover().launched for block in job.src_blocks if job.is_store}
    assert stored
    assert not rings & stored
    rig.evict_device()
    again = rig.generate(prompt(21), max_tokens=3)
    assert again.num_cached_tokens == 20
    groups = {getattr(event, "group_idx", None) for event in rig.publisher.events}
    assert 1 not in groups
    assert rig.in_tier(request)
    rig.assert_at_rest()
