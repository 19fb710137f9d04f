"""What becomes of requests whose external loads failed.

Owns the search for everything that failed loads have spoilt, and the plan; the scheduler applies it.  Must not know
queues.  Layer: L5 (scheduler).
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field

from vllm.v1.core.kv_cache_manager import KVCacheManager
from vllm.v1.core.sched.in_flight import BlockUse
from vllm.v1.request import Request


@dataclass(slots=True)
class Affected:
    """A request that has counted spoilt content as computed; ``position`` is the first such token."""

    request: Request
    position: int
    blocks: set[int]


@dataclass(slots=True)
class Damage:
    """All that a failure has spoilt: blocks, live requests, and ids of requests that have let go of theirs."""

    blocks: set[int]
    affected: list[Affected] = field(default_factory=list)
    departed_ids: set[str] = field(default_factory=set)


@dataclass(slots=True)
class RewindPlan:
    """Which affected requests are cut back where they are, and which have to start again.

    A block has one writer.  Where a block is shared, the first request recomputes it in place; the others let go of
    it and find the recomputed content by its hash.
    """

    in_place: list[Affected] = field(default_factory=list)
    restart: list[Affected] = field(default_factory=list)


def block_use(manager: KVCacheManager, request_id: str) -> BlockUse:
    """The blocks the request holds."""
    positions: dict[int, int] = {}
    for group in manager.coordinator.single_type_managers:
        for index, block in enumerate(group.req_to_blocks.get(request_id, ())):
            if not block.is_null:
                positions[block.block_id] = index * group.block_size
    return BlockUse(request_id, positions)


def assess(
    manager: KVCacheManager, requests: Iterable[Request], departed: Iterable[BlockUse], invalid: set[int]
) -> Damage:
    """Follow the damage: whoever used an invalid block has written spoilt content after it, which others may have
    found by its hash.  ``departed`` are tables that were given back meanwhile.
    """
    damage = Damage(set(invalid))
    live = [(request, block_use(manager, request.request_id)) for request in requests]
    gone = list(departed)
    spreads = True
    while spreads:
        spreads = False
        for entry in list(live):
            position = _first_spoilt(entry[1], damage.blocks)
            if position is None or position >= entry[0].num_computed_tokens:
                continue
            spoilt = {block for block, start in entry[1].positions.items() if start >= position}
            damage.affected.append(Affected(entry[0], position, spoilt))
            damage.blocks |= spoilt
            live.remove(entry)
            spreads = True
        for use in list(gone):
            position = _first_spoilt(use, damage.blocks)
            if position is None:
                continue
            damage.blocks |= {block for block, start in use.positions.items() if start >= position}
            damage.departed_ids.add(use.request_id)
            gone.remove(use)
            spreads = True
    return damage


def _first_spoilt(use: BlockUse, spoilt: set[int]) -> int | None:
    return min((start for block, start in use.positions.items() if block in spoilt), default=None)


def plan_rewind(affected: list[Affected], can_cut: bool) -> RewindPlan:
    """Share out the affected requests.  ``can_cut``: computing may start at any block border."""
    plan = RewindPlan()
    claimed: set[int] = set()
    for entry in affected:
        if can_cut and claimed.isdisjoint(entry.blocks):
            plan.in_place.append(entry)
            claimed |= entry.blocks
        else:
            plan.restart.append(entry)
    return plan
