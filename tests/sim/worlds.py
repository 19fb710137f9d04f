"""From a seed to its world: the plain draw, and what is added to some worlds, each from a stream of its own.

So a new addition leaves the worlds without it as they were.
"""

from __future__ import annotations

import math
import random
from dataclasses import replace

from tests.sim.encoder import with_encoder
from tests.sim.grammar import draw_grammars
from tests.sim.kinds import with_other_kinds
from tests.sim.params import (
    BEFORE_ALL_KINDS,
    FAULT_ON,
    FAULT_SITES,
    Byte,
    Outside,
    SimParams,
    draw_specs,
    draw_window,
    fit,
)
from tests.sim.retention import draw_share
from tests.sim.rng import Streams
from vllm.v1.kv_cache_interface import (
    AttentionSpec,
    CircularBufferSpec,
    FullAttentionSpec,
    HiSparseHotSpec,
    HiSparseResidentSpec,
    KVCacheSpec,
    MambaSpec,
)

_AS_THEY_WERE = frozenset({252, 2487, 2542, 13671, 90048})
"""Seeds of kept regressions, whose worlds the additions that change drawn ones leave alone."""


def draw_params(seed: int) -> SimParams:
    """The world of this seed."""
    rng = Streams(seed).stream("params")
    specs = draw_specs(rng)
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
    params = with_encoder(params)
    if not params.chunked_prefill:
        params = replace(params, max_num_batched_tokens=max(48, params.max_num_batched_tokens))
    params = _with_drafts(
        _with_two_lazy(_with_second(_with_policies(_with_disk(fit(_with_scratch(params))))))
    )
    params = _with_wide_blocks(_with_lazy_sharers(_with_other_engine(params)))
    params = _with_split_context(_with_kept_disk(params))
    params = _with_manager_from_outside(_with_failing_loads(params))
    params = replace(params, grammars=draw_grammars(seed), empties_tiers=_empties(params))
    return with_other_kinds(params)


def _empties(params: SimParams) -> bool:
    """Tiers are emptied one by one in some of the worlds with several, more of those where much is read; drawn apart."""
    must_store = {"reset", "cool"} <= params.actions_off
    if params.host_blocks == 0 or not params.prefix_caching or must_store or params.seed in _AS_THEY_WERE:
        return False
    share = 0.5 if params.disk_blocks or params.reads_below else 0.2
    return Streams(params.seed).stream("empties tiers").random() < share


def _with_failing_loads(params: SimParams) -> SimParams:
    """Requests read from below all the time, and not always what they want, in some of the worlds with faults; drawn
    apart, so that the others stay.
    """
    rng = Streams(params.seed).stream("failing loads")
    can_fail = params.host_blocks > 0 and params.faults and not {"kill", "reset"} <= params.actions_off
    if not can_fail or params.seed in _AS_THEY_WERE or rng.random() >= (0.6 if params.disk_blocks else 0.25):
        return params
    faults = {"load fails", *(params.faults - {"poison", "table fails"})}
    faults.update(site for site, share in (("bad source", 0.7), ("stall", 0.5)) if rng.random() < share)
    if params.disk_blocks:  # where most of what is read is, as soon as the host has no room for it
        params = replace(
            params,
            lazy=False,
            store_threshold=0,
            host_blocks=rng.randint(6, 10),
            disk_blocks=rng.randint(24, 48),
        )
        if params.dcp == 1 and rng.random() < 0.6:  # many small blocks
            full = FullAttentionSpec(block_size=2, num_kv_heads=1, head_size=4, dtype=Byte())
            params = fit(replace(params, specs=(full,), match_unit=None, num_spec_tokens=0))
    return replace(
        params,
        reads_below=True,
        faults=frozenset(faults),
        actions_off=params.actions_off - {"abort", "cool"},
    )


