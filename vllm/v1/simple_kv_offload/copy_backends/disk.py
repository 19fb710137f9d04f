"""Moves blocks between the device and a file of slots, through staging memory, a few threads per direction.

Owns the file's life and the staging. It must not know hashes or requests. Layer L6.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from functools import partial
from itertools import accumulate, pairwise

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
    STALE_AFTER_S,
    Bytes,
    SlotFile,
    check_place,
    remove_outdated_files,
    remove_stale_files,
    staging,
)
from vllm.v1.simple_kv_offload.copy_backends.gang import Gang
from vllm.v1.simple_kv_offload.copy_backends.kept import Keeper
from vllm.v1.simple_kv_offload.copy_backends.kept_table import KeptTable
from vllm.v1.simple_kv_offload.copy_backends.lane import SHUTDOWN_TIMEOUT_S, CopyLane
from vllm.v1.simple_kv_offload.copy_backends.threaded import DEFAULT_DEADLINE_S

THREADS_MAX = 4
"""Threads per direction that copy, check, read and write."""
PIECE_BYTES = 1 << 20
"""Neighbouring slots are read and written together up to so many bytes, if `disk_buffer_slots` does not say more."""
PIECE_SLOTS_MAX = 64
STAGING_BYTES = 16 << 20
"""Staging memory of all threads of a direction, unless one piece takes more."""
STORE_PATIENCE_S = 0.05
"""How long a part of a store lets loads go first."""


class DiskBackend(CopyBackend):
    """Stores are written with a checksum, loads are checked against it; the file goes at shutdown unless it is kept.

    Bad slots (unreadable, or not what was written) are named in the failed result.
    """

    def __init__(self, *, clock: Clock | None = None, deadline_s: float = DEFAULT_DEADLINE_S) -> None:
        self._clock = clock or MonotonicClock()
        self._deadline_s = deadline_s
        self._lanes: dict[bool, CopyLane] = {}
        self._file: SlotFile | None = None
        self._mover: _DiskMover | None = None
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
        *,
        kept_digest: bytes | None = None,
    ) -> None:
        """Create the file and start both directions; each thread has ``num_buffer_slots`` staging slots or more.

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
        mover = self._mover = _DiskMover(
            self._file, gpu_caches, num_buffer_slots, (load_stream, store_stream)
        )
        mover.before_store = self._sweeper(disk_path)
        self._lanes = {
            False: CopyLane("kv-offload-disk-load", mover.load, self._clock, self._deadline_s),
            True: CopyLane("kv-offload-disk-store", mover.store, self._clock, self._deadline_s),
        }

    def _sweeper(self, disk_path: str) -> Callable[[], None]:
        """Looks once more for files of dead engines when those that were too fresh at the start are old enough."""
        due = [self._clock.monotonic() + STALE_AFTER_S]

        def sweep() -> None:
            if due and self._clock.monotonic() > due[0]:
                due.clear()
                remove_stale_files(disk_path)

        return sweep

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
        mover, self._mover = self._mover, None
        if mover is not None:
            mover.close(SHUTDOWN_TIMEOUT_S if all(ended) else 0.0)
        if self._file is not None:
            self._file.close(keep_open=not all(ended))
            self._file = None


