"""Real worker halves of several ranks on one shared pool, in one process and in processes that are killed.

The rig's fake model writes bytes that differ between ranks exactly where the specs say so, and checks all that it reads.
"""

from __future__ import annotations

import os
import time
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from tests.helpers.offload_rig import full, mamba, prompt, window
from tests.helpers.rank_rig import ProcessRig, RankProcess, RankRig
from vllm.v1.kv_cache_interface import KVCacheSpec
from vllm.v1.simple_kv_offload import sizing
from vllm.v1.simple_kv_offload.copy_backends import shared_host


def heads(spec: KVCacheSpec, count: int | None) -> KVCacheSpec:
    """There may be so many different bytes on the ranks."""
    return replace(spec, max_tp_shards=count)  # type: ignore[call-arg]


ALIKE, SPLIT = heads(full(), 1), heads(full(), None)
KINDS: dict[str, tuple[list[KVCacheSpec], int, int]] = {
    # specs, ranks, parts of a slot
    "one head for all": ([ALIKE], 4, 1),
    "a head for each": ([SPLIT], 2, 2),
    "two heads on four ranks": ([heads(full(), 2)], 4, 2),
    "states split, attention not": ([ALIKE, mamba()], 2, 1),
    "states alike, attention split": ([SPLIT, replace(mamba(), tp_replicated=True)], 3, 1),  # type: ignore[call-arg]
    "windows split, attention not": ([heads(window(), None), ALIKE], 2, 1),
    "two heads on four ranks, states split": ([heads(full(), 2), mamba()], 4, 2),
}


@pytest.fixture(autouse=True)
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setattr(shared_host, "DEFAULT_FOLDER", str(tmp_path))
    return tmp_path


@pytest.fixture
def rigs() -> Iterator[list[RankRig]]:
    made: list[RankRig] = []
    yield made
    for rig in made:
        rig.close()


def attached(rig: RankRig) -> int:
    table = rig.connector._table  # type: ignore[attr-defined]
    return len(table.attached())


@pytest.mark.parametrize("processes", [False, True], ids=["threads", "processes"])
@pytest.mark.parametrize("kind", KINDS)
def test_xfer_07_what_ranks_stored_is_read_by_all_and_by_another_engine(
    kind: str, processes: bool, rigs: list[RankRig], folder: Path
) -> None:
    specs, ranks, num_parts = KINDS[kind]
    make = ProcessRig if processes else RankRig
    settings: dict[str, Any] = {"specs": specs, "ranks": ranks, "held": False}
    first = make(**settings)
    rigs.append(first)
    assert first.manager.tier.num_parts == num_parts
    tokens = prompt(24)
    first.generate(tokens, 2)
    second = make(**settings, engine_id="two")
    rigs.append(second)
    assert len(list(folder.iterdir())) == 1
    for rig in (first, second):
        rig.evict_device()
        request = rig.generate(tokens, 2)
        assert request.num_external_computed_tokens >= 16, "the bytes came from the pool"
        rig.assert_at_rest()
    first.close()
    second.evict_device()
    second.generate(tokens, 2)
    second.close()
    assert not list(folder.iterdir())


def test_each_block_is_written_once_where_ranks_are_alike(rigs: list[RankRig]) -> None:
    rig = RankRig([ALIKE], ranks=4)
    rigs.append(rig)
    rig.generate(prompt(32), 2)
    written: list[set[int]] = [
        {slot for job in rig.mover(rank).launched if job.is_store for slot in job.dst_blocks}
        for rank in range(4)
    ]
    assert len(set().union(*written)) == sum(map(len, written)) == 8
    assert list(map(len, written)) == [2, 2, 2, 2], "and the ranks take turns"
    assert rig.in_tier(next(iter(rig.requests.values()))) == list(range(8))


@pytest.mark.parametrize("setting", ["cpu_bytes_to_use", "cpu_bytes_to_use_per_rank"])
@pytest.mark.parametrize(("spec", "share"), [(ALIKE, 4), (heads(full(), 2), 2), (SPLIT, 1)])
def test_what_is_alike_takes_memory_once(
    setting: str, spec: KVCacheSpec, share: int, rigs: list[RankRig], folder: Path
) -> None:
    size = 64 << 20
    big = spec.copy_with_new_block_size(1 << 14)
    given = size // 4 if setting.endswith("per_rank") else size
    rig = RankRig([big], ranks=4, extra={setting: given, "num_cpu_blocks": None})
    rigs.append(rig)
    block = big.page_size_bytes
    assert rig.manager.num_cpu_blocks == share * size // 4 // block
    (segment,) = folder.iterdir()
    assert 0.98 * size <= segment.stat().st_size <= 1.02 * size


