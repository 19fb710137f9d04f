"""Hit searches against their definition: the largest aligned end from which every group can go on."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from math import lcm

from hypothesis import given, settings
from hypothesis import strategies as st

from tests.helpers.kv_core import BYTE, chunked, config, fake_hashes, full, mamba, ring, rswa, window
from tests.helpers.registered_kinds import registered_kinds
from vllm.utils.math_utils import cdiv
from vllm.v1.core.block_hash import make_block_hash_with_group_id
from vllm.v1.core.kv_cache_coordinator import KVCacheCoordinator, get_kv_cache_coordinator
from vllm.v1.core.kv_kinds.sliding_window import SlidingWindowManager
from vllm.v1.kv_cache_interface import (
    AttentionSpec,
    ChunkedLocalAttentionSpec,
    CircularBufferSpec,
    CrossAttentionSpec,
    EncoderOnlyAttentionSpec,
    FullAttentionSpec,
    HiddenStateCacheSpec,
    HiSparseHotSpec,
    HiSparseResidentSpec,
    KVCacheSpec,
    MambaSpec,
    MLAAttentionSpec,
    RSWASpec,
    SinkFullAttentionSpec,
    SlidingWindowMLASpec,
    SlidingWindowSpec,
    UniformTypeKVCacheSpecs,
    replace_as,
)

UNIT = 2


@dataclass(frozen=True)
class Rule:
    """A kind by its definition. Sizes are tokens; what `reach` means is the kind's affair."""

    make: Callable[[int, int], KVCacheSpec]
    """(block, reach) → spec."""
    first_needed: Callable[[int, int], int] | None
    """(reach, end) → the first token that a position at `end` reads; None: the state at `end` and nothing else."""
    fine: bool = False
    """A hit may end inside a block."""


def _from_the_start(reach: int, end: int) -> int:
    return 0


def _in_the_window(reach: int, end: int) -> int:
    return max(0, end - reach + 1)


def _in_the_chunk(reach: int, end: int) -> int:
    return end // reach * reach


def _sinks(block: int, reach: int) -> KVCacheSpec:
    return replace_as(full(block), SinkFullAttentionSpec, sink_len=reach)


RULES: dict[type[KVCacheSpec], Rule] = {
    FullAttentionSpec: Rule(lambda block, _: full(block), _from_the_start, fine=True),
    MLAAttentionSpec: Rule(
        lambda block, _: replace_as(full(block), MLAAttentionSpec), _from_the_start, fine=True
    ),
    HiddenStateCacheSpec: Rule(
        lambda block, _: replace_as(full(block), HiddenStateCacheSpec), _from_the_start, fine=True
    ),
    # Sinks are among the first tokens, all of which are kept.
    SinkFullAttentionSpec: Rule(_sinks, _from_the_start, fine=True),
    # What was an answer is part of the prompt of whoever goes on from there.
    RSWASpec: Rule(rswa, _from_the_start, fine=True),
    SlidingWindowSpec: Rule(window, _in_the_window),
    SlidingWindowMLASpec: Rule(
        lambda block, reach: replace_as(window(block, reach), SlidingWindowMLASpec), _in_the_window
    ),
    ChunkedLocalAttentionSpec: Rule(chunked, _in_the_chunk),
    MambaSpec: Rule(lambda block, _: mamba(block), None, fine=True),
}
"""Kinds that can be found again by hash."""

_SIZES = {"num_kv_heads": 1, "head_size": 1, "dtype": BYTE}
NEVER: dict[type[KVCacheSpec], Callable[[int], KVCacheSpec]] = {
    CircularBufferSpec: ring,
    CrossAttentionSpec: lambda block: CrossAttentionSpec(block_size=block, **_SIZES),
    EncoderOnlyAttentionSpec: lambda block: EncoderOnlyAttentionSpec(block_size=block, **_SIZES),
    HiSparseHotSpec: lambda block: HiSparseHotSpec(
        block_size=block, page_size=8 * block, blocks_per_request=2
    ),
    HiSparseResidentSpec: lambda block: HiSparseResidentSpec(block_size=block, page_size=8 * block),
}
"""Kinds that take no part in any search."""


def test_every_registered_kind_has_a_rule_here() -> None:
    kinds = registered_kinds()
    found = {spec for spec, manager in kinds.items() if manager.supports_prefix_lookup}
    assert found == RULES.keys(), "a kind that can be found by hash is searched for by brute force as well"
    assert kinds.keys() - found == NEVER.keys()


