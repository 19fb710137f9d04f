"""The scheduler's view: admission, unconfirmed work, tables, loads, copies."""

from __future__ import annotations

import pytest

from tests.helpers.kv_core import (
    admit,
    chunked,
    full,
    mamba,
    manager,
    replay_window,
    request,
    ring,
    step,
    window,
)
from vllm.utils.hashing import sha256
from vllm.v1.core.block_hash import (
    init_none_hash,
)
from vllm.v1.core.invariants import check_invariants
from vllm.v1.core.kv_cache_blocks import KVCacheBlocks
from vllm.v1.core.kv_cache_manager import KVCacheManager
from vllm.v1.core.sched.running import blocks_missing
from vllm.v1.kv_cache_interface import KVCacheConfig, KVCacheSpec
from vllm.v1.request import RequestStatus


def test_no_room_takes_nothing() -> None:
    kv = manager(6, full(16))
    admit(kv, request("a", range(48)))
    blocker = request("b", range(1000, 1016))
    admit(kv, blocker)
    third = request("c", [*range(48), *range(500, 532)])
    blocks, hit, _ = kv.get_computed_blocks(third)
    assert hit == 48
    before = [b.ref_cnt for b in kv.block_pool.blocks]
    assert kv.allocate_slots(third, 32, hit, blocks) is None
    assert [b.ref_cnt for b in kv.block_pool.blocks] == before
    assert kv.get_block_ids("c") == ([],)
    check_invariants(kv)


def test_an_idle_hit_counts_as_a_needed_block() -> None:
    kv = manager(4, full(16))
    first = request("a", range(32))
    admit(kv, first)
    kv.free(first)
    second = request("b", [*range(32), *range(100, 132)])
    blocks, hit, _ = kv.get_computed_blocks(second)
    assert hit == 32
    assert kv.allocate_slots(second, 32, hit, blocks) is None
    assert kv.allocate_slots(second, 16, hit, blocks) is not None


def test_nothing_to_allocate_is_refused() -> None:
    kv = manager(6, full(16))
    with pytest.raises(ValueError, match="nothing to allocate"):
        kv.allocate_slots(request("a", range(4)), 0)
    with pytest.raises(ValueError, match="num_new_tokens=-1"):
        kv.allocate_slots(request("a", range(4)), -1, num_external_computed_tokens=4)


def test_lookahead_slots_are_allocated_but_never_hashed() -> None:
    kv = manager(10, full(4))
    req = request("a", range(6), hash_block=4)
    kv.allocate_slots(req, 6, num_lookahead_tokens=4)
    assert len(kv.get_block_ids("a")[0]) == 3
    assert len(kv.block_pool.cached_block_hash_to_block) == 1


def test_slots_end_at_the_longest_sequence() -> None:
    kv = manager(10, full(4), max_model_len=8)
    req = request("a", range(8), hash_block=4)
    kv.allocate_slots(req, 8, num_lookahead_tokens=100)
    assert len(kv.get_block_ids("a")[0]) == 2


def test_watermark_holds_newcomers_back_while_others_run() -> None:
    kv = manager(11, full(16), watermark=0.2)
    assert kv.watermark_blocks == 2
    req = request("a", range(16 * 9))
    assert kv.allocate_slots(req, 16 * 9) is None
    assert kv.allocate_slots(req, 16 * 9, has_scheduled_reqs=False) is not None
    kv.free(req)
    req.status = RequestStatus.RUNNING
    assert kv.allocate_slots(req, 16 * 9) is not None
    with pytest.raises(ValueError, match="watermark"):
        manager(11, full(16), watermark=1.0)


def test_the_whole_sequence_may_have_to_fit() -> None:
    kv = manager(6, full(16))
    req = request("a", range(96))
    assert kv.allocate_slots(req, 16, full_sequence_must_fit=True) is None
    assert kv.allocate_slots(req, 16) is not None


def test_the_whole_sequence_counts_no_more_than_a_window_holds() -> None:
    kv = manager(8, window(16, 32), max_in_flight_tokens=32)
    req = request("a", range(320))
    assert kv.allocate_slots(req, 32, full_sequence_must_fit=True) is not None


