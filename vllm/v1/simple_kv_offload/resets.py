"""What the offload manager does when tiers are to be emptied: all of them, or some and not the others. Layer L4.

Owns which copies and promises end with which tier. It must not know how anything is stored, loaded or moved.
"""

from __future__ import annotations

from collections.abc import Collection

from vllm.v1.metrics.cache_hit_source import CacheHitSource
from vllm.v1.simple_kv_offload.disk_tier import DiskChain
from vllm.v1.simple_kv_offload.tier import in_turn
from vllm.v1.simple_kv_offload.views import ManagerViews


class TierResets(ManagerViews):
    """Whatever an answer says, nothing stored before is findable afterwards in an emptied tier.

    What is on the disk needs nothing of the host tier, and the other way round: a block in both is whole in each.
    So one can be emptied without the other; only copies between them end.
    """

    source: CacheHitSource
    """The tier under the device, as hits in it are booked."""
    chain: DiskChain | None
    """The disk below it."""

    @in_turn
    def reset(self) -> bool:
        """Make everything stored so far unfindable at once.

        False if copies were under way: their blocks come back when they end, their results are not
        used. Running requests go on and are stored again from here on.
        """
        disk_done = self.chain is None or self.chain.reset()
        return self._reset_own_tier() and disk_done

    @in_turn
    def reset_tiers(self, tiers: Collection[CacheHitSource]) -> bool:
        """As `reset`, for those of this manager's tiers that are named; what the others hold stays findable."""
        is_own_named = self.source in tiers
        if self.chain is None:
            return self.reset() if is_own_named else True
        is_disk_named = CacheHitSource.DISK in tiers
        if is_own_named and is_disk_named:
            return self.reset()
        if is_disk_named:
            return self.chain.reset_disk()
        if is_own_named:
            moves_done = self.chain.give_up_moves()
            return self._reset_own_tier() and moves_done
        return True

    def _reset_own_tier(self) -> bool:
        self.promises.withdraw_all()
        loads_done = self.load_side.reset()
        stores_done = self.store_side.reset()
        self.lazy_cursor_id = None
        return self.tier.invalidate() == 0 and loads_done and stores_done