def test_the_table_of_tiny_blocks_counts_into_the_budget(rigs: list[RankRig], folder: Path) -> None:
    size, tiny = 32 << 20, ALIKE.copy_with_new_block_size(64)
    rig = RankRig([tiny], ranks=2, extra={"cpu_bytes_to_use": size, "num_cpu_blocks": None})
    rigs.append(rig)
    (segment,) = folder.iterdir()
    table_and_blocks = segment.stat().st_size
    assert rig.manager.num_cpu_blocks < size // tiny.page_size_bytes
    taken = table_and_blocks + sizing.VIEW_BYTES * rig.manager.num_cpu_blocks
    assert 0.98 * size <= taken <= 1.02 * size


def test_xfer_06_a_rank_with_nothing_to_write_reports_and_is_waited_for(rigs: list[RankRig]) -> None:
    rig = RankRig([ALIKE], ranks=2)
    rigs.append(rig)
    request = rig.add(prompt(8), 8)
    for _ in range(3):
        rig.step(copies=False)
    assert [bool(rig.mover(rank).jobs) for rank in range(2)] == [True, True]
    rig.mover(0).release()
    rig.step(copies=False)
    assert rig.in_tier(request) == [], "the other rank has written half of it"
    rig.mover(1).release()
    rig.step(copies=False)
    assert 0 in rig.in_tier(request)
    rig.run()


@pytest.mark.parametrize("spec", [ALIKE, SPLIT], ids=["alike", "split"])
@pytest.mark.parametrize("victim", [0, 1])
def test_a_rank_killed_in_the_middle_of_a_store_leaves_nothing_to_find(
    spec: KVCacheSpec, victim: int, rigs: list[RankRig]
) -> None:
    rig = ProcessRig([spec], ranks=2)
    heir = RankRig([spec], ranks=2, held=False, engine_id="heir")
    rigs.append(heir)
    tokens = prompt(24)
    request = rig.add(tokens, 8)
    workers: list[Any] = rig.workers
    for _ in range(3):
        rig.step(copies=False)
    assert isinstance(workers[victim], RankProcess)
    assert workers[victim].copy_some() > 0
    workers[victim].kill()
    other = workers[1 - victim]
    other.drain()
    report = other.finish(set())
    assert report.kv_connector_worker_meta.completed_store_events
    rig.connector.update_connector_output(report)
    assert rig.in_tier(request) == []
    with heir.manager.tier.turn:
        assert heir.in_tier(request) == []
        assert heir.manager.tier.num_stageable < heir.host_blocks - 1, "still held: the others live"
    other.shutdown()
    assert attached(heir) == 2, "the scheduler of the dead rank, and the heir's own ranks"
    rig.connector.shutdown()
    assert attached(heir) == 1
    heir.generate(tokens, 2)
    heir.evict_device()
    again = heir.generate(tokens, 2)
    assert again.num_external_computed_tokens >= 20
    heir.assert_at_rest()


def test_an_engine_of_which_all_is_killed_gives_its_slots_back(rigs: list[RankRig]) -> None:
    rig = ProcessRig([SPLIT], ranks=2)
    heir = RankRig([SPLIT], ranks=2, held=False, engine_id="heir")
    rigs.append(heir)
    rig.generate(prompt(16), 2)
    rig.add(prompt(24, 1), 8)
    for _ in range(3):
        rig.step(copies=False)
    workers: list[Any] = rig.workers
    for worker in workers:
        worker.copy_some()
        worker.kill()
    table = rig.connector._table  # type: ignore[attr-defined]
    os.close(table._fd)  # what the end of the scheduler's process does
    table._fd = -1
    held = heir.manager.tier
    deadline = time.monotonic() + 10
    while held.num_stageable < heir.host_blocks - 1:
        assert time.monotonic() < deadline
        time.sleep(0.2)
        with held.turn:
            pass
    request = heir.generate(prompt(16), 2)
    assert request.num_external_computed_tokens == 12, "what had been stored is found"
    fresh = heir.generate(prompt(24, 1), 2)
    assert fresh.num_external_computed_tokens == 0, "what was being stored is not"


def test_engines_of_other_sizes_never_mix(rigs: list[RankRig], folder: Path) -> None:
    for ranks in (1, 2, 4):
        rigs.append(RankRig([ALIKE], ranks=ranks, held=False, engine_id=f"tp{ranks}"))
        rigs[-1].generate(prompt(16), 2)
        assert len(list(folder.iterdir())) == len(rigs)
        assert [attached(rig) for rig in rigs] == [1] * len(rigs)
