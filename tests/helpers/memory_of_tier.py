"""What a full host tier takes of this process's memory, told as JSON: run as a program, since memory is a process's own.

Arguments: bytes of one token, the budget in bytes, "events" or "quiet".
"""

from __future__ import annotations

import gc
import json
import random
import sys

from tests.helpers.mappings import anonymous_bytes, mapping_of
from tests.helpers.offload_parts import Byte
from tests.helpers.offload_rig import Rig
from vllm.v1.core.block_hash import make_block_hash_with_group_id
from vllm.v1.core.block_index import describe_tokens
from vllm.v1.kv_cache_interface import FullAttentionSpec
from vllm.v1.simple_kv_offload.transfer import StagedKey

BLOCK_TOKENS, PROMPT_BLOCKS, VOCABULARY = 16, 64, 50_000


def fill(rig: Rig) -> None:
    """Every slot gets content that was told of, and bytes."""
    tier, chance = rig.manager.tier, random.Random(0)
    told = tier.pool.index.events_enabled
    while (count := min(PROMPT_BLOCKS, tier.num_blocks - 1 - tier.pool.index.num_blocks)) > 0:
        request = rig.make_request([chance.randrange(VOCABULARY) for _ in range(count * BLOCK_TOKENS)])
        rig.requests.clear()
        slots = tier.stage(count)
        for number, slot in enumerate(slots):
            parent = request.block_hashes[number - 1] if number else None
            start, end = number * BLOCK_TOKENS, (number + 1) * BLOCK_TOKENS
            info = describe_tokens(request, start, end, parent) if told else None
            key = make_block_hash_with_group_id(request.block_hashes[number], 0)
            tier.commit(slot, (StagedKey(key, end, info),))
        tier.pool.free_blocks(slots)
        tier.take_events()
    for region in rig.worker().cpu_kv_caches.values():
        region.fill_(1)


def main() -> None:
    """Fill a tier and tell."""
    token_bytes, budget, events = sys.argv[1:]
    spec = FullAttentionSpec(BLOCK_TOKENS, num_kv_heads=1, head_size=int(token_bytes) // 2, dtype=Byte())

    def full_rig(num_bytes: int, *, has_events: bool) -> Rig:
        sizes = {"cpu_bytes_to_use": num_bytes, "num_cpu_blocks": None}
        rig = Rig([spec], device_blocks=8, held=False, events=has_events, extra=sizes)
        fill(rig)
        gc.collect()
        return rig

    small = full_rig(8 * spec.page_size_bytes, has_events=True)  # what the first use imports or keeps
    before = anonymous_bytes()
    rig = full_rig(int(budget), has_events=events == "events")
    taken = anonymous_bytes() - before
    small.connector.shutdown()
    (region,) = rig.worker().cpu_kv_caches.values()
    told = {
        "slots": rig.manager.num_cpu_blocks,
        "cached": rig.manager.tier.pool.index.num_blocks,
        "block_bytes": spec.page_size_bytes,
        "taken": taken,
        "arena": mapping_of(region.data_ptr()),
    }
    print(json.dumps(told))


if __name__ == "__main__":
    main()
