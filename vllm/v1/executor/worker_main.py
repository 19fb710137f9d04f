"""Entry of a worker process.  Layer L7.

Owns the process round one worker: its signals, the watch over the parent, calls in, replies out, the orderly end. Must
not know what a call does or which engine makes it.
"""

from __future__ import annotations

import os
import pickle
import signal
import socket
import threading
from typing import Any, NamedTuple

from vllm.config import VllmConfig
from vllm.distributed.parallel_state import destroy_distributed, get_tp_group
from vllm.logger import init_logger
from vllm.utils.child_process import read_start_message, watch_parent
from vllm.v1.executor.worker_channel import Channel, Method, answer, answer_call
from vllm.v1.outputs import ModelRunnerOutput
from vllm.v1.worker.worker_base import WorkerWrapperBase

logger = init_logger(__name__)

# A worker whose engine is gone must not outlive it by much, whatever it is doing.
ORPHAN_GRACE_S = 5.0
OUTPUT_RANK = 0
FIRST_CALL = 0
_STEPS = frozenset({"execute_model", "sample_tokens"})


class WorkerStart(NamedTuple):
    """What a worker process is given: pickled by the executor that starts it."""

    vllm_config: VllmConfig
    rank: int
    channel: int  # file descriptor of this end
    meeting: int  # file descriptor of the file in which the ranks find each other
    parent_pid: int


class WorkerProcess:
    """One worker and the calls that reach it. The start itself is answered as call `FIRST_CALL`."""

    def __init__(self, start: WorkerStart) -> None:
        self._start = start
        self._channel = Channel(socket.socket(fileno=start.channel))
        self._wrapper = WorkerWrapperBase(start.vllm_config, start.rank)

    def serve(self) -> None:
        """Carry calls out one after the other until the executor sends no more, then release everything."""
        try:
            self._channel.send(answer(FIRST_CALL, self._create, _operations))
            while (frame := self._channel.receive()) is not None:
                self._channel.send(answer_call(frame, self._execute, _operations))
        except (BrokenPipeError, ConnectionResetError):
            logger.debug("The engine core is gone.")  # nobody is left to answer
        self._wrapper.shutdown()
        # Ranks that wait inside an operation for this one are told by the closed connection.
        destroy_distributed()
        self._channel.close()

    def _create(self) -> None:
        self._wrapper.init_worker(
            {
                "vllm_config": self._start.vllm_config,
                "local_rank": self._start.vllm_config.parallel_config.first_local_rank + self._start.rank,
                "rank": self._start.rank,
                # A file in memory has no name that could be left behind, and no port that somebody else could take.
                "distributed_init_method": f"file:///proc/self/fd/{self._start.meeting}",
                "is_driver_worker": self._start.rank == OUTPUT_RANK,
            }
        )

    def _execute(self, method: Method, *args: Any, **kwargs: Any) -> Any:
        result = self._wrapper.execute_method(method, *args, **kwargs)
        if self._start.rank == OUTPUT_RANK or result is None or method not in _STEPS:
            return result
        # Every rank has the same tokens; only what its connector reports is its own.
        return ModelRunnerOutput.with_kv_conn_output_only(result.kv_connector_output)


def _operations() -> int:
    return get_tp_group().calls


def _end_orphan() -> None:
    # The main thread ends by itself when it notices, unless it waits for something that never comes.
    threading.Event().wait(ORPHAN_GRACE_S)
    os._exit(1)


def main() -> int:
    """Serve one executor to its end."""
    # The executor says when to end: a signal to the whole group must not end a worker in the middle of a step.
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, signal.SIG_IGN)
    signal.pthread_sigmask(signal.SIG_UNBLOCK, {signal.SIGINT})
    # The bytes come from the process that started this one, over a pipe that nobody else has.
    start: WorkerStart = pickle.loads(read_start_message())
    watch_parent(start.parent_pid, 0, _end_orphan)
    for descriptor in (start.channel, start.meeting):
        os.set_inheritable(descriptor, False)
    WorkerProcess(start).serve()
    return 0
