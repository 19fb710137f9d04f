"""Which device blocks deserve a copy below: candidates of the eager, the finishing and the lazy policy.

Owns the choice, as functions of request, device pool and tier. It takes no leases and changes no pool.
A block is a candidate only if it carries, on the device, the very key that is expected there: a block
that left its window or changed owner since fails that test. Layer L4.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence, Set
from dataclasses import dataclass, field
from itertools import compress
from typing import NamedTuple

from vllm.v1.core.block_hash import (
    BlockHashListWithBlockSize,
    BlockHashWithGroupId,
    get_block_hash,
    get_group_id,
    make_block_hash_with_group_id,
)
from vllm.v1.core.block_index import StoredBlockInfo, describe_tokens
from vllm.v1.core.block_ops import KeySet, bind_find_cached
from vllm.v1.core.block_pool import BlockPool
from vllm.v1.core.kv_cache_block import KVCacheBlock
from vllm.v1.request import Request
from vllm.v1.simple_kv_offload.admission import CopiedLately, ReuseFilter
from vllm.v1.simple_kv_offload.selection import Selection, room_in
from vllm.v1.simple_kv_offload.tier import Tier
from vllm.v1.simple_kv_offload.transfer import Candidate, Candidates, StagedKey
from vllm.v1.simple_kv_offload.unsettled import Unsettled, prefix_keys

BlockTable = Sequence[Sequence[int]]
Keys = Sequence[BlockHashWithGroupId]


@dataclass
class StoreRequestState:
    """What is tracked of a request whose blocks are stored as it goes.

    ``block_ids`` is its block table per group, ``num_stored_blocks`` the cursor per group: blocks
    before it were stored or passed over. ``store_events`` are its stores in flight.
    """

    request: Request
    block_ids: tuple[list[int], ...]
    num_stored_blocks: list[int]
    store_events: set[int] = field(default_factory=set)
    finished: bool = False
    patrol_from: list[int] = field(default_factory=list, kw_only=True)
    """Per group the next block to re-examine for holes, -1 = nothing left of this round."""
    changes_seen: tuple[int, int, int] = field(default=(0, 0, 0), kw_only=True)
    """Losses, dismissals and evictions when the last round began."""
    may_lack_copies: bool = field(default=False, kw_only=True)
    """Whether a block behind the cursors may have no copy, or one that nobody guards, since then."""
    guarded_slots: set[int] = field(default_factory=set, kw_only=True)
    """Slots of the tier this request counts on; written by the hole patrol."""
    filled_once: set[BlockHashWithGroupId] = field(default_factory=set, kw_only=True)
    """Holes that were filled over what another engine had stored; written by the hole patrol."""
    quiet_below: int = field(default=0, kw_only=True)
    """With fewer computed tokens no cursor can move."""
    start_tokens: int = field(default=0, kw_only=True)
    """Tokens that counted as computed when it got its table: hits, whose bytes may still have been on their way."""

    @property
    def is_settled(self) -> bool:
        """Whether its confirmed tokens have their bytes: a step of its own has been processed, and with it all
        steps before, which wrote what it had found by hash.
        """
        return confirmed_tokens(self.request) > self.start_tokens

    def replace_table(self, block_ids: BlockTable) -> None:
        """The whole table is new: start over."""
        self.block_ids = tuple(list(ids) for ids in block_ids)
        self.start_tokens = self.request.num_computed_tokens
        self.restart()

    def extend_table(self, block_ids: BlockTable) -> None:
        """Blocks were added."""
        if not self.block_ids:
            self.block_ids = tuple([] for _ in block_ids)
        for table, new in zip(self.block_ids, block_ids, strict=True):
            table.extend(new)

    def restart(self) -> None:
        """Examine every block again; copies that exist are passed over quickly."""
        self.num_stored_blocks = [0] * len(self.num_stored_blocks)
        self.patrol_from = []
        self.quiet_below = 0


@dataclass(frozen=True, slots=True)
class Stores:
    """The two pools and what is under way between them: the surroundings of every choice."""

    device: BlockPool
    tier: Tier
    in_flight: KeySet
    unsettled: Unsettled
    hash_block_size: int
    prompt_only: bool = False
    """Whether only tokens of prompts are stored."""

    reuse: ReuseFilter = field(default_factory=ReuseFilter)
    lately: CopiedLately = field(default_factory=CopiedLately)

    def wanted_tokens(self, request: Request) -> int:
        """Tokens from the request's start whose copies are wanted, complete or not."""
        wanted = request.num_prompt_tokens if self.prompt_only else request.num_tokens
        if self.reuse.is_on:
            wanted = min(wanted, self.reuse.num_admitted(request) * self.hash_block_size)
        return wanted

    def storable_tokens(self, request: Request) -> int:
        """Tokens from the request's start whose copies are wanted and whose bytes are known to be complete."""
        return min(confirmed_tokens(request), self.wanted_tokens(request))

    def copied_lately(
        self, keys: Set[BlockHashWithGroupId], num_endangered: int
    ) -> Set[BlockHashWithGroupId]:
        """Those of the keys that a lazy store has copied since as many blocks were lost as are in danger now.

        Nothing in a pool that is this engine's alone: there no copy is evicted while its block is in danger.
        """
        if self.tier.shared is None:
            return frozenset()
        span, limit = num_endangered + len(self.in_flight), self.device.num_gpu_blocks
        return self.lately.among(keys, self.device.num_evicted, span=span, limit=limit)

    def is_copied(self, key: BlockHashWithGroupId) -> bool:
        """Whether the tier has this content or is about to."""
        return key in self.in_flight or self.tier.contains(key) or self.tier.is_expected(key)

    @property
    def has_further_keys(self) -> bool:
        """Whether a snapshot of a block's keys may be more than its primary one."""
        return self.tier.pool.enable_kv_cache_events or bool(self.device.index.secondary)

    def block_size(self, group: int) -> int:
        """Tokens per block of a group."""
        return self.tier.coordinator.group_block_sizes[group]

    def choose(self, chosen: Selection, block: KVCacheBlock, request: Request | None) -> None:
        """Add the block to what is chosen."""
        key = block.block_hash
        if key is None or self.has_further_keys:
            chosen.add(self.candidate(block, request))
        else:
            chosen.add_plain(block, key)

    def candidate(self, block: KVCacheBlock, request: Request | None) -> Candidate:
        """The block with a snapshot of its keys."""
        keys = self.device.get_keys(block)
        if not self.tier.pool.enable_kv_cache_events:  # nobody asks what a key stands for
            return Candidate(block, tuple([StagedKey(key, num_tokens, None) for key, num_tokens in keys]))
        staged = [StagedKey(key, n, self._info(block, key, n, request)) for key, n in keys]
        return Candidate(block, tuple(staged))

    def _info(
        self,
        block: KVCacheBlock,
        key: BlockHashWithGroupId,
        num_tokens: int | None,
        request: Request | None,
    ) -> StoredBlockInfo | None:
        if not self.tier.pool.enable_kv_cache_events:
            return None
        known = self.device.get_stored_info(block, key)
        if known is not None or request is None or num_tokens is None:
            return known
        group_size = self.block_size(get_group_id(key))
        size = group_size if num_tokens % group_size == 0 else self.hash_block_size
        return describe_request_tokens(self, request, num_tokens, size)


