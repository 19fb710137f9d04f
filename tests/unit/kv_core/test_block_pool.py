"""The pool: references, order of reuse, cache entries, reset."""

from __future__ import annotations

import copy

import pytest

from tests.helpers.kv_core import fake_hashes, free_ids, ids, request
from vllm.v1.core.block_hash import BlockHash, get_block_hash, get_group_id, make_block_hash_with_group_id
from vllm.v1.core.block_index import BlockHashToBlockMap
from vllm.v1.core.block_pool import BlockPool
from vllm.v1.core.invariants import pool_problems
from vllm.v1.core.kv_cache_block import KVCacheBlock


def key(text: str, group: int = 0) -> bytes:
    return make_block_hash_with_group_id(BlockHash(text.encode()), group)


def test_block_zero_is_the_null_block_and_never_handed_out() -> None:
    pool = BlockPool(4, True, 16)
    assert pool.null_block is pool.blocks[0]
    assert pool.null_block.is_null
    assert ids(pool.get_new_blocks(3)) == [1, 2, 3]
    assert pool.get_usage() == 1.0
    with pytest.raises(ValueError, match="Cannot get 1"):
        pool.get_new_blocks(1)


def test_a_pool_of_only_the_null_block_has_no_usage() -> None:
    assert BlockPool(1, True, 16).get_usage() == 0.0
    with pytest.raises(ValueError, match="num_gpu_blocks"):
        BlockPool(0, True, 16)


def test_touch_takes_a_block_out_of_the_queue() -> None:
    pool = BlockPool(4, True, 16)
    pool.touch([pool.null_block, pool.blocks[2], pool.blocks[2]])
    assert pool.blocks[2].ref_cnt == 2
    assert pool.null_block.ref_cnt == 0
    assert free_ids(pool) == [1, 3]
    pool.free_blocks([pool.blocks[2], pool.null_block])
    assert pool.get_num_free_blocks() == 2
    pool.free_blocks([pool.blocks[2]])
    assert free_ids(pool) == [2, 1, 3]
    assert pool_problems(pool) == []


def test_freeing_what_nobody_holds_is_an_error() -> None:
    pool = BlockPool(3, True, 16)
    with pytest.raises(AssertionError, match="block 1"):
        pool.free_blocks([pool.blocks[1]])


def test_blocks_of_another_pool_go_home() -> None:
    device, host = BlockPool(3, True, 16), BlockPool(3, True, 16, medium="CPU")
    mine, theirs = device.get_new_blocks(1), host.get_new_blocks(1)
    device.touch(theirs)
    assert theirs[0].ref_cnt == 2
    device.free_blocks([*mine, *theirs, *theirs])
    assert device.get_num_free_blocks() == host.get_num_free_blocks() == 2
    detached = KVCacheBlock(7, ref_cnt=1)
    device.free_blocks([detached])
    assert detached.ref_cnt == 0
    assert device.get_num_free_blocks() == 2


def test_full_blocks_get_chained_keys() -> None:
    pool = BlockPool(6, True, 4)
    req = request("r", range(14), hash_block=4)
    blocks = pool.get_new_blocks(4)
    pool.cache_full_blocks(req, blocks, 0, 2, 4, 7)
    pool.cache_full_blocks(req, blocks, 2, 3, 4, 7)
    for i in range(3):
        assert get_block_hash(blocks[i].block_hash) == req.block_hashes[i]
        assert get_group_id(blocks[i].block_hash) == 7
        assert blocks[i].block_hash_num_tokens == 4 * (i + 1)
        assert pool.get_cached_block(req.block_hashes[i], [7]) == [blocks[i]]
    assert pool.get_cached_block(req.block_hashes[0], [0]) is None
    assert pool.get_cached_block(req.block_hashes[0], [7, 0]) is None
    assert len(pool.cached_block_hash_to_block) == 3
    pool.cache_full_blocks(req, blocks, 3, 3, 4, 7)
    with pytest.raises(AssertionError, match="hashes"):
        pool.cache_full_blocks(req, blocks, 3, 4, 4, 7)


def test_null_and_masked_blocks_get_no_key() -> None:
    pool = BlockPool(6, True, 4)
    req = request("r", range(16), hash_block=4)
    blocks = [pool.null_block, *pool.get_new_blocks(3)]
    pool.cache_full_blocks(req, blocks, 0, 4, 4, 0, [True, True, False, True])
    assert [block.block_hash is not None for block in blocks] == [False, True, False, True]