@dataclass(frozen=True)
class Group:
    """A group and the ends (tokens) of its cached entries. With several layers their pages differ."""

    kind: type[KVCacheSpec]
    block: int
    reach: int
    cached: frozenset[int]
    drop: bool = False
    layers: int = 1

    @property
    def rule(self) -> Rule:
        return RULES[self.kind]

    def spec(self) -> KVCacheSpec:
        spec = self.rule.make(self.block, self.reach)
        if self.layers == 1:
            return spec
        specs = {f"layer.{n}": _wider(spec, n) for n in range(self.layers)}
        uniform = UniformTypeKVCacheSpecs.from_specs(specs)
        assert uniform is not None
        return uniform

    def first_needed(self, end: int) -> int:
        """The first token that is read at `end`."""
        assert self.rule.first_needed is not None
        return self.rule.first_needed(self.reach, end)

    def needed(self, end: int) -> range:
        """The columns whose blocks are read at `end`, a multiple of the block."""
        if self.rule.first_needed is None:
            return range(end // self.block - 1, end // self.block) if end else range(0)
        return range(self.first_needed(end) // self.block, end // self.block)


def _wider(spec: KVCacheSpec, number: int) -> KVCacheSpec:
    if isinstance(spec, MambaSpec):
        return replace(spec, shapes=((2 + number,),))
    assert isinstance(spec, AttentionSpec)
    return replace(spec, head_size=1 + number)


def build(
    groups: list[Group],
    scheduler: int,
    unit: int,
    total: int,
    fine: bool,
    never: list[KVCacheSpec] | None = None,
) -> tuple[KVCacheCoordinator, list]:
    specs = [*(group.spec() for group in groups), *(never or ())]
    if len(specs) == 1 and groups[0].block != unit:  # which a model with one group cannot have
        specs.append(ring(4))  # takes no part in the search
    flagged = [i for i, group in enumerate(groups) if group.drop]
    coordinator = get_kv_cache_coordinator(
        config(600, *specs, eagle=flagged),
        10_000,
        64,
        bool(flagged),
        True,
        False,
        1,
        1,
        scheduler,
        unit,
        allow_partial_hash_hits=fine,
    )
    hashes = fake_hashes(total // unit)
    block_id = 1
    for number, group in enumerate(groups):
        for end in sorted(group.cached):
            if end <= total:
                key = make_block_hash_with_group_id(hashes[end // unit - 1], number)
                coordinator.block_pool.index.add(key, coordinator.block_pool.blocks[block_id], end)
                block_id += 1
    return coordinator, hashes


@st.composite
def one_group(draw: st.DrawFn, kinds: list[type[KVCacheSpec]], block: int, may_drop: bool) -> Group:
    """Mostly cached, so that long hits are frequent."""
    gaps = draw(st.frozensets(st.integers(0, 23), max_size=8))
    return Group(
        draw(st.sampled_from(kinds)),
        block,
        draw(st.integers(1, 12)),
        frozenset((i + 1) * block for i in range(24) if i not in gaps),
        may_drop and draw(st.booleans()),  # a state group may be flagged, but gives nothing back
        draw(st.sampled_from([1, 1, 1, 2])),
    )


@st.composite
def block_groups(draw: st.DrawFn) -> list[Group]:
    may_drop = draw(st.booleans())
    blocks = draw(st.lists(st.sampled_from([2, 4, 6]), min_size=1, max_size=4))
    return [draw(one_group(list(RULES), block, may_drop)) for block in blocks]


def others() -> st.SearchStrategy[list[KVCacheSpec]]:
    """Groups that never hit, of any block size."""
    makers = st.sampled_from(list(NEVER.values()))
    specs = st.builds(lambda make, block: make(block), makers, st.sampled_from([2, 4, 6]))
    return st.just([]) | st.lists(specs, max_size=2)


@settings(max_examples=600, deadline=None)
@given(groups=block_groups(), never=others(), limit=st.integers(0, 50), total=st.integers(0, 25))
def test_common_hit_is_the_largest_end_that_suits_all(
    groups: list[Group], never: list[KVCacheSpec], limit: int, total: int
) -> None:
    scheduler = lcm(*(group.block for group in groups))
    num_tokens = total * UNIT
    coordinator, hashes = build(groups, scheduler, UNIT, num_tokens, fine=False, never=never)
    known = [replace(g, cached=frozenset(e for e in g.cached if e <= num_tokens)) for g in groups]
    expected = _coarse(known, limit, num_tokens, scheduler)
    blocks, hit, beyond = coordinator.find_longest_cache_hit(hashes, limit)
    assert hit == expected
    assert beyond >= 0
    assert not any(blocks[len(groups) :])
    for group, found in zip(known, blocks, strict=False):
        assert len(found) == hit // group.block
        needed = group.needed(hit)
        for i in needed:
            assert found[i].block_hash_num_tokens == (i + 1) * group.block
        assert all(found[i].is_null for i in range(needed.start))


def _coarse(groups: list[Group], limit: int, num_tokens: int, scheduler: int) -> int:
    """Ends on scheduler blocks; a dropping group gives back one block of its own."""
    for end in range(min(limit, num_tokens) // scheduler * scheduler, 0, -scheduler):
        if all(_coarse_allows(group, end, limit) for group in groups):
            return end
    return 0


def _coarse_allows(group: Group, end: int, limit: int) -> bool:
    if group.rule.first_needed is None:
        return end in group.cached
    last = end + group.block if group.drop else end
    if last > limit:
        return False
    first = group.first_needed(end) // group.block * group.block
    return all(e in group.cached for e in range(first + group.block, last + 1, group.block))


@st.composite
def fine_groups(draw: st.DrawFn) -> list[Group]:
    """Blocks of several hash units where a hit may end inside them, with entries that do; other kinds have blocks of one
    unit. States are further apart than that.
    """
    may_drop = draw(st.booleans())
    groups = [_with_partial_entries(draw, MambaSpec, may_drop)]
    for _ in range(draw(st.integers(0, 3))):
        if draw(st.integers(0, 2)):
            kinds = [kind for kind, rule in RULES.items() if rule.fine]
            groups.append(_with_partial_entries(draw, draw(st.sampled_from(kinds)), may_drop))
        else:
            groups.append(draw(one_group(list(RULES), UNIT, may_drop)))
    return draw(st.permutations(groups))


def _with_partial_entries(draw: st.DrawFn, kind: type[KVCacheSpec], may_drop: bool) -> Group:
    ends = frozenset(e * UNIT for e in draw(st.frozensets(st.integers(1, 24), min_size=4)))
    whole = frozenset(range(UNIT, draw(st.integers(0, 24)) * UNIT, UNIT))
    return Group(
        kind,
        draw(st.sampled_from([4, 8])),
        draw(st.integers(1, 12)),
        ends | whole,
        may_drop and draw(st.booleans()),
        draw(st.sampled_from([1, 1, 2])),
    )


@settings(max_examples=400, deadline=None)
@given(groups=fine_groups(), limit=st.integers(0, 50), total=st.integers(0, 24))
def test_fine_grained_hit_is_the_largest_end_that_suits_all(
    groups: list[Group], limit: int, total: int
) -> None:
    scheduler = lcm(*(group.block for group in groups))
    num_tokens = total * UNIT
    coordinator, hashes = build(groups, scheduler, UNIT, num_tokens, fine=True)
    assert coordinator.enable_partial_hash_hits

    def allows(group: Group, end: int) -> bool:
        cached = {e for e in group.cached if e <= num_tokens}
        if not group.rule.fine or group.rule.first_needed is None:
            return _coarse_allows(replace(group, cached=frozenset(cached)), end, limit)
        if group.drop:  # one hash unit is given back
            end += UNIT
            if end > limit:
                return False
        whole = end // group.block * group.block
        if any(e not in cached for e in range(group.block, whole + 1, group.block)):
            return False
        # Rows of the last block, cached whole or up to a later end, serve any earlier end.
        return end == whole or any(end <= e <= whole + group.block for e in cached)

    ends = range(min(limit, num_tokens) // UNIT * UNIT, 0, -UNIT)
    expected = next((end for end in ends if all(allows(group, end) for group in groups)), 0)
    blocks, hit, _ = coordinator.find_longest_cache_hit(hashes, limit)
    assert hit == expected
    for group, found in zip(groups, blocks, strict=False):
        assert len(found) == cdiv(hit, group.block)


@settings(max_examples=300, deadline=None)
@given(
    cached=st.lists(st.booleans(), max_size=40),
    size=st.integers(1, 20),
    block=st.sampled_from([1, 2, 4]),
    tail=st.integers(0, 3),
    drop=st.booleans(),
    scale=st.integers(1, 3),
)
def test_window_search_that_jumps_finds_what_a_plain_scan_finds(
    cached: list[bool], size: int, block: int, tail: int, drop: bool, scale: int
) -> None:
    marks = frozenset((i + 1) * block for i, c in enumerate(cached) if c)
    group = Group(SlidingWindowSpec, block, size, marks, drop)
    coordinator, hashes = build([group], block, block, len(cached) * block, fine=False)
    limit = len(cached) * block + tail
    (blocks,), hit = SlidingWindowManager.find_longest_cache_hit(
        hashes, limit, [0], coordinator.block_pool, group.spec(), drop, block * scale
    )
    expected = next(
        (
            end
            for end in range(len(cached) * block // (block * scale) * block * scale, 0, -block * scale)
            if _coarse_allows(group, end, limit)
        ),
        0,
    )
    assert hit == expected
    assert len(blocks) == hit // block
