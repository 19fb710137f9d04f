"""The walk behind the cursors: whose turn it is, when a round is due, and what a slot's guard means."""

from __future__ import annotations

from tests.helpers.offload_rig import Rig, prompt
from vllm.v1.simple_kv_offload.patrol import REQUESTS_PER_STEP, HolePatrol
from vllm.v1.simple_kv_offload.store_policy import describe_request_tokens


def test_every_request_gets_its_turn() -> None:
    request_ids = [f"r{number}" for number in range(REQUESTS_PER_STEP + 2)]
    patrol = HolePatrol()
    first, second = patrol.turns(request_ids), patrol.turns(request_ids)
    assert len(first) == len(second) == REQUESTS_PER_STEP
    assert {*first, *second} == {*request_ids}
    assert patrol.turns(request_ids[:2]) == request_ids[:2]


def test_a_round_is_due_only_after_the_tier_has_evicted() -> None:
    rig = Rig(device_blocks=32)
    request = rig.add(prompt(13), max_tokens=8)
    rig.step()
    rig.step()
    side = rig.manager.store_side
    state = side.states[request.request_id]
    assert not side.patrol.has_work(side.stores, state)
    rig.manager.tier.pool.num_evicted += 1
    assert side.patrol.has_work(side.stores, state)
    rig.step()
    assert not side.patrol.has_work(side.stores, state), "the round found nothing and is over"
    assert len(side.patrol) == 3, "but the request counts on its three slots now"
    rig.run()
    assert len(side.patrol) == 0


def test_block_tables_are_asked_for_only_where_there_is_something_to_walk() -> None:
    rig = Rig(device_blocks=32)
    request = rig.add(prompt(12), max_tokens=12)
    manager = rig.scheduler.kv_cache_manager
    asked: list[str] = []
    original = manager.get_block_ids

    def counting(request_id: str) -> tuple[list[int], ...]:
        asked.append(request_id)
        return original(request_id)

    manager.get_block_ids = counting  # type: ignore[method-assign]
    rig.run()
    rig.check_output(request)
    # 23 tokens are computed in 12 steps and fill five blocks of four; three of them in the first step.
    assert 1 <= asked.count(request.request_id) <= 5
    assert len(rig.steps) >= 12


def test_tokens_that_the_request_does_not_have_are_not_described() -> None:
    rig = Rig(events=True)
    request = rig.add(prompt(9), max_tokens=4)
    rig.step()
    stores = rig.manager.store_side.stores
    told = describe_request_tokens(stores, request, 8, 4)
    assert told is not None
    assert list(told.token_ids) == prompt(9)[4:8]
    assert told.parent_block_hash == request.block_hashes[0]
    first = describe_request_tokens(stores, request, 4, 4)
    assert first is not None
    assert first.parent_block_hash is None
    assert describe_request_tokens(stores, request, 400, 4) is None
    assert describe_request_tokens(stores, request, 4, 8) is None
    rig.run()
