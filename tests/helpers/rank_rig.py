"""The offload rig with ranks that share one pool: in this process, or each in a process of its own that may be killed."""

from __future__ import annotations

import copy
import mmap
import multiprocessing
import os
import signal
from collections.abc import Callable
from dataclasses import dataclass, field
from multiprocessing.connection import Connection
from typing import Any

import torch

from tests.helpers.offload_parts import HeldMover
from tests.helpers.offload_rig import Rig
from vllm.config import VllmConfig
from vllm.distributed.kv_transfer.kv_connector.v1.base import KVConnectorBase_V1
from vllm.distributed.kv_transfer.kv_connector.v1.simple_cpu_offload_connector import (
    SimpleCPUOffloadConnector,
)
from vllm.v1.core.sched.output import SchedulerOutput
from vllm.v1.worker.kv_connector_step import ActiveKVConnector

FORK = multiprocessing.get_context("fork")


@dataclass
class RankRig(Rig):
    """All ranks are one engine, ``engine_id``, on the pool ``pool``."""

    engine_id: str = "one"
    pool: str = "pool"

    def __post_init__(self) -> None:
        self.extra = {"shared_pool": self.pool, **self.extra}
        super().__post_init__()

    def _allocate(self) -> dict[str, torch.Tensor]:
        # Once, before ranks and scheduler are made.
        self.config.parallel_config.tensor_parallel_size = self.ranks
        assert self.config.kv_transfer_config is not None
        self.config.kv_transfer_config.engine_id = self.engine_id
        return super()._allocate()

    def _rank_config(self, rank: int) -> VllmConfig:
        config = copy.copy(self.config)
        config.model_config = None  # type: ignore[assignment]  # the rig's has no weights
        config.parallel_config = copy.copy(config.parallel_config)
        config.parallel_config.rank = rank
        return config

    def close(self) -> None:
        super().close()
        self.connector.shutdown()


class RankProcess:
    """A rank's connector half in a process of its own, called as if it were here."""

    def __init__(self, make: Callable[[], ActiveKVConnector]) -> None:
        self._here, there = FORK.Pipe()
        self.process = FORK.Process(target=_serve, args=(there, make), daemon=True)
        self.process.start()
        there.close()
        self.kv_connector = self  # calls that go past the order of a step
        problem = self._here.recv()
        if problem is not None:
            raise problem

    def _call(self, name: str, *args: Any) -> Any:
        self._here.send((name, args))
        result, problem = self._here.recv()
        if problem is not None:
            raise problem
        return result

    def begin(self, output: SchedulerOutput) -> None:
        self._call("begin", output)

    def pre_forward(self, output: SchedulerOutput, context: object, load: dict[str, Any]) -> None:
        self._call("pre_forward", output, context, load)

    def wait_for_loads(self, names: object) -> None:
        self._call("wait_for_loads", ())

    def save_layers(self, pages: object, groups: object) -> None:
        self._call("save_layers", {}, {})

    def end_forward(self) -> None:
        self._call("end_forward")

    def finish(self, finished_req_ids: set[str]) -> Any:
        return self._call("finish", finished_req_ids)

    def wait_for_save(self) -> None:
        self._call("wait_for_save")

    def drain(self) -> None:
        self._call("drain")

    def copy_some(self) -> int:
        """Half of every region of the copies that wait; they go on waiting. Returns their blocks."""
        return int(self._call("copy_some"))

    def shutdown(self) -> None:
        if self.process.is_alive():
            self._call("shutdown")
            self._here.send(None)
            self.process.join()

    def kill(self) -> None:
        assert self.process.pid is not None
        os.kill(self.process.pid, signal.SIGKILL)
        self.process.join()


def _serve(pipe: Connection, make: Callable[[], ActiveKVConnector]) -> None:
    try:
        active = make()
    except Exception as error:
        pipe.send(error)
        return
    connector = active.kv_connector
    assert isinstance(connector, SimpleCPUOffloadConnector)
    worker = connector.worker_handler
    assert worker is not None
    calls: dict[str, Callable[..., Any]] = {
        "wait_for_save": connector.wait_for_save,
        "shutdown": connector.shutdown,
        "drain": lambda: _drain(worker),
        "copy_some": lambda: _copy_some(worker),
    }
    pipe.send(None)
    while (call := pipe.recv()) is not None:
        name, args = call
        try:
            pipe.send(((calls.get(name) or getattr(active, name))(*args), None))
        except Exception as error:
            pipe.send((None, error))


def _drain(worker: Any) -> None:
    if isinstance(worker._backend, HeldMover):
        worker._backend.release()
    worker.drain()


def _copy_some(worker: Any) -> int:
    count = 0
    for job in worker._backend.jobs:
        for name, region in worker.cpu_kv_caches.items():
            half = region.shape[1] // 2
            for source, target in zip(job.src_blocks, job.dst_blocks, strict=True):
                region[target, :half] = worker.gpu_kv_caches[name][source, :half]
                count += 1
    return count


@dataclass
class ProcessRig(RankRig):
    """Each rank is a process. The fake forward runs here, on device memory that the rank's process has too."""

    shared: list[mmap.mmap] = field(default_factory=list)

    def _allocate(self) -> dict[str, torch.Tensor]:
        views = super()._allocate()
        size = self.kv_config.kv_cache_tensors[0].size
        self.shared.append(mmap.mmap(-1, size))
        memory = torch.frombuffer(self.shared[-1], dtype=torch.int8)
        return {
            name: memory.as_strided(view.shape, view.stride(), view.storage_offset())
            for name, view in views.items()
        }

    def _make_worker(self, rank: int) -> Any:
        return RankProcess(lambda: super(ProcessRig, self)._make_worker(rank))

    def _carry_out(self, connector: KVConnectorBase_V1 | RankProcess) -> None:
        assert isinstance(connector, RankProcess)
        if connector.process.is_alive():
            connector.drain()
