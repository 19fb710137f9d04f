"""The loops over blocks that every step runs: take with eviction, touch, release. Layer: L3.

Owns the reference in Python of what the native core does, and which of the two is used. It must not know events,
metrics or requests.
"""

from __future__ import annotations

from array import array
from collections.abc import Callable, Iterable, Mapping, MutableMapping, Sequence, Set
from functools import partial
from itertools import islice
from typing import TYPE_CHECKING, Protocol

from vllm.utils.checks import InvariantError
from vllm.utils.native_core import native_core
from vllm.v1.core.block_hash import BlockHashWithGroupId
from vllm.v1.core.free_block_queue import FreeKVCacheBlockQueue, FreeQueue, LinkedQueue, is_plain
from vllm.v1.core.kv_cache_block import BlockOwner, KVCacheBlock

IndexEntries = MutableMapping[BlockHashWithGroupId, KVCacheBlock | dict[int, KVCacheBlock]]
"""Index key → block, or → blocks by id where several hold the same content."""


if native_core is None or TYPE_CHECKING:

    def make_entries(expected: int) -> IndexEntries:
        """No entries; mostly there will be `expected` at most."""
        return {}

else:

    class NativeEntries(native_core.Index, MutableMapping):
        """The native table with the rest of a dict's methods."""

        __slots__ = ()

        def __copy__(self) -> NativeEntries:
            made = NativeEntries(len(self))
            made.update(self)
            return made

        copy = __copy__

        def __repr__(self) -> str:
            return repr(dict(self.items()))

    make_entries = NativeEntries


class KeySet(Protocol):
    """Keys, as in a set."""

    def __contains__(self, key: object, /) -> bool: ...

    def __len__(self) -> int: ...

    def update(self, keys: Iterable[BlockHashWithGroupId], /) -> None: ...

    def difference_update(self, keys: Iterable[BlockHashWithGroupId], /) -> None: ...

    def clear(self) -> None: ...


if native_core is None or TYPE_CHECKING:

    def make_key_set() -> KeySet:
        """No keys."""
        return set()

else:

    class NativeKeySet(native_core.Index):
        """The native table as a set."""

        __slots__ = ()

        update = native_core.Index.add_keys
        difference_update = native_core.Index.drop_keys

    make_key_set = NativeKeySet


class PythonTally:
    """Counts blocks that lost their hash in `take`."""

    __slots__ = ("evicted",)

    def __init__(self) -> None:
        self.evicted = 0


if TYPE_CHECKING:
    Tally = PythonTally
else:
    Tally = PythonTally if native_core is None else native_core.Tally

Take = Callable[[int], list[KVCacheBlock] | None]
"""The first blocks of a queue; None where they are to be taken one after the other."""
Touch = Callable[[BlockOwner, FreeQueue, Iterable[KVCacheBlock]], list[KVCacheBlock] | None]


def forget_block(index: IndexEntries, key: BlockHashWithGroupId, block_id: int) -> KVCacheBlock | None:
    """Remove one block from `key` and return it; None, and no change, if it is not there."""
    entry = index.get(key)
    if entry is None:
        return None
    if not isinstance(entry, dict):
        if entry.block_id != block_id:
            return None
        del index[key]
        return entry
    block = entry.pop(block_id, None)
    if len(entry) == 1:
        index[key] = next(iter(entry.values()))
    elif not entry:
        del index[key]
    return block


def require_free(queue: FreeQueue, count: int) -> None:
    """ValueError unless the queue has so many blocks."""
    free = queue.num_free_blocks
    if not 0 <= count <= free:
        raise ValueError(f"Cannot get {count} free blocks from the pool, {free} are free")


def take_nothing(count: int) -> None:
    """Somebody is told of each block that is taken: see `Take`."""


def python_take(
    queue: FreeQueue,
    index: IndexEntries,
    tally: PythonTally,
    further_keys: Mapping[int, object],
    count: int,
) -> list[KVCacheBlock] | None:
    """The first `count` blocks of the queue, each with one reference and without its hash.

    The hashes leave the index and are counted. ValueError, and no change, if there are fewer blocks. None, and no
    change, while some block has further keys.
    """
    if further_keys:
        return None
    require_free(queue, count)
    taken = queue.popleft_n(count)
    for block in taken:
        block.ref_cnt = 1
        key = block.block_hash
        if key is None:
            continue
        tally.evicted += 1
        block.block_hash = block.block_hash_num_tokens = None
        entry = index.pop(key, None)
        if entry is not block and entry is not None:  # others hold the same content
            index[key] = entry
            forget_block(index, key, block.block_id)
    return taken


def python_touch(
    pool: BlockOwner, queue: FreeQueue, blocks: Iterable[KVCacheBlock]
) -> list[KVCacheBlock] | None:
    """One more reference for each of the pool's blocks; one that nobody held leaves the queue.

    Null blocks are skipped. Returns the blocks of other pools, or None.
    """
    foreign: list[KVCacheBlock] = []
    for block in blocks:
        if block.is_null:
            continue
        if block.pool is not pool:
            foreign.append(block)
            continue
        if not block.ref_cnt:
            queue.remove(block)
        block.ref_cnt += 1
    return foreign or None


def python_release(
    pool: BlockOwner,
    blocks: Iterable[KVCacheBlock],
    cached: list[KVCacheBlock],
    uncached: list[KVCacheBlock],
) -> list[KVCacheBlock] | None:
    """One reference less for each of the pool's blocks; those nobody holds now are appended to one of the lists.

    Null blocks are skipped. Returns the blocks of other pools, or None. InvariantError for a block nobody holds.
    """
    foreign: list[KVCacheBlock] = []
    for block in blocks:
        if block.is_null:
            continue
        if block.pool is not pool:
            foreign.append(block)
            continue
        ref_cnt = block.ref_cnt - 1
        if ref_cnt < 0:
            raise InvariantError(f"block {block.block_id} is freed but nobody holds it")
        block.ref_cnt = ref_cnt
        if ref_cnt == 0:
            (uncached if block.block_hash is None else cached).append(block)
    return foreign or None


