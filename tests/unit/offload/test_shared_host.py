"""How the ranks and the scheduler of an engine come to a shared pool and leave it, and which settings go with one."""

import os
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from tests.helpers.offload_parts import rig_config
from tests.helpers.shared_engines import MiniEngine, StepClock, key_of, shape
from tests.sim.run import Run
from tests.sim.worlds import draw_params
from vllm.distributed.kv_transfer.kv_connector.factory import KVConnectorFactory
from vllm.v1.simple_kv_offload.copy_backends import shared_host
from vllm.v1.simple_kv_offload.copy_backends.shared_host import (
    SharedSlots,
    check_shareable,
    join_shared_pool,
    segment_path,
)
from vllm.v1.simple_kv_offload.copy_backends.shared_segment import SegmentShape, SharedSegment
from vllm.v1.simple_kv_offload.host_buffer import HostBuffer
from vllm.v1.simple_kv_offload.metrics import MetricName
from vllm.v1.simple_kv_offload.options import parse_options
from vllm.v1.simple_kv_offload.rank_parts import RankParts

ROWS = {"a": 96, "b": 160}
SIZE = SegmentShape(b"d" * 32, 9, 2, tuple(ROWS.values()), num_parts=3)


def config(ranks: int = 1, engine_id: str = "engine", lora: object = None, pp: int = 1) -> Any:
    parallel = SimpleNamespace(
        world_size=ranks * pp,
        tensor_parallel_size=ranks,
        pipeline_parallel_size=pp,
        prefill_context_parallel_size=1,
    )
    transfer = SimpleNamespace(engine_id=engine_id)
    return SimpleNamespace(kv_transfer_config=transfer, lora_config=lora, parallel_config=parallel)


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setattr(shared_host, "DEFAULT_FOLDER", str(tmp_path))
    return tmp_path


def rank_of(folder: Path, rank: int, engine_id: str = "engine", digest: bytes = b"d") -> SharedSegment:
    size = SegmentShape(digest * 32, 9, 2, tuple(ROWS.values()), num_parts=3)
    path = segment_path(str(folder), "pool", size.digest)
    return SharedSegment(path, size, StepClock(), engine_id=engine_id, member=1 + rank, grace_s=0.0)


def parts_of(rank: int) -> RankParts:
    """Group 0 is the same on all three ranks, group 1 is split."""
    return RankParts(9, (0, rank), (rank, 0), (3, 1))


def files(folder: Path) -> list[str]:
    return sorted(path.name for path in folder.iterdir())


def test_the_scheduler_finds_the_segment_of_its_ranks_which_goes_with_the_last_process(folder: Path) -> None:
    ranks = [rank_of(folder, rank) for rank in range(3)]
    other = rank_of(folder, 0, "another", b"e")
    scheduler = join_shared_pool(config(3), "pool")
    assert scheduler.path == ranks[0].path
    assert (scheduler.num_slots, scheduler.num_parts) == (9, 3)
    assert [segment.num_other_engines() for segment in (scheduler, *ranks)] == [0] * 4
    with pytest.raises(ValueError, match="the scheduler of engine_id='engine'"):
        join_shared_pool(config(3), "pool")
    other.close()
    for segment in (ranks[1], scheduler, ranks[0]):
        segment.close()
        assert len(files(folder)) == 1
    ranks[2].close()
    assert files(folder) == []


def test_tier_12_a_scheduler_whose_ranks_are_elsewhere_is_refused(folder: Path) -> None:
    with pytest.raises(ValueError, match=r"shared_pool='pool': ranks \[0, 1\] of this engine are not in its"):
        join_shared_pool(config(2), "pool")
    first, strange = rank_of(folder, 0), rank_of(folder, 1, digest=b"e")
    with pytest.raises(ValueError, match=r"ranks \[[01]\] of this engine"):
        join_shared_pool(config(2), "pool")
    second = rank_of(folder, 1)
    join_shared_pool(config(2), "pool").close()
    for segment in (first, second, strange):
        segment.close()


def test_two_engines_of_one_id_are_told(folder: Path) -> None:
    first = rank_of(folder, 0)
    with pytest.raises(ValueError, match="another process is rank 0 of engine_id='engine'"):
        rank_of(folder, 0)
    first.close()


def test_what_an_engine_holds_stays_held_until_its_last_process_has_left(folder: Path) -> None:
    ranks = [rank_of(folder, rank) for rank in range(2)]
    path = Path(ranks[0].path)
    engine = MiniEngine(path, SIZE, engine_id="engine")
    assert engine.stage(key_of(1))
    peer = MiniEngine(path, SIZE)
    engine.segment.close()
    assert peer.view()[1] == {1}, "a rank may still write"
    ranks[0].close(busy=True)
    ranks[1].close()
    assert peer.view()[1] == {1}
    os.close(ranks[0]._fd)  # what the end of the process does
    assert peer.view()[1] == set()