def test_reused_blocks_lose_their_entries() -> None:
    pool = BlockPool(3, True, 4)
    req = request("r", range(8), hash_block=4)
    blocks = pool.get_new_blocks(2)
    pool.cache_full_blocks(req, blocks, 0, 2, 4, 0)
    pool.free_blocks(reversed(blocks))
    assert free_ids(pool) == [2, 1]
    pool.get_new_blocks(1)
    assert pool.get_cached_block(req.block_hashes[1], [0]) is None
    assert pool.get_cached_block(req.block_hashes[0], [0]) == [blocks[0]]


def test_equal_content_stays_in_several_blocks() -> None:
    pool = BlockPool(4, True, 4)
    req = request("r", range(4), hash_block=4)
    blocks = pool.get_new_blocks(3)
    for block in blocks:
        pool.cache_full_blocks(req, [block], 0, 1, 4, 0)
    assert pool.get_cached_block(req.block_hashes[0], [0]) == [blocks[0]]
    pool.evict_blocks([blocks[0].block_id])
    assert pool.get_cached_block(req.block_hashes[0], [0]) == [blocks[1]]
    pool.evict_blocks([2, 2])
    pool.evict_blocks([3])
    assert len(pool.cached_block_hash_to_block) == 0
    assert blocks[0].ref_cnt == 1
    with pytest.raises(AssertionError, match="block 99"):
        pool.evict_blocks([99])


def test_map_becomes_a_dict_where_several_blocks_share_a_key() -> None:
    table = BlockHashToBlockMap()
    one, two = KVCacheBlock(1), KVCacheBlock(2)
    table.insert(b"k", one)
    table.insert(b"k", one)
    assert table._cache == {b"k": one}
    table.insert(b"k", two)
    assert table._cache == {b"k": {1: one, 2: two}}
    assert table.get_one_block(b"k") is one
    assert table.contain(b"k", 2)
    assert not table.contain(b"k", 3)
    assert table.pop(b"k", 3) is None
    assert table.pop(b"k", 1) is one
    assert table.get_one_block(b"k") is two
    assert not table.contain(b"k", 1)
    assert table.pop(b"k", 1) is None
    assert table.pop(b"k", 2) is two
    assert table.pop(b"k", 2) is None
    assert len(table) == 0


def test_outside_code_may_swap_the_dictionary_behind_the_map() -> None:
    pool = BlockPool(3, True, 4)
    pool._insert_block_hash(key("a"), pool.blocks[1], 4)
    saved = copy.copy(pool.cached_block_hash_to_block._cache)
    pool.cached_block_hash_to_block._cache.pop(key("a"))
    assert pool.get_cached_block(BlockHash(b"a"), [0]) is None
    pool.cached_block_hash_to_block._cache = saved
    assert pool.get_cached_block(BlockHash(b"a"), [0]) == [pool.blocks[1]]


def test_evicting_by_hand_tells_whether_there_was_an_entry() -> None:
    pool = BlockPool(4, True, 16)
    blocks, keys = pool.blocks, [key("10", 1000), key("20", 2000), key("30", 3000)]
    for block, k in zip(blocks, [*keys, keys[0]], strict=True):
        block._block_hash = k
        pool.cached_block_hash_to_block.insert(k, block)
    assert pool._maybe_evict_cached_block(blocks[1]) is True
    assert pool._maybe_evict_cached_block(blocks[1]) is False
    assert pool._maybe_evict_cached_block(blocks[0]) is True
    assert pool.cached_block_hash_to_block._cache == {keys[0]: blocks[3], keys[2]: blocks[2]}


def test_a_second_key_is_secondary_and_falls_with_the_block() -> None:
    pool = BlockPool(3, True, 4)
    (block,) = pool.get_new_blocks(1)
    pool._insert_block_hash(key("a"), block, 8)
    pool._insert_block_hash(key("b"), block, 12)
    pool._insert_block_hash(key("a"), block, 8)
    assert block.block_hash == key("a")
    assert list(pool.cached_block_hashes_by_block[block.block_id]) == [key("b")]
    assert pool.get_keys(block) == ((key("a"), 8), (key("b"), 12))
    assert pool_problems(pool) == []
    pool.evict_blocks([block.block_id])
    assert pool.get_keys(block) == ()
    assert not pool.cached_block_hashes_by_block