def _with_manager_from_outside(params: SimParams) -> SimParams:
    """An offloading spec of its own in most of the worlds without offload; drawn apart, so that the others stay."""
    rng = Streams(params.seed).stream("outside")
    has_content = params.prefix_caching and any(spec.prefix_cacheable for spec in params.specs)
    if params.host_blocks or not has_content or rng.random() >= 0.7:
        return params
    faults = params.faults if rng.random() < 0.5 else frozenset()
    # Where everything goes wrong at once, little is ever stored and read again.
    faults |= {*rng.sample(("manager fails", "put off", "declines", "job refused"), rng.choice((0, 1, 1, 2)))}
    if rng.random() < 0.8:
        faults |= {"nan"}
    deadline_s = rng.choice((600.0, 12.0))
    if deadline_s < 100:
        faults |= {"stall"}
    reads_below = rng.random() < 0.7
    params = replace(
        params,
        host_blocks=rng.randint(24, 80) if rng.random() < 0.6 else rng.randint(4, 16),
        lazy=False,
        disk=False,
        early_loads=False,  # jobs are known when their step begins
        outside=Outside(
            is_whole=rng.random() < 0.3,
            tells_resets=rng.random() < 0.5,
            prompt_only=rng.random() < 0.2,
            self_describing=rng.random() < 0.5,
            deadline_s=deadline_s,
            hangs=deadline_s < 100 and Streams(params.seed).stream("outside hangs").random() < 0.4,
        ),
        faults=faults,
        actions_off=params.actions_off - ({"cool", "reset"} if rng.random() < 0.6 else {"cool"}),
        reads_below=reads_below,
    )
    if not reads_below or params.dcp > 1 or rng.random() < 0.3:
        return params
    return fit(
        replace(
            params,
            specs=(FullAttentionSpec(block_size=2, num_kv_heads=1, head_size=4, dtype=Byte()),),
            match_unit=None,
            num_spec_tokens=0,
            max_model_len=20,
            device_blocks=16,
            host_blocks=max(48, params.host_blocks),
            max_num_seqs=max(3, params.max_num_seqs),
            faults=params.faults - {"step fails", "put off"},
        )
    )


def _with_split_context(params: SimParams) -> SimParams:
    """Decode context parallelism in some of the worlds with several ranks; drawn apart, so that the others stay."""
    rng = Streams(params.seed).stream("split context")
    # Worlds with a disk are few, and what happens there is rare enough.
    share = 0.6 if params.shared else 0.1 if params.disk_blocks else 0.3
    if params.ranks == 1 or rng.random() >= share:
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
    return fit(replace(params, dcp=dcp, specs=tuple(specs)))


def _with_scratch(params: SimParams) -> SimParams:
    """Scratch of host-sparse attention in some worlds; drawn apart, so that the others stay."""
    rng = Streams(params.seed).stream("scratch")
    kinds = rng.choice((("hot",), ("resident",), ("hot", "resident")))
    if rng.random() >= 0.1:
        return params
    specs = list(params.specs)
    for kind in kinds:
        size = rng.choice((2, 4))
        spec: KVCacheSpec = HiSparseResidentSpec(block_size=size, page_size=8 * size)
        if kind == "hot":
            spec = HiSparseHotSpec(
                block_size=size, page_size=8 * size, blocks_per_request=rng.choice((1, 2, 3))
            )
        specs.insert(rng.randint(0, len(specs)), spec)
    params = replace(params, specs=tuple(specs))
    if (
        params.host_blocks and params.seed not in _AS_THEY_WERE and rng.random() < 0.5
    ):  # copies that linger while memory is short
        params = replace(
            params,
            device_blocks=1,
            lazy=False,
            max_num_seqs=max(3, params.max_num_seqs),
            faults=params.faults | {"stall", "report late"},
        )
    # With no more memory than one request needs, what it needs must have been counted.
    if params.chunked_prefill and rng.random() < 0.4:
        return replace(params, device_blocks=1, max_num_batched_tokens=8)
    return params


