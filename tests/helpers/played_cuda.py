"""A CUDA device that is played: streams with events between them, the driver's copies and pins, on memory of this process.

Nothing that a stream was given happens before `Device.run`, and the driver uses every freedom that it is given: a source
that may be read in any order is read at once, the arrays of a call are gone when the call ends.
"""

from __future__ import annotations

import ctypes
import threading
import time
import weakref
from collections import deque
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch

from vllm import _custom_ops as ops
from vllm.v1.simple_kv_offload import cuda_mem_ops
from vllm.v1.simple_kv_offload.copy_backends import cuda_gather

Step = Callable[[], bool]
"""Does its part and returns True, or False if it has to wait."""
ALREADY_REGISTERED = 712


class Stream:
    """What was put into it happens in order. ``priority``: the least is 0."""

    def __init__(self, device: Device, priority: int = 0) -> None:
        self.device, self.priority = device, priority
        self.steps: deque[Step] = deque()
        self.cuda_stream = id(self)
        device.streams[self.cuda_stream] = self

    @staticmethod
    def priority_range() -> tuple[int, int]:
        return 0, -5

    def put(self, action: Callable[[], object]) -> None:
        def step() -> bool:
            action()
            return True

        with self.device.lock:
            self.steps.append(step)

    def wait_event(self, event: Event) -> None:
        due = event.records
        with self.device.lock:
            self.steps.append(lambda: event.passed >= due)

    def synchronize(self) -> None:
        self.device.run(self)
        if self.steps:
            self.device.run()


class Event:
    """``error``: what the device tells whoever asks for the event."""

    device: Device

    def __init__(self, enable_timing: bool = False) -> None:
        self.has_time = enable_timing
        self.records = self.passed = 0
        self.error: str | None = None

    def record(self, stream: Stream | None = None) -> None:
        self.records += 1
        number = self.records
        (stream or self.device.compute).put(lambda: setattr(self, "passed", number))

    def query(self) -> bool:
        if self.error is not None:
            raise RuntimeError(self.error)
        return self.passed == self.records

    def synchronize(self) -> None:
        self.device.run()
        assert self.query()

    def elapsed_time(self, end: Event) -> float:
        assert self.has_time
        assert end.has_time
        assert self.query()
        assert end.query()
        return 1500.0


class Device:
    """``compute`` is the stream of the model. ``batches``: the access orders of the driver's calls so far.

    ``has_failed``: every call is refused from now on, as after an illegal access. ``refuses``: copies are, with this message.
    """

    def __init__(self) -> None:
        self.lock = threading.RLock()
        self.streams: dict[int, Stream] = {}
        self.compute = Stream(self)
        self.batches: list[int] = []
        self.pinned: dict[int, int] = {}
        self.refuses: str | None = None
        self.has_failed = False
        self.set_by: set[int] = set()
        self.waited_for: list[Any] = []
        self._local = threading.local()

    @property
    def current(self) -> Stream:
        stream: Stream = getattr(self._local, "stream", self.compute)
        return stream

    @contextmanager
    def on(self, stream: Stream) -> Iterator[None]:
        self._local.stream = stream
        yield
        self._local.stream = self.compute

    def run(self, *streams: Stream) -> None:
        """Let these streams, else all, get on as far as they can."""
        with self.lock:
            moved = True
            while moved:
                moved = False
                for stream in streams or self.streams.values():
                    while stream.steps and stream.steps[0]():
                        stream.steps.popleft()
                        moved = True

    def wait_for(self, stream: Stream) -> None:
        """Until the lane's thread has put something into the stream."""
        deadline = time.monotonic() + 10.0
        while not stream.steps:
            assert time.monotonic() < deadline, "nothing was issued"
            time.sleep(0.001)

    # What the program calls

    def synchronize(self, device: Any = None) -> None:
        self.waited_for.append(device)
        if self.has_failed:
            raise RuntimeError("CUDA error: an illegal memory access was encountered")
        self.run()

    def set_device(self, device: Any) -> None:
        self.set_by.add(threading.get_ident())

    def make_stream(self, device: Any, priority: int = 0) -> Stream:
        return Stream(self, priority)

    def copy(self, source: int, target: int, size: int, stream: Stream, *, any_order: bool) -> None:
        assert threading.get_ident() in self.set_by, "a thread that has not chosen its device"
        early = ctypes.string_at(source, size) if any_order else None
        stream.put(
            lambda: ctypes.memmove(
                target, early if early is not None else ctypes.string_at(source, size), size
            )
        )

    def copy_by_kernel(self, target: Any, source: Any, to: torch.Tensor, of: torch.Tensor) -> None:
        """The ids are read when the kernel runs, in memory that somebody must hold until then."""
        held = [weakref.ref(ids._base) for ids in (to, of) if ids._base is not None]
        assert len(held) == 2

        def kernel() -> None:
            ids = held[0]()
            assert ids is not None, "the kernel reads ids that are gone"
            target[ids[1]] = source[ids[0]]

        self.current.put(kernel)


