"""How the halves of a connector come to a shared pool and leave it, and which settings go with one."""

from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from tests.helpers.shared_engines import MiniEngine, StepClock, key_of, shape
from tests.sim.params import draw_params
from tests.sim.run import Run
from vllm.v1.simple_kv_offload.copy_backends import shared_host
from vllm.v1.simple_kv_offload.copy_backends.shared_host import (
    hold_segment,
    join_shared_pool,
    leave_shared_pool,
    open_shared_pool,
    segment_regions,
)
from vllm.v1.simple_kv_offload.copy_backends.shared_segment import SharedSegment
from vllm.v1.simple_kv_offload.host_buffer import HostBuffer
from vllm.v1.simple_kv_offload.metrics import MetricName
from vllm.v1.simple_kv_offload.options import parse_options

ROWS = {"a": 96, "b": 160}


def config(engine_id: str = "engine", lora: object = None) -> Any:
    return SimpleNamespace(kv_transfer_config=SimpleNamespace(engine_id=engine_id), lora_config=lora)


@pytest.fixture
def segment(tmp_path: Path) -> Iterator[SharedSegment]:
    opened = SharedSegment(str(tmp_path / "segment"), shape(), StepClock(), grace_s=0.0)
    hold_segment("engine", opened)
    yield opened
    shared_host._uses.clear()
    opened.close()


def test_both_halves_use_one_segment_which_is_left_with_the_second(segment: SharedSegment) -> None:
    assert join_shared_pool(config()) is segment
    leave_shared_pool(config())
    assert Path(segment.path).exists()
    assert segment.acquire()
    segment.release()
    leave_shared_pool(config())
    assert not Path(segment.path).exists()
    leave_shared_pool(config())


def test_a_copy_that_could_not_be_ended_keeps_the_place(segment: SharedSegment, tmp_path: Path) -> None:
    join_shared_pool(config())
    peer = MiniEngine(tmp_path / "segment", shape())
    leave_shared_pool(config(), busy=True)
    leave_shared_pool(config())
    assert peer.segment.attached() == [0]
    segment.close()
    assert peer.segment.attached() == []


def test_a_scheduler_without_a_worker_beside_it_is_refused(segment: SharedSegment) -> None:
    with pytest.raises(ValueError, match="shared_pool needs the worker in the process"):
        join_shared_pool(config("another"))
    with pytest.raises(ValueError, match="has a shared pool already"):
        hold_segment("engine", segment)


def test_what_cannot_be_shared_is_refused() -> None:
    plan: Any = None
    with pytest.raises(ValueError, match="shared_pool needs the engine's configuration"):
        open_shared_pool(None, plan, "pool", ROWS, 9)
    with pytest.raises(ValueError, match="shared_pool does not go with LoRA"):
        open_shared_pool(config(lora=object()), plan, "pool", ROWS, 9)


def test_the_regions_of_two_engines_are_the_same_memory(segment: SharedSegment, tmp_path: Path) -> None:
    peer = SharedSegment(str(tmp_path / "segment"), shape())
    own, other = segment_regions(segment, ROWS), segment_regions(peer, ROWS)
    assert {name: tuple(region.shape) for name, region in own.items()} == {"a": (9, 96), "b": (9, 160)}
    own["b"][8, 159] = 7
    assert other["b"][8, 159] == 7
    assert other["b"].sum() == 7
    assert other["a"].sum() == 0
    peer.close()


def test_a_buffer_over_given_memory_pins_and_lets_go_of_it(segment: SharedSegment) -> None:
    regions, pinned = segment_regions(segment, ROWS), []
    buffer = HostBuffer(ROWS, 9, lambda r: not pinned.append(r.data_ptr()), lambda r: pinned.clear(), regions)
    assert pinned == [region.data_ptr() for region in buffer.regions.values()]
    buffer.close()
    assert not pinned


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
        ({"shared_pool": "p", "eviction_policy": "arc"}, 1, "eviction_policy='arc'"),
        ({"shared_pool": "p"}, 2, "shared_pool='p' needs engines of one rank, this one has 2"),
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