def test_columns_left_behind_do_not_count_as_blocks_that_a_window_holds() -> None:
    kv = manager(40, window(4, 8), max_in_flight_tokens=8)
    group = kv.coordinator.single_type_managers[0]
    assert group.max_admission_blocks_per_request == 5
    req = request("a", range(100), hash_block=4)
    admit(kv, req, 8)
    for _ in range(4):
        assert step(kv, req, 8)
    kv.remove_skipped_blocks("a", 40)
    held = sum(block != 0 for block in kv.get_block_ids("a")[0])
    assert held == 2
    assert blocks_missing(kv, req, 100) == 5 - held


def test_reserved_blocks_are_not_used() -> None:
    kv = manager(6, full(16))
    req = request("a", range(64))
    assert kv.allocate_slots(req, 64, reserved_blocks=2) is None
    assert kv.allocate_slots(req, 48, reserved_blocks=2) is not None


def test_hashing_can_be_delayed() -> None:
    kv = manager(10, full(16))
    req = request("a", range(32))
    kv.allocate_slots(req, 32, delay_cache_blocks=True)
    assert len(kv.block_pool.cached_block_hash_to_block) == 0
    kv.cache_blocks(req, 20)
    assert kv.estimate_cached_tokens(req) == 16
    kv.cache_blocks(req, 32)
    assert kv.estimate_cached_tokens(req) == 32


def test_only_known_tokens_are_hashed() -> None:
    kv = manager(10, full(4))
    req = request("a", range(6), hash_block=4)
    kv.allocate_slots(req, 8)  # two draft tokens
    assert kv.estimate_cached_tokens(req) == 4


def test_unconfirmed_blocks_lose_their_hashes_and_get_them_again() -> None:
    kv = manager(20, full(4), window(4, 12))
    req = request("a", range(16), hash_block=4)
    admit(kv, req)
    assert kv.estimate_cached_tokens(req) == 16
    kv.evict_unconfirmed(req, 9)
    assert kv.estimate_cached_tokens(req) == 8
    check_invariants(kv)
    req.num_computed_tokens = 8
    assert step(kv, req, 4)
    assert kv.estimate_cached_tokens(req) == 12
    assert kv.get_computed_blocks(request("b", range(16), hash_block=4))[1] == 12


def test_pfx_02_a_request_that_went_wrong_leaves_nothing_to_hit() -> None:
    kv = manager(20, full(4), mamba(4))
    req = request("a", range(8), hash_block=4)
    admit(kv, req, 4)
    step(kv, req, 4)
    kv.evict_unconfirmed(req, 0)
    kv.free(req)
    kv.new_step_starts()
    assert kv.get_computed_blocks(request("b", range(8), hash_block=4))[1] == 0
    check_invariants(kv, at_rest=True)


@pytest.mark.parametrize("specs", [[window(4, 8)], [mamba(4)], [full(4), mamba(4)], [full(4), window(4, 8)]])
def test_pfx_02_states_and_windows_left_behind_by_it_are_no_hit_either(specs: list[KVCacheSpec]) -> None:
    kv = manager(60, *specs)
    bad = request("bad", range(39), hash_block=4)
    admit(kv, bad, 8)
    for num_new in (8, 8, 8, 7):
        kv.new_step_starts()
        step(kv, bad, num_new)
    kv.free(bad)  # as a preempted request, whose last result was still under way
    kv.forget_content(bad)
    kv.new_step_starts()
    assert len(kv.block_pool.cached_block_hash_to_block) == 0
    check_invariants(kv, at_rest=True)


def test_forgetting_a_request_spares_what_follows_another_start() -> None:
    kv = manager(40, full(4))
    for name, tokens in (("bad", range(16)), ("good", range(50, 66))):
        req = request(name, tokens, hash_block=4)
        admit(kv, req)
        kv.free(req)
    kv.forget_content(request("bad", range(16), hash_block=4))
    assert kv.get_computed_blocks(request("a", range(17), hash_block=4))[1] == 0
    assert kv.get_computed_blocks(request("b", range(50, 67), hash_block=4))[1] == 16


