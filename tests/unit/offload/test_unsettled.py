"""What must not be stored because steps in flight are still to compute it, and what of it an end may copy."""

from __future__ import annotations

import random
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest

from tests.helpers.offload_rig import Rig, prompt
from vllm.v1.core.block_hash import BlockHash, make_block_hash_with_group_id
from vllm.v1.request import RequestStatus
from vllm.v1.simple_kv_offload import unsettled as module
from vllm.v1.simple_kv_offload.unsettled import Unsettled

UNIT = 4
GROUPS = (0, 2)
STEPS_IN_FLIGHT = 2


def record(request_id: str, chain: int, rng: random.Random) -> Any:
    """What `Unsettled` reads of a request; those of one chain begin with the same content."""
    num_hashes = rng.randint(1, 8)
    shared = rng.randint(0, num_hashes)
    names = [f"{chain}" if place < shared else f"{chain} {request_id}" for place in range(num_hashes)]
    in_flight = rng.choice((0, 1, UNIT, 3 * UNIT))
    return SimpleNamespace(
        request_id=request_id,
        block_hashes=[
            BlockHash(f"{name} {place}".encode().ljust(32, b"_")) for place, name in enumerate(names)
        ],
        num_computed_tokens=rng.randint(in_flight, in_flight + num_hashes * UNIT),
        num_in_flight_tokens=in_flight,
        num_output_placeholders=rng.choice((0, 0, 1, 2)),
    )


def end(request: Any) -> int:
    """As the scheduler does it; returns the tokens that are confirmed."""
    request.num_computed_tokens -= request.num_in_flight_tokens
    request.num_in_flight_tokens = request.num_output_placeholders = 0
    return int(request.num_computed_tokens)


def test_what_was_left_behind_is_settled_when_its_steps_are_over() -> None:
    request = record("r", 0, random.Random(1))
    request.num_computed_tokens = request.num_in_flight_tokens = UNIT
    request.num_output_placeholders = 0
    (key, _) = (make_block_hash_with_group_id(request.block_hashes[0], group) for group in GROUPS)
    unsettled = Unsettled(GROUPS, UNIT)
    unsettled.settle({"r": request}, {}, 1)
    unsettled.leave_behind(request, end(request), 1 + STEPS_IN_FLIGHT)
    assert key in unsettled, "nobody knows the request any more, but its step may fail yet"
    unsettled.settle({}, {}, 2)
    assert key in unsettled
    unsettled.settle({}, {}, 3)
    assert key not in unsettled


@pytest.mark.parametrize("fails", [False, True])
def test_an_end_copies_what_a_step_in_flight_computes_for_another_unless_that_step_fails(fails: bool) -> None:
    rig = Rig(config_changes={"looks_ahead": True})
    other = rig.add(prompt(16), max_tokens=2)
    first = rig.scheduler.schedule()
    finder = rig.add(prompt(17), max_tokens=1)
    second = rig.scheduler.schedule()
    assert second.scheduled_new_reqs[0].num_computed_tokens == 16
    rig.abort(finder)
    (transfer,) = rig.manager.store_side.planned
    assert (transfer.request_id, len(transfer)) == (finder.request_id, 4)
    for step in (first, second):
        (rig.fail_step if fails else rig.finish_step)(step)
    rig.run()
    assert len(rig.in_tier(finder)) == (0 if fails else 4)
    assert rig.in_tier(other) == ([] if fails else [0, 1, 2, 3])
    rig.assert_at_rest()


def test_an_aborted_request_stores_what_has_been_computed_since() -> None:
    rig = Rig(config_changes={"looks_ahead": True})
    rig.add(prompt(16), max_tokens=2)
    first = rig.scheduler.schedule()
    finder = rig.add(prompt(17), max_tokens=1)
    second = rig.scheduler.schedule()
    rig.finish_step(first)
    rig.abort(finder)
    (transfer,) = rig.manager.store_side.planned
    assert (transfer.request_id, len(transfer)) == (finder.request_id, 4)
    rig.finish_step(second)
    rig.run()
    rig.assert_at_rest()


def test_requests_that_end_together_cost_what_they_have_in_flight_once(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    looked_at: list[str] = []
    original: Callable[..., Any] = module.unsettled_ranges

    def counted(requests: Any, scheduled: Any, unit: int) -> Any:
        known = list(requests)
        looked_at.extend(request.request_id for request in known)
        return original(known, scheduled, unit)

    monkeypatch.setattr(module, "unsettled_ranges", counted)
    count = 40
    limits = {"max_num_seqs": count, "max_num_batched_tokens": 20 * count}
    rig = Rig(device_blocks=8 * count, host_blocks=8 * count, config_changes=limits)
    for i in range(count):
        rig.add([100 + i, *prompt(15)], max_tokens=8)
    output = rig.scheduler.schedule()
    assert len(looked_at) == count
    rig.scheduler.finish_requests(None, RequestStatus.FINISHED_ABORTED)
    assert len(looked_at) == count, "an end does not look at those that go on"
    rig.finish_step(output)
    rig.run()
    rig.assert_at_rest()
