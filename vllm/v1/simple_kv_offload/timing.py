"""What loads and prefill steps take on this rank, measured where they happen.

Owns the measurement and what of it was not reported yet. It must not judge it. Layer L6.
"""

from __future__ import annotations

from collections import deque

import torch

from vllm.utils.clock import Clock
from vllm.v1.simple_kv_offload.copy_backends.base import CopyResult
from vllm.v1.simple_kv_offload.metadata import Timings

Mark = torch.cuda.Event | float


class StepTimer:
    """Times the steps that say how many prompt tokens they compute, on the device where there is one.

    The step's work is timed from `start` to `stop`; on a CUDA device by events, so that nothing waits.
    """

    def __init__(self, clock: Clock, device: torch.device | None) -> None:
        self._clock = clock
        self._on_device = device is not None and device.type == "cuda"
        self._started: tuple[Mark, int] | None = None
        self._open: deque[tuple[Mark, Mark, int]] = deque()
        self._timings = Timings()

    def start(self, num_tokens: int) -> None:
        """A step begins; with 0 tokens it is not timed."""
        self._started = (self._mark(), num_tokens) if num_tokens > 0 else None

    def stop(self) -> None:
        """The step's work has been given to the device, or was done."""
        if self._started is not None:
            start, num_tokens = self._started
            self._open.append((start, self._mark(), num_tokens))
            self._started = None

    def drop(self) -> None:
        """The step is over, be it without `stop`."""
        self._started = None

    def loaded(self, result: CopyResult | None, num_blocks: int) -> None:
        """A load has ended; one that failed, or whose mover tells no time, does not count."""
        if result is not None and result.error is None and result.seconds is not None:
            self._timings.load_seconds += result.seconds
            self._timings.load_blocks += num_blocks

    def stored(self, result: CopyResult | None) -> None:
        """A store has ended well."""
        if result is not None and result.seconds is not None:
            self._timings.store_seconds += result.seconds

    @property
    def has_any(self) -> bool:
        """Whether `take` may have something."""
        return bool(self._open) or self._timings.load_blocks > 0

    def take(self) -> Timings:
        """What was measured since the last call."""
        while self._open:
            start, end, num_tokens = self._open[0]
            seconds = _elapsed(start, end)
            if seconds is None:
                break
            self._open.popleft()
            self._timings.prefill_seconds += seconds
            self._timings.prefill_tokens += num_tokens
        taken, self._timings = self._timings, Timings()
        return taken

    def _mark(self) -> Mark:
        if not self._on_device:
            return self._clock.monotonic()
        event = torch.cuda.Event(enable_timing=True)
        event.record()
        return event


def _elapsed(start: Mark, end: Mark) -> float | None:
    """Seconds between two marks; None while the device has not come to the second."""
    if isinstance(start, float) or isinstance(end, float):
        assert isinstance(start, float)
        assert isinstance(end, float)
        return end - start
    return start.elapsed_time(end) / 1000 if end.query() else None
