"""What the halves of an offload with a spec from outside exchange: jobs, their ends and what they took.

Owns records only: those of the one machinery, with the jobs that its orders stand for. Layer L4.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from vllm.v1.kv_connector_types import KVConnectorWorkerMetadata
from vllm.v1.kv_offload.base import LoadStoreSpec
from vllm.v1.simple_kv_offload.metadata import SimpleCPUOffloadMetadata, SimpleCPUOffloadWorkerMetadata


@dataclass(slots=True)
class TransferJob:
    """One copy of one request. Without a source or a target nothing can be copied: the job fails.

    ``sync``: the step waits for it.
    """

    req_id: str
    src_spec: LoadStoreSpec | None
    dst_spec: LoadStoreSpec | None
    sync: bool = False


class OffloadingConnectorMetadata(SimpleCPUOffloadMetadata):
    """The jobs of a step by number, in the order of the machinery's orders. Numbers are never used again.

    ``jobs_to_flush`` stays None: references protect the blocks of jobs under way, so nobody need wait for them.
    """

    def __init__(
        self,
        load_jobs: Mapping[int, TransferJob],
        store_jobs: Mapping[int, TransferJob],
        jobs_to_flush: set[int] | None = None,
        *,
        orders: SimpleCPUOffloadMetadata | None = None,
    ) -> None:
        super().__init__()
        if orders is not None:
            vars(self).update(vars(orders))
        self.load_jobs = dict(load_jobs)
        self.store_jobs = dict(store_jobs)
        self.jobs_to_flush = jobs_to_flush


@dataclass(slots=True)
class DirectionalTransferStats:
    """Jobs that ended well in one direction: their bytes, their seconds, the bytes of each."""

    bytes: int = 0
    time: float = 0.0
    sizes: list[int] = field(default_factory=list)

    def record(self, num_bytes: int, seconds: float) -> None:
        """One more job."""
        self.bytes += num_bytes
        self.time += seconds
        self.sizes.append(num_bytes)

    def plus(self, other: DirectionalTransferStats) -> DirectionalTransferStats:
        """The sum, as a new record."""
        return DirectionalTransferStats(
            self.bytes + other.bytes, self.time + other.time, self.sizes + other.sizes
        )


@dataclass(slots=True)
class TransferStats:
    """Both directions."""

    load: DirectionalTransferStats = field(default_factory=DirectionalTransferStats)
    store: DirectionalTransferStats = field(default_factory=DirectionalTransferStats)

    def plus(self, other: TransferStats) -> TransferStats:
        """The sum, as a new record."""
        return TransferStats(self.load.plus(other.load), self.store.plus(other.store))


class OffloadingWorkerMetadata(SimpleCPUOffloadWorkerMetadata):
    """How many ranks have ended each job since the last report, well or badly, and what the jobs took.

    ``given_up_*``: ranks whose worker did not tell the end of a job in time. It may still copy, until ``ended_late``, which
    is part of ``completed_jobs`` too.
    """

    def __init__(
        self,
        completed_jobs: Mapping[int, int] | None = None,
        transfer_stats: TransferStats | None = None,
        *,
        report: SimpleCPUOffloadWorkerMetadata | None = None,
    ) -> None:
        super().__init__()
        if report is not None:
            vars(self).update(vars(report))
        self.completed_jobs: dict[int, int] = dict(completed_jobs or {})
        self.transfer_stats = transfer_stats or TransferStats()
        self.given_up_loads: dict[int, int] = {}
        self.given_up_stores: dict[int, int] = {}
        self.ended_late: dict[int, int] = {}

    def mark_completed(self, job_id: int) -> None:
        """This rank has ended the job."""
        self.completed_jobs[job_id] = self.completed_jobs.get(job_id, 0) + 1

    def with_orders(self, report: SimpleCPUOffloadWorkerMetadata) -> OffloadingWorkerMetadata:
        """The same jobs beside what the machinery reports, as a new record."""
        both = OffloadingWorkerMetadata(self.completed_jobs, self.transfer_stats, report=report)
        for own, added in zip(both._counts(), self._counts(), strict=True):
            own.update(added)
        return both

    def _counts(self) -> tuple[dict[int, int], ...]:
        return self.completed_jobs, self.given_up_loads, self.given_up_stores, self.ended_late

    def aggregate(self, other: KVConnectorWorkerMetadata) -> OffloadingWorkerMetadata:
        """The sum of both reports, as a new record."""
        if not isinstance(other, OffloadingWorkerMetadata):
            raise TypeError(f"cannot aggregate {type(other).__name__} into a report of offloading jobs")
        total = OffloadingWorkerMetadata(
            None, self.transfer_stats.plus(other.transfer_stats), report=super().aggregate(other)
        )
        for counts, mine, theirs in zip(total._counts(), self._counts(), other._counts(), strict=True):
            counts.update(mine)
            for job_id, count in theirs.items():
                counts[job_id] = counts.get(job_id, 0) + count
        return total
