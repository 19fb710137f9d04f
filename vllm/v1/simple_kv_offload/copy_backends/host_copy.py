"""Copies blocks between host-visible regions, in pieces small enough to be given up between.

Owns the inner loop that the inline and the threaded backend share. Layer L6.
"""

from __future__ import annotations

import os

import torch

from vllm import _custom_ops as ops
from vllm.v1.simple_kv_offload.copy_backends.base import (
    CopyJob,
    Regions,
    bytes_per_block,
    checked_ids,
)

# One guarded piece: long enough that taking the interpreter lock in between costs nothing, short enough to give up soon.
PIECE_BYTES = 128 << 20
THREADS_MAX = 4
"""Threads that share a large copy: one alone moves less than the memory can give. More would be in the way of others."""


def usable_copy_threads() -> int:
    """As many as there are processors for this process, within bounds."""
    usable = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    return min(THREADS_MAX, usable)


class HostCopier:
    """Pairs of (device, tier) regions in host memory and the copy between them. Thread-safe.

    ``threads`` share a large copy, the caller's own included.
    """

    def __init__(self, device_regions: Regions, tier_regions: Regions, threads: int = 1) -> None:
        if set(device_regions) != set(tier_regions):
            raise ValueError(
                f"regions differ: device has {sorted(device_regions)}, tier has {sorted(tier_regions)}"
            )
        for region in (*device_regions.values(), *tier_regions.values()):
            _check_region(region)
        self._device_regions = device_regions
        self._tier_regions = tier_regions
        self._threads = threads
        self._blocks_per_piece = max(1, PIECE_BYTES // max(1, bytes_per_block(device_regions)))

    def wait_and_copy(self, job: CopyJob) -> None:
        """The whole job: wait for its mark, move its bytes, resolve its result. Raises what goes wrong."""
        if job.wait_event is not None:
            job.wait_event.synchronize()
        job.result.begin()
        self.copy(job)
        job.result.resolve()

    def copy(self, job: CopyJob) -> None:
        """Move all bytes of the job unless its result is resolved meanwhile. Raises on bad block ids."""
        source, target = self._device_regions, self._tier_regions
        if not job.is_store:
            source, target = target, source
        source_ids, target_ids = map(torch.from_numpy, checked_ids(job, source, target))
        pairs = [(source[name], target[name]) for name in source]
        for start in range(0, len(job.src_blocks), self._blocks_per_piece):
            piece = slice(start, start + self._blocks_per_piece)
            with job.result.guard:
                if job.result.query():
                    return
                for from_region, to_region in pairs:
                    # One call for the whole piece, without the interpreter lock.
                    ops.copy_blocks(
                        to_region, from_region, target_ids[piece], source_ids[piece], self._threads
                    )


def _check_region(region: torch.Tensor) -> None:
    """``ValueError`` unless the region is [blocks, bytes] of int8 on the host, the bytes of a row side by side."""
    is_rows = region.dim() == 2 and (region.shape[1] <= 1 or region.stride(1) == 1)
    if region.device.type != "cpu" or region.dtype != torch.int8 or not is_rows:
        raise ValueError(
            "a host region must be an int8 tensor [blocks, bytes] on the CPU, "
            f"got {region.dtype} {tuple(region.shape)} on {region.device}"
        )
