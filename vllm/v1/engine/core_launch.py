"""Starting engine core processes and waiting until they are ready.  Layer L7.

Owns the child processes, the private folder of their sockets and the front end's side of the handshake. Must not know
requests. Nothing outlives `CoreProcesses.close`: not a process, not a socket file.
"""

from __future__ import annotations

import contextlib
import copy
import os
import pickle
import select
import shutil
import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Collection
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Protocol

import msgspec
import psutil
import zmq

from vllm import envs
from vllm.config import VllmConfig
from vllm.distributed.kv_transfer.kv_connector.factory import KVConnectorFactory
from vllm.logger import init_logger
from vllm.utils.child_process import start_python
from vllm.v1.engine.core_main import CoreStart, become_replica, run_core
from vllm.v1.engine.exceptions import EngineStartError
from vllm.v1.engine.outside_modules import check_outside_modules
from vllm.v1.executor.abstract import Executor

logger = init_logger(__name__)

POLL_MS = 100
# A start that takes longer than the first says what it is doing, then again after each further interval.
REPORT_FIRST_S = 2.0
REPORT_EVERY_S = 5.0
# Workers whose core was killed end by themselves, if they can.
WORKERS_GRACE_S = 2.0


class CoreProcess(Protocol):
    """A child process."""

    pid: int

    def wait(self, timeout: float | None = None) -> int | None: ...
    def terminate(self) -> None: ...
    def kill(self) -> None: ...


class ForkedCore:
    """A child made by fork: it starts with everything the parent has imported and registered."""

    def __init__(self, start: CoreStart) -> None:
        read_end, self._alive = os.pipe()
        sys.stdout.flush()
        sys.stderr.flush()
        self.pid = os.fork()
        if self.pid == 0:
            status = 1
            try:
                os.close(self._alive)
                signal.set_wakeup_fd(-1)
                status = run_core(start, read_end)
            finally:
                sys.stdout.flush()
                sys.stderr.flush()
                os._exit(status)
        os.close(read_end)
        # Readable once the child has ended; stays open for the life of this object.
        self._pidfd = os.pidfd_open(self.pid)
        self._status: int | None = None
        self._lock = threading.Lock()

    def wait(self, timeout: float | None = None) -> int | None:
        """The exit status; None if the child still runs after `timeout` seconds."""
        if self._status is None and select.select([self._pidfd], [], [], timeout)[0]:
            with self._lock:
                if self._status is None:
                    self._status = os.waitstatus_to_exitcode(os.waitpid(self.pid, 0)[1])
                    os.close(self._alive)
        return self._status

    def terminate(self) -> None:
        self._signal(signal.SIGTERM)

    def kill(self) -> None:
        self._signal(signal.SIGKILL)

    def _signal(self, number: int) -> None:
        # By its descriptor: another thread may have heard of the end first, and the number be somebody else's.
        with contextlib.suppress(ProcessLookupError):
            signal.pidfd_send_signal(self._pidfd, number)


class SpawnedCore:
    """A child with an interpreter of its own; safe whatever threads the parent has."""

    def __init__(self, start: CoreStart) -> None:
        payload = pickle.dumps(start, protocol=pickle.HIGHEST_PROTOCOL)
        prefix = f"{envs.VLLM_LOGGING_PREFIX}(EngineCore {start.engine_index}) "
        variables = {"VLLM_LOGGING_PREFIX": prefix, **_share_of_processors(start)}
        self._process = start_python("vllm.v1.engine.core_main", payload, variables)
        self.pid = self._process.pid

    def wait(self, timeout: float | None = None) -> int | None:
        try:
            status = self._process.wait(timeout)
        except subprocess.TimeoutExpired:
            return None
        assert self._process.stdin is not None
        self._process.stdin.close()
        return status

    def terminate(self) -> None:
        self._process.terminate()

    def kill(self) -> None:
        self._process.kill()


