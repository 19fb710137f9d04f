"""The worker processes of an engine: started together, ended together.  Layer L7.

Owns processes, their end of the channels and what they share: the meeting point of their group, cores, log prefix. Must
not know calls. Nothing outlives `end`: not a process, not a file.
"""

from __future__ import annotations

import contextlib
import os
import pickle
import signal
import socket
import subprocess
import time

from vllm import envs
from vllm.config import VllmConfig
from vllm.logger import init_logger
from vllm.utils.child_process import start_python
from vllm.v1.executor.worker_channel import Channel
from vllm.v1.executor.worker_main import WorkerStart

logger = init_logger(__name__)

# A worker sends a reply in one go: one that stops in the middle is stopped itself.
STALL_S = 30


class WorkerHandle:
    """One worker process, seen from its executor."""

    def __init__(self, vllm_config: VllmConfig, rank: int, meeting_fd: int, num_threads: int) -> None:
        self.rank = rank
        here, there = socket.socketpair()
        self.channel = Channel(here, STALL_S)
        start = WorkerStart(vllm_config, rank, there.fileno(), meeting_fd, os.getpid())
        variables = {
            "VLLM_LOGGING_PREFIX": f"{envs.VLLM_LOGGING_PREFIX}(Worker TP{rank}) ",
            # All ranks are on this machine, and its name need not lead anywhere.
            "GLOO_SOCKET_IFNAME": os.environ.get("GLOO_SOCKET_IFNAME", "lo"),
            "OMP_NUM_THREADS": os.environ.get("OMP_NUM_THREADS") or str(num_threads),
        }
        message = pickle.dumps(start, protocol=pickle.HIGHEST_PROTOCOL)
        try:
            self._process = start_python(
                "vllm.v1.executor.worker_main", message, variables, (there.fileno(), meeting_fd)
            )
        except BaseException:
            here.close()
            raise
        finally:
            there.close()
        self.pid = self._process.pid
        try:
            # Readable once the process has ended, whoever else may hold its end of the channel.
            self.pidfd = os.pidfd_open(self.pid)
        except OSError:
            self.pidfd = -1
            self.kill()
            self.close()
            raise

    def wait(self, deadline: float) -> int | None:
        """The exit status; None if the process still runs at `deadline` (monotonic seconds)."""
        try:
            return self._process.wait(max(0.0, deadline - time.monotonic()))
        except subprocess.TimeoutExpired:
            return None

    def kill(self) -> None:
        self._process.kill()
        self._process.wait()

    def close(self) -> None:
        """Release what belongs to a process that has ended."""
        self.channel.close()
        if self.pidfd >= 0:
            os.close(self.pidfd)
        assert self._process.stdin is not None
        self._process.stdin.close()

    def describe_end(self) -> str:
        """How the process ended, in words; waits a moment for the end to be known."""
        status = self.wait(time.monotonic() + 1.0)
        if status is None:
            how = "does not answer any more"
        elif status < 0:
            how = f"was ended by {signal.Signals(-status).name}"
        else:
            how = f"ended with status {status}"
        return f"worker process {self.pid} of rank {self.rank} {how}"


class WorkerProcesses:
    """The workers of one engine on this machine, by rank."""

    def __init__(self, vllm_config: VllmConfig, num_ranks: int) -> None:
        num_threads = max(1, len(os.sched_getaffinity(0)) // num_ranks)
        self.workers: list[WorkerHandle] = []
        meeting_fd = os.memfd_create("vllm-workers")
        try:
            for rank in range(num_ranks):
                self.workers.append(WorkerHandle(vllm_config, rank, meeting_fd, num_threads))
        except BaseException:
            self.end(0.0)
            raise
        finally:
            os.close(meeting_fd)

    def __len__(self) -> int:
        return len(self.workers)

    def send(self, frame: bytes) -> None:
        """Send every worker the same frame. One that is gone gets none: its end is noticed by who waits for it."""
        for worker in self.workers:
            with contextlib.suppress(OSError):
                worker.channel.send(frame)

    def stop_sending(self) -> None:
        """Ask the workers to end. They carry out first what they were sent."""
        for worker in self.workers:
            worker.channel.stop_sending()

    def end(self, grace_s: float) -> None:
        """Wait up to `grace_s` for the workers to end, then end them by force."""
        self.stop_sending()
        deadline = time.monotonic() + grace_s
        for worker in self.workers:
            if worker.wait(deadline) is None:
                if grace_s:
                    logger.warning("Worker process %d does not end; it is killed.", worker.pid)
                worker.kill()
            worker.close()
