"""kill -9 and a new engine on the same disks: what is left, and what the new engine makes of it."""

from __future__ import annotations

import random
from abc import abstractmethod
from collections import deque

from tests.sim.device import Page
from tests.sim.failure import require
from tests.sim.marks import Marks
from tests.sim.registry import HashRegistry
from tests.sim.views import RunViews
from tests.sim.worker import SimWorker, Step
from tests.sim.workload import Truth
from vllm.v1.core.block_hash import get_block_hash, get_group_id, maybe_convert_block_hash
from vllm.v1.simple_kv_offload.metadata import KeptKeys, SimpleCPUOffloadMetadata


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
    if _is_forgetting(run):
        return
    found = _surviving(worker)
    run.marks.hit("killed")
    if worker.copying():
        run.marks.hit("killed while copies ran")
    if found:
        run.marks.hit("kept blocks found again")
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
    if run.chain is None or run.chain.kept is None:
        return
    pool = run.chain.disk.pool
    known = {block.block_id: pool.get_keys(block) for block in pool.blocks if block.block_hash is not None}
    for rank, table in enumerate(run.worker.kept):
        wrong = sorted(slot for slot in table.rows.keys() | known if table.rows.get(slot) != known.get(slot))
        require(not wrong, "I4", f"rank {rank} keeps disk slots {wrong} otherwise than they are")


def kill_weight(run: Killable) -> int:
    """More while a step is on its way that tells the ranks what changed on the disk."""
    orders = _next_orders(run)
    return 2 if orders is None or not orders.kept.slots else 15


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


def _is_forgetting(run: Killable) -> bool:
    """Content that was withdrawn (a reset, an error, a bad slot) is still in the table of every rank.

    The next step tells them; a crash before that is the one moment in which it would come back.
    """
    assert run.chain is not None
    pool = run.chain.disk.pool
    for slot, keys in _surviving(run.worker).items():
        if pool.get_keys(pool.blocks[slot]) != keys:
            pages = [memory.page(slot) for memory in run.worker.disks]
            if not all(_is_right(run, page, key) for page in pages for key, _ in keys):
                return True
    return False


def _is_right(run: Killable, page: Page, key: bytes) -> bool:
    worker = run.worker
    group = worker.groups[get_group_id(key)]  # type: ignore[arg-type]
    prints = run.registry.prints(bytes(get_block_hash(key)))  # type: ignore[arg-type]
    expected = group.expected_page(prints, worker.version)
    return not page.bad and all(page.read(group.group_id, at) == stamp for at, stamp in expected.items())


def _connect(run: RunViews, found: dict[int, KeptKeys]) -> None:
    """The ranks of the new engine tell what they have found, and nothing else becomes findable."""
    connector, chain = run.world.connector, run.chain
    assert connector is not None
    assert chain is not None
    connector.set_xfer_handshake_metadata(
        {rank: each.inventory() for rank, each in enumerate(run.worker.kept)}
    )
    back = {block.block_id for block in chain.disk.pool.blocks if block.block_hash is not None}
    require(back <= found.keys(), "I4", f"disk slots {sorted(back - found.keys())} were found from nowhere")
