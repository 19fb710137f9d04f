"""One tier below the device: a block pool, the coordinator that searches it, and its medium.

Owns which slots of the tier are free, staged or findable. It must not know transfers, requests'
lifetimes or copies. Layer L4.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, replace
from functools import wraps
from itertools import islice
from typing import Concatenate, ParamSpec, Protocol, TypeVar

from vllm.distributed.kv_event_types import AnyKVCacheEvent, BlockStored
from vllm.utils.checks import check
from vllm.v1.core.block_hash import BlockHash, BlockHashWithGroupId, get_group_suffix
from vllm.v1.core.block_pool import BlockPool
from vllm.v1.core.kv_cache_block import KVCacheBlock
from vllm.v1.core.kv_cache_coordinator import KVCacheCoordinator, get_kv_cache_coordinator
from vllm.v1.kv_cache_interface import KVCacheConfig
from vllm.v1.kv_offload.tier_filter import TierFilter
from vllm.v1.simple_kv_offload.eviction import (
    DEFAULT_EVICTION_POLICY,
    EvictionQueue,
    Victims,
    eviction_queue,
)
from vllm.v1.simple_kv_offload.shared_pool import SharedPool, SlotTable
from vllm.v1.simple_kv_offload.transfer import Contents, StagedKey


@dataclass(frozen=True, slots=True)
class TierGeometry:
    """What a tier takes from the engine's configuration, as plain numbers."""

    num_blocks: int
    medium: str
    scheduler_block_size: int
    hash_block_size: int
    max_model_len: int
    max_in_flight_tokens: int
    use_eagle: bool
    dcp_world_size: int
    pcp_world_size: int
    num_hash_lookahead_tokens: int
    allow_partial_hits: bool
    enable_events: bool
    eviction_policy: str = DEFAULT_EVICTION_POLICY
    slot_widths: tuple[int, ...] = ()
    """By group, how many slots of a shared pool a block takes; empty = one each."""


class HasTier(Protocol):
    """What acts on a tier."""

    tier: Tier


HasTierT = TypeVar("HasTierT", bound=HasTier)
P = ParamSpec("P")
R = TypeVar("R")

NO_TURN = nullcontext()
"""Where nobody else acts on a tier."""


def in_turn(
    method: Callable[Concatenate[HasTierT, P], R],
) -> Callable[Concatenate[HasTierT, P], R]:
    """Make a whole call one turn on the tier (`Tier.turn`): what it finds cannot go away before it is held."""

    @wraps(method)
    def turn(self: HasTierT, /, *args: P.args, **kwargs: P.kwargs) -> R:
        if self.tier.turn is NO_TURN:
            return method(self, *args, **kwargs)
        with self.tier.turn:
            return method(self, *args, **kwargs)

    return turn


