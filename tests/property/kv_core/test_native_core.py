"""The native half of the KV core does what its Python reference does. Without the library nothing is compared here."""

from __future__ import annotations

import copy
import gc
import sys
import weakref
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from vllm.utils.checks import InvariantError
from vllm.utils.native_core import NativeCore, native_core
from vllm.v1.core.block_ops import (
    PythonTally,
    make_entries,
    make_key_set,
    python_count_before,
    python_find_cached,
    python_lacking,
    python_pack_block_ids,
    python_pack_token_counts,
    python_release,
    python_take,
    python_touch,
    unpack_block_ids,
)
from vllm.v1.core.free_block_queue import PythonLinkedQueue
from vllm.v1.core.kv_cache_block import PythonBlock

pytestmark = pytest.mark.skipif(native_core is None, reason="the native KV core is not built")
NUM_BLOCKS = 7
KEYS = (b"a", b"b", b"c")
EXPECTED = (ValueError, RuntimeError, InvariantError, TypeError)


class Pool:
    """A pool to the extent that blocks know one."""


class Side:
    """Blocks, queue, index and loops of one implementation, driven by words."""

    def __init__(
        self,
        block: Any,
        queue: Any,
        index: Any,
        tally: Any,
        bind_take: Any,
        touch: Any,
        release: Any,
        views: Any,
    ) -> None:
        self.pool, self.other = Pool(), Pool()
        self.blocks = [block(i, pool=self.pool) for i in range(NUM_BLOCKS)]
        self.blocks[0].is_null = True
        self.strangers = [block(50, ref_cnt=1, pool=self.other), block(51, ref_cnt=1)]
        self.queue = queue(block(-1), block(-1), self.blocks[1:])
        self.index: Any = index()
        self._new_index = index
        self.tally = tally()
        self.further_keys: dict[int, Any] = {}
        self._take = bind_take(self.queue, self.index, self.tally, self.further_keys)
        self._touch, self._release = touch, release
        self._bind_find, self._count_before, self._lacking, self._block_ids, self._token_counts, keys = views
        self.coming: Any = keys()

    def pick(self, numbers: Sequence[int]) -> list[Any]:
        everyone = self.blocks + self.strangers
        return [everyone[n % len(everyone)] for n in numbers]

    def take(self, numbers: Sequence[int]) -> object:
        return ids(self._take(len(numbers)))

    def take_beside_further_keys(self, numbers: Sequence[int]) -> object:
        self.further_keys[1] = {}
        try:
            return self._take(len(numbers))
        finally:
            self.further_keys.clear()

    def touch(self, numbers: Sequence[int]) -> object:
        return ids(self._touch(self.pool, self.queue, self.pick(numbers)))

    def free(self, numbers: Sequence[int]) -> object:
        cached: list[Any] = []
        uncached: list[Any] = []
        try:
            foreign = self._release(self.pool, iter(self.pick(numbers)), cached, uncached)
            return ids(foreign), ids(cached), ids(uncached)
        finally:
            self.queue.append_n(tuple(cached))
            self.queue.prepend_n(uncached)

    def cache(self, numbers: Sequence[int]) -> None:
        """The first block gets a key, beside others with the same one."""
        block, key = self.blocks[numbers[0] % NUM_BLOCKS], KEYS[numbers[-1] % len(KEYS)]
        if block.is_null or block.block_hash is not None:
            return
        if len(numbers) > 1:
            self.queue.look_again()
        block.set_block_hash(key, numbers[0])
        entry = self.index.setdefault(key, block)
        if isinstance(entry, dict):
            entry[block.block_id] = block
        elif entry is not block:
            self.index[key] = {entry.block_id: entry, block.block_id: block}

    def forget_outside(self, numbers: Sequence[int]) -> None:
        """Somebody takes an entry from the index behind the block's back."""
        self.index.pop(KEYS[numbers[0] % len(KEYS)], None)

    def remove_and_insert(self, numbers: Sequence[int]) -> None:
        """A queued block moves behind another."""
        moved, cursor = self.blocks[numbers[0] % NUM_BLOCKS], self.blocks[numbers[-1] % NUM_BLOCKS]
        self.queue.remove(moved)
        try:
            self.queue.insert_n_after(cursor, [moved])
        except Exception:
            self.queue.append(moved)
            raise

    def remove_and_put(self, numbers: Sequence[int]) -> None:
        """A queued block comes to the front, before or behind those without a hash."""
        moved = self.blocks[numbers[0] % NUM_BLOCKS]
        self.queue.remove(moved)
        ways = (self.queue.prepend_n, self.queue.put_back, self.queue.put_by_age)
        ways[(len(numbers) + numbers[-1]) % 3](blocks=(moved,))

    def keep_ages(self, numbers: Sequence[int]) -> None:
        self.queue.keep_ages(num_blocks=NUM_BLOCKS)

    def put_all_by_age(self, numbers: Sequence[int]) -> None:
        """Several leave the queue; they come back to where they were, or there they are known to be older than."""
        moved = [self.blocks[n] for n in dict.fromkeys(n % NUM_BLOCKS for n in numbers)]
        moved = [block for block in moved if block.next_free_block is not None]
        for block in moved:
            self.queue.remove(block)
        self.queue.put_by_age(moved)
        self.queue.put_by_age(())

    def lose_all_hashes(self, numbers: Sequence[int]) -> None:
        self.index.clear()
        for block in self.blocks:
            block.reset_hash()
        self.queue.clear()

    def pop_and_append(self, numbers: Sequence[int]) -> object:
        block = self.queue.popleft()
        self.queue.append(block=block)
        return block.block_id

    def walk(self, numbers: Sequence[int]) -> object:
        return ids(list(self.queue.iter_blocks_after(self.pick(numbers)[0])))

    def survey(self, numbers: Sequence[int]) -> object:
        """Which blocks in front are cached, under wanted keys, and what is told of them."""
        unwanted = {KEYS[n] for n in numbers[1:] if n < len(KEYS)}
        suffixes = frozenset((*KEYS[: numbers[-1]], b"long" + KEYS[0])[1:])
        other = self._new_index()  # of another pool, which has one of the keys
        other[KEYS[numbers[-1] % len(KEYS)]] = None
        self.coming.difference_update(iter(KEYS))
        self.coming.update(KEYS[n % len(KEYS)] for n in numbers[1:2] * 2)
        find = self._bind_find(self.queue, suffixes, unwanted, other, self.coming)
        blocks, keys, token_counts, num_lacking, last = find(numbers[0])
        packed = self._block_ids(blocks)
        assert unpack_block_ids(packed) == ids(blocks)
        assert token_counts == self._token_counts(blocks)
        return (
            packed,
            token_counts,
            keys,
            num_lacking,
            None if last is None else last.block_id,
            self._token_counts(tuple(self.blocks)),
            self._count_before(self.queue, numbers[-1], unwanted),
            self._lacking(self.index, (*KEYS[::-1], b"none")),
        )

    def state(self) -> object:
        return (
            [repr(block) for block in self.blocks + self.strangers],
            [(b.block_hash_num_tokens, b.is_null, b._block_hash) for b in self.blocks],
            ids(self.queue.get_all_free_blocks()),
            ids(list(self.queue.iter_blocks_after(None))),
            self.queue.num_free_blocks,
            self.queue.last_blank.block_id,
            self.tally.evicted,
            {key: list(e) if isinstance(e, dict) else e.block_id for key, e in self.index.items()},
        )


