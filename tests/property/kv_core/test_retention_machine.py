"""Kept contents under random operations: the order of the queue, the limit, and that nothing is ever kept back."""

from __future__ import annotations

from typing import Any

from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from tests.helpers.retention_world import World, keys
from vllm.kv_retention import RetentionLevel
from vllm.v1.core.invariants import pool_problems
from vllm.v1.core.kv_cache_block import KVCacheBlock

NUM_BLOCKS = 12
NAMES = "abcd"
HINTS = st.fixed_dictionaries(
    {},
    optional={
        "priority": st.sampled_from(["low", "normal", "high"]),
        "ttl": st.sampled_from([1, 5, 50]),
        "id": st.sampled_from(["x", "y"]),
        "superseded_by": st.just("z"),
    },
)


class RetentionMachine(RuleBasedStateMachine):
    """A block's part of the queue is the level its content had when it came there, unless it was put in front since."""

    def __init__(self) -> None:
        super().__init__()
        self.world = World(NUM_BLOCKS + 1, share=0.5)
        self.held: list[list[KVCacheBlock]] = []
        self.level_when_queued: dict[int, RetentionLevel] = {}
        self.moved_to_front: set[int] = set()
        keep, place, in_front = self.world.keep, self.world.keep.place, self.world.keep._put_in_front

        def watched_place(blocks: Any) -> None:
            for block in blocks:
                self.moved_to_front.discard(block.block_id)
                self.level_when_queued[block.block_id] = keep.level_of(block.block_hash)
            place(blocks)

        def watched_in_front(blocks: Any) -> None:
            if not any(block in keep._places[RetentionLevel.LOW].values() for block in blocks):
                self.moved_to_front.update(
                    block.block_id
                    for block in blocks
                    if self.level_when_queued.get(block.block_id) is not RetentionLevel.LOW
                    or keep.level_of(block.block_hash) is not RetentionLevel.LOW
                )
            in_front(blocks)

        keep.place = watched_place  # type: ignore[method-assign]
        keep._put_in_front = watched_in_front  # type: ignore[method-assign]

    @rule(name=st.sampled_from(NAMES), count=st.integers(1, 4), hint=HINTS, pin=st.booleans())
    def run_request(self, name: str, count: int, hint: dict[str, Any], pin: bool) -> None:
        if self.world.pool.get_num_free_blocks() < count:
            return
        if pin and hint.get("priority") != "low":
            hint = {**hint, "pin": True}
        self.world.run(name, count, **hint)

    @rule(name=st.sampled_from(NAMES), count=st.integers(1, 4))
    def hit(self, name: str, count: int) -> None:
        found = [self.world.pool.index.map.get_one_block(key) for key in keys(name, count)]
        blocks = [block for block in found if block is not None]
        self.world.pool.touch(blocks)
        self.held.append(blocks)

    @precondition(lambda self: self.held)
    @rule(data=st.data(), to_front=st.booleans())
    def release(self, data: st.DataObject, to_front: bool) -> None:
        blocks = self.held.pop(data.draw(st.integers(0, len(self.held) - 1)))
        if to_front:
            self.moved_to_front.update(b.block_id for b in blocks if b.ref_cnt == 1)
            self.world.pool.free_blocks_to_front(blocks)
        else:
            self.world.pool.free_blocks(blocks)

    @rule(count=st.integers(1, NUM_BLOCKS))
    def allocate_and_free(self, count: int) -> None:
        if self.world.pool.get_num_free_blocks() >= count:
            self.world.pool.free_blocks(self.world.pool.get_new_blocks(count))

    @rule(name=st.sampled_from(NAMES), place=st.integers(0, 3))
    def lose_content(self, name: str, place: int) -> None:
        block = self.world.pool.index.map.get_one_block(keys(name, place + 1)[place])
        if block is not None:
            self.world.pool.evict_blocks([block.block_id])

    @rule(seconds=st.sampled_from([0.5, 2, 20]))
    def wait(self, seconds: float) -> None:
        self.world.clock.now += seconds
        self.world.keep.expire()

    @rule()
    def reset(self) -> None:
        if self.world.pool.reset_prefix_cache():
            self.level_when_queued.clear()
            self.moved_to_front.clear()

    @invariant()
    def the_queue_is_whole(self) -> None:
        assert not pool_problems(self.world.pool)
        held = {block.block_id for blocks in self.held for block in blocks}
        assert self.world.pool.get_num_free_blocks() == NUM_BLOCKS - len(held)

    @invariant()
    def parts_are_in_order(self) -> None:
        queue = self.world.pool.free_block_queue.get_all_free_blocks()
        levels = [
            self.level_when_queued[block.block_id]
            for block in queue
            if block.block_hash is not None and block.block_id not in self.moved_to_front
        ]
        assert levels == sorted(levels), levels

    @invariant()
    def the_limit_holds_and_counts_are_true(self) -> None:
        keep = self.world.keep
        protected = [hold for hold in keep._owners.values() if hold.level.is_protected]
        assert keep.num_protected == len(protected) <= keep.limit == NUM_BLOCKS // 2
        now = self.world.clock.now
        assert all(hold.expires_at > now for hold in keep._owners.values())
        assert all(hold.hold_id in keep._holds for hold in keep._owners.values())
        assert all(hold in keep._holds.values() for holds in keep._by_name.values() for hold in holds)


TestRetention = RetentionMachine.TestCase
TestRetention.settings = settings(max_examples=60, stateful_step_count=40, deadline=None)