def test_divergence_of_rows_and_states_is_told_to_connectors() -> None:
    kv = manager(60, full(16), mamba(16), retention=0)
    admit(kv, request("a", range(64)))
    kv.new_step_starts()
    probe = request("b", range(64))
    assert kv.get_computed_blocks_for_connector(probe)[3] is True
    plain = manager(60, full(16), full(16))
    admit(plain, request("a", range(64)))
    assert plain.get_computed_blocks_for_connector(probe)[1:] == (48, 0, False)


def test_truncation_slices_and_leaves_scratch_empty() -> None:
    kv = manager(60, full(4), ring(4), full(8), scheduler_block=8, hash_block=4)
    admit(kv, request("a", range(33), hash_block=4))
    blocks, hit, _ = kv.get_computed_blocks(request("b", range(33), hash_block=4))
    assert hit == 32
    cut = kv.truncate_computed_blocks(blocks, 16)
    assert [len(group) for group in cut.blocks] == [4, 0, 2]
    assert kv.truncate_computed_blocks(blocks, 0) is kv.empty_kv_cache_blocks


def test_tables_can_be_cut_to_computed_tokens() -> None:
    kv = manager(60, full(4), mamba(4), ring(4))
    req = request("a", range(12), hash_block=4)
    kv.allocate_slots(req, 12, num_lookahead_tokens=8)
    assert [len(g) for g in kv.get_block_ids_for_computed_tokens("a", 5)] == [2, 3, 1]


def test_popped_blocks_come_in_eviction_order() -> None:
    kv = manager(10, full(4), window(4, 4))
    req = request("a", range(12), hash_block=4)
    admit(kv, req)
    blocks = kv.pop_blocks_for_free("a")
    assert [b.block_id for b in blocks] == [3, 2, 1, 6, 5, 4]
    assert kv.get_block_ids("a") == ([], [])
    kv.block_pool.free_blocks(blocks)
    check_invariants(kv, at_rest=True)
    kv.free(req)


def test_statistics_count_admissions_and_not_retries() -> None:
    kv = manager(10, full(4), log_stats=True)
    req = request("a", range(12), hash_block=4)
    for _ in range(5):
        kv.get_computed_blocks(req)
    kv.record_prefix_cache_stats(req, 8)
    req.num_preemptions = 1
    kv.record_prefix_cache_stats(req, 4)
    stats = kv.make_prefix_cache_stats()
    assert stats is not None
    assert (stats.requests, stats.queries, stats.hits) == (1, 12, 8)
    assert (stats.preempted_requests, stats.preempted_hits) == (1, 4)
    silent = manager(10, full(4))
    silent.record_prefix_cache_stats(req, 8)
    assert silent.prefix_cache_stats is silent.make_prefix_cache_stats() is None


def test_external_tokens_get_blocks_that_are_hashed_when_they_have_arrived() -> None:
    kv = manager(30, full(4), window(4, 8), mamba(4))
    req = request("a", range(20), hash_block=4)
    kv.allocate_slots(req, 0, num_external_computed_tokens=16, delay_cache_blocks=True)
    assert [[b != 0 for b in group] for group in kv.get_block_ids("a")] == [
        [True] * 4,
        [False, False, True, True],
        [False, False, False, True],
    ]
    assert kv.estimate_cached_tokens(req) == 0
    req.num_computed_tokens = 16
    kv.cache_blocks(req, 16)
    assert kv.estimate_cached_tokens(req) == 16
    assert step(kv, req, 4)
    check_invariants(kv)
    kv.free(req)
    check_invariants(kv, at_rest=True)


