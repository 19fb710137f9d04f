"""The CUDA mover and the worker that drives it, on a device that is played: order, ends, errors, pins."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from tests.helpers.offload_rig import Rig
from tests.helpers.played_cuda import Device, Event, Stream, play_cuda
from tests.helpers.sched import ManualClock
from vllm.v1.simple_kv_offload import cuda_mem_ops
from vllm.v1.simple_kv_offload import worker as worker_module
from vllm.v1.simple_kv_offload.copy_backends.base import CopyError, CopyResult
from vllm.v1.simple_kv_offload.copy_backends.cuda_dma import DmaCopyBackend
from vllm.v1.simple_kv_offload.copy_backends.cuda_gather import SMALL_BLOCK_BYTES
from vllm.v1.simple_kv_offload.cuda_mem_ops import (
    CU_MEMCPY_SRC_ACCESS_ORDER_ANY,
    CU_MEMCPY_SRC_ACCESS_ORDER_STREAM,
    is_seen_by_device,
    pin_tensor,
    unpin_tensor,
)
from vllm.v1.simple_kv_offload.host_buffer import aligned_zeros
from vllm.v1.simple_kv_offload.metadata import SimpleCPUOffloadMetadata

BLOCKS, SLOTS = 6, 4
WIDTHS = {"small": 48, "large": SMALL_BLOCK_BYTES + 16}
GPU = torch.device("cuda", 0)
DEADLINE_S = 5.0


class Bench:
    """A mover between device regions, whose rows lie apart, and pinned host memory."""

    def __init__(self, device: Device) -> None:
        self.device = device
        self.gpu = {
            name: torch.zeros(BLOCKS, width + 16, dtype=torch.int8)[:, :width]
            for name, width in WIDTHS.items()
        }
        self.cpu = {name: aligned_zeros(SLOTS, width) for name, width in WIDTHS.items()}
        assert all(pin_tensor(region) for region in self.cpu.values())
        self.load_stream, self.store_stream = Stream(device), Stream(device)
        self.clock = ManualClock()
        self.mover = DmaCopyBackend(clock=self.clock, deadline_s=DEADLINE_S)
        self.mover.init(self.gpu, self.cpu, GPU, self.load_stream, self.store_stream)  # type: ignore[arg-type]

    def fill(self, regions: dict[str, torch.Tensor], block: int, value: int) -> None:
        for region in regions.values():
            region[block] = value

    def launch(self, src: list[int], dst: list[int], is_store: bool, mark: Any = None) -> CopyResult:
        """Give the mover a job, and wait until its thread has put it into the stream."""
        events: list[Any] = []
        self.mover.launch_copy(src, dst, is_store, 1, events, mark)
        ((_, result),) = events
        until(lambda: result._event is not None or result.query())
        assert isinstance(result, CopyResult)
        return result


def until(condition: Callable[[], bool]) -> None:
    deadline = time.monotonic() + 10.0
    while not condition():
        assert time.monotonic() < deadline, "it does not happen"
        time.sleep(0.001)


def value(regions: dict[str, torch.Tensor], block: int) -> set[int]:
    return {int(number) for region in regions.values() for number in region[block].unique()}


@pytest.fixture(params=["cuMemcpyBatchAsync_v2", "cuMemcpyBatchAsync", None])
def bench(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Iterator[Bench]:
    """With the driver's new batched copy, its old one, or none."""
    bench = Bench(play_cuda(monkeypatch, batch=request.param))
    yield bench
    bench.mover.shutdown()


def marked(device: Device) -> Event:
    """An event behind what the model's stream has been given."""
    mark: Event = torch.cuda.Event()  # type: ignore[assignment]
    mark.record(device.compute)
    return mark


def test_a_store_reads_what_the_model_has_computed_until_its_mark(bench: Bench) -> None:
    device = bench.device
    device.compute.put(lambda: bench.fill(bench.gpu, 3, 7))
    mark = marked(device)
    device.compute.put(lambda: bench.fill(bench.gpu, 4, 9))
    result = bench.launch([3], [1], True, mark)
    device.run(bench.store_stream)
    assert not result.query(), "the model is not as far"
    device.run()
    assert result.query()
    assert result.error is None
    assert result.seconds == 1.5, "by the device's clock, without the waiting"
    assert value(bench.cpu, 1) == {7}
    assert set(device.batches) <= {0, CU_MEMCPY_SRC_ACCESS_ORDER_STREAM}


