"""The scheduler's limits, taken from the configuration once at the door.

Owns the translation of config objects into one frozen record; nothing deeper in the scheduler sees a config.
Layer: L5 (scheduler).
"""

from __future__ import annotations

from dataclasses import dataclass

from vllm.config import VllmConfig
from vllm.v1.core.sched.request_queue import SchedulingPolicy
from vllm.v1.kv_cache_interface import (
    KVCacheConfig,
    KVCacheSpec,
    KVCacheSpecKind,
    iter_layer_specs,
)

OVERTAKE_CANDIDATES_MAX = 4
"""How many requests behind one that does not fit are tried in a pass."""
OVERTAKES_PER_REQUEST_MAX = 16
"""How often a request may be overtaken before everything waits for it."""
MISFIT_PASSES_MAX = 8
"""Passes after which a request that did not fit looks its prefix up again, although no sign says that it fits now."""
LOAD_ATTEMPTS_MAX = 3
"""Failed external loads of one request after which it is computed without asking again."""


@dataclass(frozen=True, slots=True)
class CacheShape:
    """What the scheduler must know about the KV groups (all in tokens).

    ``state_block_tokens``: distance of recurrent states that are kept, None without such groups.
    ``restart_alignment``: positions at which computing may start are multiples of this.
    ``replay_tokens``: tokens before the end of a hit that have to be computed again.
    ``hash_tokens``: tokens per block hash.
    ``can_cut_anywhere``: a request may lose its last blocks and go on from the border before them.
    ``overwrites_state``: some group has a running state, so that a token once computed cannot be taken back.
    """

    state_block_tokens: int | None
    restart_alignment: int
    replay_tokens: int
    hash_tokens: int
    can_cut_anywhere: bool
    overwrites_state: bool

    @classmethod
    def from_config(cls, config: KVCacheConfig, block_size: int, hash_block_size: int) -> CacheShape:
        """The shape of ``config``; ``block_size`` is the scheduler's block."""
        specs = [spec for group in config.kv_cache_groups for spec in iter_layer_specs(group.kv_cache_spec)]
        # Chunks have to end where states are kept, as in Mamba's `align` mode; a kind from outside says so too.
        state_blocks = {spec.block_size for spec in specs if spec.keeps_aligned_states}
        alignment = 1
        if any(_restarts_only_aligned(spec) for spec in specs):
            alignment = config.cache_hit_alignment_tokens or block_size
        return cls(
            state_block_tokens=max(state_blocks) if state_blocks else None,
            restart_alignment=alignment,
            replay_tokens=max((spec.prefix_replay_tokens for spec in specs), default=0),
            hash_tokens=hash_block_size,
            can_cut_anywhere=len(config.kv_cache_groups) == 1
            and alignment == 1
            and all(spec.keeps_all_tokens for spec in specs),
            overwrites_state=any(spec.kv_cache_spec_kind is KVCacheSpecKind.MAMBA for spec in specs),
        )

    def restart_position(self, num_tokens: int) -> int:
        """The last position at or before ``num_tokens`` where computing may start."""
        return num_tokens // self.restart_alignment * self.restart_alignment


def _restarts_only_aligned(spec: KVCacheSpec) -> bool:
    """True if the kind cannot start in the middle: it keeps states, compresses tokens, or has scratch."""
    has_scratch = not spec.prefix_cacheable and spec.prefix_replay_tokens == 0
    return spec.tokens_per_state != 1 or has_scratch


@dataclass(frozen=True, slots=True)
class SchedulerParams:
    """Frozen limits and switches (tokens and requests).  Names follow the configuration fields."""

    policy: SchedulingPolicy
    max_num_seqs: int
    max_num_active_seqs: int
    max_num_batched_tokens: int
    long_prefill_token_threshold: int
    long_prefill_token_threshold_adaptive: bool
    enable_chunked_prefill: bool
    reserve_full_isl: bool
    local_prefill_interval: int
    max_concurrent_batches: int
    pipeline_parallel_size: int
    data_parallel_rank: int
    is_pooling_model: bool
    max_loras: int
    """Adapters in one step; 0 = adapters are off."""
    num_spec_tokens: int
    num_lookahead_tokens: int
    num_prefill_lookahead_tokens: int
    drops_eagle_block: bool
    hash_lookahead_tokens: int
    recompute_kv_load_failures: bool
    prefix_caching: bool
    per_request_spec_metrics: bool
    cache: CacheShape


def params_from_config(
    vllm_config: VllmConfig, kv_cache_config: KVCacheConfig, block_size: int, hash_block_size: int
) -> SchedulerParams:
    """Read everything the scheduler needs from the configuration."""
    scheduler, parallel = vllm_config.scheduler_config, vllm_config.parallel_config
    speculative, transfer = vllm_config.speculative_config, vllm_config.kv_transfer_config
    lora = vllm_config.lora_config
    # Data-parallel engines keep step; there the core says when prefills are held back.
    interval = scheduler.prefill_schedule_interval if parallel.data_parallel_size == 1 else 1
    return SchedulerParams(
        policy=SchedulingPolicy(scheduler.policy),
        max_num_seqs=scheduler.max_num_seqs,
        max_num_active_seqs=scheduler.max_num_active_seqs or scheduler.max_num_seqs,
        max_num_batched_tokens=scheduler.max_num_batched_tokens,
        long_prefill_token_threshold=scheduler.long_prefill_token_threshold,
        long_prefill_token_threshold_adaptive=scheduler.long_prefill_token_threshold_adaptive,
        enable_chunked_prefill=scheduler.enable_chunked_prefill,
        reserve_full_isl=scheduler.scheduler_reserve_full_isl,
        local_prefill_interval=interval,
        max_concurrent_batches=vllm_config.max_concurrent_batches,
        pipeline_parallel_size=parallel.pipeline_parallel_size,
        data_parallel_rank=parallel.data_parallel_index,
        is_pooling_model=scheduler.runner_type == "pooling",
        max_loras=0 if lora is None else lora.max_loras,
        num_spec_tokens=vllm_config.num_speculative_tokens,
        num_lookahead_tokens=vllm_config.num_lookahead_tokens,
        num_prefill_lookahead_tokens=vllm_config.num_prefill_lookahead_tokens,
        drops_eagle_block=speculative is not None and speculative.use_eagle_block_drop(),
        hash_lookahead_tokens=vllm_config.num_hash_lookahead_tokens,
        recompute_kv_load_failures=transfer is not None and transfer.kv_load_failure_policy == "recompute",
        prefix_caching=vllm_config.cache_config.enable_prefix_caching,
        per_request_spec_metrics=vllm_config.observability_config.per_request_spec_decode_metrics != "none",
        cache=CacheShape.from_config(kv_cache_config, block_size, hash_block_size),
    )
