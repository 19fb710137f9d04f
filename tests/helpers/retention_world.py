"""A pool with kept contents, and requests in miniature."""

from __future__ import annotations

from typing import Any

from tests.helpers.sched import ManualClock
from vllm.kv_retention import parse_retention
from vllm.v1.core.block_hash import BlockHash, BlockHashWithGroupId, make_block_hash_with_group_id
from vllm.v1.core.block_pool import BlockPool
from vllm.v1.core.block_retention import BlockRetention
from vllm.v1.core.invariants import pool_problems
from vllm.v1.core.kv_cache_block import KVCacheBlock


class World:
    """A pool whose requests are runs of blocks with contents of their own."""

    def __init__(self, blocks: int = 13, share: float = 1.0) -> None:
        self.clock = ManualClock()
        self.pool = BlockPool(blocks, True, 4)
        self.keep = BlockRetention(self.pool, share, self.clock)
        self.pool.placer = self.keep

    def run(self, name: str, count: int, scope: str | None = None, **hint: Any) -> list[KVCacheBlock]:
        """A request of `count` blocks that hits what is there, and ends with a hint."""
        contents = keys(name, count)
        held = []
        for place, key in enumerate(contents):
            block = self.pool.index.map.get_one_block(key)
            if block is not None:
                self.pool.touch([block])
            else:
                block = self.pool.get_new_blocks(1)[0]
                self.pool.commit_staged(block, key, 4 * (place + 1), None)
            held.append(block)
        if hint:
            covered = [(4 * (place + 1), key) for place, key in enumerate(contents)]
            self.keep.hold(covered, parse_retention(hint), scope)
        self.pool.free_blocks(reversed(held))
        assert not pool_problems(self.pool)
        return held

    def order(self) -> list[str]:
        """Contents from the first to go to the last."""
        queued = self.pool.free_block_queue.get_all_free_blocks()
        return [block.block_hash[:-4].decode() for block in queued if block.block_hash is not None]

    def is_cached(self, name: str, place: int) -> bool:
        return self.pool.index.map.get_one_block(keys(name, place + 1)[place]) is not None


def keys(name: str, count: int) -> list[BlockHashWithGroupId]:
    return [make_block_hash_with_group_id(BlockHash(f"{name}{i}".encode()), 0) for i in range(count)]
