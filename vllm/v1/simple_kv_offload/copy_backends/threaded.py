"""Copies between host-visible regions on two background threads, one per direction. Layer L6."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from vllm.utils.clock import Clock, MonotonicClock
from vllm.v1.simple_kv_offload.copy_backends.base import (
    CopyError,
    CopyJob,
    EventsList,
    RegionCopyBackend,
    Regions,
    WaitEvent,
)
from vllm.v1.simple_kv_offload.copy_backends.host_copy import HostCopier, usable_copy_threads
from vllm.v1.simple_kv_offload.copy_backends.lane import CopyLane

DEFAULT_DEADLINE_S = 60.0
# Nobody waits for a store, but threads that compute wait for each other: one that a copy takes a core from holds up all of
# them. At this niceness a store runs where a core is idle, as between two forwards, and still gets a quarter of one that
# another thread wants. Not more: while it waits for a core that other programs have, it may hold the interpreter's lock.
STORE_NICENESS = 5


class ThreadedCopyBackend(RegionCopyBackend):
    """Loads and stores run beside the forward and never wait for each other."""

    def __init__(
        self,
        clock: Clock | None = None,
        deadline_s: float = DEFAULT_DEADLINE_S,
        copy_threads: int | None = None,
    ) -> None:
        """``copy_threads`` share a large copy; None: as many as there are processors, within bounds."""
        self._clock = clock or MonotonicClock()
        self._deadline_s = deadline_s
        self._copy_threads = usable_copy_threads() if copy_threads is None else copy_threads
        self._copier: HostCopier | None = None
        self._lanes: dict[bool, CopyLane] = {}

    def init(
        self,
        gpu_caches: Regions,
        cpu_caches: Regions,
        device: torch.device,
        load_stream: torch.cuda.Stream | None = None,
        store_stream: torch.cuda.Stream | None = None,
    ) -> None:
        """Bind the regions (both in host memory) and start the threads. Streams have no meaning here."""
        self._copier = HostCopier(gpu_caches, cpu_caches, self._copy_threads)
        self._lanes = {
            is_store: CopyLane(name, self._copier.wait_and_copy, self._clock, self._deadline_s, niceness)
            for is_store, name, niceness in (
                (False, "kv-offload-load", 0),
                (True, "kv-offload-store", STORE_NICENESS),
            )
        }

    def launch_copy(
        self,
        src_blocks: Sequence[int],
        dst_blocks: Sequence[int],
        is_store: bool,
        event_idx: int,
        events_list: EventsList,
        wait_event: WaitEvent | None = None,
    ) -> None:
        # The caller may reuse its lists; the job outlives the call.
        job = CopyJob(tuple(src_blocks), tuple(dst_blocks), is_store, event_idx, wait_event)
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
        self._copier = None
