"""The free list: order, links, errors."""

from __future__ import annotations

import pytest

from tests.helpers.kv_core import ids
from vllm.v1.core.free_block_queue import FreeKVCacheBlockQueue
from vllm.v1.core.kv_cache_block import KVCacheBlock, null_head_len, trim_null_head


def make(count: int) -> tuple[list[KVCacheBlock], FreeKVCacheBlockQueue]:
    blocks = [KVCacheBlock(i) for i in range(count)]
    return blocks, FreeKVCacheBlockQueue(blocks)


def test_starts_in_order_between_sentinels() -> None:
    blocks, queue = make(3)
    assert queue.num_free_blocks == 3
    assert queue.fake_free_list_head.block_id == queue.fake_free_list_tail.block_id == -1
    assert queue.fake_free_list_head.next_free_block is blocks[0]
    assert queue.fake_free_list_tail.prev_free_block is blocks[2]
    assert ids(queue.get_all_free_blocks()) == [0, 1, 2]


def test_empty_queue_links_its_sentinels() -> None:
    _, queue = make(0)
    assert queue.fake_free_list_head.next_free_block is queue.fake_free_list_tail
    with pytest.raises(ValueError):
        queue.popleft()


def test_pop_takes_from_the_front_and_unlinks() -> None:
    blocks, queue = make(4)
    assert queue.popleft() is blocks[0]
    assert ids(queue.popleft_n(2)) == [1, 2]
    assert queue.popleft_n(0) == []
    assert blocks[1].prev_free_block is None
    assert blocks[1].next_free_block is None
    assert queue.num_free_blocks == 1
    with pytest.raises(ValueError):
        queue.popleft_n(2)
    assert ids(queue.get_all_free_blocks()) == [3]


def test_append_and_prepend_keep_the_given_order() -> None:
    blocks, queue = make(6)
    taken = queue.popleft_n(5)
    queue.append_n(taken[:2])
    queue.prepend_n(taken[2:4])
    queue.append(taken[4])
    queue.append_n([])
    queue.prepend_n([])
    assert ids(queue.get_all_free_blocks()) == [2, 3, 5, 0, 1, 4]
    assert queue.num_free_blocks == 6


def test_remove_from_anywhere() -> None:
    blocks, queue = make(4)
    for index in (2, 0, 3, 1):
        queue.remove(blocks[index])
    assert queue.num_free_blocks == 0
    assert queue.fake_free_list_head.next_free_block is queue.fake_free_list_tail
    with pytest.raises(RuntimeError, match="block 1"):
        queue.remove(blocks[1])


def test_a_queued_block_is_not_queued_again() -> None:
    blocks, queue = make(2)
    with pytest.raises(RuntimeError, match="already"):
        queue.append(blocks[0])
    with pytest.raises(RuntimeError, match="already"):
        queue.prepend_n([blocks[1]])


def test_iterating_after_a_cursor() -> None:
    blocks, queue = make(4)
    assert ids(queue.iter_blocks_after(blocks[1])) == [2, 3]
    assert ids(queue.iter_blocks_after(None)) == [0, 1, 2, 3]
    assert ids(queue.iter_blocks_after(blocks[3])) == []
    queue.remove(blocks[1])
    with pytest.raises(RuntimeError, match="block 1"):
        next(queue.iter_blocks_after(blocks[1]))


def test_leading_null_blocks_are_counted_and_trimmed() -> None:
    null, real = KVCacheBlock(0, is_null=True), KVCacheBlock(1)
    assert null_head_len([null, null, real, null]) == 2
    assert null_head_len([null]) == 1
    plain = [real, null]
    assert trim_null_head(plain) is plain
    assert trim_null_head([null, real]) == [real]


def test_block_refuses_a_second_primary_hash() -> None:
    block = KVCacheBlock(3)
    block.set_block_hash(b"k", 16)
    assert (block.block_hash, block._block_hash, block.block_hash_num_tokens) == (b"k", b"k", 16)
    with pytest.raises(AssertionError):
        block.set_block_hash(b"l")
    block.reset_hash()
    assert block.block_hash is None
    block._block_hash = b"m"
    assert block.block_hash == b"m"
    assert "block_id=3" in repr(block)
