"""What is chosen for a copy so far, and what there is room for.

Owns the count of room, by blocks and by slots, and the look ahead at what would be evicted. It must not know why something
is chosen. Layer L4.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence, Set

from vllm.v1.core.block_hash import BlockHashWithGroupId
from vllm.v1.core.kv_cache_block import KVCacheBlock
from vllm.v1.simple_kv_offload.eviction import Victims
from vllm.v1.simple_kv_offload.tier import Tier
from vllm.v1.simple_kv_offload.transfer import Candidate, Candidates


def room_in(tier: Tier, max_blocks: int | None) -> tuple[int, bool]:
    """How many slots can be taken, ``max_blocks`` at most, and whether that is what limits them."""
    stageable = tier.pool.get_num_free_blocks()
    if max_blocks is None or max_blocks >= stageable:
        return stageable, False
    return max(0, max_blocks), True


class Selection:
    """Candidates chosen so far, and whether the tier has room for one more.

    With ``is_spared``, room also ends at a slot that must not be evicted for this selection; ``max_blocks`` is what
    may be added to the stores under way.
    """

    __slots__ = (
        "_is_spared",
        "_num_slots",
        "_tier",
        "_victims",
        "candidates",
        "is_bounded",
        "keys",
        "room",
        "was_cut",
    )

    def __init__(
        self,
        tier: Tier,
        is_spared: Callable[[KVCacheBlock], bool] | None = None,
        max_blocks: int | None = None,
    ) -> None:
        self.room, self.is_bounded = room_in(tier, max_blocks)
        """Blocks that can be added, and whether it is ``max_blocks`` that limits them, not the slots."""
        self.was_cut = False
        """Whether something wanted a place and found no room."""
        self.candidates = Candidates()
        self.keys: set[BlockHashWithGroupId] = set()
        self._tier = tier
        self._is_spared = is_spared
        self._victims: Victims | None = None
        self._num_slots = tier.pool.get_num_free_blocks()

    def has_slots_for(self, key: BlockHashWithGroupId | None) -> bool:
        """Whether there are slots for one more candidate of this key, whatever they hold."""
        return self.room > 0 and self._num_slots >= self._tier.width(key)

    def has_room_for(self, key: BlockHashWithGroupId | None) -> bool:
        """Whether one more candidate of this key, which is there, can be taken."""
        if self.has_slots_for(key):
            if self._is_spared is None:
                return True
            victims = self.next_victims(key)
            if victims and not any(map(self._is_spared, victims)):
                return True
        self.was_cut = True
        return False

    def next_victims(self, key: BlockHashWithGroupId | None) -> Sequence[KVCacheBlock]:
        """The slots that one more candidate of this key would get; empty if there are too few."""
        return self._look_ahead().peek_for(key)

    def evicts_others(self) -> bool:
        """Whether one more candidate would take what another engine has stored, or a slot left over of that: there are
        fewer of those than the widest block takes.
        """
        return any(map(self._tier.is_of_others, self._look_ahead().peek_widest()))

    def _look_ahead(self) -> Victims:
        if self._victims is None:
            self._victims = self._tier.victims()
            for chosen in self.candidates.contents.primary_keys:
                self._victims.take(chosen)
        return self._victims

    def recheck_victims(self) -> None:
        """The tier's order of eviction has changed."""
        self._victims = None

    def add(self, candidate: Candidate) -> None:
        """Choose a candidate."""
        self.candidates.blocks.append(candidate.block)
        self.candidates.contents.append(candidate.keys)
        for staged in candidate.keys:
            self.keys.add(staged.key)
        self._count(candidate.keys[0].key if candidate.keys else None)

    def add_plain(self, block: KVCacheBlock, key: BlockHashWithGroupId) -> None:
        """Choose a block that has this key alone, of which nobody asks what it stands for."""
        self.candidates.blocks.append(block)
        self.candidates.contents.append_plain(key, block.block_hash_num_tokens)
        self.keys.add(key)
        self._count(key)

    def _count(self, key: BlockHashWithGroupId | None) -> None:
        self.room -= 1
        self._num_slots -= self._tier.width(key)
        if self._victims is not None:
            self._victims.take(key)

    def choose_all(
        self,
        blocks: list[KVCacheBlock],
        keys: list[BlockHashWithGroupId],
        spared: Set[BlockHashWithGroupId] = frozenset(),
    ) -> None:
        """Choose all at once: these blocks, which have one key each, no two the same, in order as far as there is room.

        Room also ends at a slot that holds a key of ``spared``. Nothing is added after that. The lists belong to the
        selection.
        """
        count = min(len(keys), self.room)
        if spared:
            count = self._tier.queue.num_takeable(keys if count == len(keys) else keys[:count], spared)
        self.was_cut |= count < len(keys)
        self.candidates = Candidates.plain(blocks, keys, count)
        self.room = 0
