"""Loads that end before a step has ordered them, and lost ones beside loads that are well."""

from __future__ import annotations

import pytest

from tests.helpers.offload_rig import Rig, prompt
from vllm.v1.core.sched.output import SchedulerOutput
from vllm.v1.outputs import KVConnectorOutput
from vllm.v1.request import Request, RequestStatus
from vllm.v1.simple_kv_offload.metadata import INVALID_JOB_ID, SimpleCPUOffloadWorkerMetadata


@pytest.fixture
def rig() -> Rig:
    rig = Rig()
    rig.generate(prompt(17), max_tokens=1)
    rig.evict_device()
    return rig


def admit(rig: Rig, request_id: str = "admitted") -> Request:
    """A request that is to load 16 tokens and has its blocks; no step was built since."""
    request = rig.make_request(prompt(17), request_id=request_id)
    assert rig.manager.get_num_new_matched_tokens(request, 0) == (16, True)
    manager = rig.scheduler.kv_cache_manager
    manager.allocate_slots(request, 0, num_external_computed_tokens=16, delay_cache_blocks=True)
    rig.manager.update_state_after_alloc(request, manager.get_blocks(request_id), 16)
    assert rig.manager.tier.num_held == 5, "four sources and the null slot"
    return request


def assert_let_go(rig: Rig, request: Request) -> None:
    rig.scheduler.kv_cache_manager.free(request)
    assert rig.manager.tier.num_held == 1
    assert not rig.scheduler.kv_cache_manager.block_pool.leases
    metadata = rig.manager.build_connector_meta(SchedulerOutput.make_empty())
    assert (metadata.load_event, metadata.load_gpu_blocks) == (INVALID_JOB_ID, [])
    assert rig.manager.load_side.ledger.dropped == 4


def test_a_load_of_a_request_that_ends_before_the_step_is_never_ordered(rig: Rig) -> None:
    request = admit(rig)
    request.status = RequestStatus.FINISHED_ABORTED
    rig.manager.request_finished(request, [])
    assert not rig.manager.load_side.owns(request.request_id)
    assert_let_go(rig, request)


def test_a_load_that_a_reset_overtakes_before_the_step_is_never_ordered(rig: Rig) -> None:
    request = admit(rig)
    assert rig.manager.reset(), "nothing was under way"
    assert not rig.manager.load_side.owns(request.request_id)
    assert_let_go(rig, request)


def test_only_requests_of_a_lost_order_are_told_to_have_failed(rig: Rig) -> None:
    first = admit(rig, "first")
    lost = rig.manager.build_connector_meta(SchedulerOutput.make_empty()).load_event
    manager = rig.scheduler.kv_cache_manager
    second = rig.make_request(prompt(17), request_id="second")
    assert rig.manager.get_num_new_matched_tokens(second, 0) == (16, True)
    manager.allocate_slots(second, 0, num_external_computed_tokens=16, delay_cache_blocks=True)
    rig.manager.update_state_after_alloc(second, manager.get_blocks("second"), 16)
    kept = rig.manager.build_connector_meta(SchedulerOutput.make_empty()).load_event
    assert kept == lost + 1
    report = SimpleCPUOffloadWorkerMetadata(lost_load_events={lost})
    rig.manager.update_connector_output(KVConnectorOutput(kv_connector_worker_meta=report))
    for _ in range(2):  # a step that tells it may fail as well
        orders = rig.manager.build_connector_meta(SchedulerOutput.make_empty())
        assert orders.failed_load_events == {lost: ["first"]}
    ended = KVConnectorOutput(finished_recving={"first", "second"}, failed_recving={"first"})
    rig.manager.update_connector_output(ended)
    assert rig.manager.build_connector_meta(SchedulerOutput.make_empty()).failed_load_events == {}
    assert rig.manager.load_side.ledger.done == rig.manager.load_side.ledger.failed == 4
    manager.free(first)
    manager.free(second)
    assert rig.manager.tier.num_held == 1
