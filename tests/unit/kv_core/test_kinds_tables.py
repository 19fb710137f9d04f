"""Block tables of the kinds: how much they need, what they skip, what they give back."""

from __future__ import annotations

import pytest

from tests.helpers.kv_core import (
    BYTE,
    admit,
    chunked,
    free_ids,
    full,
    ids,
    mamba,
    manager,
    replay_window,
    request,
    ring,
    rswa,
    step,
    window,
)
from vllm.v1.core.block_pool import BlockPool
from vllm.v1.core.invariants import check_invariants
from vllm.v1.core.kv_cache_block import KVCacheBlock
from vllm.v1.core.kv_cache_manager import KVCacheManager
from vllm.v1.core.single_type_kv_cache_manager import (
    ChunkedLocalAttentionManager,
    CrossAttentionManager,
    FullAttentionManager,
    HiSparseHotManager,
    HiSparseResidentManager,
    SlidingWindowManager,
    get_manager_for_kv_cache_spec,
    register_all_kvcache_specs,
)
from vllm.v1.kv_cache_interface import (
    CrossAttentionSpec,
    EncoderOnlyAttentionSpec,
    HiSparseHotSpec,
    HiSparseResidentSpec,
    KVCacheConfig,
    KVCacheGroupSpec,
)


def make(manager_class, spec, pool: BlockPool, **more):
    return manager_class(
        spec,
        block_pool=pool,
        enable_caching=True,
        kv_cache_group_id=0,
        scheduler_block_size=spec.block_size,
        **more,
    )


def tables(kv: KVCacheManager, request_id: str) -> list[list[int]]:
    return [list(group) for group in kv.get_block_ids(request_id)]


def test_need_counts_new_blocks_and_hits_nobody_holds() -> None:
    pool = BlockPool(100, True, 2)
    kv = make(SlidingWindowManager, window(2, 4), pool)
    hit = [KVCacheBlock(i + 1) for i in range(10)]
    assert kv.get_num_blocks_to_allocate("1", 40, hit, 0, 0, 40) == 20
    assert kv.get_num_blocks_to_allocate("2", 40, [pool.null_block] * 5 + hit[:5], 0, 0, 40) == 15


def test_an_idle_hit_block_counts_but_is_not_allocated_again() -> None:
    pool = BlockPool(10, True, 2)
    kv = make(FullAttentionManager, full(2), pool)
    block = pool.blocks[1]
    assert kv.get_num_blocks_to_allocate("r", 4, [block], 2, 2, 4) == 2
    kv.add_local_computed_blocks("r", [block], 2)
    assert len(kv.allocate_new_blocks("r", 4, 4)) == 1
    assert len(kv.req_to_blocks["r"]) == 2
    assert kv._null_block is pool.null_block


@pytest.mark.parametrize(
    ("manager_class", "spec", "computed", "nulls"),
    [
        (SlidingWindowManager, window(2, 4), [0, 4, 5, 6, 7, 11], [0, 0, 1, 1, 2, 4]),
        (ChunkedLocalAttentionManager, chunked(2, 4), [0, 3, 4, 6, 12], [0, 0, 2, 2, 6]),
        (FullAttentionManager, full(2), [20], [0]),
    ],
)
def test_skipped_blocks_become_null(manager_class, spec, computed, nulls) -> None:
    pool = BlockPool(2000, True, 2)
    kv = make(manager_class, spec, pool)
    originals = list(range(1000, 1011))
    kv.req_to_blocks["test"] = [KVCacheBlock(i) for i in originals]
    for num_tokens, expected in zip(computed, nulls, strict=True):
        kv.remove_skipped_blocks("test", num_tokens)
        assert ids(kv.req_to_blocks["test"]) == [0] * expected + originals[expected:]


def test_window_frees_the_later_block_first() -> None:
    kv = manager(20, window(4, 4))
    req = request("r", range(40), hash_block=4)
    admit(kv, req, 20)
    assert tables(kv, "r") == [[1, 2, 3, 4, 5]]
    step(kv, req, 4)
    assert tables(kv, "r") == [[0, 0, 0, 0, 5, 6]]
    assert free_ids(kv)[-4:] == [4, 3, 2, 1]
    check_invariants(kv)