def test_a_load_lands_behind_the_forward_that_reads_its_target_and_may_read_its_source_at_once(
    bench: Bench,
) -> None:
    device, seen = bench.device, []
    bench.fill(bench.cpu, 2, 5)
    device.compute.put(lambda: seen.append(value(bench.gpu, 4)))
    result = bench.launch([2], [4], False, marked(device))
    device.run(bench.load_stream)
    assert value(bench.gpu, 4) == {0}
    device.run()
    assert result.query()
    assert (seen, value(bench.gpu, 4)) == ([{0}], {5})
    assert set(device.batches) <= {0, CU_MEMCPY_SRC_ACCESS_ORDER_ANY}


def test_a_load_does_not_wait_behind_stores(bench: Bench) -> None:
    never = marked(bench.device)
    store = bench.launch([0], [0], True, never)
    bench.fill(bench.cpu, 1, 3)
    load = bench.launch([1], [1], False)
    bench.device.run(bench.load_stream)
    assert load.query()
    assert not store.query()
    assert value(bench.gpu, 1) == {3}


def test_jobs_of_a_direction_keep_their_order_and_ids_live_until_they_are_read(bench: Bench) -> None:
    for block in (1, 2, 3):
        bench.fill(bench.gpu, block, block)
    results = [bench.launch([block], [0], True) for block in (1, 2, 3)]
    bench.device.run()
    assert all(result.query() for result in results)
    assert value(bench.cpu, 0) == {3}


@pytest.mark.parametrize(("src", "dst"), [([-1], [0]), ([BLOCKS], [0]), ([0], [SLOTS]), ([0], [-1])])
def test_blocks_outside_are_refused_before_anything_is_issued(bench: Bench, src: Any, dst: Any) -> None:
    result = bench.launch(src, dst, True)
    assert "outside" in str(result.error)
    assert not bench.store_stream.steps


def test_what_the_device_was_given_is_never_given_up(bench: Bench) -> None:
    bench.fill(bench.gpu, 1, 4)
    result = bench.launch([1], [1], True)
    assert not result.give_up(CopyError("too late"), 0.0), "its target may still be written"
    bench.clock.now += 2 * DEADLINE_S
    bench.mover.check_health()
    assert not result.query()
    bench.device.run()
    assert result.query()
    assert result.error is None


def test_what_waits_for_the_lanes_thread_is_given_up_at_the_deadline(bench: Bench) -> None:
    has_begun = threading.Event()

    class Stuck:
        def synchronize(self) -> None:
            has_begun.set()
            until(lambda: bench.device.waited_for != [])

    events: list[Any] = []
    bench.mover.launch_copy([1], [1], True, 1, events, Stuck())  # type: ignore[arg-type]
    bench.mover.launch_copy([2], [2], True, 2, events)
    stuck, queued = (event for _, event in events)
    assert has_begun.wait(10.0)
    bench.clock.now += 2 * DEADLINE_S
    bench.mover.check_health()
    assert "did not finish a job" in str(queued.error)
    fresh = bench.launch([3], [3], True)
    bench.device.run()
    assert fresh.query()
    assert fresh.error is None
    bench.device.waited_for.append("the test")

    def has_ended() -> bool:
        bench.device.run()  # the thread puts one step after the other
        return bool(stuck.query())

    until(has_ended)


def test_an_error_of_the_device_is_a_failed_result(bench: Bench) -> None:
    result: Any = bench.launch([1], [1], True)
    bench.device.run()
    result._event.error = "an illegal memory access was encountered"
    assert result.query()
    assert "illegal memory access" in str(result.error)
    assert result.seconds is None


def test_a_call_that_the_driver_refuses_fails_its_job_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    bench = Bench(play_cuda(monkeypatch))
    bench.device.refuses = "invalid argument"
    result = bench.launch([1], [1], True)
    assert "cuMemcpyBatchAsync_v2 failed: CUDA error 1 (invalid argument)" in str(result.error)
    bench.device.refuses = None
    bench.fill(bench.gpu, 2, 6)
    assert bench.launch([2], [2], True).synchronize(5.0)
    assert value(bench.cpu, 2) == {6}
    bench.mover.shutdown()


