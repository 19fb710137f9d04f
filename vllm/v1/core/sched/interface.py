"""The contract of a scheduler as the engine core sees it.

Owns the abstract class.  Must not know any implementation.  Layer: L5 (scheduler).
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Collection, Iterable
from typing import Any

from vllm.config import KVEventsConfig
from vllm.distributed.kv_transfer.kv_connector.v1.base import KVConnectorBase_V1
from vllm.outputs import RequestError
from vllm.v1.core.sched.output import GrammarOutput, SchedulerOutput
from vllm.v1.kv_cache_report import CacheLookup, KVCacheReport
from vllm.v1.message_types import FinishReason, PauseState
from vllm.v1.messages import EngineCoreOutput, EngineCoreOutputs
from vllm.v1.metrics.cache_hit_source import CacheHitSource
from vllm.v1.metrics.stats import SchedulerStats
from vllm.v1.outputs import DraftTokenIds, ModelRunnerOutput
from vllm.v1.request import Request, RequestStatus


class SchedulerInterface(ABC):
    """Decides what the workers compute next, and applies what they report.

    One thread calls it.  Every :meth:`schedule` is followed, in the same order, by at most one
    :meth:`update_from_output` with its result.
    """

    @abstractmethod
    def schedule(self, throttle_prefills: bool = False) -> SchedulerOutput:
        """The next step; without work ``total_num_scheduled_tokens`` is 0.

        ``throttle_prefills`` holds back prefills while decodes run.
        """

    @abstractmethod
    def update_from_output(
        self, scheduler_output: SchedulerOutput, model_runner_output: ModelRunnerOutput
    ) -> dict[int, EngineCoreOutputs]:
        """Apply the result of a step; returns the messages per client index."""

    def fail_step(
        self, scheduler_output: SchedulerOutput, error: RequestError
    ) -> dict[int, EngineCoreOutputs]:
        """Called in the place of :meth:`update_from_output` where the executor raised: the step's requests end."""
        failed = self.finish_requests(scheduler_output.num_scheduled_tokens, RequestStatus.FINISHED_ERROR)
        outputs: dict[int, EngineCoreOutputs] = {}
        for request in failed:
            message = outputs.setdefault(request.client_index, EngineCoreOutputs(outputs=[]))
            message.outputs.append(
                EngineCoreOutput(request.request_id, [], finish_reason=FinishReason.ERROR, error=error)
            )
        return outputs

    def flush_events(self) -> None:
        """Publish KV events that have come up; called when the engine is idle."""
        return

    def wake_for_events(self, wake: Callable[[], None]) -> None:
        """``wake`` may be called from another thread; it must lead to a :meth:`flush_events` soon."""
        return

    @property
    def cache_tiers(self) -> tuple[CacheHitSource, ...]:
        """The tiers that :meth:`reset_tiers` can empty one by one, from the device outwards."""
        return (CacheHitSource.DEVICE,)

    def reset_tiers(self, tiers: Collection[CacheHitSource], reset_running_requests: bool = False) -> bool:
        """As :meth:`reset_prefix_cache` for these of :attr:`cache_tiers` alone."""
        return self.reset_prefix_cache(reset_running_requests)

    @property
    def reset_prefix_cache_report(self) -> dict[str, Any] | None:  # plain values, merged into a reply
        """What the last :meth:`reset_prefix_cache` did; None before the first."""
        return None

    def peek_kv_cache(self, request: Request) -> CacheLookup | None:
        """What a request that is not queued would find in the caches now; nothing is changed.  None: cannot tell."""
        return None

    def get_kv_cache_report(self) -> KVCacheReport | None:
        """Pools, groups, hits and transfers, from counters.  None: cannot tell."""
        return None

    @abstractmethod
    def get_grammar_bitmask(self, scheduler_output: SchedulerOutput) -> GrammarOutput | None:
        """The token masks of the step; None if no structured request takes part."""

    @abstractmethod
    def update_draft_token_ids(self, draft_token_ids: DraftTokenIds) -> None:
        """Take over drafts for the next step."""

    @abstractmethod
    def update_draft_token_ids_in_output(
        self, draft_token_ids: DraftTokenIds, scheduler_output: SchedulerOutput
    ) -> None:
        """Put the real drafts in the place of the placeholders of an already scheduled step."""

    @abstractmethod
    def add_request(self, request: Request) -> None:
        """Queue a request.  An id that exists already is a streaming-input update or is refused."""

    @abstractmethod
    def has_request(self, request_id: str) -> bool:
        """True while the id is in use."""

    @abstractmethod
    def finish_requests(
        self, request_ids: str | Iterable[str] | None, finished_status: RequestStatus
    ) -> list[Request]:
        """End requests from outside (None = all).  Unknown and finished ids are ignored; returns those that ended."""

    @abstractmethod
    def get_num_unfinished_requests(self) -> int:
        """Requests that wait or run."""

    def has_unfinished_requests(self) -> bool:
        """True if some request waits or runs."""
        return self.get_num_unfinished_requests() > 0

    @abstractmethod
    def has_finished_requests(self) -> bool:
        """True if the workers have not been told about all ended requests."""

    def has_requests(self) -> bool:
        """True if another step is needed."""
        return self.has_unfinished_requests() or self.has_finished_requests()

    def awaits_late_ends(self) -> bool:
        """True if an empty step now and then is wanted, though none is needed: workers may have something to tell."""
        return False

    @property
    @abstractmethod
    def pause_state(self) -> PauseState:
        """How much is held back."""

    @abstractmethod
    def set_pause_state(self, pause_state: PauseState) -> None:
        """Hold back or release; takes effect with the next step."""

    @abstractmethod
    def reset_prefix_cache(self, reset_running_requests: bool = False, reset_connector: bool = False) -> bool:
        """Make all cached entries unreachable; True if every block also is free again."""

    @abstractmethod
    def reset_encoder_cache(self) -> None:
        """Forget all cached encoder outputs."""

    @abstractmethod
    def get_request_counts(self) -> tuple[int, int]:
        """(running, waiting)"""

    @abstractmethod
    def get_kv_cache_usage(self) -> float:
        """Share of KV blocks in use, 0 to 1."""

    @abstractmethod
    def make_stats(self) -> SchedulerStats | None:
        """The statistics of the interval since the last call; None where they are off."""

    @abstractmethod
    def shutdown(self) -> None:
        """Flush events and release connector and publisher."""

    def get_kv_connector(self) -> KVConnectorBase_V1 | None:
        """The scheduler half of the connector, if there is one."""
        return None

    def get_ec_connector(self) -> None:
        """The encoder cache connector; this engine has none."""
        return

    def get_kv_event_publisher_config(self) -> KVEventsConfig | None:
        """The publisher's resolved configuration, if it has one."""
        return None


__all__ = ["PauseState", "SchedulerInterface"]
