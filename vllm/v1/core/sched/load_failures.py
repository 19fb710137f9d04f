"""What becomes of requests whose external loads, or whose steps, have failed.

Owns the search for everything a failure has spoilt, and the plan; the scheduler applies it.  Must not know queues.
Layer: L5 (scheduler).
"""

from __future__ import annotations

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
    """How affected requests go back to the last token before the damage.

    A block has one writer: where spoilt blocks are shared, the first request recomputes them ``in_place``, and the
    others go back to the same token ``with_own_blocks``.  Where computing cannot start at any block border, requests
    ``restart`` and find what is left by its hashes.
    """

    in_place: list[Affected] = field(default_factory=list)
    with_own_blocks: list[Affected] = field(default_factory=list)
    restart: list[Affected] = field(default_factory=list)


def block_use(manager: KVCacheManager, request: Request) -> BlockUse:
    """The blocks the request holds."""
    spans: dict[int, tuple[int, int]] = {}
    for group in manager.coordinator.single_type_managers:
        size = group.block_size
        for index, block in enumerate(group.req_to_blocks.get(request.request_id, ())):
            if not block.is_null:
                spans[block.block_id] = (index * size, (index + 1) * size)
    return BlockUse(request.request_id, request.num_confirmed_tokens, spans)


@dataclass(slots=True)
class Reach:
    """How damage can spread: tables of live requests, tables given back (or of ended requests), and block copies."""

    live: list[tuple[Request, BlockUse]]
    departed: list[BlockUse]
    copies: list[tuple[int, int]]


def assess(reach: Reach, spoilt: set[int]) -> Damage:
    """Follow the damage from the ``spoilt`` blocks on: whoever used one has written spoilt content after it, which
    others may have found by its hash or which was copied.
    """
    damage = Damage(set(spoilt))
    known = -1
    while known != len(damage.blocks) + len(damage.affected) + len(damage.departed_ids):
        known = len(damage.blocks) + len(damage.affected) + len(damage.departed_ids)
        damage.blocks |= {target for source, target in reach.copies if source in damage.blocks}
        for entry in list(reach.live):
            request, use = entry
            position = use.first_in(damage.blocks)
            if position is not None and position < request.num_computed_tokens:
                blocks = use.blocks_after(position)
                damage.affected.append(Affected(request, position, blocks))
                damage.blocks |= blocks
                reach.live.remove(entry)
        for use in list(reach.departed):
            position = use.first_in(damage.blocks)
            if position is not None:
                damage.blocks |= use.blocks_after(position)
                damage.departed_ids.add(use.request_id)
                reach.departed.remove(use)
    return damage


def plan_rewind(affected: list[Affected], can_cut: bool) -> RewindPlan:
    """Share out the affected requests.  ``can_cut``: computing may start at any block border."""
    if not can_cut:
        return RewindPlan(restart=affected)
    plan = RewindPlan()
    claimed: set[int] = set()
    for entry in affected:
        if claimed.isdisjoint(entry.blocks):
            plan.in_place.append(entry)
            claimed |= entry.blocks
        else:
            plan.with_own_blocks.append(entry)
    return plan
