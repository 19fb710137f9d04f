"""Speed of the threaded copy backend beside plain memcpy, by page size, order of the pages and direction.

The backend is the one that the engine uses between two pools in host memory; a job goes through its queue and thread as in
a step. memcpy is the C library's, once page by page in the same order and once for all bytes in one call.
"""

from __future__ import annotations

import ctypes
import mmap
import random
import statistics
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from tqdm import tqdm

from vllm.utils.clock import MonotonicClock
from vllm.v1.simple_kv_offload.copy_backend import create_copy_backend
from vllm.v1.simple_kv_offload.copy_backends.base import EventsList, RegionCopyBackend
from vllm.v1.simple_kv_offload.host_buffer import aligned_zeros

CPU = torch.device("cpu")
# From this page size on the goal holds: below, what is measured is the loop around the copies.
GOAL_PAGE_BYTES = 64 << 10
ORDERS = ("consecutive", "scattered")
DIRECTIONS = ("store", "load")
METHODS = ("memcpy by page", "one memcpy", "backend")


@dataclass(frozen=True)
class CopyScale:
    """Bytes per copy, page sizes and rounds."""

    total_bytes: int
    page_bytes: tuple[int, ...]
    rounds: int


FULL = CopyScale(256 << 20, (4 << 10, 16 << 10, 64 << 10, 256 << 10, 1 << 20, 4 << 20), 9)
QUICK = CopyScale(8 << 20, (4 << 10, 256 << 10), 2)


class _Bench:
    """Two pools of one page size and the three ways to copy between them."""

    def __init__(self, backend: RegionCopyBackend, device: torch.Tensor, host: torch.Tensor) -> None:
        self._backend = backend
        self._pools = {"store": (device, host), "load": (host, device)}
        self._page = device.shape[1]

    def seconds(self, method: str, direction: str, source_ids: list[int], target_ids: list[int]) -> float:
        source, target = self._pools[direction]
        run = self._prepare(method, direction, source_ids, target_ids)
        started = time.perf_counter()
        run()
        taken = time.perf_counter() - started
        for place in (0, len(source_ids) // 2, len(source_ids) - 1):
            row, other = target[target_ids[place]], source[source_ids[place]]
            assert method == "one memcpy" or torch.equal(row, other), f"{method} copied other bytes"
        return taken

    def _prepare(
        self, method: str, direction: str, source_ids: list[int], target_ids: list[int]
    ) -> Callable[[], Any]:
        source, target = self._pools[direction]
        if method == "one memcpy":
            return lambda: ctypes.memmove(target.data_ptr(), source.data_ptr(), source.numel())
        if method == "backend":
            return lambda: self._through_backend(direction == "store", source_ids, target_ids)
        memmove, page = ctypes.memmove, self._page
        into = [target.data_ptr() + i * page for i in target_ids]
        out_of = [source.data_ptr() + i * page for i in source_ids]

        def pages() -> None:
            for one, other in zip(into, out_of, strict=True):
                memmove(one, other, page)

        return pages

    def _through_backend(self, is_store: bool, source_ids: list[int], target_ids: list[int]) -> None:
        events: EventsList = []
        self._backend.launch_copy(source_ids, target_ids, is_store, 0, events)
        result: Any = events[0][1]
        assert result.synchronize(60.0), "the copy never ends"
        if result.error is not None:
            raise result.error


@contextmanager
def _bench(page: int, pages: int) -> Iterator[_Bench]:
    # As the engine allocates them: the device's pool in huge pages where there are any, the host's page by page.
    memory = mmap.mmap(-1, page * pages, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    memory.madvise(mmap.MADV_HUGEPAGE)
    device = torch.frombuffer(memory, dtype=torch.int8).view(pages, page)
    host = aligned_zeros(pages, page)
    device.copy_(torch.arange(pages).remainder(251)[:, None])
    host.copy_(torch.arange(pages).remainder(241)[:, None])
    backend = create_copy_backend("threaded", MonotonicClock(), 60.0)
    backend.init({"kv": device}, {"kv": host}, CPU)
    try:
        yield _Bench(backend, device, host)
    finally:
        backend.shutdown()


def copy_speeds(scale: CopyScale) -> list[dict[str, Any]]:
    """One row per page size, order and direction: GB/s (10⁹ bytes copied) of each method, medians over the rounds.

    The methods take turns in every round, starting with another one each time.
    """
    rows = []
    with tqdm(total=len(scale.page_bytes) * len(ORDERS), desc="copy speed", unit="page size") as bar:
        for page in scale.page_bytes:
            for order in ORDERS:
                rows += _rows(scale, page, order)
                bar.update()
    return rows


def _rows(scale: CopyScale, page: int, order: str) -> list[dict[str, Any]]:
    pages = scale.total_bytes // page
    source_ids, target_ids = list(range(pages)), list(range(pages))
    if order == "scattered":
        random.Random(1).shuffle(source_ids)
        random.Random(2).shuffle(target_ids)
    taken: dict[tuple[str, str], list[float]] = {}
    with _bench(page, pages) as bench:
        for number in range(scale.rounds + 1):
            for direction in DIRECTIONS:
                for step in range(len(METHODS)):
                    method = METHODS[(number + step) % len(METHODS)]
                    seconds = bench.seconds(method, direction, source_ids, target_ids)
                    if number:  # the first round warms up
                        taken.setdefault((direction, method), []).append(seconds)
    rows = []
    for direction in DIRECTIONS:
        speed = {
            method: scale.total_bytes / statistics.median(taken[direction, method]) / 1e9
            for method in METHODS
        }
        rows.append(
            {
                "page_bytes": page,
                "order": order,
                "direction": direction,
                "gb_per_s": speed,
                "backend_to_memcpy": speed["backend"] / speed["memcpy by page"],
                "backend_to_one_memcpy": speed["backend"] / speed["one memcpy"],
            }
        )
    return rows
