"""Free queue, index, pool and leases against naive models, under random operations."""

from __future__ import annotations

from random import Random

from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.stateful import (
    Bundle,
    RuleBasedStateMachine,
    consumes,
    initialize,
    invariant,
    precondition,
    rule,
)

from tests.helpers.kv_core import ids
from vllm.distributed.kv_event_types import AllBlocksCleared, BlockRemoved, BlockStored
from vllm.v1.core.block_hash import BlockHash, BlockHashWithGroupId, make_block_hash_with_group_id
from vllm.v1.core.block_index import BlockHashToBlockMap
from vllm.v1.core.block_lease import Lease
from vllm.v1.core.block_pool import BlockPool
from vllm.v1.core.free_block_queue import FreeKVCacheBlockQueue
from vllm.v1.core.invariants import pool_problems, reference_problems
from vllm.v1.core.kv_cache_block import KVCacheBlock

NUM_BLOCKS = 9
KEYS = [make_block_hash_with_group_id(BlockHash(bytes([65 + i]) * 8), i % 2) for i in range(6)]


class QueueMachine(RuleBasedStateMachine):
    """The linked list is a list, and blocks put back come behind those in front without a hash."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks = [KVCacheBlock(i) for i in range(NUM_BLOCKS)]
        self.queue = FreeKVCacheBlockQueue(self.blocks)
        self.model = list(range(NUM_BLOCKS))
        self.ages = [0] * NUM_BLOCKS
        """When each came to the tail last; 0 before anybody wants to know."""
        self.now = 0

    def _outside(self, data: st.DataObject) -> list[int]:
        outside = [i for i in range(NUM_BLOCKS) if i not in self.model]
        return data.draw(st.lists(st.sampled_from(outside), unique=True)) if outside else []

    @rule(count=st.integers(0, NUM_BLOCKS + 1))
    def pop(self, count: int) -> None:
        if count > len(self.model):
            try:
                self.queue.popleft_n(count)
            except ValueError:
                return
            raise AssertionError("popped more than there are")
        assert ids(self.queue.popleft_n(count)) == self.model[:count]
        del self.model[:count]

    @rule(data=st.data(), hashes=st.lists(st.booleans(), min_size=NUM_BLOCKS, max_size=NUM_BLOCKS))
    def append(self, data: st.DataObject, hashes: list[bool]) -> None:
        chosen = self._outside(data)
        self._hash(chosen, hashes)
        self.queue.append_n([self.blocks[i] for i in chosen])
        self.model += chosen
        if self.now:
            self._note_ages(chosen)

    def _note_ages(self, came: list[int]) -> None:
        for i in came:
            self.now += 1
            self.ages[i] = self.now

    @rule()
    def keep_ages(self) -> None:
        self.queue.keep_ages(num_blocks=NUM_BLOCKS)
        if not self.now:
            self.now = 1
            self._note_ages(self.model)

    @rule(data=st.data(), hashes=st.lists(st.booleans(), min_size=NUM_BLOCKS, max_size=NUM_BLOCKS))
    def put_by_age(self, data: st.DataObject, hashes: list[bool]) -> None:
        chosen = self._outside(data)
        self._hash(chosen, hashes)
        cached = [place for place, i in enumerate(self.model) if self.blocks[i].block_hash is not None]
        place = cached[0] if cached else len(self.model)
        self.queue.put_by_age([self.blocks[i] for i in chosen])
        for i in chosen:
            while place < len(self.model) and self.ages[self.model[place]] < self.ages[i]:
                place += 1
            self.model.insert(place, i)
            place += 1

    @rule(data=st.data())
    def prepend(self, data: st.DataObject) -> None:
        chosen = self._outside(data)
        self._hash(chosen, [False] * NUM_BLOCKS)
        self.queue.prepend_n([self.blocks[i] for i in chosen])
        self.model[:0] = chosen

    @rule(data=st.data(), hashes=st.lists(st.booleans(), min_size=NUM_BLOCKS, max_size=NUM_BLOCKS))
    def put_back(self, data: st.DataObject, hashes: list[bool]) -> None:
        chosen = self._outside(data)
        self._hash(chosen, hashes)
        cached = [place for place, i in enumerate(self.model) if self.blocks[i].block_hash is not None]
        place = cached[0] if cached else len(self.model)
        self.queue.put_back([self.blocks[i] for i in chosen])
        self.model[place:place] = chosen

    @rule(index=st.integers(0, NUM_BLOCKS - 1))
    def lose_hash(self, index: int) -> None:
        self.blocks[index].reset_hash()

    @rule(index=st.integers(0, NUM_BLOCKS - 1))
    def get_hash(self, index: int) -> None:
        self.blocks[index].block_hash = KEYS[0]
        self.queue.look_again()

    @rule()
    def clear(self) -> None:
        for block in self.blocks:
            block.reset_hash()
        self.queue.clear()

    def _hash(self, chosen: list[int], hashes: list[bool]) -> None:
        for i in chosen:
            self.blocks[i].block_hash = KEYS[0] if hashes[i] else None

    @rule(index=st.integers(0, NUM_BLOCKS - 1))
    def remove(self, index: int) -> None:
        if index in self.model:
            self.queue.remove(self.blocks[index])
            self.model.remove(index)
            return
        try:
            self.queue.remove(self.blocks[index])
        except RuntimeError:
            return
        raise AssertionError("removed a block that is not queued")

    @rule(index=st.integers(0, NUM_BLOCKS - 1))
    def walk(self, index: int) -> None:
        if index in self.model:
            after = self.model[self.model.index(index) + 1 :]
            assert ids(self.queue.iter_blocks_after(self.blocks[index])) == after

    @invariant()
    def agree(self) -> None:
        assert ids(self.queue.get_all_free_blocks()) == self.model
        assert self.queue.num_free_blocks == len(self.model)
        backwards = []
        block = self.queue.fake_free_list_tail.prev_free_block
        while block is not self.queue.fake_free_list_head:
            backwards.append(block.block_id)
            block = block.prev_free_block
        assert backwards[::-1] == self.model


class MapMachine(RuleBasedStateMachine):
    """The index is a set of (key, block) pairs."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks = [KVCacheBlock(i) for i in range(4)]
        self.map = BlockHashToBlockMap()
        self.model: dict[BlockHashWithGroupId, list[int]] = {}

    @rule(key=st.sampled_from(KEYS), index=st.integers(0, 3))
    def insert(self, key: BlockHashWithGroupId, index: int) -> None:
        self.map.insert(key, self.blocks[index])
        if index not in self.model.setdefault(key, []):
            self.model[key].append(index)

    @rule(key=st.sampled_from(KEYS), index=st.integers(0, 3))
    def pop(self, key: BlockHashWithGroupId, index: int) -> None:
        known = index in self.model.get(key, [])
        found = self.map.pop(key, index)
        assert found is (self.blocks[index] if known else None)
        if known:
            self.model[key].remove(index)
            if not self.model[key]:
                del self.model[key]

    @invariant()
    def agree(self) -> None:
        assert len(self.map) == len(self.model)
        for key in KEYS:
            one = self.map.get_one_block(key)
            assert (one is None) == (key not in self.model)
            if one is not None:
                assert one.block_id in self.model[key]
            for index in range(4):
                assert self.map.contain(key, index) == (index in self.model.get(key, []))
        registered = sorted(block.block_id for block in self.map.blocks())
        assert registered == sorted(i for held in self.model.values() for i in held)


