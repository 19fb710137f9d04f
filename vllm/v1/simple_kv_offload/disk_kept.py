"""The scheduler's part in keeping a disk over restarts: what changed in its tier, and what all ranks still have.

Owns which changes the ranks have been told, and which of them cannot wait for a step. It must not know files, moves or requests. Layer L4.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import islice

from vllm.logger import init_logger
from vllm.v1.simple_kv_offload.metadata import KeptInventory, KeptKeys, KeptOrder, KeptSlot
from vllm.v1.simple_kv_offload.tier import Tier
from vllm.v1.simple_kv_offload.transfer import StagedKey

logger = init_logger(__name__)

SLOTS_PER_ORDER = 1024


class KeptIndex:
    """Follows the keys of a tier's slots and says in each step which ones changed.

    Only what is findable is ever named as kept, so that a crash at any moment leaves what was findable then, or less.
    """

    def __init__(self, tier: Tier) -> None:
        self._tier = tier
        self._changed: dict[int, None] = {}
        tier.changed = self._changed
        self._told = self._withdrawn
        self._number = 0

    @property
    def _withdrawn(self) -> tuple[int, int]:
        """Rises when content is taken back that must not come back: all of it, or what an error made suspect."""
        return (self._tier.pool.epoch, self._tier.withdrawals)

    def restore(self, inventories: Sequence[KeptInventory]) -> int:
        """Make findable what every rank found on its disk under the same keys; returns how many slots.

        Call once, before the first request.
        """
        first, *others = inventories
        held = [{entry.slot: entry.keys for entry in other.slots} for other in others]
        count = 0
        for entry in first.slots:
            if all(slots.get(entry.slot) == entry.keys for slots in held) and self._is_usable(entry):
                self._tier.restore(
                    entry.slot, [StagedKey(key, num_tokens, None) for key, num_tokens in entry.keys]
                )
                count += 1
        # The ranks know what became findable; the rest of their slots they are told to forget.
        named = {entry.slot for inventory in inventories for entry in inventory.slots}
        self._changed.clear()
        self._changed.update(
            (slot, None)
            for slot in sorted(named)
            if slot < self._tier.num_blocks and self._tier.pool.blocks[slot].block_hash is None
        )
        logger.info("KV offload: %d blocks kept on the disk can be used again", count)
        return count

    def _is_usable(self, entry: KeptSlot) -> bool:
        return 0 < entry.slot < self._tier.num_blocks and not any(
            self._tier.contains(key) for key, _ in entry.keys
        )

    def resend(self) -> None:
        """A rank lost an order and has forgotten everything."""
        for block in self._tier.pool.blocks:
            if block.block_hash is not None:
                self._changed[block.block_id] = None

    def order(self) -> KeptOrder:
        """The changes for this step, as far as they fit."""
        return self._order(None if self.owes_withdrawal else SLOTS_PER_ORDER)

    def take_withdrawal(self) -> KeptOrder | None:
        """All changes, if content was withdrawn since the last order: whoever answers for that has them carried out first."""
        return self._order(None) if self.owes_withdrawal else None

    @property
    def owes_withdrawal(self) -> bool:
        """Whether the ranks would still let the next engine find something that was withdrawn."""
        return self._told != self._withdrawn

    def _order(self, limit: int | None) -> KeptOrder:
        slots = list(islice(self._changed, limit))
        for slot in slots:
            del self._changed[slot]
        self._told = self._withdrawn
        self._number += bool(slots)
        return KeptOrder(self._told[0], self._number, [KeptSlot(slot, self._keys(slot)) for slot in slots])

    def _keys(self, slot: int) -> KeptKeys:
        return self._tier.pool.get_keys(self._tier.pool.blocks[slot])

    @property
    def has_work(self) -> bool:
        """Whether the next step has something to say."""
        return self.owes_withdrawal or bool(self._changed)
