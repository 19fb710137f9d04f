"""The ARC order of a tier against the paper's algorithm written down plainly, and what must hold beside held slots."""

from __future__ import annotations

import random
from collections import Counter
from itertools import accumulate

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from vllm.v1.core.block_hash import BlockHash, BlockHashWithGroupId, make_block_hash_with_group_id
from vllm.v1.core.block_pool import BlockPool
from vllm.v1.core.kv_cache_block import KVCacheBlock
from vllm.v1.simple_kv_offload.arc import ArcQueue
from vllm.v1.simple_kv_offload.eviction import EvictionQueue, eviction_queue


class PlainArc:
    """Figure 4 of Megiddo and Modha, FAST 2003, with lists that are searched; the last entry is the youngest."""

    def __init__(self, capacity: int) -> None:
        self.c, self.p = capacity, 0.0
        self.t1: list[int] = []
        self.t2: list[int] = []
        self.b1: list[int] = []
        self.b2: list[int] = []

    def access(self, x: int) -> bool:
        c, t1, t2, b1, b2 = self.c, self.t1, self.t2, self.b1, self.b2
        if x in t1 or x in t2:
            (t1 if x in t1 else t2).remove(x)
            t2.append(x)
            return True
        if x in b1:
            self.p = min(float(c), self.p + max(1.0, len(b2) / len(b1)))
            self._replace(x)
            b1.remove(x)
            t2.append(x)
            return False
        if x in b2:
            self.p = max(0.0, self.p - max(1.0, len(b1) / len(b2)))
            self._replace(x)
            b2.remove(x)
            t2.append(x)
            return False
        if len(t1) + len(b1) == c:
            if len(t1) < c:
                b1.pop(0)
                self._replace(x)
            else:
                t1.pop(0)
        elif len(t1) + len(t2) + len(b1) + len(b2) >= c:
            if len(t1) + len(t2) + len(b1) + len(b2) == 2 * c:
                b2.pop(0)
            self._replace(x)
        t1.append(x)
        return False

    def _replace(self, x: int) -> None:
        if self.t1 and (len(self.t1) > self.p or (x in self.b2 and len(self.t1) == self.p)):
            self.b1.append(self.t1.pop(0))
        else:
            self.b2.append(self.t2.pop(0))


def key_of(x: int) -> BlockHashWithGroupId:
    return make_block_hash_with_group_id(BlockHash(x.to_bytes(8, "big")), 0)


class Cache:
    """A pool whose slots are filled one after the other, as a tier does it."""

    def __init__(self, policy: str, capacity: int) -> None:
        self.pool = BlockPool(capacity + 1, True, 4, make_free_queue=eviction_queue(policy))
        queue = self.pool.free_block_queue
        assert isinstance(queue, EvictionQueue)
        self.queue = queue

    def find(self, x: int) -> KVCacheBlock | None:
        return self.pool.cached_block_hash_to_block.get_one_block(key_of(x))

    def access(self, x: int) -> bool:
        block = self.find(x)
        if block is not None:
            # A lease while it is read, as for a load; then it is let go.
            self.queue.used([block])
            self.pool.touch([block])
            self.pool.free_blocks([block])
            return True
        self.queue.missed([key_of(x)])
        self.queue.incoming([key_of(x)])
        (slot,) = self.pool.get_new_blocks(1)
        self.pool.commit_staged(slot, key_of(x), None, None)
        self.pool.free_blocks([slot])
        return False


@settings(max_examples=150, deadline=None)
@given(st.integers(1, 8), st.lists(st.integers(0, 20), max_size=200))
def test_it_is_the_algorithm_of_the_paper(capacity: int, trace: list[int]) -> None:
    plain, cache = PlainArc(capacity), Cache("arc", capacity)
    assert isinstance(cache.queue, ArcQueue)
    for x in trace:
        assert cache.access(x) == plain.access(x)
        assert cache.queue.target == plain.p
        assert cache.queue.sizes == (len(plain.t1), len(plain.t2), len(plain.b1), len(plain.b2))
        resident = {y for y in range(21) if cache.find(y) is not None}
        assert resident == {*plain.t1, *plain.t2}
        assert [list(ghosts) for ghosts in cache.queue._ghosts[1:]] == [
            [key_of(y) for y in plain.b1],
            [key_of(y) for y in plain.b2],
        ]


Action = tuple[str, int, int]
ACTIONS = st.lists(
    st.tuples(
        st.sampled_from(("store", "hold", "release", "use", "drop", "clear")),
        st.integers(0, 30),
        st.integers(0, 6),
    ),
    max_size=120,
)


