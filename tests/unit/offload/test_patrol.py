"""The walk behind the cursors: whose turn it is, when a round is due, and what a slot's guard means."""

from __future__ import annotations

import pytest

from tests.helpers.offload_rig import Rig, prompt
from vllm.v1.simple_kv_offload.patrol import REQUESTS_PER_STEP, ROUNDS_PER_TURNOVER, HolePatrol
from vllm.v1.simple_kv_offload.store_policy import StoreRequestState, describe_request_tokens


def test_every_request_gets_its_turn() -> None:
    request_ids = [f"r{number}" for number in range(REQUESTS_PER_STEP + 2)]
    patrol = HolePatrol()
    first, second = patrol.turns(request_ids), patrol.turns(request_ids)
    assert len(first) == len(second) == REQUESTS_PER_STEP
    assert {*first, *second} == {*request_ids}
    assert patrol.turns(request_ids[:2]) == request_ids[:2]


def test_a_round_is_due_where_the_tier_has_lost_what_a_request_counts_on() -> None:
    rig = Rig(device_blocks=32)
    request = rig.add(prompt(13), max_tokens=8)
    rig.step()
    rig.step()
    side, tier = rig.manager.store_side, rig.manager.tier
    state = side.states[request.request_id]
    assert len(side.patrol) == 3, "the request counts on its three slots"
    assert not side.patrol.has_work(side.stores, state)
    tier.pool.num_evicted += 1
    assert not side.patrol.has_work(side.stores, state), "what was lost is none of its slots"
    tier.pool.num_evicted -= 1
    tier.evict([next(iter(state.guarded_slots))])
    assert len(side.patrol) == 2
    assert side.patrol.has_work(side.stores, state)
    rig.step()
    assert not state.patrol_from, "the round is over"
    rig.step()
    assert len(side.patrol) == 3, "and has filled the hole"
    rig.run()
    assert len(side.patrol) == 0


def test_what_another_request_counts_on_too_is_guarded_after_one_has_ended() -> None:
    rig = Rig(device_blocks=32)
    long = rig.add(prompt(13), max_tokens=12)
    rig.step()
    rig.step()
    side, tier = rig.manager.store_side, rig.manager.tier
    state = side.states[long.request_id]
    assert state.guarded_slots
    other = StoreRequestState(long, (), [0])
    slots = [tier.pool.blocks[slot] for slot in sorted(state.guarded_slots)]
    for slot in slots:
        side.patrol.guard(other, slot)
    side.patrol.dismiss(other)
    assert all(side.patrol.counts_on(state, slot) for slot in slots)
    assert not side.patrol.has_work(side.stores, state)
    tier.evict([slots[0].block_id])
    assert side.patrol.has_work(side.stores, state)
    rig.run()
    assert len(side.patrol) == 0


def test_a_round_is_due_now_and_then_so_that_slots_in_use_stay_young() -> None:
    rig = Rig(device_blocks=32)
    request = rig.add(prompt(13), max_tokens=8)
    rig.step()
    rig.step()
    side, pool = rig.manager.store_side, rig.manager.tier.pool
    state = side.states[request.request_id]
    pool.num_evicted += pool.num_gpu_blocks // ROUNDS_PER_TURNOVER - 1
    assert not side.patrol.has_work(side.stores, state)
    pool.num_evicted += 1
    assert side.patrol.has_work(side.stores, state)
    rig.run()


def test_a_long_round_goes_on_where_it_stopped_and_is_due_until_it_is_through(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("vllm.v1.simple_kv_offload.patrol.BLOCKS_PER_STEP", 2)
    rig = Rig(device_blocks=32, host_blocks=32)
    request = rig.add(prompt(21), max_tokens=12)
    for _ in range(3):
        rig.step()
    side = rig.manager.store_side
    state = side.states[request.request_id]
    assert rig.in_tier(request) == [0, 1, 2, 3, 4]
    rig.manager.tier.evict(list(state.guarded_slots))
    found = []
    while side.patrol.has_work(side.stores, state):
        rig.step()
        found.append([index for index in rig.in_tier(request) if index < 5])
    assert found == [[3, 4], [1, 2, 3, 4], [0, 1, 2, 3, 4]]
    rig.run()


def test_any_eviction_counts_where_a_request_may_lack_a_copy_already() -> None:
    rig = Rig(device_blocks=32)
    request = rig.add(prompt(13), max_tokens=8)
    rig.step()
    rig.step()
    side = rig.manager.store_side
    state = side.states[request.request_id]
    state.may_lack_copies = True
    assert not side.patrol.has_work(side.stores, state), "nothing has changed"
    rig.manager.tier.pool.num_evicted += 1
    assert side.patrol.has_work(side.stores, state)
    rig.run()


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
