"""Host memory of a tier: aligned, zeroed, pinned where a device can use it.

Owns allocation and release of the memory. Who may use a slot when is the manager's business: its
leases last until a copy has ended. Layer L6.
"""

from __future__ import annotations

import mmap
from collections.abc import Callable, Iterable, Mapping
from contextlib import suppress

import torch

from vllm.logger import init_logger
from vllm.v1.simple_kv_offload.copy_backends.numa import spread_over_nodes
from vllm.v1.simple_kv_offload.copy_backends.prefault import AHEAD_BYTES, Prefault

logger = init_logger(__name__)

Pin = Callable[[torch.Tensor], bool]
Unpin = Callable[[torch.Tensor], None]


class HostBuffer:
    """One zeroed int8 tensor ``[num_blocks, bytes]`` per region."""

    def __init__(
        self,
        region_bytes: Mapping[str, int],
        num_blocks: int,
        pin: Pin | None = None,
        unpin: Unpin | None = None,
        regions: Mapping[str, torch.Tensor] | None = None,
    ) -> None:
        """Allocate, unless memory is given; ``pin`` registers a tensor with the device and says whether it could.

        Without ``pin`` pages are touched in the background before they are used: of memory that is given all, since it is
        there already, else a bounded way ahead (`Prefault`).
        """
        self._unpin = unpin
        self._pinned: list[torch.Tensor] = []
        self.regions: dict[str, torch.Tensor] = {}
        for name, size in region_bytes.items():
            region = aligned_zeros(num_blocks, size) if regions is None else regions[name]
            self.regions[name] = region
            if pin is not None and pin(region):
                self._pinned.append(region)
        if pin is not None and len(self._pinned) < len(self.regions):
            logger.warning(
                "KV offload: %d of %d host regions are not pinned; copies through them are slower.",
                len(self.regions) - len(self._pinned),
                len(self.regions),
            )
        self._prefault: Prefault | None = None  # pinning has touched it all
        if pin is None:
            ahead_bytes = AHEAD_BYTES if regions is None else None
            self._prefault = Prefault(list(self.regions.values()), ahead_bytes)

    def use(self, rows: Iterable[int]) -> None:
        """These rows are about to be written."""
        if self._prefault is not None:
            self._prefault.use(max(rows, default=-1))

    def close(self) -> None:
        """Give the memory back. Idempotent; no copy may be under way."""
        if self._prefault is not None:
            self._prefault.close()
        pinned, self._pinned = self._pinned, []
        for region in pinned:
            if self._unpin is not None:
                self._unpin(region)
        self.regions = {}


def aligned_zeros(num_rows: int, row_bytes: int) -> torch.Tensor:
    """A zeroed int8 tensor ``[num_rows, row_bytes]`` that begins at a page: what direct I/O and devices want.

    The memory is the system's own: it costs nothing, neither time nor space, until it is written. ``ValueError`` if the
    system does not let it be reserved.
    """
    size = num_rows * row_bytes
    memory = _reserve(size)
    if hasattr(mmap, "MADV_HUGEPAGE"):
        with suppress(OSError):  # a kernel may have none
            memory.madvise(mmap.MADV_HUGEPAGE)
    if size == 0:
        return torch.zeros((num_rows, row_bytes), dtype=torch.int8)
    rows = torch.frombuffer(memory, dtype=torch.int8, count=size).view(num_rows, row_bytes)
    spread_over_nodes(rows.data_ptr(), size)
    return rows


def check_reservable(num_bytes: int) -> None:
    """``ValueError`` if the system would not let so much be reserved as one region now. Takes nothing."""
    _reserve(num_bytes).close()


def _reserve(size: int) -> mmap.mmap:
    try:
        return mmap.mmap(-1, max(size, 1), flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    except (OSError, OverflowError) as error:
        raise ValueError(
            f"{size / 2**30:.2f} GiB of host memory cannot be reserved for offloaded KV blocks "
            f"(cpu_bytes_to_use): {error.strerror if isinstance(error, OSError) else error}"
        ) from error