def test_local_hit_and_external_tokens_together() -> None:
    kv = manager(40, full(4), window(4, 8), chunked(4, 8))
    first = request("a", range(9), hash_block=4)
    admit(kv, first)
    second = request("b", range(30), hash_block=4)
    blocks, hit, _ = kv.get_computed_blocks(second)
    assert hit == 8
    assert kv.allocate_slots(second, 2, hit, blocks, num_external_computed_tokens=16) is not None
    tables = kv.get_block_ids("b")
    assert tables[0][:2] == kv.get_block_ids("a")[0][:2]
    assert [[b != 0 for b in group] for group in tables[1:]] == [
        [False] * 4 + [True] * 3,
        [False] * 6 + [True],
    ]
    check_invariants(kv)


def test_blocks_record_adds_and_lists() -> None:
    kv = manager(20, full(4), window(4, 4))
    taken = kv.allocate_slots(request("a", range(8), hash_block=4), 8)
    assert taken is not None
    more = taken + taken.new_empty()
    assert more.get_block_ids() == taken.get_block_ids() == ([1, 2], [3, 4])
    assert taken.get_block_ids(group_ids=[1]) == ([3, 4],)
    assert kv.empty_kv_cache_blocks.get_block_ids(allow_none=True) is None
    assert kv.empty_kv_cache_blocks.get_block_ids() == ([], [])
    assert taken.get_unhashed_block_ids_all_groups() == [[], []]
    with pytest.raises(ValueError, match="one group"):
        taken.get_unhashed_block_ids()
    with pytest.raises(ValueError, match="groups"):
        _ = taken + KVCacheBlocks(([],))
    assert KVCacheBlocks(blocks=([kv.block_pool.blocks[7]],)).get_unhashed_block_ids() == [7]


def test_bounded_replay_hit_takes_the_replayed_window() -> None:
    kv = manager(60, full(4), replay_window(4, 4))
    first = request("a", range(20), hash_block=4)
    admit(kv, first)
    kv.free(first)
    second = request("b", range(20), hash_block=4)
    assert admit(kv, second) == 16
    kv.free(second)
    check_invariants(kv, at_rest=True)


def test_copies_are_held_for_as_many_steps_as_are_in_flight() -> None:
    kv = manager(40, full(16), mamba(16), scheduler_block=16, hash_block=4, retention=0)
    req = request("a", range(55), hash_block=4)
    kv.new_step_starts()
    admit(kv, req, 48)
    kv.new_step_starts(1)
    step(kv, req, 4)
    kv.new_step_starts(2)
    step(kv, req, 3)
    assert len(kv.take_kv_cache_block_copies()) == 1
    assert len(kv.block_pool.leases) == 1
    kv.new_step_starts(2)
    assert len(kv.block_pool.leases) == 1
    kv.new_step_starts(1)  # only the step after the copy's is still in flight
    assert len(kv.block_pool.leases) == 0
    check_invariants(kv)


def test_a_manager_without_groups_serves_models_without_attention() -> None:
    kv = KVCacheManager(KVCacheConfig(1, [], []), 100, 4, 4, enable_caching=True)
    req = request("a", range(4), hash_block=4)
    assert kv.allocate_slots(req, 4) is not None
    assert kv.get_block_ids("a") == ()
    kv.free(req)
    assert kv.usage == 0.0


@pytest.fixture(autouse=True)
def _root() -> None:
    init_none_hash(sha256)


@pytest.mark.parametrize(("size", "num_null"), [(4, 3), (5, 2), (6, 2), (8, 2), (9, 1)])
def test_tokens_that_are_replayed_have_their_slots_from_the_first_one_on(size: int, num_null: int) -> None:
    kv = manager(60, full(4), replay_window(4, size), scheduler_block=4)
    first = request("first", range(18), hash_block=4)
    admit(kv, first)
    kv.free(first)
    again = request("again", range(18), hash_block=4)
    blocks, hit, _ = kv.get_computed_blocks(again)
    assert hit == 16
    assert kv.allocate_slots(again, 2, hit, blocks) is not None
    table = kv.get_blocks("again").blocks[1]
    assert [block.is_null for block in table] == [True] * num_null + [False] * (5 - num_null)
    assert num_null == (16 - size) // 4, "computing starts `size` tokens before the end of the hit"
