"""Hints about how long content is worth keeping: who gives them, and what must hold of what they bring about.

Drawn apart from everything else, so that worlds without hints stay as they are.
"""

from __future__ import annotations

from typing import Any

from tests.sim.failure import require
from tests.sim.marks import Marks
from tests.sim.rng import Streams
from vllm.kv_retention import RetentionLevel
from vllm.v1.core.block_pool import BlockPool
from vllm.v1.core.block_retention import BlockRetention

SHARES = (0.1, 0.3, 0.6, 1.0)
_HINTED = 0.6
"""How many requests of a world with hints give one."""


def draw_share(seed: int) -> float:
    """How much of a pool may be protected; 0 in worlds without hints."""
    rng = Streams(seed).stream("retention")
    return rng.choice(SHARES) if rng.random() < 0.4 else 0.0


class Hints:
    """The hints of one world's requests."""

    def __init__(self, seed: int, share: float) -> None:
        self._rng = Streams(seed).stream("hints")
        self._share = share

    def draw(self) -> dict[str, Any] | None:
        """What a new request asks for."""
        rng = self._rng
        if not self._share or rng.random() > _HINTED:
            return None
        hint: dict[str, Any] = {"priority": rng.choice(("low", "normal", "high"))}
        if hint["priority"] != "low" and rng.random() < 0.5:
            hint["pin"] = True
        if rng.random() < 0.5:
            hint["ttl"] = rng.choice((0.5, 3, 20))
        if rng.random() < 0.5:
            hint["id"] = rng.choice(("v1", "v2", "v3"))
        if rng.random() < 0.4:
            hint["superseded_by"] = rng.choice(
                [name for name in ("v1", "v2", "v3") if name != hint.get("id")]
            )
        return hint


def check_retention(name: str, pool: BlockPool) -> None:
    """Claims are counted and bounded, and in the queue what is protected comes behind everything else."""
    keep = pool.placer
    if not isinstance(keep, BlockRetention):
        return
    protected = sum(hold.level.is_protected for hold in keep._owners.values())
    require(
        protected == keep.num_protected <= keep.limit,
        "I8",
        f"{name}: {protected} contents protected, {keep.num_protected} counted, {keep.limit} allowed",
    )
    sizes = (len(keep._owners), len(keep._holds))
    require(max(sizes) <= pool.num_gpu_blocks, "I8", f"{name}: {sizes} claims and holds")
    registered = all(keep._holds.get(hold.hold_id) is hold for hold in keep._owners.values())
    require(registered, "I8", f"{name}: a claim of a hold that is forgotten")
    placed = set(keep._places[RetentionLevel.HIGH]) | set(keep._places[RetentionLevel.PINNED])
    seen = False
    for block in pool.free_block_queue.get_all_free_blocks():
        if block.block_hash is None:
            continue
        seen = seen or block.block_id in placed
        require(
            not seen or block.block_id in placed,
            "I8",
            f"{name}: ordinary block {block.block_id} queued behind a protected one",
        )


def mark_retention(marks: Marks, pool: BlockPool) -> None:
    """Note what a world has reached."""
    keep = pool.placer
    if not isinstance(keep, BlockRetention):
        return
    if keep.num_protected:
        marks.hit("content protected")
    if keep.num_refused:
        marks.hit("protection refused")
    if keep._places[RetentionLevel.LOW]:
        marks.hit("content to go first")
    if keep._next_id > len(keep._holds):
        marks.hit("hold ended")


# Planted bugs, see mutants.py.


def pinned_blocks_are_kept_back(original: Any) -> Any:
    """What is pinned does not count as free: an allocation may wait for it for ever."""

    def insert(self: Any, level: RetentionLevel, blocks: list[Any]) -> None:
        original(self, level, blocks)
        if level is RetentionLevel.PINNED:
            for block in blocks:
                self._queue.remove(block)

    return insert


def places_are_never_left(original: Any) -> Any:
    """A block that was used for something else still marks where the protected part of the queue begins."""
    return lambda self, blocks: None
