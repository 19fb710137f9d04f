"""Blocks, pool, queue and per-kind managers as outside code uses them, with the numbers of the description."""

from __future__ import annotations

import time
from unittest.mock import patch

import pytest
import torch

from tests.public_api.by_hand import BLOCK, full, kv_config, mamba, manager, request, window
from vllm.utils.hashing import sha256
from vllm.v1.core.block_pool import BlockHashToBlockMap, BlockPool
from vllm.v1.core.kv_cache_coordinator import (
    HybridKVCacheCoordinator,
    KVCacheCoordinatorNoPrefixCache,
    UnitaryKVCacheCoordinator,
    get_kv_cache_coordinator,
    replay_boundaries,
)
from vllm.v1.core.kv_cache_manager import KVCacheBlocks
from vllm.v1.core.kv_cache_metrics import BlockMetricsState, KVCacheMetricsCollector
from vllm.v1.core.kv_cache_utils import (
    BlockHash,
    BlockHashListWithBlockSize,
    FreeKVCacheBlockQueue,
    KVCacheBlock,
    KVCacheBlockCopy,
    get_block_hash,
    get_group_id,
    init_none_hash,
    make_block_hash_with_group_id,
    null_head_len,
    resolve_block_hashes,
    tensor_data,
    trim_null_head,
)
from vllm.v1.core.single_type_kv_cache_manager import (
    FullAttentionManager,
    MambaManager,
    SlidingWindowManager,
    get_manager_for_kv_cache_spec,
    register_all_kvcache_specs,
)
from vllm.v1.kv_cache_interface import (
    CircularBufferSpec,
    KVCacheConfig,
    KVCacheGroupSpec,
    MambaSpec,
    SlidingWindowSpec,
    get_mamba_prefill_checkpoint_position,
)


@pytest.fixture(autouse=True)
def none_hash() -> None:
    init_none_hash(sha256)


def ids(blocks: list[KVCacheBlock]) -> list[int]:
    return [block.block_id for block in blocks]


def key(text: bytes, group_id: int = 0) -> bytes:
    return make_block_hash_with_group_id(BlockHash(text), group_id)


# --- the queue ------------------------------------------------------------------------------------------------------


def test_free_queue_links_and_order() -> None:
    blocks = [KVCacheBlock(i) for i in range(5)]
    queue = FreeKVCacheBlockQueue(blocks)
    assert queue.num_free_blocks == 5
    head, tail = queue.fake_free_list_head, queue.fake_free_list_tail
    assert (head.block_id, tail.block_id) == (-1, -1)
    assert head.next_free_block is blocks[0]
    assert blocks[0].prev_free_block is head
    assert tail.prev_free_block is blocks[4]
    assert queue.popleft() is blocks[0]
    assert blocks[0].next_free_block is None
    queue.remove(blocks[2])
    with pytest.raises(RuntimeError):
        queue.remove(blocks[2])
    queue.append(blocks[0])
    queue.prepend_n([blocks[2]])
    assert ids(queue.get_all_free_blocks()) == [2, 1, 3, 4, 0]
    assert ids(list(queue.iter_blocks_after(blocks[3]))) == [4, 0]
    assert ids(queue.popleft_n(5)) == [2, 1, 3, 4, 0]
    assert head.next_free_block is tail
    with pytest.raises(ValueError):
        queue.popleft()
    queue.append_n([blocks[4], blocks[3]])
    assert ids(queue.get_all_free_blocks()) == [4, 3]


def test_an_empty_queue() -> None:
    queue = FreeKVCacheBlockQueue([])
    assert queue.num_free_blocks == 0
    assert queue.fake_free_list_head.next_free_block is queue.fake_free_list_tail
    assert queue.fake_free_list_tail.prev_free_block is queue.fake_free_list_head


def test_fresh_order_of_the_description() -> None:
    """11 blocks, a request on 1 to 4 (4 partial) that ends → 4,5..10,3,2,1."""
    kv = manager(kv_config(num_blocks=11))
    made = request("a", list(range(55)))
    blocks = kv.allocate_slots(made, 55)
    assert blocks is not None
    assert blocks.get_block_ids() == ([1, 2, 3, 4],)
    kv.free(made)
    assert ids(kv.block_pool.free_block_queue.get_all_free_blocks()) == [4, 5, 6, 7, 8, 9, 10, 3, 2, 1]