class _DiskMover:
    """The work of both lanes. Pieces of a job go to several threads, so that copying, checking and the disk overlap.

    Threads and staging belong to the lane's thread that uses them, so a replaced one harms nobody.
    """

    def __init__(
        self,
        file: SlotFile,
        regions: Regions,
        num_buffer_slots: int,
        streams: tuple[torch.cuda.Stream | None, torch.cuda.Stream | None],
    ) -> None:
        self._file = file
        self.before_store: Callable[[], None] = _nothing
        """Called on the store lane's thread, for which no request waits."""
        self._regions = list(regions.values())
        ends = list(accumulate(region.shape[1] for region in self._regions))
        self._places = [slice(a, b) for a, b in pairwise([0, *ends])]
        # Plain copies of host memory: torch would share each out among threads that compute.
        on_host = all(region.device.type == "cpu" for region in self._regions)
        self._host_regions = [region.numpy() for region in self._regions] if on_host else None
        self._num_device_blocks = min(region.shape[0] for region in self._regions)
        self._piece_slots = max(num_buffer_slots, min(PIECE_SLOTS_MAX, PIECE_BYTES // file.slot_bytes))
        piece_bytes = self._piece_slots * file.slot_bytes
        self._num_threads = max(1, min(THREADS_MAX, STAGING_BYTES // piece_bytes))
        self._load_stream, self._store_stream = streams
        self._local = threading.local()
        self._gangs: list[Gang] = []
        self._idle = threading.Event()
        self._idle.set()

    def store(self, job: CopyJob) -> None:
        self.before_store()
        self._check(job.src_blocks, job.dst_blocks)
        if job.wait_event is not None:
            job.wait_event.synchronize()
        job.result.begin()
        blocks, slots = _by_slot(job.src_blocks, job.dst_blocks)
        pieces = [partial(self._write, blocks[a:b], slots[a]) for a, b in self._runs(slots)]
        for start in range(0, len(pieces), self._num_threads):
            # Requests wait for loads, nobody for stores.
            self._idle.wait(STORE_PATIENCE_S)
            with job.result.guard:
                if job.result.query():
                    return
                self._gang().run(pieces[start : start + self._num_threads])
        job.result.resolve()

    def load(self, job: CopyJob) -> None:
        self._check(job.dst_blocks, job.src_blocks)
        if job.wait_event is not None:
            job.wait_event.synchronize()
        job.result.begin()
        self._idle.clear()
        try:
            blocks, slots = _by_slot(job.dst_blocks, job.src_blocks)
            failed: list[CopyError] = []
            runs = self._runs(slots)
            self._gang().run([partial(self._read, job, blocks[a:b], slots[a], failed) for a, b in runs])
        finally:
            self._idle.set()
        if failed:
            raise _joined(failed)
        job.result.resolve()

    def close(self, timeout_s: float) -> None:
        """No more jobs will come."""
        for gang in self._gangs:
            gang.close(timeout_s)

    def _write(self, blocks: Sequence[int], first_slot: int) -> None:
        buffer = self._staging()[: len(blocks)]
        self._gather(blocks, buffer)
        self._file.write(first_slot, buffer)

    def _read(self, job: CopyJob, blocks: Sequence[int], first_slot: int, failed: list[CopyError]) -> None:
        """One that fails does not stop the others: each bad slot that is not named now costs another failed load."""
        if job.result.query():
            return
        buffer = self._staging()[: len(blocks)]
        try:
            self._file.read(first_slot, buffer)
        except CopyError as error:
            failed.append(error)
            return
        with job.result.guard:
            if not job.result.query():
                self._scatter(buffer, blocks)

    def _check(self, device_blocks: Sequence[int], slots: Sequence[int]) -> None:
        for blocks, size in ((device_blocks, self._num_device_blocks), (slots, self._file.num_slots)):
            if blocks and not (min(blocks) >= 0 and max(blocks) < size):
                raise CopyError(f"blocks {min(blocks)}..{max(blocks)} are outside 0..{size - 1}")

    def _runs(self, slots: Sequence[int]) -> list[tuple[int, int]]:
        """Index ranges of consecutive slots, at most as long as the staging memory, a share for each thread."""
        limit = min(self._piece_slots, max(1, -(-len(slots) // self._num_threads)))
        cuts = [0]
        for i in range(1, len(slots)):
            if slots[i] != slots[i - 1] + 1 or i - cuts[-1] >= limit:
                cuts.append(i)
        return list(pairwise([*cuts, len(slots)])) if slots else []

    def _gang(self) -> Gang:
        try:
            gang: Gang = self._local.gang
        except AttributeError:
            gang = self._local.gang = Gang(self._num_threads)
            self._gangs.append(gang)
        return gang

    def _staging(self) -> Bytes:
        try:
            buffer: Bytes = self._local.buffer
        except AttributeError:
            buffer = self._local.buffer = staging(self._piece_slots, self._file.slot_bytes)
        return buffer

    def _gather(self, blocks: Sequence[int], buffer: Bytes) -> None:
        if self._host_regions is not None:
            for row, block in enumerate(blocks):
                for place, region in zip(self._places, self._host_regions, strict=True):
                    buffer[row, place] = region[block]
            return
        target = torch.from_numpy(buffer)
        with _on(self._store_stream):
            for row, block in enumerate(blocks):
                for place, region in zip(self._places, self._regions, strict=True):
                    target[row, place].copy_(region[block], non_blocking=True)
        _finish(self._store_stream)

    def _scatter(self, buffer: Bytes, blocks: Sequence[int]) -> None:
        if self._host_regions is not None:
            for row, block in enumerate(blocks):
                for place, region in zip(self._places, self._host_regions, strict=True):
                    region[block] = buffer[row, place]
            return
        source = torch.from_numpy(buffer)
        with _on(self._load_stream):
            for row, block in enumerate(blocks):
                for place, region in zip(self._places, self._regions, strict=True):
                    region[block].copy_(source[row, place], non_blocking=True)
        _finish(self._load_stream)


def _nothing() -> None:
    pass


def _by_slot(blocks: Sequence[int], slots: Sequence[int]) -> tuple[Sequence[int], Sequence[int]]:
    """The pairs in the order of their slots, so that neighbours go to the disk as one."""
    order = sorted(range(len(slots)), key=slots.__getitem__)
    return [blocks[i] for i in order], [slots[i] for i in order]


def _joined(errors: Sequence[CopyError]) -> CopyError:
    """One error that names what all of them name; the order in which threads met them does not matter."""
    first = min(errors, key=lambda error: min(error.bad_blocks, default=0))
    more = f" (and {len(errors) - 1} more parts)" if len(errors) > 1 else ""
    return CopyError(f"{first}{more}", frozenset[int]().union(*(error.bad_blocks for error in errors)))


def _on(stream: torch.cuda.Stream | None) -> torch.cuda.StreamContext:
    return torch.cuda.stream(stream)


def _finish(stream: torch.cuda.Stream | None) -> None:
    if stream is not None:
        stream.synchronize()
