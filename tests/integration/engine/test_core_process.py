"""The core as a process of its own: start, end, death, and what its clients see of it."""

import os
import pickle
import queue
import signal
import subprocess
import sys
import textwrap
import time
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import psutil
import pytest

from tests.helpers.engine_configs import engine_args, engine_config, offload_settings, prompt_of
from tests.helpers.faulty_executors import DEADLY, POISON, SLOW_STORE_S
from tests.helpers.scripted_offload import new_script, scripted
from vllm.sampling_params import SamplingParams
from vllm.v1.engine import core_proc
from vllm.v1.engine.core import EngineCore
from vllm.v1.engine.core_client import SyncMPClient
from vllm.v1.engine.core_io import Arrival, CoreAddresses
from vllm.v1.engine.core_main import CoreStart
from vllm.v1.engine.core_proc import LATE_ENDS_TICK_S, EngineCoreProc
from vllm.v1.engine.exceptions import EngineDeadError
from vllm.v1.engine.input_processor import InputProcessor
from vllm.v1.engine.llm_engine import LLMEngine
from vllm.v1.engine.serial import MsgpackEncoder
from vllm.v1.executor.abstract import Executor
from vllm.v1.messages import EngineCoreRequestType

FLAKY = "tests.helpers.faulty_executors.PoisonedExecutor"


def start(**settings: Any) -> LLMEngine:
    return LLMEngine.from_engine_args(engine_args(**settings), enable_multiprocessing=True)


def client_of(engine: LLMEngine) -> SyncMPClient:
    assert isinstance(engine.engine_core, SyncMPClient)
    return engine.engine_core


def core_pid(engine: LLMEngine) -> int:
    return client_of(engine).core_pids[0]


def greedy(max_tokens: int = 6) -> SamplingParams:
    return SamplingParams(max_tokens=max_tokens, temperature=0.0, ignore_eos=True)


def run(engine: LLMEngine, prompts: dict[str, list[int]], max_tokens: int = 6) -> dict[str, Any]:
    for name, prompt in prompts.items():
        engine.add_request(name, prompt, greedy(max_tokens))
    return drive(engine)


def drive(engine: LLMEngine) -> dict[str, Any]:
    done: dict[str, Any] = {}
    while engine.has_unfinished_requests():
        done.update({output.request_id: output for output in engine.step() if output.finished})
    return done


def ask_until_refused(engine: LLMEngine) -> None:
    while True:
        engine.engine_core.call_utility("is_scheduler_paused")


def wait_until_gone(pid: int, seconds: float) -> bool:
    deadline = time.monotonic() + seconds
    while time.monotonic() < deadline:
        if not psutil.pid_exists(pid) or psutil.Process(pid).status() == psutil.STATUS_ZOMBIE:
            return True
        time.sleep(0.05)
    return False


@pytest.fixture(scope="module")
def shared() -> Iterator[LLMEngine]:
    engine = start(distributed_executor_backend=FLAKY)
    yield engine
    engine.shutdown()