def test_blocks_leave_the_window_by_processed_tokens_only() -> None:
    kv = manager(20, window(4, 4))
    req = request("r", range(40), hash_block=4)
    admit(kv, req, 20)
    req.num_in_flight_tokens = 20
    step(kv, req, 4)
    assert tables(kv, "r") == [[1, 2, 3, 4, 5, 6]]


def test_extra_retained_tokens_keep_the_window_longer() -> None:
    kv = manager(20, window(4, 4, extra_retained_tokens=4))
    req = request("r", range(40), hash_block=4)
    admit(kv, req, 20)
    step(kv, req, 4)
    assert tables(kv, "r") == [[0, 0, 0, 4, 5, 6]]


def test_reasoning_window_keeps_prompt_and_window() -> None:
    kv = manager(30, rswa(4, 8))
    req = request("r", range(10), hash_block=4)
    admit(kv, req)
    for token in range(20):
        req.append_output_token_ids(token)
        step(kv, req, 1)
    # 29 tokens processed: the window starts at 22; blocks 3 and 4 lie between prompt and window.
    assert tables(kv, "r") == [[1, 2, 3, 0, 0, 6, 7, 8]]
    kv.free(req)
    check_invariants(kv, at_rest=True)


def test_reasoning_window_frees_nothing_while_the_prompt_is_unknown() -> None:
    kv = manager(30, rswa(4, 8))
    req = request("r", range(40), hash_block=4)
    admit(kv, req)
    kv.remove_skipped_blocks("r", 40)
    assert 0 not in tables(kv, "r")[0]
    kv.remove_skipped_blocks("r", 40, 4)
    assert tables(kv, "r")[0][1:8] == [0] * 7


def test_slots_tell_how_far_a_request_grows_without_asking_again() -> None:
    cross = CrossAttentionSpec(block_size=4, num_kv_heads=1, head_size=1, dtype=BYTE)
    kv = manager(40, full(4), mamba(8), ring(4), scheduler_block=8, hash_block=4)
    req = request("r", range(10), hash_block=4)
    assert kv.num_slots("r") == 0
    admit(kv, req)
    assert kv.num_slots("r") == 12
    groups = kv.coordinator.single_type_managers
    assert groups[1].num_slots("r") == 15
    assert groups[2].num_slots("r") > 10**12
    assert make(CrossAttentionManager, cross, kv.block_pool).num_slots("r") > 10**12


def test_a_ring_can_be_loaded_too() -> None:
    kv = manager(40, full(4), ring(4), scheduler_block=4)
    req = request("r", range(10), hash_block=4)
    kv.allocate_slots(req, 0, num_external_computed_tokens=8, delay_cache_blocks=True)
    assert [len(t) for t in tables(kv, "r")] == [2, 1]


def test_kinds_of_the_wrong_spec_are_refused() -> None:
    pool = BlockPool(10, True, 4)
    with pytest.raises(TypeError, match="HiSparseHotSpec"):
        make(HiSparseHotManager, full(4), pool).allocate_new_blocks("r", 4, 4)
    with pytest.raises(TypeError, match="HiSparseResidentSpec"):
        HiSparseResidentManager.admission_cap(full(4), 8, 100)


def test_ring_holds_one_block_for_life() -> None:
    kv = manager(30, full(4), ring(6), scheduler_block=4)
    req = request("r", range(20), hash_block=4)
    assert admit(kv, req, 10) == 0
    assert tables(kv, "r") == [[1, 2, 3], [4]]
    step(kv, req, 10)
    assert tables(kv, "r")[1] == [4]
    kv.free(req)
    again = request("s", range(20), hash_block=4)
    blocks, hit, _ = kv.get_computed_blocks(again)
    assert hit == 16
    assert [len(group) for group in blocks.blocks] == [4, 0]
    admit(kv, again)
    assert len(tables(kv, "s")[1]) == 1
    assert kv.block_pool.blocks[tables(kv, "s")[1][0]].block_hash is None
    check_invariants(kv)


