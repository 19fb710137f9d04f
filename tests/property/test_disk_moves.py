"""Moves between host and disk end while nothing else happens, however they overlap and whatever is protected."""

from __future__ import annotations

import random
from collections.abc import Sequence
from types import SimpleNamespace
from typing import Any, cast

import pytest

from tests.helpers.offload_rig import full
from tests.helpers.sched import ManualClock
from vllm.kv_retention import parse_retention
from vllm.v1.core.block_hash import BlockHash, BlockHashWithGroupId, make_block_hash_with_group_id
from vllm.v1.core.block_retention import BlockRetention, can_retain
from vllm.v1.core.invariants import pool_problems
from vllm.v1.core.kv_cache_block import KVCacheBlock
from vllm.v1.kv_cache_interface import KVCacheConfig, KVCacheGroupSpec
from vllm.v1.simple_kv_offload.disk_kept import KeptIndex
from vllm.v1.simple_kv_offload.disk_tier import DiskChain, DiskSettings
from vllm.v1.simple_kv_offload.metadata import INVALID_JOB_ID
from vllm.v1.simple_kv_offload.tier import Tier, TierGeometry
from vllm.v1.simple_kv_offload.transfer import StagedKey


def key_of(number: int) -> BlockHashWithGroupId:
    return make_block_hash_with_group_id(BlockHash(number.to_bytes(8, "big")), 0)


def tier(slots: int, policy: str) -> Tier:
    config = KVCacheConfig(1, [], [KVCacheGroupSpec(["layer"], full())])
    return Tier(config, TierGeometry(slots + 1, "CPU", 4, 4, 64, 64, False, 1, 1, 0, False, False, policy))


class Chain:
    """Two tiers, contents that are stored in the upper one, and moves whose ends take their time."""

    def __init__(self, rng: random.Random, policy: str, *, is_kept: bool) -> None:
        self.rng = rng
        self.host = tier(rng.randint(3, 24), policy)
        self.disk = tier(rng.randint(2, 24), "lru")
        settings = DiskSettings(4, 1, rng.randint(1, 24), 1.0, is_kept)
        self.chain = DiskChain(
            self.host, self.disk, lambda *_: ((), 0), settings, ManualClock(), cast(Any, SimpleNamespace())
        )
        self.kept = KeptIndex(self.disk) if is_kept else None
        self.clock = ManualClock()
        self.keep = BlockRetention(self.host.pool, 0.7, self.clock) if can_retain(self.host.pool) else None
        if self.keep is not None:
            self.host.pool.placer = self.keep
        self.open: list[int] = []
        self.held: list[list[KVCacheBlock]] = []
        self.delay = 0.8 * rng.random()
        self.stored = 0

    def store(self) -> None:
        """Some new contents, or ones that were there before."""
        count = self.rng.randint(1, max(1, self.host.num_stageable // 2))
        numbers = [self.rng.choice((self.stored + i, self.rng.randint(0, self.stored))) for i in range(count)]
        self.stored += count
        keys = [key for key in dict.fromkeys(map(key_of, numbers)) if not self.host.contains(key)]
        if len(keys) > self.host.num_stageable:
            return
        slots = self.host.stage(len(keys), keys)
        for slot, key in zip(slots, keys, strict=True):
            self.host.commit(slot, (StagedKey(key, None, None),))
        level = self.rng.choice(("low", "normal", "normal", "high", "pin"))
        if self.keep is not None and level != "normal":
            hint = {"pin": True} if level == "pin" else {"priority": level}
            self.keep.hold(list(enumerate(keys)), parse_retention(hint), None)
        self.held.append(slots)
        while len(self.held) > 2:
            self.let_go()

    def let_go(self) -> None:
        """A copy into the upper tier has ended."""
        self.host.pool.free_blocks(self.held.pop(self.rng.randrange(len(self.held))))

    def use(self) -> None:
        """Somebody reads a content."""
        block = self.host.get(key_of(self.rng.randint(0, self.stored)))
        if block is not None:
            self.host.used((block,))
            self.host.refresh((block,))

    def step(self) -> None:
        self.chain.plan()
        if self.kept is not None:
            self.kept.order()
        event = self.chain.down.submit().event
        if event != INVALID_JOB_ID:
            self.open.append(event)
        while self.open and (len(self.open) > 2 or self.rng.random() > self.delay):
            ended = self.open.pop(0)
            self.chain.report_down({ended: 1}, ok=True)
        for one in (self.host, self.disk):
            assert not pool_problems(one.pool)


@pytest.mark.parametrize("policy", ["lru", "arc"])
@pytest.mark.parametrize("is_kept", [False, True])
def test_moves_end_when_nothing_else_happens(policy: str, is_kept: bool) -> None:
    for seed in range(100):
        world = Chain(random.Random(f"{seed} {policy} {is_kept}"), policy, is_kept=is_kept)
        for _ in range(12):
            world.store()
            for _ in range(world.rng.randint(0, 3)):
                world.step()
            world.use()
        while world.held:
            world.let_go()
        before = world.chain.down.ledger.scheduled
        queued = world.host.num_blocks
        for _ in range(8 * queued):
            if not world.chain.has_work:
                break
            world.step()
        moved = world.chain.down.ledger.scheduled - before
        assert not world.chain.has_work, f"seed {seed}: still moving after {moved} moves"
        # Each content goes down once at most; on a kept disk once for its eviction and once as a new one.
        assert moved <= 2 * queued, f"seed {seed}: {moved} moves of {queued} slots"


def test_moves_that_overlap_do_not_take_turns() -> None:
    """Found by the simulator (seed 50537 of commit a073d46): each move that ended put all that it had seen in front,
    and the disk was smaller than what two of them had seen: content went down at the cost of the other's, for ever.
    """
    host, disk = tier(14, "lru"), tier(8, "lru")
    chain = DiskChain(
        host,
        disk,
        lambda *_: ((), 0),
        DiskSettings(4, 1, 16, 1.0),
        ManualClock(),
        cast(Any, SimpleNamespace()),
    )

    def fill(one: Tier, numbers: Sequence[int]) -> None:
        slots = one.stage(len(numbers))
        for slot, number in zip(slots, numbers, strict=True):
            one.commit(slot, (StagedKey(key_of(number), None, None),))
        one.pool.free_blocks(slots)

    def order() -> list[int]:
        queued = host.pool.free_block_queue.get_all_free_blocks()
        return [int.from_bytes(block.block_hash[:8], "big") for block in queued if block.block_hash]

    fill(host, range(14))
    fill(disk, (7, 8, 0, 1, 2, 4, 5, 6))
    open_events: list[int] = []
    for step in range(40):
        chain.plan()
        event = chain.down.submit().event
        if event != INVALID_JOB_ID:
            open_events.append(event)
        if step == 0:
            assert chain.down.num_blocks == 1
            # What is read while the move of 3 is under way is no next victim any more.
            host.refresh([block for number in (4, 5) if (block := host.get(key_of(number))) is not None])
        elif len(open_events) > 1 or not chain.down.planned:
            for ended in open_events[:1]:
                chain.report_down({ended: 1}, ok=True)
            del open_events[:1]
    assert order()[-2:] == [4, 5], "what was read meanwhile stays young"
    assert sorted(order()[:7]) == [0, 1, 2, 3, 6, 7, 8]
    assert not chain.has_work
    assert chain.down.ledger.scheduled == 2, "3, and 7, which it drove out"
