"""Hit searches against their definition: the largest aligned end from which every group can go on."""

from __future__ import annotations

from dataclasses import dataclass
from math import lcm

from hypothesis import given, settings
from hypothesis import strategies as st

from tests.helpers.kv_core import chunked, config, fake_hashes, full, mamba, ring, window
from vllm.utils.math_utils import cdiv
from vllm.v1.core.block_hash import make_block_hash_with_group_id
from vllm.v1.core.kv_cache_coordinator import KVCacheCoordinator, get_kv_cache_coordinator
from vllm.v1.core.kv_kinds.sliding_window import SlidingWindowManager
from vllm.v1.kv_cache_interface import KVCacheSpec

UNIT = 2
KINDS = ("full", "window", "chunked", "mamba")


@dataclass(frozen=True)
class Group:
    """A group and the ends (tokens) of its cached entries."""

    kind: str
    block: int
    reach: int
    cached: frozenset[int]
    drop: bool = False

    def spec(self) -> KVCacheSpec:
        if self.kind == "full":
            return full(self.block)
        if self.kind == "window":
            return window(self.block, self.reach)
        if self.kind == "chunked":
            return chunked(self.block, self.reach * self.block)
        return mamba(self.block)

    def first_needed(self, end: int) -> int:
        """The first token that a position at `end` reads."""
        if self.kind == "full":
            return 0
        if self.kind == "window":
            return max(0, end - self.reach + 1)
        chunk = self.reach * self.block
        return end // chunk * chunk


def build(
    groups: list[Group], scheduler: int, unit: int, total: int, fine: bool
) -> tuple[KVCacheCoordinator, list]:
    specs = [group.spec() for group in groups]
    if len(specs) == 1:
        specs.append(ring(4))  # keeps the hybrid search, takes no part in it
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
def block_groups(draw: st.DrawFn, kinds: tuple[str, ...] = KINDS) -> list[Group]:
    groups = []
    may_drop = draw(st.booleans())
    for _ in range(draw(st.integers(1, 4))):
        kind = draw(st.sampled_from(kinds))
        block = draw(st.sampled_from([2, 4, 6]))
        reach = draw(st.integers(1, 9)) if kind == "window" else draw(st.integers(1, 3))
        # Mostly cached, so that long hits are frequent.
        gaps = draw(st.frozensets(st.integers(0, 23), max_size=8))
        cached = frozenset((i + 1) * block for i in range(24) if i not in gaps)
        drop = may_drop and draw(st.booleans())  # a state group may be flagged, but gives nothing back
        groups.append(Group(kind, block, reach, cached, drop))
    return groups


@settings(max_examples=400, deadline=None)
@given(groups=block_groups(), limit=st.integers(0, 50), total=st.integers(0, 25))
def test_common_hit_is_the_largest_end_that_suits_all(groups: list[Group], limit: int, total: int) -> None:
    scheduler = lcm(*(group.block for group in groups))
    num_tokens = total * UNIT
    coordinator, hashes = build(groups, scheduler, UNIT, num_tokens, fine=False)
    known = [
        Group(g.kind, g.block, g.reach, frozenset(e for e in g.cached if e <= num_tokens), g.drop)
        for g in groups
    ]
    expected = _coarse(known, limit, num_tokens, scheduler)
    blocks, hit, beyond = coordinator.find_longest_cache_hit(hashes, limit)
    assert hit == expected
    assert beyond >= 0
    for group, found in zip(known, blocks, strict=False):
        assert len(found) == hit // group.block
        if group.kind == "mamba":
            needed = range(hit // group.block - 1, hit // group.block) if hit else range(0)
        else:
            needed = range(group.first_needed(hit) // group.block, hit // group.block)
        for i in needed:
            assert found[i].block_hash_num_tokens == (i + 1) * group.block


def _coarse(groups: list[Group], limit: int, num_tokens: int, scheduler: int) -> int:
    """Ends on scheduler blocks; a dropping group gives back one block of its own."""
    for end in range(min(limit, num_tokens) // scheduler * scheduler, 0, -scheduler):
        if all(_coarse_allows(group, end, limit) for group in groups):
            return end
    return 0


def _coarse_allows(group: Group, end: int, limit: int) -> bool:
    if group.kind == "mamba":
        return end in group.cached
    last = end + group.block if group.drop else end
    if last > limit:
        return False
    first = group.first_needed(end) // group.block * group.block
    return all(e in group.cached for e in range(first + group.block, last + 1, group.block))


@st.composite
def fine_groups(draw: st.DrawFn) -> list[Group]:
    """Full attention and states with blocks of several hash units; entries may end inside blocks."""
    groups = []
    may_drop = draw(st.booleans())
    for kind in draw(st.sampled_from([("full", "mamba"), ("mamba", "full", "full"), ("mamba",)])):
        block = draw(st.sampled_from([4, 8]))
        ends = draw(st.frozensets(st.integers(1, 24), min_size=4))
        drop = may_drop and draw(st.booleans())
        groups.append(Group(kind, block, 1, frozenset(e * UNIT for e in ends), drop))
    return groups


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
        if group.kind == "mamba":
            return end in cached
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
    group = Group("window", block, size, marks, drop)
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
