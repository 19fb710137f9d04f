"""Which part of a slot a rank reads and writes, from what the specs say about ranks with identical bytes."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from tests.helpers.offload_parts import full, mamba, ring
from vllm.v1.kv_cache_interface import KVCacheConfig, KVCacheGroupSpec, KVCacheSpec, UniformTypeKVCacheSpecs
from vllm.v1.simple_kv_offload.rank_parts import RankParts, count_parts, rank_parts, slot_widths


def heads(count: int | None, **fields: Any) -> KVCacheSpec:
    return replace(full(), max_tp_shards=count, **fields)  # type: ignore[call-arg]


def plan(*specs: KVCacheSpec) -> KVCacheConfig:
    return KVCacheConfig(8, [], [KVCacheGroupSpec([f"layer{i}"], spec) for i, spec in enumerate(specs)])


def views(*specs: KVCacheSpec, tp: int = 4, dcp: int = 1) -> list[RankParts]:
    return [rank_parts(plan(*specs), rank, tp, dcp, 10) for rank in range(tp)]


@pytest.mark.parametrize(
    ("spec", "tp", "dcp", "shards"),
    [
        (heads(None), 3, 1, [0, 1, 2]),
        (heads(1), 3, 1, [0, 0, 0]),
        (heads(2), 4, 1, [0, 0, 1, 1]),
        (heads(8), 4, 1, [0, 1, 2, 3]),
        (heads(3), 4, 1, [0, 1, 2, 3]),  # does not come out even: nothing is taken for the same
        # The context is dealt to neighbours among the replicas of a head.
        (heads(1, dcp_sharded=True), 4, 2, [0, 1, 0, 1]),
        (heads(2, dcp_sharded=True), 8, 2, [0, 1, 0, 1, 2, 3, 2, 3]),
        (heads(2, dcp_sharded=True), 4, 2, [0, 1, 2, 3]),
        (heads(1, dcp_sharded=False), 4, 2, [0, 0, 0, 0]),
        (mamba(), 2, 1, [0, 1]),
        (replace(mamba(), tp_replicated=True), 2, 1, [0, 0]),  # type: ignore[call-arg]
    ],
)
def test_ranks_with_one_number_hold_the_same_bytes(
    spec: KVCacheSpec, tp: int, dcp: int, shards: list[int]
) -> None:
    assert [spec.tp_shard(rank, tp, dcp) for rank in range(tp)] == shards
    assert shards.count(0) == spec.tp_replicas(tp, dcp)


def test_a_uniform_group_is_as_split_as_its_members_together() -> None:
    members = {"a": heads(1), "b": heads(2)}
    group = UniformTypeKVCacheSpecs.from_specs(members)
    assert group is not None
    assert [group.tp_shard(rank, 4, 1) for rank in range(4)] == [0, 0, 1, 1]
    for rank in range(4):
        for other in range(4):
            if group.tp_shard(rank, 4, 1) == group.tp_shard(other, 4, 1):
                assert all(s.tp_shard(rank, 4, 1) == s.tp_shard(other, 4, 1) for s in members.values())


@pytest.mark.parametrize(
    ("specs", "parts"),
    [
        ((heads(1),), 1),
        ((heads(2),), 2),
        ((heads(None),), 4),
        ((heads(1), mamba()), 1),
        ((heads(2), mamba()), 2),
        ((heads(2), heads(1)), 1),
        ((heads(1), ring()), 1),  # what is never stored needs no room
    ],
)
def test_blocks_of_all_groups_fill_whole_slots(specs: tuple[KVCacheSpec, ...], parts: int) -> None:
    assert count_parts(plan(*specs), 4, 1) == parts
    for spec, width in zip(specs, slot_widths(plan(*specs), 4, 1), strict=True):
        pieces = len({spec.tp_shard(rank, 4, 1) for rank in range(4)}) if spec.prefix_cacheable else parts
        assert width * parts == pieces


@pytest.mark.parametrize(
    "specs", [(heads(1),), (heads(2),), (heads(None),), (heads(1), mamba()), (heads(2), heads(1))]
)
def test_every_part_of_a_block_is_written_by_one_rank_and_read_where_it_was_written(
    specs: tuple[KVCacheSpec, ...],
) -> None:
    ranks = views(*specs)
    num_parts = count_parts(plan(*specs), 4, 1)
    widths = slot_widths(plan(*specs), 4, 1)
    for group, spec in enumerate(specs):
        for slot in range(4):
            slots = (slot, *(9 - slot - n for n in range(widths[group] - 1)))
            pieces = {
                shard: (slots[shard // num_parts], shard % num_parts)
                for shard in (spec.tp_shard(rank, 4, 1) for rank in range(4))
            }
            writers: dict[int, int] = {}
            for rank, view in enumerate(ranks):
                own = view.row(slot, group, slots[1:])
                row = view.first_part * 10 + own
                in_slot, part = pieces[spec.tp_shard(rank, 4, 1)]
                assert row == part * 10 + in_slot
                assert view.slots([own]) == {in_slot}
                assert own < view.used_parts * 10
                companions = {slot: slots[1:]} if slots[1:] else {}
                assert view.rows([slot], [group], companions) == [own]
                stored = ([7], [own]) if view.writes(slot, group) else ([], [])
                assert view.to_store([7], [slot], [group], companions) == stored
                if view.writes(slot, group):
                    assert writers.setdefault(row, rank) == rank
            assert len(writers) == len(pieces)


def test_replicas_carry_equal_shares() -> None:
    ranks = views(heads(1))
    shares = [view.to_store(range(100, 108), range(8), []) for view in ranks]
    assert shares == [([100 + r, 104 + r], [r, 4 + r]) for r in range(4)]


def test_groups_need_not_be_named_where_they_make_no_difference() -> None:
    for view in views(heads(1), ring(), heads(1)):
        assert view.rows([3, 5], []) == view.rows([3, 5], [2, 0]) == [3, 5]
        slots = [3, 5, 6]
        assert view.to_store(slots, slots, []) == view.to_store(slots, slots, [0, 2, 0])
