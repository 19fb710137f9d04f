"""The table of copy backends, and the public name of the CUDA one. Layer L6.

A new backend is a file in `copy_backends` and a line here; it must pass the contract tests. All take jobs, tell of their end
and stop in the same way (`CopyBackend`). What they are bound to differs: two sets of regions, or for the disk one and a file
(`disk_backend` says where that lies).
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Literal, cast, overload

from vllm.utils.clock import Clock
from vllm.utils.registry import resolve_object
from vllm.v1.simple_kv_offload.copy_backends.base import (
    CopyBackend,
    CopyError,
    CopyJob,
    CopyResult,
    RegionCopyBackend,
)
from vllm.v1.simple_kv_offload.copy_backends.cuda_dma import DmaCopyBackend
from vllm.v1.simple_kv_offload.copy_backends.disk import DiskBackend

RegionBackendKind = Literal["inline", "threaded", "cuda_dma"]

_PACKAGE = "vllm.v1.simple_kv_offload.copy_backends"
COPY_BACKENDS: dict[str, str] = {
    "cuda_dma": f"{_PACKAGE}.cuda_dma:DmaCopyBackend",
    "disk": f"{_PACKAGE}.disk:DiskBackend",
    "inline": f"{_PACKAGE}.inline:InlineCopyBackend",
    "threaded": f"{_PACKAGE}.threaded:ThreadedCopyBackend",
}


@overload
def create_copy_backend(kind: RegionBackendKind, clock: Clock, deadline_s: float) -> RegionCopyBackend: ...


@overload
def create_copy_backend(kind: Literal["disk"], clock: Clock, deadline_s: float) -> DiskBackend: ...


def create_copy_backend(
    kind: RegionBackendKind | Literal["disk"], clock: Clock, deadline_s: float
) -> CopyBackend:
    """A backend that still has to be initialised with its regions, the disk's with its file too."""
    backend_class = cast("Callable[..., CopyBackend]", resolve_object(COPY_BACKENDS[kind]))
    return backend_class(clock=clock, deadline_s=deadline_s)


__all__ = [
    "COPY_BACKENDS",
    "CopyBackend",
    "CopyError",
    "CopyJob",
    "CopyResult",
    "DiskBackend",
    "DmaCopyBackend",
    "RegionBackendKind",
    "RegionCopyBackend",
    "create_copy_backend",
]
