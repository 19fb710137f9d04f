"""A manager from outside as a tier of the offload: its slots only stand for content that the manager has.

Owns which slot stands for which key, and which keys must not be loaded any more. It must not know transfers, nor where
the bytes are. Layer L4.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from math import inf

from vllm.distributed.kv_event_types import BlockStored
from vllm.distributed.kv_transfer.kv_connector.v1.offloading.events import OffloadingEventsTracker
from vllm.logger import init_logger
from vllm.v1.core.block_hash import BlockHash, BlockHashWithGroupId, make_block_hash_with_group_id
from vllm.v1.core.block_pool import BlockPool
from vllm.v1.core.kv_cache_block import KVCacheBlock
from vllm.v1.kv_cache_interface import KVCacheConfig
from vllm.v1.kv_offload.base import (
    LookupResult,
    OffloadingManager,
    OffloadKey,
    ReqContext,
    TierFilter,
)
from vllm.v1.simple_kv_offload.eviction import eviction_queue
from vllm.v1.simple_kv_offload.tier import Tier, TierGeometry
from vllm.v1.simple_kv_offload.transfer import StagedKey

BANNED_MAX = 65_536
"""Keys that are remembered as unusable. With more for good, the manager is not asked until the next reset."""
FAILED_LOAD_BAN_S = 60.0
"""How long content is not asked for after a load of it has failed: else its request would try again at once, for ever."""
NOBODY = ReqContext("")

logger = init_logger(__name__)


class MirrorPool(BlockPool):
    """Whoever searches it asks the manager about every key; a slot is made, or given up, by the answer.

    A slot that is evicted loses nothing but the name: the next hit makes another one.
    """

    def __init__(self, geometry: TierGeometry, manager: OffloadingManager) -> None:
        super().__init__(
            geometry.num_blocks,
            enable_caching=True,
            hash_block_size=geometry.hash_block_size,
            enable_kv_cache_events=geometry.enable_events,
            num_hash_lookahead_tokens=geometry.num_hash_lookahead_tokens,
            medium=geometry.medium,
            make_free_queue=eviction_queue(geometry.eviction_policy),
        )
        self.banned: dict[OffloadKey, float] = {}
        """Keys that are not asked for, and until when."""
        self.is_closed = False
        """Whether there were too many of them to be remembered."""
        self.is_stuck = False
        """Whether a load is not getting on: no other would."""
        self.now = 0.0
        self.is_put_off = False
        """Whether the manager put off an answer during the present question."""
        self.on_lost: Callable[[Iterable[int]], None] = lambda slots: None
        """Hears which slots are to stand for something else, or for nothing."""
        self._manager = manager
        self._ctx = NOBODY
        self._answers: dict[OffloadKey, bool] = {}
        # Held until the question is over: no place in line keeps them, where content that is worth keeping comes last.
        self._found: list[KVCacheBlock] = []

    @contextmanager
    def asking(self, ctx: ReqContext, now: float) -> Iterator[None]:
        """Searches inside are made for this request at this time; the manager hears of each key once."""
        self._ctx, self.is_put_off, self.now = ctx, False, now
        try:
            yield
        finally:
            self._ctx = NOBODY
            self._answers.clear()
            found, self._found = self._found, []
            self.free_blocks(found)

    @property
    def ctx(self) -> ReqContext:
        """The request that asks."""
        return self._ctx

    def get_cached_block(
        self, block_hash: BlockHash, kv_cache_group_ids: Sequence[int]
    ) -> list[KVCacheBlock] | None:
        keys = [make_block_hash_with_group_id(block_hash, group_id) for group_id in kv_cache_group_ids]
        slots = self._stand_for(keys) if all(map(self._has, keys)) else []
        return slots if len(slots) == len(keys) else None

    def find_run(
        self, block_hashes: Sequence[BlockHash], kv_cache_group_ids: Sequence[int]
    ) -> tuple[list[KVCacheBlock], ...]:
        keys: list[OffloadKey] = []
        for block_hash in block_hashes:
            wanted = [make_block_hash_with_group_id(block_hash, group_id) for group_id in kv_cache_group_ids]
            if not all(map(self._has, wanted)):
                break
            keys += wanted
        slots = self._stand_for(keys)
        count = len(kv_cache_group_ids)
        whole = len(slots) - len(slots) % count
        return tuple(slots[place:whole:count] for place in range(count))

    def ban(self, keys: Iterable[OffloadKey], until: float = inf) -> None:
        """Content under these keys is not to be trusted, and the manager cannot be told."""
        for key in keys:
            self.banned[key] = max(until, self.banned.get(key, until))
        if len(self.banned) > BANNED_MAX:
            # Those for good stay as long as there is room: what they stand for is wrong.
            self.banned = {key: until for key, until in self.banned.items() if until == inf}
        if len(self.banned) > BANNED_MAX and not self.is_closed:
            self.is_closed = True
            logger.error(
                "KV offload: more than %d blocks of failed requests are not to be trusted; the manager is not asked "
                "any more until the next reset",
                BANNED_MAX,
            )

    def _has(self, key: OffloadKey) -> bool:
        """Whether the manager has it now; a slot that stands for what it has no more is given up."""
        known = self._answers.get(key)
        if known is not None:
            return known
        answer = LookupResult.MISS
        if not (self.is_closed or self.is_stuck) and (
            not self.banned or self.banned.get(key, 0.0) <= self.now
        ):
            answer = self._manager.lookup(key, self._ctx)
        if answer is LookupResult.MISS:
            # Not those that are held: who loads from them was told otherwise, and may load from other tiers.
            slots = [slot for slot in self.index.map.ids_under([key]) if not self.blocks[slot].ref_cnt]
            if slots:
                self.on_lost(slots)
                self.evict_blocks(slots)
        elif answer is not LookupResult.HIT:
            self.is_put_off = True
        if self._ctx is not NOBODY:
            self._answers[key] = answer is LookupResult.HIT
        return answer is LookupResult.HIT

    def _stand_for(self, keys: Sequence[OffloadKey]) -> list[KVCacheBlock]:
        """A slot for each key, from the first on, as far as there are slots beside those found in this question."""
        get = self.index.map.get_one_block
        known = [get(key) for key in keys]
        present = [slot for slot in known if slot is not None]
        self.touch(present)
        fresh = self.get_new_blocks(min(len(keys) - len(present), self.get_num_free_blocks()))
        if fresh:
            self.on_lost([slot.block_id for slot in fresh])
        slots: list[KVCacheBlock] = []
        unused = iter(fresh)
        for key, slot in zip(keys, known, strict=True):
            if slot is None:
                slot = next(unused, None)
                if slot is None:
                    break
                self.commit_staged(slot, key, None, None)
            slots.append(slot)
        held = [*present, *fresh]
        if self._ctx is NOBODY:
            self.free_blocks(held)
        else:
            self._found += held
        return slots


class PluginTier(Tier):
    """Staged slots become findable only if the manager took their content."""

    def __init__(
        self,
        kv_cache_config: KVCacheConfig,
        geometry: TierGeometry,
        manager: OffloadingManager,
        tracker: OffloadingEventsTracker,
    ) -> None:
        self._manager = manager
        self._tracker = tracker
        self.mirror = MirrorPool(geometry, manager)
        self.taken: set[OffloadKey] = set()
        """Keys of stores under way that the manager has made room for."""
        self.stored: set[OffloadKey] = set()
        """Those of them whose bytes have arrived since somebody looked."""
        super().__init__(kv_cache_config, geometry)
        self.turn = manager.lock
        self.mirror.on_lost = self._end_guards

    def make_pool(self, geometry: TierGeometry) -> BlockPool:
        return self.mirror

    def is_open_to(self, tiers: TierFilter) -> bool:
        # Which of its own tiers are meant is the manager's to know: it sees the filter at each look-up.
        return tiers.matchers != ()

    def used(self, slots: Iterable[KVCacheBlock]) -> None:
        read = list(slots)
        super().used(read)
        self._manager.touch(_keys_of(read), self.mirror.ctx)

    def commit(self, block: KVCacheBlock, keys: Iterable[StagedKey]) -> None:
        # What the manager did not take was stripped when the order left (`OffloadingConnectorScheduler`).
        arrived = list(keys)
        for staged in arrived:
            self.stored.add(staged.key)
            self.mirror.banned.pop(staged.key, None)
        super().commit(block, arrived)

    def forget(self, keys: Iterable[BlockHashWithGroupId]) -> int:
        wanted = list(keys)
        # What is neither there nor on its way need not be remembered.
        self.mirror.ban(
            key
            for key in wanted
            if key in self.taken or self._manager.lookup(key, NOBODY) is not LookupResult.MISS
        )
        return super().forget(wanted)

    def evict(self, slots: Iterable[int]) -> None:
        chosen = list(slots)
        keys = _keys_of(self.mirror.blocks[slot] for slot in chosen)
        self.mirror.ban(keys, self.mirror.now + FAILED_LOAD_BAN_S)
        super().evict(chosen)

    def let_go(self, keys: Iterable[OffloadKey]) -> None:
        """The manager has this content no more."""
        gone = list(keys)
        for key in gone:
            self.mirror.banned.pop(key, None)
        super().evict(self.mirror.cached_block_hash_to_block.ids_under(gone))

    def invalidate(self) -> int:
        self.mirror.banned.clear()
        self.mirror.is_closed = False
        self._tracker.clear()
        return super().invalidate()

    def present_events(self) -> list[BlockStored]:
        return self._tracker.present()


def _keys_of(blocks: Iterable[KVCacheBlock]) -> list[OffloadKey]:
    return [block.block_hash for block in blocks if block.block_hash is not None]