def test_replayed_window_gets_slots_from_the_replay_on_but_is_never_cached() -> None:
    kv = manager(40, full(4), replay_window(4, 8), scheduler_block=4)
    first = request("a", range(30), hash_block=4)
    admit(kv, first)
    kv.free(first)
    second = request("b", range(30), hash_block=4)
    blocks, hit, _ = kv.get_computed_blocks(second)
    assert hit == 28
    assert blocks.blocks[1] == []
    assert kv.allocate_slots(second, 2, hit, blocks) is not None
    table = kv.get_block_ids("b")[1]
    # Tokens 20 .. 29 need slots: computing starts 8 tokens before the hit's end.
    assert [b == 0 for b in table] == [True] * 5 + [False] * 3
    assert all(kv.block_pool.blocks[b].block_hash is None for b in table if b)
    check_invariants(kv)


def test_replay_with_kinds_that_keep_a_tail_finds_nothing() -> None:
    kv = manager(40, full(4), replay_window(4, 8), window(4, 8), scheduler_block=4)
    first = request("a", range(30), hash_block=4)
    admit(kv, first)
    assert kv.get_computed_blocks(request("b", range(30), hash_block=4))[1] == 0


def test_admission_cap_is_what_sized_the_pool() -> None:
    spec = window(4, 8)
    pool = BlockPool(100, True, 4)
    kv = get_manager_for_kv_cache_spec(
        spec, 12, 400, block_pool=pool, enable_caching=True, kv_cache_group_id=0, scheduler_block_size=4
    )
    cap = spec.max_admission_blocks_per_request(12, 400)
    assert kv.max_admission_blocks_per_request == cap == 6
    assert kv.get_num_blocks_to_allocate("r", 400, [], 0, 0, 400) == 100
    assert kv.get_num_blocks_to_allocate("r", 400, [], 0, 0, 400, apply_admission_cap=True) == cap


def test_cross_attention_counts_encoder_tokens() -> None:
    spec = CrossAttentionSpec(block_size=4, num_kv_heads=1, head_size=1, dtype=BYTE)
    kv = manager(20, full(4), spec, scheduler_block=4, enable_caching=False)
    req = request("r", range(4), hash_block=4)
    assert kv.allocate_slots(req, 4, num_encoder_tokens=10) is not None
    assert [len(t) for t in tables(kv, "r")] == [1, 3]
    req.num_computed_tokens = 4
    kv.allocate_slots(req, 1, num_encoder_tokens=10)
    assert [len(t) for t in tables(kv, "r")] == [2, 3]
    group = kv.coordinator.single_type_managers[1]
    assert isinstance(group, CrossAttentionManager)
    free = kv.block_pool.get_num_free_blocks()
    assert group.allocate_external_computed_blocks("r", 0, 8) == [], "tokens from elsewhere are the decoder's"
    assert kv.block_pool.get_num_free_blocks() == free
    assert [len(t) for t in kv.get_block_ids_for_computed_tokens("r", 4)] == [1, 3]


def test_encoder_only_attention_holds_no_block_whatever_the_encoder_is_given() -> None:
    only = EncoderOnlyAttentionSpec(block_size=4, num_kv_heads=1, head_size=1, dtype=BYTE)
    kv = manager(20, full(4), only, scheduler_block=4, enable_caching=False)
    req = request("r", range(4), hash_block=4)
    assert kv.allocate_slots(req, 4, num_encoder_tokens=10, full_sequence_must_fit=True) is not None
    assert [len(t) for t in tables(kv, "r")] == [1, 0]
    assert kv.num_slots("r") == 4
    kv.free(req)
    assert kv.block_pool.get_num_free_blocks() == 19


