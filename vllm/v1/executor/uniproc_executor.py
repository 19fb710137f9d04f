"""One worker in the engine's own process.

Owns: the worker object and, for pipelined steps, the one thread on which all of its work runs. Must not know: what a
worker does. Layer L7.
"""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any

from vllm.v1.executor.abstract import Executor
from vllm.v1.worker.worker_base import WorkerWrapperBase


class UniProcExecutor(Executor):
    """Runs the worker inline, or, when steps may overlap, on one thread of its own.

    With a single batch in flight a call is simply made, and `non_block` answers with a finished future. With several
    (`max_concurrent_batches > 1`) every call goes through one thread, first come first served, so that the engine can
    schedule the next step while the model runs. All device state is then touched by that thread alone.
    """

    @classmethod
    def supports_async_scheduling(cls) -> bool:
        """Steps can be queued behind each other."""
        return True

    def _init_executor(self) -> None:
        self._thread: ThreadPoolExecutor | None = None
        if self.max_concurrent_batches > 1:
            self._thread = ThreadPoolExecutor(max_workers=1, thread_name_prefix="worker")
        self.driver_worker = WorkerWrapperBase(self.vllm_config, rpc_rank=0)
        self.collective_rpc("init_worker", args=(self._worker_kwargs(),))
        self.collective_rpc("init_device")
        self.collective_rpc("load_model")

    def _worker_kwargs(self) -> dict[str, Any]:
        return {
            "vllm_config": self.vllm_config,
            "local_rank": self.vllm_config.parallel_config.first_local_rank,
            "rank": 0,
            "distributed_init_method": "",
            "is_driver_worker": True,
        }

    def collective_rpc(
        self,
        method: str | Callable[..., Any],
        timeout: float | None = None,
        args: tuple[Any, ...] = (),
        kwargs: dict[str, Any] | None = None,
        non_block: bool = False,
    ) -> Any:
        """See the base class. `timeout` has no meaning inline: the caller waits for its own call."""

        def call() -> list[Any]:
            return [self.driver_worker.execute_method(method, *args, **(kwargs or {}))]

        if self._thread is not None:
            future = self._thread.submit(call)
            return future if non_block else future.result(timeout)
        if not non_block:
            return call()
        finished: Future[list[Any]] = Future()
        try:
            finished.set_result(call())
        except Exception as error:  # a future carries the failure of its step to its reader
            finished.set_exception(error)
        return finished

    def check_health(self) -> None:
        """The worker lives as long as the process; its own check may still raise."""
        if self.is_failed:
            raise RuntimeError("the worker was shut down")
        self.driver_worker.execute_method("check_health")

    def shutdown(self) -> None:
        """Let the worker release what it holds and end its thread. Idempotent; also works while the interpreter ends."""
        if self.is_failed:
            return
        self.is_failed = True
        # Queued steps come first; after that nobody else touches the worker, so this thread may.
        if self._thread is not None:
            self._thread.shutdown(wait=True)
        self.driver_worker.execute_method("shutdown")