class Tier:
    """Slots of one medium. Slot 0 is the null block and never used.

    A slot is *staged* between `stage` and `commit`: held, without key, invisible to `find`.
    """

    def __init__(
        self, kv_cache_config: KVCacheConfig, geometry: TierGeometry, shared_table: SlotTable | None = None
    ) -> None:
        """With a ``shared_table`` the slots are those of a pool that other engines use too."""
        self.config = tier_kv_cache_config(kv_cache_config, geometry.num_blocks)
        self.medium = geometry.medium
        self.group_ids: tuple[int, ...] = tuple(kv_cache_config.prefix_cacheable_group_ids)
        self.key_suffixes = frozenset(map(get_group_suffix, self.group_ids))
        """What keys of these groups end with."""
        self.shared: SharedPool | None = None
        self.num_parts = 1 if shared_table is None else shared_table.num_parts
        if shared_table is not None:
            check(shared_table.num_slots == geometry.num_blocks, "the shared pool is of another size")
            self.shared = SharedPool(
                shared_table,
                geometry.hash_block_size,
                geometry.enable_events,
                geometry.num_hash_lookahead_tokens,
                geometry.medium,
                geometry.slot_widths,
            )
            check(max(geometry.slot_widths, default=1) == shared_table.max_width, "blocks of other widths")
        self.has_wide_blocks = self.shared is not None and self.shared.wide.exist
        """Whether content of some groups takes several slots."""
        self.pool = self.shared or self.make_pool(geometry)
        queue = self.pool.free_block_queue
        assert isinstance(queue, EvictionQueue)
        self.queue: EvictionQueue = queue
        """The free slots in the order of the eviction policy."""
        self.turn: AbstractContextManager[object] = self.shared or NO_TURN
        """What is found, held, staged or given up must be so within a turn, in which no other engine acts."""
        self.geometry = geometry
        self.coordinator = self.make_coordinator(self.pool)
        self.guarded: dict[int, BlockHashWithGroupId] = {}
        """Slots whose content somebody counts on, and what that is; such a slot leaves when it is taken or evicted."""
        self.guard_losses = 0
        """How often that has happened."""
        self.commits = 0
        """Staged slots that became findable so far."""
        self.withdrawals = 0
        """How often content was withdrawn (`forget`)."""
        self.changed: dict[int, None] | None = None
        """Slots whose keys may have changed since somebody looked, in order; None if nobody wants to know."""

    def make_pool(self, geometry: TierGeometry) -> BlockPool:
        """The slots of a tier that this engine has for itself."""
        return BlockPool(
            geometry.num_blocks,
            enable_caching=True,
            hash_block_size=geometry.hash_block_size,
            enable_kv_cache_events=geometry.enable_events,
            num_hash_lookahead_tokens=geometry.num_hash_lookahead_tokens,
            medium=geometry.medium,
            make_free_queue=eviction_queue(geometry.eviction_policy),
        )

    def is_open_to(self, tiers: TierFilter) -> bool:
        """Whether a request that may load from these tiers may load from this one."""
        return tiers.allows(self.medium)

    @property
    def has_parts(self) -> bool:
        """Whether a block has a part for each of several ranks: those must know of which group it is."""
        return self.num_parts > 1 or self.has_wide_blocks

    def width(self, key: BlockHashWithGroupId | None) -> int:
        """How many slots content of this key takes."""
        return 1 if self.shared is None else self.shared.wide.width(key)

    def groups_of(self, slots: Sequence[KVCacheBlock], contents: Contents) -> list[int]:
        """The group that each of these slots was taken for; any of its width where the key is gone."""
        groups = contents.groups(self.group_ids[0])
        if self.shared is None or not self.has_wide_blocks:
            return groups
        wide = self.shared.wide
        for index, key in enumerate(contents.primary_keys):
            if key is None:
                width = 1 + len(wide.companions(slots[index].block_id))
                groups[index] = next(group for group in self.group_ids if wide.widths[group] == width)
        return groups

    def companions(self, slots: Iterable[KVCacheBlock]) -> dict[int, tuple[int, ...]]:
        """The further slots of those that have some, which are held with them."""
        if self.shared is None or not self.has_wide_blocks:
            return {}
        found = {slot.block_id: self.shared.wide.companions(slot.block_id) for slot in slots}
        return {slot: companions for slot, companions in found.items() if companions}

    def first_slots(self, slots: Iterable[int]) -> set[int]:
        """The slots by which the blocks are known that have these."""
        return set(slots) if self.shared is None else {self.shared.wide.first_of(slot) for slot in slots}

    def make_coordinator(self, pool: BlockPool) -> KVCacheCoordinator:
        """A coordinator with this tier's rules that searches ``pool``."""
        geometry = self.geometry
        return get_kv_cache_coordinator(
            kv_cache_config=self.config,
            max_model_len=geometry.max_model_len,
            max_in_flight_tokens=geometry.max_in_flight_tokens,
            use_eagle=geometry.use_eagle,
            enable_caching=True,
            enable_kv_cache_events=geometry.enable_events,
            dcp_world_size=geometry.dcp_world_size,
            pcp_world_size=geometry.pcp_world_size,
            scheduler_block_size=geometry.scheduler_block_size,
            hash_block_size=geometry.hash_block_size,
            num_hash_lookahead_tokens=geometry.num_hash_lookahead_tokens,
            allow_partial_hash_hits=geometry.allow_partial_hits,
            block_pool=pool,
        )

    @property
    def evictions(self) -> int:
        """Findable slots that were taken for new content so far."""
        return self.pool.num_evicted

    @property
    def num_blocks(self) -> int:
        """Slots, the null block included."""
        return self.pool.num_gpu_blocks

    @property
    def num_stageable(self) -> int:
        """Slots that can be staged now: free ones, whether or not they hold findable content."""
        return self.pool.get_num_free_blocks()

    @property
    def num_held(self) -> int:
        """Slots held by leases, and the null block."""
        return self.num_blocks - self.num_stageable

    def find(
        self, block_hashes: Sequence[BlockHash], max_tokens: int
    ) -> tuple[tuple[Sequence[KVCacheBlock], ...], int]:
        """The longest usable prefix of these hashes: blocks per group, and its length in tokens."""
        blocks, num_tokens, _ = self.coordinator.find_longest_cache_hit(block_hashes, max_tokens)
        return tuple(blocks), num_tokens

    def contains(self, key: BlockHashWithGroupId) -> bool:
        """Whether a slot with this key is findable."""
        return self.pool.cached_block_hash_to_block.get_one_block(key) is not None

    def lacking(self, keys: Iterable[BlockHashWithGroupId]) -> list[BlockHashWithGroupId]:
        """Those of the keys that no slot is findable by, nor will be when another engine is done."""
        missing = self.pool.cached_block_hash_to_block.lacking(keys)
        return missing if self.shared is None else [key for key in missing if not self.is_expected(key)]

    def is_expected(self, key: BlockHashWithGroupId) -> bool:
        """Whether another engine of the pool is storing this content."""
        return self.shared is not None and self.shared.is_expected(key)

    def is_of_others(self, slot: KVCacheBlock | None) -> bool:
        """Whether the slot holds what another engine of the pool has stored."""
        if self.shared is None or slot is None or slot.block_hash is None:
            return False
        return slot.block_id not in self.shared.own_slots

    def get(self, key: BlockHashWithGroupId) -> KVCacheBlock | None:
        """A findable slot with this key."""
        return self.pool.cached_block_hash_to_block.get_one_block(key)

    def victims(self) -> Victims:
        """A look ahead at the slots that `stage` would take."""
        return self.queue.victims() if self.shared is None else self.shared.victims()

    def missed(self, keys: Iterable[BlockHashWithGroupId]) -> None:
        """A request wants content of these keys; what the tier does not have of it may change what it evicts."""
        if self.queue.hears_misses:
            self.queue.missed(key for key in keys if not self.contains(key))

    def used(self, slots: Iterable[KVCacheBlock]) -> None:
        """A request reads these slots."""
        self.queue.used(slots)

    def victims_after(self, count: int) -> Iterator[KVCacheBlock]:
        """The slots that `stage` would take after ``count`` others. The free list must not change meanwhile."""
        return islice(self.pool.free_block_queue.iter_blocks_after(None), count, None)

    def refresh(self, slots: Sequence[KVCacheBlock]) -> None:
        """These slots count as just used, in this order."""
        self.pool.touch(slots)
        self.pool.free_blocks(slots)

    def stage_for(self, contents: Sequence[tuple[StagedKey, ...]]) -> list[KVCacheBlock]:
        """A slot for each of these contents."""
        if self.queue.hears_incoming:
            self.queue.incoming(Contents.of(contents).primary_keys)
        if self.shared is None:
            return self._take(len(contents))
        slots = self._taken(self.shared.get_blocks_for(Contents.of(contents).primary_keys))
        for slot, content in zip(slots, contents, strict=True):
            self.shared.announce(slot, tuple((staged.key, staged.num_tokens) for staged in content))
        return slots

    def stage(
        self, count: int, keys: Sequence[BlockHashWithGroupId | None] | None = None
    ) -> list[KVCacheBlock]:
        """Take ``count`` slots, each with one reference for the caller. ``ValueError`` if there are fewer.

        ``keys``: what they are to hold, one for each.
        """
        self.queue.incoming(keys or (None,) * count)
        return self._take(count)

    def _take(self, count: int) -> list[KVCacheBlock]:
        return self._taken(self.pool.get_new_blocks(count))

    def _taken(self, slots: list[KVCacheBlock]) -> list[KVCacheBlock]:
        if self.guarded:
            self._end_guards([slot.block_id for slot in slots])
        if self.changed is not None:
            self._note_change(slot.block_id for slot in slots)
        return slots

    def commit(self, block: KVCacheBlock, keys: Iterable[StagedKey]) -> None:
        """Make a staged slot, whose bytes have arrived, findable under its keys."""
        self.commits += 1
        self._note_change((block.block_id,))
        for staged in keys:
            self.pool.commit_staged(block, staged.key, staged.num_tokens, staged.info)

    def forget(self, keys: Iterable[BlockHashWithGroupId]) -> int:
        """Make content unfindable under these keys; who holds the slots keeps them. Returns the slots."""
        # Engines of a shared pool may have stored the same content in several slots.
        wanted = list(keys)
        slots = self.pool.cached_block_hash_to_block.ids_under(wanted)
        self.evict(slots)
        # Also without a slot: a disk that is kept may not have been told yet that it was evicted.
        self.withdrawals += bool(wanted)
        return len(slots)

    def evict(self, slots: Iterable[int]) -> None:
        """Make these slots unfindable; who holds them keeps them."""
        chosen = sorted(slots)
        self._end_guards(chosen)
        self._note_change(chosen)
        self.pool.evict_blocks(chosen)

    def invalidate(self) -> int:
        """Make everything unfindable at once (`BlockPool.epoch` rises); returns how many slots are still held."""
        if self.changed is not None:
            self.changed.clear()
        return self.pool.invalidate_prefix_cache()

    def restore(self, slot: int, keys: Iterable[StagedKey]) -> None:
        """Make a free slot findable that held this content all along; it counts as just used."""
        block = self.pool.blocks[slot]
        self.pool.touch((block,))
        self.commit(block, keys)
        self.pool.free_blocks((block,))

    def _end_guards(self, slots: Iterable[int]) -> None:
        for slot in slots:
            self.guard_losses += self.guarded.pop(slot, None) is not None

    def _note_change(self, slots: Iterable[int]) -> None:
        if self.changed is not None:
            self.changed.update(dict.fromkeys(slots))

    def take_events(self) -> list[AnyKVCacheEvent]:
        """Events since the last call, with the kind and the window of their group."""
        return self.coordinator.take_events()

    def present_events(self) -> list[BlockStored]:
        """All that events of this tier have told of and that is there still."""
        return self.coordinator.present_events()


def tier_kv_cache_config(kv_cache_config: KVCacheConfig, num_blocks: int) -> KVCacheConfig:
    """The device's plan with another number of blocks; groups keep their ids, tensors their proportions."""
    groups = [copy.copy(group) for group in kv_cache_config.kv_cache_groups]
    per_block = max(1, kv_cache_config.num_blocks)
    tensors = [
        replace(tensor, size=tensor.size // per_block * num_blocks)
        for tensor in kv_cache_config.kv_cache_tensors
    ]
    return replace(kv_cache_config, num_blocks=num_blocks, kv_cache_groups=groups, kv_cache_tensors=tensors)
