"""Kept contents in a pool: the order of eviction by level, the limit, expiry, replaced versions, and reset."""

from __future__ import annotations

from collections.abc import Sequence

import pytest

from tests.helpers.kv_core import free_ids
from tests.helpers.retention_world import World, keys
from tests.helpers.sched import ManualClock
from vllm.kv_retention import parse_retention
from vllm.utils.checks import InvariantError
from vllm.v1.core.block_pool import BlockPool
from vllm.v1.core.block_retention import BlockRetention, can_retain
from vllm.v1.core.kv_cache_block import KVCacheBlock


def names(text: str) -> list[str]:
    return text.split()


def test_levels_go_in_their_order_whatever_came_first() -> None:
    world = World()
    world.run("p", 2, pin=True)
    world.run("n", 2)
    world.run("h", 2, priority="high")
    world.run("l", 2, priority="low")
    world.run("m", 1)
    world.run("k", 1, priority="low")
    world.run("q", 1, pin=True)
    world.run("i", 1, priority="high")
    assert world.order() == names("l1 l0 k0 n1 n0 m0 h1 h0 i0 p1 p0 q0")


def test_everything_can_be_handed_out_in_the_end() -> None:
    world = World()
    world.run("p", 6, pin=True)
    world.run("h", 6, priority="high")
    assert world.pool.get_num_free_blocks() == 12
    taken = world.pool.get_new_blocks(12)
    assert len(world.pool.index.map) == 0
    world.pool.free_blocks(taken)
    assert world.pool.get_num_free_blocks() == 12
    # The claims on what is gone make room for others as soon as it is needed.
    world.run("q", 12, pin=True)
    assert (world.keep.num_protected, world.keep.num_refused) == (12, 0)


def test_a_hit_by_somebody_else_changes_no_level() -> None:
    world = World()
    world.run("p", 2, pin=True)
    world.run("n", 2)
    world.run("p", 2)
    world.run("m", 1)
    assert world.order() == names("n1 n0 m0 p1 p0")
    # Asking for less than another asked for changes nothing, asking for more does.
    world.run("p", 2, priority="low")
    world.run("n", 1, priority="high")
    world.run("z", 1)
    assert world.order() == names("n1 m0 z0 n0 p1 p0")


def test_idle_contents_move_when_a_hint_reaches_them() -> None:
    world = World()
    world.run("a", 2)
    world.run("b", 2)
    world.keep.hold([(4, keys("a", 1)[0]), (8, keys("a", 2)[1])], parse_retention({"pin": True}), None)
    world.run("c", 1)
    assert world.order() == names("b1 b0 c0 a1 a0")


def test_beyond_the_limit_the_rest_is_ordinary_and_counted() -> None:
    world = World(share=0.25)
    assert world.keep.limit == 3
    world.run("p", 5, pin=True)
    world.run("h", 1, priority="high")
    world.run("n", 1)
    assert (world.keep.num_protected, world.keep.num_refused) == (3, 3)
    # The shortest prefixes are worth most.
    assert world.order() == names("p4 p3 h0 n0 p2 p1 p0")
    # Low priority and a plain expiry need no room.
    world.run("l", 1, priority="low")
    world.run("t", 1, ttl=5)
    assert world.keep.num_refused == 3


def test_no_share_protects_nothing() -> None:
    world = World(share=0.0)
    world.run("p", 2, pin=True)
    world.run("n", 2)
    assert world.order() == names("p1 p0 n1 n0")
    assert world.keep.num_refused == 2


def test_after_its_time_a_content_is_the_first_to_go() -> None:
    world = World()
    world.run("p", 2, pin=True, ttl=10)
    world.run("q", 2, pin=True, ttl="1m")
    world.run("n", 2)
    world.clock.now += 9.9
    world.keep.expire()
    assert world.order() == names("n1 n0 p1 p0 q1 q0")
    world.clock.now += 0.1
    world.keep.expire()
    assert world.order() == names("p1 p0 n1 n0 q1 q0")
    assert world.keep.num_protected == 2


def test_a_longer_time_wins_and_a_shorter_one_takes_nothing_away() -> None:
    world = World()
    world.run("p", 1, pin=True, ttl=10)
    world.run("p", 1, pin=True, ttl=100)
    world.run("p", 1, pin=True, ttl=20)
    world.clock.now += 50
    world.keep.expire()
    assert world.keep.num_protected == 1
    world.clock.now += 50
    world.keep.expire()
    assert world.keep.num_protected == 0


def test_what_expires_while_it_is_in_use_is_ordinary_afterwards() -> None:
    world = World()
    block = world.run("p", 1, pin=True, ttl=1)[0]
    world.pool.touch([block])
    world.clock.now += 2
    world.keep.expire()
    world.run("n", 1)
    world.pool.free_blocks([block])
    world.run("q", 1, pin=True)
    assert world.order() == names("n0 p0 q0")


def test_a_new_version_frees_what_only_the_old_one_kept() -> None:
    world = World()
    world.run("v", 3, pin=True, id="prompt")
    world.run("n", 2)
    # The new version shares its first block with the old one.
    shared = keys("v", 1)[0]
    block = world.pool.index.map.get_one_block(shared)
    assert block is not None
    world.pool.touch([block])
    world.keep.hold([(4, shared)], parse_retention({"pin": True, "id": "prompt"}), None)
    world.pool.free_blocks([block])
    assert world.order() == names("v2 v1 n1 n0 v0")
    assert world.keep.num_protected == 1


