"""Copy lanes of one rank: jobs move slot by slot whenever the driver lets them, and may fail, stall or report late."""

from __future__ import annotations

import random
from dataclasses import dataclass, field

from tests.sim.device import Memory


@dataclass
class CopyJob:
    """One load or store event on one rank. `requests` are those of a load, with their number of block pairs."""

    event: int
    is_store: bool
    """Away from the device."""
    pairs: list[tuple[int, int]]
    requests: list[tuple[str, int]] = field(default_factory=list)
    fails_at: int | None = None
    """Stop with an error once that many pairs are done."""
    bad_source: bool = False
    stalled: bool = False
    done_pairs: int = 0
    slot: int = 0
    failed: bool = False
    is_move: bool = False
    """Between the host and the disk below it, not between device and host."""

    @property
    def name(self) -> str:
        """For messages."""
        kind = (
            ("move down" if self.is_store else "move up")
            if self.is_move
            else ("store" if self.is_store else "load")
        )
        return f"{kind} {self.event}"

    @property
    def target_tier(self) -> str:
        """The tier below the device that the job writes; empty for loads."""
        if self.is_move:
            return "disk" if self.is_store else "host"
        return "host" if self.is_store else ""

    @property
    def source_tier(self) -> str:
        """The tier below the device that the job reads; empty for stores."""
        if self.is_move:
            return "host" if self.is_store else "disk"
        return "" if self.is_store else "host"

    @property
    def finished(self) -> bool:
        """Nothing more will move."""
        return self.failed or self.done_pairs == len(self.pairs)

    def failed_requests(self) -> set[str]:
        """Requests of a load whose blocks did not all arrive."""
        if not self.failed:
            return set()
        lost = set()
        first = 0
        for request_id, count in self.requests:
            if first + count > self.done_pairs:
                lost.add(request_id)
            first += count
        return lost


class Lanes:
    """The jobs of one rank. `host` is the memory of the lower tier, disk or not."""

    def __init__(self, device: Memory, host: Memory, disk: Memory) -> None:
        self.device = device
        self.host = host
        self.disk = disk
        self.running: list[CopyJob] = []
        self.unreported: list[CopyJob] = []

    def submit(self, job: CopyJob) -> None:
        """Start a job; it may run from now on."""
        self.running.append(job)
        self._retire()

    @property
    def busy(self) -> bool:
        """Something runs or waits for its report."""
        return bool(self.running or self.unreported)

    def movable(self) -> list[CopyJob]:
        """Jobs that can make progress."""
        return [job for job in self.running if not job.stalled]

    def advance(self, rng: random.Random) -> None:
        """Move a few slots of one job, any of those that run."""
        jobs = self.movable()
        if not jobs:
            return
        job = rng.choice(jobs)
        for _ in range(rng.choice((1, 3, 8, 40))):
            if job.finished:
                break
            self._move_slot(job)
        self._retire()

    def finish_all(self, *, but_stalled: bool = False) -> None:
        """Let everything run to its end."""
        for job in self.movable() if but_stalled else self.running:
            job.stalled = False
            while not job.finished:
                self._move_slot(job)
        self._retire()

    def _move_slot(self, job: CopyJob) -> None:
        if job.fails_at is not None and job.done_pairs >= job.fails_at:
            job.failed = True
            return
        source_id, target_id = job.pairs[job.done_pairs]
        inner, outer = (self.host, self.disk) if job.is_move else (self.device, self.host)
        source_memory, target_memory = (inner, outer) if job.is_store else (outer, inner)
        source, target = source_memory.page(source_id), target_memory.page(target_id)
        if source.bad and not job.is_store:
            job.failed = job.bad_source = True
            return
        target.copy_slot(source, job.slot)
        job.slot += 1
        if job.slot >= max(1, len(source.slots)):
            job.slot = 0
            job.done_pairs += 1

    def _retire(self) -> None:
        self.unreported += [job for job in self.running if job.finished]
        self.running = [job for job in self.running if not job.finished]
