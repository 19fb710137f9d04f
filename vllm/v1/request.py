"""One request inside the core: its tokens, its counters and its state machine.

Owns `Request`.  Must not know blocks, connectors or schedulers; it only remembers what they decided.
Layer: L2 (values).
"""

from __future__ import annotations

from collections.abc import Callable
from enum import IntEnum
from typing import Any

from vllm.kv_retention import EXTRA_ARG, RetentionHint, parse_retention
from vllm.lora.request import LoRARequest
from vllm.pooling_params import PoolingParams
from vllm.sampling_params import SamplingParams
from vllm.utils.checks import check
from vllm.utils.clock import MonotonicClock
from vllm.v1.core.block_hash import BlockHash
from vllm.v1.kv_offload.base import ALL, TierFilter, parse_tier_filter
from vllm.v1.message_types import EngineCoreEvent, EngineCoreEventType, FinishReason
from vllm.v1.messages import EngineCoreRequest
from vllm.v1.metrics.stats import PrefillStats, RequestSpecDecodeMetrics
from vllm.v1.structured_request import StructuredOutputRequest
from vllm.v1.utils import ConstantList

BlockHasher = Callable[["Request"], list[BlockHash]]
"""Returns the hashes of all full hash blocks that ``request.block_hashes`` does not hold yet."""


class RequestStatus(IntEnum):
    """State of a request.  Everything after PREEMPTED is final."""

    WAITING = 0
    WAITING_FOR_STRUCTURED_OUTPUT_GRAMMAR = 1
    WAITING_FOR_REMOTE_KVS = 2
    WAITING_FOR_STREAMING_REQ = 3
    RUNNING = 4
    PREEMPTED = 5
    FINISHED_STOPPED = 6
    FINISHED_LENGTH_CAPPED = 7
    FINISHED_ABORTED = 8
    FINISHED_IGNORED = 9
    FINISHED_ERROR = 10
    FINISHED_REPETITION = 11

    def __str__(self) -> str:
        return self.name

    @staticmethod
    def is_finished(status: RequestStatus) -> bool:
        """True for final states."""
        return status > RequestStatus.PREEMPTED

    @staticmethod
    def get_finished_reason(status: RequestStatus) -> FinishReason | None:
        """The reason reported to the client; None while the request goes on."""
        return _FINISHED_REASONS.get(status)


_FINISHED_REASONS = {
    RequestStatus.FINISHED_STOPPED: FinishReason.STOP,
    RequestStatus.FINISHED_LENGTH_CAPPED: FinishReason.LENGTH,
    RequestStatus.FINISHED_ABORTED: FinishReason.ABORT,
    RequestStatus.FINISHED_IGNORED: FinishReason.LENGTH,
    RequestStatus.FINISHED_ERROR: FinishReason.ERROR,
    RequestStatus.FINISHED_REPETITION: FinishReason.REPETITION,
    RequestStatus.WAITING_FOR_STREAMING_REQ: FinishReason.STOP,
}

_FINAL = frozenset(status for status in RequestStatus if RequestStatus.is_finished(status))

# From every live state a request may also end.
_LEGAL_MOVES: dict[RequestStatus, frozenset[RequestStatus]] = {
    RequestStatus.WAITING: frozenset(
        {RequestStatus.RUNNING, RequestStatus.WAITING_FOR_REMOTE_KVS, RequestStatus.PREEMPTED}
    ),
    RequestStatus.WAITING_FOR_STRUCTURED_OUTPUT_GRAMMAR: frozenset({RequestStatus.WAITING}),
    RequestStatus.WAITING_FOR_REMOTE_KVS: frozenset({RequestStatus.WAITING, RequestStatus.PREEMPTED}),
    RequestStatus.WAITING_FOR_STREAMING_REQ: frozenset({RequestStatus.WAITING, RequestStatus.PREEMPTED}),
    RequestStatus.RUNNING: frozenset(
        {RequestStatus.PREEMPTED, RequestStatus.WAITING_FOR_STREAMING_REQ, RequestStatus.WAITING}
    ),
    RequestStatus.PREEMPTED: frozenset({RequestStatus.RUNNING, RequestStatus.WAITING_FOR_REMOTE_KVS}),
}


