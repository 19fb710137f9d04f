"""Where the bytes of a rank lie in slots that all ranks of an engine use together, and which of them it writes.

Owns the arithmetic: a slot has a part for each rank whose bytes differ, and ranks with identical bytes have one part
together. It must not know memory, processes or requests. Layer L4.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from vllm.v1.kv_cache_interface import KVCacheConfig


@dataclass(frozen=True, slots=True)
class RankParts:
    """One rank's view of ``num_slots`` slots, whose parts lie one behind the other: all first parts, all second ones …

    Per group: the part that the rank reads, its place among the ranks that hold the same bytes, and their number.
    """

    num_slots: int
    part: tuple[int, ...]
    place: tuple[int, ...]
    replicas: tuple[int, ...]

    @property
    def first_part(self) -> int:
        """The first part that this rank uses."""
        return min(self.part)

    @property
    def used_parts(self) -> int:
        """Parts from that one to the last that this rank uses."""
        return max(self.part) + 1 - self.first_part

    def row(self, slot: int, group: int) -> int:
        """Where the rank's bytes of a slot lie, counted from its first part."""
        return (self.part[group] - self.first_part) * self.num_slots + slot

    def writes(self, slot: int, group: int) -> bool:
        """Whether this rank is the one of its replicas that stores into the slot.

        They take turns by slot: each link carries its share, and all sides know the writer without a message.
        """
        return slot % self.replicas[group] == self.place[group]

    def rows(self, slots: Sequence[int], groups: Sequence[int]) -> list[int]:
        """`row` of each slot. Without ``groups`` they make no difference."""
        if self.used_parts == 1:
            return list(slots)
        return [self.row(slot, group) for slot, group in self._with_groups(slots, groups)]

    def to_store(
        self, sources: Sequence[int], slots: Sequence[int], groups: Sequence[int]
    ) -> tuple[list[int], list[int]]:
        """What this rank copies of a store: sources, and the rows that they go to.

        A rank with nothing to copy reports the store all the same: the others are waited for.
        """
        if self.used_parts == max(self.replicas) == 1:
            return list(sources), list(slots)
        pairs = zip(sources, self._with_groups(slots, groups), strict=True)
        mine = [(source, *pair) for source, pair in pairs if self.writes(*pair)]
        return [source for source, _, _ in mine], [self.row(slot, group) for _, slot, group in mine]

    def slots(self, rows: Iterable[int]) -> frozenset[int]:
        """The slots of rows."""
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
    part, place, replicas = [], [], []
    for shards in _shards(kv_cache_config, tp_size, dcp_size):
        alike = [other for other, shard in enumerate(shards) if shard == shards[rank]]
        part.append(shards[rank])
        place.append(alike.index(rank))
        replicas.append(len(alike))
    return RankParts(num_slots, tuple(part), tuple(place), tuple(replicas))


def count_parts(kv_cache_config: KVCacheConfig, tp_size: int, dcp_size: int) -> int:
    """Parts of a slot: as many as ranks hold different bytes of the group that is split most."""
    return max(max(shards) + 1 for shards in _shards(kv_cache_config, tp_size, dcp_size))


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
