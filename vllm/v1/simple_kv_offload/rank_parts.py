"""Where the bytes of a rank lie in slots that all ranks of an engine use together, and which of them it writes.

Owns the arithmetic: a block has a part for each rank whose bytes differ, and ranks with identical bytes have one part
together; a slot has as many parts as divide those of every group, so that a block takes one slot or several. It must
not know memory, processes or requests. Layer L4.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from math import gcd

from vllm.v1.kv_cache_interface import KVCacheConfig
from vllm.v1.simple_kv_offload.wide_blocks import NO_COMPANIONS


@dataclass(frozen=True, slots=True)
class RankParts:
    """One rank's view of ``num_slots`` slots, whose parts lie one behind the other: all first parts, all second ones …

    Per group: the part of the slot that the rank reads, its place among the ranks that hold the same bytes, and their
    number; and which of the block's slots that is, where blocks take several.
    """

    num_slots: int
    part: tuple[int, ...]
    place: tuple[int, ...]
    replicas: tuple[int, ...]
    slot_index: tuple[int, ...] = ()

    @property
    def first_part(self) -> int:
        """The first part that this rank uses."""
        return min(self.part)

    @property
    def used_parts(self) -> int:
        """Parts from that one to the last that this rank uses."""
        return max(self.part) + 1 - self.first_part

    def row(self, slot: int, group: int, companions: Sequence[int] = ()) -> int:
        """Where the rank's bytes of a block lie, counted from its first part: in the slot, or in one of its companions."""
        index = self.slot_index[group] if self.slot_index else 0
        own = companions[index - 1] if index else slot
        return (self.part[group] - self.first_part) * self.num_slots + own

    def writes(self, slot: int, group: int) -> bool:
        """Whether this rank is the one of its replicas that stores into the block of that slot.

        They take turns by slot: each link carries its share, and all sides know the writer without a message.
        """
        return slot % self.replicas[group] == self.place[group]

    def rows(
        self,
        slots: Sequence[int],
        groups: Sequence[int],
        companions: Mapping[int, Sequence[int]] = NO_COMPANIONS,
    ) -> list[int]:
        """`row` of each slot. Without ``groups`` they make no difference."""
        if self.used_parts == 1 and not companions:
            return list(slots)
        pairs = self._with_groups(slots, groups)
        return [self.row(slot, group, companions.get(slot, ())) for slot, group in pairs]

    def to_store(
        self,
        sources: Sequence[int],
        slots: Sequence[int],
        groups: Sequence[int],
        companions: Mapping[int, Sequence[int]] = NO_COMPANIONS,
    ) -> tuple[list[int], list[int]]:
        """What this rank copies of a store: sources, and the rows that they go to.

        A rank with nothing to copy reports the store all the same: the others are waited for.
        """
        if self.used_parts == max(self.replicas) == 1 and not companions:
            return list(sources), list(slots)
        pairs = zip(sources, self._with_groups(slots, groups), strict=True)
        mine = [(source, *pair) for source, pair in pairs if self.writes(*pair)]
        rows = [self.row(slot, group, companions.get(slot, ())) for _, slot, group in mine]
        return [source for source, _, _ in mine], rows

    def slots(self, rows: Iterable[int]) -> frozenset[int]:
        """The slots of rows; of a block that has several, the one of them that the rank uses."""
        return frozenset(row % self.num_slots for row in rows)

    def _with_groups(self, slots: Sequence[int], groups: Sequence[int]) -> list[tuple[int, int]]:
        return list(zip(slots, groups or [self._any_group] * len(slots), strict=True))

    @property
    def _any_group(self) -> int:
        return self.replicas.index(max(self.replicas))


def rank_parts(
    kv_cache_config: KVCacheConfig, rank: int, tp_size: int, dcp_size: int, num_slots: int
) -> RankParts:
    """The view of tensor-parallel rank ``rank``."""
    num_parts = count_parts(kv_cache_config, tp_size, dcp_size)
    part, place, replicas, slot_index = [], [], [], []
    for shards in _shards(kv_cache_config, tp_size, dcp_size):
        alike = [other for other, shard in enumerate(shards) if shard == shards[rank]]
        slot_index.append(shards[rank] // num_parts)
        part.append(shards[rank] % num_parts)
        place.append(alike.index(rank))
        replicas.append(len(alike))
    return RankParts(num_slots, tuple(part), tuple(place), tuple(replicas), tuple(slot_index))


def count_parts(kv_cache_config: KVCacheConfig, tp_size: int, dcp_size: int) -> int:
    """Parts of a slot: so many that blocks of every group fill whole slots."""
    shards = _shards(kv_cache_config, tp_size, dcp_size)
    return max(1, gcd(*(max(shards[group]) + 1 for group in kv_cache_config.prefix_cacheable_group_ids)))


def slot_widths(kv_cache_config: KVCacheConfig, tp_size: int, dcp_size: int) -> tuple[int, ...]:
    """By group: how many slots a block takes, a part for each rank with other bytes."""
    num_parts = count_parts(kv_cache_config, tp_size, dcp_size)
    return tuple(-(-(max(shards) + 1) // num_parts) for shards in _shards(kv_cache_config, tp_size, dcp_size))


def _shards(kv_cache_config: KVCacheConfig, tp_size: int, dcp_size: int) -> list[list[int]]:
    """By group: which of its distinct bytes each rank holds. Groups that are never stored count as all alike."""
    cacheable = kv_cache_config.prefix_cacheable_group_ids
    return [
        [
            group.kv_cache_spec.tp_shard(rank, tp_size, dcp_size) if index in cacheable else 0
            for rank in range(tp_size)
        ]
        for index, group in enumerate(kv_cache_config.kv_cache_groups)
    ]