class Request:
    """A request of the core.

    ::

        [grammar] ──► WAITING ──► RUNNING ──► FINISHED_*      (from every live state)
                        │  ▲        │   ▲
                        ▼  │        ▼   │
                     REMOTE_KVS   PREEMPTED ──► REMOTE_KVS
                                    RUNNING ◄──► STREAMING_REQ (via WAITING)

    Counters (tokens):

    * ``num_computed_tokens``: scheduled so far, confirmed or not.
    * ``num_in_flight_tokens``: the part of it whose step has not been processed yet; the difference is confirmed.
    * ``num_output_placeholders``: sampled tokens of steps in flight, which have no id yet.
    * ``num_stale_output_tokens``: sampled tokens still under way when the request was preempted (one per step).
    * ``num_slot_tokens``: up to here it can grow without asking the KV manager for anything.
    * ``num_hash_offered_tokens``: what the KV manager has been asked to hash; it is asked about no token twice, because
      a state that is overwritten in place must be hashed before the step that does so.

    ``status`` changes through :meth:`move_to`.  Outside callers may assign it; and so does what applies a step's tokens:
    they may stop a request (`check_stop`), and the same step may still turn that into an error, or a session goes on.

    Raises:
        ValueError: neither ``sampling_params`` nor ``pooling_params`` is given, or there is no prompt.
    """

    def __init__(
        self,
        request_id: str,
        prompt_token_ids: list[int] | None,
        sampling_params: SamplingParams | None,
        pooling_params: PoolingParams | None,
        client_index: int = 0,
        arrival_time: float | None = None,
        prompt_embeds: Any = None,  # a tensor, opaque here
        prompt_is_token_ids: list[bool] | None = None,
        mm_features: list[Any] | None = None,  # items of a multimodal front end, opaque here
        lora_request: LoRARequest | None = None,
        cache_salt: str | None = None,
        priority: int = 0,
        trace_headers: dict[str, str] | None = None,
        block_hasher: BlockHasher | None = None,
        resumable: bool = False,
        session_id: str | None = None,
        reasoning_ended: bool | None = None,
        reasoning_parser_kwargs: dict[str, Any] | None = None,  # passed through
        abort_immediately: bool = False,
        kv_hints: Any = None,  # passed through to connectors
    ) -> None:
        self.request_id = request_id
        self.client_index = client_index
        self.priority = priority
        self.arrival_time = MonotonicClock().time() if arrival_time is None else arrival_time
        self.sampling_params = sampling_params
        self.pooling_params = pooling_params
        self.lora_request = lora_request
        self.cache_salt = cache_salt
        self.trace_headers = trace_headers
        self.resumable = resumable
        self.session_id = session_id
        self.reasoning_ended = reasoning_ended
        self.reasoning_parser_kwargs = reasoning_parser_kwargs
        self.abort_immediately = abort_immediately
        self.kv_hints = kv_hints
        self.mm_features: list[Any] = mm_features or []
        self.prompt_embeds = prompt_embeds
        self.prompt_is_token_ids = prompt_is_token_ids

        self.status = RequestStatus.WAITING
        self.stop_reason: int | str | None = None
        self.structured_output_request: StructuredOutputRequest | None = None
        self.kv_transfer_params: dict[str, Any] | None = None  # the connector's own keys
        self.ec_transfer_params: dict[str, Any] | None = None  # the encoder cache connector's own keys
        self.load_tiers: TierFilter = ALL
        self.kv_cache_report_mode: str | None = None
        self.retention: RetentionHint | None = None
        self.skip_reading_prefix_cache = False
        self.wants_logprobs = False
        self.plain_output = False
        self._apply_params()

        self._set_prompt(prompt_token_ids)
        self.spec_token_ids: list[int] = []
        self.block_hashes: list[BlockHash] = []
        self._block_hasher = block_hasher
        self._init_counters()
        self.update_block_hashes()

    def _init_counters(self) -> None:
        self.num_computed_tokens = 0
        self.num_in_flight_tokens = 0
        self.num_tokens_at_preemption = 0
        self.num_output_placeholders = 0
        self.num_stale_output_tokens = 0
        self.drop_stale_output = False
        self.num_preemptions = 0
        self.is_prefill_chunk = False
        self.shared_prefix_boundary = 0
        self.replay_start = 0
        self.num_external_computed_tokens = 0
        self.num_hash_offered_tokens = 0
        self.num_slot_tokens = 0
        self.num_cached_tokens = 0
        self.next_decode_eligible_step = 0
        self.last_sched_seq = -1
        self.admitted_seq = -1
        self.num_overtaken = 0
        # (free blocks, index of the first hash behind the hit, pass from which on it is tried again in any case)
        self.misfit: tuple[int, int, int] | None = None
        self.num_load_failures = 0
        self.spec_decode_metrics: RequestSpecDecodeMetrics | None = None
        self.events: list[EngineCoreEvent] = []
        self.prefill_stats: PrefillStats | None = PrefillStats()

    def _apply_params(self) -> None:
        sampling, pooling = self.sampling_params, self.pooling_params
        if sampling is None and pooling is None:
            raise ValueError(
                f"request {self.request_id!r}: sampling_params and pooling_params cannot both be None"
            )
        if sampling is None:
            self.max_tokens = 1
            return
        self.max_tokens = 16 if sampling.max_tokens is None else sampling.max_tokens
        self.structured_output_request = StructuredOutputRequest.from_params(sampling.structured_outputs)
        if self.structured_output_request is not None:
            self.status = RequestStatus.WAITING_FOR_STRUCTURED_OUTPUT_GRAMMAR
        # Cached positions have no logits, so prompt log probabilities always need the whole prompt.
        wants_prompt_logprobs = (
            sampling.prompt_logprobs is not None or sampling.prompt_logprob_token_ids is not None
        )
        self.skip_reading_prefix_cache = bool(sampling.skip_reading_prefix_cache) or wants_prompt_logprobs
        self.wants_logprobs = sampling.logprobs is not None or sampling.logprob_token_ids is not None
        # A step's result for such a request is a token and nothing else, which the hot path makes use of.
        self.plain_output = not (self.wants_logprobs or wants_prompt_logprobs or self.trace_headers)
        extra = sampling.extra_args
        if extra is not None:
            self.kv_transfer_params = _transfer_params(extra, "kv_transfer_params")
            self.load_tiers = parse_tier_filter(self.kv_transfer_params)
            self.ec_transfer_params = _transfer_params(extra, "ec_transfer_params")
            self.kv_cache_report_mode = extra.get("kv_cache_report_mode")
            if EXTRA_ARG in extra:
                self.retention = parse_retention(extra[EXTRA_ARG])

    def _set_prompt(self, prompt_token_ids: list[int] | None) -> None:
        if prompt_token_ids is None and self.prompt_embeds is None:
            raise ValueError(
                f"request {self.request_id!r}: prompt_token_ids and prompt_embeds cannot both be None"
            )
        self.prompt_token_ids = prompt_token_ids
        if prompt_token_ids is not None:
            self.num_prompt_tokens = len(prompt_token_ids)
            self._all_token_ids: list[int] = prompt_token_ids.copy()
        else:
            # Positions given as embeddings have no id; 0 keeps every length right.
            self.num_prompt_tokens = len(self.prompt_embeds)
            self._all_token_ids = [0] * self.num_prompt_tokens
        self._output_token_ids: list[int] = []
        self.output_token_ids = ConstantList(self._output_token_ids)

    @classmethod
    def from_engine_core_request(
        cls, request: EngineCoreRequest, block_hasher: BlockHasher | None
    ) -> Request:
        """The request that a message describes."""
        return cls(
            request_id=request.request_id,
            prompt_token_ids=request.prompt_token_ids,
            sampling_params=request.sampling_params,
            pooling_params=request.pooling_params,
            client_index=request.client_index,
            arrival_time=request.arrival_time,
            prompt_embeds=request.prompt_embeds,
            prompt_is_token_ids=request.prompt_is_token_ids,
            mm_features=request.mm_features,
            lora_request=request.lora_request,
            cache_salt=request.cache_salt,
            priority=request.priority,
            trace_headers=request.trace_headers,
            block_hasher=block_hasher,
            resumable=request.resumable,
            session_id=request.session_id,
            reasoning_ended=request.reasoning_ended,
            reasoning_parser_kwargs=request.reasoning_parser_kwargs,
            abort_immediately=request.abort_immediately,
            kv_hints=request.kv_hints,
        )

    # --- tokens ---------------------------------------------------------------------------------------------------

    @property
    def all_token_ids(self) -> ConstantList[int]:
        """Prompt and output tokens as a read-only view."""
        return ConstantList(self._all_token_ids)

    @property
    def num_tokens(self) -> int:
        """Prompt and output tokens with known ids."""
        return len(self._all_token_ids)

    @property
    def num_tokens_with_spec(self) -> int:
        """``num_tokens`` and the draft tokens."""
        return len(self._all_token_ids) + len(self.spec_token_ids)

    @property
    def num_output_tokens(self) -> int:
        """Output tokens with known ids."""
        return len(self._output_token_ids)

    @property
    def num_confirmed_tokens(self) -> int:
        """Computed tokens whose step has been processed."""
        return self.num_computed_tokens - self.num_in_flight_tokens

    def append_output_token_ids(self, token_ids: int | list[int]) -> None:
        """Add sampled tokens and hash the blocks they fill."""
        if isinstance(token_ids, int):
            self._output_token_ids.append(token_ids)
            self._all_token_ids.append(token_ids)
        else:
            self._output_token_ids.extend(token_ids)
            self._all_token_ids.extend(token_ids)
        if self._block_hasher is not None:
            self.block_hashes.extend(self._block_hasher(self))

    def append_sampled_token(self, token_id: int, hash_block_size: int, hash_lookahead: int) -> None:
        """As :meth:`append_output_token_ids` for one token, asking the hasher only where a block can be full.

        That is after ``hash_block_size`` further tokens, or ``hash_lookahead`` later (see the block hasher).
        """
        self._output_token_ids.append(token_id)
        self._all_token_ids.append(token_id)
        if (len(self._all_token_ids) - hash_lookahead) % hash_block_size == 0:
            self.update_block_hashes()

    def update_block_hashes(self) -> None:
        """Hash the blocks that are full and have no hash yet.  Nothing happens without a hasher."""
        if self._block_hasher is not None:
            self.block_hashes.extend(self._block_hasher(self))

    # --- state ----------------------------------------------------------------------------------------------------

    def move_to(self, status: RequestStatus) -> None:
        """Enter ``status``; an illegal move is a programmer error and stops the core."""
        old = self.status
        legal = status in _FINAL or status in _LEGAL_MOVES[old] if old in _LEGAL_MOVES else False
        check(legal, f"request {self.request_id!r} cannot go from {old} to {status}")
        self.status = status

    def is_finished(self) -> bool:
        """True in a final state."""
        return self.status > RequestStatus.PREEMPTED

    def get_finished_reason(self) -> FinishReason | None:
        """The reason reported to the client; None while the request goes on."""
        return _FINISHED_REASONS.get(self.status)

    @property
    def has_plain_output(self) -> bool:
        """True if the result of a step for this request is one token and nothing else."""
        return self.plain_output and self.structured_output_request is None and not self.resumable

    @property
    def has_read_nothing(self) -> bool:
        """Whether it has had no step yet: others' content has no part in an error that ends it."""
        return self.last_sched_seq < 0 and self.num_computed_tokens == 0

    @property
    def use_structured_output(self) -> bool:
        """True if a grammar constrains the output."""
        return self.structured_output_request is not None

    @property
    def has_encoder_inputs(self) -> bool:
        """True if the prompt holds items that an encoder has to turn into embeddings."""
        return bool(self.mm_features)

    def get_num_encoder_embeds(self, input_id: int) -> int:
        """Embeddings of encoder input ``input_id``."""
        embeds: int = self.mm_features[input_id].mm_position.get_num_embeds()
        return embeds

    # --- reports --------------------------------------------------------------------------------------------------

    def record_event(self, event_type: EngineCoreEventType, timestamp: float | None = None) -> None:
        """Remember an event for the next output of this request."""
        self.events.append(EngineCoreEvent.new_event(event_type, timestamp))

    def take_events(self) -> list[EngineCoreEvent] | None:
        """The events since the last call; None if there are none."""
        if not self.events:
            return None
        events, self.events = self.events, []
        return events

    def take_prefill_stats(self) -> PrefillStats | None:
        """The prefill figures, once; None afterwards."""
        stats, self.prefill_stats = self.prefill_stats, None
        return stats

    def __lt__(self, other: Request) -> bool:
        """Scheduling order: lower priority value, earlier arrival, smaller id."""
        if self.priority != other.priority:
            return self.priority < other.priority
        if self.arrival_time != other.arrival_time:
            return self.arrival_time < other.arrival_time
        if self.request_id != other.request_id:
            return self.request_id < other.request_id
        return id(self) < id(other)

    def __repr__(self) -> str:
        return (
            f"Request({self.request_id!r}, {self.status}, prompt={self.num_prompt_tokens}, "
            f"output={self.num_output_tokens}, computed={self.num_computed_tokens}, "
            f"in_flight={self.num_in_flight_tokens})"
        )


def _transfer_params(extra_args: dict[str, Any], name: str) -> dict[str, Any] | None:
    """The option ``name`` of a request. ``ValueError`` if it is no mapping."""
    value = extra_args.get(name)
    if value is not None and not isinstance(value, dict):
        raise ValueError(f"{name} must be a mapping, got {value!r}")
    return value


__all__ = ["BlockHasher", "FinishReason", "Request", "RequestStatus"]
