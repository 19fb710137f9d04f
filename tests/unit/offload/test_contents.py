"""What the blocks of a copy hold, in columns: the same as the rows that it was made of."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from vllm.v1.core.block_hash import BlockHash, make_block_hash_with_group_id
from vllm.v1.core.block_index import StoredBlockInfo
from vllm.v1.core.block_ops import pack_token_counts
from vllm.v1.core.kv_cache_block import KVCacheBlock
from vllm.v1.simple_kv_offload.eviction import EvictionQueue, LruQueue
from vllm.v1.simple_kv_offload.transfer import Contents, StagedKey

KEYS = [make_block_hash_with_group_id(BlockHash(name), 0) for name in (b"a", b"b", b"c")]
INFO = StoredBlockInfo((1, 2), None, 2)
staged = st.builds(
    StagedKey, st.sampled_from(KEYS), st.sampled_from((None, 4, 8)), st.sampled_from((None, None, INFO))
)
rows = st.lists(st.lists(staged, max_size=3).map(tuple), max_size=6)


@given(rows, st.slices(6))
def test_columns_read_like_rows(wanted: list[tuple[StagedKey, ...]], part: slice) -> None:
    contents = Contents.of(wanted)
    assert list(contents) == wanted
    assert len(contents) == len(wanted)
    assert [contents[i] for i in range(-len(wanted), len(wanted))] == wanted * 2
    assert list(contents[part]) == wanted[part]
    assert list(contents[::-1][part]) == wanted[::-1][part]
    assert list(contents.all_keys()) == [entry.key for row in wanted for entry in row]
    assert list(contents.primary_keys) == [row[0].key if row else None for row in wanted]
    assert Contents.of(contents) is contents
    with pytest.raises(IndexError):
        contents[len(wanted)]


def test_whole_columns_read_like_rows() -> None:
    contents = Contents(list(KEYS), [4, None, 8])
    assert contents[1] == (StagedKey(KEYS[1], None, None),)
    assert list(contents.all_keys()) == KEYS
    blocks = [KVCacheBlock(i) for i in range(3)]
    for block, tokens in zip(blocks, (4, None, 8), strict=True):
        block.block_hash_num_tokens = tokens
    packed = Contents(list(KEYS), pack_token_counts(blocks))
    assert list(packed) == list(contents)
    assert list(packed[::-1]) == list(contents)[::-1]
    for columns in (packed, packed[::-1]):
        before = list(columns)
        columns.append_plain(KEYS[0], 12)
        columns.append(())
        assert list(columns) == [*before, (StagedKey(KEYS[0], 12, None),), ()]


@given(
    st.lists(st.sampled_from((None, *KEYS)), max_size=5), st.sets(st.sampled_from(KEYS)), st.integers(0, 6)
)
def test_slots_are_taken_up_to_a_spared_one(held: list[object], spared: set[object], wanted: int) -> None:
    """The queue's own count is that of the contract, which asks for one victim after the other."""
    blocks = [KVCacheBlock(i) for i in range(len(held))]
    for block, key in zip(blocks, held, strict=True):
        block.block_hash = key  # type: ignore[assignment]
    queue = LruQueue(blocks)
    incoming = (KEYS * 2)[:wanted]
    expected = EvictionQueue.num_takeable(queue, incoming, spared)  # type: ignore[arg-type]
    assert queue.num_takeable(incoming, spared) == expected  # type: ignore[arg-type]
