"""Steps that were scheduled and whose result has not been applied yet.

Owns one record per step, in order, and which of its results are void.  Must not know requests beyond their ids.
Layer: L5 (scheduler).
"""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass, field

from vllm.v1.core.sched.output import SchedulerOutput


@dataclass(slots=True)
class BlockUse:
    """The blocks a request uses or used, each with the tokens ``[start, end)`` it holds.

    ``num_confirmed``: tokens whose computation (or load) was known to have succeeded.
    """

    request_id: str
    num_confirmed: int
    spans: dict[int, tuple[int, int]]

    def blocks_after(self, num_tokens: int) -> set[int]:
        """The blocks that hold tokens after the first ``num_tokens``."""
        return {block for block, (_, end) in self.spans.items() if end > num_tokens}

    def first_in(self, blocks: set[int]) -> int | None:
        """The first token that lies in one of ``blocks``."""
        return min((span[0] for block, span in self.spans.items() if block in blocks), default=None)


@dataclass(slots=True)
class StepRecord:
    """One step in flight.

    ``partial``: requests whose prompt the step does not finish, so that it samples nothing for them.
    ``stale``: requests preempted since; their tokens are still wanted, their counters are not.
    ``dropped``: requests whose result must be ignored, whoever owns the id by now.
    ``sync_loads``: requests whose load has to end within the step, each with the first token that is loaded.
    """

    output: SchedulerOutput
    seq: int
    partial: set[str]
    stale: set[str] = field(default_factory=set)
    dropped: set[str] = field(default_factory=set)
    sync_loads: dict[str, int] = field(default_factory=dict)


class InFlightSteps:
    """Steps in the order in which they were scheduled; the result of each is found by its output, whichever comes first."""

    def __init__(self) -> None:
        self._records: deque[StepRecord] = deque()
        self._departed: deque[tuple[int, BlockUse]] = deque()

    def __len__(self) -> int:
        return len(self._records)

    def has_tokens(self) -> bool:
        """True if some step in flight computes anything."""
        return any(record.output.total_num_scheduled_tokens for record in self._records)

    def push(self, record: StepRecord) -> None:
        """Remember a step that was just scheduled."""
        self._records.append(record)

    def pop(self, output: SchedulerOutput) -> StepRecord | None:
        """Take the record of ``output``; None if it is unknown (then nothing changes)."""
        for index, record in enumerate(self._records):
            if record.output is output:
                del self._records[index]
                return record
        return None

    def partial_prefills(self, output: SchedulerOutput) -> set[str]:
        """Requests of the step for which nothing is sampled; empty for an unknown step."""
        for record in self._records:
            if record.output is output:
                return record.partial
        return set()

    def drop_request(self, request_id: str) -> None:
        """Ignore everything that is under way for the request."""
        for record in self._records:
            if request_id in record.output.num_scheduled_tokens:
                record.stale.discard(request_id)
                record.dropped.add(request_id)

    def make_stale(self, request_id: str) -> int:
        """Keep the tokens that are under way, detached from the counters.  Returns how many steps will bring some."""
        num_outputs = 0
        for record in self._records:
            if request_id not in record.output.num_scheduled_tokens or request_id in record.dropped:
                continue
            record.stale.add(request_id)
            num_outputs += request_id not in record.partial
        return num_outputs

    def drop_stale(self, request_id: str) -> None:
        """Ignore tokens under way that the request was preempted from."""
        for record in self._records:
            if request_id in record.stale:
                record.stale.discard(request_id)
                record.dropped.add(request_id)

    def unconfirmed_load_start(self, request_id: str) -> int | None:
        """The first token of the request's own load that is not confirmed yet."""
        starts = [
            record.sync_loads[request_id] for record in self._records if request_id in record.sync_loads
        ]
        return min(starts, default=None)

    # --- block tables given back while steps are in flight ----------------------------------------------------------

    def add_departed(self, use: BlockUse) -> None:
        """Remember a table until every step now in flight has been processed: one of them may turn out to have failed.

        Without steps in flight nothing is kept.
        """
        if self._records:
            self._departed.append((self._records[-1].seq, use))

    def block_copies(self) -> list[tuple[int, int]]:
        """(source, target) of the block copies that steps in flight perform, in their order."""
        return [copy for record in self._records for copy in record.output.kv_cache_block_copies or ()]

    def departed_since(self, seq: int) -> list[BlockUse]:
        """Tables given back while the step ``seq`` was in flight."""
        return [use for last_seq, use in self._departed if last_seq >= seq]

    def forget_departed(self, processed_seq: int) -> None:
        """Drop tables that no step in flight has to do with any more."""
        while self._departed and self._departed[0][0] <= processed_seq:
            self._departed.popleft()
