"""This rank's moves between host memory and the disk below it: orders → copies, results → reports.

Owns the copies under way and which orders never arrived. It must not know why blocks move. Layer L6.
"""

from __future__ import annotations

from dataclasses import dataclass, field

from vllm.logger import init_logger
from vllm.v1.simple_kv_offload.copy_backends.base import CopyBackend, CopyResult, EventsList
from vllm.v1.simple_kv_offload.metadata import (
    INVALID_JOB_ID,
    DiskOrder,
    SimpleCPUOffloadMetadata,
    SimpleCPUOffloadWorkerMetadata,
    Timings,
)

logger = init_logger(__name__)


@dataclass(slots=True)
class _OpenMove:
    """A move until its result is in. The backend fills ``events`` when it has taken the job."""

    event_idx: int
    num_blocks: int = 0
    events: EventsList = field(default_factory=list)

    @property
    def result(self) -> CopyResult | None:
        event = self.events[0][1] if self.events else None
        return event if isinstance(event, CopyResult) else None


class _Direction:
    """Orders of one direction. Without a backend every order fails."""

    def __init__(self, backend: CopyBackend | None, *, is_store: bool) -> None:
        self._backend = backend
        self._is_store = is_store
        self._order = DiskOrder()
        self._last_seen = INVALID_JOB_ID
        self._failed: list[int] = []
        self.open: list[_OpenMove] = []

    def bind(self, order: DiskOrder) -> None:
        """Take the step's order; those of steps that never got as far as here end as failed."""
        self._failed += [e for e in range(self._last_seen + 1, order.issued + 1) if e != order.event]
        self._last_seen = max(self._last_seen, order.issued)
        self._order = order

    def start(self) -> None:
        """Start the step's move."""
        order, self._order = self._order, DiskOrder()
        if order.event == INVALID_JOB_ID:
            return
        if self._backend is None:
            self._failed.append(order.event)
            return
        move = _OpenMove(order.event, len(order.src_blocks))
        self.open.append(move)
        self._backend.launch_copy(
            order.src_blocks, order.dst_blocks, self._is_store, order.event, move.events
        )

    def drop(self) -> None:
        """The step is over; an order that it did not get round to has failed."""
        order, self._order = self._order, DiskOrder()
        if order.event != INVALID_JOB_ID:
            self._failed.append(order.event)

    def collect(self, completed: dict[int, int], failed: dict[int, int], timings: Timings) -> set[int]:
        """Enter what ended since the last call; returns sources with unusable content."""
        bad: set[int] = set()
        still_open = []
        for move in self.open:
            result = move.result
            if result is None or not result.query():
                still_open.append(move)
            elif result.error is None:
                completed[move.event_idx] = 1
                self._note_time(move, result.seconds or 0.0, timings)
            else:
                failed[move.event_idx] = 1
                bad |= result.bad_blocks
                what = "write to" if self._is_store else "read from"
                logger.error("KV offload: %s the disk tier failed: %s", what, result.error)
        self.open = still_open
        failed.update(dict.fromkeys(self._failed, 1))
        self._failed = []
        return bad

    def _note_time(self, move: _OpenMove, seconds: float, timings: Timings) -> None:
        if self._is_store:
            timings.disk_store_seconds += seconds
        elif seconds:
            timings.disk_seconds += seconds
            timings.disk_blocks += move.num_blocks


class DiskMoves:
    """Both directions over one backend, whose device side is host memory."""

    def __init__(self, backend: CopyBackend | None) -> None:
        self.backend = backend
        self._down = _Direction(backend, is_store=True)
        self._up = _Direction(backend, is_store=False)

    def bind(self, metadata: SimpleCPUOffloadMetadata) -> None:
        """Set the orders of this step."""
        self._down.bind(metadata.move_down)
        self._up.bind(metadata.move_up)

    def start(self) -> None:
        """Start them. They depend on nothing that the step computes."""
        self._down.start()
        self._up.start()

    def drop(self) -> None:
        """The step is over."""
        self._down.drop()
        self._up.drop()

    def report_to(self, report: SimpleCPUOffloadWorkerMetadata) -> None:
        """Enter what ended since the last call."""
        self._down.collect(report.completed_moves_down, report.failed_moves_down, report.timings)
        bad = self._up.collect(report.completed_moves_up, report.failed_moves_up, report.timings)
        report.bad_disk_blocks |= bad
        report.disk_missing = self.backend is None and bool(report.failed_moves_down)

    @property
    def open_results(self) -> list[CopyResult]:
        """Results of the moves that are under way."""
        moves = (*self._down.open, *self._up.open)
        return [move.result for move in moves if move.result is not None]

    def check_health(self) -> None:
        """See `CopyBackend.check_health`."""
        if self.backend is not None:
            self.backend.check_health()

    def shutdown(self) -> None:
        """End threads, remove the file unless it is kept. Idempotent."""
        if self.backend is not None:
            self.backend.shutdown()
