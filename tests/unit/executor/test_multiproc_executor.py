"""The executor of several worker processes: order, agreement, deaths, hangs, and that nothing is left behind."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.helpers.fake_worker_cls import RankedWorker
from vllm.config import ParallelConfig, SchedulerConfig, VllmConfig
from vllm.distributed.kv_transfer.kv_connector.utils import KVOutputAggregator
from vllm.v1.executor import call_book, multiproc_executor, worker_processes
from vllm.v1.executor.abstract import Executor
from vllm.v1.executor.call_book import WorkersFailedError
from vllm.v1.executor.multiproc_executor import MultiprocExecutor
from vllm.v1.executor.worker_processes import WorkerProcesses

RANKED = "tests.helpers.fake_worker_cls.RankedWorker"


def config_for(num_ranks: int = 2, **additional) -> VllmConfig:
    return VllmConfig(
        parallel_config=ParallelConfig(worker_cls=RANKED, tensor_parallel_size=num_ranks),
        scheduler_config=SchedulerConfig.default_factory(async_scheduling=True),
        additional_config=additional,
    )


STRANGERS: set[int] = set()
"""Children that were there before the test, such as the standard library's that looks after shared memory."""


def children() -> set[int]:
    own = Path(f"/proc/self/task/{os.getpid()}/children").read_text()
    return {int(pid) for pid in own.split()} - STRANGERS


@pytest.fixture(autouse=True)
def nothing_left(monkeypatch) -> Iterator[None]:
    """After a test there are the descriptors, threads and children that were there before."""
    monkeypatch.setattr(call_book, "AGREE_WITHIN_S", 0.5)
    monkeypatch.setattr(multiproc_executor, "TICK_S", 0.05)
    STRANGERS.clear()
    STRANGERS.update(children())
    before = len(os.listdir("/proc/self/fd")), threading.active_count()
    yield
    assert (len(os.listdir("/proc/self/fd")), threading.active_count()) == before
    assert children() == set()


@pytest.fixture
def executor() -> Iterator[MultiprocExecutor]:
    executor = MultiprocExecutor(config_for())
    yield executor
    executor.shutdown()


def wait_for(condition, seconds: float = 20.0) -> None:
    deadline = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.01)


def is_alive(pid: int) -> bool:
    return os.path.exists(f"/proc/{pid}")


def ask_whom(worker: RankedWorker) -> int:
    return worker.rank


def raise_on_one(worker: RankedWorker) -> None:
    if worker.rank == 1:
        raise KeyError("of one rank")


def slow(worker: RankedWorker) -> None:
    time.sleep(0.5)


