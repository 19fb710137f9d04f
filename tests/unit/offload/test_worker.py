"""The worker half: regions, sizes, orders → copies, results → reports."""

from __future__ import annotations

import sys
import threading
from collections.abc import Sequence
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from tests.helpers.offload_rig import Byte
from vllm.v1.kv_cache_interface import (
    FullAttentionSpec,
    KVCacheConfig,
    KVCacheGroupSpec,
    KVCacheTensor,
    MambaSpec,
)
from vllm.v1.simple_kv_offload import sizing
from vllm.v1.simple_kv_offload.copy_backends.base import CopyError, CopyJob, CopyResult
from vllm.v1.simple_kv_offload.copy_backends.threaded import ThreadedCopyBackend
from vllm.v1.simple_kv_offload.metadata import (
    SimpleCPUOffloadMetadata,
    SimpleCPUOffloadWorkerMetadata,
)
from vllm.v1.simple_kv_offload.regions import device_regions
from vllm.v1.simple_kv_offload.sizing import sync_num_offload_blocks_across_workers
from vllm.v1.simple_kv_offload.worker import SimpleCPUOffloadWorker

BLOCKS = 6


def spec(heads: int = 1) -> FullAttentionSpec:
    return FullAttentionSpec(block_size=4, num_kv_heads=heads, head_size=4, dtype=Byte())  # type: ignore[arg-type]


def plan(
    tensors: list[KVCacheTensor], groups: Sequence[tuple[list[str], Any]] = ((["a", "b"], None),)
) -> KVCacheConfig:
    named = [KVCacheGroupSpec(names, group_spec or spec()) for names, group_spec in groups]
    return KVCacheConfig(BLOCKS, tensors, named)


def views(tensor: KVCacheTensor, memory: torch.Tensor, page: int) -> dict[str, torch.Tensor]:
    return {
        name: memory.as_strided((BLOCKS, page), (tensor.block_stride, 1), tensor.page_start(i, 0))
        for i, name in enumerate(tensor.layers)
    }


def test_blocks_outermost_make_one_region() -> None:
    tensor = KVCacheTensor(BLOCKS * 80, ["a", "b"], 32, 80)
    memory = torch.zeros(BLOCKS * 80, dtype=torch.int8)
    regions = device_regions(plan([tensor]), views(tensor, memory, 32))
    (region,) = regions.values()
    assert region.shape == (BLOCKS, 80)
    assert region.data_ptr() == memory.data_ptr()


def test_layers_outermost_make_one_region_each() -> None:
    tensor = KVCacheTensor(2 * BLOCKS * 32, ["a", "b"], BLOCKS * 32, 32)
    memory = torch.zeros(2 * BLOCKS * 32, dtype=torch.int8)
    regions = device_regions(plan([tensor]), views(tensor, memory, 32))
    assert {name: tuple(region.shape) for name, region in regions.items()} == {
        "a": (BLOCKS, 32), "b": (BLOCKS, 32),
    }  # fmt: skip
    assert regions["b"].data_ptr() == memory.data_ptr() + BLOCKS * 32


def test_heads_outside_blocks_make_one_region_per_head() -> None:
    tensor = KVCacheTensor(BLOCKS * 64, ["a"], BLOCKS * 64, 32)
    memory = torch.arange(BLOCKS * 64, dtype=torch.int32).to(torch.int8)
    cache = memory.as_strided((2, BLOCKS, 32), (BLOCKS * 32, 32, 1), 0)
    regions = device_regions(plan([tensor], [(["a"], spec(heads=2))]), {"a": cache})
    assert list(regions) == ["a.head_0", "a.head_1"]
    assert torch.equal(regions["a.head_1"][3], cache[1, 3])


def test_groups_that_alias_the_same_bytes_count_once() -> None:
    first = KVCacheTensor(BLOCKS * 64, ["a", "b"], 32, 64)
    second = KVCacheTensor(BLOCKS * 64, ["c"], 32, 64)
    memory = torch.zeros(BLOCKS * 64, dtype=torch.int8)
    caches = {**views(first, memory, 32), **views(second, memory, 32)}
    config = plan([first, second], [(["a", "b"], None), (["c"], MambaSpec(4, ((32,),), (Byte(),)))])
    regions = device_regions(config, caches)
    assert [tuple(region.shape) for region in regions.values()] == [(BLOCKS, 64)]