def test_a_scheduler_that_is_killed_beside_its_ranks_frees_nothing(folder: Path) -> None:
    rank = rank_of(folder, 0)
    engine, peer = (MiniEngine(Path(rank.path), SIZE, engine_id=name) for name in ("engine", "peer"))
    engine.stage(key_of(1))
    engine.die()
    assert peer.view()[1] == {1}
    os.close(rank._fd)
    assert peer.view() == ({}, set())


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"lora": object()}, "shared_pool does not go with LoRA"),
        ({"ranks": 2, "pp": 2}, "tensor parallelism only, not with pipeline_parallel_size=2"),
        ({"ranks": 65}, "at most 64 ranks, got 65"),
    ],
)
def test_what_cannot_be_shared_is_refused(folder: Path, changes: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        check_shareable(config(**changes), "pool")


def test_cfg_06_a_machine_without_shared_memory_is_told_before_the_model_is_loaded(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(shared_host, "DEFAULT_FOLDER", str(tmp_path / "none"))
    with pytest.raises(ValueError, match=r"shared_pool='pool' needs .*none.*--shm-size"):
        check_shareable(config(), "pool")


def test_cfg_06_too_little_shared_memory_is_told_before_the_model_is_loaded(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    free = SimpleNamespace(f_bavail=100, f_frsize=4096)
    monkeypatch.setattr(os, "statvfs", lambda _: free)
    check_shareable(config(), "pool", 409600)
    with pytest.raises(ValueError, match="room for 409600 bytes, cpu_bytes_to_use asks for 409601"):
        check_shareable(config(), "pool", 409601)
    # What a pool of this name has already is not asked for again.
    segment = rank_of(folder, 0)
    check_shareable(config(), "pool", 409601)
    with pytest.raises(ValueError, match="room for 409600 bytes"):
        check_shareable(config(), "pool-2", 409601)
    segment.close()


def test_the_connector_checks_the_room_for_its_bytes_and_not_for_its_blocks(folder: Path) -> None:
    extra = {"shared_pool": "pool", "cpu_bytes_to_use": 1 << 60}
    with pytest.raises(ValueError, match=f"asks for {1 << 60}"):
        KVConnectorFactory.check_config(rig_config(extra=extra))
    KVConnectorFactory.check_config(rig_config(extra={**extra, "num_cpu_blocks": 3}))
    KVConnectorFactory.check_config(rig_config(extra=extra, caching=False))


def test_ranks_see_the_same_bytes_of_what_is_the_same_and_their_own_of_the_rest(folder: Path) -> None:
    ranks = [SharedSlots(rank_of(folder, rank), ROWS, parts_of(rank)) for rank in range(3)]
    for rank, slots in enumerate(ranks):
        assert slots.regions["b"].shape == ((rank + 1) * 9, 160)
        slots.regions["b"][slots.parts.row(8, 1), 159] = 10 + rank
    ranks[2].regions["b"][ranks[2].parts.row(7, 0)] = 5
    assert [int(s.regions["b"][s.parts.row(8, 1), 159]) for s in ranks] == [10, 11, 12]
    assert [int(s.regions["b"][s.parts.row(7, 0), 0]) for s in ranks] == [5, 5, 5]
    assert all(int(s.regions["a"].sum()) == 0 for s in ranks)
    for slots in ranks:
        slots.segment.close()


def test_a_rank_pins_the_parts_that_it_uses(folder: Path) -> None:
    split = RankParts(9, (2,), (0,), (1,))
    slots = SharedSlots(rank_of(folder, 2), ROWS, split)
    assert [tuple(region.shape) for region in slots.regions.values()] == [(9, 96), (9, 160)]
    pinned: list[int] = []
    buffer = HostBuffer(
        ROWS, 9, lambda r: not pinned.append(r.data_ptr()), lambda r: pinned.clear(), slots.regions
    )
    assert pinned == [region.data_ptr() for region in slots.regions.values()]
    buffer.close()
    assert not pinned
    slots.segment.close()


def test_tier_12_engines_that_do_not_see_each_others_memory_have_a_pool_each(tmp_path: Path) -> None:
    hosts = [tmp_path / name for name in ("one", "two")]
    for host in hosts:
        host.mkdir()
    first, second = (MiniEngine(host / "segment", shape()) for host in hosts)
    assert first.stage(key_of(1))
    first.finish(0)
    assert not second.read(key_of(1))
    assert second.stage(key_of(1))


@pytest.mark.parametrize(
    ("extra", "world_size", "message"),
    [
        ({"shared_pool": ""}, 1, "shared_pool must be a name"),
        ({"shared_pool": "a/b"}, 1, "shared_pool must be a name.*'a/b'"),
        ({"shared_pool": 3}, 1, "shared_pool must be a name.*3"),
        (
            {"shared_pool": "p", "disk_tier": True, "disk_path": "/x"},
            1,
            "shared_pool='p' goes with host memory",
        ),
        ({"shared_pool": "p", "kv_offload_backend": "disk", "disk_path": "/x"}, 1, "host memory only"),
        ({"shared_pool": "p", "eviction_policy": "arc"}, 2, "eviction_policy='arc'"),
    ],
)
def test_settings_that_do_not_go_together_are_named(
    extra: dict[str, Any], world_size: int, message: str
) -> None:
    with pytest.raises(ValueError, match=message):
        parse_options(extra, world_size)


def test_memory_of_ones_own_is_the_default() -> None:
    assert parse_options({}, 1).shared_pool is None
    assert parse_options({"shared_pool": "node-0_a.b"}, 1).shared_pool == "node-0_a.b"


def test_the_figures_say_whether_the_pool_is_used() -> None:
    seed = next(seed for seed in range(100) if draw_params(seed).shared)
    run = Run(draw_params(seed))
    manager = run.offload
    assert manager is not None
    assert manager.tier.shared is not None

    def active() -> object:
        stats = manager.get_stats()
        assert stats is not None
        return stats.data["data"][MetricName.SHARED_POOL_ACTIVE]

    assert active() == {(): 1}
    table = manager.tier.shared._table
    assert isinstance(table, SharedSegment)
    table._patience_s = -1.0
    with run.other_engine().pool, manager.tier.turn:
        assert active() == {(): 0}
    assert not manager.reset(), "the other engines cannot be told"
    run.close()
