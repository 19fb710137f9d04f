"""Everything that a seed decides before the first action: sizes, kinds, policies, and which faults may happen.

Small pools with many seeds find more than long runs. Each fault site and each kind of action is on in only some
seeds (swarm testing), because combinations that are always on hide each other.
"""

from __future__ import annotations

import math
import random
from dataclasses import dataclass, field, replace

from tests.sim.grammar import draw_grammars
from tests.sim.retention import draw_share
from tests.sim.rng import Streams
from vllm.v1.kv_cache_interface import (
    AttentionSpec,
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
FAULT_ON = 0.25
FAULT_FIRES = 0.25


@dataclass(frozen=True)
class Byte:
    """Stands for a dtype of one byte."""

    itemsize: int = 1


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
    grammars: bool = False
    """Some requests have a grammar, for which they wait."""

    def tokens_per_block(self, spec: KVCacheSpec) -> int:
        """A block on all ranks together: where they split the context, each holds a block's worth."""
        return spec.block_size * (self.dcp if spec.dcp_sharded else 1)

    @property
    def fault_probability(self) -> float:
        """How often an enabled site fires."""
        return FAULT_FIRES


def _full(rng: random.Random) -> KVCacheSpec:
    return FullAttentionSpec(
        block_size=rng.choice((2, 2, 4, 4, 4, 8)), num_kv_heads=1, head_size=4, dtype=Byte()
    )


def _window(rng: random.Random) -> KVCacheSpec:
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
    "window": (_window, 5),
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


def _draw_specs(rng: random.Random) -> tuple[KVCacheSpec, ...]:
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


def draw_params(seed: int) -> SimParams:
    """The world of this seed."""
    rng = Streams(seed).stream("params")
    specs = _draw_specs(rng)
    only_cacheable = all(s.prefix_cacheable for s in specs)
    has_full = any(isinstance(s, FullAttentionSpec) for s in specs)
    caching = rng.random() < 0.93
    if not caching:
        specs = tuple(replace(s, mamba_cache_mode="none") if isinstance(s, MambaSpec) else s for s in specs)
    has_state = any(isinstance(s, MambaSpec) for s in specs)
    offload = caching and has_full and rng.random() < 0.8
    async_scheduling = rng.random() < 0.65
    stages = rng.choice((1, 1, 1, 2))
    depth_max = stages + (1 if async_scheduling else 0)
    params = SimParams(
        seed=seed,
        specs=specs,
        ring_ratio=2,
        device_blocks=rng.randint(8, 13) if rng.random() < 0.6 else rng.randint(12, 32),
        host_blocks=(rng.randint(16, 48) if rng.random() < 0.6 else rng.randint(4, 24)) if offload else 0,
        lazy=rng.random() < 0.35,
        disk=rng.random() < 0.2,
        ranks=rng.choice((1, 1, 2, 3)),
        async_scheduling=async_scheduling,
        pipeline_stages=stages,
        depth=depth_max if rng.random() < 0.7 else rng.randint(1, depth_max),
        max_model_len=rng.choice((12, 16, 24, 32)),
        max_num_batched_tokens=rng.choice((8, 8, 12, 16, 24, 48)),
        max_num_seqs=rng.choice((1, 2, 3, 4, 6)),
        policy=rng.choice(("fcfs", "fcfs", "priority")),
        chunked_prefill=has_state or rng.random() < 0.85,
        prefix_caching=caching,
        match_unit=2 if only_cacheable and len(specs) > 1 and rng.random() < 0.4 else None,
        retention=rng.choice((0, 0, None)),
        shared_prefix_checkpoint=rng.random() < 0.3,
        watermark=rng.choice((0.0, 0.0, 0.1)),
        reserve_full_prompt=rng.random() < 0.7,
        long_prefill_threshold=rng.choice((0, 0, 0, 6)),
        recompute_failed_loads=rng.random() < 0.6,
        early_loads=rng.random() < 0.5,
        kv_retention_share=draw_share(seed),
        faults=frozenset(site for site in FAULT_SITES if rng.random() < FAULT_ON),
        actions_off=frozenset(a for a in ("abort", "reset", "pause", "cool") if rng.random() < 0.4),
    )
    if rng.random() < 0.2:
        params = _load_heavy(params)
    if not params.chunked_prefill:
        params = replace(params, max_num_batched_tokens=max(48, params.max_num_batched_tokens))
    params = _with_drafts(_with_two_lazy(_with_second(_with_policies(_with_disk(_fit(params))))))
    params = _with_split_context(_with_kept_disk(_with_other_engine(params)))
    return replace(params, grammars=draw_grammars(seed))


def _with_split_context(params: SimParams) -> SimParams:
    """Decode context parallelism in some of the worlds with several ranks; drawn apart, so that the others stay."""
    rng = Streams(params.seed).stream("split context")
    if params.ranks == 1 or rng.random() >= (0.6 if params.shared else 0.3):
        return params
    dcp = rng.choice([n for n in (2, 3, 4) if params.ranks % n == 0])
    # A ring starts with a whole group of its tokens: pooled keys beside it see to that in a model.
    has_ring = any(isinstance(spec, CircularBufferSpec) for spec in params.specs)
    unit = math.lcm(params.match_unit or 1, params.ring_ratio if has_ring else 1)
    sizes = [n for n in (1, 2, 4) if n * dcp <= 8 and n * dcp % unit == 0]
    specs = []
    for spec in params.specs:
        if isinstance(spec, AttentionSpec) and spec.dcp_sharded:
            is_full = isinstance(spec, FullAttentionSpec)
            if is_full or rng.random() < 0.6:
                heads = 1 if params.shared and rng.random() < 0.7 else spec.max_tp_shards
                spec = replace(spec, block_size=rng.choice(sizes), max_tp_shards=heads)
            else:
                spec = replace(spec, dcp_sharded=False)
        specs.append(spec)
    return _fit(replace(params, dcp=dcp, specs=tuple(specs)))


def _with_drafts(params: SimParams) -> SimParams:
    """Speculation in some of the worlds whose kinds can take tokens back; drawn apart, so that the others stay."""
    rng = Streams(params.seed).stream("drafts")
    fixed = any(isinstance(spec, MambaSpec | CircularBufferSpec) for spec in params.specs)
    if fixed or params.pipeline_stages > 1 or rng.random() >= 0.2:
        return params
    return replace(params, num_spec_tokens=rng.choice((1, 2, 3)), eagle=rng.random() < 0.4)


def _with_kept_disk(params: SimParams) -> SimParams:
    """Most disks outlive their engine; drawn apart, so that the other worlds stay as they are."""
    rng = Streams(params.seed).stream("kept disk")
    if params.disk and params.host_blocks and not params.second_host_blocks:
        return replace(params, disk_persist=Streams(params.seed).stream("kept backend").random() < 0.6)
    if params.disk_blocks == 0 or params.second_host_blocks or rng.random() < 0.2:
        return params
    params = replace(params, disk_persist=True)
    if rng.random() < 0.4:
        return params
    # A disk with much on it. Where nothing is killed, whatever a table lost must be there again at the end.
    survives = rng.random() < 0.5
    lossy, others = ("table fails", "step fails"), (("step fails", "table fails"), ("store fails",))
    params = replace(
        params,
        lazy=False,
        host_blocks=rng.randint(16, 32),
        disk_blocks=rng.randint(10, 48),
        ranks=rng.choice((2, 2, 3)),
        store_threshold=0,
        pending_store_blocks=0,
        decline_slow_tier="off",
        faults=frozenset(lossy if survives else rng.choice(others)),
        actions_off=params.actions_off | ({"kill", "reset"} if survives else set()),
    )
    # What must be forgotten may just be on its way down.
    return (
        params if survives or rng.random() < 0.5 else replace(params, faults=params.faults | {"nan", "stall"})
    )


def _with_second(params: SimParams) -> SimParams:
    """Two connectors in some of the worlds with one; drawn apart, so that the others stay as they are."""
    rng = Streams(params.seed).stream("second connector")
    if params.host_blocks == 0 or rng.random() >= 0.12:
        return params
    if rng.random() < 0.25:  # room in both and nothing to blame: each must have stored everything
        return replace(
            _without_excuse(params, rng), store_threshold=0, second_host_blocks=120, second_lazy=False
        )
    # A small first host beside a larger second one: what the first has evicted comes from the second.
    first = params.host_blocks if rng.random() < 0.4 else rng.randint(4, 10)
    return replace(
        params, host_blocks=first, second_host_blocks=rng.randint(8, 40), second_lazy=rng.random() < 0.25
    )


def _with_two_lazy(params: SimParams) -> SimParams:
    """Two lazy connectors in a few worlds, neither with a slot for all that is in danger; drawn apart like the others."""
    rng = Streams(params.seed).stream("two lazy")
    if params.host_blocks == 0 or rng.random() >= 0.12:
        return params
    return replace(
        params,
        lazy=True,
        disk=False,
        disk_blocks=0,
        host_blocks=rng.randint(4, 7),
        second_lazy=True,
        second_host_blocks=rng.randint(4, 14),
        store_threshold=0,
        faults=params.faults & {"report late", "stall"},
    )


def _with_disk(params: SimParams) -> SimParams:
    """A third tier in some of the worlds that have a second one; drawn apart, so that the others stay as they are."""
    rng = Streams(params.seed).stream("disk")
    if params.host_blocks == 0 or params.disk or rng.random() < 0.4:
        return params
    host_blocks = params.host_blocks if rng.random() < 0.3 else rng.randint(4, 16)
    return replace(params, host_blocks=host_blocks, disk_blocks=rng.randint(3, 48))


def _with_policies(params: SimParams) -> SimParams:
    """What the offload evicts, stores and reads, in half of its worlds; drawn apart, so that the others stay as they are."""
    rng = Streams(params.seed).stream("policies")
    kind = rng.random()
    if params.host_blocks == 0 or kind < 0.45:
        return params
    if kind < 0.6:
        return _without_excuse(params, rng)
    params = replace(params, eviction_policy="arc" if rng.random() < 0.6 else "lru")
    if kind < 0.7:
        # Everything is read from below, as often as its speed allows.
        return replace(params, decline_slow_tier="all", actions_off=params.actions_off - {"cool"})
    return replace(
        params,
        store_threshold=rng.choice((0, 0, 0, 1, 2, 3)),
        max_tracker_size=rng.choice((64_000, 64_000, 5, 11)),
        pending_store_blocks=rng.choice((0, 0, 0, 1, 2, 4)),
        decline_slow_tier=rng.choice(("off", "off", "disk", "all")),
    )


def _without_excuse(params: SimParams, rng: random.Random) -> SimParams:
    """A world in which nothing explains a gap in what is stored: room below, and no fault."""
    return replace(
        params,
        lazy=False,
        disk=False,
        host_blocks=120,
        disk_blocks=0,
        store_threshold=2,
        max_tracker_size=rng.choice((4, 6, 8)),
        # Offers in several steps, the first of which are forgotten first.
        max_num_batched_tokens=8 if params.chunked_prefill else params.max_num_batched_tokens,
        pending_store_blocks=0,
        faults=frozenset(),
        actions_off=params.actions_off | {"reset", "cool"},
    )


def _with_other_engine(params: SimParams) -> SimParams:
    """A shared host tier in half of the worlds without a disk; drawn apart, so that the others stay as they are."""
    if params.host_blocks == 0 or params.disk or params.disk_blocks or params.second_host_blocks:
        return params
    if Streams(params.seed).stream("shared").random() < 0.5:
        return params
    params = replace(
        params,
        shared=True,
        ranks=1,
        eviction_policy="lru",
        decline_slow_tier="off",
        actions_off=params.actions_off - {"cool"},
    )
    rng = Streams(params.seed).stream("ranks that share")
    if rng.random() < 0.5:
        return params
    specs = [_split(spec, rng) for spec in params.specs]
    if len(specs) == 1 and rng.random() < 0.7:
        specs.append(_window(rng))
    if len(specs) > 1 and rng.random() < 0.8:  # the same on all ranks beside what is split
        alike, own = rng.sample(range(len(specs)), 2)
        specs[alike], specs[own] = _with_heads(specs[alike], 1), _with_heads(specs[own], None)
    return _fit(replace(params, ranks=rng.choice((2, 2, 3, 4)), specs=tuple(specs)))


def _split(spec: KVCacheSpec, rng: random.Random) -> KVCacheSpec:
    """The same cache, on several ranks."""
    return _with_heads(spec, rng.choice((1, 1, 2, None)))


def _with_heads(spec: KVCacheSpec, heads: int | None) -> KVCacheSpec:
    """There may be as many different bytes as heads; None: as many as ranks."""
    if isinstance(spec, MambaSpec):
        return replace(spec, tp_replicated=heads == 1)
    assert isinstance(spec, AttentionSpec)
    return replace(spec, max_tp_shards=heads)


def _load_heavy(params: SimParams) -> SimParams:
    """A world in which the lower tier serves most hits, beside steps that still run."""
    return replace(
        params,
        specs=(FullAttentionSpec(block_size=2, num_kv_heads=1, head_size=4, dtype=Byte()),),
        device_blocks=16,
        host_blocks=48,
        lazy=False,
        async_scheduling=True,
        pipeline_stages=1,
        depth=2,
        max_model_len=20,
        max_num_seqs=4,
        max_num_batched_tokens=24,
        prefix_caching=True,
        match_unit=None,
        reserve_full_prompt=False,
        early_loads=True,
        actions_off=params.actions_off - {"abort", "cool"},
    )


class _Limits:
    """The part of a config that specs read to say how much a request needs."""

    def __init__(self, params: SimParams, max_model_len: int) -> None:
        steps = params.pipeline_stages + (1 if params.async_scheduling else 0)
        self.model_config = self
        self.parallel_config = self
        self.scheduler_config = self
        self.max_model_len = max_model_len
        self.decode_context_parallel_size = params.dcp
        self.max_num_encoder_input_tokens = 0
        self.max_in_flight_tokens = steps * params.max_num_batched_tokens


def _fit(params: SimParams) -> SimParams:
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
