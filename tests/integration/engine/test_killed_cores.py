"""A core that does not end when it is told is killed, and the front end removes what it cannot remove any more."""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import psutil
import pytest

from tests.helpers.engine_configs import async_engine_args, engine_args, offload_settings, prompt_of
from vllm.sampling_params import SamplingParams
from vllm.v1.engine.async_llm import AsyncLLM
from vllm.v1.engine.llm_engine import LLMEngine

GREEDY = SamplingParams(max_tokens=4, temperature=0.0, ignore_eos=True)


@pytest.fixture(autouse=True)
def short_grace(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("VLLM_WORKER_SHUTDOWN_TIMEOUT_SECONDS", "1")


@pytest.fixture
def pool() -> Iterator[str]:
    name = f"killed-{os.getpid()}-{time.monotonic_ns()}"
    yield name
    for path in segments(name):
        path.unlink()


def segments(pool: str) -> list[Path]:
    return sorted(Path("/dev/shm").glob(f"vllm-kv-*-{pool}-*"))


def settings(**extra: Any) -> dict[str, Any]:
    made = offload_settings()
    made["kv_transfer_config"]["kv_connector_extra_config"] |= extra
    return made


def start(**more: Any) -> LLMEngine:
    return LLMEngine.from_engine_args(engine_args(**more), enable_multiprocessing=True)


def ask(engine: LLMEngine) -> None:
    engine.add_request("r", {"prompt_token_ids": prompt_of(100)}, GREEDY)
    while engine.has_unfinished_requests():
        engine.step()


def stop(pid: int) -> list[psutil.Process]:
    """Stops a core, so that it does not even hear that it is to end; it and its workers."""
    core = psutil.Process(pid)
    os.kill(pid, signal.SIGSTOP)
    return [core, *core.children(recursive=True)]


def assert_gone(processes: list[psutil.Process]) -> None:
    _, alive = psutil.wait_procs(processes, timeout=5)
    assert not alive


@pytest.mark.parametrize("method", ["fork", "spawn"])
def test_the_shared_pool_of_a_core_that_was_killed_at_shutdown_is_removed(
    pool: str, method: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("VLLM_WORKER_MULTIPROC_METHOD", method)
    engine = start(**settings(shared_pool=pool))
    ask(engine)
    assert len(segments(pool)) == 1
    processes = stop(engine.engine_core.core_pids[0])
    engine.shutdown()
    assert_gone(processes)
    assert not segments(pool)


def test_a_shared_pool_that_another_engine_uses_stays_until_that_one_ends(pool: str) -> None:
    first, second = start(**settings(shared_pool=pool)), start(**settings(shared_pool=pool))
    ask(first)
    time.sleep(0.5)  # an idle core collects its copies
    stop(first.engine_core.core_pids[0])
    first.shutdown()
    assert len(segments(pool)) == 1
    second.add_request("r", {"prompt_token_ids": prompt_of(100)}, GREEDY)
    outputs = []
    while second.has_unfinished_requests():
        outputs += second.step()
    assert outputs[-1].num_cached_tokens == 96  # type: ignore[union-attr]
    second.shutdown()
    assert not segments(pool)


@pytest.mark.parametrize("mode", [{"disk_tier": True}, {"kv_offload_backend": "disk"}])
def test_the_disk_files_of_a_core_that_was_killed_at_shutdown_are_removed_unless_they_are_kept(
    mode: dict[str, Any], tmp_path: Path
) -> None:
    place = {"disk_path": str(tmp_path / "kv"), "disk_capacity_bytes": 1 << 24, **mode}
    stranger = tmp_path / "kv.other.rank_0"
    stranger.write_bytes(b"of somebody else")
    for kept in (False, True):
        engine = start(**settings(**place, disk_persist=kept))
        ask(engine)
        mine = set(tmp_path.glob("kv*")) - {stranger}
        assert mine
        stop(engine.engine_core.core_pids[0])
        engine.shutdown()
        assert set(tmp_path.glob("kv*")) - {stranger} == (mine if kept else set())
        assert stranger.exists()


def test_the_workers_of_a_core_that_was_killed_go_with_it_even_if_they_are_stopped(pool: str) -> None:
    engine = start(tensor_parallel_size=2, **settings(shared_pool=pool))
    ask(engine)
    processes = stop(engine.engine_core.core_pids[0])
    assert len(processes) == 3
    processes[1].suspend()
    engine.shutdown()
    assert_gone(processes)
    assert not segments(pool)


@pytest.mark.asyncio
@pytest.mark.parametrize("stopped", [(0,), (0, 1)])
async def test_replicas_that_are_stopped_leave_no_shared_pool(pool: str, stopped: tuple[int, ...]) -> None:
    args = async_engine_args(data_parallel_size=2, **settings(shared_pool=pool))
    engine = AsyncLLM.from_engine_args(args)
    for rank in (0, 1):
        prompt = {"prompt_token_ids": prompt_of(100, rank)}
        async for _ in engine.generate(prompt, GREEDY, "r", data_parallel_rank=rank):
            pass
    pids = [process.pid for process in engine.engine_core._connection.cores.processes]
    processes = [process for rank in stopped for process in stop(pids[rank])]
    engine.shutdown()
    assert_gone(processes)
    assert not segments(pool)


@pytest.mark.asyncio
async def test_the_disks_of_replicas_that_are_stopped_are_removed_when_another_one_dies(
    tmp_path: Path, pool: str
) -> None:
    """The watch of the cores ends those that are left; what is to be removed is each replica's own."""
    disk = {"disk_tier": True, "disk_path": str(tmp_path / "kv"), "disk_capacity_bytes": 1 << 24}
    engine = AsyncLLM.from_engine_args(async_engine_args(data_parallel_size=2, **settings(**disk)))
    pids = [process.pid for process in engine.engine_core._connection.cores.processes]
    assert len(list(tmp_path.iterdir())) == 2
    processes = stop(pids[0])
    os.kill(pids[1], signal.SIGKILL)
    engine.shutdown()
    assert_gone(processes)
    assert [path for path in tmp_path.iterdir() if "_dp0" in path.name] == []
