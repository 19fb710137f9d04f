"""Arrival, preemption and end of requests, and the state all scheduler parts share.

Owns the queues, the table of requests and the release of their blocks.  Must not know how a pass chooses requests nor
what a step returned.  Layer: L5 (scheduler).
"""

from __future__ import annotations

from collections import defaultdict, deque
from collections.abc import Iterable
from typing import Any, ClassVar

from vllm.config import KVEventsConfig, VllmConfig
from vllm.distributed.kv_event_publisher import EventPublisher, EventPublisherFactory, PublisherCounters
from vllm.distributed.kv_transfer.kv_connector.v1.base import KVConnectorBase_V1
from vllm.logger import init_logger
from vllm.outputs import RequestError
from vllm.utils.clock import Clock, MonotonicClock
from vllm.v1.core.kv_cache_block import KVCacheBlock
from vllm.v1.core.kv_retention import retain_on_device
from vllm.v1.core.sched import connector_calls
from vllm.v1.core.sched.chunking import PrefillCadence
from vllm.v1.core.sched.in_flight import InFlightSteps
from vllm.v1.core.sched.interface import SchedulerInterface
from vllm.v1.core.sched.load_failures import block_use
from vllm.v1.core.sched.manager_setup import make_kv_cache_manager
from vllm.v1.core.sched.params import params_from_config
from vllm.v1.core.sched.pressure import MemoryPressure
from vllm.v1.core.sched.remote_wait import RemoteWaits
from vllm.v1.core.sched.request_queue import RequestQueue, create_request_queue
from vllm.v1.core.sched.streaming import StreamingSessions
from vllm.v1.core.sched.utils import remove_all
from vllm.v1.kv_cache_interface import KVCacheConfig
from vllm.v1.message_types import EngineCoreEventType, PauseState
from vllm.v1.messages import EngineCoreOutput
from vllm.v1.metrics.stats import CacheUse, PrefixCacheStats, RequestSpecDecodeMetrics
from vllm.v1.request import Request, RequestStatus
from vllm.v1.structured_output import StructuredOutputManager

logger = init_logger(__name__)


