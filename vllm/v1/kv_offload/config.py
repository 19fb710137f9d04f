"""What an offloading spec is told about the engine: plain frozen numbers and names.

Owns the records. It must not know where they come from. Layer L2.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True, slots=True)
class OffloadingGroupConfig:
    """One offloaded KV cache group. ``group_id`` is its index among all groups, scratch ones included.

    ``sliding_window_size_in_chunks``: how many chunks before its end a hit needs of this group; None = all.
    """

    tokens_per_block: int
    layer_names: tuple[str, ...]
    group_id: int
    sliding_window_size_in_chunks: int | None = None


@dataclass(frozen=True, slots=True)
class OffloadingModelConfig:
    """The model: its name or path, the dtype of its KV, the longest request in tokens."""

    name: str
    dtype: str
    max_model_len: int = 0


@dataclass(frozen=True, slots=True)
class OffloadingCacheConfig:
    """Tokens that one hash stands for, and blocks that one key stands for."""

    tokens_per_hash: int
    blocks_per_chunk: int


@dataclass(frozen=True, slots=True)
class OffloadingParallelConfig:
    """Which process this is. ``is_parallelism_agnostic``: ranks of any layout could share the content."""

    rank: int
    world_size: int
    tp_size: int
    pp_size: int
    pcp_size: int
    dcp_size: int
    data_parallel_index: int
    data_parallel_size: int
    data_parallel_rank_local: int
    is_parallelism_agnostic: bool


@dataclass(frozen=True, slots=True)
class OffloadingConfig:
    """All of it. ``worker_kv_bytes_per_block``: bytes of one block on one rank. ``extra_config``: the user's settings."""

    groups: tuple[OffloadingGroupConfig, ...]
    worker_kv_bytes_per_block: int
    enable_kv_cache_events: bool
    extra_config: Mapping[str, Any]  # the user's JSON
    engine_id: str | None
    model: OffloadingModelConfig
    cache: OffloadingCacheConfig
    parallel: OffloadingParallelConfig
    replicated_layout: bool = False
    canonical_layout: bool = False
    kv_cache_layout: str | None = None
