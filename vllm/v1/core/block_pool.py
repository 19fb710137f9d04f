"""The pool of KV blocks: allocate, touch, free, commit, evict, reset. Layer: L3.

Owns references and hashes of its blocks: nobody else changes them (the index under it keeps keys and events). It
must not know requests beyond what hashing reads of them, nor which group or kind a block serves.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import ClassVar, Protocol

from vllm.distributed.kv_event_types import MEDIUM_GPU, AnyKVCacheEvent, BlockStored
from vllm.logger import init_logger
from vllm.utils.checks import check
from vllm.v1.core.block_hash import (
    BlockHash,
    BlockHashWithGroupId,
    make_block_hash_with_group_id,
    resolve_block_hashes,
)
from vllm.v1.core.block_hasher import HashableRequest
from vllm.v1.core.block_index import BlockHashToBlockMap, BlockIndex, StoredBlockInfo
from vllm.v1.core.block_ops import (
    operations_for,
    release,
    release_elsewhere,
    require_free,
    take_nothing,
    touch_elsewhere,
)
from vllm.v1.core.free_block_queue import FreeKVCacheBlockQueue, FreeQueue
from vllm.v1.core.kv_cache_block import KVCacheBlock, make_blocks

logger = init_logger(__name__)


class BlockObserver(Protocol):
    """Watches the life of blocks, for metrics."""

    def on_block_allocated(self, block: KVCacheBlock) -> None: ...

    def on_block_accessed(self, block: KVCacheBlock) -> None: ...

    def on_block_evicted(self, block: KVCacheBlock) -> None: ...

    def reset(self) -> None: ...


class BlockHold(Protocol):
    """A live lease, as a recount sees it."""

    owner: str
    to_front: bool
    """Whether the blocks go back to the front of the queue."""

    @property
    def blocks(self) -> Sequence[KVCacheBlock]: ...

    def note_evicted(self, block_ids: frozenset[int]) -> None: ...


class BlockPlacer(Protocol):
    """Decides where in the free queue cached blocks go, as some contents are to be kept longer than others."""

    limit: int
    num_protected: int
    num_refused: int

    def place(self, blocks: Sequence[KVCacheBlock]) -> None: ...

    def place_protected(self, blocks: Sequence[KVCacheBlock]) -> list[KVCacheBlock]: ...

    def leave(self, blocks: Sequence[KVCacheBlock]) -> None: ...

    def expire(self) -> None: ...

    def clear(self) -> None: ...


class BlockPool:
    """`num_gpu_blocks` blocks with ids 0 … n-1; block 0 is the null block, which is never handed out.

    A block is in the free queue if and only if nobody holds it. `hash_block_size` is the number of tokens per hash
    of `request.block_hashes`; `medium` is the tier named in events; `make_free_queue` decides in which order free blocks
    are handed out.
    """

    can_place: ClassVar[bool] = True
    """Whether freed blocks may get places by what they hold (see `placer`)."""

    def __init__(
        self,
        num_gpu_blocks: int,
        enable_caching: bool,
        hash_block_size: int,
        enable_kv_cache_events: bool = False,
        metrics_collector: BlockObserver | None = None,
        num_hash_lookahead_tokens: int = 0,
        medium: str = MEDIUM_GPU,
        *,
        make_free_queue: Callable[[Sequence[KVCacheBlock]], FreeQueue] = FreeKVCacheBlockQueue,
    ) -> None:
        if num_gpu_blocks <= 0:
            raise ValueError(f"num_gpu_blocks must be positive, got {num_gpu_blocks}")
        self.num_gpu_blocks = num_gpu_blocks
        self.enable_caching = enable_caching
        self.hash_block_size = hash_block_size
        self.enable_kv_cache_events = enable_kv_cache_events
        self.metrics_collector = metrics_collector
        self.num_hash_lookahead_tokens = num_hash_lookahead_tokens
        self.medium = medium
        self.epoch = 0
        """How often the whole index was dropped; content read before a change must not be committed after it."""
        self.blocks = make_blocks(num_gpu_blocks, self)
        self.null_block = self.blocks[0]
        self.null_block.is_null = True
        self.free_block_queue = make_free_queue(self.blocks[1:])
        self.index = BlockIndex(enable_kv_cache_events, medium, num_hash_lookahead_tokens, num_gpu_blocks)
        index = self.index
        self._take, self._touch = operations_for(
            self.free_block_queue, index.map.entries, index.tally, index.secondary
        )
        if enable_kv_cache_events or metrics_collector is not None:
            self._take = take_nothing
        self._put_in_order: Callable[[Sequence[KVCacheBlock]], None] = self.free_block_queue.put_back
        self._num_evicted = 0  # besides those that the index tallies
        self.placer: BlockPlacer | None = None
        """Places freed blocks once somebody asked for contents to be kept; the tail of the queue otherwise."""
        self.leases: dict[int, BlockHold] = {}
        """Live leases on this pool, kept by the leases themselves; a recount needs them."""
        self._on_reuse: dict[int, Callable[[KVCacheBlock], None]] = {}

    @property
    def num_evicted(self) -> int:
        """Cached blocks that were handed out for new content so far."""
        return self._num_evicted + self.index.tally.evicted

    @num_evicted.setter
    def num_evicted(self, value: int) -> None:
        self._num_evicted = value - self.index.tally.evicted

    # Lookup

    @property
    def cached_block_hash_to_block(self) -> BlockHashToBlockMap:
        """Index key → block(s)."""
        return self.index.map

    @property
    def cached_block_hashes_by_block(self) -> dict[int, dict[BlockHashWithGroupId, int | None]]:
        """Block id → secondary keys, each with the prefix tokens it covers."""
        return self.index.secondary

    @property
    def kv_event_queue(self) -> list[AnyKVCacheEvent]:
        """Events not taken yet."""
        return self.index.events

    def get_cached_block(
        self, block_hash: BlockHash, kv_cache_group_ids: Sequence[int]
    ) -> list[KVCacheBlock] | None:
        """A block with this content for each listed group, or None if any group lacks one. Does not touch."""
        found: list[KVCacheBlock] = []
        for group_id in kv_cache_group_ids:
            block = self.index.map.get_one_block(make_block_hash_with_group_id(block_hash, group_id))
            if block is None:
                return None
            found.append(block)
        return found

    def find_run(
        self, block_hashes: Sequence[BlockHash], kv_cache_group_ids: Sequence[int]
    ) -> tuple[list[KVCacheBlock], ...]:
        """For each group the blocks of the longest run of hashes, from the first on, that all groups have."""
        runs = tuple(self.index.map.get_run(block_hashes, group_id) for group_id in kv_cache_group_ids)
        if len(runs) > 1:
            shortest = min(len(run) for run in runs)
            for run in runs:
                del run[shortest:]
        return runs

    # References

    def get_new_blocks(self, num_blocks: int) -> list[KVCacheBlock]:
        """Take `num_blocks` from the front of the free queue, each with one reference and no hash.

        ValueError, and no change, if there are fewer. Cached content of the taken blocks is evicted.
        """
        take = self._take  # no method: called in one go, Python looks for one first
        taken = take(num_blocks)
        if taken is None:
            taken = self._take_observed(num_blocks)
        if self._on_reuse:
            self._report_reuse(taken)
        return taken

    def _take_observed(self, num_blocks: int) -> list[KVCacheBlock]:
        """As `take`, one block after the other: somebody is told of each, or blocks have further keys."""
        require_free(self.free_block_queue, num_blocks)
        taken = self.free_block_queue.popleft_n(num_blocks)
        collector = self.metrics_collector
        for block in taken:
            cached = block.block_hash is not None
            if collector is not None:
                if cached:
                    collector.on_block_evicted(block)
                collector.on_block_allocated(block)
            if cached:
                self.index.drop(block)
                self._num_evicted += 1
            block.ref_cnt = 1
        return taken

    def touch(self, blocks: Sequence[KVCacheBlock]) -> None:
        """Add a reference to each block; a block nobody held leaves the free queue.

        Null blocks are skipped, blocks of another pool are touched in that pool.
        """
        foreign = self._touch(self, self.free_block_queue, blocks)
        if foreign is not None:
            touch_elsewhere(foreign)
        if self.metrics_collector is not None:
            for block in blocks:
                self.metrics_collector.on_block_accessed(block)

    def free_blocks(self, ordered_blocks: Iterable[KVCacheBlock]) -> None:
        """Drop a reference of each block, in eviction order: earlier ones are handed out earlier.

        Blocks nobody holds any more join the free queue: those without a hash at the front (they can never be hit),
        cached ones at the tail. Null blocks are skipped, blocks of another pool go to that pool.
        """
        hashed: list[KVCacheBlock] = []
        unhashed: list[KVCacheBlock] = []
        self._release(ordered_blocks, hashed, unhashed)
        if hashed:
            (self.free_block_queue.append_n if self.placer is None else self.placer.place)(hashed)
        if unhashed:
            self.free_block_queue.prepend_n(unhashed)

    def keep_order(self) -> None:
        """From now on `free_blocks_to_front` lets blocks stay behind those that came to the queue's tail before them."""
        if isinstance(self.free_block_queue, FreeKVCacheBlockQueue):
            self.free_block_queue.keep_ages(self.num_gpu_blocks)
            self._put_in_order = self.free_block_queue.put_by_age

    def free_blocks_to_front(self, ordered_blocks: Iterable[KVCacheBlock]) -> None:
        """As `free_blocks`, but blocks nobody holds any more go to the front of the queue, the first one frontmost.

        Blocks that were in front without a hash stay there: reusing them costs nothing. So do older ones after
        `keep_order`, while the pool has no levels.
        """
        idle: list[KVCacheBlock] = []
        self._release(ordered_blocks, idle, idle)
        if self.placer is not None:
            self.free_block_queue.put_back(self.placer.place_protected(idle))
        else:
            self._put_in_order(idle)

    def unpin_blocks(self, blocks: Sequence[KVCacheBlock], on_reuse: Callable[[KVCacheBlock], None]) -> None:
        """Free the blocks, whose bytes stay readable until they are handed out: then `on_reuse(block)` is called.

        They join the tail of the queue whether cached or not, so that they stay readable for long.
        """
        for block in blocks:
            if not block.is_null:
                self._on_reuse[block.block_id] = on_reuse
        idle: list[KVCacheBlock] = []
        self._release(blocks, idle, idle)
        self.free_block_queue.append_n(idle)

    def is_block_writable(self, block: KVCacheBlock) -> bool:
        """Whether its only holder may overwrite the block: real, one reference, no cache entry."""
        return not block.is_null and block.ref_cnt == 1 and block.block_hash is None

    # Cache entries

    def cache_full_blocks(
        self,
        request: HashableRequest,
        blocks: Sequence[KVCacheBlock],
        num_cached_blocks: int,
        num_full_blocks: int,
        block_size: int,
        kv_cache_group_id: int,
        block_mask: Sequence[bool] | None = None,
    ) -> None:
        """Give blocks `[num_cached_blocks, num_full_blocks)` of the request their hashes.

        Skips null blocks and those whose entry in `block_mask` (relative to the first block) is False. A block that
        held a partial entry is promoted: its old keys are dropped first.
        """
        if num_cached_blocks >= num_full_blocks:
            return
        hashes = resolve_block_hashes(request.block_hashes, self.hash_block_size, block_size)
        check(
            num_full_blocks <= len(hashes),
            f"{num_full_blocks} blocks of request {request.request_id} to cache, {len(hashes)} hashes",
        )
        stored: list[int] = []
        for i in range(num_cached_blocks, num_full_blocks):
            block = blocks[i]
            if block.is_null or (block_mask is not None and not block_mask[i - num_cached_blocks]):
                continue
            key = make_block_hash_with_group_id(hashes[i], kv_cache_group_id)
            if block.block_hash is not None:
                if block.block_hash == key:
                    continue
                self.index.drop(block)
            self.index.add(key, block, (i + 1) * block_size)
            stored.append(i)
        self.index.report_full(request, blocks, hashes, stored, block_size, kv_cache_group_id)

    def cache_partial_block(
        self,
        request: HashableRequest,
        block: KVCacheBlock,
        num_tokens: int,
        kv_cache_group_id: int,
        block_size: int,
        replace_existing_hashes: bool = False,
    ) -> bool:
        """Register the prefix of `num_tokens` tokens, a multiple of the hash size that ends inside `block`.

        A further boundary of the same block becomes a secondary key, or the only one with
        `replace_existing_hashes` (for kinds whose block holds one state). Refused, with False, for a null block, for a
        prefix not hashed yet, and for a boundary that the block's keys already cover: a retired entry never returns.
        """
        check(
            num_tokens > 0 and num_tokens % self.hash_block_size == 0,
            f"partial entry of {num_tokens} tokens is no multiple of the hash size {self.hash_block_size}",
        )
        unit = num_tokens // self.hash_block_size
        if block.is_null or unit > len(request.block_hashes) or num_tokens % block_size == 0:
            return False
        covered = [0 if n is None else n for _, n in self.index.keys_of(block)]
        if covered and max(covered) >= num_tokens:
            return False
        if replace_existing_hashes:
            self.index.drop(block)
        key = make_block_hash_with_group_id(request.block_hashes[unit - 1], kv_cache_group_id)
        self.index.add(key, block, num_tokens)
        self.index.report_partial(request, block, num_tokens, self.hash_block_size, kv_cache_group_id)
        return True

    def commit_staged(
        self,
        block: KVCacheBlock,
        key: BlockHashWithGroupId,
        num_tokens: int | None,
        info: StoredBlockInfo | None,
    ) -> None:
        """Publish content that another tier delivered into a held block: the block gets the key, with one event.

        The first key of a block is its primary one, further ones are secondary. Without `info` the event carries
        no tokens.
        """
        check(
            block.ref_cnt > 0 and not block.is_null, f"commit into block {block.block_id}, which nobody holds"
        )
        self.index.commit(block, key, num_tokens, info)

    def get_keys(self, block: KVCacheBlock) -> tuple[tuple[BlockHashWithGroupId, int | None], ...]:
        """The block's keys, primary first, each with the prefix tokens it covers; () if it is not cached."""
        return self.index.keys_of(block)

    def get_stored_info(self, block: KVCacheBlock, key: BlockHashWithGroupId) -> StoredBlockInfo | None:
        """What the event of this key said, while the key lives. None with events off."""
        return self.index.info_of(block, key)

    def move_block_hashes(self, source: KVCacheBlock, target: KVCacheBlock) -> None:
        """Repoint all cache entries of `source` to `target`, whose bytes will be equal. No events."""
        self.index.move(source, target)

    def evict_blocks(self, block_ids: Iterable[int]) -> None:
        """Drop the hashes of these blocks; who holds them keeps them, and leases remember it."""
        held: set[int] = set()
        for block_id in block_ids:
            check(
                0 <= block_id < self.num_gpu_blocks, f"block {block_id} is not one of {self.num_gpu_blocks}"
            )
            block = self.blocks[block_id]
            self._maybe_evict_cached_block(block)
            if block.ref_cnt > 0:
                held.add(block_id)
        if held:
            evicted = frozenset(held)
            for lease in self.leases.values():
                lease.note_evicted(evicted)

    def reset_prefix_cache(self) -> bool:
        """Drop the whole index if nobody holds a block; False, a warning and no change otherwise."""
        held = self.num_gpu_blocks - 1 - self.get_num_free_blocks()
        if held:
            logger.warning("Prefix cache not reset: %d blocks are still held", held)
            return False
        self.invalidate_prefix_cache()
        return True

    def invalidate_prefix_cache(self) -> int:
        """Drop the whole index at once, held blocks or not. Held blocks keep their bytes but no hash.

        Returns how many blocks are still held.
        """
        self.epoch += 1
        self.index.clear()
        self.free_block_queue.clear()
        if self.placer is not None:
            self.placer.clear()
        if self.metrics_collector is not None:
            self.metrics_collector.reset()
        return self.num_gpu_blocks - 1 - self.get_num_free_blocks()

    # Events and figures

    def emit_cached_block_events(
        self,
        request: HashableRequest,
        blocks: Sequence[KVCacheBlock],
        num_cached_tokens: int,
        block_size: int,
        kv_cache_group_id: int,
    ) -> None:
        """Report a reuse from token 0: BlockStored for the full real blocks of a hit of `num_cached_tokens`.

        `block_size` is the group's effective one. Null entries and a tail hit in part are left out.
        """
        hashes = resolve_block_hashes(request.block_hashes, self.hash_block_size, block_size)
        num_full = min(num_cached_tokens // block_size, len(blocks), len(hashes))
        stored = [i for i in range(num_full) if not blocks[i].is_null]
        self.index.report_full(request, blocks, hashes, stored, block_size, kv_cache_group_id)

    def take_events(self) -> list[AnyKVCacheEvent]:
        """Events since the last call."""
        return self.index.take_events()

    def present_events(self) -> list[BlockStored]:
        """All that events have told of and that is there still; empty with events off. O(entries)."""
        return self.index.present_events()

    def get_num_free_blocks(self) -> int:
        """Blocks nobody holds, cached ones included."""
        return self.free_block_queue.num_free_blocks

    def get_usage(self) -> float:
        """Share of blocks held, 0 … 1."""
        total = self.num_gpu_blocks - 1
        return 1.0 - self.get_num_free_blocks() / total if total else 0.0

    def _release(
        self, blocks: Iterable[KVCacheBlock], cached: list[KVCacheBlock], uncached: list[KVCacheBlock]
    ) -> None:
        """Drop a reference of each; appends this pool's blocks that nobody holds now, and forwards foreign ones."""
        foreign = release(self, blocks, cached, uncached)
        if foreign is not None:
            release_elsewhere(foreign)
        if self.placer is not None:
            self.placer.leave(cached if cached is uncached else cached + uncached)

    def _report_reuse(self, blocks: Sequence[KVCacheBlock]) -> None:
        for block in blocks:
            on_reuse = self._on_reuse.pop(block.block_id, None)
            if on_reuse is not None:
                on_reuse(block)

    # Names that outside code knows

    def _insert_block_hash(self, key: BlockHashWithGroupId, block: KVCacheBlock, num_tokens: int) -> None:
        self.index.add(key, block, num_tokens)
        if block.ref_cnt == 0 and isinstance(self.free_block_queue, FreeKVCacheBlockQueue):
            self.free_block_queue.look_again()

    def _maybe_evict_cached_block(self, block: KVCacheBlock) -> bool:
        if self.metrics_collector is not None and block.block_hash is not None:
            self.metrics_collector.on_block_evicted(block)
        return self.index.drop(block)
