"""Helpers round a connector: combining the reports of all workers, and walking a step's block tables.

Owns the count of reports per request over ranks and steps. It must not know any connector. Layer L4.
"""

from __future__ import annotations

import copy
from collections.abc import Iterable, Iterator, Sequence

from vllm.distributed.kv_event_types import KVConnectorKVEvents
from vllm.distributed.kv_transfer.kv_connector.v1.base import KVConnectorBase_V1
from vllm.utils.checks import check
from vllm.v1.core.sched.output import BlockIds, SchedulerOutput
from vllm.v1.kv_connector_types import KVConnectorStats, KVConnectorWorkerMetadata, merge_worker_meta
from vllm.v1.outputs import EMPTY_MODEL_RUNNER_OUTPUT, KVConnectorOutput, ModelRunnerOutput


class KVOutputAggregator:
    """Combines the connector reports of all workers of a step into one.

    An id in ``finished_*`` is passed on once it was reported as often as expected, over any number
    of steps; whether any rank failed is told together with the last report. Entries vanish when
    complete, so the tables are bounded by the transfers in flight.
    """

    def __init__(self, expected_finished_count: int) -> None:
        check(expected_finished_count > 0, f"expected_finished_count is {expected_finished_count}")
        self._expected_finished_count = expected_finished_count
        self._send_remaining_count: dict[str, int] = {}
        self._recv_remaining_count: dict[str, int] = {}
        self._failed_recving: set[str] = set()
        self._deferred: list[KVConnectorOutput] = []

    @classmethod
    def from_connector(cls, connector: KVConnectorBase_V1, world_size: int) -> KVOutputAggregator:
        """Expects what the connector declares, else one report per rank."""
        return cls(connector.get_finished_count() or world_size)

    def aggregate(
        self, outputs: Sequence[ModelRunnerOutput | None], output_rank: int = 0
    ) -> ModelRunnerOutput | None:
        """The output of ``output_rank`` carrying the combined report.

        None if that rank has none; then nothing is consumed. Otherwise every rank must have one.
        """
        chosen = outputs[output_rank]
        if chosen is None:
            return None
        reports, self._deferred = self._deferred, []
        for rank, output in enumerate(outputs):
            check(output is not None, f"worker {rank} returned no output for the step")
            if output is not None and output.kv_connector_output is not None:
                reports.append(output.kv_connector_output)
        if chosen is EMPTY_MODEL_RUNNER_OUTPUT:
            if not reports:
                return chosen
            chosen = copy.copy(chosen)
        chosen.kv_connector_output = self._combine(reports)
        return chosen

    def ft_defer_kv_connector_outputs(
        self, outputs: Iterable[ModelRunnerOutput | KVConnectorOutput | None]
    ) -> None:
        """Keep the reports of workers whose step failed; the next ``aggregate`` takes them in.

        Their cache events are dropped: events count per step, and this step is void.
        """
        for output in outputs:
            report = output.kv_connector_output if isinstance(output, ModelRunnerOutput) else output
            if report is not None:
                report = copy.copy(report)
                report.kv_cache_events = None
                self._deferred.append(report)

    def _combine(self, reports: Iterable[KVConnectorOutput]) -> KVConnectorOutput:
        sent: set[str] = set()
        received: set[str] = set()
        invalid: set[int] = set()
        stats: KVConnectorStats | None = None
        events: KVConnectorKVEvents | None = None
        worker_meta: KVConnectorWorkerMetadata | None = None
        for report in reports:
            if report.expected_finished_count > 0:
                # The workers know better than the start-up value (a peer changed its size, say).
                self._expected_finished_count = report.expected_finished_count
            self._count(report.finished_sending, self._send_remaining_count, sent)
            self._failed_recving |= report.failed_recving
            self._count(report.finished_recving, self._recv_remaining_count, received)
            invalid |= report.invalid_block_ids
            stats = _merge_stats(stats, report.kv_connector_stats)
            worker_meta = merge_worker_meta(worker_meta, report.kv_connector_worker_meta)
            events = _merge_events(events, report.kv_cache_events)
        failed = self._failed_recving & received
        self._failed_recving -= failed
        return KVConnectorOutput(
            finished_sending=sent or None,
            finished_recving=received or None,
            kv_connector_stats=stats,
            kv_cache_events=events,
            kv_connector_worker_meta=worker_meta,
            invalid_block_ids=invalid,
            failed_recving=failed,
            expected_finished_count=self._expected_finished_count,
        )

    def _count(self, req_ids: set[str] | None, remaining: dict[str, int], complete: set[str]) -> None:
        for req_id in sorted(req_ids or ()):
            left = remaining.get(req_id, self._expected_finished_count) - 1
            if left <= 0:
                complete.add(req_id)
                remaining.pop(req_id, None)
            else:
                remaining[req_id] = left


def _merge_stats(total: KVConnectorStats | None, part: KVConnectorStats | None) -> KVConnectorStats | None:
    if total is None or part is None:
        return total if part is None else part
    return total.aggregate(part)


def _merge_events(
    total: KVConnectorKVEvents | None, part: KVConnectorKVEvents | None
) -> KVConnectorKVEvents | None:
    if total is None or part is None:
        return total if part is None else part
    total.add_events(part.get_all_events())
    total.increment_workers(1)
    return total


def yield_req_data(scheduler_output: SchedulerOutput) -> Iterator[tuple[str, BlockIds | None, bool]]:
    """``(request id, block ids per group or None, is the whole table)`` of new, then known requests.

    The third item is True for new and for resumed requests: their ids replace the table.
    """
    for new in scheduler_output.scheduled_new_reqs:
        yield new.req_id, new.block_ids, True
    cached = scheduler_output.scheduled_cached_reqs
    for req_id, block_ids in zip(cached.req_ids, cached.new_block_ids, strict=True):
        yield req_id, block_ids, req_id in cached.resumed_req_ids
