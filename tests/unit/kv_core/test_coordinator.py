"""Several groups as one: common hits, EAGLE, alignment, retention."""

from __future__ import annotations

import pytest

from tests.helpers.kv_core import (
    BYTE,
    admit,
    chunked,
    config,
    fake_hashes,
    full,
    ids,
    mamba,
    manager,
    plant,
    replay_window,
    request,
    ring,
    window,
)
from vllm.v1.core.block_pool import BlockPool
from vllm.v1.core.kv_cache_coordinator import (
    HybridKVCacheCoordinator,
    KVCacheCoordinator,
    KVCacheCoordinatorNoPrefixCache,
    UnitaryKVCacheCoordinator,
    get_kv_cache_coordinator,
    replay_boundaries,
)
from vllm.v1.kv_cache_interface import FullAttentionSpec, KVCacheSpec


def build(
    *specs: KVCacheSpec, scheduler: int = 4, unit: int = 4, use_eagle: bool = False, eagle=(), **more
) -> KVCacheCoordinator:
    retention = more.pop("retention", None)
    return get_kv_cache_coordinator(
        config(200, *specs, eagle=eagle, prefix_cache_retention_interval=retention),
        1000,
        64,
        use_eagle,
        more.pop("caching", True),
        False,
        1,
        1,
        scheduler,
        unit,
        **more,
    )


