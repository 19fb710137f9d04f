"""(hash, group) → blocks, and the only producer of KV events. Layer: L3.

Owns the index keys of every block and the queue of events: an entry appears, moves or vanishes only here. It must
not know references, the free list or which blocks a request holds.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Literal

from vllm.distributed.kv_event_types import (
    LOCALITY_LOCAL,
    MEDIUM_GPU,
    AllBlocksCleared,
    AnyKVCacheEvent,
    BlockRemoved,
    BlockStored,
)
from vllm.utils.checks import check
from vllm.v1.core.block_hash import (
    BlockHash,
    BlockHashWithGroupId,
    convert_block_hashes,
    get_block_hash,
    get_group_id,
    get_group_suffix,
    make_block_hash_with_group_id,
    maybe_convert_block_hash,
)
from vllm.v1.core.block_hasher import (
    HashableRequest,
    generate_block_hash_extra_keys,
    to_event_extra_keys,
)
from vllm.v1.core.block_ops import IndexEntries, Tally, forget_block, lacking, make_entries
from vllm.v1.core.kv_cache_block import KVCacheBlock


class BlockHashToBlockMap:
    """Index key → block, or → dict of blocks by id where several blocks hold the same content.

    Equal content is not merged: block ids that a request already knows never change.
    """

    __slots__ = ("entries",)

    def __init__(self, *, expected: int = 0) -> None:
        self.entries = make_entries(expected)
        """Changed in place only: allocations hold on to it."""

    @property
    def _cache(self) -> IndexEntries:
        """The name under which outside code reads and replaces the entries."""
        return self.entries

    @_cache.setter
    def _cache(self, entries: IndexEntries) -> None:
        replaced = dict(entries.items())
        self.entries.clear()
        self.entries.update(replaced)

    def get_one_block(self, key: BlockHashWithGroupId) -> KVCacheBlock | None:
        """Any block with this content, the longest registered one first; None if there is none."""
        entry = self.entries.get(key)
        if isinstance(entry, dict):
            return next(iter(entry.values()))
        return entry

    def get_run(self, block_hashes: Sequence[BlockHash], group_id: int) -> list[KVCacheBlock]:
        """Blocks for the hashes in order, up to the first miss."""
        get = self.entries.get
        suffix = make_block_hash_with_group_id(BlockHash(b""), group_id)
        run: list[KVCacheBlock] = []
        for block_hash in block_hashes:
            entry = get(block_hash + suffix)  # type: ignore[call-overload]
            if entry is None:
                break
            run.append(entry if entry.__class__ is KVCacheBlock else next(iter(entry.values())))
        return run

    def lacking(self, keys: Iterable[BlockHashWithGroupId]) -> list[BlockHashWithGroupId]:
        """Those of the keys that no block is registered under."""
        return lacking(self.entries, keys)

    def ids_under(self, keys: Iterable[BlockHashWithGroupId]) -> list[int]:
        """Ids of all blocks that are registered under one of the keys, ascending."""
        found: set[int] = set()
        for key in keys:
            entry = self.entries.get(key)
            if isinstance(entry, dict):
                found.update(entry)
            elif entry is not None:
                found.add(entry.block_id)
        return sorted(found)

    def contain(self, key: BlockHashWithGroupId, block_id: int) -> bool:
        """Whether this very block is registered under `key`."""
        entry = self.entries.get(key)
        if isinstance(entry, dict):
            return block_id in entry
        return entry is not None and entry.block_id == block_id

    def insert(self, key: BlockHashWithGroupId, block: KVCacheBlock) -> None:
        """Register `block` under `key`, beside other blocks with equal content."""
        entry = self.entries.setdefault(key, block)
        if entry is block:
            return
        if isinstance(entry, dict):
            entry[block.block_id] = block
        else:
            self.entries[key] = {entry.block_id: entry, block.block_id: block}

    def pop(self, key: BlockHashWithGroupId, block_id: int) -> KVCacheBlock | None:
        """Remove one block from `key` and return it; None, and no change, if it is not there."""
        return forget_block(self.entries, key, block_id)

    def clear(self) -> None:
        """Forget every entry."""
        self.entries.clear()

    def blocks(self) -> list[KVCacheBlock]:
        """Every registered block, once per key it is registered under."""
        found: list[KVCacheBlock] = []
        for entry in self.entries.values():
            if isinstance(entry, dict):
                found.extend(entry.values())
            else:
                found.append(entry)
        return found

    def __len__(self) -> int:
        return len(self.entries)


@dataclass(frozen=True, slots=True)
class StoredBlockInfo:
    """What an event says about one hash besides the hash; travels along when content is copied to another tier.

    `extra_keys` has the form of events (no tags); `block_size` counts the tokens of this hash.
    """

    token_ids: Sequence[int]
    parent_block_hash: BlockHash | None
    block_size: int
    lora_id: int | None = None
    lora_name: str | None = None
    extra_keys: tuple[object, ...] | None = None
    lookahead_token_ids: Sequence[int] | None = None
    session_id: str | None = None


PLACEHOLDER = StoredBlockInfo(token_ids=(), parent_block_hash=None, block_size=0)
"""Reported for content whose tokens nobody knows any more."""


def _follows(block_hash: BlockHash, before: StoredBlockInfo, info: StoredBlockInfo) -> bool:
    """One event can tell of both: `info` is of what comes right behind `block_hash`, with equal marks."""
    return info.parent_block_hash == block_hash and (
        before.block_size,
        before.lora_id,
        before.lora_name,
        before.session_id,
        before.lookahead_token_ids is None,
    ) == (info.block_size, info.lora_id, info.lora_name, info.session_id, info.lookahead_token_ids is None)


def describe_tokens(
    request: HashableRequest, start: int, end: int, parent: BlockHash | None, num_lookahead_tokens: int = 0
) -> StoredBlockInfo:
    """The request's tokens `[start, end)` as events describe them; `parent` is the hash before `start`, None at 0."""
    lora = request.lora_request
    keys, _ = generate_block_hash_extra_keys(request, start, end + num_lookahead_tokens, 0)
    event_keys = None if keys is None else to_event_extra_keys([keys])
    tokens = request.all_token_ids
    return StoredBlockInfo(
        token_ids=tokens[start:end],
        parent_block_hash=parent,
        block_size=end - start,
        lora_id=None if lora is None else lora.lora_int_id,
        lora_name=None if lora is None else lora.lora_name,
        extra_keys=None if event_keys is None else event_keys[0],
        lookahead_token_ids=tokens[end : end + num_lookahead_tokens] if num_lookahead_tokens else None,
        session_id=request.session_id,
    )


