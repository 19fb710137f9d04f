"""Builds the KV cache manager from the configuration.

Owns the translation of config fields into constructor arguments.  Layer: L5 (scheduler).
"""

from __future__ import annotations

from vllm.config import VllmConfig
from vllm.v1.core.kv_cache_manager import KVCacheManager
from vllm.v1.core.kv_cache_metrics import KVCacheMetricsCollector
from vllm.v1.kv_cache_interface import KVCacheConfig


def make_kv_cache_manager(
    vllm_config: VllmConfig,
    kv_cache_config: KVCacheConfig,
    block_sizes: tuple[int, int],
    max_model_len: int,
    log_stats: bool,
) -> KVCacheManager:
    """The manager of ``kv_cache_config``; ``block_sizes`` are the scheduler's and the hash's, in tokens."""
    cache, parallel = vllm_config.cache_config, vllm_config.parallel_config
    observability, events = vllm_config.observability_config, vllm_config.kv_events_config
    collector = None
    if log_stats and observability.kv_cache_metrics:
        collector = KVCacheMetricsCollector(observability.kv_cache_metrics_sample)
    return KVCacheManager(
        kv_cache_config,
        max_model_len=max_model_len,
        scheduler_block_size=block_sizes[0],
        hash_block_size=block_sizes[1],
        max_in_flight_tokens=vllm_config.max_in_flight_tokens,
        enable_caching=cache.enable_prefix_caching,
        use_eagle=_drafter_drops_blocks(vllm_config),
        num_hash_lookahead_tokens=vllm_config.num_hash_lookahead_tokens,
        num_prefill_lookahead=vllm_config.num_prefill_lookahead_tokens,
        log_stats=log_stats,
        enable_kv_cache_events=events is not None and events.enable_kv_cache_events,
        dcp_world_size=parallel.decode_context_parallel_size,
        pcp_world_size=parallel.prefill_context_parallel_size,
        metrics_collector=collector,
        watermark=vllm_config.scheduler_config.watermark,
        enable_mamba_shared_prefix_checkpoint=cache.enable_mamba_shared_prefix_checkpoint,
    )


def _drafter_drops_blocks(vllm_config: VllmConfig) -> bool:
    """True if groups of the drafter need care; with lookahead hashes they stay flagged, but nothing is dropped."""
    speculative = vllm_config.speculative_config
    if speculative is None or not speculative.use_eagle():
        return False
    return speculative.use_eagle_block_drop() or vllm_config.num_hash_lookahead_tokens > 0