def _share_of_processors(start: CoreStart) -> dict[str, str]:
    """How many compute threads a rank of one of several cores gets, unless the user says so."""
    parallel = start.vllm_config.parallel_config
    if parallel.data_parallel_size == 1 or os.environ.get("OMP_NUM_THREADS"):
        return {}
    return {"OMP_NUM_THREADS": str(max(1, len(os.sched_getaffinity(0)) // parallel.world_size_across_dp))}


@dataclass
class CoreProcesses:
    """Running cores. `grace_s`: time to end in; `resolved`: what each decided about the configuration.

    `vllm_config`: of all of them; who is killed cannot remove what outlives a process, so that is done here.
    """

    processes: list[CoreProcess]
    input_address: str
    output_address: str
    folder: Path
    grace_s: float
    vllm_config: VllmConfig
    resolved: dict[bytes, dict[str, Any]] = field(default_factory=dict)
    _closing: bool = False
    _owner: int = field(default_factory=os.getpid)
    _cleaning: threading.Lock = field(default_factory=threading.Lock)

    @property
    def identities(self) -> list[bytes]:
        """Socket identity of each core."""
        return [index.to_bytes(2, "little") for index in range(len(self.processes))]

    def watch(self, on_death: Callable[[str], None]) -> None:
        """Call `on_death` (from another thread) when a core ends before `close`; the others are ended too then."""

        def wait(index: int, process: CoreProcess) -> None:
            status = process.wait()
            if not self._closing:
                which = f"{process.pid} of replica {index}" if len(self.processes) > 1 else str(process.pid)
                on_death(f"Engine core process {which} ended unexpectedly with status {status}.")
                self._end(set(range(len(self.processes))) - {index}, self.grace_s)

        for index, process in enumerate(self.processes):
            threading.Thread(target=wait, args=(index, process), name="core-watch", daemon=True).start()

    def close(self, timeout: float | None = None) -> None:
        """End the cores: a request first, force after `timeout` seconds (None: `grace_s`). Idempotent."""
        if self._closing or os.getpid() != self._owner:
            return
        self._closing = True
        self._end(range(len(self.processes)), self.grace_s if timeout is None else timeout)
        shutil.rmtree(self.folder, ignore_errors=True)

    def _end(self, indices: Collection[int], timeout: float) -> None:
        deadline = time.monotonic() + timeout
        for index in indices:
            self.processes[index].terminate()
        for index in indices:
            self.processes[index].wait(max(0.0, deadline - time.monotonic()))
        # Both the watch and `close` may be here: whoever comes first kills and cleans up, and the other waits for it.
        with self._cleaning:
            killed = [index for index in indices if self.processes[index].wait(0) is None]
            for index in killed:
                self._kill(index)
            for index in killed:
                self._remove_leftovers(index)

    def _kill(self, index: int) -> None:
        """End a core by force, and its workers: they notice, but may be stopped or at a step as it was."""
        process = self.processes[index]
        logger.warning("Engine core process %d does not end; it is killed.", process.pid)
        workers = _descendants(process.pid)
        process.kill()
        process.wait()
        _, left = psutil.wait_procs(workers, WORKERS_GRACE_S)
        for worker in left:
            with contextlib.suppress(psutil.NoSuchProcess):
                worker.kill()
        psutil.wait_procs(left, WORKERS_GRACE_S)

    def _remove_leftovers(self, index: int) -> None:
        config = copy.deepcopy(self.vllm_config)
        if len(self.processes) > 1:
            become_replica(config, index)
        try:
            KVConnectorFactory.remove_leftovers(config)
        except Exception:  # an outside connector's own; the engine ends all the same
            logger.exception("What engine core %d left behind may still be there.", index)


def _descendants(pid: int) -> list[psutil.Process]:
    found: list[psutil.Process] = []
    with contextlib.suppress(psutil.NoSuchProcess):
        found += psutil.Process(pid).children(recursive=True)
    return found


def _socket_folder() -> Path:
    """A private folder for the sockets of one engine."""
    base = envs.VLLM_RPC_BASE_PATH
    try:
        folder = Path(tempfile.mkdtemp(prefix="vllm-core-", dir=base))
    except OSError as error:
        raise ValueError(f"VLLM_RPC_BASE_PATH={base!r}: no folder can be made there: {error}") from error
    longest = len(str(folder / "handshake").encode())
    if longest > zmq.IPC_PATH_MAX_LEN:
        folder.rmdir()
        raise ValueError(
            f"VLLM_RPC_BASE_PATH={base!r}: a socket's path may have {zmq.IPC_PATH_MAX_LEN} bytes, not {longest}"
        )
    return folder


def start_cores(
    vllm_config: VllmConfig, executor_class: type[Executor] | None, log_stats: bool, num_cores: int = 1
) -> tuple[CoreProcesses, zmq.Socket[bytes]]:
    """Start the processes; returns at once. The socket is for `wait_until_ready`."""
    if log_stats:  # the front end shows their metrics
        check_outside_modules(vllm_config.kv_transfer_config)
    grace_s = envs.VLLM_WORKER_SHUTDOWN_TIMEOUT_SECONDS
    if vllm_config.parallel_config.world_size > 1:
        grace_s += (
            vllm_config.shutdown_timeout
        )  # its workers may be at a step for so long: it has to outlive them
    folder = _socket_folder()
    handshake_address = f"ipc://{folder}/handshake"
    make = _process_class(num_cores)
    cores = CoreProcesses([], f"ipc://{folder}/input", f"ipc://{folder}/output", folder, grace_s, vllm_config)
    try:
        for index in range(num_cores):
            start = CoreStart(vllm_config, executor_class, log_stats, index, handshake_address, os.getpid())
            cores.processes.append(make(start))
        # Sockets come after the children, which must not inherit any; connections made before the bind wait for it.
        socket: zmq.Socket[bytes] = zmq.Context.instance().socket(zmq.ROUTER)
        socket.setsockopt(zmq.LINGER, 0)
        socket.bind(handshake_address)
    except BaseException:
        cores.close(timeout=0)
        raise
    return cores, socket


def _process_class(num_cores: int) -> Callable[[CoreStart], CoreProcess]:
    if num_cores > 1 or envs.VLLM_WORKER_MULTIPROC_METHOD == "spawn":
        return SpawnedCore  # of several, each has its own name in the log and its share of the processors
    threads = (
        len(os.listdir("/proc/self/task")) if os.path.isdir("/proc/self/task") else threading.active_count()
    )
    if threads > 1:
        logger.debug(
            "This process has %d threads, so the engine core gets an interpreter of its own.", threads
        )
        return SpawnedCore
    return ForkedCore


def wait_until_ready(cores: CoreProcesses, socket: zmq.Socket[bytes]) -> None:
    """Lead the handshake to its end; says what the cores are doing if that takes long.

    Raises RuntimeError with a core's own message if it failed, TimeoutError after VLLM_ENGINE_READY_TIMEOUT_S. The cores
    are closed then.
    """
    try:
        _handshake(cores, socket)
    except BaseException:
        cores.close()
        raise
    finally:
        socket.close()


def _handshake(cores: CoreProcesses, socket: zmq.Socket[bytes]) -> None:
    started = time.monotonic()
    next_report, phase = started + REPORT_FIRST_S, "starting the process"
    waiting = set(cores.identities)
    while waiting:
        now = time.monotonic()
        if now - started > envs.VLLM_ENGINE_READY_TIMEOUT_S:
            raise TimeoutError(
                f"The engine core was not ready after VLLM_ENGINE_READY_TIMEOUT_S={envs.VLLM_ENGINE_READY_TIMEOUT_S} s "
                f"(last phase: {phase})"
            )
        if now >= next_report:
            logger.info("Engine core: %s (%.0f s so far)", phase, now - started)
            next_report = now + REPORT_EVERY_S
        if not socket.poll(POLL_MS):
            _check_alive(cores, phase)
            continue
        identity, payload = socket.recv_multipart()
        message = msgspec.msgpack.decode(payload)
        phase = message.get("phase", phase)
        if message["status"] == "HELLO":
            addresses = {"inputs": [cores.input_address], "outputs": [cores.output_address]}
            socket.send_multipart(
                [identity, msgspec.msgpack.encode({"addresses": addresses, "parallel_config": {}})]
            )
        elif message["status"] == "READY":
            cores.resolved[identity] = message["resolved"]
            waiting.discard(identity)
        elif message["status"] == "FAILED":
            raise EngineStartError(
                f"The engine core {_which(cores, identity)}could not start: {message['error']}"
            )


def _which(cores: CoreProcesses, identity: bytes) -> str:
    return f"of replica {cores.identities.index(identity)} " if len(cores.processes) > 1 else ""


def _check_alive(cores: CoreProcesses, phase: str) -> None:
    for process in cores.processes:
        status = process.wait(0)
        if status is not None:
            raise EngineStartError(
                f"Engine core process {process.pid} ended with status {status} while {phase}; see its log above."
            )