# --- blocks and the pool --------------------------------------------------------------------------------------------


def test_a_block_record() -> None:
    block = KVCacheBlock(7)
    assert (block.block_id, block.ref_cnt, block.is_null) == (7, 0, False)
    assert block.block_hash is None
    assert block._block_hash is None
    block.set_block_hash(key(b"a"), 16)
    assert (block.block_hash, block.block_hash_num_tokens) == (key(b"a"), 16)
    with pytest.raises(AssertionError):
        block.set_block_hash(key(b"b"))
    block.reset_hash()
    assert block.block_hash is None
    block._block_hash = key(b"c")
    assert block.block_hash == key(b"c")
    assert KVCacheBlock(1, 0, is_null=True).is_null
    assert KVCacheBlockCopy(1, 2) == (1, 2)
    with pytest.raises(AttributeError):
        block.other = 1  # type: ignore[attr-defined]


def test_keys_carry_the_group() -> None:
    assert key(b"\x01" * 32, 3) == b"\x01" * 32 + b"\x00\x00\x00\x03"
    assert get_block_hash(key(b"x", 1)) == b"x"
    assert get_group_id(key(b"x", 258)) == 258


def test_null_heads() -> None:
    null, block = KVCacheBlock(0, is_null=True), KVCacheBlock(1)
    assert null_head_len([null, null, block, null]) == 2
    assert trim_null_head([null, block]) == [block]
    same = [block, null]
    assert trim_null_head(same) is same
    assert null_head_len([]) == 0


def test_block_index() -> None:
    index, first, second = BlockHashToBlockMap(), KVCacheBlock(1), KVCacheBlock(2)
    assert index.get_one_block(key(b"a")) is None
    index.insert(key(b"a"), first)
    assert index._cache[key(b"a")] is first
    index.insert(key(b"a"), second)
    assert index._cache[key(b"a")] == {1: first, 2: second}
    assert index.get_one_block(key(b"a")) in (first, second)
    assert index.contain(key(b"a"), 2)
    assert not index.contain(key(b"a"), 3)
    assert index.pop(key(b"a"), 3) is None
    assert index.pop(key(b"a"), 1) is first
    assert index.get_one_block(key(b"a")) is second
    assert index.pop(key(b"a"), 2) is second
    assert len(index) == 0


def test_pool_by_hand() -> None:
    pool = BlockPool(6, enable_caching=True, hash_block_size=BLOCK)
    assert (pool.null_block.block_id, pool.null_block.is_null, len(pool.blocks)) == (0, True, 6)
    assert pool.get_num_free_blocks() == 5
    assert pool.get_usage() == 0.0
    taken = pool.get_new_blocks(2)
    assert [(b.block_id, b.ref_cnt) for b in taken] == [(1, 1), (2, 1)]
    assert pool.get_usage() == pytest.approx(0.4)
    assert pool.is_block_writable(taken[0])
    with pytest.raises(ValueError):
        pool.get_new_blocks(4)
    made = request("a", list(range(40)))
    pool.cache_full_blocks(made, taken, 0, 2, BLOCK, 0)
    assert pool.get_cached_block(made.block_hashes[1], [0]) == [taken[1]]
    assert pool.get_cached_block(made.block_hashes[1], [0, 1]) is None
    assert not pool.is_block_writable(taken[0])
    assert len(pool.cached_block_hash_to_block) == 2
    pool.touch([taken[0], pool.null_block])
    assert (taken[0].ref_cnt, pool.null_block.ref_cnt) == (2, 0)
    pool.free_blocks([taken[1], taken[0], taken[0]])
    assert ids(pool.free_block_queue.get_all_free_blocks()) == [3, 4, 5, 2, 1]
    pool.touch(taken)
    assert pool.get_num_free_blocks() == 3
    assert pool.reset_prefix_cache() is False
    pool.evict_blocks({taken[1].block_id})
    assert pool.get_cached_block(made.block_hashes[1], [0]) is None
    pool.free_blocks(reversed(taken))
    assert pool.reset_prefix_cache() is True
    assert len(pool.cached_block_hash_to_block) == 0


