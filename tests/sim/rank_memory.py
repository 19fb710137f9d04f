"""Memory below the device where all ranks of an engine have one pool: its pages, who finds what where, who may write.

Which rank holds which bytes is worked out here from the specs alone, so that it can be compared with the product's answer.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from tests.sim.copies import Lanes
from tests.sim.device import Context, Group, Memory, Page
from tests.sim.failure import SimFailure
from tests.sim.kinds import layer_names, make_groups
from tests.sim.params import SimParams
from vllm.v1.core.block_pool import BlockPool
from vllm.v1.kv_cache_interface import AttentionSpec, KVCacheConfig, KVCacheGroupSpec, KVCacheSpec, MambaSpec
from vllm.v1.simple_kv_offload.metadata import SimpleCPUOffloadMetadata
from vllm.v1.simple_kv_offload.rank_parts import RankParts, rank_parts
from vllm.v1.simple_kv_offload.shared_pool import SharedPool

Pairs = list[tuple[int, int]]


def shard_of(spec: KVCacheSpec, rank: int, params: SimParams) -> int:
    """Which of the different bytes of a group a rank holds: those of its heads, and of these its part of the context."""
    ranks, split = params.ranks, params.dcp if spec.dcp_sharded else 1
    if not spec.prefix_cacheable:
        return rank
    spec = spec.kind_spec
    if isinstance(spec, MambaSpec):
        return 0 if spec.tp_replicated else rank
    assert isinstance(spec, AttentionSpec)
    heads = spec.max_tp_shards
    if heads is None or heads * split >= ranks or ranks % (heads * split):
        return rank
    return rank * heads // ranks * split + rank % split


def parts_of_groups(params: SimParams) -> list[int]:
    """By cacheable group: how many different pieces its blocks have on the ranks."""
    specs = [spec for spec in params.specs if spec.prefix_cacheable]
    return [len({shard_of(spec, rank, params) for rank in range(params.ranks)}) for spec in specs]


def count_parts(params: SimParams) -> int:
    """Parts that a slot must have: blocks of no group leave some of them empty."""
    return max(
        n for n in range(1, params.ranks + 1) if all(parts % n == 0 for parts in parts_of_groups(params))
    )


def max_width(params: SimParams) -> int:
    """The slots that the widest block must have."""
    return max(parts_of_groups(params)) // count_parts(params)


def groups_of_ranks(params: SimParams) -> list[list[Group]]:
    """The kinds' use of memory, by rank. Ranks hold different bytes of a position only where that matters."""
    contexts = [Context(rank % params.dcp, params.dcp) for rank in range(params.ranks)]
    if not params.shared:
        return [make_groups(params.specs, params.ring_ratio, context=context) for context in contexts]
    shards = [[shard_of(spec, rank, params) for spec in params.specs] for rank in range(params.ranks)]
    return [
        make_groups(params.specs, params.ring_ratio, own, context)
        for own, context in zip(shards, contexts, strict=True)
    ]


class PartMemory(Memory):
    """What one rank maps of the pool: the pages from the first part that it uses to the last."""

    def __init__(self, pages: list[Page], num_slots: int, parts: RankParts, shards: Sequence[int]) -> None:
        start = parts.first_part * num_slots
        self.pages = pages[start : start + parts.used_parts * num_slots]
        self.parts = parts
        self._all, self._num_slots, self._shards = pages, num_slots, shards

    def page_of(self, slots: Sequence[int], group: int) -> Page:
        num_parts = len(self._all) // self._num_slots
        index, part = divmod(self._shards[group], num_parts)
        return self._all[part * self._num_slots + slots[index]]


def slots_of(pool: BlockPool, slot: int) -> tuple[int, ...]:
    """The slots of the block that has its keys in this one, as an engine of the pool sees it."""
    return (slot, *pool.wide.companions(slot)) if isinstance(pool, SharedPool) else (slot,)


def host_memories(params: SimParams) -> list[Memory]:
    """The memory of the tier below the device, by rank."""
    num_slots = max(1, params.host_blocks)
    if not params.shared:
        return [Memory(num_slots) for _ in range(params.ranks)]
    groups = [KVCacheGroupSpec(layer_names(i, spec), spec) for i, spec in enumerate(params.specs)]
    plan = KVCacheConfig(params.device_blocks, [], groups)
    pages = Memory(count_parts(params) * num_slots).pages
    memories: list[Memory] = []
    for rank in range(params.ranks):
        shards = [shard_of(spec, rank, params) if spec.prefix_cacheable else 0 for spec in params.specs]
        parts = rank_parts(plan, rank, params.ranks, params.dcp, num_slots)
        memories.append(PartMemory(pages, num_slots, parts, shards))
    return memories


def store_pairs(memory: Memory, orders: SimpleCPUOffloadMetadata) -> Pairs:
    """(device block, row) of what this rank stores; a real worker does the same."""
    slots = orders.store_cpu_blocks
    if not isinstance(memory, PartMemory):
        return list(zip(orders.store_gpu_blocks, slots, strict=True))
    mine = memory.parts.to_store(orders.store_gpu_blocks, slots, orders.store_groups, orders.companions)
    return list(zip(*mine, strict=True))


def load_pairs(memory: Memory, orders: SimpleCPUOffloadMetadata) -> Pairs:
    """(row, device block) of what this rank loads."""
    rows: Sequence[int] = orders.load_cpu_blocks
    if isinstance(memory, PartMemory):
        rows = memory.parts.rows(rows, orders.load_groups, orders.companions)
    return list(zip(rows, orders.load_gpu_blocks, strict=True))


def slot_of(memory: Memory, row: int) -> int:
    """The slot that a row belongs to."""
    return min(memory.parts.slots((row,))) if isinstance(memory, PartMemory) else row


def check_writers_below(all_lanes: Sequence[Lanes]) -> None:
    """I3: no page below the device has two writers, nor a reader while somebody writes it, on whatever ranks."""
    written: dict[int, str] = {}
    jobs = [
        (f"rank {rank}: {job.name}", lanes, job)
        for rank, lanes in enumerate(all_lanes)
        for job in lanes.running
    ]
    for name, lanes, job in jobs:
        for page in _pages(lanes, job.target_tier, [target for _, target in job.pairs]):
            writer = written.setdefault(id(page), name)
            if writer != name:
                raise SimFailure("I3", f"{writer} and {name} write the same page below the device")
    for name, lanes, job in jobs:
        for page in _pages(lanes, job.source_tier, [source for source, _ in job.pairs[job.done_pairs :]]):
            if id(page) in written:
                raise SimFailure("I3", f"{name} reads a page below the device, {written[id(page)]} writes it")


def _pages(lanes: Lanes, tier: str, blocks: Iterable[int]) -> list[Page]:
    """Pages of a tier below the device; none of the device's."""
    memory = {"host": lanes.host, "disk": lanes.disk}.get(tier)
    return [] if memory is None else [memory.page(block) for block in blocks]
