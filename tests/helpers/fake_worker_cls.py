"""Worker classes that answer without a model, for tests of executors and wrappers."""

from __future__ import annotations

import os
import signal
import threading
import time
from typing import Any

import torch
from torch import nn

from vllm.distributed.parallel_state import get_tp_group, init_distributed
from vllm.v1.outputs import KVConnectorOutput, ModelRunnerOutput
from vllm.v1.worker.worker_base import WorkerBase


class FakeWorker(WorkerBase):
    """Writes down its life cycle; a step "computes" its own number of scheduled tokens."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.calls: list[str] = []
        self.threads: set[str] = set()
        self.pending: Any = None

    def _note(self, name: str) -> None:
        self.calls.append(name)
        self.threads.add(threading.current_thread().name)

    def init_device(self) -> None:
        self._note("init_device")

    def load_model(self) -> None:
        self._note("load_model")

    def get_model(self) -> nn.Module:
        return nn.Linear(1, 1)

    def get_kv_cache_spec(self) -> dict[str, Any]:
        return {"layer": "spec"}

    def determine_available_memory(self) -> int:
        return 123

    def initialize_from_config(self, kv_cache_config: Any) -> None:
        self._note(f"initialize:{kv_cache_config}")

    def compile_or_warm_up_model(self) -> None:
        self._note("warm_up")

    def execute_model(self, scheduler_output: Any) -> ModelRunnerOutput | None:
        self._note("execute")
        if scheduler_output == "fail":
            raise RuntimeError("step failed")
        self.pending = scheduler_output
        return None

    def sample_tokens(self, grammar_output: Any) -> ModelRunnerOutput | None:
        self._note("sample")
        pending, self.pending = self.pending, None
        if pending is None:
            return None
        return ModelRunnerOutput([pending], {pending: 0}, [[len(pending)]])

    def shutdown(self) -> None:
        self._note("shutdown")


class RankedWorker(FakeWorker):
    """A worker in a process of its own. A step's text says what happens; a step "adds" the ranks' numbers, from 1."""

    def init_device(self) -> None:
        if self.vllm_config.additional_config.get("unstartable") == self.rank:
            raise ValueError(f"rank {self.rank} has no device")
        size = self.vllm_config.parallel_config.world_size
        init_distributed(self.rank, size, self.rank, self.distributed_init_method, "gloo")
        super().init_device()

    def execute_model(self, scheduler_output: Any) -> ModelRunnerOutput | None:
        self._note("execute")
        match scheduler_output:
            case "fail":
                raise KeyError("all ranks alike")
            case "fail apart" if self.rank == 1:
                raise ValueError("only one of them")
            case "die" if self.rank == 1:
                os.kill(os.getpid(), signal.SIGKILL)
            case "hang" if self.rank == 1:
                os.kill(os.getpid(), signal.SIGSTOP)
            case "sleep" if self.rank == 1:
                time.sleep(60)
        self.pending = int(get_tp_group().all_reduce(torch.tensor([1 + self.rank])))
        return None

    def sample_tokens(self, grammar_output: Any) -> ModelRunnerOutput | None:
        total, self.pending = self.pending, None
        report = KVConnectorOutput(finished_recving={"a"} if total else None)
        return ModelRunnerOutput(["a"], {"a": 0}, [[total]], kv_connector_output=report)

    def who(self) -> tuple[int, int, int]:
        return self.rank, os.getpid(), torch.get_num_threads()


class Extension:
    """Mixed into a worker."""

    def extra(self) -> str:
        return f"extra of rank {self.rank}"  # type: ignore[attr-defined]


class Clashing:
    """Redefines a worker's method."""

    def load_model(self) -> None:
        """In the way."""


NOT_A_WORKER = 7