def test_hot_scratch_is_a_fixed_share_and_resident_blocks_cover_tokens_in_flight() -> None:
    groups = [
        KVCacheGroupSpec(["source"], full(4), host_resident=True),
        KVCacheGroupSpec(
            ["resident"], HiSparseResidentSpec(block_size=4, page_size=8), enable_kv_transfer=False
        ),
        KVCacheGroupSpec(
            ["hot"],
            HiSparseHotSpec(block_size=4, page_size=8, blocks_per_request=3),
            enable_kv_transfer=False,
        ),
    ]
    cfg = KVCacheConfig(20, [], groups, hisparse_host_num_blocks=12)
    kv = KVCacheManager(cfg, 100, 4, 4, max_in_flight_tokens=8, enable_kv_cache_events=True)
    device, host = kv.coordinator.pools
    req = request("r", range(30), hash_block=4)
    admit(kv, req, 8)
    assert [len(t) for t in tables(kv, "r")] == [2, 2, 3]
    assert device.get_num_free_blocks() == 19 - 5
    assert host.get_num_free_blocks() == 11 - 2
    step(kv, req, 8)
    assert tables(kv, "r")[1][:2] == [0, 0]
    assert {event.medium for event in kv.take_events()} == {"CPU"}
    check_invariants(kv)
    kv.free(req)
    check_invariants(kv, at_rest=True)
    assert kv.reset_prefix_cache()


def test_resident_blocks_are_capped_at_what_tokens_in_flight_touch() -> None:
    groups = [
        KVCacheGroupSpec(["f"], full(2)),
        KVCacheGroupSpec(["r"], HiSparseResidentSpec(block_size=4, page_size=8), enable_kv_transfer=False),
    ]
    kv = KVCacheManager(KVCacheConfig(6 + 3 + 1, [], groups), 12, 2, 2, max_in_flight_tokens=8)
    resident = kv.coordinator.single_type_managers[1]
    assert resident.max_admission_blocks_per_request == 3
    req = request("r", range(12), hash_block=2)
    admit(kv, req, 3)
    step(kv, req, 3)
    assert kv.allocate_slots(req, 8) is not None, "tokens 3 to 10 lie in three blocks"
    assert [len(t) for t in tables(kv, "r")] == [6, 3]


def test_a_full_host_pool_refuses_the_request() -> None:
    groups = [KVCacheGroupSpec(["source"], full(4), host_resident=True), KVCacheGroupSpec(["x"], full(4))]
    kv = KVCacheManager(KVCacheConfig(20, [], groups, hisparse_host_num_blocks=3), 100, 4, 4)
    assert kv.allocate_slots(request("r", range(12), hash_block=4), 12) is None
    assert kv.allocate_slots(request("s", range(8), hash_block=4), 8) is not None
    assert not kv.reset_prefix_cache()
    with pytest.raises(ValueError, match="hisparse_host_num_blocks"):
        KVCacheManager(KVCacheConfig(20, [], groups), 100, 4, 4)


def test_only_blocks_with_token_slots_are_zeroed() -> None:
    kv = manager(40, full(4), mamba(4), ring(4), scheduler_block=4)
    req = request("r", range(8), hash_block=4)
    admit(kv, req)
    full_table = tables(kv, "r")[0]
    assert kv.take_new_block_ids() == full_table
    assert kv.take_new_block_ids() == []
    kv.record_blocks_for_zeroing([7])
    assert kv.take_new_block_ids() == [7]
    plain = manager(10, full(4))
    admit(plain, request("r", range(8), hash_block=4))
    assert plain.take_new_block_ids() == []


def test_xfer_03_targets_of_a_load_are_not_zeroed() -> None:
    kv = manager(40, full(4), mamba(4), scheduler_block=4)
    req = request("r", range(12), hash_block=4)
    kv.allocate_slots(req, 4, num_external_computed_tokens=8, skip_zeroing_group_ids=(0, 1))
    assert kv.take_new_block_ids() == tables(kv, "r")[0][2:]


def test_registering_kinds_is_idempotent() -> None:
    register_all_kvcache_specs(None)
    register_all_kvcache_specs(None)
