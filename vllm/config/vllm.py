"""The whole configuration: one object per concern, and what must hold across concerns. Layer: L1.

Holds no run-time state and decides nothing for one concern alone. Values are read late: the parts stay assignable.
"""

from __future__ import annotations

from collections.abc import Iterable
from math import lcm
from typing import Annotated, Any, Protocol, TypeAlias

from pydantic import Field, SkipValidation

from vllm import envs, platforms
from vllm.config import offloading
from vllm.config.attention import AttentionConfig
from vllm.config.cache import CacheConfig
from vllm.config.device import DeviceConfig
from vllm.config.kv_events import KVEventsConfig
from vllm.config.kv_transfer import KVTransferConfig
from vllm.config.load import LoadConfig
from vllm.config.lora import LoRAConfig
from vllm.config.model import ModelConfig
from vllm.config.observability import ObservabilityConfig
from vllm.config.parallel import ParallelConfig
from vllm.config.scheduler import SchedulerConfig
from vllm.config.setting import HIDDEN, config, setting
from vllm.config.speculative import SpeculativeConfig
from vllm.config.structured_outputs import StructuredOutputsConfig
from vllm.logger import init_logger
from vllm.platforms import Platform
from vllm.utils.ids import random_uuid

logger = init_logger(__name__)


class _ShardedSpec(Protocol):
    """What context parallelism asks of a KV spec."""

    @property
    def dcp_sharded(self) -> bool: ...
    @property
    def tokens_per_state(self) -> int: ...


class _SpecGroup(Protocol):
    """What context parallelism asks of a KV group."""

    @property
    def kv_cache_spec(self) -> Any: ...


# Outside code passes partial records where only part of a config is needed, so the parts are taken as they are.
_Model: TypeAlias = Annotated[ModelConfig | None, SkipValidation]
_Cache: TypeAlias = Annotated[CacheConfig, SkipValidation]
_Parallel: TypeAlias = Annotated[ParallelConfig, SkipValidation]
_Scheduler: TypeAlias = Annotated[SchedulerConfig, SkipValidation]
_Device: TypeAlias = Annotated[DeviceConfig, SkipValidation]
_Load: TypeAlias = Annotated[LoadConfig, SkipValidation]
_Attention: TypeAlias = Annotated[AttentionConfig, SkipValidation]
_LoRA: TypeAlias = Annotated[LoRAConfig | None, SkipValidation]
_Speculative: TypeAlias = Annotated[SpeculativeConfig | None, SkipValidation]
_StructuredOutputs: TypeAlias = Annotated[StructuredOutputsConfig, SkipValidation]
_Observability: TypeAlias = Annotated[ObservabilityConfig, SkipValidation]
_KVTransfer: TypeAlias = Annotated[KVTransferConfig | None, SkipValidation]
_KVEvents: TypeAlias = Annotated[KVEventsConfig | None, SkipValidation]


