"""The table of region copy backends, and the public name of the CUDA one. Layer L6.

A new backend is a file in `copy_backends` and a line here; it must pass the contract tests. The disk is none of them, since one
of its sides is a file: `disk_backend` makes it, and it passes the same tests.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Literal, cast

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

BackendKind = Literal["inline", "threaded", "cuda_dma"]

_PACKAGE = "vllm.v1.simple_kv_offload.copy_backends"
COPY_BACKENDS: dict[str, str] = {
    "cuda_dma": f"{_PACKAGE}.cuda_dma:DmaCopyBackend",
    "inline": f"{_PACKAGE}.inline:InlineCopyBackend",
    "threaded": f"{_PACKAGE}.threaded:ThreadedCopyBackend",
}


def create_copy_backend(kind: BackendKind, clock: Clock, deadline_s: float) -> RegionCopyBackend:
    """A backend that still has to be initialised with its regions."""
    backend_class = cast("Callable[..., RegionCopyBackend]", resolve_object(COPY_BACKENDS[kind]))
    return backend_class(clock=clock, deadline_s=deadline_s)


__all__ = [
    "COPY_BACKENDS",
    "BackendKind",
    "CopyBackend",
    "CopyError",
    "CopyJob",
    "CopyResult",
    "DmaCopyBackend",
    "RegionCopyBackend",
    "create_copy_backend",
]
