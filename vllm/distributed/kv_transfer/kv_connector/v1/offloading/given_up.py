"""Jobs that workers from outside have not told the end of in time: their copies have failed, and may go on all the same.

Owns the hold on device blocks that such a load may still write, and what the manager is told when the job is over. It
must not know requests, nor why a job was given up. Layer L4.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass

from vllm.distributed.kv_transfer.kv_connector.v1.offloading.common import OffloadingWorkerMetadata
from vllm.v1.core.block_lease import Lease
from vllm.v1.kv_offload.base import OffloadKey, ReqContext


@dataclass(frozen=True, slots=True)
class Prepared:
    """What the manager has prepared for a job and has to be told the end of."""

    job: int
    ctx: ReqContext
    keys: list[OffloadKey]


class GivenUpJobs:
    """By job, on how many ranks it may still copy. Job numbers rise and are never used again."""

    def __init__(self) -> None:
        self._loads: dict[int, int] = {}
        self._stores: dict[int, int] = {}
        self._holds: dict[int, Lease] = {}
        self._then: dict[int, Callable[[], None]] = {}

    def __contains__(self, job: int | None) -> bool:
        return job in self._loads or job in self._stores

    @property
    def has_load(self) -> bool:
        """Whether the workers do not get on with loads."""
        return bool(self._loads)

    @property
    def has_store(self) -> bool:
        """Whether the workers do not get on with stores."""
        return bool(self._stores)

    def has_before(self, job: int) -> bool:
        """Whether a job with a lower number may still copy."""
        return any(other < job for other in (*self._loads, *self._stores))

    @property
    def device_blocks(self) -> set[int]:
        """Ids of the device blocks that are held; O(blocks)."""
        return {
            block.block_id for lease in self._holds.values() for block in lease.blocks if not block.is_null
        }

    def hold(self, job: int, lease: Lease) -> None:
        """The blocks of the lease are nobody else's until the job is over."""
        self._holds[job] = lease

    def when_over(self, job: int, call: Callable[[], None]) -> None:
        """Call this once when the job is over."""
        self._then[job] = call

    def forget_calls(self) -> None:
        """Nobody wants to hear of jobs that are given up by now; their blocks stay held."""
        self._then.clear()

    def report(self, report: OffloadingWorkerMetadata) -> None:
        """What a step's report says of jobs that were given up or have ended after all."""
        _add(self._loads, report.given_up_loads)
        _add(self._stores, report.given_up_stores)
        for job, count in report.ended_late.items():
            ranks = self._loads if job in self._loads else self._stores
            if job not in ranks:
                continue
            ranks[job] -= count
            if ranks[job] <= 0:
                del ranks[job]
                self._end(job)

    def _end(self, job: int) -> None:
        lease = self._holds.pop(job, None)
        if lease is not None:
            lease.release()
        call = self._then.pop(job, None)
        if call is not None:
            call()


def _add(counts: dict[int, int], more: Mapping[int, int]) -> None:
    for job, count in more.items():
        counts[job] = counts.get(job, 0) + count