def search(kv: KVCacheCoordinator, cached: list[str], limit: int, unit: int = 4):
    """Common hit where `cached[g][i] == "x"` says that block i of group g is cached."""
    length = max(len(c) * kv.group_block_sizes[g] // unit for g, c in enumerate(cached))
    hashes = fake_hashes(length)
    for group, marks in enumerate(cached):
        scale = kv.group_block_sizes[group] // unit
        by_block = hashes[scale - 1 :: scale]
        plant(kv.block_pool, by_block, [i for i, m in enumerate(marks) if m == "x"], group, 10 + 30 * group)
    blocks, hit, beyond = kv.find_longest_cache_hit(hashes, limit)
    return [ids(group) for group in blocks], hit, beyond


def test_the_class_follows_groups_and_caching() -> None:
    assert isinstance(build(full(4)), UnitaryKVCacheCoordinator)
    assert isinstance(build(full(4), full(4)), HybridKVCacheCoordinator)
    assert isinstance(build(full(4), caching=False), KVCacheCoordinatorNoPrefixCache)
    assert isinstance(build(), KVCacheCoordinatorNoPrefixCache)
    assert build(full(4), full(4), caching=False).find_longest_cache_hit([], 10) == (([], []), 0, 0)


def test_worked_example_of_full_and_window() -> None:
    kv = build(full(4), window(4, 8))
    assert search(kv, ["xxxxx", ".xx.."], 21) == ([[10, 11, 12], [0, 41, 42]], 12, 8)


def test_a_hit_must_suit_all_groups() -> None:
    kv = build(full(4), window(4, 4), mamba(4), chunked(4, 8))
    assert search(kv, ["xxxxxx", "xx.xx.", "xx..xx", "xxxxxx"], 100)[1] == 20
    kv = build(full(4), window(4, 4), mamba(4), chunked(4, 8))
    assert search(kv, ["xxxxxx", ".x.xx.", ".x..x.", "xx.x.x"], 100)[1] == 8


def test_groups_of_different_block_sizes_end_on_common_blocks() -> None:
    kv = build(full(4), full(12), scheduler=12, unit=4)
    assert search(kv, ["x" * 8, "xx"], 40)[:2] == ([[10, 11, 12, 13, 14, 15], [40, 41]], 24)
    kv = build(full(4), full(12), scheduler=12, unit=4)
    assert search(kv, ["x" * 5, "xx"], 40)[:2] == ([[10, 11, 12], [40]], 12)


def test_groups_with_equal_specs_are_searched_together() -> None:
    kv = build(full(4), window(4, 4), full(4))
    assert search(kv, ["xxx", "xxx", "xx."], 100)[1] == 8
    assert len(kv._batches) == 2


def test_scratch_takes_no_part_in_hits() -> None:
    kv = build(full(4), ring(6), replay_window(4, 8))
    blocks, hit, _ = search(kv, ["xxx", "", ""], 100)
    assert (blocks, hit) == ([[10, 11, 12], [], []], 12)
    assert search(build(ring(4), ring(4)), ["", ""], 100) == ([[], []], 0, 0)


def test_hits_end_where_no_shared_state_is_cut() -> None:
    compressed = FullAttentionSpec(block_size=6, num_kv_heads=1, head_size=1, dtype=BYTE, tokens_per_state=3)
    kv = build(full(2), compressed, scheduler=6, unit=2)
    assert kv._cache_hit_alignment_tokens == 6
    fine = build(full(8), mamba(8), compressed, scheduler=24, unit=2)
    assert not fine.enable_partial_hash_hits
    assert fine._cache_hit_alignment_tokens == 24
    ring_of_four = build(full(2), full(2), ring(8), scheduler=2, unit=2)
    assert ring_of_four._cache_hit_alignment_tokens == 2


def test_pfx_01_token_groups_drop_a_block_and_the_state_group_follows() -> None:
    kv = build(full(16), mamba(16), scheduler=16, unit=16, use_eagle=True)
    assert kv.drop_eagle_group_ids == {0, 1}
    blocks, hit, _ = search(kv, ["xxxx", "xxxx"], 100, unit=16)
    assert hit == 48
    assert [len(group) for group in blocks] == [3, 3]


@pytest.mark.parametrize("length", [n for b in range(1, 6) for n in (16 * b - 1, 16 * b, 16 * b + 1)])
def test_pfx_01_group_lengths_agree_for_every_prompt_length(length: int) -> None:
    kv = manager(60, full(16), mamba(16), use_eagle=True)
    req = request("a", range(length))
    done = 0
    while done < length:
        end = min(length, done + 16)
        admit(kv, req, end) if done == 0 else kv.allocate_slots(req, end - done)
        req.num_computed_tokens = done = end
    kv.free(req)
    kv.new_step_starts()
    blocks, hit, _ = kv.get_computed_blocks(request("b", range(length)))
    assert hit == max(0, (length - 1) // 16 - 1) * 16
    assert [len(group) for group in blocks.blocks] == [hit // 16] * 2


def test_eagle_looks_one_block_past_the_candidate_only_once() -> None:
    kv = build(full(4), window(4, 8), use_eagle=True)
    # Full attention hits 20 and gives 4 back; the window group may look at block 4 and gives it back too.
    assert search(kv, ["xxxxx", "..xxx"], 100)[:2] == ([[10, 11, 12, 13], [0, 0, 42, 43]], 16)


def test_only_flagged_groups_drop() -> None:
    kv = build(full(4), window(4, 4), use_eagle=True, eagle=[0])
    assert (kv.eagle_group_ids, kv.drop_eagle_group_ids) == ({0}, {0})
    assert search(kv, ["xxxx", "..x."], 100)[1] == 12


def test_lookahead_hashes_replace_the_drop() -> None:
    kv = build(full(4), window(4, 4), use_eagle=True, num_hash_lookahead_tokens=1)
    assert kv.eagle_group_ids == {0, 1}
    assert kv.drop_eagle_group_ids == set()
    assert search(kv, ["xxx", "xxx"], 100)[1] == 12


def test_without_a_drafter_nothing_drops() -> None:
    assert build(full(4), eagle=[0]).drop_eagle_group_ids == set()


def test_hits_of_each_group_alone() -> None:
    kv = build(full(4), window(4, 4), ring(4))
    hashes = fake_hashes(4)
    plant(kv.block_pool, hashes, [0, 1, 2], 0, 10)
    plant(kv.block_pool, hashes, [0], 1, 40)
    found = kv.find_longest_cache_hit_per_group(hashes, 16)
    assert [(ids(blocks), length) for blocks, length in found] == [([10, 11, 12], 12), ([40], 4), ([], 0)]


def test_sizes_must_fit() -> None:
    with pytest.raises(AssertionError, match="hash block"):
        build(full(4), full(4), scheduler=4, unit=3)
    with pytest.raises(AssertionError, match="group 1"):
        build(full(4), full(8), scheduler=4, unit=4)
    with pytest.raises(AssertionError, match="hash block"):
        build(full(8), scheduler=8, unit=4)
    build(full(4), ring(6))  # scratch is free to have any size


def test_retention_interval_is_checked() -> None:
    assert build(full(4), window(4, 4), retention=8).retention_interval == 8
    for retention, specs, message in (
        (6, (full(4), window(4, 4)), "multiple"),
        (8, (full(4), full(8)), "sliding-window"),
        (-4, (full(4), window(4, 4)), "negative"),
    ):
        with pytest.raises(ValueError, match=message):
            build(*specs, scheduler=8 if specs[1].block_size == 8 else 4, retention=retention)


def test_fine_grained_hits_need_states_wider_than_hashes_and_kinds_that_allow_it() -> None:
    assert build(full(16), mamba(16), scheduler=16, unit=4).enable_partial_hash_hits
    assert not build(
        full(16), mamba(16), scheduler=16, unit=4, allow_partial_hash_hits=False
    ).enable_partial_hash_hits
    assert not build(full(16), full(8), scheduler=16, unit=8).enable_partial_hash_hits
    assert not build(full(16), mamba(16), window(8, 8), scheduler=16, unit=4).enable_partial_hash_hits
    assert build(full(16), mamba(16), window(4, 8), scheduler=16, unit=4).enable_partial_hash_hits


def test_only_whole_scheduler_blocks_are_worth_hashing() -> None:
    kv = build(full(4), full(12), scheduler=12, unit=4)
    assert kv.get_num_cacheable_tokens(23, 0) == 12
    assert build(full(16), mamba(16), scheduler=16, unit=4).get_num_cacheable_tokens(23, 0) == 23
    assert build(full(4)).get_num_cacheable_tokens(23, 0) == 23


def test_a_pool_of_the_callers_is_used() -> None:
    pool = BlockPool(50, True, 4, medium="CPU")
    kv = build(full(4), window(4, 4), block_pool=pool)
    assert kv.block_pool is pool
    assert all(group.block_pool is pool for group in kv.single_type_managers)


@pytest.mark.parametrize(
    ("num_prompt", "size", "eagle", "expected"),
    [
        (50, 16, False, (49,)),
        (0, 16, False, (0,)),
        (64, 16, True, (48, 32)),
        (50, 16, True, (32,)),
        (10, 16, True, (0,)),
    ],
)
def test_replay_boundaries(num_prompt: int, size: int, eagle: bool, expected: tuple[int, ...]) -> None:
    assert replay_boundaries(num_prompt, size, eagle) == expected


def test_touching_comes_before_allocating() -> None:
    """A hit of one group must not be evicted by the copy another group needs."""
    kv = manager(12, full(16), mamba(16), scheduler_block=16, hash_block=4, retention=0)
    first = request("a", range(55), hash_block=4)
    for num_new in (48, 4, 3):
        kv.new_step_starts()
        admit(kv, first, num_new) if num_new == 48 else kv.allocate_slots(first, num_new)
        first.num_computed_tokens += 0 if num_new == 48 else num_new
        kv.take_kv_cache_block_copies()
    kv.free(first)
    kv.new_step_starts()
    again = request("b", range(55), hash_block=4)
    blocks, hit, _ = kv.get_computed_blocks(again)
    assert hit == 52
    taken = {b.block_id for group in blocks.blocks for b in group if not b.is_null}
    assert kv.allocate_slots(again, 3, hit, blocks) is not None
    fresh = {b for group in kv.get_block_ids("b") for b in group if b}
    assert {copy.src_block_id for copy in kv.take_kv_cache_block_copies()} <= taken
    assert len(fresh & taken) == 3  # the three whole rows; the tails were replaced
