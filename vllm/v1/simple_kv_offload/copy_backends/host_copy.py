"""Copies runs of blocks between host-visible regions, in pieces small enough to be given up between.

Owns the inner loop that the inline and the threaded backend share. Layer L6.
"""

from __future__ import annotations

import numpy as np
import numpy.typing as npt
import torch

from vllm.v1.simple_kv_offload.copy_backends.base import (
    CopyJob,
    Regions,
    bytes_per_block,
    check_blocks,
    coalesce,
)

# One guarded piece: long enough to run at memory speed, short enough to give up soon.
PIECE_BYTES = 8 << 20

Arrays = list[tuple[npt.NDArray[np.int8], npt.NDArray[np.int8]]]


class HostCopier:
    """Pairs of (device, tier) regions in host memory and the copy between them. Thread-safe."""

    def __init__(self, device_regions: Regions, tier_regions: Regions) -> None:
        if set(device_regions) != set(tier_regions):
            raise ValueError(
                f"regions differ: device has {sorted(device_regions)}, tier has {sorted(tier_regions)}"
            )
        self._device_regions = device_regions
        self._tier_regions = tier_regions
        self._arrays: Arrays = [
            (_as_array(device_regions[name]), _as_array(tier_regions[name])) for name in device_regions
        ]
        self._blocks_per_piece = max(1, PIECE_BYTES // max(1, bytes_per_block(device_regions)))

    def wait_and_copy(self, job: CopyJob) -> None:
        """The whole job: wait for its mark, move its bytes, resolve its result. Raises what goes wrong."""
        if job.wait_event is not None:
            job.wait_event.synchronize()
        self.copy(job)
        job.result.resolve()

    def copy(self, job: CopyJob) -> None:
        """Move all bytes of the job unless its result is resolved meanwhile. Raises on bad block ids."""
        source, target = self._device_regions, self._tier_regions
        if not job.is_store:
            source, target = target, source
        check_blocks(job, source, target)
        for run in coalesce(job.src_blocks, job.dst_blocks, self._blocks_per_piece):
            with job.result.guard:
                if job.result.query():
                    return
                self._copy_run(slice(run.source, run.source + run.length), run.target, job.is_store)

    def _copy_run(self, source_rows: slice, target_start: int, is_store: bool) -> None:
        target_rows = slice(target_start, target_start + source_rows.stop - source_rows.start)
        for device, tier in self._arrays:
            # numpy lets go of the interpreter lock while it copies.
            if is_store:
                np.copyto(tier[target_rows], device[source_rows])
            else:
                np.copyto(device[target_rows], tier[source_rows])


def _as_array(region: torch.Tensor) -> npt.NDArray[np.int8]:
    """The region's memory as an array; ``ValueError`` unless it is [blocks, bytes] of int8 on the host."""
    if region.device.type != "cpu" or region.dtype != torch.int8 or region.dim() != 2:
        raise ValueError(
            "a host region must be an int8 tensor [blocks, bytes] on the CPU, "
            f"got {region.dtype} {tuple(region.shape)} on {region.device}"
        )
    array: npt.NDArray[np.int8] = region.numpy()
    return array