def test_moving_entries_keeps_content_reachable() -> None:
    pool = BlockPool(4, True, 4)
    source, target = pool.get_new_blocks(2)
    pool._insert_block_hash(key("a"), source, 8)
    pool._insert_block_hash(key("b"), source, 12)
    pool.move_block_hashes(source, target)
    assert pool.get_keys(source) == ()
    assert pool.get_keys(target) == ((key("a"), 8), (key("b"), 12))
    assert pool.get_cached_block(BlockHash(b"b"), [0]) == [target]
    pool._insert_block_hash(key("c"), source, 4)
    with pytest.raises(AssertionError, match="already"):
        pool.move_block_hashes(source, target)


def test_writable_means_real_alone_and_not_cached() -> None:
    pool = BlockPool(4, True, 4)
    (block,) = pool.get_new_blocks(1)
    assert pool.is_block_writable(block)
    assert not pool.is_block_writable(pool.null_block)
    pool.touch([block])
    assert not pool.is_block_writable(block)
    pool.free_blocks([block])
    pool._insert_block_hash(key("a"), block, 4)
    assert not pool.is_block_writable(block)


def test_partial_entry_grows_and_is_promoted() -> None:
    pool = BlockPool(4, True, 4)
    req = request("r", range(16), hash_block=4)
    (block,) = pool.get_new_blocks(1)
    assert pool.cache_partial_block(req, block, 8, 0, 16)
    assert block.block_hash_num_tokens == 8
    assert pool.cache_partial_block(req, block, 12, 0, 16)
    assert [n for _, n in pool.get_keys(block)] == [8, 12]
    assert pool.get_cached_block(req.block_hashes[2], [0]) == [block]
    pool.cache_full_blocks(req, [block], 0, 1, 16, 0)
    assert pool.get_keys(block) == ((make_block_hash_with_group_id(req.block_hashes[3], 0), 16),)
    assert pool.get_cached_block(req.block_hashes[1], [0]) is None


def test_partial_entry_may_replace_the_one_before() -> None:
    pool = BlockPool(4, True, 4)
    req = request("r", range(16), hash_block=4)
    (block,) = pool.get_new_blocks(1)
    pool.cache_partial_block(req, block, 4, 0, 16)
    assert pool.cache_partial_block(req, block, 12, 0, 16, replace_existing_hashes=True)
    assert [n for _, n in pool.get_keys(block)] == [12]
    assert pool.get_cached_block(req.block_hashes[0], [0]) is None


def test_partial_entries_are_refused_where_they_make_no_sense() -> None:
    pool = BlockPool(4, True, 4)
    req = request("r", range(10), hash_block=4)
    (block,) = pool.get_new_blocks(1)
    assert not pool.cache_partial_block(req, pool.null_block, 4, 0, 16)
    assert not pool.cache_partial_block(req, block, 12, 0, 16)  # not hashed yet
    assert not pool.cache_partial_block(req, block, 8, 0, 8)  # a whole block
    with pytest.raises(AssertionError, match="multiple"):
        pool.cache_partial_block(req, block, 6, 0, 16)
    assert pool.get_keys(block) == ()


@pytest.mark.parametrize("grows", [False, True])
def test_pfx_08_a_retired_partial_hash_does_not_come_back(grows: bool) -> None:
    pool = BlockPool(4, True, 4, enable_kv_cache_events=True)
    req = request("r", range(8), hash_block=4)
    (block,) = pool.get_new_blocks(1)
    assert pool.cache_partial_block(req, block, 8, 0, 16)
    for token in range(8, 12):
        req.append_output_token_ids(token)
    if grows:
        assert pool.cache_partial_block(req, block, 12, 0, 16)
        assert pool.get_cached_block(req.block_hashes[2], [0]) == [block]
    assert not pool.cache_partial_block(req, block, 8, 0, 16)
    for token in range(12, 18):
        req.append_output_token_ids(token)
    pool.cache_full_blocks(req, [block], 0, 1, 16, 0)
    kinds = [type(event).__name__ for event in pool.take_events()]
    assert kinds == ["BlockStored"] * (1 + grows) + ["BlockRemoved"] * (1 + grows) + ["BlockStored"]
    for num_tokens, replace in ((8, False), (8, True), (12, False), (12, True)):
        assert not pool.cache_partial_block(req, block, num_tokens, 0, 16, replace)
    assert pool.get_cached_block(req.block_hashes[3], [0]) == [block]
    for retired in req.block_hashes[1:3]:
        assert pool.get_cached_block(retired, [0]) is None
    assert pool.take_events() == []


