"""The manager under random requests, kinds and pool sizes: every read sees the bytes of its own prefix."""

from __future__ import annotations

from collections import Counter

import pytest

from tests.helpers.kv_world import World
from vllm.distributed.kv_event_types import AllBlocksCleared, BlockStored


def replay_events(world: World, residency: Counter[tuple[int | None, object]]) -> None:
    """I7: the events rebuild the index, counting equal content."""
    for event in world.kv.take_events():
        if isinstance(event, AllBlocksCleared):
            residency.clear()
            continue
        for block_hash in event.block_hashes:
            residency[event.group_idx, block_hash] += 1 if isinstance(event, BlockStored) else -1
    expected: Counter[tuple[int | None, object]] = Counter()
    for block in world.kv.block_pool.blocks:
        for key, _ in world.kv.block_pool.get_keys(block):
            expected[int.from_bytes(key[-4:], "big"), int.from_bytes(key[:-4], "big") & (2**64 - 1)] += 1
    assert +residency == expected


@pytest.mark.parametrize("first", range(0, 160, 20))
def test_bytes_behind_every_hit_are_right(first: int) -> None:
    for seed in range(first, first + 20):
        world = World(seed)
        residency: Counter[tuple[int | None, object]] = Counter()
        try:
            for _ in range(80):
                world.act()
                replay_events(world, residency)
            world.rest()
        except AssertionError as error:
            raise AssertionError(f"seed {seed}: {error}") from error


def test_the_worlds_do_hit() -> None:
    hits = 0
    for seed in range(40):
        world = World(seed)
        for _ in range(80):
            world.act()
        hits += world.hits
    assert hits > 200
