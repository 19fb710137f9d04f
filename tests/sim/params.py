"""What a seed decides before the first action, as data; the kinds of caches it may choose; what makes a world possible.

Small pools with many seeds find more than long runs. Each fault site and each kind of action is on in only some
seeds (swarm testing), because combinations that are always on hide each other.
"""

from __future__ import annotations

import random
from dataclasses import dataclass, field, replace

from vllm.v1.kv_cache_interface import (
    ChunkedLocalAttentionSpec,
    CircularBufferSpec,
    FullAttentionSpec,
    KVCacheSpec,
    MambaSpec,
    SlidingWindowMLASpec,
    SlidingWindowSpec,
)

FAULT_SITES = (
    "load fails",
    "short accept",
    "store fails",
    "bad source",
    "report late",
    "stall",
    "step fails",
    "nan",
    "poison",
)
BEFORE_ALL_KINDS = frozenset(
    {11, 52, 108, 167, 252, 620, 639, 952, 1095, 1269, 1767, 2487, 2542, 4683, 10850, 11133, 13671, 13802}
    | {30039, 90048}
)
"""Seeds of regressions that were kept before every registered kind was drawn: their worlds stay."""
FAULT_ON = 0.25
FAULT_FIRES = 0.25


@dataclass(frozen=True)
class Byte:
    """Stands for a dtype of one byte."""

    itemsize: int = 1


@dataclass(frozen=True)
class Outside:
    """How a manager from outside behaves, whose places are the `host_blocks`."""

    is_whole: bool
    """It wants requests as a whole."""
    tells_resets: bool
    """Its events say what a reset removed."""
    prompt_only: bool
    self_describing: bool
    """Events carry tokens."""
    deadline_s: float = 600.0
    """After which a job whose end was not told is given up."""
    hangs: bool = False
    """A job that hangs never ends while requests are there, so that its memory does not come back."""


@dataclass(frozen=True)
class SimParams:
    """One seed's world. Tokens, blocks and requests are counts."""

    seed: int
    specs: tuple[KVCacheSpec, ...]
    ring_ratio: int
    device_blocks: int
    host_blocks: int
    """0 = no offload."""
    lazy: bool
    disk: bool
    ranks: int
    async_scheduling: bool
    pipeline_stages: int
    depth: int
    """Steps that the driver lets be in flight at most; never above what the scheduler allows."""
    max_model_len: int
    max_num_batched_tokens: int
    max_num_seqs: int
    policy: str
    chunked_prefill: bool
    prefix_caching: bool
    match_unit: int | None
    retention: int | None
    shared_prefix_checkpoint: bool
    watermark: float
    reserve_full_prompt: bool
    long_prefill_threshold: int
    recompute_failed_loads: bool
    early_loads: bool
    """Loads start as soon as their step is sent, beside steps that still run; else after the step's forward."""
    faults: frozenset[str]
    actions_off: frozenset[str] = field(default_factory=frozenset)
    kv_retention_share: float = 0.0
    """Of a pool's blocks that may be protected; 0 = no request gives a hint."""
    disk_blocks: int = 0
    """Of a disk below the host; 0 = none."""
    disk_persist: bool = False
    """The disk outlives the engine, which may be killed at any time."""
    eviction_policy: str = "lru"
    store_threshold: int = 0
    max_tracker_size: int = 64_000
    pending_store_blocks: int = 0
    """Blocks of stores that may be under way together; 0 = any number."""
    decline_slow_tier: str = "off"
    second_host_blocks: int = 0
    """Of a second offload connector behind the same MultiConnector; 0 = only one connector."""
    second_lazy: bool = False
    num_spec_tokens: int = 0
    """Drafts per step."""
    eagle: bool = False
    """The drafter reads hidden states, so that the last block of a hit is computed again."""
    shared: bool = False
    """The host tier is a pool that another engine uses too."""
    dcp: int = 1
    """Ranks that split the context of a group, where its spec says so."""
    reads_below: bool = False
    """The device forgets all the time what a tier below has, so that requests load."""
    empties_tiers: bool = False
    """Some tiers are emptied now and then while the others are left alone."""
    grammars: bool = False
    """Some requests have a grammar, for which they wait."""
    encoder_tokens: int = 0
    """Most tokens of an encoder's output that a request reads; 0 = the model has no encoder."""
    outside: Outside | None = None
    """What keeps the offloaded blocks comes from outside."""

    def tokens_per_block(self, spec: KVCacheSpec) -> int:
        """A block on all ranks together: where they split the context, each holds a block's worth."""
        return spec.block_size * (self.dcp if spec.dcp_sharded else 1)

    def fault_probability(self, site: str) -> float:
        """How often an enabled site fires."""
        if self.reads_below and site in {"step fails", "nan"}:
            return FAULT_FIRES / 3  # requests must live long enough to read
        return FAULT_FIRES * 1.5 if self.reads_below and site in {"load fails", "bad source"} else FAULT_FIRES