def test_calls_reach_all_ranks_and_steps_their_output_rank(monkeypatch) -> None:
    monkeypatch.delenv("OMP_NUM_THREADS", raising=False)
    executor = MultiprocExecutor(config_for())
    assert Executor.get_class(config_for()) is MultiprocExecutor
    assert MultiprocExecutor.supports_async_scheduling()
    assert executor.collective_rpc(ask_whom) == [0, 1]
    (first, second) = executor.collective_rpc("who")
    assert {first[1], second[1]} == children()
    assert first[2] == second[2] == max(1, len(os.sched_getaffinity(0)) // 2)  # they share the cores
    assert executor.get_kv_cache_specs() == [{"layer": "spec"}] * 2
    assert executor.determine_available_memory() == [123, 123]

    # Several steps in flight, and their results in order.
    futures = []
    for _ in range(3):
        futures += [
            executor.execute_model("sum", non_block=True),
            executor.sample_tokens(None, non_block=True),
        ]
    ended: list[int] = []
    for index, future in enumerate(futures):
        future.add_done_callback(lambda _, index=index: ended.append(index))
    results = [future.result(20) for future in futures]
    assert [result and result.sampled_token_ids for result in results] == [None, [[3]]] * 3
    assert ended == sorted(ended)

    # A step that fails alike everywhere ends alone, with its own error.
    failed = executor.execute_model("fail", non_block=True)
    after = executor.execute_model("sum", non_block=True)
    with pytest.raises(KeyError, match="all ranks alike") as raised:
        failed.result(20)
    assert "In the worker process" in raised.value.__notes__[0]
    assert after.result(20) is None
    executor.check_health()

    # With a connector every rank's report counts, in whatever step it comes.
    executor.kv_output_aggregator = KVOutputAggregator(4)
    assert executor.sample_tokens(None).kv_connector_output.finished_recving is None
    executor.execute_model("sum")
    combined = executor.sample_tokens(None)
    assert combined.kv_connector_output.finished_recving == {"a"}
    assert combined.sampled_token_ids == [[3]]

    # What can be refused is refused, and the ranks go on.
    with pytest.raises(ValueError, match="the workers have no method 'unknown'"):
        executor.collective_rpc("unknown")
    with pytest.raises(ValueError, match="cannot be sent to the worker processes"):
        executor.collective_rpc(lambda worker: None)
    with pytest.raises(
        WorkersFailedError, match=r"raise_on_one failed on 1 of 2 ranks: rank 1: KeyError: 'of one"
    ):
        executor.collective_rpc(raise_on_one)
    with pytest.raises(TimeoutError, match=r"slow: not all workers have answered after 0\.2 s"):
        executor.collective_rpc(slow, timeout=0.2)
    assert executor.collective_rpc(ask_whom) == [0, 1]
    assert not executor.is_failed

    executor.shutdown()
    executor.shutdown()
    with pytest.raises(RuntimeError, match="the workers were shut down"):
        executor.collective_rpc(ask_whom)


@pytest.mark.parametrize(
    ("step", "said"),
    [
        ("die", r"worker process \d+ of rank 1 was ended by SIGKILL during execute_model"),
        ("fail apart", "execute_model failed on 1 of 2 ranks: rank 1: only one of them"),
        (
            "hang",
            r"execute_model was not done after VLLM_EXECUTE_MODEL_TIMEOUT_SECONDS=1 s; no answer from rank 0, 1",
        ),
    ],
)
def test_a_rank_that_dies_hangs_or_fails_alone_ends_the_executor(step, said, monkeypatch) -> None:
    monkeypatch.setenv("VLLM_EXECUTE_MODEL_TIMEOUT_SECONDS", "1" if step == "hang" else "60")
    monkeypatch.setenv("VLLM_WORKER_SHUTDOWN_TIMEOUT_SECONDS", "2")
    executor = MultiprocExecutor(config_for())
    pids = children()
    told = threading.Event()
    executor.register_failure_callback(told.set)
    futures = [executor.execute_model(text, non_block=True) for text in ("sum", step, "sum")]
    assert futures[0].result(20) is None
    for future in futures[1:]:
        with pytest.raises(WorkersFailedError, match=said):
            future.result(20)
    assert told.wait(20)
    assert executor.is_failed
    with pytest.raises(WorkersFailedError, match=said):
        executor.check_health()
    late = threading.Event()
    executor.register_failure_callback(late.set)
    assert late.is_set()
    # Nobody has to ask for it: the other worker ends too, also one that waits for its partner.
    wait_for(lambda: not any(is_alive(pid) for pid in pids))
    executor.shutdown()


def test_an_engine_that_is_to_end_waits_for_no_rank_that_hangs(monkeypatch) -> None:
    monkeypatch.setenv("VLLM_WORKER_SHUTDOWN_TIMEOUT_SECONDS", "1")
    executor = MultiprocExecutor(config_for())
    pids = children()
    assert executor.execute_model("sum") is None
    stuck = executor.execute_model("hang", non_block=True)
    executor.end_after(0.2)
    with pytest.raises(WorkersFailedError, match="still at execute_model when the engine had to end"):
        stuck.result(20)
    executor.shutdown()
    assert not any(is_alive(pid) for pid in pids)


def test_an_idle_worker_that_dies_is_noticed_at_once(executor) -> None:
    told = threading.Event()
    executor.register_failure_callback(told.set)
    (_, pid, _) = executor.collective_rpc("who")[1]
    os.kill(pid, signal.SIGTERM)  # not a way to end a worker: its executor ends it
    assert executor.collective_rpc(ask_whom) == [0, 1]
    os.kill(pid, signal.SIGKILL)
    started = time.monotonic()
    assert told.wait(20)
    assert time.monotonic() - started < 2
    assert executor.is_failed


def test_a_rank_that_cannot_start_says_why() -> None:
    with pytest.raises(
        WorkersFailedError, match="init_device failed on 1 of 2 ranks: rank 1: rank 1 has no device"
    ):
        MultiprocExecutor(config_for(unstartable=1))


def test_a_start_that_breaks_off_leaves_no_worker(monkeypatch) -> None:
    plain, opened = os.pidfd_open, []

    def open_one(pid: int) -> int:
        opened.append(pid)
        if len(opened) == 2:
            raise OSError("too many open files")
        return plain(pid)

    monkeypatch.setattr(worker_processes.os, "pidfd_open", open_one)
    with pytest.raises(OSError, match="too many open files"):
        WorkerProcesses(config_for(), 2)
    assert not any(is_alive(pid) for pid in opened)


def test_workers_do_not_outlive_a_killed_engine() -> None:
    code = (
        "import time\n"
        "from tests.unit.executor.test_multiproc_executor import MultiprocExecutor, config_for\n"
        "executor = MultiprocExecutor(config_for())\n"
        "print('pids', *[pid for _, pid, _ in executor.collective_rpc('who')], flush=True)\n"
        "executor.execute_model('sleep', non_block=True)\n"
        "time.sleep(60)\n"
    )
    with subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE, text=True) as engine:
        assert engine.stdout is not None
        said = next(line for line in engine.stdout if line.startswith("pids"))
        pids = [int(pid) for pid in said.split()[1:]]
        assert all(is_alive(pid) for pid in pids)
        engine.kill()
    wait_for(lambda: not any(is_alive(pid) for pid in pids))
