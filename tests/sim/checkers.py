"""Invariants that must hold after every action, recounted from scratch. Codes are those of the architecture's table."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace

from tests.sim.device import Page
from tests.sim.events import Consumer, Residency
from tests.sim.failure import SimFailure, require
from tests.sim.outside import ShelfManager, ToldPool
from tests.sim.rank_memory import slots_of
from tests.sim.retention import check_retention
from tests.sim.run import Run
from vllm.distributed.kv_event_types import BlockStored
from vllm.v1.core.block_hash import (
    BlockHashWithGroupId,
    get_block_hash,
    get_group_id,
    maybe_convert_block_hash,
)
from vllm.v1.core.block_pool import BlockPool
from vllm.v1.core.kv_cache_block import KVCacheBlock
from vllm.v1.simple_kv_offload.arc import ArcQueue
from vllm.v1.simple_kv_offload.shared_pool import SharedPool
from vllm.v1.simple_kv_offload.transfer import TransferState

WORKERS_ONLY = frozenset({"tick", "copy", "unstall", "poison"})
"""Actions in which nothing of the engine runs and no copy starts: what was checked before them still holds."""
PARANOID_EVERY = 50
"""Seeds that are multiples of it are checked after these actions too, so that the list above cannot lie for long."""

Entry = tuple[int, BlockHashWithGroupId]
"""(block id, one of its keys)"""


@dataclass
class PoolView:
    """What the checks of one pool share, gathered once per action."""

    name: str
    pool: BlockPool | ToldPool
    free: list[int]
    entries: list[Entry]


def check_after(run: Run, action: str) -> None:
    """Every invariant that the action can have broken."""
    if run.params.seed % PARANOID_EVERY != 0:
        if action in WORKERS_ONLY:
            return
        if action == "execute":  # the workers only: it may have started copies
            check_writers(run)
            return
    check_all(run)


def check_all(run: Run) -> None:
    """Every invariant that holds between any two actions."""
    device = view("device", run.device_pool)
    lower = [view(name, pool) for name, pool, _ in run.lower_pools()]
    for pool in (device, *lower):
        check_free_or_held(pool)
        check_index(pool)
        check_retention(pool.name, pool.pool)
    check_references(device, device_holders(run))
    for pool in lower:
        check_references(pool, leased(pool.pool))
    check_writers(run)
    check_staged(run)
    check_loads(run)
    check_promises(run)
    check_ledgers(run)
    check_events(run, [device, *(lower if run.shelf is None else [told_outside(run.shelf)])])
    check_tier_contents(run, lower)
    check_bounds(run)


def view(name: str, pool: BlockPool) -> PoolView:
    """Walk the free queue and the blocks of a pool."""
    queue = pool.free_block_queue
    # In which order ARC would give its slots away takes long to find out; who is idle is asked list by list.
    lists = queue._lists if isinstance(queue, ArcQueue) else [queue]
    free = [block.block_id for each in lists for block in each.get_all_free_blocks()]
    entries = [
        (block.block_id, key)
        for block in pool.blocks
        if block.block_hash is not None
        for key, _ in pool.get_keys(block)
    ]
    return PoolView(name, pool, free, entries)


def check_free_or_held(view: PoolView) -> None:
    """I1: each block is free or held, never both; totals add up."""
    name, pool, free = view.name, view.pool, view.free
    counted = pool.get_num_free_blocks()
    if len(free) != counted:
        raise SimFailure("I1", f"{name}: {len(free)} blocks in the queue, {counted} counted")
    idle = {block.block_id for block in pool.blocks[1:] if block.ref_cnt == 0}
    free_ids = set(free)
    if len(free_ids) != len(free):
        raise SimFailure("I1", f"{name}: a block is in the free queue twice")
    if free_ids == idle:
        return
    require(0 not in free_ids, "I1", f"{name}: the null block is in the free queue")
    block_id = min(free_ids ^ idle)
    raise SimFailure(
        "I1",
        f"{name}: block {block_id} has {pool.blocks[block_id].ref_cnt} references and is "
        f"{'' if block_id in free_ids else 'not '}in the free queue",
    )


def leased(pool: BlockPool) -> list[int]:
    """References by leases, by block id."""
    held = [0] * len(pool.blocks)
    for lease in pool.leases.values():
        _count(held, lease.blocks)
    return held


def device_holders(run: Run) -> list[int]:
    """References on the device by request tables, leases and frees that wait for a step, by block id."""
    held = leased(run.device_pool)
    for manager in run.scheduler.kv_cache_manager.coordinator.single_type_managers:
        for blocks in manager.req_to_blocks.values():
            _count(held, blocks)
    for _, blocks in run.scheduler.deferred_frees:
        _count(held, blocks)
    return held


def _count(held: list[int], blocks: Iterable[KVCacheBlock]) -> None:
    for block in blocks:
        held[block.block_id] += 1


def check_references(view: PoolView, held: list[int]) -> None:
    """I2: each reference count equals a recount over tables, leases and transfers. The null block is not counted."""
    counts = [block.ref_cnt for block in view.pool.blocks]
    if counts[1:] == held[1:]:
        return
    for block_id in range(1, len(counts)):
        require(
            counts[block_id] == held[block_id],
            "I2",
            f"{view.name}: block {block_id} has {counts[block_id]} references, {held[block_id]} holders are known",
        )


def check_index(view: PoolView) -> None:
    """I4: index and block hashes agree."""
    name, pool = view.name, view.pool
    index = pool.cached_block_hash_to_block
    for block_id, key in view.entries:
        if not index.contain(key, block_id):
            raise SimFailure("I4", f"{name}: block {block_id} has a key that the index does not know")
    indexed = len(index.blocks())
    if indexed != len(view.entries):
        raise SimFailure("I4", f"{name}: {indexed} index entries, {len(view.entries)} keys on blocks")
    if pool.get_keys(pool.null_block):
        raise SimFailure("I4", f"{name}: the null block has a hash")


def check_staged(run: Run) -> None:
    """I4: targets of running stores are not findable; R9: blocks of live transfers are held."""
    for transfer in (*run.store_transfers(), *run.moves()):
        if transfer.ended:
            continue
        what = transfer.owner
        for block in transfer.tier_blocks:
            if block.block_hash is not None:
                raise SimFailure("I4", f"{what}: block {block.block_id} is findable already")
            if block.ref_cnt <= 0:
                raise SimFailure("I3", f"{what}: block {block.block_id} is written but not held")
        for block in transfer.device_blocks:
            if block.ref_cnt <= 0:
                raise SimFailure("I3", f"{what}: block {block.block_id} is read but not held")


def check_loads(run: Run) -> None:
    """I3: what a load reads and writes is held until it has ended."""
    for side in [offload.load_side for offload in run.offloads]:
        for load in (*side.loads.values(), *side.abandoned.values()):
            for block in (*load.transfer.tier_blocks, *load.transfer.device_blocks):
                if block.ref_cnt <= 0:
                    raise SimFailure("I3", f"{load.transfer.owner}: block {block.block_id} is not held")


def check_promises(run: Run) -> None:
    """R5: what a lookup promised is held until it is taken or withdrawn."""
    for request_id, promise in [pair for offload in run.offloads for pair in offload.promises]:
        held = {id(block) for block in promise.lease.blocks}
        for blocks in promise.blocks:
            for block in blocks:
                require(
                    block.is_null or id(block) in held,
                    "I2",
                    f"host block {block.block_id} is promised to {request_id} but not leased",
                )


def check_ledgers(run: Run) -> None:
    """I5: on every tier and in both directions, what was scheduled is done, failed, dropped, or a transfer that lives."""
    for index, offload in enumerate(run.offloads):
        stores, loads, chain = offload.store_side, offload.load_side, offload.chain
        loading = (*loads.loads.values(), *loads.abandoned.values())
        books = [
            ("stores", stores.ledger, stores.num_pending_blocks),
            ("loads", loads.ledger, sum(len(load.transfer) for load in loading)),
        ]
        if chain is not None:
            books += [(name, m.ledger, m.num_blocks) for name, m in (("down", chain.down), ("up", chain.up))]
        for name, ledger, live in books:
            if ledger.in_flight != live:
                raise SimFailure(
                    "I5", f"{name} of connector {index}: {ledger} leaves {ledger.in_flight} open, {live} are"
                )


def check_writers(run: Run) -> None:
    """I3: no block has two writers; copy targets are exclusive."""
    loading = run.worker.device_targets()
    run.worker.check_host_targets()
    if not loading:
        return
    free = {block.block_id for block in run.device_pool.free_block_queue.get_all_free_blocks()}
    for block_id, writer in loading.items():
        require(block_id not in free, "I3", f"device block {block_id} is free while {writer} writes it")
    for step in run.steps:
        if step.executed:
            continue
        for request_id, written in run.written_blocks(step).items():
            both = written & loading.keys()
            require(
                not both, "I3", f"step of {request_id} writes device blocks {sorted(both)} that a load writes"
            )


_PUBLISHED: dict[BlockHashWithGroupId, tuple[int, object]] = {}
"""key → (group, hash as events name it); a function of the key, kept while a process lives (see `batch.py`)."""


def _published(key: BlockHashWithGroupId) -> tuple[int, object]:
    known = _PUBLISHED.get(key)
    if known is None:
        known = (get_group_id(key), maybe_convert_block_hash(get_block_hash(key)))
        _PUBLISHED[key] = known
    return known


def forget_published() -> None:
    """Seeds have few keys in common."""
    _PUBLISHED.clear()


def _residencies(views: Sequence[PoolView]) -> dict[Residency, int]:
    counts: dict[Residency, int] = {}
    for view in views:
        medium = view.pool.medium
        for _, key in view.entries:
            where = (medium, *_published(key))
            counts[where] = counts.get(where, 0) + 1
    return counts


def check_events(run: Run, views: Sequence[PoolView]) -> None:
    """I7: replaying the events rebuilds the index exactly, per medium and group, without duplicates or gaps."""
    run.consumer.take()
    for event in run.consumer.stored:
        run.registry.check_event(event)
    run.consumer.stored.clear()
    known = run.consumer.with_pending([event for view in views for event in view.pool.kv_event_queue])
    truth = _residencies([_told(view) for view in views])
    if known != truth:
        more, less = _difference(known, truth), _difference(truth, known)
        raise SimFailure("I7", f"events say {more} more, and {less} less")
    if run.params.seed % PARANOID_EVERY == 0:
        check_snapshot(run, views)


def check_snapshot(run: Run, views: Sequence[PoolView]) -> None:
    """I7: who comes late and is told what is there knows the same as who heard everything."""
    known = run.consumer.with_pending([event for view in views for event in view.pool.kv_event_queue])
    told: dict[Residency, int] = {}
    for event in run.scheduler.present_events():
        require(isinstance(event, BlockStored), "I7", f"a snapshot holds a {type(event).__name__}")
        assert isinstance(event, BlockStored)
        run.registry.check_event(event)
        Consumer.apply(told, event)
    if told != known:
        more, less = _difference(told, known), _difference(known, told)
        raise SimFailure("I7", f"a snapshot says {more} more, and {less} less, than the events so far")


def _told(view: PoolView) -> PoolView:
    """What events must have told of a pool: of a shared one, what this engine stored."""
    if not isinstance(view.pool, SharedPool):
        return view
    own = view.pool.own_slots
    return replace(view, entries=[entry for entry in view.entries if entry[0] in own])


def _shared_view(run: Run, pool: BlockPool) -> PoolView:
    """The shared pool as it is now, not as this engine saw it last; what both engines write is apart."""
    blocks = [block.block_id for t in run.store_transfers() if not t.ended for block in t.tier_blocks]
    targets = {slot for block_id in blocks for slot in slots_of(pool, block_id)}
    both = targets & run.other_engine().staged_slots()
    require(not both, "I3", f"host blocks {sorted(both)} are stored into by two engines")
    return view("host", run.observer())


def told_outside(shelf: ShelfManager) -> PoolView:
    """What events must have told of a manager from outside."""
    pool, entries = shelf.told_pool()
    return PoolView("shelf", pool, [], entries)


def _difference(left: dict[Residency, int], right: dict[Residency, int]) -> dict[str, int]:
    more = Counter(left) - Counter(right)
    return {f"{medium}/{group}/{str(h)[-6:]}": count for (medium, group, h), count in more.items()}


def check_tier_contents(run: Run, views: Sequence[PoolView]) -> None:
    """I6: what became findable in the lower tier since the last look holds the right bytes on every rank."""
    for view, (name, _, memories) in zip(views, run.lower_pools(), strict=True):
        seen = run.seen_entries.get(name)
        if name == "host" and run.params.shared:
            view = _shared_view(run, view.pool)
        if run.shelf is not None:
            view = replace(view, entries=run.shelf.entries())
        if seen == view.entries:
            continue
        for block_id, key in sorted(set(view.entries).difference(seen or ())):
            if run.worker.groups[get_group_id(key)].num_layers > 1:
                run.marks.hit("page of several layers stored")
            for rank, memory in enumerate(memories):
                page = memory.page_of(slots_of(view.pool, block_id), get_group_id(key))
                if seen is None and page.is_lost:
                    # A new engine found it on a kept disk before the one that was killed had heard of the damage.
                    run.marks.hit("damage found again")
                    continue
                check_page(run, rank, name, page, key)
        run.seen_entries[name] = view.entries


def check_page(run: Run, rank: int, where: str, page: Page, key: BlockHashWithGroupId) -> None:
    """I6: the page behind an index entry holds exactly the prefix of its hash."""
    group = run.worker.rank_groups[rank][get_group_id(key)]
    prints = run.registry.prints(bytes(get_block_hash(key)))
    for slot, stamp in group.expected_page(prints, run.worker.version).items():
        got = page.read(group.group_id, slot)
        require(
            got == stamp,
            "I6",
            f"rank {rank}, {where}: entry of group {group.group_id} over {len(prints) - 1} tokens has a wrong row in slot {slot}",
        )


def check_bounds(run: Run) -> None:
    """I8: limits on running requests, queues and buffers hold."""
    scheduler = run.scheduler
    if len(scheduler.running) > run.params.max_num_seqs:
        raise SimFailure("I8", f"{len(scheduler.running)} requests run, {run.params.max_num_seqs} may")
    ids = [request.request_id for request in scheduler.running]
    for queue in (scheduler.waiting, scheduler.deferred_waiting, scheduler.kv_holding_waiting):
        ids += [request.request_id for request in queue]
    queued = set(ids)
    if len(ids) != len(queued):
        raise SimFailure("I8", f"a request is in two queues: {sorted(ids)}")
    lost = [r for r, request in scheduler.requests.items() if r not in queued and not request.is_finished()]
    if lost:
        raise SimFailure("I8", f"requests in no queue: {sorted(lost)}")
    if run.shelf is not None and run.shelf.books.errors:
        raise SimFailure("I2", f"the manager from outside complains: {run.shelf.books.errors}")
    for offload in run.offloads:
        transfers = [t for t in offload.store_side.table.transfers if not t.ended]
        staged = sum(len(t) for t in transfers if t.state is not TransferState.PLANNED)
        require(staged < offload.tier.num_blocks, "I8", f"{staged} blocks are being stored")