@settings(max_examples=150, deadline=None)
@given(st.integers(1, 10), ACTIONS)
def test_held_slots_stay_and_slots_come_as_shown(capacity: int, actions: list[Action]) -> None:
    cache = Cache("arc", capacity)
    pool, queue = cache.pool, cache.queue
    assert isinstance(queue, ArcQueue)
    held: list[KVCacheBlock] = []
    for name, x, count in actions:
        if name == "store":
            keys = [
                key_of((x + i) % 31)
                for i in range(min(count, queue.num_free_blocks))
                if cache.find((x + i) % 31) is None
            ]
            queue.missed(keys[::2])
            victims, shown = queue.victims(), []
            for key in keys:
                shown.append(victims.peek())
                victims.take(key)
            queue.incoming(keys)
            slots = pool.get_new_blocks(len(keys))
            assert slots == shown
            assert not {id(slot) for slot in slots} & {id(block) for block in held}
            for i, (slot, key) in enumerate(zip(slots, keys, strict=True)):
                if i % 3 != 2:  # every third copy fails
                    pool.commit_staged(slot, key, None, None)
            pool.free_blocks(slots)
        elif name == "hold" and (block := cache.find(x)) is not None:
            pool.touch([block])
            held.append(block)
        elif name == "release" and held:
            block = held.pop(count % len(held))
            (pool.free_blocks if x % 2 else pool.free_blocks_to_front)([block])
        elif name == "use" and (block := cache.find(x)) is not None:
            queue.used([block])
        elif name == "drop" and (block := cache.find(x)) is not None:
            pool.evict_blocks([block.block_id])
        elif name == "clear":
            pool.invalidate_prefix_cache()
            queue.clear()
        order = queue.get_all_free_blocks()
        assert len(order) == queue.num_free_blocks == sum(block.ref_cnt == 0 for block in pool.blocks[1:])
        assert {block.block_id for block in order} == {b.block_id for b in pool.blocks[1:] if b.ref_cnt == 0}
        once, again, ghosts_once, ghosts_again = queue.sizes
        assert once + again <= capacity
        assert ghosts_once + ghosts_again <= capacity
        assert len(queue._home) == once + again
        assert 0 <= queue.target <= capacity


def test_a_slot_that_comes_back_unused_keeps_its_place() -> None:
    """OFF-06 for a tier: being copied down is no sign of use, in whichever list the slot is."""
    cache = Cache("arc", 4)
    for x in (1, 2, 3, 4, 1, 3):
        cache.access(x)
    before = [block.block_id for block in cache.queue.get_all_free_blocks()]
    copied = cache.queue.get_all_free_blocks()[:3]
    cache.pool.touch(copied)
    cache.pool.free_blocks_to_front(copied)
    assert [block.block_id for block in cache.queue.get_all_free_blocks()] == before


def scan_polluted_trace(length: int, hot: int, seed: int) -> list[int]:
    """Zipf over ``hot`` keys (exponent 1), and every 200 accesses a scan of 100 keys that never come back."""
    rng = random.Random(seed)
    weights = list(accumulate(1 / rank for rank in range(1, hot + 1)))
    trace: list[int] = []
    fresh = hot
    while len(trace) < length:
        trace += rng.choices(range(hot), cum_weights=weights, k=200)
        trace += range(fresh, fresh + 100)
        fresh += 100
    return trace


@pytest.mark.parametrize("capacity", [50, 100, 200])
def test_scans_do_not_push_out_what_comes_back(capacity: int) -> None:
    trace = scan_polluted_trace(12_000, hot=400, seed=1)
    hits: Counter[str] = Counter()
    for policy in ("lru", "arc"):
        cache = Cache(policy, capacity)
        hits[policy] = sum(cache.access(x) for x in trace)
    assert hits["arc"] > hits["lru"] * 1.05, hits


def test_unknown_policies_are_refused_by_name() -> None:
    with pytest.raises(ValueError, match="eviction_policy 'lifo'.*arc, lru"):
        eviction_queue("lifo")
    with pytest.raises(ValueError, match="is no EvictionQueue"):
        eviction_queue("collections:OrderedDict")
    for name in ("no_such_module:Queue", "collections:NoQueue"):
        with pytest.raises(ValueError, match=f"eviction_policy='{name}' cannot be loaded"):
            eviction_queue(name)
    assert eviction_queue("vllm.v1.simple_kv_offload.arc:ArcQueue") is ArcQueue
