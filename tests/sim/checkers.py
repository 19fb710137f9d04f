"""Invariants that must hold after every action, recounted from scratch. Codes are those of the architecture's table."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable

from tests.sim.failure import require
from tests.sim.run import Run
from vllm.distributed.kv_event_types import MEDIUM_GPU
from vllm.v1.core.block_hash import get_block_hash, get_group_id, maybe_convert_block_hash
from vllm.v1.core.block_pool import BlockPool
from vllm.v1.core.kv_cache_block import KVCacheBlock
from vllm.v1.simple_kv_offload.transfer import TransferState


def check_all(run: Run) -> None:
    """Every invariant that holds between any two actions."""
    lower = [(name, pool) for name, pool, _ in run.lower_pools()]
    pools = [("device", run.device_pool), *lower]
    for name, pool in pools:
        check_free_or_held(name, pool)
        check_index(name, pool)
    check_references("device", run.device_pool, device_holders(run))
    for name, pool in lower:
        check_references(name, pool, leased(pool))
    check_writers(run)
    check_staged(run)
    check_promises(run)
    check_events(run)
    check_tier_contents(run)
    check_bounds(run)


def check_free_or_held(name: str, pool: BlockPool) -> None:
    """I1: each block is free or held, never both; totals add up."""
    free = [block.block_id for block in pool.free_block_queue.get_all_free_blocks()]
    require(len(free) == len(set(free)), "I1", f"{name}: a block is in the free queue twice")
    require(
        len(free) == pool.get_num_free_blocks(),
        "I1",
        f"{name}: {len(free)} blocks in the queue, {pool.get_num_free_blocks()} counted",
    )
    free_ids = set(free)
    require(0 not in free_ids, "I1", f"{name}: the null block is in the free queue")
    for block in pool.blocks[1:]:
        require(
            (block.ref_cnt == 0) == (block.block_id in free_ids),
            "I1",
            f"{name}: block {block.block_id} has {block.ref_cnt} references and is "
            f"{'' if block.block_id in free_ids else 'not '}in the free queue",
        )
        require(block.ref_cnt >= 0, "I1", f"{name}: block {block.block_id} has {block.ref_cnt} references")


def leased(pool: BlockPool) -> Counter[int]:
    """References by leases."""
    held: Counter[int] = Counter()
    for lease in pool.leases.values():
        for block in lease.blocks:
            if not block.is_null:
                held[block.block_id] += 1
    return held


def device_holders(run: Run) -> Counter[int]:
    """References on the device by request tables, leases and frees that wait for a step."""
    held = leased(run.device_pool)
    for manager in run.scheduler.kv_cache_manager.coordinator.single_type_managers:
        for blocks in manager.req_to_blocks.values():
            _count(held, blocks)
    for _, blocks in run.scheduler.deferred_frees:
        _count(held, blocks)
    return held


def _count(held: Counter[int], blocks: Iterable[KVCacheBlock]) -> None:
    for block in blocks:
        if not block.is_null:
            held[block.block_id] += 1


def check_references(name: str, pool: BlockPool, held: Counter[int]) -> None:
    """I2: each reference count equals a recount over tables, leases and transfers."""
    for block in pool.blocks[1:]:
        require(
            block.ref_cnt == held[block.block_id],
            "I2",
            f"{name}: block {block.block_id} has {block.ref_cnt} references, {held[block.block_id]} holders are known",
        )


def check_index(name: str, pool: BlockPool) -> None:
    """I4: index and block hashes agree."""
    entries = 0
    for block in pool.blocks:
        for key, _ in pool.get_keys(block):
            entries += 1
            require(
                pool.cached_block_hash_to_block.contain(key, block.block_id),
                "I4",
                f"{name}: block {block.block_id} has a key that the index does not know",
            )
    indexed = len(pool.cached_block_hash_to_block.blocks())
    require(indexed == entries, "I4", f"{name}: {indexed} index entries, {entries} keys on blocks")
    require(not pool.get_keys(pool.null_block), "I4", f"{name}: the null block has a hash")


def check_staged(run: Run) -> None:
    """I4: targets of running stores are not findable; R9: blocks of live transfers are held."""
    for transfer in (*run.store_transfers(), *run.moves()):
        if transfer.ended:
            continue
        what = transfer.owner
        for block in transfer.tier_blocks:
            require(block.block_hash is None, "I4", f"{what}: block {block.block_id} is findable already")
            require(block.ref_cnt > 0, "I3", f"{what}: block {block.block_id} is written but not held")
        for block in transfer.device_blocks:
            require(block.ref_cnt > 0, "I3", f"{what}: block {block.block_id} is read but not held")


def check_promises(run: Run) -> None:
    """R5: what a lookup promised is held until it is taken or withdrawn."""
    if run.offload is None:
        return
    for request_id, promise in run.offload.promises:
        held = {id(block) for block in promise.lease.blocks}
        for blocks in promise.blocks:
            for block in blocks:
                require(
                    block.is_null or id(block) in held,
                    "I2",
                    f"host block {block.block_id} is promised to {request_id} but not leased",
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


def _residencies(medium: str, pool: BlockPool) -> Counter[tuple[str, int, object]]:
    counts: Counter[tuple[str, int, object]] = Counter()
    for block in pool.blocks:
        for key, _ in pool.get_keys(block):
            counts[medium, get_group_id(key), maybe_convert_block_hash(get_block_hash(key))] += 1
    return counts


def check_events(run: Run) -> None:
    """I7: replaying the events rebuilds the index exactly, per medium and group, without duplicates or gaps."""
    run.consumer.take()
    for event in run.consumer.stored:
        run.registry.check_event(event)
    run.consumer.stored.clear()
    pending = list(run.device_pool.kv_event_queue)
    truth = _residencies(MEDIUM_GPU, run.device_pool)
    for _, pool, _ in run.lower_pools():
        pending += pool.kv_event_queue
        truth += _residencies(pool.medium, pool)
    known = run.consumer.with_pending(pending)
    if known != truth:
        require(
            False, "I7", f"events say {_difference(known, truth)} more, and {_difference(truth, known)} less"
        )


def _difference(
    left: Counter[tuple[str, int, object]], right: Counter[tuple[str, int, object]]
) -> dict[str, int]:
    return {f"{medium}/{group}/{str(h)[-6:]}": count for (medium, group, h), count in (left - right).items()}


def check_tier_contents(run: Run) -> None:
    """I6: what became findable in the lower tier since the last look holds the right bytes on every rank."""
    for name, pool, memories in run.lower_pools():
        now = {(block.block_id, key) for block in pool.blocks for key, _ in pool.get_keys(block)}
        for block_id, key in sorted(now - run.seen_entries.get(name, set())):
            for rank, memory in enumerate(memories):
                check_page(run, f"rank {rank}, {name}", memory.page(block_id), key)
        run.seen_entries[name] = now


def check_page(run: Run, where: str, page: object, key: bytes) -> None:
    """I6: the page behind an index entry holds exactly the prefix of its hash."""
    group = run.worker.groups[get_group_id(key)]
    prints = run.registry.prints(bytes(get_block_hash(key)))
    for slot, stamp in group.expected_page(prints, run.worker.version).items():
        got = page.read(group.group_id, slot)
        require(
            got == stamp,
            "I6",
            f"{where}: entry of group {group.group_id} over {len(prints) - 1} tokens has a wrong row in slot {slot}",
        )


def check_bounds(run: Run) -> None:
    """I8: limits on running requests, queues and buffers hold."""
    scheduler = run.scheduler
    require(
        len(scheduler.running) <= run.params.max_num_seqs,
        "I8",
        f"{len(scheduler.running)} requests run, {run.params.max_num_seqs} may",
    )
    ids = [request.request_id for request in scheduler.running]
    for queue in (scheduler.waiting, scheduler.deferred_waiting, scheduler.kv_holding_waiting):
        ids += [request.request_id for request in queue]
    require(len(ids) == len(set(ids)), "I8", f"a request is in two queues: {sorted(ids)}")
    lost = {r for r, request in scheduler.requests.items() if not request.is_finished()} - set(ids)
    require(not lost, "I8", f"requests in no queue: {sorted(lost)}")
    if run.host_pool is not None:
        transfers = [t for t in run.store_transfers() if not t.ended]
        staged = sum(len(t) for t in transfers if t.state is not TransferState.PLANNED)
        require(staged < run.host_pool.num_gpu_blocks, "I8", f"{staged} blocks are being stored")
