"""A few threads that share the parts of one job.

Owns their life. It must not know what a part does. Layer L6.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from queue import Empty, SimpleQueue

Part = Callable[[], None]


class _Batch:
    """Parts that were given out together: how many are left, and the first error."""

    def __init__(self, size: int) -> None:
        self._left = size
        self._lock = threading.Lock()
        self.error: BaseException | None = None
        self.done = threading.Event()

    def run(self, part: Part) -> None:
        error: BaseException | None = None
        try:
            # After an error the rest is of no use.
            if self.error is None:
                part()
        except BaseException as raised:  # the thread's edge: an error is a result
            error = raised
        with self._lock:
            self.error = self.error or error
            self._left -= 1
            if self._left == 0:
                self.done.set()


class Gang:
    """``size`` threads at work together, the caller's own included. The others are started when first needed.

    For one caller at a time. They are daemons: one that hangs in a read holds nobody up at the end.
    """

    def __init__(self, size: int) -> None:
        self._size = size
        self._queue: SimpleQueue[tuple[_Batch, Part] | None] = SimpleQueue()
        self._threads: list[threading.Thread] = []

    def run(self, parts: Sequence[Part]) -> None:
        """Run all parts; the first error is raised when none runs any more."""
        if len(parts) <= 1 or self._size <= 1:
            for part in parts:
                part()
            return
        self._start(min(self._size, len(parts)) - 1)
        batch = _Batch(len(parts))
        for part in parts:
            self._queue.put((batch, part))
        while (entry := self._take()) is not None:
            entry[0].run(entry[1])
        batch.done.wait()
        if batch.error is not None:
            raise batch.error

    def close(self, timeout_s: float) -> None:
        """End the threads when they are idle; waits for each at most so long."""
        for _ in self._threads:
            self._queue.put(None)
        for thread in self._threads:
            thread.join(timeout_s)

    def _take(self) -> tuple[_Batch, Part] | None:
        try:
            return self._queue.get_nowait()
        except Empty:
            return None

    def _start(self, count: int) -> None:
        while len(self._threads) < count:
            thread = threading.Thread(target=self._work, name="kv-offload-disk-part", daemon=True)
            self._threads.append(thread)
            thread.start()

    def _work(self) -> None:
        while (entry := self._queue.get()) is not None:
            entry[0].run(entry[1])
