"""ARC's order of slots at its edges: what is asked for twice, slots without content, and walks from a place on."""

from __future__ import annotations

import pytest

from vllm.v1.core.block_hash import BlockHash, BlockHashWithGroupId, make_block_hash_with_group_id
from vllm.v1.core.block_pool import BlockPool
from vllm.v1.core.kv_cache_block import KVCacheBlock
from vllm.v1.simple_kv_offload.arc import ArcQueue
from vllm.v1.simple_kv_offload.eviction import eviction_queue

CAPACITY = 4


def key_of(number: int) -> BlockHashWithGroupId:
    return make_block_hash_with_group_id(BlockHash(number.to_bytes(8, "big")), 0)


def arc(pool: BlockPool) -> ArcQueue:
    queue = pool.free_block_queue
    assert isinstance(queue, ArcQueue)
    return queue


def fill(pool: BlockPool, *numbers: int) -> list[KVCacheBlock]:
    """Take a slot for each content and let it go with it."""
    slots = []
    for number in numbers:
        arc(pool).incoming([key_of(number)])
        (slot,) = pool.get_new_blocks(1)
        pool.commit_staged(slot, key_of(number), None, None)
        pool.free_blocks([slot])
        slots.append(slot)
    return slots


@pytest.fixture
def pool() -> BlockPool:
    pool = BlockPool(
        CAPACITY + 1, enable_caching=True, hash_block_size=1, make_free_queue=eviction_queue("arc")
    )
    fill(pool, 0, 1, 2, 3)
    return pool


def test_content_that_is_asked_for_again_before_it_is_back_moves_the_split_once(pool: BlockPool) -> None:
    queue = arc(pool)
    queue.used([pool.blocks[1]])  # content 0: so ghosts of what was wanted once have room
    fill(pool, 4)
    assert queue.sizes[2] == 1
    queue.missed([key_of(1)])
    assert queue.target == 1.0
    queue.missed([key_of(1), key_of(99)])
    assert queue.target == 1.0, "the second request says nothing new, and of 99 nothing is known"
    assert queue.home_of(key_of(1)) == queue.home_of(key_of(0)) + 1, "it comes back as wanted again"


def test_reading_a_slot_that_has_no_content_any_more_makes_it_no_more_wanted(pool: BlockPool) -> None:
    queue = arc(pool)
    pool.evict_blocks([2])
    before = queue.sizes
    queue.used([pool.blocks[2], pool.null_block])
    assert queue.sizes == before
    queue.used([pool.blocks[3]])
    assert queue.sizes[1] == before[1] + 1


def test_a_slot_that_is_held_becomes_wanted_again_and_stays_held(pool: BlockPool) -> None:
    queue, slot = arc(pool), pool.blocks[3]
    pool.touch([slot])
    queue.used([slot])
    assert queue.sizes[1] == 1
    assert slot not in queue.get_all_free_blocks()
    pool.free_blocks([slot])
    assert queue.get_all_free_blocks()[-1] is slot


@pytest.mark.parametrize("count", [-1, CAPACITY + 1])
def test_more_slots_than_there_are_free_are_refused_and_none_is_taken(pool: BlockPool, count: int) -> None:
    with pytest.raises(ValueError, match=f"{count} free blocks wanted, {CAPACITY} left"):
        arc(pool).popleft_n(count)
    assert len(arc(pool).get_all_free_blocks()) == CAPACITY


def test_slots_for_content_without_a_name_are_for_what_is_wanted_once(pool: BlockPool) -> None:
    queue = arc(pool)
    queue.used(pool.blocks[1:])
    queue.incoming([None, key_of(7)])
    slots = queue.popleft_n(2)
    assert queue.sizes[:2] == (2, 2)
    assert [slot.block_id for slot in slots] == [1, 2]


def test_a_walk_goes_on_behind_a_slot_and_not_behind_one_that_is_held(pool: BlockPool) -> None:
    queue = arc(pool)
    everything = queue.get_all_free_blocks()
    for place, slot in enumerate(everything):
        assert list(queue.iter_blocks_after(slot)) == everything[place + 1 :]
    pool.touch([everything[1]])
    with pytest.raises(RuntimeError, match=f"block {everything[1].block_id} is not in the free queue"):
        list(queue.iter_blocks_after(everything[1]))
