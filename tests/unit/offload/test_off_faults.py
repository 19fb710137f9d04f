"""Fault cases of the offload's scheduler half, each with the right behaviour; named after their ids."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
import torch

from tests.helpers.offload_parts import prefix_bytes
from tests.helpers.offload_rig import BLOCK, Rig, full, mamba, prompt, window
from vllm.config import SpeculativeConfig
from vllm.v1.core.sched.output import SchedulerOutput
from vllm.v1.kv_cache_interface import (
    FullAttentionSpec,
    KVCacheConfig,
    KVCacheGroupSpec,
    MambaSpec,
    SlidingWindowSpec,
)
from vllm.v1.request import Request, RequestStatus


def test_off_01_promised_blocks_are_held_against_competing_stores() -> None:
    rig = Rig(host_blocks=5)  # 4 usable slots
    rig.generate(prompt(13), max_tokens=1)  # h0..h2
    rig.evict_device()
    b = rig.make_request(prompt(13))
    assert rig.manager.get_num_new_matched_tokens(b, 0) == (12, True)
    # Between promise and allocation another request wants two slots: only the free one is there.
    other = rig.add(prompt(9, seed=1), max_tokens=3)
    rig.run()
    assert rig.in_tier(other) == [0]
    assert rig.in_tier(b) == [0, 1, 2]
    rig.scheduler.add_request(b)
    rig.run()
    rig.check_output(b)
    assert b.num_cached_tokens == 12
    rig.assert_at_rest()


def test_off_01_abort_between_promise_and_allocation_drops_the_hold() -> None:
    rig = Rig(host_blocks=5)
    rig.generate(prompt(13), max_tokens=1)
    rig.evict_device()
    b = rig.make_request(prompt(13))
    rig.manager.get_num_new_matched_tokens(b, 0)
    assert rig.manager.tier.num_stageable == 1
    b.status = RequestStatus.FINISHED_ABORTED
    rig.manager.request_finished_all_groups(b, ([],))
    assert rig.manager.tier.num_stageable == 4
    other = rig.generate(prompt(17, seed=1), max_tokens=1)
    assert rig.in_tier(other) == [0, 1, 2, 3]
    rig.assert_at_rest()


def test_off_04_a_long_prompt_is_stored_whole() -> None:
    rig = Rig([full(2)], device_blocks=230, host_blocks=230, config_changes={"max_num_batched_tokens": 5})
    request = rig.generate(prompt(217 * 2), max_tokens=2)
    assert rig.in_tier(request) == list(range(217))
    rig.assert_at_rest()


def test_off_04_what_is_left_at_the_finish_is_stored_before_its_blocks_are_reused() -> None:
    rig = Rig(device_blocks=12)
    request = rig.add(prompt(40), max_tokens=1)
    rig.step(copies=False)  # the whole prompt in one step, and the end
    assert rig.ends[request.request_id] is not None
    free = rig.scheduler.kv_cache_manager.block_pool.get_num_free_blocks()
    assert free == 11 - 10, "all ten full blocks are held for their copies"
    rig.run()
    assert rig.in_tier(request) == list(range(10))
    rig.assert_at_rest()


def test_off_05_an_idle_engine_writes_nothing_and_turnover_writes() -> None:
    rig = Rig(device_blocks=41, host_blocks=64, lazy=True, config_changes={"max_num_batched_tokens": 16})
    assert rig.manager.target_free == 8
    for seed in range(3):
        rig.generate(prompt(8, seed), max_tokens=1)
    for _ in range(5):
        rig.step()
    assert rig.manager.store_side.ledger.scheduled == 0
    first = rig.generate(prompt(32, seed=10), max_tokens=2)
    for seed in range(11, 20):
        rig.generate(prompt(32, seed), max_tokens=2)
    ledger = rig.manager.store_side.ledger
    assert ledger.scheduled > 0
    assert ledger.scheduled == ledger.done + ledger.dropped + ledger.failed
    again = rig.generate(prompt(32, seed=10), max_tokens=2)
    assert again.num_cached_tokens == 28
    assert rig.in_tier(first)
    rig.assert_at_rest()


def test_off_06_a_lazy_copy_keeps_its_place_in_the_free_queue() -> None:
    rig = Rig(device_blocks=6, host_blocks=16, lazy=True, config_changes={"max_num_batched_tokens": 4})
    assert rig.manager.target_free == 2
    rig.manager.target_free = 0
    rig.generate(prompt(16), max_tokens=1)
    pool = rig.scheduler.kv_cache_manager.block_pool

    def queue() -> list[int]:
        return [b.block_id for b in pool.free_block_queue.get_all_free_blocks() if b.block_hash is not None]

    before = queue()
    rig.manager.target_free = 3  # one unhashed block and the two oldest cached ones
    rig.step(copies=False)
    copied = sorted(rig.manager._in_flight_store_gpu_blocks)
    assert copied == sorted(before[:2])
    assert queue() == before[2:], "held until they are copied"
    rig.manager.target_free = 0  # what comes back must not be hidden by further copies
    rig.step()
    rig.step()
    assert queue() == before
    assert [b.block_id for b in pool.get_new_blocks(3)][1:] == before[:2]


def test_off_08_one_store_per_hash_in_flight() -> None:
    rig = Rig()
    a = rig.add(prompt(9), max_tokens=8)
    rig.step(copies=False)
    rig.step(copies=False)
    assert len(rig.mover().launched) == 1
    b = rig.add(prompt(9), max_tokens=2)
    rig.step(copies=False)
    rig.step(copies=False)
    assert b.num_cached_tokens == 8
    stored = [block for job in rig.mover().launched for block in job.src_blocks]
    assert len(stored) == 2
    rig.run()
    assert len(rig.manager.tier.pool.cached_block_hash_to_block) == len(rig.in_tier(a))
    rig.assert_at_rest()


def test_off_09_a_resumed_request_stores_from_its_new_table() -> None:
    rig = Rig(device_blocks=16, host_blocks=16)
    request = rig.add(prompt(10), max_tokens=6)
    rig.step()
    rig.step()
    assert rig.in_tier(request) == [0, 1]
    rig.scheduler._preempt_request(request, 0.0)
    taken = rig.scheduler.kv_cache_manager.block_pool.get_new_blocks(15)  # all its blocks go to others
    for block in taken:
        for pages in rig.memories[0].values():
            pages[block.block_id] = 77
    rig.scheduler.kv_cache_manager.block_pool.free_blocks(taken)
    before = list(rig.manager.store_side.states[request.request_id].block_ids[0])
    seen = []
    while rig.scheduler.has_unfinished_requests():
        rig.step()
        state = rig.manager.store_side.states.get(request.request_id)
        if state is not None and request.status is RequestStatus.RUNNING:
            seen.append(list(state.block_ids[0]))
            assert seen[-1] == rig.scheduler.kv_cache_manager.get_block_ids(request.request_id)[0]
    assert seen, "the table was replaced, not extended"
    assert seen[0][:2] != before[:2]
    rig.run()
    rig.check_output(request)
    assert rig.in_tier(request) == [0, 1, 2]
    check_tier_bytes(rig, request)
    rig.assert_at_rest()


def test_off_09_what_the_tier_has_lost_meanwhile_is_stored_again_by_the_resumed_request() -> None:
    rig = Rig(device_blocks=16, host_blocks=16)
    request = rig.add(prompt(10), max_tokens=6)
    rig.step()
    rig.step()
    rig.scheduler._preempt_request(request, 0.0)
    rig.evict_device()
    rig.manager.tier.pool.evict_blocks(range(1, 16))
    assert rig.in_tier(request) == []
    rig.run()
    rig.check_output(request)
    assert rig.in_tier(request) == [0, 1, 2]
    check_tier_bytes(rig, request)
    rig.assert_at_rest()


def check_tier_bytes(rig: Rig, request: Request) -> None:
    """Each stored block of the request, also one that no hit would read, has what the model writes for it."""
    tokens = list(request.all_token_ids)
    (rows,) = rig.worker().cpu_kv_caches.values()
    for group, spec in enumerate(rig.specs):
        size = spec.page_size_bytes // spec.block_size
        for index in rig.in_tier(request, group):
            slot = rig.manager.tier.get(rig.key(request, index, group))
            assert slot is not None
            for position in range(index * spec.block_size, (index + 1) * spec.block_size):
                at = position % spec.block_size * size
                wanted = prefix_bytes(tokens[: position + 1], rig.place(0, group), size)
                found = rows[slot.block_id, at : at + size]
                assert torch.equal(found, wanted), f"group {group}: wrong bytes for position {position}"
    assert rig.in_tier(request)


def test_off_11_abort_of_a_request_that_was_never_scheduled() -> None:
    rig = Rig(config_changes={"max_num_seqs": 1})
    running = rig.add(prompt(9), max_tokens=5)
    waiting = rig.add(prompt(9, seed=1))
    rig.step()
    rig.abort(waiting)
    rig.run()
    rig.check_output(running)
    assert rig.in_tier(waiting) == []
    rig.assert_at_rest()


def test_off_12_a_hole_is_stored_again_while_its_owner_runs() -> None:
    rig = Rig(device_blocks=32, host_blocks=6)  # 5 usable slots
    r = rig.add(prompt(13), max_tokens=12)
    rig.step()
    rig.step()
    assert rig.in_tier(r) == [0, 1, 2]
    rig.manager.tier.pool.evict_blocks([rig.manager.tier.get(rig.key(r, 1)).block_id])  # type: ignore[union-attr]
    rig.manager.tier.pool.num_evicted += 1
    assert rig.manager.tier.find(r.block_hashes, 100)[1] == 4, "only the contiguous prefix is promised"
    for _ in range(4):
        rig.step()
    assert rig.in_tier(r) == [0, 1, 2, 3]
    assert rig.manager.tier.find(r.block_hashes, 100)[1] == 16
    rig.run()
    rig.assert_at_rest()


def test_off_12_two_running_requests_do_not_evict_each_other_for_ever() -> None:
    rig = Rig(device_blocks=64, host_blocks=9)  # 8 slots for two chains of 6 blocks
    a = rig.add(prompt(25), max_tokens=60)
    b = rig.add(prompt(25, seed=1), max_tokens=60)
    for _ in range(20):
        rig.step()
    stored = rig.manager.store_side.ledger.scheduled
    for _ in range(20):
        rig.step()
    grown = rig.manager.store_side.ledger.scheduled - stored
    new_blocks = 2 * 20 // BLOCK
    assert grown <= new_blocks + 2, f"{grown} stores for {new_blocks} new blocks"
    assert 0 in rig.in_tier(a) or 0 in rig.in_tier(b)
    rig.run()
    rig.assert_at_rest()


def test_off_12_a_prompt_larger_than_the_tier_keeps_its_head() -> None:
    rig = Rig(device_blocks=64, host_blocks=9, config_changes={"max_num_batched_tokens": 8})
    request = rig.generate(prompt(80), max_tokens=2)
    assert rig.in_tier(request)[:6] == [0, 1, 2, 3, 4, 5]
    rig.assert_at_rest()


def test_off_14_an_unaligned_window_may_touch_one_block_more() -> None:
    rig = Rig(specs=[full(4), window(4, size=14)], device_blocks=64, host_blocks=64)
    rig.generate(prompt(42), max_tokens=3)
    rig.evict_device()
    again = rig.generate(prompt(43), max_tokens=3)
    assert again.num_cached_tokens >= 40
    load = next(job for job in rig.mover().launched if not job.is_store)
    full_blocks = again.num_cached_tokens // 4
    assert len(load.src_blocks) - full_blocks == -(-13 // 4)
    rig.assert_at_rest()


def test_off_14_a_load_that_ends_inside_a_block_is_planned_with_one_block_more_than_the_window_is_long() -> (
    None
):
    rig = Rig(specs=[full(4), window(4, size=8)], host_blocks=64)
    null, slots = rig.manager.tier.pool.null_block, rig.manager.tier.stage(14)
    # 41 tokens: the window of 8 reads from token 34 on, so in blocks 8, 9 and 10.
    plan = rig.manager.promises._plan(0, 41, (slots[:11], [*[null] * 8, *slots[11:]]))
    assert [index for group, index in plan.positions if group == 1] == [8, 9, 10]
    assert [block.block_id for block in plan.tier_blocks] == [slot.block_id for slot in slots]


@pytest.mark.parametrize("size", range(2, 14))
def test_off_14_every_window_loads_and_gives_the_same_output(size: int) -> None:
    rig = Rig(specs=[full(4), window(4, size=size)], device_blocks=64, host_blocks=64)
    for length in (21, 22, 24, 29):
        rig.generate(prompt(length, seed=length), max_tokens=6)
        rig.evict_device()
        again = rig.generate(prompt(length, seed=length), max_tokens=6)  # equals the run without any cache
        assert again.num_cached_tokens == (length - 1) // 4 * 4
    rig.assert_at_rest()


def test_off_15_a_block_that_left_its_window_is_not_stored_under_the_old_hash() -> None:
    rig = Rig(specs=[full(4), window(4, size=6)], device_blocks=40, host_blocks=40)
    tier = rig.manager.tier
    hold = tier.stage(tier.num_stageable)  # no room below
    request = rig.add(prompt(30), max_tokens=14)
    other = rig.add(prompt(30, seed=1), max_tokens=14)
    for _ in range(6):
        rig.step()  # windows slide, blocks are handed on
    tier.pool.free_blocks(hold)
    rig.run()
    rig.check_output(request)
    rig.check_output(other)
    for owner in (request, other):
        check_tier_bytes(rig, owner)
    rig.assert_at_rest()


def test_off_16_blocks_are_counted_per_group_under_context_parallelism() -> None:
    from tests.helpers.offload_rig import Byte, rig_config
    from vllm.v1.simple_kv_offload.manager import SimpleCPUOffloadScheduler

    sharded = FullAttentionSpec(block_size=64, num_kv_heads=1, head_size=4, dtype=Byte())
    replicated = SlidingWindowSpec(
        block_size=64, num_kv_heads=1, head_size=4, dtype=Byte(), sliding_window=128, dcp_sharded=False
    )
    config = rig_config()
    config.parallel_config.decode_context_parallel_size = 2
    kv = KVCacheConfig(
        num_blocks=32,
        kv_cache_tensors=[],
        kv_cache_groups=[KVCacheGroupSpec(["a"], sharded), KVCacheGroupSpec(["b"], replicated)],
    )
    manager = SimpleCPUOffloadScheduler(config, kv, 1 << 20, 128, 64)
    assert list(manager.group_block_sizes) == [128, 64]
    null = manager.tier.pool.null_block
    blocks = manager.tier.stage(6)
    plan = manager.promises._plan(0, 256, (blocks[:2], [null, null, *blocks[2:4]]))
    assert plan.positions == [(0, 0), (0, 1), (1, 2), (1, 3)]
    plan = manager.promises._plan(128, 256, (blocks[:2], blocks[2:6]))
    assert plan.positions == [(0, 1), (0, 2), (1, 2), (1, 3), (1, 4), (1, 5)]


def test_off_16_a_state_group_is_not_scaled() -> None:
    from tests.helpers.offload_rig import Byte, rig_config
    from vllm.v1.simple_kv_offload.manager import SimpleCPUOffloadScheduler

    sharded = FullAttentionSpec(block_size=64, num_kv_heads=1, head_size=4, dtype=Byte())
    state = MambaSpec(64, ((512,),), (Byte(),), mamba_cache_mode="align")
    config = rig_config()
    config.parallel_config.decode_context_parallel_size = 2
    kv = KVCacheConfig(
        num_blocks=32,
        kv_cache_tensors=[],
        kv_cache_groups=[KVCacheGroupSpec(["a"], sharded), KVCacheGroupSpec(["b"], state)],
    )
    manager = SimpleCPUOffloadScheduler(config, kv, 1 << 20, 128, 64)
    assert list(manager.group_block_sizes) == [128, 64]


def test_off_18_a_block_with_an_open_store_is_not_handed_out() -> None:
    rig = Rig(device_blocks=12)
    request = rig.add(prompt(16), max_tokens=1)
    rig.step(copies=False)
    rig.step(copies=False)  # the finished request's blocks are being stored
    held = rig.manager._in_flight_store_gpu_blocks
    assert held
    other = rig.add(prompt(20, seed=1), max_tokens=1)
    rig.step(copies=False)
    new = rig.steps[-1].scheduled_new_reqs
    assert new
    assert not held & set(new[0].block_ids[0])
    rig.run()
    check_tier_bytes(rig, request)
    rig.check_output(other)
    rig.evict_device()
    assert rig.generate(prompt(16), max_tokens=1).num_cached_tokens == 12


def test_off_20_the_engine_steps_until_the_last_copy_has_ended() -> None:
    rig = Rig()
    rig.add(prompt(16), max_tokens=1)
    rig.step(copies=False)
    for _ in range(10):
        assert rig.scheduler.has_requests(), "a store is open"
        output = rig.step(copies=False)
        assert output.total_num_scheduled_tokens == 0
    rig.mover().release()
    rig.step()
    assert not rig.scheduler.has_requests()
    rig.assert_at_rest()


def test_off_20_the_engine_steps_for_a_load_whose_request_was_aborted() -> None:
    rig = Rig()
    rig.generate(prompt(16), max_tokens=1)
    rig.evict_device()
    request = rig.add(prompt(17))
    rig.step(copies=False)
    rig.abort(request)
    assert rig.scheduler.has_requests()
    assert rig.manager._reqs_to_load[request.request_id].finished
    rig.step(copies=False)
    rig.mover().release()
    rig.run()
    rig.assert_at_rest()


def test_off_21_a_new_request_starts_while_a_slow_store_goes_on() -> None:
    rig = Rig()
    rig.add(prompt(16), max_tokens=1)
    rig.step(copies=False)
    rig.step(copies=False)
    request = rig.add(prompt(9, seed=1), max_tokens=1)
    output = rig.step(copies=False)
    assert request.request_id in output.num_scheduled_tokens
    assert rig.mover().jobs
    rig.run()
    rig.assert_at_rest()


@pytest.mark.parametrize("length", [8, 16, 24, 48])
def test_off_23_all_prefill_chunks_are_stored(length: int) -> None:
    rig = Rig(config_changes={"max_num_batched_tokens": 16})
    rig.generate(prompt(length), max_tokens=2)
    rig.evict_device()
    again = rig.generate(prompt(length), max_tokens=2)
    assert again.num_cached_tokens >= (length - 1) // BLOCK * BLOCK
    rig.assert_at_rest()


def test_off_24_window_blocks_are_stored_once_each_and_only_the_reachable_ones() -> None:
    rig = Rig(
        specs=[full(4), window(4, size=8)],
        device_blocks=64,
        host_blocks=64,
        config_changes={"max_num_batched_tokens": 8},
    )
    request = rig.generate(prompt(41), max_tokens=1)
    stores = [block for job in rig.mover().launched if job.is_store for block in job.src_blocks]
    window_blocks = rig.in_tier(request, group=1)
    assert len(stores) == len(rig.in_tier(request)) + len(window_blocks)
    # The last boundary that a repeated prompt can reach needs ceil((8 - 1) / 4) blocks before it.
    assert window_blocks == [8, 9]
    rig.evict_device()
    assert rig.generate(prompt(41), max_tokens=1).num_cached_tokens == 40


def test_off_24_abort_in_mid_prefill_stores_the_computed_part_once() -> None:
    rig = Rig(
        specs=[full(4), window(4, size=8)],
        device_blocks=64,
        host_blocks=64,
        config_changes={"max_num_batched_tokens": 8},
    )
    request = rig.add(prompt(41), max_tokens=1)
    for _ in range(3):
        rig.step()
    rig.abort(request)
    rig.run()
    stores = [block for job in rig.mover().launched if job.is_store for block in job.src_blocks]
    assert rig.in_tier(request) == [0, 1, 2, 3, 4, 5]
    assert rig.in_tier(request, group=1) == [4, 5], "the computed frontier counts as the end"
    assert len(stores) == len(set(stores)) == 6 + 2
    rig.assert_at_rest()
    rig.evict_device()
    assert rig.generate(prompt(41), max_tokens=1).num_cached_tokens == 24


def test_off_22_with_a_drafter_only_the_last_block_of_the_whole_range_is_held_back() -> None:
    drafter = SpeculativeConfig(method="mtp", num_speculative_tokens=1)
    rig = Rig(config_changes={"max_num_batched_tokens": 8, "max_num_seqs": 2, "speculative": drafter})
    request = rig.generate(prompt(25), max_tokens=1)
    assert rig.in_tier(request) == [0, 1, 2, 3, 4, 5], "chunk borders are stored like any other block"
    rig.evict_device()
    again = rig.generate(prompt(25), max_tokens=1)
    assert again.num_cached_tokens == 20, "all but the last block, which the drafter computes again"


def test_state_groups_store_the_hand_offs() -> None:
    rig = Rig(specs=[full(4), mamba(4)], device_blocks=64, host_blocks=64)
    rig.generate(prompt(19), max_tokens=3)
    stats = rig.manager.get_boundary_store_stats()
    assert stats.stored >= 1
    assert stats.published == sum(value for name, value in vars(stats).items() if name != "published"), (
        "each hand-off has one outcome"
    )
    rig.evict_device()
    again = rig.generate(prompt(19), max_tokens=3)
    assert again.num_cached_tokens == 16
    rig.assert_at_rest()


def test_hand_offs_of_unknown_requests_are_counted_as_gone() -> None:
    rig = Rig()
    output = SchedulerOutput.make_empty()
    output.kv_connector_block_state = SimpleNamespace(  # type: ignore[assignment]
        boundary_state_offloads={"ghost": [(0, 3, 4)]}, get_block_ids=lambda req_id: None
    )
    rig.manager.build_connector_meta(output)
    stats = rig.manager.boundary_store_stats
    assert (stats.published, stats.dropped_request_gone) == (1, 1)
