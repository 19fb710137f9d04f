"""Moves blocks between the device and a file of slots, through staging memory, one thread per direction.

Owns the file's life and the staging. It must not know hashes or requests. Layer L6.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from itertools import pairwise

import numpy as np
import torch

from vllm.utils.clock import Clock, MonotonicClock
from vllm.v1.simple_kv_offload.copy_backends.base import (
    CopyBackend,
    CopyError,
    CopyJob,
    EventsList,
    Regions,
    WaitEvent,
    bytes_per_block,
)
from vllm.v1.simple_kv_offload.copy_backends.disk_file import (
    Bytes,
    SlotFile,
    check_place,
    remove_outdated_files,
    remove_stale_files,
    staging,
)
from vllm.v1.simple_kv_offload.copy_backends.kept import Keeper
from vllm.v1.simple_kv_offload.copy_backends.kept_table import KeptTable
from vllm.v1.simple_kv_offload.copy_backends.lane import CopyLane
from vllm.v1.simple_kv_offload.copy_backends.threaded import DEFAULT_DEADLINE_S


class DiskBackend(CopyBackend):
    """Stores are written with a checksum, loads are checked against it; the file goes at shutdown unless it is kept.

    Bad slots (unreadable, or not what was written) are named in the failed result.
    """

    def __init__(self, *, clock: Clock | None = None, deadline_s: float = DEFAULT_DEADLINE_S) -> None:
        self._clock = clock or MonotonicClock()
        self._deadline_s = deadline_s
        self._lanes: dict[bool, CopyLane] = {}
        self._file: SlotFile | None = None
        self.keeper: Keeper | None = None
        """What keeps the table of a kept file; None for a file that goes at shutdown."""

    def init(
        self,
        gpu_caches: Regions,
        device: torch.device,
        load_stream: torch.cuda.Stream | None,
        store_stream: torch.cuda.Stream | None,
        disk_path: str,
        num_disk_slots: int,
        total_block_bytes: int,
        num_buffer_slots: int = 2,
        use_page_cache: bool = False,
        kept_digest: bytes | None = None,
    ) -> None:
        """Create the file and start both threads; each owns ``num_buffer_slots`` staging slots.

        With ``kept_digest`` the file is kept, and what an earlier run with the same digest left is in `keeper`.
        ``ValueError`` for impossible sizes, ``OSError`` if the file cannot be made, ``BlockingIOError`` if it is kept
        and another engine has it.
        """
        if num_buffer_slots < 1:
            raise ValueError(f"disk_buffer_slots must be at least 1, got {num_buffer_slots}")
        if total_block_bytes != bytes_per_block(gpu_caches):
            raise ValueError(
                f"a block has {bytes_per_block(gpu_caches)} bytes on the device, {total_block_bytes} on disk"
            )
        check_place(disk_path, num_disk_slots * total_block_bytes)
        remove_stale_files(disk_path)
        is_kept = kept_digest is not None
        self._file = SlotFile(disk_path, num_disk_slots, total_block_bytes, use_page_cache, is_kept=is_kept)
        if kept_digest is not None:
            self.keeper = self._open_table(self._file, kept_digest)
        mover = _DiskMover(self._file, gpu_caches, num_buffer_slots, (load_stream, store_stream))
        self._lanes = {
            False: CopyLane("kv-offload-disk-load", mover.load, self._clock, self._deadline_s),
            True: CopyLane("kv-offload-disk-store", mover.store, self._clock, self._deadline_s),
        }

    def _open_table(self, file: SlotFile, digest: bytes) -> Keeper:
        try:
            table = KeptTable(f"{file.path}.index", digest, file.num_slots, file.slot_bytes)
        except OSError:
            file.close()
            raise
        remove_outdated_files(file.path)
        return Keeper(table, file, self._clock, self._deadline_s)

    def launch_copy(
        self,
        src_blocks: Sequence[int],
        dst_blocks: Sequence[int],
        is_store: bool,
        event_idx: int,
        events_list: EventsList,
        wait_event: WaitEvent | None = None,
    ) -> None:
        job = CopyJob(tuple(src_blocks), tuple(dst_blocks), is_store, event_idx, wait_event)
        events_list.append((event_idx, job.result))
        if not self._lanes:
            job.result.resolve(CopyError("the disk backend is not initialised or was shut down"))
            return
        self._lanes[is_store].submit(job)

    def check_health(self) -> None:
        for lane in self._lanes.values():
            lane.check_health()
        if self.keeper is not None:
            self.keeper.check_health()

    def shutdown(self) -> None:
        if self.keeper is not None:
            self.keeper.shutdown()
        lanes, self._lanes = self._lanes, {}
        ended = [lane.shutdown() for lane in lanes.values()]
        if self._file is not None:
            self._file.close(keep_open=not all(ended))
            self._file = None


class _DiskMover:
    """The work of both lanes. Staging belongs to the thread that uses it, so a replaced one harms nobody."""

    def __init__(
        self,
        file: SlotFile,
        regions: Regions,
        num_buffer_slots: int,
        streams: tuple[torch.cuda.Stream | None, torch.cuda.Stream | None],
    ) -> None:
        self._file = file
        self._regions = list(regions.values())
        self._num_device_blocks = min(region.shape[0] for region in self._regions)
        self._num_buffer_slots = num_buffer_slots
        self._load_stream, self._store_stream = streams
        self._local = threading.local()

    def store(self, job: CopyJob) -> None:
        self._check(job.src_blocks, job.dst_blocks)
        if job.wait_event is not None:
            job.wait_event.synchronize()
        for start, end in self._runs(job.dst_blocks):
            buffer = self._staging()[: end - start]
            for row, block in enumerate(job.src_blocks[start:end]):
                self._gather(block, buffer[row])
            _finish(self._store_stream)
            if not self._guarded(job, lambda: self._file.write(job.dst_blocks[start], buffer)):  # noqa: B023
                return
        job.result.resolve()

    def load(self, job: CopyJob) -> None:
        self._check(job.dst_blocks, job.src_blocks)
        if job.wait_event is not None:
            job.wait_event.synchronize()
        job.result.begin()
        for start, end in self._runs(job.src_blocks):
            buffer = self._staging()[: end - start]
            self._file.read(job.src_blocks[start], buffer)
            if not self._guarded(job, lambda: self._scatter(buffer, job.dst_blocks[start:end])):  # noqa: B023
                return
        job.result.resolve()

    @staticmethod
    def _guarded(job: CopyJob, write: Callable[[], None]) -> bool:
        """Write unless the job was given up; False if it was."""
        with job.result.guard:
            if job.result.query():
                return False
            write()
            return True

    def _check(self, device_blocks: Sequence[int], slots: Sequence[int]) -> None:
        for blocks, size in ((device_blocks, self._num_device_blocks), (slots, self._file.num_slots)):
            if blocks and not (min(blocks) >= 0 and max(blocks) < size):
                raise CopyError(f"blocks {min(blocks)}..{max(blocks)} are outside 0..{size - 1}")

    def _runs(self, slots: Sequence[int]) -> list[tuple[int, int]]:
        """Index ranges of consecutive slots, at most as long as the staging memory."""
        cuts = [0]
        for i in range(1, len(slots)):
            if slots[i] != slots[i - 1] + 1 or i - cuts[-1] >= self._num_buffer_slots:
                cuts.append(i)
        return list(pairwise([*cuts, len(slots)])) if slots else []

    def _staging(self) -> Bytes:
        try:
            buffer: Bytes = self._local.buffer
        except AttributeError:
            buffer = self._local.buffer = staging(self._num_buffer_slots, self._file.slot_bytes)
        return buffer

    def _gather(self, block: int, row: Bytes) -> None:
        target = torch.from_numpy(row)
        start = 0
        with _on(self._store_stream):
            for region in self._regions:
                size = region.shape[1]
                target[start : start + size].copy_(region[block], non_blocking=True)
                start += size

    def _scatter(self, buffer: Bytes, blocks: Sequence[int]) -> None:
        source = torch.from_numpy(np.ascontiguousarray(buffer))
        with _on(self._load_stream):
            for row, block in enumerate(blocks):
                start = 0
                for region in self._regions:
                    size = region.shape[1]
                    region[block].copy_(source[row, start : start + size], non_blocking=True)
                    start += size
        _finish(self._load_stream)


def _on(stream: torch.cuda.Stream | None) -> torch.cuda.StreamContext:
    return torch.cuda.stream(stream)


def _finish(stream: torch.cuda.Stream | None) -> None:
    if stream is not None:
        stream.synchronize()
