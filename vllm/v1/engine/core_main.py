"""Entry of an engine core process: `main` in a child of its own, or `run_core` in a forked one.  Layer L7.

Owns the process around `EngineCoreProc`: handshake with the front end, signals, and the watch over the parent. Must not
know requests. Whatever goes wrong before the core is ready is told to the front end as text.
"""

from __future__ import annotations

import contextlib
import os
import pickle
import shutil
import signal
import threading
from collections.abc import Iterator
from pathlib import Path
from types import FrameType
from typing import Any, NamedTuple, NoReturn

import msgspec
import zmq

from vllm.config import VllmConfig
from vllm.config.error_text import error_text
from vllm.logger import init_logger
from vllm.utils.child_process import read_start_message, watch_parent
from vllm.v1.engine.core_io import LINGER_MS, CoreAddresses
from vllm.v1.engine.core_proc import EngineCoreProc
from vllm.v1.engine.core_ready import resolved_settings
from vllm.v1.engine.exceptions import EngineDeadError
from vllm.v1.executor.abstract import Executor

logger = init_logger(__name__)

# A core whose parent is gone must not outlive it by much, whatever it is doing.
ORPHAN_GRACE_S = 10.0
ADDRESSES_TIMEOUT_MS = 60_000


class CoreStart(NamedTuple):
    """What a core process is given: pickled by the front end that starts it."""

    vllm_config: VllmConfig
    executor_class: type[Executor] | None  # None: what the configuration says
    log_stats: bool
    engine_index: int
    handshake_address: str
    parent_pid: int


class Handshake:
    """The start-up conversation of a core with its front end, as msgpack maps with a `status`."""

    def __init__(self, address: str, engine_index: int) -> None:
        self._context = zmq.Context()
        self._socket = self._context.socket(zmq.DEALER)
        self._socket.setsockopt(zmq.IDENTITY, engine_index.to_bytes(2, "little"))
        self._socket.setsockopt(zmq.LINGER, LINGER_MS)
        self._socket.connect(address)

    def say(self, status: str, **details: Any) -> None:
        """Tell the front end something; never waits."""
        self._socket.send(
            msgspec.msgpack.encode({"status": status, "local": True, "headless": False, **details})
        )

    def progress(self, phase: str) -> None:
        """Tell which phase of the start begins."""
        self.say("PROGRESS", phase=phase)

    def addresses(self) -> CoreAddresses:
        """Say hello and wait for the clients' addresses."""
        self.say("HELLO")
        if not self._socket.poll(ADDRESSES_TIMEOUT_MS):
            raise TimeoutError("the front end did not answer the handshake")
        answer = msgspec.msgpack.decode(self._socket.recv())
        return CoreAddresses(answer["addresses"]["inputs"], answer["addresses"]["outputs"])

    def close(self) -> None:
        self._socket.close()
        self._context.term()


def run_core(start: CoreStart, parent_pipe: int) -> int:
    """Run one core until its end; returns the exit status of the process.

    `parent_pipe`: a descriptor that reads end-of-file when the parent is gone.
    """
    watched: list[EngineCoreProc] = []
    signal.signal(signal.SIGTERM, _end_start)
    # From the first: a parent that dies while the model is loaded leaves nobody who would end this process.
    _watch_parent(watched, parent_pipe, start)
    handshake = Handshake(start.handshake_address, start.engine_index)
    try:
        addresses = handshake.addresses()
        config = start.vllm_config
        if config.parallel_config.data_parallel_size > 1:
            become_replica(config, start.engine_index)
        executor_class = start.executor_class or Executor.get_class(config)
        core = EngineCoreProc(config, executor_class, start.log_stats, start.engine_index, handshake.progress)
    except BaseException as error:
        # Whoever started this process shows the message, once.
        logger.debug("The engine core could not start.", exc_info=error)
        handshake.say("FAILED", error=str(error) if isinstance(error, SystemExit) else error_text(error))
        handshake.close()
        return 1
    with _signals(core):
        watched.append(core)
        core.connect(addresses)
        handshake.say("READY", resolved=resolved_settings(start.vllm_config))
        handshake.close()
        return _serve(core)


def become_replica(config: VllmConfig, index: int) -> None:
    """Make this the configuration of one of several replicas; its connector gets an id of its own."""
    config.parallel_config.become_replica(index)
    if config.kv_transfer_config is not None:
        config.kv_transfer_config.engine_id = f"{config.kv_transfer_config.engine_id}_dp{index}"


def _serve(core: EngineCoreProc) -> int:
    status = 0
    try:
        core.run()
    except EngineDeadError:
        logger.exception("The engine core cannot go on.")
        status = 1
    except Exception:
        logger.exception("The engine core stopped because of a defect.")
        status = 1
    if status:
        core.send_dead()
    core.close()
    return status


def _end_start(number: int, frame: FrameType | None) -> NoReturn:
    """SIGTERM during the start unwinds it: what outlives a process, as a shared pool does, is left in order."""
    signal.signal(number, signal.SIG_IGN)
    raise SystemExit(f"it was told to end by {signal.Signals(number).name}")


@contextlib.contextmanager
def _signals(core: EngineCoreProc) -> Iterator[None]:
    """SIGTERM and SIGINT end the core in an orderly way; a second one changes nothing."""

    def handle(number: int, frame: FrameType | None) -> None:
        core.request_shutdown()

    before = {number: signal.signal(number, handle) for number in (signal.SIGTERM, signal.SIGINT)}
    signal.pthread_sigmask(signal.SIG_UNBLOCK, {signal.SIGINT})  # held back since the start
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


def _watch_parent(watched: list[EngineCoreProc], parent_pipe: int, start: CoreStart) -> None:
    """Start a thread that ends this process when its parent is gone, and removes the socket folder in its stead.

    `watched`: the core, which is asked first, once it is there.
    """

    def end() -> None:
        logger.warning("The front end is gone; the engine core ends.")
        shutil.rmtree(Path(start.handshake_address.removeprefix("ipc://")).parent, ignore_errors=True)
        for core in watched:
            core.request_shutdown()
        if not watched:
            os.kill(os.getpid(), signal.SIGTERM)
        threading.Event().wait(ORPHAN_GRACE_S)
        os._exit(1)

    watch_parent(start.parent_pid, parent_pipe, end)


def main() -> int:
    """Read what to do from standard input, which stays open as long as the parent lives."""
    # The bytes come from the process that started this one, over a pipe that nobody else has.
    start: CoreStart = pickle.loads(read_start_message())
    return run_core(start, 0)
