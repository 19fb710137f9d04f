"""What the planner needs of a `VllmConfig`, read once at the door. Layer: L3.

Partial records are legal here (only cache, scheduler and speculative config for grouping, for example), so this is
the one place of the planner that asks whether an attribute exists. Values are read when a function is called.
"""

from __future__ import annotations

from dataclasses import dataclass

from vllm.config.vllm import VllmConfig
from vllm.v1.kv_cache_layout import KVCacheLayout

UNRESOLVED_LAYOUT = KVCacheLayout.LBNHC
"""Assumed while no layout is chosen yet: one dense range per layer."""


@dataclass(frozen=True, slots=True)
class PlanInputs:
    """Settings that decide grouping and placement."""

    layout: KVCacheLayout
    hybrid_manager_disabled: bool
    hisparse_requested: bool
    drafter_drops_block: bool
    extra_retained_tokens: int
    num_blocks_override: int | None
    retention_interval: int | None
    hash_block_size: int | None
    cache_hit_alignment_tokens: int | None
    tp_size: int
    dcp_size: int


def read_plan_inputs(vllm_config: VllmConfig) -> PlanInputs:
    """The planner's settings of this config; ValueError for an unknown layout name."""
    cache_config = getattr(vllm_config, "cache_config", None)
    scheduler_config = getattr(vllm_config, "scheduler_config", None)
    parallel_config = getattr(vllm_config, "parallel_config", None)
    attention_config = getattr(vllm_config, "attention_config", None)
    layout_name = getattr(cache_config, "kv_cache_layout", None)
    return PlanInputs(
        layout=UNRESOLVED_LAYOUT if layout_name is None else KVCacheLayout.from_name(str(layout_name)),
        hybrid_manager_disabled=bool(getattr(scheduler_config, "disable_hybrid_kv_cache_manager", False)),
        hisparse_requested=getattr(attention_config, "hisparse_config", None) is not None,
        drafter_drops_block=_drafter_drops_block(vllm_config),
        extra_retained_tokens=max(0, getattr(vllm_config, "num_prefill_lookahead_tokens", 0) - 1),
        num_blocks_override=getattr(cache_config, "num_gpu_blocks_override", None),
        retention_interval=getattr(cache_config, "prefix_cache_retention_interval", None),
        hash_block_size=getattr(cache_config, "hash_block_size", None),
        cache_hit_alignment_tokens=getattr(cache_config, "cache_hit_alignment_tokens", None),
        tp_size=getattr(parallel_config, "tensor_parallel_size", 1),
        dcp_size=getattr(parallel_config, "decode_context_parallel_size", 1),
    )


def _drafter_drops_block(vllm_config: VllmConfig) -> bool:
    """The drafter's last slot of a hit is not usable, however the engine deals with it (drop or lookahead hashes)."""
    speculative = getattr(vllm_config, "speculative_config", None)
    if speculative is None or getattr(speculative, "disable_eagle_block_drop", False):
        return False
    return bool(speculative.needs_eagle_block_drop())
