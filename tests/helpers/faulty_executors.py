"""Executors with planted faults, chosen by dotted path as `distributed_executor_backend`."""

from __future__ import annotations

import os
import signal
import time
from typing import Any

from vllm.v1.core.sched.scheduler import Scheduler
from vllm.v1.executor.uniproc_executor import UniProcExecutor
from vllm.v1.simple_kv_offload.copy_backends.base import CopyJob
from vllm.v1.simple_kv_offload.copy_backends.host_copy import HostCopier

# A prompt that holds one of these sequences asks for the fault; no sampled batch looks like them.
POISON = [261] * 4
DEADLY = [262] * 4
SLOW_STORE_S = 2.0


class PoisonedExecutor(UniProcExecutor):
    """The model raises when it reads `POISON`; the whole process dies when it reads `DEADLY`."""

    raises_after_s = 0.0

    def _init_executor(self) -> None:
        super()._init_executor()
        self.collective_rpc(_poison, args=(self.raises_after_s,))


class LatePoisonedExecutor(PoisonedExecutor):
    """The model raises so late that the next step has been queued behind the failing one."""

    raises_after_s = 0.3


def _poison(worker: Any, raises_after_s: float) -> None:
    model = worker.get_model()
    forward = model.forward

    def poisoned(input_ids: Any, *args: Any, **kwargs: Any) -> Any:
        if _holds(input_ids.tolist(), DEADLY):
            os.kill(os.getpid(), signal.SIGKILL)
        if _holds(input_ids.tolist(), POISON):
            time.sleep(raises_after_s)
            raise ValueError("a poisoned token")
        return forward(input_ids, *args, **kwargs)

    model.forward = poisoned


def _holds(token_ids: list[int], sequence: list[int]) -> bool:
    size = len(sequence)
    return any(token_ids[start : start + size] == sequence for start in range(len(token_ids) - size + 1))


class UnstartableExecutor(UniProcExecutor):
    """Fails while it starts."""

    def _init_executor(self) -> None:
        raise OSError("no such accelerator")


class SlowStoreExecutor(UniProcExecutor):
    """Every copy between device and host takes `SLOW_STORE_S`."""

    def _init_executor(self) -> None:
        plain = HostCopier.copy

        def slow(copier: HostCopier, job: CopyJob) -> None:
            time.sleep(SLOW_STORE_S)
            plain(copier, job)

        HostCopier.copy = slow  # type: ignore[method-assign]
        super()._init_executor()


class EndedScheduler(Scheduler):
    """Somebody tells the process to end while it starts, after its pools are there."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        os.kill(os.getpid(), signal.SIGTERM)
        super().__init__(*args, **kwargs)


class OrphanedScheduler(Scheduler):
    """The front end is killed meanwhile."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        os.kill(os.getppid(), signal.SIGKILL)
        time.sleep(5)
        super().__init__(*args, **kwargs)


class DefectiveScheduler(Scheduler):
    """A defect of the scheduler itself: nothing can be trusted after it."""

    def update_from_output(self, *args: Any, **kwargs: Any) -> Any:
        raise AssertionError("a broken invariant")
