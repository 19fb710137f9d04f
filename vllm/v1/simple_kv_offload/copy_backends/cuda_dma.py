"""Copies between device memory and pinned host memory with the device's copy engines.

Owns the two issuing threads and the streams' order. Imports everywhere; needs a CUDA device to be
initialised. Layer L6.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch

from vllm.logger import init_logger
from vllm.utils.clock import Clock, MonotonicClock
from vllm.v1.simple_kv_offload.copy_backends.base import (
    CopyError,
    CopyJob,
    CopyResult,
    EventsList,
    RegionCopyBackend,
    Regions,
    WaitEvent,
    checked_ids,
)
from vllm.v1.simple_kv_offload.copy_backends.cuda_gather import SmallBlocks, names_of_small, only
from vllm.v1.simple_kv_offload.copy_backends.lane import CopyLane
from vllm.v1.simple_kv_offload.copy_backends.threaded import DEFAULT_DEADLINE_S
from vllm.v1.simple_kv_offload.cuda_mem_ops import (
    CU_MEMCPY_SRC_ACCESS_ORDER_ANY,
    CU_MEMCPY_SRC_ACCESS_ORDER_STREAM,
    build_params,
    copy_blocks,
)

logger = init_logger(__name__)


class DeviceCopyResult(CopyResult):
    """A result that is decided by the device: once the copies are issued, only their event ends it."""

    __slots__ = ("_event", "_start")

    def __init__(self) -> None:
        super().__init__()
        self._event: torch.cuda.Event | None = None
        self._start: torch.cuda.Event | None = None

    def attach(self, start: torch.cuda.Event, event: torch.cuda.Event) -> None:
        """The copies are in the stream, between these events."""
        self._start = start
        self._event = event

    def query(self) -> bool:
        if self._done.is_set():
            return True
        event = self._event
        if event is None:
            return False
        try:
            if not event.query():
                return False
            if self._start is not None and self.seconds is None:
                self.seconds = self._start.elapsed_time(event) / 1000
            self.resolve()
        except RuntimeError as error:  # the device reports a failed copy through its event
            self.resolve(error)
        return True

    def synchronize(self, timeout_s: float | None = None) -> bool:
        if self._event is None and not self._done.wait(timeout_s):
            return False
        if self._event is not None and not self._done.is_set():
            self._event.synchronize()
        return self.query()

    def give_up(self, error: BaseException, patience_s: float) -> bool:
        """Copies that the device has been given cannot be taken back; they end with their event."""
        if self._event is not None:
            return self.query()
        return super().give_up(error, patience_s)


class Copies:
    """One direction: small blocks by a kernel, all others by the copy engines, in one batch."""

    def __init__(
        self,
        source: Regions,
        target: Regions,
        small: frozenset[str],
        stream: torch.cuda.Stream,
        src_access_order: int,
    ) -> None:
        self.source, self.target = source, target
        large = frozenset(source) - small
        self.small = SmallBlocks(only(source, small), only(target, small))
        self._params = build_params(only(source, large), only(target, large), stream, src_access_order)

    def issue(self, job: CopyJob) -> torch.Tensor | None:
        """Put the job's copies into the stream, which is the current one; see `SmallBlocks.issue`."""
        ids = self.small.issue(job)
        if self._params.num_layers:
            copy_blocks(job.src_blocks, job.dst_blocks, self._params)
        return ids


class DmaCopyBackend(RegionCopyBackend):
    """Issues batched copies from one thread per direction; loads and stores have a stream each."""

    def __init__(self, *, clock: Clock | None = None, deadline_s: float = DEFAULT_DEADLINE_S) -> None:
        self._clock = clock or MonotonicClock()
        self._deadline_s = deadline_s
        self._lanes: dict[bool, CopyLane] = {}
        self._device: torch.device | None = None

    def init(
        self,
        gpu_caches: Regions,
        cpu_caches: Regions,
        device: torch.device,
        load_stream: torch.cuda.Stream | None = None,
        store_stream: torch.cuda.Stream | None = None,
    ) -> None:
        if set(gpu_caches) != set(cpu_caches):
            raise ValueError(
                f"regions differ: device has {sorted(gpu_caches)}, host has {sorted(cpu_caches)}"
            )
        if load_stream is None or store_stream is None:
            raise ValueError("the DMA backend needs a stream per direction")
        small = names_of_small(gpu_caches, cpu_caches)
        # Host memory does not change under a load, so the source may be read in any order; a store
        # must read the device only when its stream has reached it.
        load = Copies(cpu_caches, gpu_caches, small, load_stream, CU_MEMCPY_SRC_ACCESS_ORDER_ANY)
        store = Copies(gpu_caches, cpu_caches, small, store_stream, CU_MEMCPY_SRC_ACCESS_ORDER_STREAM)
        self._device = device
        self._lanes = {
            False: self._lane("load", device, load_stream, load),
            True: self._lane("store", device, store_stream, store),
        }

    def _lane(self, name: str, device: torch.device, stream: torch.cuda.Stream, copies: Copies) -> CopyLane:
        work = _issuer(device, stream, copies)
        return CopyLane(f"kv-offload-dma-{name}", work, self._clock, self._deadline_s)

    def launch_copy(
        self,
        src_blocks: Sequence[int],
        dst_blocks: Sequence[int],
        is_store: bool,
        event_idx: int,
        events_list: EventsList,
        wait_event: WaitEvent | None = None,
    ) -> None:
        job = CopyJob(
            tuple(src_blocks), tuple(dst_blocks), is_store, event_idx, wait_event, DeviceCopyResult()
        )
        events_list.append((event_idx, job.result))
        if not self._lanes:
            job.result.resolve(CopyError("the copy backend is not initialised or was shut down"))
            return
        self._lanes[is_store].submit(job)

    def check_health(self) -> None:
        for lane in self._lanes.values():
            lane.check_health()

    def shutdown(self) -> None:
        lanes, self._lanes = self._lanes, {}
        for lane in lanes.values():
            lane.shutdown()
        if lanes:
            try:
                # Nothing may be freed while the device still copies; whoever ends the engine may have another current one.
                torch.cuda.synchronize(self._device)
            except (
                RuntimeError
            ) as error:  # of a device that has failed: it copies no more, and the rest must be let go
                logger.error("KV offload: the device failed before its copies had ended: %s", error)


def _issuer(device: torch.device, stream: torch.cuda.Stream, copies: Copies) -> Callable[[CopyJob], None]:
    def issue(job: CopyJob) -> None:
        result = job.result
        assert isinstance(result, DeviceCopyResult)
        torch.cuda.set_device(device)
        checked_ids(job, copies.source, copies.target)
        with result.guard:
            if result.query():
                return
            if isinstance(job.wait_event, torch.cuda.Event):
                stream.wait_event(job.wait_event)
            elif job.wait_event is not None:
                job.wait_event.synchronize()
            start = torch.cuda.Event(enable_timing=True)
            start.record(stream)
            try:
                with torch.cuda.stream(stream):
                    ids = copies.issue(job)
            except BaseException:
                # A part may be under way: nobody may have its blocks, nor the ids that it reads, until it has ended.
                stream.synchronize()
                raise
            event = torch.cuda.Event(enable_timing=True)
            event.record(stream)
            copies.small.keep(ids, event)
            result.attach(start, event)

    return issue
