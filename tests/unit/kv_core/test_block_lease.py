"""Leases: held, parted, ended once."""

from __future__ import annotations

import pytest

from tests.helpers.kv_core import free_ids, ids
from vllm.v1.core.block_lease import Lease, LeaseState
from vllm.v1.core.block_pool import BlockPool


@pytest.fixture
def pool() -> BlockPool:
    return BlockPool(6, True, 16)


def test_acquiring_holds_and_releasing_lets_go(pool: BlockPool) -> None:
    blocks = pool.blocks[1:4]
    lease = Lease(pool, blocks, "test")
    assert [block.ref_cnt for block in blocks] == [1, 1, 1]
    assert lease.held
    assert list(pool.leases.values()) == [lease]
    lease.release()
    assert lease.state is LeaseState.RELEASED
    assert [block.ref_cnt for block in blocks] == [0, 0, 0]
    assert not pool.leases
    assert lease.blocks == []


def test_released_blocks_are_evicted_from_the_last_one_on(pool: BlockPool) -> None:
    Lease(pool, pool.blocks[1:4], "test").release()
    assert free_ids(pool) == [3, 2, 1, 4, 5]


def test_to_front_puts_cached_blocks_before_all_other_cached_ones(pool: BlockPool) -> None:
    for index in (2, 4, 5):
        pool._insert_block_hash(b"%d\x00\x00\x00\x00" % index, pool.blocks[index], 16)
    Lease(pool, pool.blocks[4:6], "use").release()
    assert free_ids(pool) == [1, 2, 3, 5, 4]
    Lease(pool, [pool.blocks[4]], "scan", to_front=True).release()
    assert free_ids(pool) == [1, 4, 2, 3, 5], "block 1 holds nothing and goes first"
    Lease(pool, [pool.blocks[2]], "use").release()
    assert free_ids(pool) == [1, 4, 3, 5, 2]


def test_a_lease_in_order_is_evicted_from_its_first_block_on(pool: BlockPool) -> None:
    lease = Lease.adopt(pool, pool.get_new_blocks(4), "slots", in_order=True)
    lease.split(1).release()
    assert free_ids(pool) == [1, 5]
    for block in lease.blocks:
        pool._insert_block_hash(b"%d\x00\x00\x00\x00" % block.block_id, block, 16)
    lease.shorten(1)
    assert free_ids(pool) == [1, 5, 3, 4]
    lease.release()
    assert free_ids(pool) == [1, 5, 3, 4, 2]


def test_what_goes_back_to_the_front_stays_behind_what_is_older(pool: BlockPool) -> None:
    for block in pool.blocks[1:]:
        pool._insert_block_hash(b"%d\x00\x00\x00\x00" % block.block_id, block, 16)
    pool.keep_order()
    first = Lease(pool, [pool.blocks[1], pool.blocks[3]], "scan", to_front=True)
    second = Lease(pool, [pool.blocks[2], pool.blocks[4]], "scan", to_front=True)
    assert free_ids(pool) == [5]
    second.release()
    assert free_ids(pool) == [2, 4, 5]
    first.release()
    assert free_ids(pool) == [1, 2, 3, 4, 5]
    Lease(pool, [pool.blocks[2]], "use").release()
    Lease(pool, [pool.blocks[3], pool.blocks[2]], "scan", to_front=True).release()
    assert free_ids(pool) == [1, 3, 4, 5, 2], "the use counts, not the scan"


def test_a_lease_ends_exactly_once(pool: BlockPool) -> None:
    lease = Lease(pool, pool.blocks[1:2], "transfer 7")
    lease.release()
    for end in (lease.release, lease.hand_over, lambda: lease.split(0), lambda: lease.shorten(0)):
        with pytest.raises(AssertionError, match="transfer 7"):
            end()
    assert pool.blocks[1].ref_cnt == 0


def test_a_lease_remembers_which_of_its_blocks_were_evicted_by_id(pool: BlockPool) -> None:
    lease, other = Lease(pool, pool.blocks[1:4], "store"), Lease(pool, pool.blocks[4:5], "load")
    pool.evict_blocks([2, 5])
    head = lease.split(2)
    pool.evict_blocks([3])
    assert (head.evicted, lease.evicted, other.evicted) == ({2}, {2, 3}, frozenset())


def test_adopting_takes_over_references(pool: BlockPool) -> None:
    blocks = pool.get_new_blocks(2)
    lease = Lease.adopt(pool, blocks, "staged")
    assert [block.ref_cnt for block in blocks] == [1, 1]
    assert lease.hand_over() == blocks
    assert lease.state is LeaseState.HANDED_OVER
    assert [block.ref_cnt for block in blocks] == [1, 1]


def test_splitting_parts_off_the_head(pool: BlockPool) -> None:
    lease = Lease(pool, pool.blocks[1:5], "load")
    head = lease.split(3)
    assert (ids(head.blocks), ids(lease.blocks)) == ([1, 2, 3], [4])
    head.release()
    assert pool.blocks[4].ref_cnt == 1
    lease.release()
    assert pool.get_num_free_blocks() == 5


def test_shortening_releases_the_rest(pool: BlockPool) -> None:
    lease = Lease(pool, pool.blocks[1:5], "load")
    lease.shorten(1)
    assert ids(lease.blocks) == [1]
    assert free_ids(pool) == [4, 3, 2, 5]
    with pytest.raises(AssertionError, match="holds 1"):
        lease.shorten(2)


def test_null_blocks_are_not_counted(pool: BlockPool) -> None:
    lease = Lease(pool, [pool.null_block, pool.blocks[1]], "window")
    assert pool.null_block.ref_cnt == 0
    lease.release()
    assert pool.get_num_free_blocks() == 5
    assert "window" in repr(lease)