class RequestLifecycle(SchedulerInterface):
    """The part of the scheduler that requests enter and leave through.

    Waiting requests are in exactly one of three queues: ``kv_holding_waiting`` (they hold blocks: a load is under way
    or has ended, or a session waits for input), ``deferred_waiting`` (they could not be tried in the last pass) and ``waiting`` (the rest).
    A request stays in ``requests`` until its blocks are free, which may be after it has finished.
    """

    looks_ahead: ClassVar[bool] = False
    """True where a step may be scheduled before the previous one's tokens are known."""

    def __init__(
        self,
        vllm_config: VllmConfig,
        kv_cache_config: KVCacheConfig,
        structured_output_manager: StructuredOutputManager,
        block_size: int,
        hash_block_size: int | None = None,
        mm_registry: Any = None,  # a multimodal front end's registry; media are not scheduled here
        include_finished_set: bool = False,
        log_stats: bool = False,
        *,
        clock: Clock | None = None,
        connector: KVConnectorBase_V1 | None = None,
        event_publisher: EventPublisher | None = None,
    ) -> None:
        self.vllm_config = vllm_config
        self.scheduler_config = vllm_config.scheduler_config
        self.cache_config = vllm_config.cache_config
        self.kv_cache_config = kv_cache_config
        self.structured_output_manager = structured_output_manager
        self.block_size = block_size
        self.hash_block_size = hash_block_size or kv_cache_config.hash_block_size or block_size
        self.log_stats = log_stats
        self.clock: Clock = clock or MonotonicClock()
        self.params = params_from_config(vllm_config, kv_cache_config, block_size, self.hash_block_size)
        self._init_limits(vllm_config)
        self._init_state(include_finished_set)
        with connector_calls.connector_of_scheduler(vllm_config, kv_cache_config, connector) as connector:
            self._init_collaborators(vllm_config, connector, event_publisher)

    def _init_limits(self, vllm_config: VllmConfig) -> None:
        params, config = self.params, self.scheduler_config
        model_config = vllm_config.model_config
        if model_config is None or model_config.max_model_len is None:
            raise ValueError("the scheduler needs vllm_config.model_config with a resolved max_model_len")
        self.policy = params.policy
        self.max_num_running_reqs = params.max_num_seqs
        self.max_model_len: int = model_config.max_model_len
        self.max_num_scheduled_tokens = config.max_num_scheduled_tokens or config.max_num_batched_tokens
        self.use_v2_model_runner = vllm_config.use_v2_model_runner
        self.recompute_kv_load_failures = params.recompute_kv_load_failures
        # Without drafts and look-ahead every token that a step computes is known when the step is scheduled.
        self._hash_on_arrival = params.prefix_caching and (
            self.looks_ahead or params.num_spec_tokens > 0 or params.hash_lookahead_tokens > 0
        )

    def _init_state(self, include_finished_set: bool) -> None:
        self.requests: dict[str, Request] = {}
        self.running: list[Request] = []
        self.waiting: RequestQueue = create_request_queue(self.policy)
        self.deferred_waiting: RequestQueue = create_request_queue(self.policy)
        self.kv_holding_waiting: RequestQueue = create_request_queue(self.policy)
        self.finished_req_ids: set[str] = set()
        self.finished_req_ids_dict: dict[int, set[str]] | None = (
            defaultdict(set) if include_finished_set else None
        )
        self.sched_step_seq = 0
        self.processed_step_seq = 0
        self.current_step = 0
        self._pressure = MemoryPressure()
        self.deferred_frees: deque[tuple[int, list[KVCacheBlock]]] = deque()
        self.encoder_cache_manager = None  # media are encoded elsewhere
        self._in_flight = InFlightSteps()
        self._cadence = PrefillCadence(self.params.local_prefill_interval)
        self._remote = RemoteWaits()
        self._sessions = StreamingSessions()
        self._delayed_sends: set[str] = set()
        self._preempted_ids: set[str] = set()
        self._resend_ids: set[str] = set()
        self._previous_step_ids: set[str] = set()
        self._inflight_prefills: set[Request] = set()
        self._ended_outputs: list[tuple[int, EngineCoreOutput]] = []
        self._pause_state = PauseState.UNPAUSED
        self._num_preempted = self._num_corrupted = self._num_stalled = 0
        self._num_refused_told = 0
        self._event_counters = PublisherCounters()
        self.cache_use = CacheUse()

    def _init_collaborators(
        self,
        vllm_config: VllmConfig,
        connector: KVConnectorBase_V1 | None,
        event_publisher: EventPublisher | None,
    ) -> None:
        transfer = vllm_config.kv_transfer_config
        self.connector = connector
        self.requires_kv_delivery = connector is not None and connector.requires_kv_delivery
        self.connector_prefix_cache_stats = (
            PrefixCacheStats() if connector is not None and self.log_stats else None
        )
        is_consumer = transfer is not None and transfer.is_kv_consumer
        # Loads run beside the model, so blocks that a step in flight still uses must not become a load's target.
        self.defer_block_free = (
            connector is not None and is_consumer and self.params.max_concurrent_batches > 1
        )
        self.kv_event_publisher = event_publisher or EventPublisherFactory.create(
            vllm_config.kv_events_config, self.params.data_parallel_rank
        )
        self.kv_cache_manager = make_kv_cache_manager(
            vllm_config,
            self.kv_cache_config,
            (self.block_size, self.hash_block_size),
            self.max_model_len,
            self.log_stats,
        )
        if connector is not None:
            connector.bind_kv_cache_manager(self.kv_cache_manager)
        self._zeroes_blocks = self.kv_cache_config.needs_kv_cache_zeroing
        self._fine_grained_hits = self.kv_cache_manager.coordinator.enable_partial_hash_hits
        cache = self.params.cache
        # Without drafts and pipeline stages a decode is one token that only needs a slot.
        self._decodes_are_simple = (
            self.params.num_spec_tokens == 0 and self.params.pipeline_parallel_size == 1
        )
        self._has_chunk_rules = (
            cache.state_block_tokens is not None or self.params.num_prefill_lookahead_tokens > 1
        )

    # --- read from outside ------------------------------------------------------------------------------------------

    @property
    def finished_recving_kv_req_ids(self) -> set[str]:
        """Requests whose load was reported as ended and is consumed by the next pass."""
        return self._remote.finished

    @property
    def failed_recving_kv_req_ids(self) -> set[str]:
        """Those of them whose load failed."""
        return self._remote.failed

    @property
    def deferred_loads(self) -> list[str]:
        """Requests that were offered a load and wait for memory or for the connector."""
        return [request.request_id for request in self._remote.waiting_to_start()]

    @property
    def num_waiting_for_streaming_input(self) -> int:
        """Open sessions that wait for their next input."""
        return self._sessions.num_paused

    @property
    def num_executed_steps(self) -> int:
        """Steps that scheduled tokens."""
        return self._cadence.num_executed_steps

    @property
    def last_prefill_step(self) -> int:
        """The executed step that carried a prefill last."""
        return self._cadence.last_prefill_step

    @property
    def local_prefill_interval(self) -> int:
        """Executed steps between two prefill-carrying steps while decodes run."""
        return self._cadence.interval

    @property
    def _kv_fetch_stages(self) -> dict[Request, str]:
        return self._remote.stages

    @property
    def _kv_fetch_counts(self) -> dict[str, int]:
        return self._remote.counts

    def get_kv_connector(self) -> KVConnectorBase_V1 | None:
        return self.connector

    def get_kv_event_publisher_config(self) -> KVEventsConfig | None:
        return self.kv_event_publisher.get_publisher_config()

    @property
    def pause_state(self) -> PauseState:
        return self._pause_state

    def set_pause_state(self, pause_state: PauseState) -> None:
        self._pause_state = pause_state

    def has_request(self, request_id: str) -> bool:
        return request_id in self.requests

    def get_request_counts(self) -> tuple[int, int]:
        return len(self.running), len(self.waiting) + len(self.deferred_waiting) + len(
            self.kv_holding_waiting
        )

    def get_num_unfinished_requests(self) -> int:
        return sum(self.get_request_counts()) - self._sessions.num_paused

    def has_finished_requests(self) -> bool:
        return len(self.finished_req_ids) > 0

    def has_requests(self) -> bool:
        if self.has_unfinished_requests() or self.has_finished_requests() or self._ended_outputs:
            return True
        if self._delayed_sends or self._remote.loading:
            return True
        return self.connector is not None and self.connector.has_pending_push_work()

    def awaits_late_ends(self) -> bool:
        connector = self.connector
        return isinstance(connector, KVConnectorBase_V1) and connector.awaits_late_ends()

    # --- arrival ----------------------------------------------------------------------------------------------------

    def add_request(self, request: Request) -> None:
        """Queue a request, or hand a further input to an open session.

        Raises:
            ValueError: the id is in use and is no open session, or the input has no tokens or a grammar.  Nothing has
                changed then.
        """
        existing = self.requests.get(request.request_id)
        if existing is not None:
            self._extend_session(existing, request)
            return
        self.requests[request.request_id] = request
        if request.resumable:
            self._sessions.open(request)
        if self.params.per_request_spec_metrics:
            request.spec_decode_metrics = RequestSpecDecodeMetrics.new(self.params.num_spec_tokens)
        if self.log_stats:
            request.record_event(EngineCoreEventType.QUEUED, self.clock.monotonic())
        if self.connector is not None:
            self.connector.on_new_request(request)
        if request.structured_output_request is not None:
            self.structured_output_manager.grammar_init(request)
        self.waiting.add_request(request)
        if request.abort_immediately:
            self.finish_requests(request.request_id, RequestStatus.FINISHED_ABORTED)

    def _extend_session(self, existing: Request, update: Request) -> None:
        if existing.is_finished() or not self._sessions.is_open(existing):
            raise ValueError(f"request id {update.request_id!r} is already in use")
        if update.resumable and update.num_prompt_tokens == 0:
            raise ValueError(
                f"the input of session {update.request_id!r} has no tokens; only its last may be empty"
            )
        if update.structured_output_request is not None:
            raise ValueError(
                f"session {update.request_id!r}: only the answer to its first input can follow a grammar"
            )
        self._sessions.push(existing, update)
        if existing.status is RequestStatus.WAITING_FOR_STREAMING_REQ:
            self._resume_session(existing)

    def _resume_session(self, request: Request) -> None:
        """Go on with the next input of a paused session, or end it."""
        if not self._sessions.resume(request, self.hash_block_size):
            self.finish_requests(request.request_id, RequestStatus.FINISHED_STOPPED)
        elif request.num_computed_tokens == 0:
            self._release_holder(request)

    # --- end --------------------------------------------------------------------------------------------------------

    def finish_requests(
        self, request_ids: str | Iterable[str] | None, finished_status: RequestStatus
    ) -> list[Request]:
        """End requests from outside.  Unknown and finished ids are ignored.

        Raises:
            ValueError: ``finished_status`` is not final.
        """
        if not RequestStatus.is_finished(finished_status):
            raise ValueError(f"finished_status must be a final state, got {finished_status}")
        if request_ids is None:
            request_ids = list(self.requests)
        elif isinstance(request_ids, str):
            request_ids = (request_ids,)
        ended: dict[str, Request] = {}
        for request_id in request_ids:
            request = self.requests.get(request_id)
            if request is not None and not request.is_finished():
                ended[request_id] = request
        self._leave_queues(list(ended.values()))
        for request in ended.values():
            request.move_to(finished_status)
            self._finish(request)
        return list(ended.values())

    def _leave_queues(self, requests: list[Request]) -> None:
        if not requests:
            return
        waiting = [request for request in requests if request.status is not RequestStatus.RUNNING]
        if len(waiting) < len(requests):
            self.running = remove_all(self.running, set(requests).difference(waiting))
        for queue in (self.waiting, self.deferred_waiting, self.kv_holding_waiting):
            if queue:
                queue.remove_requests(waiting)

    def _finish(self, request: Request) -> dict[str, Any] | None:
        """Everything that follows a final status, exactly once; the request has left the queues.

        Returns the connector's parameters for the client.
        """
        request_id = request.request_id
        self._in_flight.drop_request(request_id)
        self._forget_unconfirmed(request)
        if request.status is RequestStatus.FINISHED_ABORTED and request in self._inflight_prefills:
            self.kv_cache_manager.cache_frontier(request)
        self._inflight_prefills.discard(request)
        self._sessions.close(request)
        delay, params = self._connector_finished(request)
        if request.retention is not None:
            share = self.cache_config.kv_retention_share
            retain_on_device(self.kv_cache_manager, request, share, self.clock)
        self.finished_req_ids.add(request_id)
        if self.finished_req_ids_dict is not None:
            self.finished_req_ids_dict[request.client_index].add(request_id)
        if delay:
            self._delayed_sends.add(request_id)
        if self._remote.has_ended(request_id):
            self._remote.forget(request)
        self._release_finished(request)
        return params

    def _end_with_error(self, request: Request, error: RequestError) -> None:
        """End a live request that has left the queues; the client hears of it with the next results."""
        request.move_to(RequestStatus.FINISHED_ERROR)
        params = self._finish(request)
        output = EngineCoreOutput(
            request_id=request.request_id,
            new_token_ids=[],
            finish_reason=request.get_finished_reason(),
            stop_reason=request.stop_reason,
            events=request.take_events(),
            kv_transfer_params=params,
            trace_headers=request.trace_headers,
            error=error,
        )
        self._ended_outputs.append((request.client_index, output))

    def _forget_unconfirmed(self, request: Request) -> None:
        """Take back what steps in flight were to compute or to load."""
        request.num_computed_tokens -= request.num_in_flight_tokens
        load_start = self._in_flight.unconfirmed_load_start(request.request_id)
        if load_start is not None:
            request.num_computed_tokens = min(request.num_computed_tokens, load_start)
        request.num_in_flight_tokens = 0
        request.num_output_placeholders = 0
        request.num_stale_output_tokens = 0
        request.spec_token_ids = []

    def _connector_finished(self, request: Request) -> tuple[bool, dict[str, Any] | None]:
        """Tell the connector that the request ended.  ``(delay the release, parameters for the client)``"""
        if self.connector is None:
            return False, None
        return connector_calls.request_finished(
            self.connector, self.kv_cache_manager, request, self.requires_kv_delivery
        )

    def _release_finished(self, request: Request) -> None:
        """Free a finished request's blocks as soon as neither a load nor a send uses them."""
        request_id = request.request_id
        if request_id in self._delayed_sends or request_id in self._remote.loading:
            return
        self._free_blocks(request)
        self._pressure.note_end()
        del self.requests[request_id]

    def _free_blocks(self, request: Request) -> None:
        """Let go of the request's blocks; those a step in flight may still use return after that step."""
        if self._may_be_spoilt(request):
            self._in_flight.add_departed(block_use(self.kv_cache_manager, request))
        request.num_slot_tokens = 0
        self._resend_ids.discard(request.request_id)
        fenced = request.last_sched_seq > self.processed_step_seq
        if not (self.defer_block_free and fenced):
            self.kv_cache_manager.free(request)
            return
        blocks = self.kv_cache_manager.pop_blocks_for_free(request.request_id)
        self.deferred_frees.append((request.last_sched_seq, blocks))

    def _may_be_spoilt(self, request: Request) -> bool:
        """True if hashed blocks of the request depend on a step in flight."""
        if len(self._in_flight) == 0:
            return False
        is_new = request.admitted_seq > self.processed_step_seq
        return is_new or request.num_hash_offered_tokens > request.num_confirmed_tokens

    def _settle_deferred_frees(self) -> None:
        """Return the blocks whose step has been processed."""
        while self.deferred_frees and self.deferred_frees[0][0] <= self.processed_step_seq:
            _, blocks = self.deferred_frees.popleft()
            self.kv_cache_manager.block_pool.free_blocks(blocks)

    def _offer_hashes(self, request: Request, num_tokens: int) -> None:
        """Have the blocks hashed that ``num_tokens`` tokens fill, if that is more than before."""
        unit, offered = self.hash_block_size, request.num_hash_offered_tokens
        if num_tokens // unit > offered // unit or (
            self.params.hash_lookahead_tokens and num_tokens > offered
        ):
            request.num_hash_offered_tokens = num_tokens
            self.kv_cache_manager.cache_blocks(request, num_tokens)

    # --- preemption -------------------------------------------------------------------------------------------------

    def _preempt_request(self, request: Request, timestamp: float, drop_stale: bool = False) -> None:
        """Stop a running request now: it gives all blocks back and starts again from the waiting front.

        Sampled tokens under way are kept (they arrive later and become part of the prompt) unless ``drop_stale``, or
        unless the connector has to hand complete KV over.
        """
        if request in self.running:
            self.running.remove(request)
        drop_stale = drop_stale or self.requires_kv_delivery
        num_stale = 0
        if drop_stale:
            self._in_flight.drop_request(request.request_id)
        else:
            num_stale = request.num_stale_output_tokens + self._in_flight.make_stale(request.request_id)
        self._forget_unconfirmed(request)
        self._inflight_prefills.discard(request)
        request.num_stale_output_tokens = num_stale
        request.drop_stale_output = drop_stale
        request.num_tokens_at_preemption = request.num_computed_tokens
        self._start_over(request)
        request.is_prefill_chunk = False
        request.move_to(RequestStatus.PREEMPTED)
        request.num_preemptions += 1
        self._num_preempted += 1
        self._preempted_ids.add(request.request_id)
        if self.log_stats:
            request.record_event(EngineCoreEventType.PREEMPTED, timestamp)
        self.waiting.prepend_request(request)

    def _release_holder(self, request: Request) -> None:
        """Take the blocks of a request that waits with them; it starts again from the waiting front."""
        self.kv_holding_waiting.remove_request(request)
        self._remote.forget(request)
        self._start_over(request)
        self.waiting.prepend_request(request)

    def _start_over(self, request: Request) -> None:
        """Let go of all that is computed of the request; it will be looked up, or computed, once more."""
        self._free_blocks(request)
        request.num_computed_tokens = request.num_hash_offered_tokens = 0
        request.replay_start = 0


__all__ = ["RequestLifecycle"]
