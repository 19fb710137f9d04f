"""Copies of small blocks between a device and pinned host memory by a kernel: one launch per region instead of one copy
per block.

Owns which regions are small, and the block ids until the device has read them. Imports everywhere; needs a CUDA device
to copy. Layer L6.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Mapping, Sequence

import torch

from vllm import _custom_ops as ops
from vllm.v1.simple_kv_offload.copy_backends.base import CopyJob, Regions
from vllm.v1.simple_kv_offload.cuda_mem_ops import is_seen_by_device

SMALL_BLOCK_BYTES = 16 << 10
"""Up to this size a copy of its own is more work for the driver than for the bus (an estimate, not measured)."""


def names_of_small(device_regions: Regions, host_regions: Regions) -> frozenset[str]:
    """The regions that a kernel copies, not the copy engines.

    The kernel has to be built, and the device has to see the host's side under the host's addresses.
    """
    if not ops.can_copy_over_bus():
        return frozenset()
    small = [name for name, region in device_regions.items() if region.shape[1] <= SMALL_BLOCK_BYTES]
    return frozenset(name for name in small if is_seen_by_device(host_regions[name]))


def only(regions: Regions, names: frozenset[str]) -> Mapping[str, torch.Tensor]:
    """These regions, in their order."""
    return {name: region for name, region in regions.items() if name in names}


class SmallBlocks:
    """Issues the copies of one direction for regions of small blocks, on one stream."""

    def __init__(self, source: Regions, target: Regions) -> None:
        self._pairs = [(source[name], target[name]) for name in source]
        # The kernel reads the ids in host memory; they must stay until it has.
        self._ids: deque[tuple[torch.cuda.Event, torch.Tensor]] = deque()

    def issue(self, job: CopyJob) -> torch.Tensor | None:
        """Put the copies into the current stream. What is returned must be given to `keep` with an event behind them."""
        if not self._pairs or not job.src_blocks:
            return None
        ids = _pinned([job.src_blocks, job.dst_blocks])
        for source, target in self._pairs:
            ops.copy_blocks(target, source, ids[1], ids[0])
        return ids

    def keep(self, ids: torch.Tensor | None, event: torch.cuda.Event) -> None:
        """Hold the ids until the event; lets go of those whose event has passed."""
        while self._ids and self._ids[0][0].query():
            self._ids.popleft()
        if ids is not None:
            self._ids.append((event, ids))


def _pinned(blocks: Sequence[Sequence[int]]) -> torch.Tensor:
    return torch.tensor(blocks, dtype=torch.int64, pin_memory=True)