def describe_request_tokens(
    stores: Stores, request: Request, num_tokens: int, size: int
) -> StoredBlockInfo | None:
    """What an event says about the request's ``size`` tokens that end at ``num_tokens``."""
    start = num_tokens - size
    units = start // stores.hash_block_size
    if start < 0 or num_tokens > request.num_tokens or units > len(request.block_hashes):
        return None
    parent = request.block_hashes[units - 1] if units else None
    return describe_tokens(request, start, num_tokens, parent, stores.device.num_hash_lookahead_tokens)


def confirmed_tokens(request: Request) -> int:
    """Tokens whose KV is known to be complete: scheduled ones whose step has been processed."""
    pending = max(request.num_output_placeholders, request.num_in_flight_tokens)
    return max(0, request.num_computed_tokens - pending)


def stable_groups(tier: Tier) -> tuple[int, ...]:
    """Cacheable groups where position i of a table always stands for the same tokens."""
    managers = tier.coordinator.single_type_managers
    return tuple(group for group in tier.group_ids if managers[group].has_positionally_stable_blocks)


def expected_keys(stores: Stores, request: Request, group: int) -> Callable[[int], BlockHashWithGroupId]:
    """A function from a block's position to the key its content has."""
    hashes = BlockHashListWithBlockSize(
        request.block_hashes, stores.hash_block_size, stores.block_size(group)
    )
    return lambda index: make_block_hash_with_group_id(hashes[index], group)


