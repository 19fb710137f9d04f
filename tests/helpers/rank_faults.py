"""Faults for the workers of a real engine, planted by `collective_rpc`: functions that a worker process can import."""

from __future__ import annotations

import os
import time
from typing import Any

from tests.helpers.faulty_executors import POISON, _holds
from vllm.v1.simple_kv_offload.copy_backends.base import CopyJob
from vllm.v1.simple_kv_offload.copy_backends.host_copy import HostCopier

# A prompt that holds this sequence gets NaN on the last rank.
NAN = [263] * 4


def pid_of(worker: Any) -> int:
    """The process of a rank."""
    return os.getpid()


def kv_bytes(worker: Any) -> int:
    """What a block takes on a rank."""
    pages = worker.model_runner.pages
    return sum(page.shape[1] for page in pages.raw.values())


def plant(worker: Any) -> None:
    """`POISON` raises on every rank, in the middle of the model; `NAN` spoils what the last rank computes."""
    model = worker.get_model()
    forward = model.forward
    is_last = worker.rank == worker.vllm_config.parallel_config.world_size - 1

    def faulty(input_ids: Any, *args: Any, **kwargs: Any) -> Any:
        hidden = forward(input_ids, *args, **kwargs)
        tokens = input_ids.tolist()
        if _holds(tokens, POISON):
            raise ValueError("a poisoned token")
        if is_last and _holds(tokens, NAN):
            hidden = hidden.clone()
            hidden[tokens.index(NAN[0]) + len(NAN) - 1] = float("nan")
        return hidden

    model.forward = faulty


def slow_copies(worker: Any, seconds: float) -> None:
    """Every copy between device and host takes so long on this rank."""
    plain = HostCopier.copy

    def slow(copier: HostCopier, job: CopyJob) -> None:
        time.sleep(seconds * worker.rank)
        plain(copier, job)

    HostCopier.copy = slow  # type: ignore[method-assign]
