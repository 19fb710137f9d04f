"""Host arrays that a step fills, and the device tensors the model reads. Layer: L6.

Owns: when a host array may be written again. On the CPU the tensor is the array itself. On CUDA each buffer is a ring
of pinned arrays, and an array is handed out again only after the copy that reads it has ended. Must not know: what is
in the arrays.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

HostArray = npt.NDArray[Any]
_NUMPY_DTYPES = {torch.int32: np.int32, torch.int64: np.int64}


class StagingBuffer(ABC):
    """One-dimensional: write into `host(n)`, then `commit(n)` and use the tensor it returns."""

    @abstractmethod
    def host(self, count: int) -> HostArray:
        """The first `count` elements, free to be written. Grows on demand."""

    @abstractmethod
    def commit(self, count: int) -> Tensor:
        """The same elements on the device; valid until the next `commit`."""


class HostBuffer(StagingBuffer):
    """For models that run on the CPU: no copy."""

    def __init__(self, size: int, dtype: torch.dtype) -> None:
        self._dtype = dtype
        self._allocate(size)

    def _allocate(self, size: int) -> None:
        self._array: HostArray = np.zeros(size, dtype=_NUMPY_DTYPES[self._dtype])
        self._tensor = torch.from_numpy(self._array)

    def host(self, count: int) -> HostArray:
        if count > len(self._array):
            self._allocate(max(count, 2 * len(self._array)))
        return self._array[:count]

    def commit(self, count: int) -> Tensor:
        return self._tensor[:count]


class _Slot:
    """A pinned array and the mark of the last copy out of it."""

    def __init__(self, size: int, dtype: torch.dtype, pin: bool) -> None:
        self.tensor = torch.zeros(size, dtype=dtype, pin_memory=pin)
        self.array: HostArray = self.tensor.numpy()
        # Anything with synchronize(); None until the first copy.
        self.copied: Any = None


class PinnedRing(StagingBuffer):
    """For CUDA: copies run behind the host, so every pending copy has a source of its own.

    `record` returns a mark of the copies queued so far (a recorded CUDA event), with a method `synchronize`.
    """

    def __init__(
        self,
        size: int,
        dtype: torch.dtype,
        device: torch.device,
        record: Callable[[], Any],
        depth: int = 3,
        pin: bool = True,
    ) -> None:
        self._dtype = dtype
        self._device = device
        self._record = record
        self._depth = depth
        self._pin = pin
        self._next = 0
        self._allocate(size)

    def _allocate(self, size: int) -> None:
        self._size = size
        self._slots = [_Slot(size, self._dtype, self._pin) for _ in range(self._depth)]
        self._target = torch.zeros(size, dtype=self._dtype, device=self._device)

    def host(self, count: int) -> HostArray:
        if count > self._size:
            for slot in self._slots:
                self._wait(slot)
            self._allocate(max(count, 2 * self._size))
        slot = self._slots[self._next]
        self._wait(slot)
        return slot.array[:count]

    @staticmethod
    def _wait(slot: _Slot) -> None:
        if slot.copied is not None:
            slot.copied.synchronize()
            slot.copied = None

    def commit(self, count: int) -> Tensor:
        slot = self._slots[self._next]
        self._next = (self._next + 1) % self._depth
        target = self._target[:count]
        target.copy_(slot.tensor[:count], non_blocking=True)
        slot.copied = self._record()
        return target


def _record_cuda_event() -> Any:
    event = torch.cuda.Event()
    event.record()
    return event


def make_staging(size: int, dtype: torch.dtype, device: torch.device) -> StagingBuffer:
    """The buffer that suits the device."""
    if device.type == "cpu":
        return HostBuffer(size, dtype)
    return PinnedRing(size, dtype, device, _record_cuda_event)
