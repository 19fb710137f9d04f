"""kill -9 and a new engine on the same disks: what is left, and what the new engine makes of it."""

from __future__ import annotations

import random
from abc import abstractmethod
from collections import deque
from itertools import product

from tests.sim.copy_worker import Step
from tests.sim.failure import require
from tests.sim.marks import Marks
from tests.sim.registry import HashRegistry
from tests.sim.views import RunViews
from tests.sim.worker import SimWorker
from tests.sim.workload import Truth
from vllm.v1.core.block_hash import get_block_hash, get_group_id, maybe_convert_block_hash
from vllm.v1.outputs import KVConnectorOutput
from vllm.v1.simple_kv_offload.metadata import (
    KeptKeys,
    KeptOrder,
    SimpleCPUOffloadMetadata,
    SimpleCPUOffloadWorkerMetadata,
)


class Killable(RunViews):
    """What of a run a kill concerns, besides its views."""

    marks: Marks
    registry: HashRegistry
    must_be_stored: set[bytes]
    store_excuse: str | None
    steps: deque[Step]

    @abstractmethod
    def live(self) -> list[Truth]:
        """Requests whose client still waits."""

    @abstractmethod
    def start_engine(self, worker: SimWorker) -> None:
        """Build everything that dies with an engine."""


def kill(run: Killable, rng: random.Random) -> None:
    """kill -9, and another engine on the same disks: memory, requests and copies under way are gone."""
    worker = run.worker
    _hand_out(run, rng)
    found = _surviving(worker)
    wrong = [slot for slot, keys in found.items() if not _is_right(run, slot, keys)]
    if wrong and any(table.is_stale for table in worker.kept):
        return  # that was told: a reset says that it did not get through, and checksums see what was written over
    require(
        not wrong,
        "I6",
        f"the next engine finds disk slots {wrong}, which are not what they were or were withdrawn",
    )
    run.marks.hit("killed")
    if worker.copying():
        run.marks.hit("killed while copies ran")
    if found:
        run.marks.hit("kept blocks found again")
        if run.world.params.disk:
            run.marks.hit("a disk in place of the host kept")
    for truth in run.live():
        truth.ended_by = "abort"
    run.must_be_stored.clear()
    run.store_excuse = run.store_excuse or "killed"
    run.registry.tokenless |= {
        maybe_convert_block_hash(get_block_hash(key)) for keys in found.values() for key, _ in keys
    }
    run.start_engine(worker.after_a_kill())
    _connect(run, found)


def check_kept(run: RunViews) -> None:
    """At rest, the table of each rank says what is findable on the disk, and no more."""
    if run.kept is None:
        return
    pool = run.kept_pool
    known = {block.block_id: pool.get_keys(block) for block in pool.blocks if block.block_hash is not None}
    for rank, table in enumerate(run.worker.kept):
        wrong = sorted(slot for slot in table.rows.keys() | known if table.rows.get(slot) != known.get(slot))
        require(not wrong, "I4", f"rank {rank} keeps disk slots {wrong} otherwise than they are")


def kill_weight(run: Killable) -> int:
    """More while the ranks have yet to hear what changed on the disk, most if they should have heard of it by now.

    Also while the engine has yet to hear what a rank found damaged there.
    """
    if run.kept is not None and run.kept.owes_withdrawal:
        return 300
    if any(_names_damage(run, report) for step in run.steps for report in step.reports):
        return 150
    orders = _next_orders(run)
    return 2 if orders is None or not orders.kept.slots else 15


def _names_damage(run: Killable, report: KVConnectorOutput | None) -> bool:
    meta = None if report is None else report.kv_connector_worker_meta
    if not isinstance(meta, SimpleCPUOffloadWorkerMetadata):
        return False
    return bool(meta.bad_cpu_blocks if run.world.params.disk else meta.bad_disk_blocks)


def _next_orders(run: Killable) -> SimpleCPUOffloadMetadata | None:
    step = next((step for step in run.steps if not step.executed), None)
    orders = None if step is None else step.output.kv_connector_metadata
    return orders if isinstance(orders, SimpleCPUOffloadMetadata) else None


def _hand_out(run: Killable, rng: random.Random) -> None:
    """The next step may have reached some ranks, and those may have written their tables."""
    orders = _next_orders(run)
    if orders is not None:
        for table in run.worker.kept:
            if rng.random() < 0.5:
                table.bind(orders.kept)


def _surviving(worker: SimWorker) -> dict[int, KeptKeys]:
    """What a new engine finds: rows that all ranks have."""
    first, *others = (table.rows for table in worker.kept)
    return {slot: keys for slot, keys in first.items() if all(rows.get(slot) == keys for rows in others)}


def _is_right(run: Killable, slot: int, keys: KeptKeys) -> bool:
    """Whether the slot has the bytes of these keys on all ranks, or bytes that a read finds out."""
    worker = run.worker
    memories = worker.hosts if run.world.params.disk else worker.disks
    pages = zip([memory.page(slot) for memory in memories], worker.rank_groups, strict=True)
    for (page, groups), (key, _) in product(pages, keys):
        group = groups[get_group_id(key)]
        prints = run.registry.prints(bytes(get_block_hash(key)))  # type: ignore[arg-type]
        expected = group.expected_page(prints, worker.version)
        right = all(page.read(group.group_id, at) == stamp for at, stamp in expected.items())
        if page.tainted or not (right or page.is_lost):
            return False
    return True


def taint_kept(run: RunViews) -> None:
    """What is findable on the kept disk now is about to be reset: no later engine may find it."""
    if run.kept is None:
        return
    memories = run.worker.hosts if run.world.params.disk else run.worker.disks
    for block in run.kept_pool.blocks:
        if block.block_hash is not None:
            for memory in memories:
                memory.page(block.block_id).tainted = True


def carry_out_withdrawal(run: Killable, rng: random.Random) -> None:
    """As the engine does before it answers a reset or an error: steps that were sent come first."""
    connector = run.world.connector
    withdrawal = None if connector is None else connector.take_withdrawal()
    if withdrawal is None:
        return
    assert isinstance(withdrawal, KeptOrder)
    for step in run.steps:
        if not step.executed:
            run.worker.execute(step, rng)
    run.worker.apply_withdrawal(withdrawal, rng)


def _connect(run: RunViews, found: dict[int, KeptKeys]) -> None:
    """The ranks of the new engine tell what they have found, and nothing else becomes findable."""
    connector = run.world.connector
    assert connector is not None
    connector.set_xfer_handshake_metadata(
        {rank: each.inventory() for rank, each in enumerate(run.worker.kept)}
    )
    back = {block.block_id for block in run.kept_pool.blocks if block.block_hash is not None}
    require(back <= found.keys(), "I4", f"disk slots {sorted(back - found.keys())} were found from nowhere")