def test_pool_internals_seen_from_outside() -> None:
    pool = BlockPool(4, True, BLOCK)
    (block,) = pool.get_new_blocks(1)
    pool._insert_block_hash(key(b"a"), block, 16)
    pool._insert_block_hash(key(b"b"), block, 8)
    assert block.block_hash == key(b"a")
    assert key(b"b") in pool.cached_block_hashes_by_block[block.block_id]
    assert pool.cached_block_hash_to_block.get_one_block(key(b"b")) is block
    assert pool.take_events() == []
    assert pool._maybe_evict_cached_block(block) is True
    assert pool._maybe_evict_cached_block(block) is False
    assert block.block_hash is None


def test_hit_block_is_kept_while_it_is_used_and_unpinned_blocks_tell_their_reuse() -> None:
    pool = BlockPool(3, True, BLOCK)
    (block,) = pool.get_new_blocks(1)
    reused: list[int] = []
    pool.unpin_blocks([block], lambda b: reused.append(b.block_id))
    assert pool.get_num_free_blocks() == 2
    pool.get_new_blocks(2)
    assert reused == [block.block_id]


def test_hash_views() -> None:
    hashes = [BlockHash(bytes([i])) for i in range(8)]
    view = BlockHashListWithBlockSize(hashes, 4, 16)
    assert (len(view), view[0], view[1], view.scale_factor) == (2, hashes[3], hashes[7], 4)
    assert list(view) == [hashes[3], hashes[7]]
    assert list(view[1:]) == [hashes[7]]
    assert view.block_hashes is hashes
    assert resolve_block_hashes(hashes, 4, 4) is hashes
    assert (
        resolve_block_hashes(hashes, 4, 16, supports_fine_grained_hash_lookup=True, alignment_tokens=4)
        is hashes
    )
    assert list(resolve_block_hashes(hashes, 4, 16)) == [hashes[3], hashes[7]]


def test_bytes_of_a_tensor() -> None:
    assert bytes(tensor_data(torch.tensor([1, 2], dtype=torch.int16))) == b"\x01\x00\x02\x00"


# --- tables of a request --------------------------------------------------------------------------------------------


def test_tables_add_up() -> None:
    one, two, three = (KVCacheBlock(i) for i in (1, 2, 3))
    blocks = KVCacheBlocks(([one],)) + KVCacheBlocks(blocks=([two, three],))
    assert blocks.get_block_ids() == ([1, 2, 3],)
    two_groups = KVCacheBlocks(([one, two], [three]))
    assert two_groups.get_block_ids() == ([1, 2], [3])
    assert two_groups.get_block_ids(group_ids=[1]) == ([3],)
    empty = two_groups.new_empty()
    assert empty.get_block_ids() == ([], [])
    assert empty.get_block_ids(allow_none=True) is None
    two._block_hash = key(b"a")
    assert two_groups.get_unhashed_block_ids_all_groups() == [[1], [3]]
    assert KVCacheBlocks(([one, two],)).get_unhashed_block_ids() == [1]


# --- managers per kind ----------------------------------------------------------------------------------------------


def kind(manager_class: type, spec: object, pool: BlockPool, **changes: object) -> object:
    return manager_class(
        spec,
        **{
            "block_pool": pool,
            "enable_caching": True,
            "kv_cache_group_id": 0,
            "scheduler_block_size": spec.block_size,  # type: ignore[attr-defined]
            **changes,
        },
    )