def test_a_successor_named_in_advance_frees_the_old_version() -> None:
    world = World()
    world.run("a", 2, id="turn1", superseded_by="turn2")
    world.run("n", 1)
    world.run("b", 2, id="turn2", superseded_by="turn3", priority="high")
    assert world.order() == names("a1 a0 n0 b1 b0")
    world.run("c", 1, id="turn3")
    assert world.order() == names("b1 b0 a1 a0 n0 c0")
    world.run("d", 1, id="turn1")
    assert world.order() == names("b1 b0 a1 a0 n0 c0 d0")


def test_names_of_different_scopes_do_not_meet() -> None:
    world = World()
    world.run("a", 1, scope="tenant a", pin=True, id="prompt")
    world.run("b", 1, scope="tenant b", pin=True, id="prompt")
    world.run("n", 1)
    assert world.order() == names("n0 a0 b0")


def test_a_reset_forgets_every_claim() -> None:
    world = World()
    world.run("p", 2, pin=True, ttl=5, id="x")
    assert world.pool.reset_prefix_cache()
    assert world.keep.num_protected == 0
    world.clock.now += 10
    world.keep.expire()
    world.run("n", 1)
    world.run("q", 1, id="x")
    world.run("p", 2)
    world.run("m", 1)
    assert world.order() == names("n0 q0 p1 p0 m0")


def test_protected_contents_are_not_put_in_front_after_a_copy() -> None:
    world = World()
    pinned = world.run("p", 2, pin=True)
    plain = world.run("n", 2)
    for blocks in (pinned, plain):
        world.pool.touch(blocks)
    world.pool.free_blocks_to_front([plain[1], plain[0], pinned[1], pinned[0]])
    assert world.order() == names("n1 n0 p1 p0")


def test_blocks_given_back_to_the_front_do_not_lead_others_there() -> None:
    world = World()
    pinned = world.run("p", 1, pin=True, ttl=5)
    world.run("n", 1)
    world.pool.touch(pinned)
    world.clock.now += 6
    world.keep.expire()
    world.pool.free_blocks_to_front(pinned)
    assert world.order() == names("p0 n0")
    world.run("m", 1)
    world.run("h", 1, priority="high")
    assert world.order() == names("p0 n0 m0 h0")


def test_what_lost_its_content_while_idle_marks_no_place() -> None:
    world = World()
    pinned = world.run("p", 1, pin=True)
    world.pool.evict_blocks([block.block_id for block in pinned])
    world.run("l", 1, priority="low")
    world.run("n", 1)
    world.run("h", 1, priority="high")
    world.run("m", 1)
    assert world.order() == names("l0 n0 m0 h0")


def test_many_claims_on_what_is_gone_make_room_for_as_many_new_ones() -> None:
    world = World(blocks=401)
    world.run("p", 400, pin=True)
    world.pool.free_blocks(world.pool.get_new_blocks(400))
    world.run("q", 400, pin=True)
    assert (world.keep.num_protected, world.keep.num_refused) == (400, 0)
    # Few of many are gone: they are found in time, a bounded number of claims looked at for each request.
    for _ in range(8):
        world.run("r", 100, pin=True)
    assert world.keep.num_protected == 400
    assert all(world.keep.level_of(key).is_protected for key in keys("r", 100))


def test_claims_are_bounded_by_the_pool() -> None:
    world = World(blocks=5)
    for turn in range(200):
        world.run(
            f"{turn}-", 3, priority="low", ttl=100 + turn % 7, id=f"name{turn}", superseded_by=f"next{turn}"
        )
    keep = world.keep
    assert len(keep._owners) <= 5
    assert len(keep._holds) <= 5
    assert len(keep._by_name) <= 10
    assert len(keep._expiries) <= 2 * 5 + 64


def test_only_a_queue_with_places_can_keep() -> None:
    class Other:
        num_free_blocks = 3

    pool = BlockPool(4, True, 4)
    pool.free_block_queue = Other()  # type: ignore[assignment]
    with pytest.raises(InvariantError, match="no levels"):
        BlockRetention(pool, 0.5, ManualClock())


def test_a_pool_may_refuse_places() -> None:
    class Ordered(BlockPool):
        can_place = False

    assert can_retain(BlockPool(4, True, 4))
    assert not can_retain(Ordered(4, True, 4))


def test_a_pool_without_hints_is_as_ever() -> None:
    plain, kept = BlockPool(9, True, 4), World(blocks=9)
    for pool in (plain, kept.pool):
        blocks = pool.get_new_blocks(6)
        for place, (block, key) in enumerate(zip(blocks, keys("x", 6), strict=True)):
            if place % 3:
                pool.commit_staged(block, key, 4, None)
        pool.free_blocks(_mixed(blocks))
    assert free_ids(plain) == free_ids(kept.pool)


def _mixed(blocks: Sequence[KVCacheBlock]) -> list[KVCacheBlock]:
    return [blocks[i] for i in (3, 0, 5, 1, 4, 2)]


def test_what_the_new_version_shares_stays_where_it_is() -> None:
    world = World()
    world.run("v", 3, id="prompt")
    world.run("n", 1)
    world.keep.hold([(4, keys("v", 1)[0])], parse_retention({"id": "prompt"}), None)
    assert world.order() == names("v2 v1 v0 n0")
    world.keep.hold([(4, keys("n", 1)[0])], parse_retention({"id": "prompt"}), None)
    assert world.order() == names("v0 v2 v1 n0")
