"""A lane: one thread that works through jobs of one direction, and its replacement when it fails.

Owns thread life and death. It must not know what a job does: the work is a function. Layer L6.
"""

from __future__ import annotations

import os
import sys
import threading
from collections import deque
from collections.abc import Callable
from contextlib import suppress

from vllm.logger import init_logger
from vllm.utils.clock import Clock
from vllm.v1.simple_kv_offload.copy_backends.base import CopyError, CopyJob

logger = init_logger(__name__)

# How long giving up waits for a piece that is being written right now.
GIVE_UP_PATIENCE_S = 0.2
SHUTDOWN_TIMEOUT_S = 5.0


class _Thread:
    """One incarnation of a lane: a queue and the thread that empties it."""

    def __init__(self, name: str, work: Callable[[CopyJob], None], clock: Clock, niceness: int) -> None:
        self._work = work
        self._clock = clock
        self._niceness = niceness
        self._condition = threading.Condition()
        self._queue: deque[CopyJob] = deque()
        self._running: CopyJob | None = None
        self._started_at = 0.0
        self._closed = False
        self._thread = threading.Thread(target=self._run, name=name, daemon=True)
        self._thread.start()

    def submit(self, job: CopyJob) -> None:
        with self._condition:
            self._queue.append(job)
            self._condition.notify()

    def busy_for(self, now: float) -> float:
        """Seconds since the running job was started; 0 when idle."""
        with self._condition:
            return now - self._started_at if self._running is not None else 0.0

    def is_alive(self) -> bool:
        return self._thread.is_alive()

    def close(self) -> list[CopyJob]:
        """Take no more jobs, forget the queued ones and return all open ones. Does not wait."""
        with self._condition:
            jobs = [*([self._running] if self._running is not None else []), *self._queue]
            self._queue.clear()
            self._closed = True
            self._condition.notify()
            return jobs

    def join(self, timeout_s: float) -> bool:
        self._thread.join(timeout_s)
        return not self._thread.is_alive()

    def _next(self) -> CopyJob | None:
        with self._condition:
            self._running = None
            while not self._queue and not self._closed:
                self._condition.wait()
            if self._closed:
                return None
            self._running = self._queue.popleft()
            self._started_at = self._clock.monotonic()
            return self._running

    def _run(self) -> None:
        if self._niceness and sys.platform == "linux":  # elsewhere a thread has no priority of its own
            with suppress(OSError):
                os.setpriority(os.PRIO_PROCESS, threading.get_native_id(), self._niceness)
        while (job := self._next()) is not None:
            try:
                self._work(job)
            except Exception as error:  # the thread's edge: an error is a result
                job.result.resolve(error)


class CopyLane:
    """Jobs in order on one thread. A dead or hanging thread fails its jobs and is replaced.

    ``work`` resolves the job's result; an exception resolves it as failed. ``deadline_s`` bounds one
    job. The replaced thread can do no harm when it wakes up: its job's result is resolved, so it
    writes nothing more, and its queue is closed. ``niceness``: how far the thread stands back behind others.
    """

    def __init__(
        self,
        name: str,
        work: Callable[[CopyJob], None],
        clock: Clock,
        deadline_s: float,
        niceness: int = 0,
    ) -> None:
        self._name = name
        self._work = work
        self._clock = clock
        self._deadline_s = deadline_s
        self._niceness = niceness
        self._thread: _Thread | None = _Thread(name, work, clock, niceness)
        self._lost: list[CopyJob] = []
        self.restarts = 0

    def submit(self, job: CopyJob) -> None:
        """Queue a job; after shutdown it fails at once."""
        if self._thread is None:
            job.result.resolve(CopyError(f"copy lane {self._name} is shut down"))
            return
        self._thread.submit(job)

    def check_health(self) -> None:
        """Replace the thread if it died or its job is past the deadline; its open jobs fail."""
        self._retry_lost()
        thread = self._thread
        if thread is None:
            return
        busy_s = thread.busy_for(self._clock.monotonic())
        dead = not thread.is_alive()
        if not dead and busy_s <= self._deadline_s:
            return
        cause = "died" if dead else f"did not finish a job within {self._deadline_s:g} s"
        jobs = thread.close()
        logger.error("Copy lane %s %s; %d jobs fail, the lane is restarted.", self._name, cause, len(jobs))
        self._fail(jobs, f"copy lane {self._name} {cause}", GIVE_UP_PATIENCE_S)
        self.restarts += 1
        self._thread = _Thread(self._name, self._work, self._clock, self._niceness)

    def shutdown(self) -> bool:
        """Fail what is open, end the thread; True if it ended. Idempotent."""
        thread, self._thread = self._thread, None
        if thread is None:
            return True
        jobs = thread.close()
        self._fail(jobs, f"copy lane {self._name} is shut down", GIVE_UP_PATIENCE_S)
        ended = thread.join(SHUTDOWN_TIMEOUT_S)
        if not ended:
            logger.warning("Copy lane %s did not end in time; its thread is left behind.", self._name)
        return ended

    def _fail(self, jobs: list[CopyJob], cause: str, patience_s: float) -> None:
        # A job in the middle of a write stays open until the write is over, so that no target is
        # handed on while bytes still arrive.
        self._lost += [job for job in jobs if not job.result.give_up(CopyError(cause), patience_s)]

    def _retry_lost(self) -> None:
        if self._lost:
            lost, self._lost = self._lost, []
            # Asked in every step: steps do not wait for a medium that hangs.
            self._fail(lost, f"copy lane {self._name} hung in a write", 0.0)
