"""Keeps the table of a kept file up to date, on a thread of its own, and says what was found in it.

Owns the order of the updates and what happens when one is lost. It must not know why slots change. Layer L6.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from vllm.logger import init_logger
from vllm.utils.clock import Clock
from vllm.v1.simple_kv_offload.copy_backends.base import CopyJob, CopyResult
from vllm.v1.simple_kv_offload.copy_backends.disk_file import SlotFile
from vllm.v1.simple_kv_offload.copy_backends.kept_table import KeptTable, Row
from vllm.v1.simple_kv_offload.copy_backends.lane import SHUTDOWN_TIMEOUT_S, CopyLane
from vllm.v1.simple_kv_offload.metadata import KeptOrder, KeptSlot

logger = init_logger(__name__)

FAILURES_MAX = 3
"""Failed updates in a row after which nothing is kept any more."""
WITHDRAW_WAIT_S = 5.0
"""How long a withdrawal waits for the disk."""


@dataclass(slots=True)
class _Update(CopyJob):
    """Rows to write, after emptying the table if ``clears``; ``is_durable``: even a loss of power may not undo it."""

    rows: Sequence[Row] = ()
    clears: bool = False
    is_durable: bool = False


class Keeper:
    """Applies orders to the table in the background; the step never waits for the disk, only a withdrawal does.

    An update that is missing would leave a row that tells of content nobody should find. So the table is emptied
    when an order or a write was lost, and the scheduler is asked to send everything again (`take_lost`).
    """

    def __init__(self, table: KeptTable, file: SlotFile, clock: Clock, deadline_s: float) -> None:
        self._table = table
        self._file = file
        self._seen = KeptOrder()
        self._open: list[CopyResult] = []
        self._failures = 0
        self._lost = False
        self._must_clear = False
        self._late: CopyResult | None = None
        self._is_left_behind = False
        rows = table.rows()
        for row in rows:
            file.restore(row.slot, row.checksum)
        self.found: list[KeptSlot] = [KeptSlot(row.slot, row.keys) for row in rows]
        """What earlier runs left, oldest first."""
        self._lane: CopyLane | None = CopyLane("kv-offload-disk-table", self._apply, clock, deadline_s)

    def bind(self, order: KeptOrder) -> None:
        """Take the step's order."""
        self._take(order, is_durable=False)

    def withdraw(self, order: KeptOrder) -> str | None:
        """Take an order and wait until no restart can bring back what it takes away; else what stands in the way."""
        update = self._take(order, is_durable=True)
        if update is None:
            return f"{self._table.path} could not be removed" if self._is_left_behind else None
        is_stuck = self._late is not None and not self._late.query()
        if not update.result.synchronize(0.0 if is_stuck else WITHDRAW_WAIT_S):
            self._late = update.result
            return f"{self._table.path} was not written within {WITHDRAW_WAIT_S:g} s"
        # What is withdrawn may have been taken away by an update before it.
        counted = [update.result] if update.clears else self._open
        error = next((result.error for result in counted if result.error is not None), None)
        return None if error is None else f"{self._table.path} cannot be written: {error}"

    def _take(self, order: KeptOrder, *, is_durable: bool) -> _Update | None:
        """Queue what the order changes, durable or not; None if nothing does, or nothing is kept any more."""
        expected = self._seen.number + bool(order.slots)
        if order.number != expected:
            self._lost = self._must_clear = True
        clears = self._must_clear or order.clears != self._seen.clears
        self._seen = order
        rows = []
        for entry in order.slots:
            checksum = self._file.checksum(entry.slot)
            rows.append(Row(entry.slot, checksum or 0, entry.keys if checksum is not None else ()))
        if self._lane is None or not (rows or clears or is_durable):
            return None
        self._must_clear = False
        update = _Update((), (), True, order.number, rows=rows, clears=clears, is_durable=is_durable)
        self._open.append(update.result)
        self._lane.submit(update)
        return update

    def _apply(self, job: CopyJob) -> None:
        assert isinstance(job, _Update)
        if job.clears:
            self._table.clear()
        # A thread that was given up while it hung must not write what newer updates have replaced.
        if job.result.query():
            return
        self._table.write(job.rows)
        if job.is_durable:
            self._table.sync()
        job.result.resolve()

    def take_lost(self) -> bool:
        """Whether the table was, or has to be, emptied since the last call: everything should be sent again."""
        ended = [result for result in self._open if result.query()]
        self._open = [result for result in self._open if not result.query()]
        for result in ended:
            self._failures = 0 if result.error is None else self._failures + 1
            if result.error is not None and self._lane is not None:
                logger.error("KV offload: writing to %s failed: %s", self._table.path, result.error)
                self._lost = self._must_clear = True
        if self._failures >= FAILURES_MAX and self._lane is not None:
            self._stop()
        lost, self._lost = self._lost, False
        return lost and self._lane is not None

    def _stop(self) -> None:
        logger.error(
            "KV offload: after %d failed writes in a row to %s nothing is kept for the next start any more. "
            "The engine goes on.",
            self._failures,
            self._table.path,
        )
        self.shutdown(remove=True)

    def check_health(self) -> None:
        """See `CopyLane.check_health`."""
        if self._lane is not None:
            self._lane.check_health()

    def shutdown(self, *, remove: bool = False) -> None:
        """Write what is queued, or remove the table. Idempotent."""
        lane, self._lane = self._lane, None
        if lane is None:
            return
        written = not remove and all(result.synchronize(SHUTDOWN_TIMEOUT_S) for result in self._open)
        ended = lane.shutdown()
        # A thread that hangs in the file keeps it, and what is in there.
        self._is_left_behind = remove and not ended
        try:
            if ended:
                self._table.close(remove=remove)
        except OSError as error:
            self._is_left_behind = True
            logger.error("KV offload: %s cannot be removed: %s", self._table.path, error)
        if not (written or remove):
            logger.warning("KV offload: the last updates of %s were not written.", self._table.path)
