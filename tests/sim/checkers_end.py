"""Invariants of a run that has come to rest: nothing left, right answers, progress, and what must be stored is."""

from __future__ import annotations

from tests.sim.checkers import check_all, check_page, check_snapshot, told_outside, view
from tests.sim.failure import require
from tests.sim.params import Outside
from tests.sim.restart import check_kept
from tests.sim.run import Run
from vllm.v1.core.block_hash import make_block_hash_with_group_id
from vllm.v1.kv_cache_interface import RSWASpec, is_full_attention_spec
from vllm.v1.simple_kv_offload.manager import SimpleCPUOffloadScheduler


def check_rest(run: Run) -> None:
    """All of them; the run must have drained."""
    if run.params.shared:
        run.other_engine().rest()
        run.world.clock.advance(10.0)
        run.look_at_shared_pool()
    check_all(run)
    below = [view(name, pool) for name, pool, _ in run.lower_pools()]
    told = below if run.shelf is None else [told_outside(run.shelf)]
    check_snapshot(run, [view("device", run.device_pool), *told])
    check_nothing_left(run)
    check_device_contents(run)
    check_answers(run)
    check_everything_stored(run)
    check_kept(run)


def check_nothing_left(run: Run) -> None:
    """I5: no reference, lease, transfer or per-request entry is left."""
    scheduler = run.scheduler
    left: dict[str, object] = {
        "requests": scheduler.requests,
        "running": scheduler.running,
        "finished ids": scheduler.finished_req_ids,
        "received ids": scheduler.finished_recving_kv_req_ids,
        "failed ids": scheduler.failed_recving_kv_req_ids,
        "deferred frees": scheduler.deferred_frees,
        "deferred loads": scheduler.deferred_loads,
        "prefills": scheduler._inflight_prefills,
        "fetch stages": scheduler._kv_fetch_stages,
        "worker rows": run.worker.requests,
    }
    for manager in scheduler.kv_cache_manager.coordinator.single_type_managers:
        left[f"blocks of group {manager.kv_cache_group_id}"] = manager.req_to_blocks
        left[f"cached counts of group {manager.kv_cache_group_id}"] = manager.num_cached_block
    for name, entries in left.items():
        require(not entries, "I5", f"{name} left at rest: {entries}")
    require(not any(scheduler._kv_fetch_counts.values()), "I5", f"fetch counts {scheduler._kv_fetch_counts}")
    for name, pool in (("device", run.device_pool), *((n, p) for n, p, _ in run.lower_pools())):
        require(not pool.leases, "I5", f"{name} leases left at rest: {list(pool.leases.values())}")
        held = pool.num_gpu_blocks - 1 - pool.get_num_free_blocks()
        require(held == 0, "I5", f"{held} {name} blocks held at rest")
    for name, entries in run.offload_tables().items():
        require(not entries, "I5", f"offload table {name} left at rest: {entries}")
    require(not run.worker.copying(), "I5", "copies run at rest")


def check_device_contents(run: Run) -> None:
    """I6: every entry of the device index holds the right bytes on every rank."""
    for block in run.device_pool.blocks:
        for key, _ in run.device_pool.get_keys(block):
            for rank, memory in enumerate(run.worker.devices):
                check_page(run, rank, f"device block {block.block_id}", memory.page(block.block_id), key)


def check_answers(run: Run) -> None:
    """I9: every answer equals that of a run without cache, offload and faults."""
    for truth in run.truths.values():
        told = truth.delivered
        require(
            told == truth.output[: len(told)],
            "I9",
            f"{truth.request_id} answered {told}, expected {truth.output}",
        )
        if truth.ended_by is None:
            require(
                told == truth.output and truth.finish_reason in {"stop", "length"},
                "I9",
                f"{truth.request_id} ended with {truth.finish_reason} after {told}, expected {truth.output}",
            )


def check_everything_stored(run: Run) -> None:
    """I11: with room below and no fault, every confirmed full block of full attention has been stored."""
    if run.store_excuse is not None:
        return
    if run.params.outside is not None:
        _check_shelf(run, run.params.outside)
        return
    for index, offload in enumerate(run.offloads):
        if not offload.lazy_offload and index not in run.full_tiers:
            _check_stored(run, offload, has_policies=index == 0)


def _check_shelf(run: Run, outside: Outside) -> None:
    assert run.shelf is not None
    if outside.prompt_only or outside.deadline_s < 100 or run.shelf.books.has_gaps or 0 in run.full_tiers:
        return
    for key in sorted(run.must_be_stored):
        require(
            key in run.shelf.ready,
            "I11",
            f"a confirmed block of group {key[-1]} was never offered to the manager, which had room",
        )


def _check_stored(run: Run, offload: SimpleCPUOffloadScheduler, *, has_policies: bool) -> None:
    pool = offload.tier.pool
    if has_policies and run.params.store_threshold > 1:
        if offload.store_side.declines.cut_plans:
            return  # what a request could not store at its end for the bound is missing, whoever stores what follows
        _check_chains(run, offload)
        return
    if has_policies and run.params.pending_store_blocks:
        return
    for key in run.must_be_stored:
        require(
            pool.cached_block_hash_to_block.get_one_block(key) is not None,
            "I11",
            f"a confirmed block of group {key[-1]} was never stored although there was room",
        )


def _check_chains(run: Run, offload: SimpleCPUOffloadScheduler) -> None:
    """Admission by reuse, where nothing was evicted: no copy lacks the ones before it.

    A block whose keys the device forgot while somebody held it is passed over, and so is one that its request let go of
    before its end; what follows is stored.
    """
    index = offload.tier.pool.cached_block_hash_to_block
    for group_id, spec in enumerate(run.params.specs):
        if not is_full_attention_spec(spec) or isinstance(spec.kind_spec, RSWASpec):
            continue
        per_block = run.params.tokens_per_block(spec) // run.world.hash_block_size
        for request in run.requests.values():
            keys = [
                make_block_hash_with_group_id(block_hash, group_id)
                for block_hash in request.block_hashes[per_block - 1 :: per_block]
            ]
            copied = [index.get_one_block(key) is not None for key in keys]
            chain = [has_copy or key in run.unkeyed for has_copy, key in zip(copied, keys, strict=True)]
            missing = chain.index(False) if False in chain else len(chain)
            require(
                not any(copied[missing:]),
                "I11",
                f"{request.request_id}: group {group_id} has copies behind its missing block {missing}: {copied}",
            )
