"""What every mover of KV blocks shares: the job, its outcome and the contract.

Owns the vocabulary between the offload worker and its backends. It must not know requests, hashes
or tiers. Layer L6.
"""

from __future__ import annotations

import threading
import time
from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Protocol

import numpy as np
import numpy.typing as npt
import torch

from vllm.utils.checks import check

# Region name → int8 tensor [blocks, bytes per block]; rows may be apart, the bytes of a row are not.
Regions = Mapping[str, torch.Tensor]

BlockIds = npt.NDArray[np.int64]


class CopyError(RuntimeError):
    """A copy did not happen. ``bad_blocks`` are source blocks whose content is unusable."""

    def __init__(self, message: str, bad_blocks: frozenset[int] = frozenset()) -> None:
        super().__init__(message)
        self.bad_blocks = bad_blocks


class WaitEvent(Protocol):
    """A point on the device that a copy has to wait for. ``query``: whether it has been passed."""

    def synchronize(self) -> None: ...

    def query(self) -> bool: ...


class CompletionEvent(Protocol):
    """What backends hand out: becomes true once, when the copy is over."""

    def query(self) -> bool: ...


class CopyResult:
    """Outcome of one job. The mover resolves it once; any thread may look.

    ``error`` is None after success. Writing bytes and giving up are mutually exclusive: a mover holds
    ``guard`` around each write and stops if the result is resolved already, so that after
    ``resolve`` no byte of the targets changes any more.
    """

    __slots__ = ("_done", "_resolving", "_started_at", "error", "guard", "seconds")

    def __init__(self) -> None:
        self._done = threading.Event()
        self._resolving = threading.Lock()
        self.guard = threading.Lock()
        self.error: BaseException | None = None
        self._started_at: float | None = None
        self.seconds: float | None = None
        """How long the copy itself took, once it is over; None where the mover does not tell."""

    def begin(self) -> None:
        """The mover starts with the copy now, after all waiting."""
        self._started_at = time.monotonic()

    def query(self) -> bool:
        """True once the copy is over, well or badly."""
        return self._done.is_set()

    def synchronize(self, timeout_s: float | None = None) -> bool:
        """Wait for the end; False if the time ran out first."""
        return self._done.wait(timeout_s)

    def resolve(self, error: BaseException | None = None) -> None:
        """End the job. Only the first call counts."""
        with self._resolving:
            if self._done.is_set():
                return
            self.error = error
            if self._started_at is not None and self.seconds is None:
                self.seconds = time.monotonic() - self._started_at
            self._done.set()

    def give_up(self, error: BaseException, patience_s: float) -> bool:
        """Resolve as failed unless a write is under way that does not end within ``patience_s``."""
        if not self.guard.acquire(timeout=patience_s):
            return self.query()
        try:
            self.resolve(error)
        finally:
            self.guard.release()
        return True

    @property
    def bad_blocks(self) -> frozenset[int]:
        """Source blocks that the failure showed to be unusable."""
        return self.error.bad_blocks if isinstance(self.error, CopyError) else frozenset()


EventsList = list[tuple[int, CompletionEvent]]


@dataclass(slots=True)
class CopyJob:
    """Copy ``src_blocks[i]`` of every region onto ``dst_blocks[i]``, all or nothing as far as reported."""

    src_blocks: Sequence[int]
    dst_blocks: Sequence[int]
    is_store: bool
    event_idx: int
    wait_event: WaitEvent | None = None
    result: CopyResult = field(default_factory=CopyResult)

    def __post_init__(self) -> None:
        check(
            len(self.src_blocks) == len(self.dst_blocks),
            f"{len(self.src_blocks)} source blocks for {len(self.dst_blocks)} target blocks",
        )


class CopyBackend(ABC):
    """Moves blocks between device and a lower tier.

    ``launch_copy`` appends ``(event_idx, event)`` to ``events_list``; the event's ``query`` turns true
    when the copy is over. Errors never raise later: they are in the result (`CopyResult.error`).
    Stores read their source after ``wait_event``; a backend keeps the order of jobs per direction.
    """

    @abstractmethod
    def launch_copy(
        self,
        src_blocks: Sequence[int],
        dst_blocks: Sequence[int],
        is_store: bool,
        event_idx: int,
        events_list: EventsList,
        wait_event: WaitEvent | None = None,
    ) -> None:
        """Queue one copy: device → tier if ``is_store``, else tier → device. Does not block."""

    @abstractmethod
    def shutdown(self) -> None:
        """End all threads and release what the backend owns; open jobs end as failed. Idempotent."""

    def check_health(self) -> None:
        """Called once per step: fail the jobs of a mover that died or hangs, and replace it."""
        return


class RegionCopyBackend(CopyBackend):
    """A backend between two sets of regions with the same names."""

    @abstractmethod
    def init(
        self,
        gpu_caches: Regions,
        cpu_caches: Regions,
        device: torch.device,
        load_stream: torch.cuda.Stream | None = None,
        store_stream: torch.cuda.Stream | None = None,
    ) -> None:
        """Bind the regions and start. Streams mean something only to backends of a CUDA device.

        Raises ``ValueError`` if the regions do not match or are not where the backend can reach them.
        """


def checked_ids(job: CopyJob, source: Regions, target: Regions) -> tuple[BlockIds, BlockIds]:
    """The job's (source, target) blocks. `CopyError` for one outside its regions, before any byte moves."""
    sides = (
        (np.array(job.src_blocks, dtype=np.int64), source, "source"),
        (np.array(job.dst_blocks, dtype=np.int64), target, "target"),
    )
    for ids, regions, what in sides:
        size = min((region.shape[0] for region in regions.values()), default=0)
        if ids.size and not (ids.min() >= 0 and ids.max() < size):
            raise CopyError(f"{what} blocks {ids.min()}..{ids.max()} are outside 0..{size - 1}")
    return sides[0][0], sides[1][0]


def bytes_per_block(regions: Regions) -> int:
    """Bytes of one block over all regions."""
    return sum(region.shape[1] for region in regions.values())
