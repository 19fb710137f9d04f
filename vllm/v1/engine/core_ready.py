"""What a core tells its front end once it is ready.  Layer L7.

Owns which resolved values cross over: the wire's `EngineCoreReadyResponse`, and a map of the cache settings that the core
has decided. Must not know sockets.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import Any

from vllm.config import VllmConfig
from vllm.v1.engine.core_loop import EngineCore
from vllm.v1.messages import EngineCoreReadyResponse
from vllm.version import __version__

# Fields of CacheConfig that the core decides; the front end's copy takes them over.
RESOLVED_CACHE_FIELDS = (
    "block_size",
    "cache_hit_alignment_tokens",
    "effective_attention_block_size",
    "hash_block_size",
    "kv_cache_layout",
    "kv_cache_max_concurrency",
    "kv_cache_size_tokens",
    "mamba_block_size",
    "num_cpu_blocks",
    "num_gpu_blocks",
    "simple_cpu_offload_num_blocks",
)


def ready_response(core: EngineCore, engine_index: int) -> EngineCoreReadyResponse:
    """The first message of a core on each input socket."""
    config = core.vllm_config
    model, cache, parallel, scheduler = (
        config.model_config,
        config.cache_config,
        config.parallel_config,
        config.scheduler_config,
    )
    publisher = core.scheduler.get_kv_event_publisher_config()
    return EngineCoreReadyResponse(
        max_model_len=(model.max_model_len or 0) if model is not None else 0,
        num_gpu_blocks=cache.num_gpu_blocks or 0,
        block_size=cache.block_size or 0,
        dp_stats_address=None,
        dtype=str(model.dtype) if model is not None else "",
        vllm_version=__version__,
        world_size=parallel.world_size,
        data_parallel_size=parallel.replicas_on_node,
        tensor_parallel_size=parallel.tensor_parallel_size,
        pipeline_parallel_size=parallel.pipeline_parallel_size,
        decode_context_parallel_size=parallel.decode_context_parallel_size,
        data_parallel_rank=engine_index,
        max_num_seqs=scheduler.max_num_seqs,
        max_num_batched_tokens=scheduler.max_num_batched_tokens,
        instance_id=config.instance_id,
        supports_lora=config.lora_config is not None,
        max_loras=config.lora_config.max_loras if config.lora_config is not None else 0,
        mamba_block_size=cache.mamba_block_size,
        kv_cache_size_tokens=cache.kv_cache_size_tokens,
        kv_cache_max_concurrency=cache.kv_cache_max_concurrency,
        kv_events_config=None if publisher is None else dataclasses.asdict(publisher),
        weight_transfer_backend=None,
        enable_sleep_mode=False,
        supports_draft_weight_updates=False,
        effective_attention_block_size=cache.effective_attention_block_size,
    )


def resolved_settings(config: VllmConfig) -> dict[str, Any]:
    """The settings that the core has decided, as plain values."""
    return {name: vars(config.cache_config).get(name) for name in RESOLVED_CACHE_FIELDS}


def apply_resolved_settings(
    config: VllmConfig, of_all: Sequence[dict[str, Any]], readies: Sequence[EngineCoreReadyResponse]
) -> None:
    """Take the decisions of the cores over into the front end's configuration: what the one with the smallest cache has,
    the others have too, and a length that all of them can serve.
    """
    resolved = min(of_all, key=lambda values: values.get("num_gpu_blocks") or 0)
    for name in RESOLVED_CACHE_FIELDS:
        setattr(config.cache_config, name, resolved.get(name))
    if config.model_config is not None:
        config.model_config.max_model_len = min(ready.max_model_len for ready in readies)