def ids(blocks: Sequence[Any] | None) -> list[int] | None:
    return None if blocks is None else [block.block_id for block in blocks]


def core() -> NativeCore:
    assert native_core is not None
    return native_core


def both_sides() -> tuple[Side, Side]:
    native = core()
    return (
        Side(
            PythonBlock,
            PythonLinkedQueue,
            dict,
            PythonTally,
            lambda *bound: partial(python_take, *bound),
            python_touch,
            python_release,
            (
                lambda *bound: partial(python_find_cached, *bound),
                python_count_before,
                python_lacking,
                python_pack_block_ids,
                python_pack_token_counts,
                set,
            ),
        ),
        Side(
            native.KVCacheBlock,
            native.FreeQueue,
            native.Index,
            native.Tally,
            native.bind_take,
            native.touch,
            native.release,
            (
                native.bind_find_cached,
                native.count_before,
                native.lacking,
                native.pack_block_ids,
                native.pack_token_counts,
                make_key_set,
            ),
        ),
    )


def outcome(work: Callable[[Sequence[int]], object], numbers: Sequence[int]) -> object:
    try:
        return work(numbers)
    except EXPECTED as error:
        return type(error)


words = st.sampled_from(
    (
        "take",
        "take_beside_further_keys",
        "touch",
        "free",
        "cache",
        "cache",
        "forget_outside",
        "remove_and_insert",
        "remove_and_put",
        "lose_all_hashes",
        "pop_and_append",
        "keep_ages",
        "put_all_by_age",
        "walk",
        "survey",
    )
)
steps = st.lists(
    st.tuples(words, st.lists(st.integers(0, NUM_BLOCKS + 1), min_size=1, max_size=4)), max_size=40
)


