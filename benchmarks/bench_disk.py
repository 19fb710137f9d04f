"""How fast blocks go to the disk tier's file and back, beside plain direct I/O of the same size on the same disk.

python benchmarks/bench_disk.py FOLDER [--gib 1]
"""

from __future__ import annotations

import argparse
import mmap
import os
import random
import time
from collections.abc import Sequence
from pathlib import Path

import torch

from vllm.v1.simple_kv_offload.copy_backends.base import EventsList
from vllm.v1.simple_kv_offload.copy_backends.disk import DiskBackend

GIB = 1 << 30
RAW_PIECE = 4 << 20
BLOCKS_PER_JOB = 64


def raw(path: Path, total: int, *, is_write: bool) -> float:
    """GiB/s of one thread with O_DIRECT and pieces of 4 MiB."""
    fd = os.open(path, os.O_RDWR | os.O_CREAT | os.O_DIRECT, 0o600)
    os.ftruncate(fd, total)
    buffer = mmap.mmap(-1, RAW_PIECE)
    buffer.write(os.urandom(RAW_PIECE))
    began = time.perf_counter()
    for offset in range(0, total, RAW_PIECE):
        if is_write:
            os.pwrite(fd, buffer, offset)
        else:
            os.preadv(fd, [buffer], offset)
    seconds = time.perf_counter() - began
    os.close(fd)
    return total / seconds / GIB


def move(backend: DiskBackend, blocks: Sequence[int], slots: Sequence[int], *, is_store: bool) -> float:
    """Seconds for all of it, in jobs of 64 blocks."""
    events: EventsList = []
    began = time.perf_counter()
    for start in range(0, len(blocks), BLOCKS_PER_JOB):
        pair = (blocks[start : start + BLOCKS_PER_JOB], slots[start : start + BLOCKS_PER_JOB])
        source, target = pair if is_store else pair[::-1]
        backend.launch_copy(source, target, is_store, start, events)
    while not all(event.query() for _, event in events):
        time.sleep(0.001)
    return time.perf_counter() - began


def tier(folder: Path, total: int, block_bytes: int, *, shuffled: bool) -> tuple[float, float]:
    """GiB/s of writes and reads through the backend, checksums included."""
    count = total // block_bytes
    host = {"all": torch.randint(-100, 100, (count, block_bytes), dtype=torch.int8)}
    backend = DiskBackend()
    path = str(folder / "bench.engine.rank_0")
    backend.init(host, torch.device("cpu"), None, None, path, count, block_bytes)
    slots = list(range(count))
    if shuffled:
        random.Random(0).shuffle(slots)
    seconds = [move(backend, range(count), slots, is_store=is_store) for is_store in (True, False)]
    backend.shutdown()
    return total / seconds[0] / GIB, total / seconds[1] / GIB


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument(
        "folder", type=Path, help="on the disk to measure; its own files there are removed at the end"
    )
    parser.add_argument("--gib", type=float, default=1, help="GiB to write and read in each row (1)")
    options = parser.parse_args()
    pieces = round(options.gib * GIB / RAW_PIECE)
    if pieces < 1:
        parser.error(f"--gib must be at least {RAW_PIECE / GIB:.3f}, got {options.gib}")
    total, path = pieces * RAW_PIECE, options.folder / "bench.raw"
    print(
        f"| what | write GiB/s | read GiB/s |  load {os.getloadavg()[0]:.1f} on {os.cpu_count()} cores\n|---|---|---|"
    )
    print(
        f"| plain, 4 MiB | {raw(path, total, is_write=True):.2f} | {raw(path, total, is_write=False):.2f} |"
    )
    path.unlink()
    for block_bytes in (64 << 10, 1 << 20):
        for shuffled in (False, True):
            write, read = tier(options.folder, total, block_bytes, shuffled=shuffled)
            order = "shuffled" if shuffled else "in order"
            print(f"| tier, {block_bytes >> 10} KiB blocks, {order} | {write:.2f} | {read:.2f} |")


if __name__ == "__main__":
    main()
