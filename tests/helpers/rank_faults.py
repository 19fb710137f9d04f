"""Faults for the workers of a real engine, planted by `collective_rpc`: functions that a worker process can import."""

from __future__ import annotations

import os
from typing import Any

from tests.helpers.faulty_executors import POISON, _holds

# A prompt that holds this sequence gets NaN on the last rank.
NAN = [263] * 4


def pid_of(worker: Any) -> int:
    """The process of a rank."""
    return os.getpid()


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
