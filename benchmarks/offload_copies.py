"""Speed of the threaded copy backend beside plain memcpy, by page size, order of the pages, direction and threads.

The backend is the one that the engine uses between two pools in host memory; a job goes through its queue and thread as in
a step. It has two yardsticks. *One memcpy*: the C library moves the same bytes from one pool to the other, in one call per
thread; nothing that copies pages has less to do. *memcpy by page*: the C library page by page in the same order, on one
thread; by more threads it would wait for the interpreter's lock after each page. All take turns in every round.
"""

from __future__ import annotations

import ctypes
import mmap
import os
import random
import statistics
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from tqdm import tqdm

from vllm.utils.clock import MonotonicClock
from vllm.v1.simple_kv_offload.copy_backends.base import EventsList
from vllm.v1.simple_kv_offload.copy_backends.threaded import ThreadedCopyBackend
from vllm.v1.simple_kv_offload.host_buffer import aligned_zeros

CPU = torch.device("cpu")
# From this page size on the goal holds: below, what is measured is the loop around the copies.
GOAL_PAGE_BYTES = 64 << 10
ORDERS = ("consecutive", "scattered")
DIRECTIONS = ("store", "load")
BY_PAGE, ONE, BACKEND = "memcpy by page", "one memcpy", "backend"
THREADS = (1, 2)[: os.cpu_count()]

Way = tuple[str, int]
"""A method, and its threads."""
WAYS: tuple[Way, ...] = (
    (BY_PAGE, 1),
    *((method, threads) for threads in THREADS for method in (ONE, BACKEND)),
)


@dataclass(frozen=True)
class CopyScale:
    """Bytes per copy, page sizes and rounds."""

    total_bytes: int
    page_bytes: tuple[int, ...]
    rounds: int


FULL = CopyScale(256 << 20, (4 << 10, 16 << 10, 64 << 10, 256 << 10, 1 << 20, 4 << 20), 15)
QUICK = CopyScale(8 << 20, (4 << 10, 256 << 10), 2)


class _Bench:
    """Two pools of one page size and the ways to copy between them."""

    def __init__(
        self,
        backends: dict[int, ThreadedCopyBackend],
        helpers: ThreadPoolExecutor,
        device: torch.Tensor,
        host: torch.Tensor,
    ) -> None:
        self._backends = backends
        self._helpers = helpers
        self._pools = {"store": (device, host), "load": (host, device)}
        self._page = device.shape[1]

    def seconds(self, way: Way, direction: str, source_ids: list[int], target_ids: list[int]) -> float:
        source, target = self._pools[direction]
        run = self._prepare(way, direction, source_ids, target_ids)
        started = time.perf_counter()
        run()
        taken = time.perf_counter() - started
        for place in (0, len(source_ids) // 2, len(source_ids) - 1):
            row, other = target[target_ids[place]].numpy(), source[source_ids[place]].numpy()
            # Not by torch: its threads spin for a while after a parallel operation, into the next measurement.
            assert way[0] == ONE or np.array_equal(row, other), f"{way} copied other bytes"
        return taken

    def _prepare(
        self, way: Way, direction: str, source_ids: list[int], target_ids: list[int]
    ) -> Callable[[], Any]:
        source, target = self._pools[direction]
        method, threads = way
        if method == ONE:
            return lambda: self._one_memcpy(target.data_ptr(), source.data_ptr(), source.numel(), threads)
        if method == BACKEND:
            is_store, backend = direction == "store", self._backends[threads]
            return lambda: _through(backend, source_ids, target_ids, is_store)
        memmove, page = ctypes.memmove, self._page
        into = [target.data_ptr() + i * page for i in target_ids]
        out_of = [source.data_ptr() + i * page for i in source_ids]

        def pages() -> None:
            for one, other in zip(into, out_of, strict=True):
                memmove(one, other, page)

        return pages

    def _one_memcpy(self, target: int, source: int, size: int, threads: int) -> None:
        share = size // threads
        others = [
            self._helpers.submit(ctypes.memmove, target + i * share, source + i * share, share)
            for i in range(1, threads)
        ]
        ctypes.memmove(target, source, share)
        for other in others:
            other.result()


def _through(
    backend: ThreadedCopyBackend, source_ids: list[int], target_ids: list[int], is_store: bool
) -> None:
    events: EventsList = []
    backend.launch_copy(source_ids, target_ids, is_store, 0, events)
    result: Any = events[0][1]
    assert result.synchronize(60.0), "the copy never ends"
    if result.error is not None:
        raise result.error


@contextmanager
def _bench(page: int, pages: int) -> Iterator[_Bench]:
    # As the engine allocates them: in huge pages where there are any.
    memory = mmap.mmap(-1, page * pages, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    memory.madvise(mmap.MADV_HUGEPAGE)
    device = torch.frombuffer(memory, dtype=torch.int8).view(pages, page)
    host = aligned_zeros(pages, page)
    device.copy_(torch.arange(pages).remainder(251)[:, None])
    host.copy_(torch.arange(pages).remainder(241)[:, None])
    with ExitStack() as stack:
        backends = {}
        for threads in THREADS:
            backends[threads] = backend = ThreadedCopyBackend(MonotonicClock(), 60.0, threads)
            backend.init({"kv": device}, {"kv": host}, CPU)
            stack.callback(backend.shutdown)
        helpers = stack.enter_context(ThreadPoolExecutor(max(THREADS)))
        yield _Bench(backends, helpers, device, host)


def copy_speeds(scale: CopyScale) -> list[dict[str, Any]]:
    """One row per page size, order, direction and number of threads.

    GB/s (10⁹ bytes copied) of each method, medians over the rounds; the backend's beside each yardstick's are medians of
    the ratios within a round, since what other programs take differs less within one than between them.
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
    taken: dict[tuple[str, Way], list[float]] = {}
    with _bench(page, pages) as bench:
        for number in range(scale.rounds + 1):
            for direction in DIRECTIONS:
                for step in range(len(WAYS)):
                    way = WAYS[(number + step) % len(WAYS)]
                    seconds = bench.seconds(way, direction, source_ids, target_ids)
                    if number:  # the first round warms up
                        taken.setdefault((direction, way), []).append(seconds)
    return [
        {"page_bytes": page, "order": order, "direction": direction, "threads": threads}
        | _figures(scale, {method: taken[direction, (method, n)] for method, n in WAYS if n == threads})
        for direction in DIRECTIONS
        for threads in THREADS
    ]


def _figures(scale: CopyScale, taken: dict[str, list[float]]) -> dict[str, Any]:
    """Speeds by method, the backend's beside each yardstick's, and the times that they come from."""
    return {
        "gb_per_s": {
            method: scale.total_bytes / statistics.median(times) / 1e9 for method, times in taken.items()
        },
        "backend_to": {
            method: statistics.median(other / own for other, own in zip(times, taken[BACKEND], strict=True))
            for method, times in taken.items()
            if method != BACKEND
        },
        "seconds": taken,
    }
