"""Several workers, each in a process of its own on this machine.

Owns the thread that takes the replies, and what it means that a worker is gone. Must not know what a worker does, what a
call holds, or how a process is started. Layer L7.
"""

from __future__ import annotations

import math
import selectors
import threading
import time
from collections.abc import Callable
from typing import Any

from vllm import envs
from vllm.logger import init_logger
from vllm.v1.executor.abstract import Executor, FailureCallback
from vllm.v1.executor.call_book import CallBook, WorkersFailedError
from vllm.v1.executor.worker_channel import decode_reply, encode_call, number_call
from vllm.v1.executor.worker_processes import WorkerHandle, WorkerProcesses

logger = init_logger(__name__)

# How often the time is looked at while nothing arrives: for steps that hang, and ranks that do not agree.
TICK_S = 1.0
# The workers get this share of the time that the engine process has to end in.
SHARE_OF_GRACE = 0.6


class MultiprocExecutor(Executor):
    """Runs one worker process per tensor-parallel rank.

    A call is sent to all ranks and is over when all have answered: alike, or the executor fails. Calls are carried out in
    the order they were made, so any number of steps may be in flight. When a worker dies, hangs, or has another outcome
    than the others, every open call ends with `WorkersFailedError`, `is_failed` is set, the failure callbacks are called
    from the thread that noticed, and the other workers are ended.
    """

    @classmethod
    def supports_async_scheduling(cls) -> bool:
        """Steps can be queued behind each other."""
        return True

    def _init_executor(self) -> None:
        num_ranks = self.vllm_config.parallel_config.world_size
        self._callbacks: list[FailureCallback] = []
        self._failure: WorkersFailedError | None = None
        self._read_until = math.inf  # monotonic seconds: workers that are there by then are ended by force
        self._is_ending = False
        self._state_lock = threading.Lock()
        self._call_lock = threading.Lock()
        self._book = CallBook(num_ranks, envs.VLLM_EXECUTE_MODEL_TIMEOUT_SECONDS)
        # What each worker answers first, without being asked: that it is there.
        started = self._book.open("init_worker", time.monotonic())
        self._processes = WorkerProcesses(self.vllm_config, num_ranks)
        self._reader = threading.Thread(target=self._serve_replies, name="worker-replies", daemon=True)
        self._reader.start()
        try:
            started.future.result()
            self.collective_rpc("init_device")
            self.collective_rpc("load_model")
        except BaseException:
            self.shutdown()
            raise

    # -- calls ------------------------------------------------------------------------------------

    def collective_rpc(
        self,
        method: str | Callable[..., Any],
        timeout: float | None = None,
        args: tuple[Any, ...] = (),
        kwargs: dict[str, Any] | None = None,
        non_block: bool = False,
    ) -> Any:
        """See the base class. `timeout` (seconds): TimeoutError if not all ranks have answered by then.

        What all ranks raise alike is raised here, as their first said it. ValueError for what cannot be pickled.
        """
        content = encode_call(method, args, kwargs or {})
        self._check_alive()
        with self._call_lock:
            call = self._book.open(method, time.monotonic())
            self._processes.send(number_call(call.call_id, content))
        if (
            self._failure is not None or not self._reader.is_alive()
        ):  # since the check: nobody else ends this call
            self._book.fail_all(self._failure or RuntimeError("the workers were shut down"))
        if non_block:
            return call.future
        try:
            return call.future.result(timeout)
        except TimeoutError:
            if call.future.done():  # the error is the workers' own
                raise
            raise TimeoutError(f"{call.name}: not all workers have answered after {timeout} s") from None

    def _check_alive(self) -> None:
        if self._failure is not None:
            raise WorkersFailedError(str(self._failure)) from self._failure
        if self.is_failed:
            raise RuntimeError("the workers were shut down")

    def check_health(self) -> None:
        """Raise if a worker is gone or its device unusable."""
        self._check_alive()
        self.collective_rpc("check_health")

    # -- replies, on a thread of their own --------------------------------------------------------

    def _serve_replies(self) -> None:
        """Take replies until the workers end or fail, then see to it that none is left."""
        try:
            with selectors.DefaultSelector() as selector:
                for worker in self._processes.workers:
                    selector.register(worker.channel, selectors.EVENT_READ, worker)
                    selector.register(worker.pidfd, selectors.EVENT_READ, worker)
                self._take_replies(selector)
            at = self._book.oldest()
            self._fail(WorkersFailedError(f"the workers were still at {at} when the engine had to end"))
        except Exception as error:  # a reply that cannot be read: whoever waits for it must be told
            logger.exception("A worker's reply cannot be read.")
            self._fail(WorkersFailedError(f"a worker's reply cannot be read: {error}"))
        grace_s = SHARE_OF_GRACE * envs.VLLM_WORKER_SHUTDOWN_TIMEOUT_SECONDS
        self._processes.end(max(0.0, min(grace_s, self._read_until - time.monotonic())))
        self._book.fail_all(RuntimeError("the workers were shut down"))

    def _take_replies(self, selector: selectors.BaseSelector) -> None:
        while selector.get_map() and self._failure is None and time.monotonic() < self._read_until:
            for key, _ in selector.select(min(TICK_S, max(0.0, self._read_until - time.monotonic()))):
                worker: WorkerHandle = key.data
                frame = worker.channel.receive() if key.fileobj is worker.channel else None
                if frame is None:
                    selector.unregister(key.fileobj)
                    self._note_end(worker)
                else:
                    self._fail(self._book.note(*decode_reply(worker.rank, frame), time.monotonic()))
            self._fail(self._book.overdue(time.monotonic()))

    def _note_end(self, worker: WorkerHandle) -> None:
        if self._failure is not None or self._is_ending:
            return  # that is what ends now
        at = self._book.oldest()
        self._fail(WorkersFailedError(worker.describe_end() + (f" during {at}" if at else "")))

    def _fail(self, error: WorkersFailedError | None) -> None:
        with self._state_lock:
            if error is None or self._failure is not None or self._is_ending:
                return
            self._failure = error
            self.is_failed = True
            callbacks = list(self._callbacks)
        logger.error("The workers cannot go on: %s", error)
        self._book.fail_all(error)
        for callback in callbacks:
            callback()

    # -- life -------------------------------------------------------------------------------------

    def register_failure_callback(self, callback: FailureCallback) -> None:
        """Call `callback` once when the workers cannot go on; at once if that is so already."""
        with self._state_lock:
            self._callbacks.append(callback)
            has_failed = self._failure is not None
        if has_failed:
            callback()

    def end_after(self, seconds: float) -> None:
        """See the base class: workers that hang by then are ended by force, and who waits for them is told."""
        grace_s = SHARE_OF_GRACE * envs.VLLM_WORKER_SHUTDOWN_TIMEOUT_SECONDS
        self._read_until = min(self._read_until, time.monotonic() + seconds + grace_s)

    def shutdown(self) -> None:
        """Let the workers carry out what they were sent, release what they hold and end; by force after a while. Idempotent."""
        with self._state_lock:
            self.is_failed = True
            if not self._is_ending:
                self._is_ending = True
                self.end_after(0.0)
        self._processes.stop_sending()
        if threading.current_thread() is not self._reader:
            self._reader.join()
