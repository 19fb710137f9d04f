"""The table that each rank keeps of its disk: what `Keeper` would write, without files and threads.

Checksums are left out on purpose: that no row tells of bytes which are being written is a property of the orders, and
must hold without them.
"""

from __future__ import annotations

from tests.sim.failure import require
from vllm.v1.simple_kv_offload.metadata import KeptInventory, KeptKeys, KeptOrder, KeptSlot


class KeptRows:
    """One rank's table: rows by slot, the one written first in front."""

    def __init__(self, rows: dict[int, KeptKeys] | None = None) -> None:
        self.rows: dict[int, KeptKeys] = rows or {}
        self.seen = KeptOrder()
        self.is_stale = False
        """A write failed: the table is as it was, and emptied with the next one that does not."""

    def bind(self, order: KeptOrder, *, fails: bool = False) -> bool:
        """Take a step's order; whether it, or one before it, was missed."""
        lost = order.number != self.seen.number + bool(order.slots)
        clears = lost or order.clears != self.seen.clears or self.is_stale
        self.seen = order
        if fails:
            self.is_stale = True
            return True
        self.is_stale = False
        if clears:
            self.rows.clear()
        for entry in order.slots:
            self.rows.pop(entry.slot, None)
            if entry.keys:
                self.rows[entry.slot] = entry.keys
        return lost

    def check_absent(self, rank: int, pairs: list[tuple[int, int]]) -> None:
        """No row tells of a slot that is about to be written, unless rows could not be written themselves."""
        kept = [] if self.is_stale else sorted(self.rows.keys() & {slot for _, slot in pairs})
        require(not kept, "I4", f"rank {rank} keeps disk slots {kept} while they are written")

    def inventory(self) -> KeptInventory:
        """What the rank tells at the start."""
        return KeptInventory([KeptSlot(slot, keys) for slot, keys in self.rows.items()])