@settings(max_examples=300, deadline=None)
@given(steps)
def test_blocks_and_queue_do_what_the_reference_does(steps: list[tuple[str, list[int]]]) -> None:
    reference, native = both_sides()
    for word, numbers in steps:
        if word == "remove_and_insert" and (numbers[0] - numbers[-1]) % NUM_BLOCKS == 0:
            continue  # a block behind itself: the reference has no answer
        expected, actual = (outcome(getattr(side, word), numbers) for side in (reference, native))
        assert actual == expected, (word, numbers)
        assert native.state() == reference.state(), (word, numbers)


@settings(max_examples=60, deadline=None)
@given(steps)
def test_native_blocks_are_not_leaked(steps: list[tuple[str, list[int]]]) -> None:
    _, native = both_sides()
    for word, numbers in steps:
        outcome(getattr(native, word), numbers)
    blocks = native.blocks
    native.index.clear()
    del native.queue, native._take
    assert all(block.prev_free_block is block.next_free_block is None for block in blocks)
    fresh = [core().KVCacheBlock(1)]
    assert {sys.getrefcount(block) for block in blocks} == {sys.getrefcount(block) for block in fresh}


def test_a_bound_search_holds_what_it_looks_at_and_nothing_when_it_goes() -> None:
    native = core()
    blocks = native.make_blocks(4, None)
    queue = native.FreeQueue(native.KVCacheBlock(-1), native.KVCacheBlock(-1), blocks)
    bound = (queue, {b"unwanted"}, native.Index(), native.Index())
    counts = [sys.getrefcount(item) for item in bound]
    find = native.bind_find_cached(bound[0], (bytes(bytearray(b"mine")),), *bound[1:])
    assert [sys.getrefcount(item) for item in bound] == [count + 1 for count in counts]
    for block, key in zip(blocks, (b"1mine", None, b"2mine", b"3other"), strict=True):
        block.block_hash = key
    watched = [*blocks, *(block.block_hash for block in blocks if block.block_hash is not None)]
    del block
    before = [sys.getrefcount(item) for item in watched]
    looks = [find(depth) for depth in (0, 1, 2, 3, 9, -1)]
    assert [ids(look[0]) for look in looks] == [[], [0], [0], [0, 2], [0, 2], []]
    assert looks[4][1:] == ([b"1mine", b"2mine"], b"\xff" * 8, 2, blocks[3])
    del looks
    assert [sys.getrefcount(item) for item in watched] == before
    del find
    assert [sys.getrefcount(item) for item in bound] == counts


