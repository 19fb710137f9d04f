"""What becomes of requests whose external loads failed.

Owns the plan; the scheduler applies it.  Must not know queues.  Layer: L5 (scheduler).
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field

from vllm.v1.core.kv_cache_manager import KVCacheManager
from vllm.v1.request import Request


@dataclass(slots=True)
class Affected:
    """A request that uses blocks whose load failed; ``position`` is its first token in one."""

    request: Request
    position: int


@dataclass(slots=True)
class RewindPlan:
    """Which affected requests are cut back where they are, and which have to start again.

    A block has one writer.  Where a block is shared, the first request recomputes it in place; the others let go of
    it and find the recomputed content by its hash.
    """

    in_place: list[Affected] = field(default_factory=list)
    restart: list[Affected] = field(default_factory=list)


def invalid_blocks_of(manager: KVCacheManager, request: Request, invalid: set[int]) -> dict[int, int]:
    """The request's invalid blocks, each with the first token it holds."""
    found: dict[int, int] = {}
    for group in manager.coordinator.single_type_managers:
        for index, block in enumerate(group.req_to_blocks.get(request.request_id, ())):
            if block.block_id in invalid:
                found[block.block_id] = index * group.block_size
    return found


def affected_by(manager: KVCacheManager, requests: Iterable[Request], invalid: set[int]) -> list[Affected]:
    """All requests that have counted a token of an invalid block as computed."""
    found = []
    for request in requests:
        blocks = invalid_blocks_of(manager, request, invalid)
        position = min(blocks.values(), default=request.num_computed_tokens)
        if position < request.num_computed_tokens:
            found.append(Affected(request, position))
    return found


def plan_rewind(
    manager: KVCacheManager, affected: list[Affected], invalid: set[int], can_cut: bool
) -> RewindPlan:
    """Share out the affected requests.  ``can_cut``: computing may start at any block border."""
    plan = RewindPlan()
    claimed: set[int] = set()
    for entry in affected:
        blocks = set(invalid_blocks_of(manager, entry.request, invalid))
        if can_cut and claimed.isdisjoint(blocks):
            plan.in_place.append(entry)
            claimed |= blocks
        else:
            plan.restart.append(entry)
    return plan
