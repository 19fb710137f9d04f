"""Staging buffers: nothing is overwritten while a copy out of it is pending."""

from __future__ import annotations

import torch

from vllm.v1.worker.staging import HostBuffer, PinnedRing, make_staging


class StalledCopies:
    """A device whose copies run only when somebody waits for them."""

    def __init__(self) -> None:
        self.waited: list[int] = []
        self.count = 0

    def record(self) -> _Mark:
        self.count += 1
        return _Mark(self, self.count)


class _Mark:
    def __init__(self, device: StalledCopies, number: int) -> None:
        self.device, self.number = device, number

    def synchronize(self) -> None:
        self.device.waited.append(self.number)


def test_host_buffers_are_the_tensor_itself() -> None:
    buffer = make_staging(4, torch.int64, torch.device("cpu"))
    assert isinstance(buffer, HostBuffer)
    buffer.host(3)[:] = [7, 8, 9]
    assert buffer.commit(3).tolist() == [7, 8, 9]
    buffer.host(10)[:] = range(10)
    assert buffer.commit(10).tolist() == list(range(10))


def test_xfer_08_each_pending_copy_has_its_own_source() -> None:
    device = StalledCopies()
    ring = PinnedRing(4, torch.int32, torch.device("cpu"), device.record, depth=3, pin=False)
    sources = []
    for step in range(3):
        array = ring.host(4)
        array[:] = step
        sources.append(array)
        ring.commit(4)
    assert device.waited == []
    assert [int(array[0]) for array in sources] == [0, 1, 2]
    fourth = ring.host(4)
    assert device.waited == [1]
    assert fourth.ctypes.data == sources[0].ctypes.data


def test_growing_waits_for_every_pending_copy() -> None:
    device = StalledCopies()
    ring = PinnedRing(2, torch.int64, torch.device("cpu"), device.record, depth=2, pin=False)
    ring.host(2)[:] = 1
    ring.commit(2)
    ring.host(5)[:] = range(5)
    assert device.waited == [1]
    assert ring.commit(5).tolist() == [0, 1, 2, 3, 4]