def test_a_window_is_found_from_the_right() -> None:
    spec = SlidingWindowSpec(block_size=2, num_kv_heads=1, head_size=1, dtype=torch.float32, sliding_window=4)
    pool = BlockPool(100, True, 2)

    def hit(cached: list[bool], drop: bool = False) -> tuple[list[int], int]:
        hashes = [BlockHash(bytes([i])) for i in range(len(cached))]
        pool.cached_block_hash_to_block._cache.clear()
        for i, (block_hash, is_cached) in enumerate(zip(hashes, cached, strict=True)):
            if is_cached:
                pool.cached_block_hash_to_block.insert(key(block_hash), pool.blocks[i + 10])
        (blocks,), length = SlidingWindowManager.find_longest_cache_hit(
            block_hashes=hashes,
            max_length=len(cached) * 2,
            kv_cache_group_ids=[0],
            block_pool=pool,
            kv_cache_spec=spec,
            drop_eagle_block=drop,
            alignment_tokens=2,
        )
        return ids(blocks), length

    assert hit([True, True, False, True, False, False, True, True, False, True, True, True]) == (
        [0] * 10 + [20, 21],
        24,
    )
    assert hit([True, True, False, True, False, False, True, True, False, False, False]) == (
        [0] * 6 + [16, 17],
        16,
    )
    assert hit([True, False, False]) == ([10], 2)
    assert hit([False, True, False]) == ([], 0)


def test_a_window_lets_go_of_what_lies_before_it() -> None:
    spec = SlidingWindowSpec(block_size=2, num_kv_heads=1, head_size=1, dtype=torch.float32, sliding_window=4)
    pool = BlockPool(100, True, 2)
    made = kind(SlidingWindowManager, spec, pool)
    made.req_to_blocks["r"] = pool.get_new_blocks(6)
    own = ids(made.req_to_blocks["r"])
    for computed, skipped in ((0, 0), (4, 0), (5, 1), (6, 1), (7, 2), (11, 4)):
        made.remove_skipped_blocks("r", computed)
        assert ids(made.req_to_blocks["r"]) == [0] * skipped + own[skipped:], computed
    assert made.get_num_skipped_tokens(7) == 4
    assert spec.num_retained_tokens == 3


def test_blocks_to_allocate_count_evictable_hits() -> None:
    pool = BlockPool(100, True, BLOCK)
    made = kind(FullAttentionManager, full(), pool)
    assert made._null_block is pool.null_block
    free = [pool.blocks[10], pool.blocks[11]]
    assert made.get_num_blocks_to_allocate("r", 20 * BLOCK, free, 2 * BLOCK, 2 * BLOCK, 20 * BLOCK) == 20
    held = pool.get_new_blocks(2)
    assert made.get_num_blocks_to_allocate("r", 20 * BLOCK, held, 2 * BLOCK, 2 * BLOCK, 20 * BLOCK) == 18
    assert made.req_to_blocks["r"] == []


def test_retention_mask_of_a_window() -> None:
    spec = window(32)
    assert SlidingWindowManager.reachable_block_mask(0, 4, BLOCK, spec, False, None) is None
    mask = SlidingWindowManager.reachable_block_mask(0, 6, BLOCK, spec, False, 0, (70,))
    assert mask == [False, False, True, True, False, False]


def test_recurrent_managers_need_the_align_mode() -> None:
    pool = BlockPool(10, True, BLOCK)
    plain = MambaSpec(BLOCK, ((1,),), (torch.float32,))
    with pytest.raises(AssertionError):
        kind(MambaManager, plain, pool)
    aligned = kind(MambaManager, mamba(), pool)
    assert aligned._checkpoints == {}
    assert aligned._allocated_block_reqs == set()
    assert not aligned.has_positionally_stable_blocks


