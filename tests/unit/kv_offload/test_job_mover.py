"""`JobMover`: from a step's orders to jobs of a worker from outside, and from their ends to results."""

from __future__ import annotations

from collections.abc import Collection

import pytest

from tests.helpers.scripted_offload import ShelfSpec
from vllm.distributed.kv_transfer.kv_connector.v1.offloading import worker as worker_module
from vllm.distributed.kv_transfer.kv_connector.v1.offloading.common import (
    OffloadingConnectorMetadata,
    OffloadingWorkerMetadata,
    TransferJob,
    TransferStats,
)
from vllm.distributed.kv_transfer.kv_connector.v1.offloading.worker import JobMover
from vllm.v1.kv_offload.base import GPULoadStoreSpec, LoadStoreSpec, OffloadingWorker, TransferResult
from vllm.v1.simple_kv_offload.copy_backends.base import CopyResult, EventsList
from vllm.v1.simple_kv_offload.metadata import SimpleCPUOffloadWorkerMetadata

DEVICE = GPULoadStoreSpec([3], [1], [0])
SHELF = ShelfSpec([7])


class Recorder(OffloadingWorker):
    def __init__(self) -> None:
        self.started: list[int] = []
        self.results: list[TransferResult] = []
        self.refuses: set[int] = set()
        self.ends_in_wait = True

    def submit_store(self, job_id: int, src: GPULoadStoreSpec, dst: LoadStoreSpec) -> bool:
        self.started.append(job_id)
        return job_id not in self.refuses

    def submit_load(
        self, job_id: int, src: LoadStoreSpec, dst: GPULoadStoreSpec, expedited: bool = False
    ) -> bool:
        return self.submit_store(job_id, dst, src)

    def get_finished(self) -> list[TransferResult]:
        ended, self.results = self.results, []
        return ended

    def wait(self, job_ids: Collection[int]) -> None:
        if self.ends_in_wait:
            self.results += [TransferResult(job_id, True, 10, 0.5) for job_id in job_ids]


class DeviceEvent:
    """A point on the device that is passed when somebody waits for it."""

    def __init__(self, error: Exception | None = None) -> None:
        self.error = error
        self.was_waited_for = False

    def synchronize(self) -> None:
        self.was_waited_for = True
        if self.error is not None:
            raise self.error


def orders(*, loads: Collection[int] = (), stores: Collection[int] = ()) -> OffloadingConnectorMetadata:
    return OffloadingConnectorMetadata(
        {job: TransferJob("r", SHELF, DEVICE) for job in loads},
        {job: TransferJob("r", DEVICE, SHELF) for job in stores},
    )


def launch(mover: JobMover, *, is_store: bool, wait: DeviceEvent | None = None) -> CopyResult:
    events: EventsList = []
    mover.launch_copy([3], [7], is_store, 0, events, wait)
    ((_, result),) = events
    assert isinstance(result, CopyResult)
    return result


def test_a_store_behind_the_device_starts_with_the_next_step() -> None:
    mover, worker, event = JobMover(made := Recorder()), made, DeviceEvent()
    mover.bind(orders(stores=[0, 1]))
    result = launch(mover, is_store=True, wait=event)
    assert not worker.started
    assert not event.was_waited_for
    mover.bind(orders())
    assert event.was_waited_for
    assert worker.started == [0, 1]
    worker.results = [TransferResult(1, True, 5, 0.5)]
    mover.check_health()
    assert not result.query()
    worker.results = [TransferResult(0, True, 7, 0.25), TransferResult(9, True)]
    mover.check_health()
    assert result.query()
    assert result.error is None
    report = mover.take_report()
    assert report is not None
    assert report.completed_jobs == {0: 1, 1: 1}
    assert (report.transfer_stats.store.bytes, report.transfer_stats.store.time) == (12, 0.75)
    assert report.transfer_stats.store.sizes == [5, 7]
    assert report.transfer_stats.load.sizes == []
    assert mover.take_report() is None


def test_a_report_that_says_nothing_takes_no_other_with_it() -> None:
    mover, worker = JobMover(made := Recorder()), made
    mover.bind(orders(stores=[0]))
    result = launch(mover, is_store=True)
    worker.results = [TransferResult(None, True), TransferResult(0, True)]  # type: ignore[arg-type]
    mover.check_health()
    assert result.query()
    assert result.error is None


def test_a_store_whose_step_the_device_did_not_finish_fails() -> None:
    mover, worker = JobMover(made := Recorder()), made
    mover.bind(orders(stores=[0]))
    result = launch(mover, is_store=True, wait=DeviceEvent(RuntimeError("illegal address")))
    mover.bind(orders())
    assert not worker.started
    assert result.query()
    assert result.error is not None


def test_jobs_of_a_step_that_never_ran_are_dropped() -> None:
    mover, worker = JobMover(made := Recorder()), made
    mover.bind(orders(loads=[0, 1], stores=[2]))
    mover.bind(orders(loads=[3], stores=[4]))
    launch(mover, is_store=False)
    launch(mover, is_store=True)
    assert worker.started == [3, 4]


def test_a_refused_job_fails_its_copy_when_the_others_have_ended() -> None:
    mover, worker = JobMover(made := Recorder()), made
    worker.refuses = {0}
    mover.bind(orders(stores=[0, 1]))
    result = launch(mover, is_store=True)
    assert not result.query()
    worker.results = [TransferResult(1, True)]
    mover.check_health()
    assert result.query()
    assert result.error is not None


def test_copies_of_nothing_end_at_once() -> None:
    mover = JobMover(Recorder())
    mover.bind(orders(loads=[5]))
    events: EventsList = []
    mover.launch_copy([], [], False, 0, events)
    assert events[0][1].query()
    assert launch(mover, is_store=True).query()
    assert not launch(mover, is_store=False).query()


@pytest.mark.parametrize("ends", [True, False])
def test_a_flush_ends_all_jobs(monkeypatch: pytest.MonkeyPatch, ends: bool) -> None:
    monkeypatch.setattr(worker_module, "FLUSH_TIMEOUT_S", 0.01)
    mover, worker = JobMover(made := Recorder()), made
    worker.ends_in_wait = ends
    mover.bind(orders(loads=[0], stores=[1]))
    results = [launch(mover, is_store=False), launch(mover, is_store=True, wait=DeviceEvent())]
    mover.flush()
    assert [result.query() for result in results] == [True, True]
    assert [result.error is None for result in results] == [ends, ends]


def test_reports_of_ranks_add_up() -> None:
    first, second = OffloadingWorkerMetadata({1: 1}), OffloadingWorkerMetadata({1: 1, 2: 1})
    first.completed_store_events = {4: 1}
    second.completed_store_events = {4: 1}
    second.transfer_stats = TransferStats()
    second.transfer_stats.load.record(8, 0.5)
    total = first.aggregate(second)
    assert total.completed_jobs == {1: 2, 2: 1}
    assert total.completed_store_events == {4: 2}
    assert (total.transfer_stats.load.bytes, total.transfer_stats.load.sizes) == (8, [8])
    with pytest.raises(TypeError, match="cannot aggregate"):
        first.aggregate(SimpleCPUOffloadWorkerMetadata())
