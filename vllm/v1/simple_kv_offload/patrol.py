"""Finds blocks of running requests that the tier has evicted since they were stored.

Owns the walk behind the cursors and which slots a running request counts on. It plans nothing. Layer L4.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from vllm.v1.core.block_hash import BlockHashWithGroupId
from vllm.v1.core.kv_cache_block import KVCacheBlock
from vllm.v1.simple_kv_offload.store_policy import (
    BlockTable,
    Selection,
    StoreRequestState,
    Stores,
    expected_keys,
    find_source,
)

BLOCKS_PER_STEP = 64


class HolePatrol:
    """Re-examines a bounded part of each running request per step, while the tier evicts.

    Slots that a running request counts on are *guarded*: filling one hole never digs another, so two
    requests cannot evict each other for ever. First-time stores may take guarded slots.
    """

    def __init__(self) -> None:
        self._guarded: dict[int, BlockHashWithGroupId] = {}

    def guard(self, state: StoreRequestState, slot: KVCacheBlock) -> None:
        """The request counts on what the slot holds now. Ends with `dismiss`."""
        if slot.block_hash is not None:
            self._guarded[slot.block_id] = slot.block_hash
            state.guarded_slots.add(slot.block_id)

    def dismiss(self, state: StoreRequestState) -> None:
        """The request counts on nothing any more."""
        for slot_id in sorted(state.guarded_slots):
            self._guarded.pop(slot_id, None)
        state.guarded_slots.clear()

    def forget_all(self) -> None:
        """The tier's content is void."""
        self._guarded.clear()

    def __len__(self) -> int:
        return len(self._guarded)

    def select_holes(
        self,
        stores: Stores,
        state: StoreRequestState,
        table: BlockTable,
        groups: Sequence[int],
        chosen: Selection,
    ) -> None:
        """Choose blocks behind the cursors that have no copy any more, as far as unguarded slots last.

        A round over all groups begins when the tier has evicted something since the last one. Slots
        that are still present become the youngest of the tier, the request's first blocks last.
        """
        if not self._begin(stores, state):
            return
        present: list[KVCacheBlock] = []
        budget = BLOCKS_PER_STEP
        for group in groups:
            last = min(state.patrol_from[group], len(table[group]) - 1)
            first = max(-1, last - budget)
            state.patrol_from[group] = first
            budget -= max(0, last - first)
            if last < 0:
                continue
            key_at = expected_keys(stores, state.request, group)
            for index in range(last, first, -1):
                slot = stores.tier.get(key_at(index))
                if slot is not None:
                    present.append(slot)
                else:
                    self._fill(stores, state, table[group][index], key_at(index), chosen)
        if all(state.patrol_from[group] < 0 for group in groups):
            state.patrol_from = []
        self._refresh(stores, state, present)

    def _begin(self, stores: Stores, state: StoreRequestState) -> bool:
        if not state.patrol_from:
            if state.evictions_seen == stores.tier.evictions:
                return False
            state.evictions_seen = stores.tier.evictions
            state.patrol_from = [cursor - 1 for cursor in state.num_stored_blocks]
        return True

    def _fill(
        self,
        stores: Stores,
        state: StoreRequestState,
        block_id: int,
        key: BlockHashWithGroupId,
        chosen: Selection,
    ) -> None:
        if chosen.room <= 0 or key in chosen.keys or key in stores.in_flight:
            return
        source = find_source(stores, block_id, key)
        if source is None:
            return
        victim = stores.tier.peek_victim(len(chosen.candidates))
        if victim is None or self._is_guarded(victim):
            # This round finds no room; look again from here when the next one begins.
            state.evictions_seen = -1
            return
        chosen.add(stores.candidate(source, state.request))

    def _is_guarded(self, slot: KVCacheBlock) -> bool:
        return slot.block_hash is not None and self._guarded.get(slot.block_id) == slot.block_hash

    def _refresh(self, stores: Stores, state: StoreRequestState, present: Iterable[KVCacheBlock]) -> None:
        slots = list(present)
        for slot in slots:
            self.guard(state, slot)
        stores.tier.pool.touch(slots)
        stores.tier.pool.free_blocks(slots)