@config
class VllmConfig:
    """Everything the engine is told, by concern."""

    model_config: _Model = setting(default=None, doc="The model.")
    cache_config: _Cache = setting(default_factory=CacheConfig, doc="The KV cache.")
    parallel_config: _Parallel = setting(default_factory=ParallelConfig, doc="Workers and replicas.")
    scheduler_config: _Scheduler = setting(
        default_factory=SchedulerConfig.default_factory, doc="Scheduling limits."
    )
    device_config: _Device = setting(default_factory=DeviceConfig, doc="The device.")
    load_config: _Load = setting(default_factory=LoadConfig, doc="Weight loading.")
    attention_config: _Attention = setting(default_factory=AttentionConfig, doc="Attention.")
    lora_config: _LoRA = setting(default=None, doc="Adapters.")
    speculative_config: _Speculative = setting(default=None, doc="Speculative decoding.")
    structured_outputs_config: _StructuredOutputs = setting(
        default_factory=StructuredOutputsConfig, doc="Constrained generation."
    )
    observability_config: _Observability = setting(default_factory=ObservabilityConfig, doc="Metrics.")
    kv_transfer_config: _KVTransfer = setting(default=None, doc="KV connector.")
    kv_events_config: _KVEvents = setting(default=None, doc="KV events.")
    # Records of features that are unknown here; see config/extras.py.
    ec_transfer_config: Any = setting(default=None, doc="Encoder cache transfer.", flag=HIDDEN)
    diffusion_config: Any = setting(default=None, doc="Diffusion decoding.", flag=HIDDEN)
    reasoning_config: Any = setting(default=None, doc="Reasoning markers.", flag=HIDDEN)
    # Read by plugins only.
    additional_config: Any = setting(default_factory=dict, doc="Options for plugins and platforms.")
    instance_id: str = setting(default="", doc="Id of this server in logs and metrics.", flag=HIDDEN)
    shutdown_timeout: Annotated[float, Field(ge=0)] = setting(
        default=0, doc="Seconds that running requests get to finish when the server is asked to stop."
    )

    def __post_init__(self) -> None:
        self.instance_id = self.instance_id or random_uuid()[:5]
        platform = platforms.current_platform
        platform.apply_config_platform_defaults(self)
        offloading.apply_convenience_flags(self.cache_config, self)
        self._resolve_cache(platform)
        self._resolve_async_scheduling()
        self._check_step_size()
        self._warn_about_contradictions()
        platform.check_and_update_config(self)

    # --- derived values -----------------------------------------------------------------------------------------

    @property
    def use_v2_model_runner(self) -> bool:
        """Whether resumed requests are sent to the runner as new ones."""
        chosen = envs.VLLM_USE_V2_MODEL_RUNNER
        return True if chosen is None else chosen

    @property
    def max_concurrent_batches(self) -> int:
        """Steps that may be in flight together."""
        stages = self.parallel_config.pipeline_parallel_size
        if not self.scheduler_config.async_scheduling:
            return stages
        if self.use_v2_model_runner:
            return stages + 1
        return max(2, stages)

    @property
    def max_in_flight_tokens(self) -> int:
        """Most tokens handed to the workers and not yet accounted for."""
        return self.max_concurrent_batches * self.scheduler_config.max_num_batched_tokens

    @property
    def num_speculative_tokens(self) -> int:
        """Drafts per step; 0 without speculation."""
        return 0 if self.speculative_config is None else self.speculative_config.num_speculative_tokens or 0

    @property
    def num_lookahead_tokens(self) -> int:
        """KV slots reserved behind the last token for a drafter that writes KV."""
        speculative = self.speculative_config
        if speculative is None or not (speculative.use_eagle() or speculative.method == "draft_model"):
            return 0
        return speculative.num_speculative_tokens or 0

    @property
    def num_prefill_lookahead_tokens(self) -> int:
        """Prompt tokens behind a chunk that a drafter reads; no drafter known here reads any."""
        return 0

    @property
    def num_hash_lookahead_tokens(self) -> int:
        """Tokens behind a block that its hash covers."""
        return 0 if self.speculative_config is None else self.speculative_config.lookahead_tokens()

    @property
    def is_mm_encoder_only(self) -> bool:
        """Whether this instance only encodes media; never here."""
        return False

    def adjust_dcp_kv_cache_interleave_size(self, kv_cache_groups: Iterable[_SpecGroup]) -> None:
        """Keep the tokens of one compressed state on one context-parallel rank, in every sharded group."""
        if self.parallel_config.decode_context_parallel_size == 1:
            return
        size = self.parallel_config.cp_kv_cache_interleave_size
        for group in kv_cache_groups:
            spec: _ShardedSpec = group.kv_cache_spec
            if spec.dcp_sharded and spec.tokens_per_state > 1:
                size = lcm(size, spec.tokens_per_state)
        self.parallel_config.cp_kv_cache_interleave_size = size

    # --- resolution at construction -----------------------------------------------------------------------------

    def _resolve_cache(self, platform: Platform) -> None:
        cache = self.cache_config
        if cache is None:
            return
        if cache.block_size is None:
            cache.block_size = platform.default_block_size
        model = self.model_config
        if model is not None and (model.is_hybrid or model.is_attention_free):
            cache.mamba_cache_mode = "align" if cache.enable_prefix_caching else "none"
            self._check_recurrent_model(model)

    def _check_recurrent_model(self, model: ModelConfig) -> None:
        cache, scheduler = self.cache_config, self.scheduler_config
        if cache.enable_prefix_caching and not scheduler.enable_chunked_prefill:
            raise ValueError(
                "Prefix caching of a model with recurrent layers needs chunked prefill to be enabled"
            )
        if cache.enable_prefix_caching and scheduler.disable_chunked_mm_input:
            raise ValueError(
                "Prefix caching of a model with recurrent layers needs disable_chunked_mm_input=False"
            )
        if cache.mamba_block_size is None:
            cache.mamba_block_size = cache.block_size if cache.enable_prefix_caching else model.max_model_len

    def _resolve_async_scheduling(self) -> None:
        scheduler = self.scheduler_config
        if scheduler is None or scheduler.async_scheduling is not None:
            return
        pooling = scheduler.runner_type == "pooling" or (
            self.model_config is not None and self.model_config.runner_type == "pooling"
        )
        staged_v1 = self.parallel_config.pipeline_parallel_size > 1 and not self.use_v2_model_runner
        supported_drafter = self.speculative_config is None or self.speculative_config.use_eagle()
        scheduler.async_scheduling = supported_drafter and not pooling and not staged_v1

    def _check_step_size(self) -> None:
        """What one request can get in a step, its drafts left out, must be enough for every prompt to run."""
        scheduler, model = self.scheduler_config, self.model_config
        if scheduler is None:
            return
        most, drafts = scheduler.max_num_batched_tokens, self.num_speculative_tokens
        scheduled = scheduler.max_num_scheduled_tokens
        largest = min(most - drafts, most if scheduled is None else scheduled)
        limits = f"max_num_batched_tokens={most}, max_num_scheduled_tokens={scheduled}, num_speculative_tokens={drafts}"
        if largest < 1:
            raise ValueError(f"{limits}: drafts leave no room for a token")
        if model is None or scheduler.enable_chunked_prefill:
            return
        if model.max_model_len is not None and largest < model.max_model_len:
            raise ValueError(
                f"{limits}: without chunked prefill a prompt of max_model_len={model.max_model_len} could never run"
            )

    def _warn_about_contradictions(self) -> None:
        events = self.kv_events_config
        if events is None:
            return
        if events.enable_kv_cache_events and not self.cache_config.enable_prefix_caching:
            logger.warning_once("KV events are enabled but prefix caching is off: there will be no events")
        if not events.enable_kv_cache_events and events.publisher not in (None, "null"):
            logger.warning_once(
                "KV event publisher %r is set but enable_kv_cache_events is off: nothing is published",
                events.publisher,
            )