def test_shutdown_waits_for_what_the_device_was_given(bench: Bench) -> None:
    bench.fill(bench.gpu, 1, 4)
    result = bench.launch([1], [1], True)
    bench.mover.shutdown()
    assert bench.device.waited_for == [GPU]
    assert result.query()
    assert result.error is None
    assert value(bench.cpu, 1) == {4}, "before the memory goes"


def test_memory_is_pinned_in_pieces_of_whole_pages_and_every_piece_is_let_go(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    device = play_cuda(monkeypatch)
    region = aligned_zeros(9, 5120)
    monkeypatch.setattr(cuda_mem_ops, "PIN_CHUNK_BYTES", 5 * 5120)
    assert pin_tensor(region)
    assert list(device.pinned.values()) == [20_480, 20_480, 5120], "four blocks are five pages"
    assert is_seen_by_device(region)
    del device.pinned[region.data_ptr() + 20_480]
    assert not is_seen_by_device(region), "all of it has to be"
    assert pin_tensor(region) is False, "what is pinned already is not pinned twice"
    device.pinned[region.data_ptr() + 20_480] = 20_480
    unpin_tensor(region)
    assert device.pinned == {}


def orders(**fields: Any) -> SimpleCPUOffloadMetadata:
    return SimpleCPUOffloadMetadata(**fields)


@pytest.fixture
def worker(monkeypatch: pytest.MonkeyPatch) -> Iterator[tuple[Any, Device]]:
    """A worker whose caches are taken for device memory."""
    rig = Rig()
    worker: Any = rig.worker()
    caches, slots = worker.gpu_kv_caches, worker.num_cpu_blocks
    worker.shutdown()
    device = play_cuda(monkeypatch)
    monkeypatch.setattr(worker_module, "PIN_MEMORY", True)
    worker.device, worker.gpu_kv_caches, worker.num_cpu_blocks = GPU, caches, slots
    worker._start_host(worker_module._copy_streams(GPU))
    yield worker, device
    worker.shutdown()


def test_a_worker_on_a_device_copies_by_it_on_two_streams_behind_the_model(
    worker: tuple[Any, Device],
) -> None:
    half, device = worker
    assert isinstance(half._backend, DmaCopyBackend)
    copying = [stream for stream in device.streams.values() if stream is not device.compute]
    assert [stream.priority for stream in copying] == [0, 0], "the least there is"
    load_stream, store_stream = copying
    assert len(device.pinned) == len(half.cpu_kv_caches)
    device.compute.put(lambda: [region[3].fill_(7) for region in half.gpu_kv_caches.values()])
    half.bind_connector_metadata(
        orders(store_event=0, issued_store_event=0, store_gpu_blocks=[3], store_cpu_blocks=[1])
    )
    half.start_load_kv()
    half.wait_for_save()
    half.clear_connector_metadata()
    device.wait_for(store_stream)
    device.run(store_stream)
    assert half.build_connector_worker_meta() is None, "the model is not as far"
    device.run()
    report = half.build_connector_worker_meta()
    assert report is not None
    assert report.completed_store_events == {0: 1}
    assert {int(n) for region in half.cpu_kv_caches.values() for n in region[1].unique()} == {7}

    half.bind_connector_metadata(
        orders(
            load_event=0, issued_load_event=0, issued_store_event=0, load_gpu_blocks=[4], load_cpu_blocks=[1],
            load_event_to_reqs={0: ["r"]}, load_block_counts=[1],
        )
    )  # fmt: skip
    half.start_load_kv()
    half.wait_for_save()
    device.wait_for(load_stream)
    assert half.get_transfer_results(set()).finished_recving is None
    half.clear_connector_metadata()
    half.drain()
    assert half.get_transfer_results(set()).finished_recving == {"r"}
    assert {int(n) for region in half.gpu_kv_caches.values() for n in region[4].unique()} == {7}
    half.shutdown()
    assert device.pinned == {}


def test_a_worker_whose_device_has_failed_lets_go_of_all_the_rest(
    worker: tuple[Any, Device], caplog: pytest.LogCaptureFixture
) -> None:
    half, device = worker
    closed: list[bool] = []
    half._shared = SimpleNamespace(segment=SimpleNamespace(close=lambda *, busy: closed.append(busy)))
    device.has_failed = True
    half.shutdown()
    assert closed == [False]
    assert half.cpu_kv_caches == {}
    assert "the device failed before its copies had ended: CUDA error: an illegal" in caplog.text
    assert "host memory stays pinned: cuMemHostUnregister failed: CUDA error 700" in caplog.text
