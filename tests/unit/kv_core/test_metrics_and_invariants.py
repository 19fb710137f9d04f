"""Block metrics, and the recount that finds planted contradictions."""

from __future__ import annotations

from unittest.mock import patch

import pytest

from tests.helpers.kv_core import admit, full, mamba, manager, request, window
from vllm.v1.core.block_hash import BlockHash, make_block_hash_with_group_id
from vllm.v1.core.block_lease import Lease
from vllm.v1.core.block_pool import BlockPool
from vllm.v1.core.invariants import (
    InvariantViolation,
    check_invariants,
    leftovers_of,
    pool_problems,
    problems_of,
)
from vllm.v1.core.kv_cache_block import KVCacheBlock
from vllm.v1.core.kv_cache_manager import KVCacheManager
from vllm.v1.core.kv_cache_metrics import BlockMetricsState, KVCacheMetricsCollector


class Ticks:
    """A clock that moves when it is told to."""

    def __init__(self) -> None:
        self.now = 1_000_000_000

    def __call__(self) -> int:
        return self.now


def test_life_of_a_block_is_measured() -> None:
    clock = Ticks()
    state = BlockMetricsState(now_ns=clock)
    assert state.get_reuse_gaps_seconds() == []
    clock.now += 2_000_000_000
    state.record_access()
    clock.now += 1_000_000_000
    state.record_access()
    clock.now += 500_000_000
    assert state.get_lifetime_seconds() == 3.5
    assert state.get_idle_time_seconds() == 0.5
    assert state.get_reuse_gaps_seconds() == [1.0]
    for _ in range(10):
        state.record_access()
    assert len(state.access_history) == 4


def test_real_time_comes_from_the_monotonic_clock() -> None:
    with patch("time.monotonic_ns", return_value=7_000):
        state = BlockMetricsState()
    assert state.birth_time_ns == state.last_access_ns == 7_000


@pytest.mark.parametrize("rate", [0.0, -0.1, 1.5])
def test_rate_must_be_a_share(rate: float) -> None:
    with pytest.raises(ValueError, match="sample_rate"):
        KVCacheMetricsCollector(rate)


def test_sampling_follows_the_rate() -> None:
    for rate in (0.01, 0.25, 0.5, 1.0):
        collector = KVCacheMetricsCollector(rate)
        assert sum(collector.should_sample_block() for _ in range(1000)) == pytest.approx(1000 * rate, abs=1)


def test_followed_blocks_report_their_eviction() -> None:
    clock = Ticks()
    collector = KVCacheMetricsCollector(1.0, now_ns=clock)
    kv = manager(4, full(4), metrics_collector=collector)
    first = request("a", range(8), hash_block=4)
    admit(kv, first)
    kv.free(first)
    clock.now += 1_000_000_000
    again = request("b", range(9), hash_block=4)
    assert admit(kv, again) == 8
    kv.free(again)
    clock.now += 1_000_000_000
    admit(kv, request("c", range(100, 112), hash_block=4))
    events = collector.drain_events()
    assert [e.lifetime_seconds for e in events] == [2.0, 2.0]
    assert [e.idle_seconds for e in events] == [1.0, 1.0]
    assert collector.drain_events() == []
    assert len(collector.block_metrics) == 3
    collector.reset()
    assert not collector.block_metrics


def test_a_block_that_was_never_cached_leaves_no_stale_sample() -> None:
    collector = KVCacheMetricsCollector(0.5)
    block = KVCacheBlock(1)
    collector.on_block_allocated(block)
    collector.on_block_allocated(block)
    assert 1 in collector.block_metrics
    collector.on_block_allocated(block)
    assert 1 not in collector.block_metrics
    collector.on_block_accessed(block)
    collector.on_block_evicted(block)
    assert collector.drain_events() == []


def test_evicting_a_block_that_holds_nothing_is_no_sample() -> None:
    collector = KVCacheMetricsCollector(1.0)
    pool = BlockPool(4, True, 4, metrics_collector=collector)
    block = pool.get_new_blocks(1)[0]
    pool.evict_blocks({block.block_id})
    assert collector.drain_events() == []


@pytest.fixture
def kv() -> KVCacheManager:
    kv = manager(30, full(4), window(4, 8), mamba(4))
    admit(kv, request("a", range(12), hash_block=4))
    assert problems_of(kv) == []
    return kv


def broken(kv: KVCacheManager, word: str) -> None:
    with pytest.raises(InvariantViolation, match=word):
        check_invariants(kv)


def test_recount_finds_a_wrong_reference_count(kv: KVCacheManager) -> None:
    kv.block_pool.blocks[1].ref_cnt += 1
    broken(kv, "counts 2 references, held by \\['request a'\\]")


def test_recount_knows_leases(kv: KVCacheManager) -> None:
    lease = Lease(kv.block_pool, [kv.block_pool.blocks[1]], "transfer")
    check_invariants(kv)
    assert any("transfer" in line for line in leftovers_of(kv))
    lease.release()


def test_recount_finds_a_held_block_in_the_queue(kv: KVCacheManager) -> None:
    kv.block_pool.free_block_queue.append(kv.block_pool.blocks[1])
    broken(kv, "free list and references disagree")


def test_recount_finds_a_lost_block(kv: KVCacheManager) -> None:
    kv.block_pool.free_block_queue.popleft()
    broken(kv, "free list and references disagree")


def test_recount_finds_a_wrong_counter(kv: KVCacheManager) -> None:
    kv.block_pool.free_block_queue.num_free_blocks += 1
    broken(kv, "the counter says")


def test_recount_finds_keys_without_entries_and_entries_without_keys(kv: KVCacheManager) -> None:
    block = kv.block_pool.blocks[1]
    saved = block.block_hash
    block.block_hash = None
    broken(kv, "the index has")
    block.block_hash = make_block_hash_with_group_id(BlockHash(b"other"), 0)
    broken(kv, "which the index lacks")
    block.block_hash = saved
    kv.block_pool.cached_block_hashes_by_block[25] = {}
    broken(kv, "no primary one")


def test_recount_finds_a_block_in_two_groups(kv: KVCacheManager) -> None:
    groups = kv.coordinator.single_type_managers
    block = groups[0].req_to_blocks["a"][0]
    kv.block_pool.touch([block])
    groups[1].req_to_blocks["a"].append(block)
    broken(kv, "is in tables of groups 0 and 1")


def test_recount_finds_a_block_held_twice_and_dangling_counts(kv: KVCacheManager) -> None:
    group = kv.coordinator.single_type_managers[0]
    block = group.req_to_blocks["a"][0]
    kv.block_pool.touch([block])
    group.req_to_blocks["a"].append(block)
    group.num_cached_block["a"] = 10
    group.num_cached_block["ghost"] = 1
    problems = "\n".join(problems_of(kv))
    assert "holds a block twice" in problems
    assert "settled blocks" in problems
    assert "ghost has no table" in problems


def test_recount_guards_the_null_block() -> None:
    pool = BlockPool(3, True, 4)
    pool.null_block.ref_cnt = 1
    pool.blocks[1].ref_cnt = -1
    problems = "\n".join(pool_problems(pool))
    assert "null block" in problems
    assert "negative" in problems


def test_rest_means_nothing_is_left(kv: KVCacheManager) -> None:
    with pytest.raises(InvariantViolation, match="table of a"):
        check_invariants(kv, at_rest=True)
    left = "\n".join(leftovers_of(kv))
    assert "state position of a" in left
    assert "blocks are held" in left