def test_a_native_block_does_not_keep_its_pool() -> None:
    pool = Pool()
    watched = weakref.ref(pool)
    blocks = core().make_blocks(3, pool)
    assert [block.pool for block in blocks] == [pool] * 3
    assert [block.block_id for block in blocks] == [0, 1, 2]
    assert not any(map(gc.is_tracked, blocks))
    assert {sys.getsizeof(block) for block in blocks} == {64}
    del pool
    assert watched() is None
    assert blocks[0].pool is None


def test_a_pool_without_weak_references_is_held() -> None:
    block = core().KVCacheBlock(1, pool="pool")
    assert block.pool == "pool"
    block.pool = None
    assert block.pool is None


def test_wrong_values_are_refused() -> None:
    native = core()
    block = native.KVCacheBlock(1)
    queue = native.FreeQueue(native.KVCacheBlock(-1), native.KVCacheBlock(-1), [])
    with pytest.raises(TypeError, match="bytes"):
        block.block_hash = 3
    with pytest.raises(OverflowError, match="block_hash_num_tokens"):
        block.block_hash_num_tokens = 1 << 32
    with pytest.raises(TypeError, match="native block"):
        queue.append(PythonBlock(1))
    with pytest.raises(TypeError, match="blocks"):
        queue.append_n(block=[block])
    with pytest.raises(TypeError, match="native block"):
        queue.put_by_age([PythonBlock(1)])
    with pytest.raises(ValueError, match="-1"):
        queue.keep_ages(-1)
    queue.keep_ages(3)
    for put in (queue.append_n, queue.prepend_n, queue.put_back, queue.put_by_age):
        with pytest.raises(TypeError):
            put(5)
    with pytest.raises(TypeError):
        queue.keep_ages("x")
    with pytest.raises(RuntimeError, match="once"):
        queue.__init__(block, block, [])
    with pytest.raises(TypeError, match="native queue"):
        native.bind_take([], native.Index(), native.Tally(), {})
    with pytest.raises(TypeError, match="native index"):
        native.bind_take(queue, {}, native.Tally(), {})
    with pytest.raises(TypeError, match="a set"):
        native.bind_find_cached(queue, (), [], native.Index(), native.Index())
    with pytest.raises(TypeError, match="native index"):
        native.bind_find_cached(queue, (), set(), {}, native.Index())
    with pytest.raises(TypeError, match="native index"):
        native.bind_find_cached(queue, (), set(), native.Index(), set())
    for suffixes in (("x",), 5):
        with pytest.raises(TypeError):
            native.bind_find_cached(queue, suffixes, set(), native.Index(), native.Index())
    with pytest.raises(TypeError, match="takes 5 arguments"):
        native.bind_find_cached(queue)  # type: ignore[call-arg]
    with pytest.raises(TypeError):
        native.bind_find_cached(queue, (), set(), native.Index(), native.Index())("x")  # type: ignore[arg-type]
    with pytest.raises(TypeError, match="a set"):
        native.count_before(queue, 1, [])
    with pytest.raises(TypeError, match="native index"):
        native.lacking({}, [])
    with pytest.raises(TypeError, match="bytes"):
        native.lacking(native.Index(), ["x"])
    for change in (native.Index.add_keys, native.Index.drop_keys):
        with pytest.raises(TypeError):
            change(set(), [])
        with pytest.raises(TypeError, match="bytes"):
            change(native.Index(), [b"x", "x"])
        with pytest.raises(TypeError):
            change(native.Index(), 5)
    for pack in (native.pack_block_ids, native.pack_token_counts):
        with pytest.raises(TypeError, match="native block"):
            pack([block, PythonBlock(1)])
    with pytest.raises(TypeError, match="takes 4 arguments"):
        native.bind_take(queue)  # type: ignore[call-arg]
    with pytest.raises(ValueError, match="out of range"):
        native.make_blocks(-1, None)
    queue.num_free_blocks = 1
    with pytest.raises(RuntimeError, match="shorter than its count"):
        queue.popleft()