@pytest.fixture(params=["spawn", "fork"])
def method(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> str:
    monkeypatch.setenv("VLLM_WORKER_MULTIPROC_METHOD", request.param)
    return str(request.param)


def test_tokens_equal_those_of_a_core_in_process_and_nothing_is_left_behind() -> None:
    prompts = {"a": [5, 6, 7], "b": list(range(10, 60))}
    inproc = LLMEngine.from_engine_args(engine_args(), enable_multiprocessing=False)
    expected = {name: list(output.outputs[0].token_ids) for name, output in run(inproc, prompts).items()}
    inproc.shutdown()
    engine = start()
    pid, folder = core_pid(engine), client_of(engine).folder
    assert {
        name: list(output.outputs[0].token_ids) for name, output in run(engine, prompts).items()
    } == expected
    assert folder.is_dir()
    assert folder.stat().st_mode & 0o077 == 0, "nobody else may reach the sockets"
    began = time.monotonic()
    engine.shutdown()
    engine.shutdown()
    assert time.monotonic() - began < 5
    assert wait_until_gone(pid, 10)
    assert not folder.exists()


def test_the_front_end_takes_over_what_the_core_resolved() -> None:
    engine = start(max_model_len=-1, num_gpu_blocks_override=20)
    assert engine.model_config.max_model_len == engine.input_processor.max_model_len == 19 * 16
    cache = engine.cache_config
    assert (cache.num_gpu_blocks, cache.block_size, cache.cache_hit_alignment_tokens) == (20, 16, 16)
    assert client_of(engine).ready.kv_cache_size_tokens == cache.kv_cache_size_tokens
    engine.shutdown()


@pytest.mark.parametrize(
    ("settings", "words"),
    [
        (
            {"distributed_executor_backend": "tests.helpers.faulty_executors.UnstartableExecutor"},
            "no such accelerator",
        ),
        ({"kv_cache_memory_bytes": 1 << 14}, "could not start: To serve at least one request"),
        ({"kv_cache_memory_bytes": 1 << 58}, "could not start: .* GiB cannot be reserved for the KV cache"),
        (
            {"kv_transfer_config": {"kv_connector": "None", "kv_role": "kv_both"}},
            "could not start: Connector 'None' is not registered",
        ),
    ],
)
def test_a_start_that_fails_says_why_and_says_it_once(
    settings: dict[str, Any], words: str, capfd: pytest.CaptureFixture[str]
) -> None:
    before = set(psutil.Process().children(recursive=True))
    with pytest.raises(RuntimeError, match=words):
        start(**settings)
    written = "".join(capfd.readouterr())
    assert "Traceback" not in written
    assert "could not start" not in written
    assert set(psutil.Process().children(recursive=True)) == before


@pytest.mark.parametrize("place", ["missing", "a file", "full"])
def test_cfg_06_a_disk_tier_that_cannot_start_says_so_and_leaves_nothing(tmp_path: Path, place: str) -> None:
    before = set(psutil.Process().children(recursive=True))
    extra = {"kv_offload_backend": "disk", "disk_path": str(tmp_path / "missing" / "kv")}
    if place == "a file":
        (tmp_path / "missing").write_text("")
    elif place == "full":
        (tmp_path / "missing").mkdir()
        extra["disk_capacity_bytes"] = str(1 << 60)
    settings = offload_settings()
    settings["kv_transfer_config"]["kv_connector_extra_config"] = extra
    began = time.monotonic()
    with pytest.raises(RuntimeError, match="disk_path"):
        start(**settings)
    assert time.monotonic() - began < 20
    assert set(psutil.Process().children(recursive=True)) == before
    assert not list(tmp_path.rglob("kv*"))


def pool_settings(name: str, scheduler: str) -> dict[str, Any]:
    settings = offload_settings()
    settings["kv_transfer_config"]["kv_connector_extra_config"]["shared_pool"] = name
    return {**settings, "scheduler_cls": f"tests.helpers.faulty_executors.{scheduler}"}


def test_a_core_that_is_told_to_end_while_it_starts_leaves_its_shared_pool(method: str) -> None:
    name = f"told-{os.getpid()}"
    with pytest.raises(RuntimeError, match="could not start: it was told to end by SIGTERM"):
        start(**pool_settings(name, "EndedScheduler"))
    assert not list(Path("/dev/shm").glob(f"vllm-kv-*-{name}-*")), "the last to leave in order removes it"


def test_a_core_whose_front_end_is_killed_while_it_starts_leaves_its_shared_pool(
    method: str, tmp_path: Path
) -> None:
    name = f"orphaned-{os.getpid()}"
    file = tmp_path / "args"
    file.write_bytes(pickle.dumps(engine_args(**pool_settings(name, "OrphanedScheduler"))))
    script = tmp_path / "parent.py"
    script.write_text(
        "import pickle, sys\nfrom vllm.v1.engine.llm_engine import LLMEngine\n"
        "LLMEngine.from_engine_args(pickle.load(open(sys.argv[1], 'rb')), enable_multiprocessing=True)\n"
    )
    env = {**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, sys.path))}
    with subprocess.Popen(
        [sys.executable, str(script), str(file)], stdout=subprocess.PIPE, env=env
    ) as parent:
        # Reads to the end of the last process that holds the other end: the core.
        parent.communicate()
    assert parent.returncode == -signal.SIGKILL
    assert not list(Path("/dev/shm").glob(f"vllm-kv-*-{name}-*"))


def test_a_poisoned_request_does_not_harm_the_process(shared: LLMEngine) -> None:
    assert run(shared, {"bad": [5, *POISON]})["bad"].outputs[0].finish_reason == "error"
    assert run(shared, {"good": [5, 6]})["good"].outputs[0].finish_reason == "length"


def test_a_request_that_the_core_cannot_read_ends_with_an_error(shared: LLMEngine) -> None:
    params = greedy()
    params.skip_clone = True  # so that the change below is not seen by the checks of a copy
    params.detokenize = "yes"  # type: ignore[assignment]
    shared.add_request("odd", {"prompt_token_ids": [5, 6, 7]}, params)
    shared.add_request("good", {"prompt_token_ids": [5, 6, 7]}, greedy())
    done = drive(shared)
    assert done["odd"].outputs[0].finish_reason == "error"
    assert len(done["good"].outputs[0].token_ids) == 6


def test_a_request_that_the_core_finds_wrong_ends_with_an_error(shared: LLMEngine) -> None:
    """The core reads parameters with the checks of the front end, and they fail with the front end's errors."""
    params = greedy()
    params.skip_clone = True
    params.min_tokens = params.max_tokens + 1
    shared.add_request("odd", {"prompt_token_ids": [5, 6, 7]}, params)
    assert drive(shared)["odd"].outputs[0].finish_reason == "error"
    assert run(shared, {"good": [5, 6]})["good"].outputs[0].finish_reason == "length"


