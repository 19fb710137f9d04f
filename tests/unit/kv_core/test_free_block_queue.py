"""The free list: order, links, errors."""

from __future__ import annotations

from typing import Any

import pytest

from tests.helpers.kv_core import ids
from vllm.v1.core.free_block_queue import FreeKVCacheBlockQueue, PythonLinkedQueue
from vllm.v1.core.kv_cache_block import KVCacheBlock, PythonBlock, null_head_len, trim_null_head


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


def test_blocks_put_back_come_behind_the_blank_ones_in_front() -> None:
    blocks, queue = make(6)
    cached = queue.popleft_n(3)
    for block in cached:
        block.block_hash = b"k"
    queue.append(cached[2])
    queue.put_back(cached[:2])
    assert ids(queue.get_all_free_blocks()) == [3, 4, 5, 0, 1, 2]
    blank = queue.popleft_n(3)
    queue.remove(blocks[1])
    queue.put_back([blocks[1]])
    assert ids(queue.get_all_free_blocks()) == [1, 0, 2]
    blocks[1].reset_hash()
    queue.prepend_n(blank[:1])
    queue.put_back(blank[1:2])
    assert ids(queue.get_all_free_blocks()) == [3, 1, 4, 0, 2]
    for block in cached:
        block.reset_hash()
    queue.clear()
    queue.put_back(blank[2:])
    assert ids(queue.get_all_free_blocks()) == [3, 1, 4, 0, 2, 5]


class CountingBlock(PythonBlock):
    """Counts how often blocks are asked for their hash."""

    __slots__ = ()
    looks = 0

    @property  # type: ignore[override]
    def block_hash(self) -> Any:
        CountingBlock.looks += 1
        return PythonBlock.block_hash.__get__(self)  # type: ignore[attr-defined]

    @block_hash.setter
    def block_hash(self, value: Any) -> None:
        PythonBlock.block_hash.__set__(self, value)  # type: ignore[attr-defined]


@pytest.mark.parametrize("count", [10, 1000, 20_000])
def test_putting_back_takes_as_many_steps_in_a_large_pool_as_in_a_small_one(count: int) -> None:
    blocks = [CountingBlock(i) for i in range(count)]
    CountingBlock.looks = 0
    queue = PythonLinkedQueue(PythonBlock(-1), PythonBlock(-1), blocks)
    assert CountingBlock.looks == count
    CountingBlock.looks = 0
    used = queue.popleft_n(4)
    for block in used:
        block.block_hash = b"k"  # type: ignore[assignment]
        queue.put_back([block])
    assert CountingBlock.looks == 3, "each but the first looks at the one before"
    assert ids(queue.get_all_free_blocks())[-4:] == [3, 2, 1, 0]
    # Some lose their content where they are: they are walked over once.
    for block in used[2:]:
        block.block_hash = None
    for looks, number in ((3, 1), (1, 0)):
        queue.remove(used[number])
        CountingBlock.looks = 0
        queue.put_back([used[number]])
        assert CountingBlock.looks == looks
    queue.clear()
    CountingBlock.looks = 0
    queue.put_back([CountingBlock(count)])
    assert CountingBlock.looks == 0, "after a reset nothing is walked over"
    assert ids(queue.get_all_free_blocks())[-1] == count


@pytest.mark.parametrize("count", [10, 20_000])
def test_the_end_of_the_blank_blocks_is_known(count: int) -> None:
    blocks, queue = make(count)
    assert queue.last_blank is blocks[-1]
    taken = queue.popleft_n(count - 1)
    assert queue.last_blank is blocks[-1]
    queue.popleft()
    assert queue.last_blank is queue.fake_free_list_head
    queue.prepend_n(taken)
    assert queue.last_blank is taken[-1]
    queue.remove(taken[-1])
    assert queue.last_blank is taken[-2]


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