class Filed:
    """An entry's value; how many there are shows whether the table keeps or loses references."""


def do(table: Any, word: str, key: bytes, value: Filed) -> object:
    """One operation of a dict, or what it raises."""
    try:
        match word:
            case "set":
                table[key] = value
            case "delete":
                del table[key]
            case "setdefault":
                return table.setdefault(key, value)
            case "pop":
                return table.pop(key)
            case "pop or":
                return table.pop(key, value)
            case "get":
                return table[key], table.get(key), table.get(key, value), key in table
            case "clear":
                table.clear()
    except KeyError as error:
        return str(error)
    return None


table_words = st.sampled_from(("set", "set", "set", "setdefault", "delete", "pop", "pop or", "get", "clear"))


@settings(max_examples=300, deadline=None)
@given(
    st.sampled_from((0, 5, 40, 1000)),
    st.lists(st.tuples(table_words, st.integers(0, 40)), max_size=200),
)
def test_the_index_does_what_a_dict_does(expected: int, steps: list[tuple[str, int]]) -> None:
    table, reference = make_entries(expected), dict[bytes, Filed]()
    for word, number in steps:
        value, key = Filed(), b"key %d" % number
        if word == "clear" and number % 8:
            continue  # seldom, or nothing ever grows
        # The key of the table is equal, not the same.
        assert do(table, word, bytes(bytearray(key)), value) == do(reference, word, key, value)
        assert len(table) == len(reference)
    assert table == reference
    assert dict(table.items()) == reference
    assert sorted(table) == sorted(reference)
    assert sorted(map(id, table.values())) == sorted(map(id, reference.values()))
    assert copy.copy(table) == table.copy() == reference
    held = [sys.getrefcount(value) for value in reference.values()]
    del table
    assert [sys.getrefcount(value) for value in reference.values()] == [count - 1 for count in held]


@settings(max_examples=200, deadline=None)
@given(st.lists(st.tuples(st.booleans(), st.lists(st.integers(0, 300), max_size=80)), max_size=12))
def test_a_set_of_keys_does_what_a_set_does(steps: list[tuple[bool, list[int]]]) -> None:
    keys, reference = make_key_set(), set[bytes]()
    kept = [b"key %d" % number for number in range(301)]
    for adds, numbers in steps:
        word = "update" if adds else "difference_update"
        # Equal keys, not the same ones, from what is walked over once.
        getattr(keys, word)(bytes(bytearray(kept[number])) for number in numbers)
        getattr(reference, word)(kept[number] for number in numbers)
        assert (len(keys), bool(keys)) == (len(reference), bool(reference))
        assert {key for key in kept if key in keys} == reference
        assert sorted(keys) == sorted(reference)  # type: ignore[call-overload]


def test_the_index_stays_right_while_it_is_full_and_emptied_from_the_front() -> None:
    table = core().Index(1000)
    keys = [b"%d" % n for n in range(5000)]
    for n, key in enumerate(keys):  # never more than it expects
        table[key] = n
        if n >= 1000:
            assert table.pop(keys[n - 1000]) == n - 1000
        assert len(table) == min(n + 1, 1000)
    assert sorted(table.items()) == sorted((key, n) for n, key in enumerate(keys) if n >= 4000)
    for n in range(5000, 9000):  # far more
        table[b"%d" % n] = n
    assert [table[b"%d" % n] for n in range(4000, 9000)] == list(range(4000, 9000))
    for wrong in (1, "key", None):
        with pytest.raises(TypeError, match="bytes"):
            table[wrong] = 1
        with pytest.raises(TypeError, match="bytes"):
            table.get(wrong)
    with pytest.raises(ValueError, match="out of range"):
        core().Index(-1)
