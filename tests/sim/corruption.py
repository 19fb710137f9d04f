"""What a request with NaN logits leaves below the device: pages that nobody may find again, whose bytes are lost here."""

from __future__ import annotations

from collections.abc import Iterable

from tests.sim.failure import require
from tests.sim.rank_memory import slots_of
from tests.sim.views import RunViews
from vllm.v1.core.block_hash import BlockHashWithGroupId, get_group_id, make_block_hash_with_group_id
from vllm.v1.request import Request

Place = tuple[str, tuple[int, ...], BlockHashWithGroupId]
"""(tier, ids of the block's slots, key)"""


def pages_below(run: RunViews, request: Request) -> list[Place]:
    """Where the tiers below hold a prefix of the request, in any group."""
    run.look_at_shared_pool()
    groups = range(len(run.worker.groups))
    keys = {make_block_hash_with_group_id(h, group) for h in request.block_hashes for group in groups}
    if run.shelf is not None:
        return [("host", (place,), key) for place, key in run.shelf.entries() if key in keys]
    return [
        (name, slots_of(pool, block.block_id), key)
        for name, pool, _ in run.lower_pools()
        for block in pool.blocks
        for key, _ in pool.get_keys(block)
        if key in keys
    ]


def spoil(run: RunViews, places: Iterable[Place]) -> None:
    """I6: none of them is findable any more; from now on their bytes are wrong, also for copies under way."""
    tiers = {name: (pool, memories) for name, pool, memories in run.lower_pools()}
    for name, slots, key in places:
        block_id = slots[0]
        pool, memories = tiers[name]
        # A manager from outside keeps it, and says so if it is asked to load it.
        kept = run.shelf is None and pool.cached_block_hash_to_block.contain(key, block_id)
        require(not kept, "I6", f"{name} block {block_id} stays findable after NaN logits of its request")
        for memory in memories:
            page = memory.page_of(slots, get_group_id(key))
            page.spoil()
            page.tainted = True
        if run.shelf is not None and run.shelf.ready.get(key) == block_id:
            run.worker.marks.hit("manager keeps what was withdrawn")
