"""`JobMover`: from a step's orders to jobs of a worker from outside, and from their ends to results."""

from __future__ import annotations

from collections.abc import Collection

import pytest

from tests.helpers.sched import ManualClock
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
    """A point on the device that a test lets it pass, or that is passed when somebody waits for it."""

    def __init__(self, error: Exception | None = None) -> None:
        self.error = error
        self.is_passed = False
        self.was_waited_for = False

    def query(self) -> bool:
        if self.is_passed and self.error is not None:
            raise self.error
        return self.is_passed

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


@pytest.mark.parametrize("asks", ["when it hears of ends", "with the next step"])
def test_a_store_behind_the_device_starts_when_that_is_there_and_nobody_waits(asks: str) -> None:
    mover, worker, event = JobMover(made := Recorder()), made, DeviceEvent()
    mover.bind(orders(stores=[0, 1]))
    result = launch(mover, is_store=True, wait=event)
    for _ in range(3):
        mover.check_health()
        mover.bind(orders())
    assert not worker.started
    event.is_passed = True
    if asks == "with the next step":
        mover.bind(orders())
    else:
        mover.check_health()
    assert not event.was_waited_for, "a step does not stand still for the device"
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
    event = DeviceEvent(RuntimeError("illegal address"))
    result = launch(mover, is_store=True, wait=event)
    event.is_passed = True
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


def test_stores_start_in_the_order_of_their_steps() -> None:
    mover, worker = JobMover(made := Recorder()), made
    events = [DeviceEvent(), DeviceEvent()]
    for job, event in enumerate(events):
        mover.bind(orders(stores=[job]))
        launch(mover, is_store=True, wait=event)
    events[1].is_passed = True
    mover.check_health()
    assert not worker.started, "events of one device are passed in turn: the first is not asked last"
    events[0].is_passed = True
    mover.check_health()
    assert worker.started == [0, 1]


def test_a_flush_waits_for_the_device() -> None:
    mover, worker, event = JobMover(made := Recorder()), made, DeviceEvent()
    mover.bind(orders(stores=[0]))
    result = launch(mover, is_store=True, wait=event)
    mover.flush()
    assert event.was_waited_for
    assert worker.started == [0]
    assert result.query()


# -- deadlines ------------------------------------------------------------------------------------


@pytest.mark.parametrize("is_store", [True, False])
def test_a_job_that_is_never_told_of_fails_at_the_deadline(is_store: bool) -> None:
    clock = ManualClock()
    mover, worker = JobMover(made := Recorder(), clock, 60.0), made
    mover.bind(orders(stores=[0]) if is_store else orders(loads=[0]))
    result = launch(mover, is_store=is_store)
    clock.now += 60.0
    mover.check_health()
    assert not result.query()
    clock.now += 0.5
    mover.check_health()
    assert result.query()
    assert result.error is not None
    report = mover.take_report()
    assert report is not None
    assert report.completed_jobs == {}, "it may still copy"
    assert (report.given_up_loads, report.given_up_stores) == (({}, {0: 1}) if is_store else ({0: 1}, {}))
    assert mover.has_given_up_any
    mover.check_health()
    assert mover.take_report() is None
    worker.results = [TransferResult(0, True, 5, 0.5), TransferResult(0, True, 5, 0.5)]
    mover.check_health()
    report = mover.take_report()
    assert report is not None
    assert (report.ended_late, report.completed_jobs) == ({0: 1}, {0: 1})
    assert report.transfer_stats == TransferStats(), "nobody has got anything of it"
    assert not mover.has_given_up_any
    assert result.error is not None


def test_a_job_is_not_blamed_for_those_before_it() -> None:
    clock = ManualClock()
    mover, worker = JobMover(made := Recorder(), clock, 60.0), made
    results = []
    for job in range(3):
        mover.bind(orders(loads=[job]))
        results.append(launch(mover, is_store=False))
    clock.now += 50.0
    worker.results = [TransferResult(0, True)]
    mover.check_health()
    clock.now += 50.0
    mover.check_health()
    assert [result.query() for result in results] == [True, False, False]
    worker.results = [TransferResult(2, True)]
    mover.check_health()
    clock.now += 11.0
    mover.check_health()
    assert [result.error is None for result in results] == [True, False, True], "the last overtook it"
    assert results[1].query()


def test_other_jobs_of_a_copy_end_as_usual_when_one_is_given_up() -> None:
    clock = ManualClock()
    mover, worker = JobMover(made := Recorder(), clock, 60.0), made
    mover.bind(orders(stores=[0, 1]))
    result = launch(mover, is_store=True)
    worker.results = [TransferResult(1, True, 5, 0.5)]
    mover.check_health()
    clock.now += 61.0
    mover.check_health()
    report = mover.take_report()
    assert report is not None
    assert (report.completed_jobs, report.given_up_stores) == ({1: 1}, {0: 1})
    assert result.query()
    assert result.error is not None


def test_a_store_that_the_device_never_gets_to_fails_and_is_over() -> None:
    clock = ManualClock()
    mover, worker = JobMover(made := Recorder(), clock, 60.0), made
    mover.bind(orders(stores=[0]))
    result = launch(mover, is_store=True, wait=DeviceEvent())
    clock.now += 61.0
    mover.check_health()
    assert not worker.started
    assert result.query()
    assert result.error is not None
    report = mover.take_report()
    assert report is not None
    assert (report.completed_jobs, report.given_up_stores) == ({0: 1}, {}), "nobody copies"


def test_reports_of_ranks_add_up() -> None:
    first, second = OffloadingWorkerMetadata({1: 1}), OffloadingWorkerMetadata({1: 1, 2: 1})
    first.completed_store_events = {4: 1}
    second.completed_store_events = {4: 1}
    second.transfer_stats = TransferStats()
    second.transfer_stats.load.record(8, 0.5)
    first.given_up_loads, second.given_up_loads = {5: 1}, {5: 1}
    first.given_up_stores, second.ended_late = {6: 1}, {7: 1}
    total = first.aggregate(second)
    assert total.completed_jobs == {1: 2, 2: 1}
    assert (total.given_up_loads, total.given_up_stores, total.ended_late) == ({5: 2}, {6: 1}, {7: 1})
    assert total.completed_store_events == {4: 2}
    assert (total.transfer_stats.load.bytes, total.transfer_stats.load.sizes) == (8, [8])
    with pytest.raises(TypeError, match="cannot aggregate"):
        first.aggregate(SimpleCPUOffloadWorkerMetadata())
