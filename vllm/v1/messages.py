"""Messages between front end and engine core.

Owns their fields and the order of the fields, which *is* the wire format: structs are encoded as positional arrays,
so new fields go to the end only.  Must not know sockets or codecs.  Layer: L2 (values).
"""

from enum import Enum
from typing import Any

import msgspec

from vllm.lora.request import LoRARequest
from vllm.outputs import RequestError
from vllm.pooling_params import PoolingParams
from vllm.sampling_params import SamplingParams
from vllm.utils.clock import MonotonicClock
from vllm.v1.message_types import EngineCoreEvent, EngineCoreEventType, FinishReason, PauseState
from vllm.v1.metrics.stats import PrefillStats, RequestSpecDecodeMetrics, SchedulerStats
from vllm.v1.outputs import LogprobsLists, LogprobsTensors, SamplingMaskLists


class EngineCoreRequest(msgspec.Struct, array_like=True, omit_defaults=True, gc=False):
    """One request on its way into the core.

    ``arrival_time`` is the front end's wall clock in seconds.  Exactly one of the two parameter objects is set.
    """

    request_id: str
    prompt_token_ids: list[int] | None
    mm_features: list[Any] | None  # items of a multimodal front end, opaque to the core's scheduler
    sampling_params: SamplingParams | None
    pooling_params: PoolingParams | None
    arrival_time: float
    lora_request: LoRARequest | None
    cache_salt: str | None
    data_parallel_rank: int | None
    prompt_embeds: Any = None  # a tensor, opaque here
    prompt_is_token_ids: list[bool] | None = None
    client_index: int = 0
    current_wave: int = 0
    priority: int = 0
    trace_headers: dict[str, str] | None = None
    resumable: bool = False
    external_req_id: str | None = None
    reasoning_ended: bool | None = None
    reasoning_parser_kwargs: dict[str, Any] | None = None  # passed through to the reasoning parser
    abort_immediately: bool = False
    session_id: str | None = None
    kv_hints: Any = None  # hints for a connector, passed through unread

    @property
    def params(self) -> SamplingParams | PoolingParams:
        """The parameter object that is set.

        Raises:
            ValueError: neither is.
        """
        if self.sampling_params is not None:
            return self.sampling_params
        if self.pooling_params is not None:
            return self.pooling_params
        raise ValueError(f"request {self.request_id!r} has neither sampling_params nor pooling_params")


class EngineCoreOutput(msgspec.Struct, array_like=True, omit_defaults=True, gc=False):
    """What one step produced for one request."""

    request_id: str
    new_token_ids: list[int]
    new_logprobs: LogprobsLists | None = None
    new_prompt_logprobs_tensors: LogprobsTensors | None = None
    pooling_output: Any = None  # a tensor, opaque here
    finish_reason: FinishReason | None = None
    stop_reason: int | str | None = None
    events: list[EngineCoreEvent] | None = None
    kv_transfer_params: dict[str, Any] | None = None  # returned by the connector, passed through
    ec_transfer_params: dict[str, Any] | None = (
        None  # returned by the encoder cache connector, passed through
    )
    trace_headers: dict[str, str] | None = None
    prefill_stats: PrefillStats | None = None
    routed_experts: Any = None  # an array, opaque here
    num_nans_in_logits: int = 0
    mm_cache_miss_hashes: list[str] | None = None
    new_sampling_mask: SamplingMaskLists | None = None
    spec_decode_metrics: RequestSpecDecodeMetrics | None = None
    prompt_token_id_logprobs: Any = None  # passed through from the runner
    error: RequestError | None = None

    @property
    def finished(self) -> bool:
        """True for the last output of a request."""
        return self.finish_reason is not None


class UtilityOutput(msgspec.Struct, array_like=True, gc=False):
    """Answer to a utility call; ``failure_message`` is set if and only if the call failed."""

    call_id: int
    failure_message: str | None = None
    result: Any = None  # whatever the called method returned


class EngineCoreOutputs(msgspec.Struct, array_like=True, omit_defaults=True, gc=False):
    """Everything the core tells one client after one step.

    ``timestamp`` is the core's monotonic clock in seconds; 0.0 is replaced by now.
    """

    engine_index: int = 0
    outputs: list[EngineCoreOutput] = []
    scheduler_stats: SchedulerStats | None = None
    timestamp: float = 0.0
    utility_output: UtilityOutput | None = None
    finished_requests: set[str] | None = None
    wave_complete: int | None = None
    start_wave: int | None = None
    weight_version: str | None = None

    def __post_init__(self) -> None:
        if self.timestamp == 0.0:
            self.timestamp = MonotonicClock().monotonic()


class EngineCoreRequestType(Enum):
    """One-byte frame that says what follows on the core's input socket."""

    ADD = b"\x00"
    ABORT = b"\x01"
    START_DP_WAVE = b"\x02"
    UTILITY = b"\x03"
    EXECUTOR_FAILED = b"\x04"
    """Internal to the core process."""
    WAKEUP = b"\x05"
    """Internal to the core process."""


class EngineCoreReadyResponse(msgspec.Struct, array_like=True):
    """First message of a core on each input socket: what the front end has to know about the resolved configuration."""

    max_model_len: int
    num_gpu_blocks: int
    block_size: int
    dp_stats_address: str | None
    dtype: str
    vllm_version: str
    world_size: int
    data_parallel_size: int
    tensor_parallel_size: int
    pipeline_parallel_size: int
    decode_context_parallel_size: int
    data_parallel_rank: int
    max_num_seqs: int
    max_num_batched_tokens: int
    instance_id: str
    supports_lora: bool
    max_loras: int
    mamba_block_size: int | None
    kv_cache_size_tokens: int | None
    kv_cache_max_concurrency: float | None
    kv_events_config: Any  # the resolved KVEventsConfig, or its fields as a plain map once decoded
    weight_transfer_backend: str | None
    enable_sleep_mode: bool
    supports_draft_weight_updates: bool
    effective_attention_block_size: int | None
    coord_store_port: int = 0
    coordinator_input_address: str | None = None
    coordinator_output_address: str | None = None


__all__ = [
    "EngineCoreEvent",
    "EngineCoreEventType",
    "EngineCoreOutput",
    "EngineCoreOutputs",
    "EngineCoreReadyResponse",
    "EngineCoreRequest",
    "EngineCoreRequestType",
    "FinishReason",
    "PauseState",
    "UtilityOutput",
]