def test_typed_views_and_lists_of_parts_find_their_bytes() -> None:
    tensor = KVCacheTensor(BLOCKS * 64, ["a", "b"], 32, 64)
    memory = torch.zeros(BLOCKS * 32, dtype=torch.float16)
    cache = memory.as_strided((BLOCKS, 4, 4), (32, 4, 1), 16)  # layer b: behind the page of a
    (region,) = device_regions(plan([tensor]), {"b": [cache, cache[:, :1]]}).values()
    assert region.data_ptr() == memory.data_ptr()


def test_without_a_placement_each_allocation_is_a_region() -> None:
    cache = torch.zeros(BLOCKS, 2, 5, dtype=torch.float32)
    regions = device_regions(plan([]), {"a": cache, "b": cache[:, 1:]})
    assert [tuple(region.shape) for region in regions.values()] == [(BLOCKS, 40)]


@pytest.mark.parametrize(
    ("tensors", "caches", "message"),
    [
        ([], {}, "no KV caches"),
        ([], {"a": torch.zeros(7)}, "no multiple of 6 blocks"),
        ([KVCacheTensor(384, ["x"], 32, 64)], {"a": torch.zeros(384)}, "none of the planned"),
        (
            [KVCacheTensor(384, ["a"], 32, 64)],
            {"a": torch.zeros(100, dtype=torch.int8)},
            "outside their allocation",
        ),
    ],
)
def test_caches_that_do_not_fit_the_plan(
    tensors: list[KVCacheTensor], caches: dict[str, torch.Tensor], message: str
) -> None:
    with pytest.raises(ValueError, match=message):
        device_regions(plan(tensors, [(["a"], None)]), caches)


class FakeMover:
    """What outside code may put in the backend's place."""

    def __init__(self) -> None:
        self.calls: list[tuple[list[int], list[int], bool, int]] = []
        self.lists: list[list[Any]] = []
        self.closed = 0

    def launch_copy(
        self, src: Sequence[int], dst: Sequence[int], is_store: bool, event_idx: int, events: list[Any],
        wait_event: Any = None,
    ) -> None:  # fmt: skip
        self.calls.append((list(src), list(dst), is_store, event_idx))
        self.lists.append(events)

    def shutdown(self) -> None:
        self.closed += 1


class ForeignEvent:
    """An event that only says whether it is over, like a device's."""

    def __init__(self) -> None:
        self.over = False

    def query(self) -> bool:
        return self.over


def make_worker(**changes: Any) -> SimpleCPUOffloadWorker:
    arguments = {"cpu_capacity_bytes": 64 * 5, **changes}
    worker = SimpleCPUOffloadWorker(None, plan([KVCacheTensor(BLOCKS * 64, ["a", "b"], 32, 64)]), **arguments)
    memory = torch.zeros(BLOCKS * 64, dtype=torch.int8)
    worker.register_kv_caches(views(worker._kv_cache_config.kv_cache_tensors[0], memory, 32))
    return worker


def faked() -> tuple[SimpleCPUOffloadWorker, FakeMover]:
    worker = make_worker()
    worker.shutdown()
    mover = FakeMover()
    worker._backend = mover
    return worker, mover


def test_sizes_and_memory() -> None:
    worker = make_worker()
    assert worker.num_cpu_blocks == 5
    assert worker.device == torch.device("cpu")
    assert {name: tuple(t.shape) for name, t in worker.cpu_kv_caches.items()} == {"a": (5, 64)}
    assert all(not tensor.any() for tensor in worker.cpu_kv_caches.values())
    assert all(tensor.data_ptr() % 4096 == 0 for tensor in worker.cpu_kv_caches.values())
    worker.shutdown()
    worker.shutdown()
    assert worker.cpu_kv_caches == {}


def test_configured_blocks_must_fit() -> None:
    worker = make_worker(num_cpu_blocks=3)
    assert worker.num_cpu_blocks == 3
    worker.shutdown()
    with pytest.raises(ValueError, match="num_cpu_blocks=6 exceeds the capacity of this rank, 5 blocks"):
        make_worker(num_cpu_blocks=6)
    with pytest.raises(ValueError, match="disk_path"):
        make_worker(kv_offload_backend="disk", disk_capacity_bytes=640)


def test_one_process_agrees_with_itself() -> None:
    assert sync_num_offload_blocks_across_workers(7) == 7
    assert sizing.dist is torch.distributed


