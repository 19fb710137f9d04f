"""Limits of the waiting queue, checked before a request enters the core.  Layer L7.

Owns the counts of refusals. Must not know sockets or HTTP.
"""

from __future__ import annotations

from vllm.config import SchedulerConfig
from vllm.exceptions import MaxQueuedTokensError, QueueOverflowError

REASONS = ("max_num_queued_reqs", "max_num_queued_tokens")


class AdmissionControl:
    """Refuses a request as a whole (never some of its n children) while too much waits. `rejections` by reason."""

    def __init__(self, scheduler_config: SchedulerConfig) -> None:
        self.max_requests = scheduler_config.max_num_queued_reqs
        self.max_tokens = scheduler_config.max_num_queued_tokens
        self.rejections: dict[str, int] = dict.fromkeys(REASONS, 0)

    @property
    def is_limited(self) -> bool:
        """False if nothing is ever refused, so that nothing need be counted."""
        return self.max_requests is not None or self.max_tokens is not None

    def check(self, queued_requests: int, queued_tokens: int, new_requests: int, new_tokens: int) -> None:
        """Raise QueueOverflowError or MaxQueuedTokensError; an empty queue takes any request."""
        limit = self.max_requests
        if limit is not None and queued_requests and queued_requests + new_requests > limit:
            self.rejections["max_num_queued_reqs"] += 1
            raise QueueOverflowError(
                f"{queued_requests} requests wait and {new_requests} more would exceed max_num_queued_reqs={limit}"
            )
        limit = self.max_tokens
        if limit is not None and queued_tokens and queued_tokens + new_tokens > limit:
            self.rejections["max_num_queued_tokens"] += 1
            raise MaxQueuedTokensError(
                f"{queued_tokens} prompt tokens wait and {new_tokens} more would exceed max_num_queued_tokens={limit}"
            )
