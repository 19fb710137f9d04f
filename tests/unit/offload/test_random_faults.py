"""Copies that fail at random, on every tier: nobody gets a wrong token, everything comes back, and the figures tell."""

from __future__ import annotations

import random
from collections import Counter
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.helpers.faulty_backend import FAULTS, FaultyBackend
from tests.helpers.offload_rig import Rig, full, mamba, prompt, window
from vllm.utils.clock import MonotonicClock
from vllm.v1.request import Request
from vllm.v1.simple_kv_offload.copy_backend import create_copy_backend
from vllm.v1.simple_kv_offload.disk_moves import DiskMoves
from vllm.v1.simple_kv_offload.metrics import MetricName

SPECS: dict[str, list[Any]] = {
    "full": [full()],
    "full and window": [full(), window()],
    "full and state": [full(), mamba()],
}


def plant(rig: Rig, seed: int) -> list[FaultyBackend]:
    """Wrap the movers of all tiers; that of host memory is the one without threads, so that a seed is a run."""
    worker = rig.worker()
    assert worker._backend is not None
    worker._backend.shutdown()
    inline = create_copy_backend("inline", MonotonicClock(), 30.0)
    inline.init(worker.gpu_kv_caches, worker.cpu_kv_caches, torch.device("cpu"))
    planted = [FaultyBackend(inline, seed)]
    worker._backend = planted[0]
    if worker._moves is not None:
        assert worker._moves.backend is not None
        planted.append(FaultyBackend(worker._moves.backend, seed + 1))
        worker._moves = DiskMoves(planted[1])
    return planted


def live(rig: Rig, chance: random.Random) -> list[Request]:
    """Requests over few prompts, some of which are aborted, with resets in between; returns the others."""
    kept = []
    for _ in range(100):
        request = rig.add(prompt(chance.randint(1, 30), chance.randrange(5)), max_tokens=chance.randint(1, 4))
        for _ in range(chance.randrange(4)):
            rig.step(copies=chance.random() < 0.7)
        if chance.random() < 0.15:
            rig.abort(request)
        else:
            kept.append(request)
        if chance.random() < 0.4:
            rig.scheduler.reset_prefix_cache(reset_connector=chance.random() < 0.1)
    rig.run(2000)
    return kept


@pytest.mark.parametrize("tiers", ["eager", "lazy", "disk below"])
@pytest.mark.parametrize("specs", SPECS)
def test_whatever_fails_outputs_are_right_nothing_is_left_and_the_ledger_closes(
    specs: str, tiers: str, tmp_path: Path
) -> None:
    chance = random.Random(f"{specs}{tiers}")
    page = sum(spec.page_size_bytes for spec in SPECS[specs])
    disk = {"disk_tier": True, "disk_path": str(tmp_path / "kv"), "disk_capacity_bytes": 64 * page}
    extra = disk if tiers == "disk below" else {}
    rig = Rig(SPECS[specs], device_blocks=40, host_blocks=24, lazy=tiers == "lazy", held=False, extra=extra)
    planted = plant(rig, seed=7)
    for request in live(rig, chance):
        rig.check_output(request)
    rig.assert_at_rest()
    met = sum((backend.met for backend in planted), Counter[str]())
    assert set(met) == set(FAULTS), "every kind of fault was met"
    sides = (rig.manager.store_side.ledger, rig.manager.load_side.ledger)
    assert all(ledger.in_flight == 0 for ledger in sides)
    stores, loads = sides
    assert stores.failed
    assert stores.done
    # Of states, lazy copies are few: only those at the end of a prompt are there to be endangered.
    assert (loads.failed and loads.done) or tiers == "lazy"
    stats = rig.manager.get_stats()
    assert stats is not None
    failed = stats.data["data"][MetricName.TIER_FAILED_BLOCKS]
    assert [failed["host", direction] for direction in ("store", "load")] == [each.failed for each in sides]
    if rig.manager.chain is not None:
        down, up = rig.chain.down.ledger, rig.chain.up.ledger
        assert [failed["disk", direction] for direction in ("store", "load")] == [down.failed, up.failed]
        assert down.failed
    rig.close()
    assert not list(tmp_path.iterdir())