def test_orders_become_copies_and_results_become_reports() -> None:
    worker, mover = faked()
    metadata = SimpleCPUOffloadMetadata(
        load_event=4, load_gpu_blocks=[1, 2, 3], load_cpu_blocks=[4, 3, 2], load_event_to_reqs={4: ["p", "q"]},
        store_event=9, store_gpu_blocks=[5], store_cpu_blocks=[1], load_block_counts=[2, 1],
    )  # fmt: skip
    worker.handle_preemptions(metadata)
    worker.bind_connector_metadata(metadata)
    worker.start_load_kv()
    worker.start_load_kv()
    worker.wait_for_save()
    worker.wait_for_save()
    assert mover.calls == [
        ([4, 3], [1, 2], False, 4), ([2], [3], False, 4), ([5], [1], True, 9),
    ]  # fmt: skip
    assert worker.get_finished(set()) == (None, None)
    assert worker.build_connector_worker_meta() is None
    worker.clear_connector_metadata()
    event = ForeignEvent()
    mover.lists[1].append((4, event))
    assert worker.get_finished(set()) == (None, None)
    event.over = True
    assert worker.get_finished(set()) == (None, {"q"})
    failed = CopyResult()
    failed.resolve(CopyError("rot", frozenset({4})))
    mover.lists[0].append((4, failed))
    results = worker.get_transfer_results(set())
    assert (results.finished_recving, results.failed_recving) == ({"p"}, {"p"})
    mover.lists[2].append((9, event))
    assert worker.build_connector_worker_meta() == SimpleCPUOffloadWorkerMetadata({9: 1}, {}, {4})
    assert worker.build_connector_worker_meta() is None
    worker.shutdown()
    assert mover.closed == 1


def test_a_load_without_shares_is_one_copy_for_all_its_requests() -> None:
    worker, mover = faked()
    metadata = SimpleCPUOffloadMetadata(
        load_event=0, load_gpu_blocks=[1, 2], load_cpu_blocks=[1, 2], load_event_to_reqs={0: ["p", "q"]}
    )
    worker.bind_connector_metadata(metadata)
    worker.start_load_kv()
    event = ForeignEvent()
    event.over = True
    mover.lists[0].append((0, event))
    assert worker.get_finished(set()) == (None, {"p", "q"})


def test_orders_of_a_step_that_failed_are_reported_as_failed() -> None:
    worker, _ = faked()
    worker.bind_connector_metadata(
        SimpleCPUOffloadMetadata(
            load_event=0, load_event_to_reqs={0: ["p"]}, store_event=0, store_gpu_blocks=[1],
            store_cpu_blocks=[1], issued_load_event=0, issued_store_event=0,
        )
    )  # fmt: skip
    worker.clear_connector_metadata()  # the forward raised
    results = worker.get_transfer_results(set())
    assert results.failed_recving == results.finished_recving == {"p"}
    meta = worker.build_connector_worker_meta()
    assert meta is not None
    assert meta.failed_store_events == {0: 1}


def test_orders_that_never_arrived_are_noticed() -> None:
    worker, _ = faked()
    worker.bind_connector_metadata(
        SimpleCPUOffloadMetadata(issued_load_event=1, issued_store_event=2, store_event=2, store_gpu_blocks=[1],
                                 store_cpu_blocks=[1])
    )  # fmt: skip
    meta = worker.build_connector_worker_meta()
    assert meta is not None
    assert (meta.lost_load_events, meta.failed_store_events) == ({0, 1}, {0: 1, 1: 1})
    worker.bind_connector_metadata(
        SimpleCPUOffloadMetadata(
            issued_load_event=1, issued_store_event=2, failed_load_events={1: ["q"], 7: ["z"]}
        )
    )
    assert worker.get_transfer_results(set()).failed_recving == {"q"}
    worker.bind_connector_metadata(
        SimpleCPUOffloadMetadata(issued_load_event=1, issued_store_event=2, failed_load_events={1: ["q"]})
    )
    assert worker.get_transfer_results(set()).failed_recving == set(), "each rank reports it once"


def test_a_flush_waits_for_everything_ordered() -> None:
    worker = make_worker()
    worker.bind_connector_metadata(
        SimpleCPUOffloadMetadata(store_event=0, store_gpu_blocks=[1], store_cpu_blocks=[1])
    )
    worker.wait_for_save()
    worker.handle_preemptions(SimpleCPUOffloadMetadata(need_flush=True))
    meta = worker.build_connector_worker_meta()
    assert meta is not None
    assert meta.completed_store_events == {0: 1}
    worker.unregister_kv_caches()
    worker.shutdown()


