"""Executors with planted faults, chosen by dotted path as `distributed_executor_backend`."""

from __future__ import annotations

import os
import signal
import time
from typing import Any

from vllm.v1.executor.uniproc_executor import UniProcExecutor
from vllm.v1.simple_kv_offload.copy_backends.base import CopyJob
from vllm.v1.simple_kv_offload.copy_backends.host_copy import HostCopier

# The tiny model has no use for these tokens; a prompt that holds one asks for the fault.
POISON = 261
DEADLY = 262
SLOW_STORE_S = 2.0


class PoisonedExecutor(UniProcExecutor):
    """The model raises when it sees `POISON`; the whole process dies when it sees `DEADLY`."""

    def _init_executor(self) -> None:
        super()._init_executor()
        self.collective_rpc(_poison)


def _poison(worker: Any) -> None:
    model = worker.get_model()
    forward = model.forward

    def poisoned(input_ids: Any, *args: Any, **kwargs: Any) -> Any:
        if (input_ids == DEADLY).any():
            os.kill(os.getpid(), signal.SIGKILL)
        if (input_ids == POISON).any():
            raise ValueError("a poisoned token")
        return forward(input_ids, *args, **kwargs)

    model.forward = poisoned


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
