"""The reference mover: copies at once, in the caller's thread. Layer L6."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from vllm.utils.clock import Clock
from vllm.v1.simple_kv_offload.copy_backends.base import (
    CopyError,
    CopyJob,
    EventsList,
    RegionCopyBackend,
    Regions,
    WaitEvent,
)
from vllm.v1.simple_kv_offload.copy_backends.host_copy import HostCopier


class InlineCopyBackend(RegionCopyBackend):
    """Every job is over when ``launch_copy`` returns. The oracle for the other backends."""

    def __init__(self, clock: Clock | None = None, deadline_s: float = 0.0) -> None:
        """Nothing can hang here, so neither argument matters; they make all backends alike."""
        self._copier: HostCopier | None = None

    def init(
        self,
        gpu_caches: Regions,
        cpu_caches: Regions,
        device: torch.device,
        load_stream: torch.cuda.Stream | None = None,
        store_stream: torch.cuda.Stream | None = None,
    ) -> None:
        """Bind the regions; both must be in host memory. Streams have no meaning here."""
        self._copier = HostCopier(gpu_caches, cpu_caches)

    def launch_copy(
        self,
        src_blocks: Sequence[int],
        dst_blocks: Sequence[int],
        is_store: bool,
        event_idx: int,
        events_list: EventsList,
        wait_event: WaitEvent | None = None,
    ) -> None:
        job = CopyJob(src_blocks, dst_blocks, is_store, event_idx, wait_event)
        try:
            if self._copier is None:
                raise CopyError("the copy backend is not initialised or was shut down")
            self._copier.wait_and_copy(job)
        except Exception as error:
            job.result.resolve(error)
        events_list.append((event_idx, job.result))

    def shutdown(self) -> None:
        self._copier = None