class BlockIndex:
    """Primary and secondary keys of blocks; when events are on, one event per change that consumers must see.

    A block's first key is its primary one (`block.block_hash`), further keys are secondary ones.
    """

    __slots__ = (
        "_infos",
        "_locality",
        "_lookahead",
        "_medium",
        "_num_keyed",
        "events",
        "events_enabled",
        "map",
        "secondary",
        "tally",
    )

    def __init__(
        self, enable_events: bool, medium: str, num_hash_lookahead_tokens: int, expected_blocks: int = 0
    ) -> None:
        self.map = BlockHashToBlockMap(expected=expected_blocks)
        self.secondary: dict[int, dict[BlockHashWithGroupId, int | None]] = {}
        """Block id → keys beyond the primary one → prefix tokens each covers."""
        self.tally = Tally()
        """Counts the blocks that lost their keys in an allocation."""
        self._num_keyed = 0  # blocks given a key less those that lost it otherwise
        self.events: list[AnyKVCacheEvent] = []
        self.events_enabled = enable_events
        self._infos: dict[tuple[int, BlockHashWithGroupId], StoredBlockInfo] = {}
        self._medium = medium
        self._locality: Literal["LOCAL"] | None = None if medium == MEDIUM_GPU else LOCALITY_LOCAL
        self._lookahead = num_hash_lookahead_tokens

    @property
    def num_blocks(self) -> int:
        """Blocks that have a key."""
        return self._num_keyed - self.tally.evicted

    def keys_of(self, block: KVCacheBlock) -> tuple[tuple[BlockHashWithGroupId, int | None], ...]:
        """All keys of the block with the prefix tokens each covers, the primary one first."""
        if block.block_hash is None:
            return ()
        primary = (block.block_hash, block.block_hash_num_tokens)
        return (primary, *self.secondary.get(block.block_id, {}).items())

    def info_of(self, block: KVCacheBlock, key: BlockHashWithGroupId) -> StoredBlockInfo | None:
        """What was reported with this key of the block; None with events off or for foreign entries."""
        return self._infos.get((block.block_id, key))

    def add(self, key: BlockHashWithGroupId, block: KVCacheBlock, num_tokens: int | None) -> None:
        """Give `block` this key (first = primary, further = secondary). No event."""
        if block.block_hash is None:
            block.block_hash = key
            block.block_hash_num_tokens = num_tokens
            self._num_keyed += 1
        elif block.block_hash != key:
            self.secondary.setdefault(block.block_id, {})[key] = num_tokens
        self.map.insert(key, block)

    def drop(self, block: KVCacheBlock, *, report: bool = True) -> bool:
        """Take all keys from `block`, reporting each unless consumers never heard of them; True if it was registered."""
        key = block.block_hash
        if key is None:
            return False
        found = self.map.pop(key, block.block_id) is not None
        block.reset_hash()
        self._num_keyed -= 1
        keys = (key, *self.secondary.pop(block.block_id, ()))
        for other in keys[1:]:
            self.map.pop(other, block.block_id)
        if self.events_enabled and report:
            for gone in keys:
                self._infos.pop((block.block_id, gone), None)
                self._report_removed(gone)
        return found

    def move(self, source: KVCacheBlock, target: KVCacheBlock) -> None:
        """Repoint the keys of `source` to `target`, which has none. Content stays reachable, so no event."""
        check(target.block_hash is None, f"block {target.block_id} already has a hash")
        keys = self.keys_of(source)
        self.secondary.pop(source.block_id, None)
        source.reset_hash()
        self._num_keyed -= bool(keys)
        for key, num_tokens in keys:
            self.map.pop(key, source.block_id)
            self.add(key, target, num_tokens)
            info = self._infos.pop((source.block_id, key), None)
            if info is not None:
                self._infos[target.block_id, key] = info

    def clear(self) -> int:
        """Drop every key and report AllBlocksCleared; returns how many blocks lost one."""
        blocks = {id(block): block for block in self.map.blocks()}
        for block in blocks.values():
            block.reset_hash()
        self.map.clear()
        self.secondary.clear()
        self._infos.clear()
        self._num_keyed = self.tally.evicted
        if self.events_enabled:
            # The device tier keeps the bare form that consumers have always known.
            self.events.append(AllBlocksCleared(medium=None if self._medium == MEDIUM_GPU else self._medium))
        return len(blocks)

    def commit(
        self,
        block: KVCacheBlock,
        key: BlockHashWithGroupId,
        num_tokens: int | None,
        info: StoredBlockInfo | None,
    ) -> None:
        """`add` for content that arrived from another tier, and report it, without tokens where they are unknown."""
        self.add(key, block, num_tokens)
        if not self.events_enabled:
            return
        told = self._infos[block.block_id, key] = info or PLACEHOLDER
        self._report_run([get_block_hash(key)], [told], get_group_id(key))

    def report_full(
        self,
        request: HashableRequest,
        blocks: Sequence[KVCacheBlock],
        block_hashes: Sequence[BlockHash],
        stored: Sequence[int],
        block_size: int,
        group_id: int,
    ) -> None:
        """One BlockStored per contiguous run of the block indices `stored` (ascending).

        The parent of a run is always the hash before its first block, stored or not, so that tokens, hashes and
        parents of an event agree whatever a kind leaves out.
        """
        if not self.events_enabled or not stored:
            return
        infos: list[StoredBlockInfo] = []
        for position, i in enumerate(stored, 1):
            parent = block_hashes[i - 1] if i else None
            info = describe_tokens(request, i * block_size, (i + 1) * block_size, parent, self._lookahead)
            self._infos[blocks[i].block_id, make_block_hash_with_group_id(block_hashes[i], group_id)] = info
            infos.append(info)
            if position < len(stored) and stored[position] == i + 1:
                continue
            self._report_run(block_hashes[i + 1 - len(infos) : i + 1], infos, group_id)
            infos = []

    def report_partial(
        self,
        request: HashableRequest,
        block: KVCacheBlock,
        num_tokens: int,
        hash_block_size: int,
        group_id: int,
    ) -> None:
        """BlockStored of the one hash unit that ends at `num_tokens`, inside `block`."""
        if not self.events_enabled:
            return
        unit = num_tokens // hash_block_size - 1
        block_hash = request.block_hashes[unit]
        parent = request.block_hashes[unit - 1] if unit else None
        info = describe_tokens(request, num_tokens - hash_block_size, num_tokens, parent, self._lookahead)
        self._infos[block.block_id, make_block_hash_with_group_id(block_hash, group_id)] = info
        self._report_run([block_hash], [info], group_id)

    def take_events(self) -> list[AnyKVCacheEvent]:
        """The queued events, in order; the queue is empty afterwards."""
        events, self.events = self.events, []
        return events

    def present_events(self) -> list[BlockStored]:
        """What a consumer must be told that knows nothing: all that was reported, queued events too, and is there still.

        A content that lies in several blocks is told several times, as it was when it came. O(entries).
        """
        events: list[BlockStored] = []
        hashes: list[BlockHash] = []
        infos: list[StoredBlockInfo] = []
        group_id, suffix = 0, b""
        for (_, key), info in self._infos.items():
            if not infos or not key.endswith(suffix) or not _follows(hashes[-1], infos[-1], info):
                if infos:
                    events.append(self._stored(hashes, infos, group_id))
                hashes, infos = [], []
                group_id = get_group_id(key)
                suffix = get_group_suffix(group_id)
            hashes.append(get_block_hash(key))
            infos.append(info)
        if infos:
            events.append(self._stored(hashes, infos, group_id))
        return events

    def _report_run(
        self, block_hashes: Sequence[BlockHash], infos: Sequence[StoredBlockInfo], group_id: int
    ) -> None:
        self.events.append(self._stored(block_hashes, infos, group_id))

    def _stored(
        self, block_hashes: Sequence[BlockHash], infos: Sequence[StoredBlockInfo], group_id: int
    ) -> BlockStored:
        """BlockStored of consecutive blocks; all share the adapter and the size of the first."""
        first = infos[0]
        parent = first.parent_block_hash
        keys = [info.extra_keys for info in infos]
        lookaheads = [list(info.lookahead_token_ids or ()) for info in infos]
        tokens: list[int] = []
        for info in infos:
            tokens += info.token_ids
        return BlockStored(
            block_hashes=convert_block_hashes(block_hashes),
            parent_block_hash=None if parent is None else maybe_convert_block_hash(parent),
            token_ids=tokens,
            block_size=first.block_size,
            lora_id=first.lora_id,
            medium=self._medium,
            lora_name=first.lora_name,
            extra_keys=keys if any(keys) else None,
            group_idx=group_id,
            locality=self._locality,
            session_id=first.session_id if self._medium == MEDIUM_GPU else None,
            lookahead_token_ids=None if first.lookahead_token_ids is None else lookaheads,
        )

    def _report_removed(self, key: BlockHashWithGroupId) -> None:
        self.events.append(
            BlockRemoved(
                block_hashes=[maybe_convert_block_hash(get_block_hash(key))],
                medium=self._medium,
                group_idx=get_group_id(key),
                locality=self._locality,
            )
        )