def num_full_blocks(stores: Stores, request: Request, group: int, num_tokens: int | None = None) -> int:
    """Blocks of the group that are full, hashed, confirmed and wanted; or that are full within ``num_tokens``."""
    hashed = len(request.block_hashes) * stores.hash_block_size
    if num_tokens is None:
        num_tokens = stores.storable_tokens(request)
    # Blocks beyond the last position where a hit can end get their keys later; passing over them now would lose them.
    cacheable = stores.tier.coordinator.get_num_cacheable_tokens(num_tokens, group)
    return min(cacheable, hashed) // stores.block_size(group)


def keys_between(
    stores: Stores, request: Request, start_tokens: int, end_tokens: int
) -> Iterator[BlockHashWithGroupId]:
    """Every key, in any group, under which a prefix of the request ending in ``(start, end]`` may be known."""
    return prefix_keys(request, stores.tier.group_ids, stores.hash_block_size, start_tokens, end_tokens)


def find_source(stores: Stores, block_id: int, key: BlockHashWithGroupId) -> KVCacheBlock | None:
    """The device block that holds this content: the request's own, else an idle cached one."""
    own = stores.device.blocks[block_id]
    if not own.is_null and own.block_hash == key:
        return own
    other = stores.device.cached_block_hash_to_block.get_one_block(key)
    # A block that someone holds may still wait for its bytes; its holder stores it.
    return other if other is not None and other.ref_cnt == 0 else None


def select_new(
    stores: Stores, state: StoreRequestState, table: BlockTable, groups: Iterable[int], chosen: Selection
) -> list[int]:
    """Walk each group's table from its cursor; returns how far each group's cursor moves.

    Content that is copied already, or that carries no key, is passed over; without room the walk
    stops and goes on another time.
    """
    advance = [0] * len(state.num_stored_blocks)
    for group in groups:
        start = state.num_stored_blocks[group]
        end = min(num_full_blocks(stores, state.request, group), len(table[group]))
        if start >= end:
            continue
        key_at = expected_keys(stores, state.request, group)
        for index in range(start, end):
            key = key_at(index)
            if not (key in chosen.keys or stores.is_copied(key)):
                source = find_source(stores, table[group][index], key)
                is_own = source is not None and source.block_id == table[group][index]
                is_ready = (is_own and state.is_settled) or key not in stores.unsettled
                if source is not None and not (is_ready and chosen.has_room_for(key)):
                    break
                if source is not None:
                    stores.choose(chosen, source, state.request)
            advance[group] += 1
    return advance


def select_tail(
    stores: Stores, state: StoreRequestState, table: BlockTable, starts: Sequence[int], chosen: Selection
) -> None:
    """At the end of a request: entries registered in its table from ``starts[group]`` on.

    That is a prefix ending inside the last block, and the states of recurrent groups, whose tables
    no cursor walks over. Only entries over confirmed tokens count.
    """
    request = state.request
    storable, is_settled = stores.storable_tokens(request), state.is_settled
    for group in stores.tier.group_ids:
        for block_id in table[group][starts[group] :]:
            block = stores.device.blocks[block_id]
            key = block.block_hash
            if block.is_null or key is None or get_group_id(key) != group:
                continue
            covered = max((tokens or 0 for _, tokens in stores.device.get_keys(block)), default=0)
            if covered > storable or not (is_settled or key not in stores.unsettled):
                continue
            if key in chosen.keys or stores.is_copied(key):
                continue
            if not chosen.has_room_for(key):
                return
            stores.choose(chosen, block, request)


def select_idle(
    stores: Stores, request: Request, num_tokens: int, groups: Iterable[int], chosen: Selection
) -> None:
    """What lies in the device's free list of the request's first ``num_tokens`` tokens, whoever computed it.

    A block that somebody holds is that request's to store.
    """
    num_hashes = min(num_tokens, stores.wanted_tokens(request)) // stores.hash_block_size
    for block_hash in request.block_hashes[:num_hashes]:
        for group in groups:
            key = make_block_hash_with_group_id(block_hash, group)
            block = stores.device.cached_block_hash_to_block.get_one_block(key)
            if block is None or block.ref_cnt > 0 or key in stores.unsettled:
                continue
            # A key that is no block's primary one comes along with that.
            if key != block.block_hash or key in chosen.keys or stores.is_copied(key):
                continue
            if not chosen.has_room_for(key):
                return
            stores.choose(chosen, block, request)