release = python_release if native_core is None else native_core.release


def operations_for(
    queue: FreeQueue, index: IndexEntries, tally: PythonTally, further_keys: Mapping[int, object]
) -> tuple[Take, Touch]:
    """`take` of a count and `touch` for a pool of these: the native ones know the links of the plain queue only."""
    if native_core is None or not is_plain(queue):
        return partial(python_take, queue, index, tally, further_keys), python_touch
    return native_core.bind_take(queue, index, tally, further_keys), native_core.touch


Found = tuple[list[KVCacheBlock], list[BlockHashWithGroupId], bytes, int, KVCacheBlock | None]


def python_find_cached(
    queue: FreeQueue,
    suffixes: Iterable[bytes],
    unwanted: Set[BlockHashWithGroupId],
    index: IndexEntries,
    coming: KeySet,
    depth: int,
) -> Found:
    """Of the first `depth` blocks those whose hash ends with one of the suffixes and is not in `unwanted`.

    Returns them, their hashes, the tokens that these cover as in `pack_token_counts`, how many different ones of them are
    neither in the index nor `coming`, and the last block looked at; no blocks, hashes and counts where there is no such one.
    """

    def lacks(key: BlockHashWithGroupId | None) -> bool:
        return key is not None and key not in index and key not in coming

    scanned = list(islice(queue.iter_blocks_after(None), max(0, depth)))
    last = scanned[-1] if scanned else None
    if not any(lacks(block.block_hash) for block in scanned):
        return [], [], b"", 0, last  # mostly
    ends = tuple(suffixes)
    blocks: list[KVCacheBlock] = []
    keys: list[BlockHashWithGroupId] = []
    for block in scanned:
        key = block.block_hash
        if key is not None and key.endswith(ends) and key not in unwanted:
            blocks.append(block)
            keys.append(key)
    num_lacking = len({key for key in keys if lacks(key)})
    if not num_lacking:
        blocks, keys = [], []
    return blocks, keys, python_pack_token_counts(blocks), num_lacking, last


def python_count_before(queue: LinkedQueue, limit: int, keys: Set[BlockHashWithGroupId]) -> int:
    """How many blocks, `limit` at most, are in front of the first whose hash is in `keys`."""
    before = 0
    for block in islice(queue.iter_blocks_after(None), max(0, limit)):
        if block.block_hash in keys:
            break
        before += 1
    return before


def python_lacking(index: IndexEntries, keys: Iterable[BlockHashWithGroupId]) -> list[BlockHashWithGroupId]:
    """Those of the keys that the index has no entry for, in order."""
    return [key for key in keys if key not in index]


def pack_ids(ids: Iterable[int]) -> bytes:
    """Ids as signed 32-bit numbers: see `unpack_block_ids`."""
    return array("i", ids).tobytes()


def python_pack_block_ids(blocks: Iterable[KVCacheBlock]) -> bytes:
    """The ids of the blocks, as in `pack_ids`."""
    return pack_ids([block.block_id for block in blocks])


def unpack_block_ids(packed: bytes) -> list[int]:
    """What `pack_block_ids` has packed."""
    return memoryview(packed).cast("i").tolist()


NO_TOKENS = 2**32 - 1
"""Stands for None in `pack_token_counts`."""
TOKEN_COUNT_BYTES = 4
"""Of one number there."""


def python_pack_token_counts(blocks: Iterable[KVCacheBlock]) -> bytes:
    """For each block how many tokens its hash covers, as 32-bit numbers: a column without an object per block."""
    counts = (block.block_hash_num_tokens for block in blocks)
    return array("I", [NO_TOKENS if count is None else count for count in counts]).tobytes()


lacking = python_lacking if native_core is None else native_core.lacking
pack_block_ids = python_pack_block_ids if native_core is None else native_core.pack_block_ids
pack_token_counts = python_pack_token_counts if native_core is None else native_core.pack_token_counts
count_before = python_count_before if native_core is None else native_core.count_before


def bind_find_cached(
    queue: FreeQueue,
    suffixes: Iterable[bytes],
    unwanted: Set[BlockHashWithGroupId],
    index: IndexEntries,
    coming: KeySet,
) -> Callable[[int], Found]:
    """`python_find_cached` as a function of the depth, by the native core where it knows the queue's links."""
    if native_core is None or not isinstance(queue, FreeKVCacheBlockQueue):
        return partial(python_find_cached, queue, suffixes, unwanted, index, coming)
    return native_core.bind_find_cached(queue, suffixes, unwanted, index, coming)


def touch_elsewhere(blocks: Sequence[KVCacheBlock]) -> None:
    """Touch blocks in their own pools."""
    for block in blocks:
        if block.pool is None:  # a record made outside any pool
            block.ref_cnt += 1
        else:
            block.pool.touch((block,))


def release_elsewhere(blocks: Sequence[KVCacheBlock]) -> None:
    """Return blocks to their own pools, in order."""
    by_pool: dict[int, list[KVCacheBlock]] = {}
    for block in blocks:
        if block.pool is None:  # a record made outside any pool: nothing to return it to
            block.ref_cnt -= 1
        else:
            by_pool.setdefault(id(block.pool), []).append(block)
    for own in by_pool.values():
        owner = own[0].pool
        assert owner is not None
        owner.free_blocks(own)
