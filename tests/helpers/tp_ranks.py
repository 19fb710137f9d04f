"""Tensor-parallel ranks for tests: real ones, each a forked process with gloo, or one rank's place without the others."""

from __future__ import annotations

import multiprocessing
import pickle
import tempfile
import traceback
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from multiprocessing.connection import Connection
from pathlib import Path
from typing import TypeVar

import torch

from vllm.distributed.parallel_state import TPGroup, destroy_distributed, init_distributed, use_tp_group

T = TypeVar("T")

_FORK = multiprocessing.get_context("fork")
_SECONDS = 120


def run_ranks(size: int, work: Callable[[int], T]) -> list[T]:
    """`work(rank)` on `size` ranks at once; their results in rank order. A rank that raises fails the test."""
    pipes, processes = [], []
    with tempfile.TemporaryDirectory() as folder:
        url = (Path(folder) / "ranks").as_uri()
        for rank in range(size):
            here, there = _FORK.Pipe(duplex=False)
            process = _FORK.Process(target=_serve, args=(there, work, rank, size, url), daemon=True)
            process.start()
            there.close()
            pipes.append(here)
            processes.append(process)
        try:
            return [_result(pipe, rank) for rank, pipe in enumerate(pipes)]
        finally:
            for process in processes:
                process.terminate()
                process.join()


def _serve(pipe: Connection, work: Callable[[int], T], rank: int, size: int, url: str) -> None:
    # Threads of the parent's compute pool are not there after a fork.
    torch.set_num_threads(1)
    try:
        init_distributed(rank, size, rank, url, "gloo")
        pipe.send_bytes(pickle.dumps((work(rank), None)))
        destroy_distributed()
    except BaseException:
        pipe.send_bytes(pickle.dumps((None, traceback.format_exc())))
        raise


def _result(pipe: Connection, rank: int) -> T:
    if not pipe.poll(_SECONDS):
        raise AssertionError(f"rank {rank} said nothing for {_SECONDS} s")
    result, problem = pickle.loads(pipe.recv_bytes())
    if problem is not None:
        raise AssertionError(f"rank {rank} failed:\n{problem}")
    found: T = result
    return found


@contextmanager
def lone_rank(rank: int, size: int) -> Iterator[TPGroup]:
    """Meanwhile this process is rank `rank` of `size`: enough to build and load a model, not to run it."""
    group = TPGroup(rank, size)
    with use_tp_group(group):
        yield group
