"""Finds blocks of running requests that the tier has evicted since they were stored.

Owns the walk behind the cursors and which slots a running request counts on. It plans nothing. Layer L4.
"""

from __future__ import annotations

from collections.abc import Sequence

from vllm.v1.core.block_hash import BlockHashWithGroupId
from vllm.v1.core.kv_cache_block import KVCacheBlock
from vllm.v1.simple_kv_offload.selection import Selection
from vllm.v1.simple_kv_offload.store_policy import (
    BlockTable,
    StoreRequestState,
    Stores,
    expected_keys,
    find_source,
)

BLOCKS_PER_STEP = 64
"""Positions examined per request and step."""
REQUESTS_PER_STEP = 4
"""Requests whose turn it is in a step."""
ROUNDS_PER_TURNOVER = 4
"""Rounds over a request's blocks while the tier evicts as many slots as it has, if nothing happens to those blocks."""


class HolePatrol:
    """Re-examines a bounded part of some running requests per step, where copies may have gone.

    Slots that a running request counts on are *guarded*: filling one hole never digs another, so two
    requests cannot evict each other for ever. First-time stores may take the guarded slots of others. What requests of
    other engines count on is not known: there a hole is filled over their content once per request and block.
    """

    def __init__(self, guarded: dict[int, BlockHashWithGroupId] | None = None) -> None:
        """``guarded``: where guards are kept, see `Tier.guarded`."""
        self._guarded: dict[int, BlockHashWithGroupId] = {} if guarded is None else guarded
        # How many requests have guarded each slot and not been dismissed.
        self._holders: dict[int, int] = {}
        self._dismissals = 0
        self._turn = 0

    def guard(self, state: StoreRequestState, slot: KVCacheBlock) -> None:
        """The request counts on what the slot holds now. Ends with `dismiss`."""
        if slot.block_hash is None:
            state.may_lack_copies = True
            return
        self._guarded[slot.block_id] = slot.block_hash
        if slot.block_id not in state.guarded_slots:
            state.guarded_slots.add(slot.block_id)
            self._holders[slot.block_id] = self._holders.get(slot.block_id, 0) + 1

    def dismiss(self, state: StoreRequestState) -> None:
        """The request counts on nothing any more. What others count on stays guarded."""
        for slot_id in state.guarded_slots:
            self._holders[slot_id] -= 1
            if not self._holders[slot_id]:
                del self._holders[slot_id]
                self._guarded.pop(slot_id, None)
        state.guarded_slots.clear()
        self._dismissals += 1

    def counts_on(self, state: StoreRequestState, slot: KVCacheBlock) -> bool:
        """Whether the slot still holds what this request guards."""
        return slot.block_id in state.guarded_slots and self._is_guarded(slot)

    def __len__(self) -> int:
        return len(self._guarded)

    def turns(self, request_ids: Sequence[str]) -> Sequence[str]:
        """The requests to examine in this step; over the steps each gets its turn."""
        if len(request_ids) <= REQUESTS_PER_STEP:
            return request_ids
        start, self._turn = self._turn, self._turn + REQUESTS_PER_STEP
        return [request_ids[(start + i) % len(request_ids)] for i in range(REQUESTS_PER_STEP)]

    def has_work(self, stores: Stores, state: StoreRequestState) -> bool:
        """Whether a round over this request's blocks is under way or due.

        One is due when the tier has lost something that a running request counts on. Where that would not tell,
        because the request may lack copies already, every eviction and every slot that another request lets go of
        counts. Else now and then, so that the request's slots stay young.
        """
        if state.patrol_from:
            return True
        losses, dismissals, evictions = state.changes_seen
        evicted = stores.tier.evictions - evictions
        if losses != self._num_losses(stores):
            return True
        if state.may_lack_copies and (evicted or dismissals != self._dismissals):
            return stores.tier.evictions > 0
        return evicted >= max(1, stores.tier.num_blocks // ROUNDS_PER_TURNOVER)

    def skip(self, stores: Stores, state: StoreRequestState) -> None:
        """No round is due for this request, whatever has happened so far."""
        self._note_changes(stores, state)
        state.patrol_from = []

    def select_holes(
        self,
        stores: Stores,
        state: StoreRequestState,
        table: BlockTable,
        groups: Sequence[int],
        chosen: Selection,
    ) -> None:
        """Choose blocks behind the cursors that have no copy any more, as far as unguarded slots last.

        Goes on with the round under way, else begins one over all groups. Slots that are still present become the
        youngest of the tier, the request's first blocks last.
        """
        if not state.patrol_from:
            self._begin(stores, state)
        present: list[KVCacheBlock] = []
        missing: list[tuple[int, BlockHashWithGroupId]] = []
        budget = BLOCKS_PER_STEP
        for group in groups:
            last = min(state.patrol_from[group], len(table[group]) - 1)
            first = max(-1, last - budget)
            state.patrol_from[group] = first
            if last < 0:
                continue
            budget -= last - first
            key_at = expected_keys(stores, state.request, group)
            for index in range(last, first, -1):
                slot = stores.tier.get(key_at(index))
                if slot is not None:
                    present.append(slot)
                else:
                    missing.append((table[group][index], key_at(index)))
        if all(state.patrol_from[group] < 0 for group in groups):
            state.patrol_from = []
        self._refresh(stores, state, present)
        chosen.recheck_victims()
        state.may_lack_copies |= bool(missing)
        # The walk went backwards; the first blocks of a chain are worth most.
        for block_id, key in reversed(missing):
            self._fill(stores, state, block_id, key, chosen)

    def _note_changes(self, stores: Stores, state: StoreRequestState) -> None:
        state.changes_seen = (self._num_losses(stores), self._dismissals, stores.tier.evictions)
        state.may_lack_copies = False

    def _begin(self, stores: Stores, state: StoreRequestState) -> None:
        self._note_changes(stores, state)
        state.patrol_from = [cursor - 1 for cursor in state.num_stored_blocks]

    def _num_losses(self, stores: Stores) -> int:
        # What other engines take from a shared pool is known as evictions only.
        return stores.tier.guard_losses if stores.tier.shared is None else stores.tier.evictions

    def _refresh(self, stores: Stores, state: StoreRequestState, slots: Sequence[KVCacheBlock]) -> None:
        for slot in slots:
            self.guard(state, slot)
        stores.tier.refresh(slots)

    def _fill(
        self,
        stores: Stores,
        state: StoreRequestState,
        block_id: int,
        key: BlockHashWithGroupId,
        chosen: Selection,
    ) -> None:
        if chosen.room <= 0 or key in chosen.keys or key in stores.in_flight or key in stores.unsettled:
            return
        source = find_source(stores, block_id, key)
        if source is None:
            return
        victims = chosen.next_victims(key)
        if not victims or any(map(self._is_guarded, victims)):
            return
        if any(map(stores.tier.is_of_others, victims)):
            if key in state.filled_once:
                return
            state.filled_once.add(key)
        stores.choose(chosen, source, state.request)

    def _is_guarded(self, slot: KVCacheBlock) -> bool:
        return slot.block_hash is not None and self._guarded.get(slot.block_id) == slot.block_hash