def test_metadata_of_another_connector_is_a_type_error() -> None:
    worker, _ = faked()
    with pytest.raises(TypeError, match="str"):
        worker.bind_connector_metadata("orders")  # type: ignore[arg-type]
    with pytest.raises(TypeError, match="int"):
        SimpleCPUOffloadWorkerMetadata().aggregate(3)  # type: ignore[arg-type]


def test_reports_of_ranks_add_up() -> None:
    one = SimpleCPUOffloadWorkerMetadata({1: 1, 2: 1}, {}, {5}, {3})
    two = SimpleCPUOffloadWorkerMetadata({1: 1}, {2: 1}, {6}, set())
    assert one.aggregate(two) == SimpleCPUOffloadWorkerMetadata({1: 2, 2: 1}, {2: 1}, {5, 6}, {3})
    assert SimpleCPUOffloadMetadata().is_empty()
    assert not SimpleCPUOffloadMetadata(store_event=0).is_empty()


def test_a_worker_without_caches_says_so() -> None:
    worker, _ = faked()
    worker._backend = None
    worker.bind_connector_metadata(
        SimpleCPUOffloadMetadata(store_event=0, store_gpu_blocks=[1], store_cpu_blocks=[1])
    )
    with pytest.raises(RuntimeError, match="register_kv_caches"):
        worker.wait_for_save()


def test_a_mover_that_died_while_idle_is_replaced_before_it_gets_anything() -> None:
    worker = make_worker()
    try:
        backend = worker._backend
        assert isinstance(backend, ThreadedCopyBackend)
        lane = backend._lanes[True]
        assert lane._thread is not None
        dead = lane._thread
        dead.close()
        assert dead.join(5.0)
        assert worker.build_connector_worker_meta() is None, "nobody has to look while nothing is to be done"
        order = {"store_event": 0, "issued_store_event": 0, "store_gpu_blocks": [1], "store_cpu_blocks": [1]}
        worker.bind_connector_metadata(SimpleCPUOffloadMetadata(**order))
        worker.wait_for_save()
        worker.drain()
        report = worker.build_connector_worker_meta()
        assert report is not None
        assert report.completed_store_events == {0: 1}
        assert lane.restarts == 1
    finally:
        worker.shutdown()


@pytest.mark.filterwarnings("ignore::pytest.PytestUnhandledThreadExceptionWarning")
def test_a_drain_ends_although_a_movers_thread_has_died_with_a_job() -> None:
    worker = make_worker()
    backend = worker._backend
    assert isinstance(backend, ThreadedCopyBackend)
    worker.bind_connector_metadata(
        SimpleCPUOffloadMetadata(store_event=0, store_gpu_blocks=[1], store_cpu_blocks=[1])
    )
    lane = backend._lanes[True]
    assert lane._thread is not None
    dead = lane._thread
    dead._work = die
    worker.wait_for_save()
    assert dead.join(5.0)
    draining = threading.Thread(target=worker.drain, daemon=True)
    draining.start()
    draining.join(10.0)
    assert not draining.is_alive()
    report = worker.build_connector_worker_meta()
    assert report is not None
    assert report.failed_store_events == {0: 1}
    worker.shutdown()


def die(job: CopyJob) -> None:
    sys.exit()  # a thread ends without a word


@pytest.mark.parametrize("is_over", [True, False])
def test_a_shared_pool_is_left_with_its_place_taken_while_a_copy_may_write(is_over: bool) -> None:
    worker, mover = faked()
    closed: list[bool] = []
    segment = SimpleNamespace(close=lambda *, busy: closed.append(busy))
    parts = SimpleNamespace(to_store=lambda sources, targets, *_: (sources, targets))
    worker._shared = SimpleNamespace(segment=segment, parts=parts)  # type: ignore[assignment]
    worker.bind_connector_metadata(
        SimpleCPUOffloadMetadata(store_event=0, store_gpu_blocks=[1], store_cpu_blocks=[1])
    )
    worker.wait_for_save()
    result = CopyResult()
    mover.lists[0].append((0, result))
    if is_over:
        result.resolve()
    worker.shutdown()
    worker.shutdown()
    assert closed == [not is_over]