def _full(rng: random.Random) -> KVCacheSpec:
    return FullAttentionSpec(
        block_size=rng.choice((2, 2, 4, 4, 4, 8)), num_kv_heads=1, head_size=4, dtype=Byte()
    )


def draw_window(rng: random.Random) -> KVCacheSpec:
    size = rng.choice((3, 4, 6, 9, 13))
    return SlidingWindowSpec(
        block_size=rng.choice((2, 4, 4, 8)), num_kv_heads=1, head_size=4, dtype=Byte(), sliding_window=size
    )


def _chunked(rng: random.Random) -> KVCacheSpec:
    return ChunkedLocalAttentionSpec(
        block_size=rng.choice((2, 4)), num_kv_heads=1, head_size=4, dtype=Byte(), attention_chunk_size=8
    )


def _state(rng: random.Random) -> KVCacheSpec:
    return MambaSpec(rng.choice((4, 4, 8)), ((8,),), (Byte(),), mamba_cache_mode="align")


def _ring(rng: random.Random) -> KVCacheSpec:
    return CircularBufferSpec(
        block_size=rng.choice((2, 4)), num_kv_heads=1, head_size=4, dtype=Byte(), dcp_sharded=False
    )


def _replay(rng: random.Random) -> KVCacheSpec:
    return SlidingWindowMLASpec(
        block_size=rng.choice((2, 4)),
        num_kv_heads=1,
        head_size=8,
        dtype=Byte(),
        sliding_window=rng.choice((2, 4, 8)),  # whole groups of a ring's tokens
        bounded_replay=True,
    )


_EXTRA_KINDS = {
    "full": (_full, 2),
    "window": (draw_window, 5),
    "chunked": (_chunked, 2),
    "state": (_state, 5),
    "ring": (_ring, 2),
    "replay": (_replay, 1),
}

# A replay starts before the hit's end, where states and other windows are not kept; no model mixes them.
_NOT_WITH = {
    "replay": frozenset({"state", "window", "chunked"}),
    "state": frozenset({"replay"}),
    "window": frozenset({"replay"}),
    "chunked": frozenset({"replay"}),
}


def draw_specs(rng: random.Random) -> tuple[KVCacheSpec, ...]:
    count = rng.choice((1, 1, 2, 2, 3, 4))
    specs = [_full(rng)]
    names = [name for name, (_, weight) in _EXTRA_KINDS.items() for _ in range(weight)]
    seen: set[str] = set()
    while len(specs) < count:
        name = rng.choice(names)
        if name in seen and name in {"replay", "ring", "chunked"}:
            continue
        if seen & _NOT_WITH.get(name, frozenset()):
            continue
        seen.add(name)
        specs.append(_EXTRA_KINDS[name][0](rng))
    if rng.random() < 0.1 and len(specs) > 1:
        specs.pop(0)  # no full attention
    rng.shuffle(specs)
    return tuple(specs)


class _Limits:
    """The part of a config that specs read to say how much a request needs."""

    def __init__(self, params: SimParams, max_model_len: int) -> None:
        steps = params.pipeline_stages + (1 if params.async_scheduling else 0)
        self.model_config = self
        self.parallel_config = self
        self.scheduler_config = self
        self.max_model_len = max_model_len
        self.decode_context_parallel_size = params.dcp
        self.max_num_encoder_input_tokens = params.encoder_tokens
        self.max_in_flight_tokens = steps * params.max_num_batched_tokens


def fit(params: SimParams) -> SimParams:
    """Shorten requests, then grow the pool, until one request of full length fits beside the null block."""
    length, blocks = params.max_model_len, params.device_blocks

    def needed(tokens: int) -> int:
        limits = _Limits(params, tokens)
        specs = [
            replace(s, block_size=tokens) if isinstance(s, MambaSpec) and s.mamba_cache_mode == "none" else s
            for s in params.specs
        ]
        return sum(s.max_blocks_per_request(limits) for s in specs) + 1

    while needed(length) > blocks and length > 12:
        length -= 4
    blocks = max(blocks, needed(length))
    specs = tuple(
        replace(s, block_size=length) if isinstance(s, MambaSpec) and s.mamba_cache_mode == "none" else s
        for s in params.specs
    )
    return replace(params, specs=specs, max_model_len=length, device_blocks=blocks)