class Driver:
    """``library["name"]`` as ctypes has it, with the functions of these names only."""

    def __init__(self, device: Device, batch: str | None = "cuMemcpyBatchAsync_v2") -> None:
        self._device = device
        self._functions = (
            {} if batch is None else {batch: self._batch_v1 if batch[-1] == "c" else self._batch}
        )

    def __getitem__(self, name: str) -> Callable[..., int]:
        if name not in self._functions:
            raise AttributeError(name)
        return self._functions[name]

    def _batch_v1(self, *arguments: Any) -> int:
        *others, fail_index, stream = arguments
        assert isinstance(fail_index._obj, ctypes.c_size_t)
        return self._batch(*others, stream)

    def _batch(
        self,
        dsts: Any,
        srcs: Any,
        sizes: Any,
        count: Any,
        attrs: Any,
        attrs_idx: Any,
        num_attrs: Any,
        stream: Any,
    ) -> int:
        if self._device.refuses is not None:
            return 1
        assert (attrs_idx._obj.value, num_attrs.value) == (0, 1)
        assert ctypes.sizeof(attrs._obj) == 24, "two words for each place, one for the order, one of flags"
        order = attrs._obj.srcAccessOrder
        self._device.batches.append(order)
        columns = [
            (ctypes.c_uint64 * count.value).from_address(column.value) for column in (srcs, dsts, sizes)
        ]
        for source, target, size in zip(*columns, strict=True):
            self._device.copy(source, target, size, self._device.streams[stream.value], any_order=order == 3)
        return 0

    def cuMemcpyAsync(self, target: Any, source: Any, size: Any, stream: Any) -> int:
        self._device.batches.append(0)
        given = (source.value, target.value, size.value)
        self._device.copy(*given, self._device.streams[stream.value], any_order=False)
        return 0

    def cuGetErrorString(self, code: Any, text: Any) -> int:
        text._obj.value = (self._device.refuses or "already registered").encode()
        return 0

    def cuMemHostRegister_v2(self, address: Any, size: Any, flags: Any) -> int:
        first, last = address.value // 4096, (address.value + size.value - 1) // 4096
        for start, length in self._device.pinned.items():
            if first <= (start + length - 1) // 4096 and last >= start // 4096:
                return ALREADY_REGISTERED
        self._device.pinned[address.value] = size.value
        return 0

    def cuMemHostUnregister(self, address: Any) -> int:
        if self._device.has_failed:
            return 700
        del self._device.pinned[address.value]
        return 0

    def cuMemHostGetDevicePointer_v2(self, seen: Any, address: Any, flags: Any) -> int:
        pinned = any(at <= address.value < at + size for at, size in self._device.pinned.items())
        seen._obj.value = address.value if pinned else None
        return int(not pinned)


def play_cuda(
    monkeypatch: pytest.MonkeyPatch, *, batch: str | None = "cuMemcpyBatchAsync_v2", has_kernel: bool = True
) -> Device:
    """From now on this process has such a device. ``batch``: which batched copy the driver has, if any."""
    device = Device()
    event = type("PlayedEvent", (Event,), {"device": device})
    for name, played in {
        "Event": event,
        "Stream": type("PlayedStream", (), {"__new__": lambda cls, *a, **k: device.make_stream(*a, **k)}),
        "set_device": device.set_device,
        "stream": device.on,
        "synchronize": device.synchronize,
        "current_stream": lambda _=None: device.current,
    }.items():
        monkeypatch.setattr(torch.cuda, name, played)
    monkeypatch.setattr(torch.cuda.Stream, "priority_range", Stream.priority_range, raising=False)
    driver, choose = Driver(device, batch), cuda_mem_ops._batch_copy.__wrapped__
    monkeypatch.setattr(cuda_mem_ops, "_driver", lambda: driver)
    monkeypatch.setattr(cuda_mem_ops, "_batch_copy", choose)
    monkeypatch.setattr(cuda_gather, "_pinned", lambda ids: torch.tensor(ids, dtype=torch.int64))
    monkeypatch.setattr(ops, "can_copy_over_bus", lambda: has_kernel)
    monkeypatch.setattr(ops, "copy_blocks", device.copy_by_kernel)
    return device
