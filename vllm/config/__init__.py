"""The configuration classes of the public interface."""

from vllm.config.attention import AttentionConfig
from vllm.config.cache import (
    KV_CACHE_DTYPES,
    CacheConfig,
    KVCacheDTypeHandler,
    get_kv_cache_dtype_handler,
    is_known_kv_cache_dtype,
    register_kv_cache_dtype,
)
from vllm.config.current import get_current_vllm_config, set_current_vllm_config
from vllm.config.device import DeviceConfig
from vllm.config.extras import DiffusionConfig, ECTransferConfig, ReasoningConfig
from vllm.config.kv_events import KVEventsConfig
from vllm.config.kv_transfer import KVTransferConfig
from vllm.config.load import LoadConfig
from vllm.config.lora import LoRAConfig
from vllm.config.model import ModelConfig
from vllm.config.multimodal import MultiModalConfig
from vllm.config.observability import ObservabilityConfig
from vllm.config.parallel import ParallelConfig
from vllm.config.scheduler import SchedulerConfig
from vllm.config.speculative import SpeculativeConfig
from vllm.config.structured_outputs import StructuredOutputsConfig
from vllm.config.vllm import VllmConfig

__all__ = [
    "KV_CACHE_DTYPES",
    "AttentionConfig",
    "CacheConfig",
    "DeviceConfig",
    "DiffusionConfig",
    "ECTransferConfig",
    "KVCacheDTypeHandler",
    "KVEventsConfig",
    "KVTransferConfig",
    "LoRAConfig",
    "LoadConfig",
    "ModelConfig",
    "MultiModalConfig",
    "ObservabilityConfig",
    "ParallelConfig",
    "ReasoningConfig",
    "SchedulerConfig",
    "SpeculativeConfig",
    "StructuredOutputsConfig",
    "VllmConfig",
    "get_current_vllm_config",
    "get_kv_cache_dtype_handler",
    "is_known_kv_cache_dtype",
    "register_kv_cache_dtype",
    "set_current_vllm_config",
]