class Endangered(NamedTuple):
    """The cached blocks among the next ones to be handed out, oldest first, or none where all have a copy.

    ``token_counts``: see `pack_token_counts`; ``num_lacking``: different keys that have no copy, nor will; ``last`` looked at.
    """

    found: list[KVCacheBlock]
    keys: list[BlockHashWithGroupId]
    token_counts: bytes
    num_lacking: int
    last: KVCacheBlock | None

    @property
    def blocks(self) -> list[tuple[KVCacheBlock, BlockHashWithGroupId]]:
        """Each with its primary key."""
        return list(zip(self.found, self.keys, strict=True))


class Chosen(NamedTuple):
    """What is to be copied; whether something found no room, and whether the room was limited otherwise than by slots."""

    candidates: Candidates
    was_cut: bool
    is_bounded: bool


def bind_find_endangered(stores: Stores) -> Callable[[int], Endangered]:
    """A function that looks at so many of the next blocks of the device's free list."""
    queue, index = stores.device.free_block_queue, stores.tier.pool.cached_block_hash_to_block.entries
    suffixes, unsettled = stores.tier.key_suffixes, stores.unsettled.keys
    find_cached = bind_find_cached(queue, suffixes, unsettled, index, stores.in_flight)
    return lambda depth: Endangered(*find_cached(depth))


def select_endangered(
    stores: Stores,
    endangered: Endangered,
    limit: int,
    max_blocks: int | None = None,
    out_of_sight: Keys = (),
) -> Chosen:
    """The lazy policy: endangered blocks without a copy that are worth one, oldest first, at most ``limit``.

    A copy never takes the slot of another endangered block, ``out_of_sight`` or not: two of them would evict each other
    for ever. Their slots therefore become the youngest of the tier. Nor does a copy that is made again take the slot of
    what another engine has stored: two engines would do so by turns.
    """
    num_keys = len(endangered.keys)
    lacks_all = endangered.num_lacking == num_keys and stores.tier.shared is None
    if lacks_all and not (out_of_sight or stores.reuse.is_on or stores.has_further_keys):
        room, is_bounded = room_in(stores.tier, max_blocks)
        count = min(room, limit, num_keys)  # no slot holds any of these keys
        copies = Candidates.plain(endangered.found, endangered.keys, count, endangered.token_counts)
        return Chosen(copies, count < num_keys, is_bounded)
    chosen = _select_from_mixed(stores, endangered, limit, max_blocks, out_of_sight)
    return Chosen(chosen.candidates, chosen.was_cut, chosen.is_bounded)


def _select_from_mixed(
    stores: Stores, endangered: Endangered, limit: int, max_blocks: int | None, out_of_sight: Keys
) -> Selection:
    """`select_endangered` where some have a copy, or not each is worth one, or has a single key."""
    lacking = {key for key in stores.tier.lacking(endangered.keys) if key not in stores.in_flight}
    blocks, keys, all_keys = endangered.found, endangered.keys, lacking
    if len(lacking) < len(keys):
        wanted = [key in lacking for key in keys] if lacking else []
        all_keys = set(keys)
        blocks, keys = list(compress(blocks, wanted)), list(compress(keys, wanted))
    is_distinct = len(keys) == len(lacking)
    if out_of_sight:
        all_keys = all_keys.union(out_of_sight)
    if stores.reuse.is_on:
        wanted = [stores.reuse.admits(get_block_hash(key)) for key in keys]
        blocks, keys = list(compress(blocks, wanted)), list(compress(keys, wanted))
    chosen = Selection(stores.tier, lambda slot: slot.block_hash in all_keys, max_blocks)
    chosen.room = min(chosen.room, limit)
    again = stores.copied_lately(lacking, len(endangered.keys))
    if again and len(again) == len(lacking) and chosen.evicts_others():
        return chosen  # and stays as it is, until something is new
    if keys and (out_of_sight or len(keys) < len(endangered.keys)):
        slots = [stores.tier.get(key) for key in (*endangered.keys, *out_of_sight) if key not in lacking]
        stores.tier.refresh([slot for slot in slots if slot is not None])
    if is_distinct and not (stores.has_further_keys or again or stores.tier.has_wide_blocks):
        chosen.choose_all(blocks, keys, all_keys)
        return chosen
    for block, key in zip(blocks, keys, strict=True):
        if key in chosen.keys:
            continue
        if not chosen.has_room_for(key):
            break
        if key in again and chosen.evicts_others():
            continue
        stores.choose(chosen, block, None)
    return chosen
