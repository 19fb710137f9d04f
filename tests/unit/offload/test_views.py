"""What outside code reads of the offload manager: views of the live state, under the names it knows."""

from __future__ import annotations

from typing import Any

from tests.helpers.offload_rig import Rig, full, mamba, prompt
from vllm.v1.core.sched.output import SchedulerOutput
from vllm.v1.simple_kv_offload.boundary import BoundaryStores
from vllm.v1.simple_kv_offload.records import BlockStoreMeta


def running(rig: Rig) -> Any:
    """A request with a store in flight."""
    request = rig.add(prompt(13), max_tokens=4)
    rig.step(copies=False)
    rig.step(copies=False)
    return request


def test_a_store_is_seen_from_its_plan_to_its_end() -> None:
    rig = Rig()
    request = running(rig)
    manager = rig.manager
    (event,) = manager._store_event_to_blocks
    meta = manager._store_event_to_blocks[event]
    table = rig.scheduler.kv_cache_manager.get_block_ids(request.request_id)[0]
    assert meta.gpu_block_ids == table[: len(meta.gpu_block_ids)]
    assert manager._store_event_to_reqs == {event: [request.request_id]}
    assert manager._in_flight_store_gpu_blocks == set(meta.gpu_block_ids)
    assert manager._store_event_pending_counts == {}, "no rank has reported yet"
    assert manager._pending_finished_stores == []
    manager.reset()
    assert manager._store_event_to_blocks == {}
    assert list(manager._abandoned_store_event_to_blocks) == [event]
    rig.run()
    assert manager._abandoned_store_event_to_blocks == {}


def test_a_load_is_seen_from_its_promise_to_its_end() -> None:
    rig = Rig()
    rig.generate(prompt(13), max_tokens=1)
    rig.evict_device()
    request = rig.make_request(prompt(13))
    manager = rig.manager
    num_tokens, _ = manager.get_num_new_matched_tokens(request, 0)
    assert manager._pending_cpu_hits[request.request_id][1] == num_tokens == 12
    rig.scheduler.add_request(request)
    rig.step(copies=False)
    (load,) = manager._reqs_to_load.values()
    assert load.request is request
    assert manager._load_event_to_reqs == {load.load_event: [request.request_id]}
    manager.reset()
    assert list(manager._abandoned_reqs_to_load) == [request.request_id]
    assert manager._reqs_to_load == manager._load_event_to_reqs == {}
    rig.run()
    assert manager._abandoned_reqs_to_load == {}


def test_settings_are_read_under_their_names() -> None:
    rig = Rig()
    manager = rig.manager
    assert (
        manager.num_cpu_blocks
        == manager.cpu_kv_cache_config.num_blocks
        == manager.cpu_block_pool.num_gpu_blocks
    )
    assert manager.prefix_cacheable_group_ids == (0,)
    assert manager.fa_block_size == manager.group_block_sizes[manager.fa_gidx]
    assert manager.kv_event_medium == "CPU"
    assert manager._expected_worker_count == 1
    assert manager._target_free == manager.target_free > 0
    assert manager._info_labelvalues[0] == "cpu"
    assert manager._cursor is None
    assert manager.cpu_coordinator is manager.tier.coordinator
    assert manager.cpu_coordinator.block_pool is manager.cpu_block_pool


def test_a_steps_stores_can_be_planned_by_hand() -> None:
    rig = Rig(extra={"lazy_offload": True})
    request = rig.add(prompt(13), max_tokens=1)
    rig.step()
    device_ids, slot_ids, owners = rig.manager.prepare_store_specs(SchedulerOutput.make_empty())
    pool = rig.scheduler.kv_cache_manager.block_pool
    hashes = [key[:-4] for i in device_ids if (key := pool.blocks[i].block_hash) is not None]
    assert hashes == request.block_hashes[2::-1], "in the order of their eviction"
    assert len(set(slot_ids)) == 3
    assert owners == [], "what is near its end belongs to nobody"


def test_without_events_a_choice_by_hand_says_nothing_of_tokens() -> None:
    rig = Rig(events=False)
    request = rig.add(prompt(13), max_tokens=4)
    rig.step()
    manager = rig.manager
    manager.store_side.settle({})
    table = rig.scheduler.kv_cache_manager.get_block_ids(request.request_id)
    block_ids, _, meta = manager._select_eager_blocks_to_store(
        manager._reqs_to_store[request.request_id], table
    )
    assert block_ids == list(table[0][:3])
    assert meta is None


def test_the_lazy_cursor_is_the_last_block_looked_at() -> None:
    rig = Rig(extra={"lazy_offload": True})
    rig.generate(prompt(13), max_tokens=2)
    cursor = rig.manager._cursor
    assert cursor is not None
    assert cursor.block_id == rig.manager.lazy_cursor_id


def test_choosing_and_committing_by_hand_uses_the_same_rules() -> None:
    rig = Rig(events=True)
    request = rig.add(prompt(13), max_tokens=4)
    rig.step()
    manager = rig.manager
    manager.store_side.settle({})
    state = manager._reqs_to_store[request.request_id]
    table = rig.scheduler.kv_cache_manager.get_block_ids(request.request_id)
    block_ids, advance, meta = manager._select_eager_blocks_to_store(state, table)
    assert advance == [len(block_ids)] == [3]
    assert meta is not None
    assert [next(iter(keys.values())).token_ids for keys in meta] == [
        prompt(13)[i : i + 4] for i in (0, 4, 8)
    ]
    device = rig.scheduler.kv_cache_manager.block_pool
    device.touch([device.blocks[i] for i in block_ids])
    slots = manager.tier.stage(3)
    manager._process_store_completion(block_ids, [slot.block_id for slot in slots], meta)
    assert rig.in_tier(request) == [0, 1, 2]
    assert all(isinstance(value, BlockStoreMeta) for keys in meta for value in keys.values())
    rig.run()


def test_every_state_hand_off_has_one_outcome() -> None:
    rig = Rig([full(), mamba()], device_blocks=24, host_blocks=12)
    request = rig.add(prompt(17), max_tokens=3)
    rig.step()
    side, pool = rig.manager.store_side, rig.scheduler.kv_cache_manager.block_pool
    state = side.states[request.request_id]
    boundary, chosen = BoundaryStores(), side.new_selection(state)
    cached = [block for block in pool.blocks if block.block_hash is not None]
    plain = next(block for block in pool.blocks[1:] if block.block_hash is None)
    offers = [(1, pool.null_block.block_id, 4), (1, plain.block_id, 4)]
    offers += [(1, cached[0].block_id, 4), (1, cached[0].block_id, 4), (1, cached[1].block_id, 4)]
    room, chosen.room = chosen.room, 1
    boundary.select(side.stores, offers, state, chosen)
    boundary.drop([(1, 1, 4)])
    stats = boundary.stats
    assert room > 1
    assert (stats.dropped_null_block, stats.dropped_not_hashed) == (1, 1)
    assert (stats.stored, stats.skipped_in_flight, stats.dropped_cpu_full) == (1, 1, 1)
    assert stats.dropped_request_gone == 1
    assert stats.published == len(offers) + 1
    rig.run()
