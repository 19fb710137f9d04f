"""Planted bugs in keeping a disk over restarts; see mutants.py."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import AbstractContextManager
from typing import Any
from unittest.mock import patch

from vllm.v1.simple_kv_offload.disk_kept import KeptIndex
from vllm.v1.simple_kv_offload.metadata import KeptInventory, KeptSlot
from vllm.v1.simple_kv_offload.tier import Tier


def staged_slots_stay_kept() -> AbstractContextManager[object]:
    """A slot of the disk keeps its row while other bytes are written to it."""
    original = Tier._take

    def take(self: Tier, count: int) -> Any:
        changed, self.changed = self.changed, None
        try:
            return original(self, count)
        finally:
            self.changed = changed

    return patch.object(Tier, "_take", take)


def one_table_is_enough() -> AbstractContextManager[object]:
    """What one rank has kept is used although others have not."""
    original = KeptIndex.restore
    return patch.object(KeptIndex, "restore", lambda self, inventories: original(self, inventories[:1]))


def keys_change_places() -> AbstractContextManager[object]:
    """What is found on a disk becomes findable in the slot beside its own."""
    original = KeptIndex.restore

    def restore(self: KeptIndex, inventories: Sequence[KeptInventory]) -> int:
        return original(self, [KeptInventory(_shifted(inventory.slots)) for inventory in inventories])

    return patch.object(KeptIndex, "restore", restore)


def _shifted(slots: Sequence[KeptSlot]) -> list[KeptSlot]:
    return [KeptSlot(slot.slot, slots[place - 1].keys) for place, slot in enumerate(slots)]


def nothing_is_sent_again() -> AbstractContextManager[object]:
    """A rank that missed an order stays without its table."""
    return patch.object(KeptIndex, "resend", lambda self: None)


def reset_is_not_durable() -> AbstractContextManager[object]:
    """What a reset or an error takes back is told to the ranks with the next step only."""
    return patch.object(KeptIndex, "take_withdrawal", lambda self: None)


def bad_slots_stay_kept() -> AbstractContextManager[object]:
    """A slot that loses its content otherwise than by being used again keeps its row."""
    original = Tier.evict

    def evict(self: Tier, slots: Any) -> None:
        changed, self.changed = self.changed, None
        try:
            original(self, slots)
        finally:
            self.changed = changed

    return patch.object(Tier, "evict", evict)


KEPT_MUTANTS = {
    "reset is not durable": reset_is_not_durable,
    "bad slots stay kept": bad_slots_stay_kept,
    "staged slots stay kept": staged_slots_stay_kept,
    "one table is enough": one_table_is_enough,
    "kept keys change places": keys_change_places,
    "nothing is sent again": nothing_is_sent_again,
}
