"""Limits and policy of the scheduler. Layer: L1."""

from __future__ import annotations

from dataclasses import InitVar
from typing import Annotated, Any, ClassVar, Literal

from pydantic import Field

from vllm.config.setting import HIDDEN, Flag, config, setting, state
from vllm.utils.registry import resolve_object

RunnerType = Literal["generate", "pooling", "draft"]
SchedulerPolicy = Literal["fcfs", "priority"]
_SYNC_SCHEDULER = "vllm.v1.core.sched.scheduler:Scheduler"
_ASYNC_SCHEDULER = "vllm.v1.core.sched.async_scheduler:AsyncScheduler"


@config
class SchedulerConfig:
    """Limits of one scheduling step and of the queues.

    `max_model_len` and `is_encoder_decoder` are needed for the checks only and are not kept.
    """

    DEFAULT_MAX_NUM_BATCHED_TOKENS: ClassVar[int] = 2048
    DEFAULT_MAX_NUM_SEQS: ClassVar[int] = 128

    max_model_len: InitVar[int]
    """Longest sequence of the model; for the checks only."""
    is_encoder_decoder: InitVar[bool]
    """Whether the model has an encoder, which rules out chunked prefill."""
    runner_type: RunnerType = setting(default="generate", doc="Kind of model run.", flag=HIDDEN)
    max_num_batched_tokens: Annotated[int, Field(ge=1)] = setting(
        default=2048,
        doc="Most tokens in one step; chosen by device and usage when not given.",
        flag=Flag(unset=True, human=True),
    )
    max_num_scheduled_tokens: Annotated[int, Field(ge=1)] | None = setting(
        default=None, doc="Most tokens handed out per step, if lower than max_num_batched_tokens."
    )
    max_num_seqs: Annotated[int, Field(ge=1)] = setting(
        default=128,
        doc="Most requests in one step; chosen by device and usage when not given.",
        flag=Flag(unset=True),
    )
    max_num_active_seqs: Annotated[int, Field(ge=1)] | None = setting(
        default=None, doc="Most admitted requests, running or paused; at most max_num_seqs."
    )
    long_prefill_token_threshold: Annotated[int, Field(ge=0)] = setting(
        default=0, doc="Cap of one request's chunk while others wait; 0 is off."
    )
    long_prefill_token_threshold_adaptive: bool = setting(
        default=False, doc="Raise the cap when few requests share the step."
    )
    max_num_queued_reqs: Annotated[int, Field(ge=1)] | None = setting(
        default=None, doc="Refuse requests (HTTP 503) while this many wait."
    )
    max_num_queued_tokens: Annotated[int, Field(ge=1)] | None = setting(
        default=None,
        doc="Refuse requests (HTTP 503) while the waiting prompts hold this many tokens.",
        flag=Flag(human=True),
    )
    enable_chunked_prefill: bool = setting(
        default=True, doc="Split long prompts over several steps.", flag=Flag(unset=True)
    )
    is_multimodal_model: bool = setting(default=False, doc="Derived from the model.", flag=HIDDEN)
    policy: SchedulerPolicy = setting(
        default="fcfs",
        doc="Order of waiting requests; priority runs lower values first.",
        flag=Flag(name="scheduling_policy"),
    )
    disable_chunked_mm_input: bool = setting(default=False, doc="Never split a media item over two steps.")
    # A class or its dotted path.
    scheduler_cls: Any = setting(default=None, doc="Scheduler class or its dotted path.")
    disable_hybrid_kv_cache_manager: bool | None = setting(
        default=None, doc="Treat windowed layers as full attention; decided automatically when not given."
    )
    scheduler_reserve_full_isl: bool = setting(
        default=True, doc="Admit a request only when its whole prompt fits, not just its first chunk."
    )
    watermark: Annotated[float, Field(ge=0, lt=1)] = setting(
        default=0.0, doc="Share of blocks kept free when a request is admitted beside running ones."
    )
    prefill_schedule_interval: Annotated[int, Field(ge=1)] = setting(
        default=1, doc="Let prefill into every n-th step only, while decodes run."
    )
    async_scheduling: bool | None = setting(
        default=None, doc="Schedule the next step while this one runs; on where supported when not given."
    )
    stream_interval: Annotated[int, Field(ge=1)] = setting(
        default=1, doc="Tokens between two streamed outputs."
    )

    max_num_encoder_input_tokens: int = state(default=0, doc="Encoder tokens in one step.")
    encoder_cache_size: int = state(default=0, doc="Encoder tokens kept.")

    def __post_init__(self, max_model_len: int, is_encoder_decoder: bool) -> None:
        if is_encoder_decoder:
            self.enable_chunked_prefill = False
            self.long_prefill_token_threshold = 0
            self.disable_chunked_mm_input = True
        self.max_num_encoder_input_tokens = self.max_num_batched_tokens
        self.encoder_cache_size = self.max_num_batched_tokens
        self.verify_max_model_len(max_model_len)
        self._verify_limits()

    def verify_max_model_len(self, max_model_len: int) -> None:
        """Check the limits against the model length. Raises ValueError naming both."""
        if self.max_num_batched_tokens < max_model_len and not self.enable_chunked_prefill:
            raise ValueError(
                f"max_num_batched_tokens={self.max_num_batched_tokens} is smaller than max_model_len={max_model_len}: "
                "without chunked prefill a prompt of full length could never run. Raise max_num_batched_tokens, lower "
                "max_model_len or enable chunked prefill."
            )
        if self.long_prefill_token_threshold > max_model_len:
            raise ValueError(
                f"long_prefill_token_threshold={self.long_prefill_token_threshold} is larger than "
                f"max_model_len={max_model_len}"
            )

    def _verify_limits(self) -> None:
        if self.max_num_batched_tokens < self.max_num_seqs:
            raise ValueError(
                f"max_num_batched_tokens={self.max_num_batched_tokens} must be at least "
                f"max_num_seqs={self.max_num_seqs}"
            )
        if self.max_num_active_seqs is not None and self.max_num_active_seqs > self.max_num_seqs:
            raise ValueError(
                f"max_num_active_seqs={self.max_num_active_seqs} must not exceed max_num_seqs={self.max_num_seqs}"
            )
        scheduled = self.max_num_scheduled_tokens
        if scheduled is not None and scheduled > self.max_num_batched_tokens:
            raise ValueError(
                f"max_num_scheduled_tokens={scheduled} must not exceed "
                f"max_num_batched_tokens={self.max_num_batched_tokens}"
            )

    @classmethod
    def default_factory(cls, **settings: Any) -> SchedulerConfig:
        """A config with the two required values filled in (8192 tokens, decoder only) unless given."""
        return cls(**{"max_model_len": 8192, "is_encoder_decoder": False, **settings})

    def get_scheduler_cls(self) -> Any:
        """The scheduler class: the configured one, else by `async_scheduling`."""
        if self.scheduler_cls is None:
            return resolve_object(_ASYNC_SCHEDULER if self.async_scheduling else _SYNC_SCHEDULER)
        if isinstance(self.scheduler_cls, str):
            return resolve_object(self.scheduler_cls)
        return self.scheduler_cls