class PoolMachine(RuleBasedStateMachine):
    """References, order of the free queue, keys and events of a pool, with leases as holders."""

    held = Bundle("held")

    @initialize(in_order=st.booleans())
    def start(self, in_order: bool) -> None:
        self.pool = BlockPool(NUM_BLOCKS, True, 4, enable_kv_cache_events=True)
        self.ages = [0] * NUM_BLOCKS
        if in_order:
            self.pool.keep_order()
            self.ages = list(range(NUM_BLOCKS))
        self.in_order = in_order
        self.free = list(range(1, NUM_BLOCKS))
        self.refs = [0] * NUM_BLOCKS
        self.keys: list[list[BlockHashWithGroupId]] = [[] for _ in range(NUM_BLOCKS)]
        self.events_residency: dict[tuple[int, int], int] = {}
        self.leases: list[Lease] = []

    def _drop(self, block_ids: list[int], to_front: bool) -> None:
        idle = []
        for block_id in block_ids:
            if block_id == 0:
                continue
            self.refs[block_id] -= 1
            if self.refs[block_id] == 0:
                idle.append(block_id)
        if to_front:  # but behind the blocks that cost nothing to reuse
            place = next((i for i, b in enumerate(self.free) if self.keys[b]), len(self.free))
            for block_id in idle:
                while place < len(self.free) and self.ages[self.free[place]] < self.ages[block_id]:
                    place += 1
                self.free.insert(place, block_id)
                place += 1
            return
        for block_id in idle:
            if self.keys[block_id]:
                self.free.append(block_id)
                self.ages[block_id] = max(self.ages) + self.in_order
        self.free[:0] = [b for b in idle if not self.keys[b]]

    @rule(target=held, count=st.integers(0, 4))
    def allocate(self, count: int) -> Lease | None:
        if count > len(self.free):
            try:
                self.pool.get_new_blocks(count)
            except ValueError:
                return None
            raise AssertionError("took more than there are")
        blocks = self.pool.get_new_blocks(count)
        assert ids(blocks) == self.free[:count]
        del self.free[:count]
        for block in blocks:
            self.refs[block.block_id] = 1
            self.keys[block.block_id] = []
        return Lease.adopt(self.pool, blocks, "test")

    @rule(target=held, chosen=st.lists(st.integers(0, NUM_BLOCKS - 1), max_size=4), to_front=st.booleans())
    def touch(self, chosen: list[int], to_front: bool) -> Lease:
        for block_id in chosen:
            if block_id and self.refs[block_id] == 0:
                self.free.remove(block_id)
            if block_id:
                self.refs[block_id] += 1
        return Lease(self.pool, [self.pool.blocks[i] for i in chosen], "test", to_front=to_front)

    @rule(lease=consumes(held))
    def release(self, lease: Lease | None) -> None:
        if lease is not None:
            block_ids = ids(lease.blocks)
            lease.release()
            self._drop(block_ids if lease.to_front else block_ids[::-1], lease.to_front)

    @rule(lease=held, cut=st.integers(0, 4))
    def shorten(self, lease: Lease | None, cut: int) -> None:
        if lease is not None and lease.held and cut <= len(lease.blocks):
            block_ids = ids(lease.blocks)[cut:]
            lease.shorten(cut)
            self._drop(block_ids if lease.to_front else block_ids[::-1], lease.to_front)

    @rule(target=held, lease=held, cut=st.integers(0, 4))
    def split(self, lease: Lease | None, cut: int) -> Lease | None:
        if lease is None or not lease.held or cut > len(lease.blocks):
            return None
        whole = ids(lease.blocks)
        head = lease.split(cut)
        assert (ids(head.blocks), ids(lease.blocks)) == (whole[:cut], whole[cut:])
        return head

    @rule(index=st.integers(1, NUM_BLOCKS - 1), key=st.sampled_from(KEYS))
    def commit(self, index: int, key: BlockHashWithGroupId) -> None:
        if self.refs[index] == 0 or key in self.keys[index]:
            return
        self.pool.commit_staged(self.pool.blocks[index], key, 4, None)
        self.keys[index].append(key)

    @rule(index=st.integers(0, NUM_BLOCKS - 1))
    def evict(self, index: int) -> None:
        self.pool.evict_blocks([index])
        self.keys[index] = []

    @rule(source=st.integers(1, NUM_BLOCKS - 1), into=st.integers(1, NUM_BLOCKS - 1))
    def move(self, source: int, into: int) -> None:
        if source != into and not self.keys[into]:
            self.pool.move_block_hashes(self.pool.blocks[source], self.pool.blocks[into])
            self.keys[into], self.keys[source] = self.keys[source], []

    @rule()
    def reset(self) -> None:
        done = self.pool.reset_prefix_cache()
        assert done == (not any(self.refs))
        if done:
            self.keys = [[] for _ in range(NUM_BLOCKS)]

    @precondition(lambda self: any(self.keys))
    @rule()
    def invalidate(self) -> None:
        assert self.pool.invalidate_prefix_cache() == sum(ref > 0 for ref in self.refs)
        self.keys = [[] for _ in range(NUM_BLOCKS)]

    @invariant()
    def agree(self) -> None:
        if not hasattr(self, "pool"):
            return
        assert [block.ref_cnt for block in self.pool.blocks] == self.refs
        assert ids(self.pool.free_block_queue.get_all_free_blocks()) == self.free
        for block in self.pool.blocks:
            assert [key for key, _ in self.pool.get_keys(block)] == self.keys[block.block_id]
        assert pool_problems(self.pool) == []
        assert reference_problems(self.pool, []) == []

    @invariant()
    def events_rebuild_the_index(self) -> None:
        if not hasattr(self, "pool"):
            return
        for event in self.pool.take_events():
            if isinstance(event, AllBlocksCleared):
                self.events_residency.clear()
                continue
            assert isinstance(event, BlockStored | BlockRemoved)
            change = 1 if isinstance(event, BlockStored) else -1
            for block_hash in event.block_hashes:
                place = (event.group_idx, block_hash)
                self.events_residency[place] = self.events_residency.get(place, 0) + change
                assert self.events_residency[place] >= 0
        expected: dict[tuple[int, int], int] = {}
        for held in self.keys:
            for key in held:
                place = (key[-1], int.from_bytes(key[:-4], "big"))
                expected[place] = expected.get(place, 0) + 1
        assert {place: n for place, n in self.events_residency.items() if n} == expected


