"""Where an engine makes its sockets, and how long its processes have to end."""

from __future__ import annotations

import threading
import time

import pytest

from tests.helpers.fake_cores import NO_PID, FakeProcess
from vllm.config import KVTransferConfig, ParallelConfig, VllmConfig
from vllm.v1.engine import core_launch
from vllm.v1.engine.core_main import CoreStart, become_replica


def test_sockets_lie_below_the_chosen_folder(monkeypatch, tmp_path):
    monkeypatch.setenv("VLLM_RPC_BASE_PATH", str(tmp_path))
    folder = core_launch._socket_folder()
    assert folder.parent == tmp_path
    assert folder.stat().st_mode & 0o777 == 0o700


@pytest.mark.parametrize("tail", ["missing", "x" * 100])
def test_a_folder_that_cannot_hold_sockets_is_refused_by_name(monkeypatch, tmp_path, tail):
    base = tmp_path / tail
    if tail != "missing":
        base.mkdir()
    monkeypatch.setenv("VLLM_RPC_BASE_PATH", str(base))
    with pytest.raises(ValueError, match="VLLM_RPC_BASE_PATH"):
        core_launch._socket_folder()
    assert not base.exists() or not any(base.iterdir())


def test_a_time_that_is_no_number_is_refused_before_a_process_starts(monkeypatch, tmp_path):
    monkeypatch.setenv("VLLM_RPC_BASE_PATH", str(tmp_path))
    monkeypatch.setenv("VLLM_WORKER_SHUTDOWN_TIMEOUT_SECONDS", "soon")
    with pytest.raises(ValueError, match="VLLM_WORKER_SHUTDOWN_TIMEOUT_SECONDS"):
        core_launch.start_cores(None, None, False)  # type: ignore[arg-type]
    assert not any(tmp_path.iterdir())


class Deaf:
    """A process that ends only by force."""

    pid = NO_PID

    def __init__(self) -> None:
        self.asked: list[float | None] = []
        self.killed = False

    def wait(self, timeout: float | None = None) -> int | None:
        self.asked.append(timeout)
        return -9 if self.killed else None

    def terminate(self) -> None: ...

    def kill(self) -> None:
        self.killed = True


def test_a_process_has_the_chosen_time_to_end(tmp_path):
    deaf = Deaf()
    cores = core_launch.CoreProcesses([deaf], "", "", tmp_path / "sockets", 77.0, VllmConfig())
    cores.close()
    assert deaf.killed
    assert 70 < (deaf.asked[0] or 0) <= 77


def test_shutdown_waits_for_the_watch_that_kills_a_core_and_then_removes_what_it_left(tmp_path, monkeypatch):
    """Its workers live on a little, and hold what is to be removed."""
    dead, deaf = FakeProcess(NO_PID), Deaf()
    config = VllmConfig(parallel_config=ParallelConfig(data_parallel_size=2))
    cores = core_launch.CoreProcesses([dead, deaf], "", "", tmp_path / "sockets", 0.0, config)
    workers_gone, removed = threading.Event(), []

    def wait_procs(workers, timeout):
        assert deaf.killed
        workers_gone.wait(10)
        return [], []

    def remove(config):
        assert workers_gone.is_set()
        removed.append(config.parallel_config.data_parallel_index)

    monkeypatch.setattr(core_launch.psutil, "wait_procs", wait_procs)
    monkeypatch.setattr(core_launch.KVConnectorFactory, "remove_leftovers", remove)
    has_died = threading.Event()
    cores.watch(lambda _: has_died.set())
    dead.die(-9)
    assert has_died.wait(5)
    while not deaf.killed:
        time.sleep(0.01)
    shutdown = threading.Thread(target=cores.close)
    shutdown.start()
    shutdown.join(0.2)
    assert shutdown.is_alive()
    workers_gone.set()
    shutdown.join(5)
    assert not shutdown.is_alive()
    assert removed == [1]


def test_several_cores_share_the_processors_unless_the_user_says_so(monkeypatch):
    def threads(**sizes):
        config = VllmConfig(parallel_config=ParallelConfig(**sizes))
        return core_launch._share_of_processors(CoreStart(config, None, False, 0, "", 1))

    monkeypatch.setattr(core_launch.os, "sched_getaffinity", lambda _: set(range(8)))
    monkeypatch.delenv("OMP_NUM_THREADS", raising=False)
    assert threads() == {}
    assert threads(data_parallel_size=2) == {"OMP_NUM_THREADS": "4"}
    assert threads(data_parallel_size=2, tensor_parallel_size=2) == {"OMP_NUM_THREADS": "2"}
    assert threads(data_parallel_size=16) == {"OMP_NUM_THREADS": "1"}
    monkeypatch.setenv("OMP_NUM_THREADS", "3")
    assert threads(data_parallel_size=2) == {}


def test_each_replica_has_a_name_of_its_own_for_its_peers():
    config = VllmConfig(
        parallel_config=ParallelConfig(data_parallel_size=2),
        kv_transfer_config=KVTransferConfig(kv_connector="A", kv_role="kv_both", engine_id="me"),
    )
    become_replica(config, 1)
    assert config.kv_transfer_config.engine_id == "me_dp1"
    assert config.parallel_config.data_parallel_index == 1