def test_managers_by_spec() -> None:
    register_all_kvcache_specs(None)
    register_all_kvcache_specs(None)
    pool = BlockPool(10, True, BLOCK)
    made = get_manager_for_kv_cache_spec(
        window(32),
        64,
        100,
        block_pool=pool,
        enable_caching=True,
        kv_cache_group_id=0,
        scheduler_block_size=BLOCK,
    )
    assert isinstance(made, SlidingWindowManager)
    assert made.max_admission_blocks_per_request == -(-min(31 + 64, 100) // BLOCK) + 1


# --- coordinators ---------------------------------------------------------------------------------------------------


def coordinator(
    config: KVCacheConfig, scheduler_block_size: int = BLOCK, enable_caching: bool = True
) -> object:
    return get_kv_cache_coordinator(
        config, 8192, 8192, False, enable_caching, False, 1, 1, scheduler_block_size, BLOCK
    )


def test_coordinators() -> None:
    assert isinstance(coordinator(kv_config()), UnitaryKVCacheCoordinator)
    assert isinstance(coordinator(kv_config(), enable_caching=False), KVCacheCoordinatorNoPrefixCache)
    hybrid = coordinator(kv_config(full(), window(32)))
    assert isinstance(hybrid, HybridKVCacheCoordinator)
    assert hybrid._cache_hit_alignment_tokens == BLOCK
    assert len(hybrid.single_type_managers) == 2
    assert (hybrid.scheduler_block_size, list(hybrid.group_block_sizes)) == (BLOCK, [BLOCK, BLOCK])
    assert set(hybrid.eagle_group_ids) == set()
    assert set(hybrid.drop_eagle_group_ids) == set()
    assert hybrid.enable_partial_hash_hits is False
    hybrid.retention_interval = None
    assert hybrid.block_pool is hybrid.single_type_managers[0].block_pool
    assert tuple(replay_boundaries(50, BLOCK, False)) == (49,)


def test_sub_block_hits_align_on_hash_blocks() -> None:
    made = coordinator(kv_config(full(16), mamba(32)), 32)
    assert made.enable_partial_hash_hits is True
    assert made._cache_hit_alignment_tokens == 16


def test_transfer_groups_of_the_description() -> None:
    ring = CircularBufferSpec(block_size=8, num_kv_heads=1, head_size=8, dtype=torch.float32)
    groups = [
        KVCacheGroupSpec(["a"], full()),
        KVCacheGroupSpec(["b"], ring),
        KVCacheGroupSpec(["c"], full(), enable_kv_transfer=False),
    ]
    config = KVCacheConfig(4, [], groups)
    assert tuple(config.transfer_group_ids) == (0, 1)
    assert tuple(config.prefix_cacheable_group_ids) == (0,)
    assert config.transfer_group_index_by_layer == {"a": 0, "b": 1}
    assert tuple(config.select_transfer_block_ids(([1], [2], [3]))) == ([1], [2])
    with pytest.raises(ValueError):
        config.select_transfer_block_ids(([1], [2]))


@pytest.mark.parametrize(
    ("tokens", "drop", "lookahead", "position"),
    [(50, False, 0, 48), (48, False, 0, 32), (50, True, 0, 32), (50, False, 3, 32), (5, True, 0, 0)],
)
def test_checkpoint_position(tokens: int, drop: bool, lookahead: int, position: int) -> None:
    assert get_mamba_prefill_checkpoint_position(tokens, BLOCK, drop, lookahead) == position


# --- residency figures ----------------------------------------------------------------------------------------------


def test_residency_uses_the_monotonic_clock() -> None:
    with patch("time.monotonic_ns", return_value=1_000_000_000):
        state = BlockMetricsState()
    assert (state.birth_time_ns, state.last_access_ns) == (1_000_000_000, 1_000_000_000)
    with patch("time.monotonic_ns", return_value=3_000_000_000):
        assert state.get_lifetime_seconds() == 2.0
        state.record_access()
    assert list(state.access_history) == [3_000_000_000]
    with patch("time.monotonic_ns", return_value=4_000_000_000):
        state.record_access()
        assert state.get_idle_time_seconds() == 0.0
    assert list(state.get_reuse_gaps_seconds()) == [1.0]
    assert time.monotonic_ns() > 0


def test_residency_collector() -> None:
    for rate in (0.0, 1.5):
        with pytest.raises((AssertionError, ValueError)):
            KVCacheMetricsCollector(rate)
    collector = KVCacheMetricsCollector(1.0)
    block = KVCacheBlock(3)
    assert collector.should_sample_block()
    collector.on_block_allocated(block)
    collector.on_block_accessed(block)
    assert set(collector.block_metrics) == {3}
    collector.on_block_evicted(block)
    assert collector.block_metrics == {}
    assert len(collector.drain_events()) == 1
    assert collector.drain_events() == []
    collector.reset()