def _with_drafts(params: SimParams) -> SimParams:
    """Speculation in some of the worlds; drawn apart, so that the others stay."""
    rng = Streams(params.seed).stream("drafts")
    fixed = any(isinstance(spec, MambaSpec | CircularBufferSpec) for spec in params.specs)
    if params.seed in BEFORE_ALL_KINDS and (fixed or params.pipeline_stages > 1):
        return params
    if rng.random() >= (0.6 if fixed else 0.25):
        return params
    count, eagle = rng.choice((1, 2, 3)), rng.random() < 0.4
    specs = tuple(_with_draft_rows(spec, count, params.ring_ratio) for spec in params.specs)
    if fixed and rng.random() < 0.6:
        params = replace(params, retention=None)  # states are kept that no prompt ends with
    return fit(replace(params, specs=specs, num_spec_tokens=count, eagle=eagle))


def _with_draft_rows(spec: KVCacheSpec, count: int, ring_ratio: int) -> KVCacheSpec:
    """The same cache with room for what `count` drafts leave behind until they are refused."""
    if isinstance(spec, MambaSpec):
        return replace(spec, num_speculative_blocks=count)
    if isinstance(spec, CircularBufferSpec):
        return replace(spec, block_size=max(spec.block_size, ring_ratio + count))
    return spec


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
        specs.append(draw_window(rng))
    if len(specs) > 1 and rng.random() < 0.8:  # the same on all ranks beside what is split
        alike, own = rng.sample(range(len(specs)), 2)
        specs[alike], specs[own] = _with_heads(specs[alike], 1), _with_heads(specs[own], None)
    return fit(replace(params, ranks=rng.choice((2, 2, 3, 4)), specs=tuple(specs)))


def _with_lazy_sharers(params: SimParams) -> SimParams:
    """A lazy engine on a shared pool without room for all in some of the worlds that have one; drawn apart as well."""
    rng = Streams(params.seed).stream("lazy sharers")
    if not params.shared or params.store_threshold or params.seed in _AS_THEY_WERE or rng.random() >= 0.4:
        return params
    return replace(params, lazy=True, host_blocks=rng.randint(6, 16))


def _with_wide_blocks(params: SimParams) -> SimParams:
    """Several ranks on a shared pool, some groups alike on all of them and some not, in many of the worlds with such a
    pool and some with a host tier; drawn apart as well.
    """
    rng = Streams(params.seed).stream("wide blocks")
    share = 0.7 if params.shared else 0.4
    if params.host_blocks == 0 or params.disk or params.disk_blocks or params.second_host_blocks:
        return params
    if params.seed in _AS_THEY_WERE or rng.random() >= share:
        return params
    specs = [*params.specs]
    if len(specs) == 1:
        specs.append(draw_window(rng))
    own = rng.randrange(len(specs))
    specs = [
        _with_heads(spec, None if i == own else rng.choice((1, 1, 1, 2))) for i, spec in enumerate(specs)
    ]
    return fit(
        replace(
            params,
            shared=True,
            ranks=rng.choice((2, 2, 3, 4)),
            host_blocks=params.host_blocks if rng.random() < 0.5 else rng.randint(7, 20),
            eviction_policy="lru",
            decline_slow_tier="off",
            actions_off=params.actions_off - {"cool"},
            specs=tuple(specs),
        )
    )


def _split(spec: KVCacheSpec, rng: random.Random) -> KVCacheSpec:
    """The same cache, on several ranks."""
    return _with_heads(spec, rng.choice((1, 1, 2, None)))


def _with_heads(spec: KVCacheSpec, heads: int | None) -> KVCacheSpec:
    """There may be as many different bytes as heads; None: as many as ranks."""
    if isinstance(spec, MambaSpec):
        return replace(spec, tp_replicated=heads == 1)
    return replace(spec, max_tp_shards=heads) if isinstance(spec, AttentionSpec) else spec


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