def test_an_abort_never_ends_a_later_request_of_the_same_id() -> None:
    """The input thread tells a running step of aborts at once; with no step running that must leave nothing."""
    config = engine_config()
    core = EngineCoreProc(config, Executor.get_class(config), False, 0, lambda _: None)
    encode = MsgpackEncoder().encode
    _, request = InputProcessor(config, None).process_inputs("a", [5, 6], greedy(3))
    added = Arrival(EngineCoreRequestType.ADD, encode(request))
    aborted = encode([request.request_id])
    try:
        core._apply_arrival(added)
        core._note_abort(aborted)
        core._apply_arrival(Arrival(EngineCoreRequestType.ABORT, aborted))
        core._apply_arrival(added)
        tokens: list[int] = []
        while core.core.has_work():
            for outputs in (core.core.step_fn()[0] or {}).values():
                tokens += [token for output in outputs.outputs for token in output.new_token_ids]
        assert len(tokens) == 3
    finally:
        core.close()


@pytest.mark.parametrize("early", [True, False])
def test_workers_that_die_before_a_client_is_heard_end_the_core(
    early: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Also an idle one, which no step would tell of it."""

    def make(
        vllm_config: Any, executor_class: Any, log_stats: bool, failed: Any, progress: Any
    ) -> EngineCore:
        if early:
            failed()
        return EngineCore(vllm_config, executor_class, log_stats, failed, progress)

    arrivals: queue.Queue[Arrival] = queue.Queue()
    sockets = SimpleNamespace(arrivals=arrivals, wake=lambda: None, close=lambda: None)
    monkeypatch.setattr(core_proc, "EngineCore", make)
    monkeypatch.setattr(core_proc, "CoreSockets", lambda *_: sockets)
    config = engine_config()
    core = EngineCoreProc(config, Executor.get_class(config), False, 0, lambda _: None)
    try:
        if not early:
            core._executor_failed()
        core.connect(CoreAddresses([""], [""]))
        assert arrivals.qsize() == 1
        with pytest.raises(EngineDeadError, match="workers cannot go on"):
            core.run()
    finally:
        core.close()


def test_an_idle_core_hears_that_a_copy_that_was_given_up_has_ended() -> None:
    script = new_script()
    config = engine_config(kv_transfer_config=scripted(transfer_timeout_s=0.01))
    core = EngineCoreProc(config, Executor.get_class(config), False, 0, lambda _: None)
    core._sockets = SimpleNamespace(send=lambda *_: None, close=lambda: None)  # type: ignore[assignment]
    _, request = InputProcessor(config, None).process_inputs("a", prompt_of(100), greedy(1))
    try:
        core._apply_arrival(Arrival(EngineCoreRequestType.ADD, MsgpackEncoder().encode(request)))
        while core._step() or core.core.has_work():
            time.sleep(0.001)
        assert script.workers[0].jobs, "a store that does not end"
        assert core._next_pause(False) == LATE_ENDS_TICK_S
        core._step()
        assert core._next_pause(False) == LATE_ENDS_TICK_S, "it has not ended"
        script.workers[0].run()
        core._step()
        assert not script.manager.storing
        assert core._next_pause(False) is None
    finally:
        core.close()


def test_a_dead_core_is_an_error_everywhere_and_soon() -> None:
    engine = start(distributed_executor_backend=FLAKY)
    engine.add_request("r", [5, *DEADLY], greedy())
    began = time.monotonic()
    with pytest.raises(EngineDeadError, match="status"):
        drive(engine)
    assert time.monotonic() - began < 5
    with pytest.raises(EngineDeadError):
        engine.step()
    with pytest.raises(EngineDeadError):
        engine.add_request("s", [5], greedy())
    with pytest.raises(EngineDeadError):
        engine.reset_prefix_cache()
    engine.shutdown()


def test_a_call_that_reaches_a_core_that_is_ending_is_refused_without_a_stack(
    capfd: pytest.CaptureFixture[str],
) -> None:
    engine = start(shutdown_timeout=30)
    engine.add_request("r", [5], greedy(200))
    engine.step()
    os.kill(core_pid(engine), signal.SIGTERM)
    with pytest.raises(RuntimeError, match="Server shutting down"):
        ask_until_refused(engine)
    assert drive(engine)["r"].outputs[0].finish_reason == "length"
    engine.shutdown()
    assert "Traceback" not in capfd.readouterr().err


def test_a_defect_of_the_core_is_its_end_and_everybody_hears_of_it() -> None:
    engine = start(scheduler_cls="tests.helpers.faulty_executors.DefectiveScheduler")
    pid = core_pid(engine)
    engine.add_request("r", [5], greedy())
    with pytest.raises(EngineDeadError):
        drive(engine)
    assert wait_until_gone(pid, 30)
    began = time.monotonic()
    engine.shutdown()
    assert time.monotonic() - began < 2


def test_the_core_ends_by_itself_on_sigterm() -> None:
    engine = start()
    pid = core_pid(engine)
    engine.add_request("r", [5], greedy(200))
    engine.step()
    os.kill(pid, signal.SIGTERM)
    os.kill(pid, signal.SIGTERM)
    assert wait_until_gone(pid, 30)
    assert drive(engine)["r"].outputs[0].finish_reason == "abort"
    deadline = time.monotonic() + 5
    while not client_of(engine).is_dead:
        assert time.monotonic() < deadline
        time.sleep(0.01)
    with pytest.raises(EngineDeadError):
        engine.add_request("s", [5], greedy())
    engine.shutdown()


def test_the_core_does_not_outlive_its_parent(method: str, tmp_path: Path) -> None:
    script = tmp_path / "parent.py"
    script.write_text(
        textwrap.dedent(
            """
            import sys, pickle, time
            from vllm.v1.engine.llm_engine import LLMEngine
            if __name__ == "__main__":
                engine = LLMEngine.from_engine_args(pickle.load(open(sys.argv[1], "rb")), enable_multiprocessing=True)
                print("core", engine.engine_core.core_pids[0], engine.engine_core.folder, flush=True)
                time.sleep(60)
            """
        )
    )
    arguments = tmp_path / "args"
    arguments.write_bytes(pickle.dumps(engine_args()))
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(sys.path), "VLLM_LOGGING_LEVEL": "ERROR"}
    parent = subprocess.Popen(
        [sys.executable, str(script), str(arguments)], stdout=subprocess.PIPE, env=environment
    )
    assert parent.stdout is not None
    words = next(line for line in parent.stdout if line.startswith(b"core")).decode().split()
    pid, folder = int(words[1]), Path(words[2])
    assert psutil.pid_exists(pid)
    parent.kill()
    parent.wait()
    parent.stdout.close()
    assert wait_until_gone(pid, 30), method
    assert not folder.exists()


def test_off_20_an_idle_core_collects_its_transfers_and_then_rests() -> None:
    engine = start(**offload_settings())
    prompt = list(range(3, 103))
    run(engine, {"a": prompt})
    time.sleep(1.0)
    core = psutil.Process(core_pid(engine))
    before = sum(core.cpu_times()[:2])
    time.sleep(1.0)
    assert sum(core.cpu_times()[:2]) - before <= 0.05, "an idle core must not spin"
    assert engine.reset_prefix_cache(), "every device block is free"
    assert run(engine, {"b": prompt})["b"].num_cached_tokens == 96, "the stores are findable"
    engine.shutdown()


def test_off_21_a_slow_store_does_not_hold_up_a_new_request() -> None:
    slow = "tests.helpers.faulty_executors.SlowStoreExecutor"
    engine = start(distributed_executor_backend=slow, **offload_settings())
    prompt = list(range(3, 103))
    run(engine, {"warm-up": [9, 8, 7]})
    run(engine, {"a": prompt})
    began = time.monotonic()
    run(engine, {"b": [5, 6, 7]}, max_tokens=1)
    assert time.monotonic() - began < SLOW_STORE_S / 4
    deadline = time.monotonic() + 5 * SLOW_STORE_S
    while not engine.reset_prefix_cache():
        assert time.monotonic() < deadline
        time.sleep(0.1)
    engine.shutdown()


def test_utility_calls_report_failures_as_text(shared: LLMEngine) -> None:
    engine = shared
    with pytest.raises(RuntimeError, match="unknown utility method 'nonsense'"):
        engine.engine_core.call_utility("nonsense")
    with pytest.raises(RuntimeError, match=r"mode='x' must be one of"):
        engine.pause_generation("x")
    assert engine.get_supported_tasks() == ("generate",)
    assert run(engine, {"r": [5]})["r"].finished


def test_a_core_whose_front_end_dies_before_it_answers_ends_too(tmp_path: Path) -> None:
    config = engine_args().create_engine_config()
    start = CoreStart(config, None, False, 0, f"ipc://{tmp_path}/sockets/handshake", os.getpid())
    message = pickle.dumps(start)
    entry = ["vllm.utils.child_process", "vllm.v1.engine.core_main", str(os.getpid())]
    command = [sys.executable, "-m", *entry]
    with subprocess.Popen(command, stdin=subprocess.PIPE) as child:
        try:
            assert child.stdin is not None
            child.stdin.write(len(message).to_bytes(8, "little") + message)
            child.stdin.close()
            assert child.wait(60) == 1
        finally:
            child.kill()