@settings(max_examples=200, deadline=None)
@given(
    st.integers(1, 12),
    st.lists(st.tuples(st.sets(st.integers(0, 11)), st.integers(0, 3)), max_size=5),
    st.randoms(use_true_random=False),
)
def test_what_is_copied_gets_its_place_back(
    count: int, lends: list[tuple[set[int], int]], rng: Random
) -> None:
    """Leases take any blocks of the queue and end in any order, while others are handed out or used."""
    pool = BlockPool(count + 1, True, 4)
    for block in pool.blocks[1:]:
        pool._insert_block_hash(KEYS[0], block, 4)
    pool.keep_order()
    queue = pool.free_block_queue
    order = list(range(1, count + 1))  # of all that are queued or lent
    leases = []
    for places, use in lends:
        queued = queue.get_all_free_blocks()
        leases.append(Lease(pool, [b for i, b in enumerate(queued) if i in places], "copy", to_front=True))
        queued = queue.get_all_free_blocks()
        if use == 1 and queued:
            order.remove(pool.get_new_blocks(1)[0].block_id)  # never comes back
        elif use == 2 and queued:
            used = rng.choice(queued)
            pool.touch([used])
            pool.free_blocks([used])
            order.remove(used.block_id)
            order.append(used.block_id)
        elif use == 3:
            leases.pop(rng.randrange(len(leases))).release()
    rng.shuffle(leases)
    for lease in leases:
        lease.release()
    assert ids(queue.get_all_free_blocks()) == order


TestQueue = QueueMachine.TestCase
TestMap = MapMachine.TestCase
TestPool = PoolMachine.TestCase
TestQueue.settings = settings(max_examples=60, stateful_step_count=40, deadline=None)
TestMap.settings = settings(max_examples=60, stateful_step_count=40, deadline=None)
TestPool.settings = settings(max_examples=120, stateful_step_count=40, deadline=None)
