"""Recounts the state of the KV core from scratch and says what does not add up. Layer: L3.

Used by the simulator and by tests. Reads everything, changes nothing; a private view of the parts is
offered here so that tests need none.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping

from vllm.v1.core.block_pool import BlockPool
from vllm.v1.core.kv_cache_block import KVCacheBlock
from vllm.v1.core.kv_cache_manager import KVCacheManager
from vllm.v1.core.kv_kinds.base import SingleTypeKVCacheManager


class InvariantViolation(AssertionError):
    """The recount found a contradiction; the message lists all of them."""


def pool_problems(pool: BlockPool) -> list[str]:
    """What is wrong with the pool by itself: free list, references, keys."""
    problems: list[str] = []
    free = [block.block_id for block in pool.free_block_queue.get_all_free_blocks()]
    if len(free) != pool.get_num_free_blocks():
        problems.append(f"{len(free)} blocks are queued, the counter says {pool.get_num_free_blocks()}")
    if len(set(free)) != len(free):
        problems.append(f"blocks queued twice: {[b for b, n in Counter(free).items() if n > 1]}")
    queued = set(free)
    for block in pool.blocks:
        if block.is_null:
            if block.block_id in queued or block.block_hash is not None or block.ref_cnt != 0:
                problems.append(f"null block is queued, hashed or counted: {block!r}")
            continue
        if block.ref_cnt < 0:
            problems.append(f"negative references: {block!r}")
        if (block.ref_cnt == 0) != (block.block_id in queued):
            problems.append(f"free list and references disagree: {block!r}")
        linked = block.prev_free_block is not None
        if linked != (block.block_id in queued):
            problems.append(f"links and free list disagree: {block!r}")
    return problems + index_problems(pool)


def index_problems(pool: BlockPool) -> list[str]:
    """Where keys of blocks and entries of the index disagree."""
    problems: list[str] = []
    num_entries = num_cached = 0
    for block in pool.blocks:
        keys = pool.get_keys(block)
        num_entries += len(keys)
        num_cached += bool(keys)
        for key, _ in keys:
            if not pool.cached_block_hash_to_block.contain(key, block.block_id):
                problems.append(f"block {block.block_id} has key {key.hex()}, which the index lacks")
        if not keys and block.block_id in pool.cached_block_hashes_by_block:
            problems.append(f"block {block.block_id} has secondary keys but no primary one")
    if num_cached != pool.index.num_blocks:
        problems.append(f"{num_cached} blocks have keys, the counter says {pool.index.num_blocks}")
    registered = pool.cached_block_hash_to_block.blocks()
    if len(registered) != num_entries:
        problems.append(f"the index has {len(registered)} entries, the blocks have {num_entries} keys")
    return problems


def reference_problems(pool: BlockPool, tables: Iterable[Mapping[str, Iterable[KVCacheBlock]]]) -> list[str]:
    """Where reference counts differ from a recount over block tables and live leases.

    `tables`: per group, request id → its blocks.
    """
    counted: Counter[int] = Counter()
    holders: dict[int, list[str]] = {}

    def count(block: KVCacheBlock, holder: str) -> None:
        if block.pool is pool and not block.is_null:
            counted[block.block_id] += 1
            holders.setdefault(block.block_id, []).append(holder)

    for table in tables:
        for request_id, blocks in table.items():
            for block in blocks:
                count(block, f"request {request_id}")
    for lease in pool.leases.values():
        for block in lease.blocks:
            count(block, f"lease of {lease.owner}")
    return [
        f"block {block.block_id} counts {block.ref_cnt} references, held by {holders.get(block.block_id, [])}"
        for block in pool.blocks
        if not block.is_null and block.ref_cnt != counted[block.block_id]
    ]


def table_problems(manager: SingleTypeKVCacheManager) -> list[str]:
    """Where the entries per request of one group disagree."""
    problems: list[str] = []
    for request_id, settled in manager.num_cached_block.items():
        if request_id not in manager.req_to_blocks:
            problems.append(f"group {manager.kv_cache_group_id}: {request_id} has no table but cached blocks")
        elif settled > len(manager.req_to_blocks[request_id]):
            problems.append(
                f"group {manager.kv_cache_group_id}: {request_id} has {settled} settled blocks of "
                f"{len(manager.req_to_blocks[request_id])}"
            )
    for request_id, blocks in manager.req_to_blocks.items():
        ids = [block.block_id for block in blocks if not block.is_null]
        if len(set(ids)) != len(ids):
            problems.append(f"group {manager.kv_cache_group_id}: {request_id} holds a block twice: {ids}")
    return problems


def problems_of(manager: KVCacheManager) -> list[str]:
    """Everything wrong with the KV core behind this manager; empty if all adds up."""
    problems: list[str] = []
    managers = manager.coordinator.single_type_managers
    for pool in manager.coordinator.pools:
        problems += pool_problems(pool)
        tables = [group.req_to_blocks for group in managers if group.block_pool is pool]
        problems += reference_problems(pool, tables)
    owners: dict[tuple[int, int], int] = {}
    for group in managers:
        problems += table_problems(group)
        for block_id in {
            b.block_id for blocks in group.req_to_blocks.values() for b in blocks if not b.is_null
        }:
            other = owners.setdefault((id(group.block_pool), block_id), group.kv_cache_group_id)
            if other != group.kv_cache_group_id:
                problems.append(
                    f"block {block_id} is in tables of groups {other} and {group.kv_cache_group_id}"
                )
    return problems


def leftovers_of(manager: KVCacheManager) -> list[str]:
    """What a system at rest must not have: entries of requests, leases, held blocks."""
    left: list[str] = []
    for group in manager.coordinator.single_type_managers:
        left += [f"group {group.kv_cache_group_id}: table of {name}" for name in group.req_to_blocks]
        left += [
            f"group {group.kv_cache_group_id}: cached count of {name}" for name in group.num_cached_block
        ]
        left += [
            f"group {group.kv_cache_group_id}: {what} of {name}"
            for what, names in group.entries_by_request().items()
            for name in names
        ]
    for pool in manager.coordinator.pools:
        left += [f"{pool.medium}: {lease!r}" for lease in pool.leases.values()]
        held = pool.num_gpu_blocks - 1 - pool.get_num_free_blocks()
        if held:
            left.append(f"{pool.medium}: {held} blocks are held")
    return left


def check_invariants(manager: KVCacheManager, at_rest: bool = False) -> None:
    """Raise `InvariantViolation` listing every problem; `at_rest` also forbids anything that is still held."""
    problems = problems_of(manager) + (leftovers_of(manager) if at_rest else [])
    if problems:
        raise InvariantViolation("\n".join(problems))
