"""Some tiers are emptied and the others are not: the action, what must hold right after it, and planted bugs in it."""

from __future__ import annotations

import random
from collections.abc import Collection
from typing import Any

from tests.sim.device import Memory
from tests.sim.failure import require
from tests.sim.planting import Mutant, replaced
from tests.sim.restart import Killable, carry_out_withdrawal, taint_kept
from tests.sim.step_marks import StepMarks
from vllm.v1.core.block_pool import BlockPool
from vllm.v1.core.sched.upkeep import Upkeep
from vllm.v1.metrics.cache_hit_source import CacheHitSource
from vllm.v1.simple_kv_offload.resets import TierResets

Named = tuple[str, CacheHitSource, BlockPool, list[Memory]]


class TierResetRun(Killable, StepMarks):
    """What of a run it concerns, besides its views."""

    def _do_empty(self, rng: random.Random) -> None:
        """Empty some of the tiers. Their bytes become wrong, so that whoever uses what was there is found out."""
        there = self.scheduler.cache_tiers
        wanted = rng.sample(there, rng.randint(1, len(there) - 1))
        tiers = self._tiers()
        kept_before = {name: self._entries(pool) for name, tier, pool, _ in tiers if tier not in wanted}
        self._mark(wanted)
        if CacheHitSource.DISK in wanted:
            taint_kept(self)
        for _, tier, pool, memories in tiers:
            if tier in wanted and self._has_bytes_of_its_own(tier):
                self._spoil(pool, memories)
        self.scheduler.reset_tiers(wanted)
        self._check(wanted, kept_before)
        carry_out_withdrawal(self, rng)
        self.store_excuse = self.store_excuse or "tiers emptied"
        self.must_be_stored.clear()

    def _tiers(self) -> list[Named]:
        device = ("device", CacheHitSource.DEVICE, self.device_pool, self.worker.devices)
        sources = [
            source
            for offload in self.offloads
            for source in (offload.source, *((CacheHitSource.DISK,) if offload.chain is not None else ()))
        ]
        below = zip(self.lower_pools(), sources, strict=True)
        return [device, *((name, source, pool, memories) for (name, pool, memories), source in below)]

    def _has_bytes_of_its_own(self, tier: CacheHitSource) -> bool:
        """Whether nobody but this engine uses them, and slots are not just names of them."""
        is_below = tier is not CacheHitSource.DEVICE
        return is_below and not self.params.shared and self.params.outside is None

    @staticmethod
    def _entries(pool: BlockPool) -> list[tuple[int, object]]:
        return [(block.block_id, key) for block in pool.blocks for key, _ in pool.get_keys(block)]

    def _spoil(self, pool: BlockPool, memories: list[Memory]) -> None:
        places = [block.block_id for block in pool.blocks if block.block_hash is not None]
        if self.shelf is not None:  # that pool has names only
            places = [place for place, _ in self.shelf.entries()]
        for place in places:
            for memory in memories:
                memory.page(place).poison()

    def _mark(self, wanted: Collection[CacheHitSource]) -> None:
        self.marks.hit("some tiers emptied")
        if CacheHitSource.HOST in wanted and CacheHitSource.DISK not in wanted and self.moves():
            self.marks.hit("host emptied while blocks move")
        if CacheHitSource.DISK in wanted and CacheHitSource.HOST not in wanted and self.moves():
            self.marks.hit("disk emptied while blocks move")
        if any(offload.source in wanted and offload.load_side.loads for offload in self.offloads):
            self.marks.hit("tier emptied during a load")

    def _check(self, wanted: Collection[CacheHitSource], kept_before: dict[str, list[Any]]) -> None:
        """I6: nothing of the emptied tiers is findable, everything of the others is; the report says so."""
        report = {tier.tier: tier for tier in self.scheduler.last_reset.tiers}  # type: ignore[union-attr]
        for name, tier, pool, _ in self._tiers():
            entries = self._entries(pool)
            told = report[tier]
            require(told.asked == (tier in wanted), "I6", f"{tier} was asked: the report says {told.asked}")
            if tier in wanted:
                require(not entries, "I6", f"{name} was emptied and has {entries}")
                require(told.blocks_cached == 0, "I6", f"{tier} is empty, the report says {told}")
            elif not self.params.shared or tier is CacheHitSource.DEVICE:
                before = kept_before[name]
                require(entries == before, "I6", f"{name} was left alone: had {before}, has {entries}")


def _loads_of_emptied_tiers_are_used(original: Any) -> Any:
    """PFX-14: what a load under way brings from a tier that was emptied meanwhile is used."""

    def void(self: Any, tiers: Any, *, all_of_them: bool) -> None:
        if all_of_them:
            original(self, tiers, all_of_them=True)

    return void


def _one_empties_all(original: Any) -> Any:
    """The disk goes with the host, and the host with the disk."""
    del original
    return lambda self, tiers: self.reset() if tiers else True


TIER_RESET_MUTANTS: dict[str, Mutant] = {
    "loads of emptied tiers are used": replaced(Upkeep, "_void_loads", _loads_of_emptied_tiers_are_used),
    "one empties all": replaced(TierResets, "reset_tiers", _one_empties_all),
}
