"""Memory → block counts and lengths: what fits, and errors that say what would. Layer: L3.

A request of the longest length must fit beside the null block, else it could never finish.
"""

from __future__ import annotations

import copy
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from vllm.config.vllm import VllmConfig
from vllm.logger import init_logger
from vllm.v1.kv_cache_config_types import KVCacheGroupSpec
from vllm.v1.kv_cache_spec_base import KVCacheSpec, max_model_len_of

logger = init_logger(__name__)

NULL_BLOCKS = 1
"""Block 0 stands for "nothing here" and serves no request."""

_GIB = 1 << 30


@dataclass(frozen=True, slots=True)
class RankMemory:
    """What one rank has to offer: bytes for the KV cache and bytes per block there (0 = it holds no layer)."""

    available_bytes: int
    bytes_per_block: int

    @property
    def num_blocks(self) -> int | None:
        """Blocks that fit; None = any number."""
        if self.bytes_per_block == 0:
            return None
        return max(0, self.available_bytes) // self.bytes_per_block


def may_override_num_blocks(vllm_config: VllmConfig, num_blocks: int) -> int:
    """`cache_config.num_gpu_blocks_override` if set, else `num_blocks`."""
    override = vllm_config.cache_config.num_gpu_blocks_override
    if override is None:
        return num_blocks
    logger.info("Using num_gpu_blocks_override=%d instead of the %d blocks that fit", override, num_blocks)
    return override


def blocks_per_request(vllm_config: VllmConfig, groups: Iterable[KVCacheGroupSpec]) -> int:
    """Blocks that one request of `max_model_len` tokens holds at most, over all device groups."""
    return sum(g.kv_cache_spec.max_blocks_per_request(vllm_config) for g in groups if not g.host_resident)


def max_memory_usage_bytes(vllm_config: VllmConfig, kv_cache_specs: Iterable[KVCacheSpec]) -> int:
    """Bytes that one request of `max_model_len` tokens needs at most in these layers together."""
    return sum(spec.max_memory_usage_bytes(vllm_config) for spec in kv_cache_specs)


def with_max_model_len(vllm_config: VllmConfig, max_model_len: int) -> VllmConfig:
    """A shallow copy of the config with another length; the original is not touched."""
    model_config = copy.copy(vllm_config.model_config)
    if model_config is None:
        raise ValueError("KV cache sizing needs a model_config with a resolved max_model_len")
    model_config.max_model_len = max_model_len
    changed = copy.copy(vllm_config)
    changed.model_config = model_config
    return changed


def largest_fitting_len(vllm_config: VllmConfig, groups: Sequence[KVCacheGroupSpec], num_blocks: int) -> int:
    """The largest length up to `max_model_len` of which one request fits into `num_blocks` blocks; 0 if none does."""

    def fits(length: int) -> bool:
        needed = blocks_per_request(with_max_model_len(vllm_config, length), groups)
        return needed + NULL_BLOCKS <= num_blocks

    longest = max_model_len_of(vllm_config)
    if fits(longest):
        return longest
    low, high = 0, longest  # low fits (or is 0), high does not
    while high - low > 1:
        middle = (low + high) // 2
        low, high = (middle, high) if fits(middle) else (low, middle)
    return low


def require_available_memory(available_bytes: int) -> None:
    """Raise ValueError if nothing is left for the cache."""
    if available_bytes <= 0:
        raise ValueError(
            "No available memory for the cache blocks: "
            f"{available_bytes / _GIB:.2f} GiB are left after the model. Raise gpu_memory_utilization (device) or "
            "VLLM_CPU_KVCACHE_SPACE (CPU), or load a smaller model."
        )


def require_usable_override(groups: Sequence[KVCacheGroupSpec], num_blocks: int) -> None:
    """Raise ValueError if a `num_gpu_blocks_override` of `num_blocks` leaves no room for a request of even one token."""
    needed = NULL_BLOCKS + sum(not group.host_resident for group in groups)
    if num_blocks < needed:
        raise ValueError(
            f"num_gpu_blocks_override={num_blocks} leaves no usable KV cache: no request fits into less than {needed} "
            f"blocks ({NULL_BLOCKS} is reserved, and each of the {needed - NULL_BLOCKS} groups of layers needs one)"
        )


def require_room_for_one_request(
    vllm_config: VllmConfig, groups: Sequence[KVCacheGroupSpec], memory: RankMemory
) -> None:
    """Raise ValueError if a request of `max_model_len` does not fit; the message says which length would."""
    num_blocks = memory.num_blocks
    needed = blocks_per_request(vllm_config, groups) + NULL_BLOCKS
    if num_blocks is None or needed <= num_blocks:
        return
    needed_bytes = needed * memory.bytes_per_block
    fitting = largest_fitting_len(vllm_config, groups, num_blocks)
    hint = f"the estimated maximum model length is {fitting}" if fitting else "no length fits"
    raise ValueError(
        f"To serve at least one request with the model's max seq len ({max_model_len_of(vllm_config)}), "
        f"{needed_bytes / _GIB:.4f} GiB of KV cache ({needed} blocks of {memory.bytes_per_block} bytes) are needed, but "
        f"{memory.available_bytes / _GIB:.4f} GiB ({num_blocks} blocks) are available. Based on the available memory, "
        f"{hint}. Lower max_model_len, or give the cache more memory: kv_cache_memory_bytes if it is set, else "
        "gpu_memory_utilization (device) or VLLM_CPU_KVCACHE_SPACE (CPU)."
    )


def max_concurrency(vllm_config: VllmConfig, groups: Sequence[KVCacheGroupSpec], num_blocks: int) -> float:
    """How many requests of `max_model_len` tokens fit at once; 0.0 without cached layers."""
    needed = blocks_per_request(vllm_config, groups)
    return (num_blocks - NULL_BLOCKS) / needed if needed else 0.0


def common_num_blocks(ranks: Iterable[RankMemory]) -> int | None:
    """The count that every rank can hold; None if no rank holds a layer."""
    counts = [rank.num_blocks for rank in ranks]
    limited = [count for count in counts if count is not None]
    return min(limited) if limited else None
