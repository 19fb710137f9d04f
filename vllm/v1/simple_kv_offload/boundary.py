"""State hand-offs of recurrent groups: which of a step's final states are copied, and the tally.

Owns the outcome of each hand-off. It must not know how a copy is planned. Layer L4.
"""

from __future__ import annotations

from collections.abc import Sequence

from vllm.v1.simple_kv_offload.records import BoundaryStoreStats
from vllm.v1.simple_kv_offload.selection import Selection
from vllm.v1.simple_kv_offload.store_policy import StoreRequestState, Stores

# (group, block id, tokens that the state covers)
HandOff = tuple[int, int, int]


class BoundaryStores:
    """Chooses hand-offs by exact block id: tables of these groups are not positional."""

    def __init__(self) -> None:
        self.stats = BoundaryStoreStats()

    def drop(self, hand_offs: Sequence[HandOff]) -> None:
        """Their request finished, was preempted or is unknown in this step."""
        self.stats.published += len(hand_offs)
        self.stats.dropped_request_gone += len(hand_offs)

    def select(
        self, stores: Stores, hand_offs: Sequence[HandOff], state: StoreRequestState, chosen: Selection
    ) -> None:
        """Choose those worth a copy. One that finds no room is not tried again."""
        for _, block_id, num_tokens in hand_offs:
            if num_tokens > stores.wanted_tokens(state.request):
                continue
            self.stats.published += 1
            self._consider(stores, block_id, state, chosen)

    def _consider(self, stores: Stores, block_id: int, state: StoreRequestState, chosen: Selection) -> None:
        block = stores.device.blocks[block_id]
        stats = self.stats
        if block.is_null:
            stats.dropped_null_block += 1
        elif block.block_hash is None:
            stats.dropped_not_hashed += 1
        elif stores.tier.contains(block.block_hash):
            stats.skipped_already_cached += 1
        elif block.block_hash in stores.in_flight or block.block_hash in chosen.keys:
            stats.skipped_in_flight += 1
        elif not chosen.has_slots_for(block.block_hash):
            stats.dropped_cpu_full += 1
        else:
            stores.choose(chosen, block, state.request)
            stats.stored += 1
