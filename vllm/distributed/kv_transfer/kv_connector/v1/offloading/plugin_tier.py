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
"""Keys that are remembered as unusable; the oldest are asked for again."""
FAILED_LOAD_BAN_S = 60.0
"""How long content is not asked for after a load of it has failed: else its request would try again at once, for ever."""
NOBODY = ReqContext("")


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
        self.now = 0.0
        self.is_put_off = False
        """Whether the manager put off an answer during the present question."""
        self.on_lost: Callable[[Iterable[int]], None] | None = None
        """Hears which slots are to stand for something else, or for nothing."""
        self._manager = manager
        self._ctx = NOBODY
        self._answers: dict[OffloadKey, KVCacheBlock | None] = {}

    @contextmanager
    def asking(self, ctx: ReqContext, now: float) -> Iterator[None]:
        """Searches inside are made for this request at this time; the manager hears of each key once."""
        self._ctx, self.is_put_off, self.now = ctx, False, now
        try:
            yield
        finally:
            self._ctx = NOBODY
            self._answers.clear()

    @property
    def ctx(self) -> ReqContext:
        """The request that asks."""
        return self._ctx

    def get_cached_block(
        self, block_hash: BlockHash, kv_cache_group_ids: Sequence[int]
    ) -> list[KVCacheBlock] | None:
        found = []
        for group_id in kv_cache_group_ids:
            block = self._ask(make_block_hash_with_group_id(block_hash, group_id))
            if block is None:
                return None
            found.append(block)
        return found

    def find_run(
        self, block_hashes: Sequence[BlockHash], kv_cache_group_ids: Sequence[int]
    ) -> tuple[list[KVCacheBlock], ...]:
        runs: tuple[list[KVCacheBlock], ...] = tuple([] for _ in kv_cache_group_ids)
        for block_hash in block_hashes:
            blocks = self.get_cached_block(block_hash, kv_cache_group_ids)
            if blocks is None:
                break
            for run, block in zip(runs, blocks, strict=True):
                run.append(block)
        return runs

    def ban(self, keys: Iterable[OffloadKey], until: float = inf) -> None:
        """Content under these keys is not to be trusted, and the manager cannot be told."""
        for key in keys:
            self.banned[key] = max(until, self.banned.get(key, until))
        while len(self.banned) > BANNED_MAX:
            del self.banned[next(iter(self.banned))]

    def _ask(self, key: OffloadKey) -> KVCacheBlock | None:
        if key in self._answers:
            return self._answers[key]
        found = None
        if not self.banned or self.banned.get(key, 0.0) <= self.now:
            found = self._follow(key, self._manager.lookup(key, self._ctx))
        if self._ctx is not NOBODY:
            self._answers[key] = found
        return found

    def _follow(self, key: OffloadKey, answer: LookupResult) -> KVCacheBlock | None:
        block = self.cached_block_hash_to_block.get_one_block(key)
        if answer is LookupResult.HIT:
            return self._stand_for(key) if block is None else self._keep(block)
        if answer is not LookupResult.MISS:
            self.is_put_off = True
        elif block is not None:
            self._tell_lost(block)
            self.evict_blocks((block.block_id,))
        return None

    def _tell_lost(self, block: KVCacheBlock) -> None:
        if self.on_lost is not None:
            self.on_lost((block.block_id,))

    def _keep(self, block: KVCacheBlock) -> KVCacheBlock:
        # To the end of the queue: what is found later in this search must not take it.
        self.touch((block,))
        self.free_blocks((block,))
        return block

    def _stand_for(self, key: OffloadKey) -> KVCacheBlock | None:
        if self.get_num_free_blocks() <= len(self._answers):
            return None  # all slots may be those found already
        (block,) = self.get_new_blocks(1)
        self._tell_lost(block)
        self.commit_staged(block, key, None, None)
        self.free_blocks((block,))
        return block


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
        self._tracker.clear()
        return super().invalidate()

    def present_events(self) -> list[BlockStored]:
        return self._tracker.present()


def _keys_of(blocks: Iterable[KVCacheBlock]) -> list[OffloadKey]:
    return [block.block_hash for block in blocks if block.block_hash is not None]