def test_pfx_23_blocks_without_a_hash_do_not_push_out_cached_ones() -> None:
    pool = BlockPool(8, True, 4)
    prefix = request("p", range(24), hash_block=4)
    blocks = pool.get_new_blocks(6)
    pool.cache_full_blocks(prefix, blocks, 0, 6, 4, 0)
    pool.free_blocks(reversed(blocks))
    for _ in range(20):
        (block,) = pool.get_new_blocks(1)
        pool.free_blocks([block])
    assert all(pool.get_cached_block(h, [0]) for h in prefix.block_hashes)


def test_reset_needs_every_block_free() -> None:
    pool = BlockPool(4, True, 4, enable_kv_cache_events=True)
    req = request("r", range(4), hash_block=4)
    blocks = pool.get_new_blocks(1)
    pool.cache_full_blocks(req, blocks, 0, 1, 4, 0)
    assert pool.reset_prefix_cache() is False
    assert pool.get_cached_block(req.block_hashes[0], [0]) == blocks
    pool.free_blocks(blocks)
    pool.take_events()
    assert pool.reset_prefix_cache() is True
    assert pool.get_cached_block(req.block_hashes[0], [0]) is None
    assert [type(event).__name__ for event in pool.take_events()] == ["AllBlocksCleared"]
    assert pool_problems(pool) == []


def test_invalidating_drops_the_index_at_once_and_counts_what_is_held() -> None:
    pool = BlockPool(5, True, 4)
    req = request("r", range(8), hash_block=4)
    blocks = pool.get_new_blocks(2)
    pool.cache_full_blocks(req, blocks, 0, 2, 4, 0)
    pool._insert_block_hash(key("b"), blocks[0], 4)
    assert pool.invalidate_prefix_cache() == 2
    assert pool.epoch == 1
    assert all(block.block_hash is None for block in pool.blocks)
    assert [block.ref_cnt for block in blocks] == [1, 1]
    assert pool.get_cached_block(req.block_hashes[0], [0]) is None
    assert pool_problems(pool) == []
    pool.cache_full_blocks(req, blocks, 1, 2, 4, 0)
    assert pool.get_cached_block(req.block_hashes[1], [0]) == [blocks[1]]


def test_unpinned_blocks_stay_readable_until_they_are_handed_out() -> None:
    pool = BlockPool(4, True, 4)
    blocks = pool.get_new_blocks(2)
    reused: list[int] = []
    pool.unpin_blocks([pool.null_block, *blocks], lambda block: reused.append(block.block_id))
    assert free_ids(pool) == [3, 1, 2]
    pool.get_new_blocks(2)
    assert reused == [1]
    pool.get_new_blocks(1)
    assert reused == [1, 2]
    pool.free_blocks([pool.blocks[1]])
    pool.get_new_blocks(1)
    assert reused == [1, 2]


def test_staged_content_is_committed_only_into_held_blocks() -> None:
    pool = BlockPool(4, True, 4, medium="CPU")
    with pytest.raises(AssertionError, match="nobody holds"):
        pool.commit_staged(pool.blocks[1], key("a"), 4, None)
    (block,) = pool.get_new_blocks(1)
    pool.commit_staged(block, key("a"), 4, None)
    assert pool.get_cached_block(BlockHash(b"a"), [0]) == [block]


def test_runs_end_where_any_group_misses() -> None:
    pool = BlockPool(10, True, 4)
    hashes = fake_hashes(4)
    for i, group in ((0, 0), (1, 0), (2, 0), (0, 1), (1, 1)):
        pool._insert_block_hash(
            make_block_hash_with_group_id(hashes[i], group), pool.blocks[1 + i + 4 * group], 4
        )
    assert [ids(run) for run in pool.find_run(hashes, [0, 1])] == [[1, 2], [5, 6]]
    assert [ids(run) for run in pool.find_run(hashes[1:], [0])] == [[2, 3]]


def test_pfx_17_counters_add_up_after_every_operation() -> None:
    pool = BlockPool(4, True, 4)
    req = request("r", range(40), hash_block=4)
    for turn in range(10):
        (block,) = pool.get_new_blocks(1)
        assert pool.get_num_free_blocks() + 1 == 3
        pool.cache_full_blocks(req, [block] * 10, turn, turn + 1, 4, 0)
        pool.free_blocks([block])
        assert pool_problems(pool) == []
        assert pool.get_num_free_blocks() == len(pool.free_block_queue.get_all_free_blocks()) == 3
