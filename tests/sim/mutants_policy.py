"""Planted bugs in the offload's policies; see mutants.py."""

from __future__ import annotations

from contextlib import AbstractContextManager, ExitStack
from typing import Any
from unittest.mock import patch

from tests.sim.mutants_kept import KEPT_MUTANTS
from tests.sim.planting import Mutant, replaced
from vllm.v1.core.block_hash import get_block_hash
from vllm.v1.simple_kv_offload import store_policy
from vllm.v1.simple_kv_offload.admission import ReuseFilter
from vllm.v1.simple_kv_offload.arc import ArcQueue
from vllm.v1.simple_kv_offload.disk_tier import Moves
from vllm.v1.simple_kv_offload.load_side import LoadSide
from vllm.v1.simple_kv_offload.store_side import StoreSide


def held_slots_stay_queued() -> AbstractContextManager[object]:
    """OFF-01 under ARC: some slots that are held stay in line to be given away."""
    original = ArcQueue.remove

    def remove(self: Any, block: Any) -> None:
        if block.block_id % 3:
            original(self, block)

    return patch.object(ArcQueue, "remove", remove)


def gaps_in_what_is_stored() -> AbstractContextManager[object]:
    """A block that was wanted often enough is stored although one before it was forgotten and is not."""
    original = store_policy.find_source

    def num_admitted(self: Any, request: Any) -> int:
        admitted = [i for i, block_hash in enumerate(request.block_hashes, 1) if self.admits(block_hash)]
        return admitted[-1] if admitted else 0

    def find_source(stores: Any, block_id: int, key: Any) -> Any:
        found = original(stores, block_id, key)
        return found if stores.reuse.admits(get_block_hash(key)) else None

    stack = ExitStack()
    stack.enter_context(patch.object(ReuseFilter, "num_admitted", num_admitted))
    stack.enter_context(patch.object(store_policy, "find_source", find_source))
    return stack


def others_copies_are_overlooked(original: Any) -> Any:
    """A lazy store takes the slots of blocks that it does not see because another connector copies them."""
    del original
    return lambda _: []


def given_up_loads_are_not_booked(original: Any) -> Any:
    """The ledger does not close: a load that runs when the cache is emptied counts as under way for ever."""

    def end(self: Any, load: Any, ok: bool) -> None:
        dropped = self.ledger.dropped
        original(self, load, ok)
        self.ledger.dropped = dropped

    return end


def given_up_moves_are_not_booked(original: Any) -> Any:
    """The same between host and disk, for what runs when a tier is emptied."""

    def end(self: Any, transfer: Any, ok: bool) -> None:
        dropped = self.ledger.dropped
        original(self, transfer, ok)
        self.ledger.dropped = dropped

    return end


POLICY_MUTANTS: dict[str, Mutant] = {
    "given-up loads are not booked": replaced(LoadSide, "_end", given_up_loads_are_not_booked),
    "given-up moves are not booked": replaced(Moves, "_end", given_up_moves_are_not_booked),
    "others' copies are overlooked": replaced(StoreSide, "copied_by_others", others_copies_are_overlooked),
    "held slots stay queued": held_slots_stay_queued,
    "gaps in what is stored": gaps_in_what_is_stored,
    **KEPT_MUTANTS,
}
