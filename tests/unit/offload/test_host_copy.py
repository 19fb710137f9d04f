"""Threads that share a copy between pools in host memory: as many as there are processors, within bounds."""

from __future__ import annotations

import os
from typing import Any

import pytest
import torch

from vllm.v1.simple_kv_offload.copy_backends import host_copy
from vllm.v1.simple_kv_offload.copy_backends.base import CopyError, CopyJob, checked_ids
from vllm.v1.simple_kv_offload.copy_backends.host_copy import HostCopier, usable_copy_threads
from vllm.v1.simple_kv_offload.copy_backends.threaded import ThreadedCopyBackend

ROW_BYTES = 1 << 20


@pytest.mark.parametrize(("processors", "threads"), [(1, 1), (3, 3), (64, 4)])
def test_threads_are_as_many_as_the_process_has_processors(
    monkeypatch: pytest.MonkeyPatch, processors: int, threads: int
) -> None:
    monkeypatch.setattr(os, "sched_getaffinity", lambda pid: set(range(processors)))
    assert usable_copy_threads() == threads


@pytest.mark.parametrize(("chosen", "threads"), [(None, 3), (2, 2)])
def test_a_backend_copies_with_its_threads(
    monkeypatch: pytest.MonkeyPatch, chosen: int | None, threads: int
) -> None:
    asked: list[tuple[int, int]] = []

    def note(target: Any, source: Any, into: torch.Tensor, out_of: Any, threads: int) -> None:
        asked.append((len(into), threads))

    monkeypatch.setattr(os, "sched_getaffinity", lambda pid: {0, 1, 2})
    monkeypatch.setattr(host_copy.ops, "copy_blocks", note)
    pools = {"kv": torch.zeros(4, 8, dtype=torch.int8)}, {"kv": torch.zeros(4, 8, dtype=torch.int8)}
    backend = ThreadedCopyBackend(copy_threads=chosen)
    backend.init(*pools, torch.device("cpu"))
    events: list[Any] = []
    backend.launch_copy([1, 2, 3], [0, 2, 1], True, 0, events)
    assert events[0][1].synchronize(10.0)
    backend.shutdown()
    assert asked == [(3, threads)]


def test_a_copy_of_several_pieces_by_several_threads_is_whole(monkeypatch: pytest.MonkeyPatch) -> None:
    """Each piece large enough that threads are started for it."""
    monkeypatch.setattr(host_copy, "PIECE_BYTES", 12 * ROW_BYTES)
    device = torch.randint(-128, 128, (32, ROW_BYTES), dtype=torch.int8)
    host = torch.zeros(32, ROW_BYTES, dtype=torch.int8)
    out_of, into = torch.randperm(32).tolist(), torch.randperm(32).tolist()
    copier = HostCopier({"kv": device}, {"kv": host}, threads=3)
    copier.copy(CopyJob(out_of, into, is_store=True, event_idx=0))
    assert torch.equal(host[into], device[out_of])


@pytest.mark.parametrize(("out_of", "into"), [((3,), (0,)), ((-1,), (0,)), ((0,), (4,)), ((0,), (-1,))])
def test_blocks_outside_a_region_are_refused_before_any_byte_moves(
    out_of: tuple[int, ...], into: tuple[int, ...]
) -> None:
    source, target = (
        {"layer": torch.zeros(rows, 8, dtype=torch.int8), "larger": torch.zeros(9, 8, dtype=torch.int8)}
        for rows in (3, 4)
    )
    checked_ids(CopyJob((2,), (3,), is_store=True, event_idx=0), source, target)
    with pytest.raises(CopyError, match="are outside 0"):
        checked_ids(CopyJob(out_of, into, is_store=True, event_idx=0), source, target)
