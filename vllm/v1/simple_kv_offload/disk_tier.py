"""The disk below the host tier: what goes down before the host evicts it (at once, if the disk is kept over
restarts), and what comes up for a request.

Owns the moves between the two tiers and the requests that wait for them. It must not know the device, its loads and
stores, or how bytes move. Layer L4.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import islice

from vllm.logger import init_logger
from vllm.utils.clock import Clock
from vllm.v1.core.block_hash import BlockHash, BlockHashWithGroupId
from vllm.v1.core.block_lease import Lease
from vllm.v1.core.block_ops import make_key_set
from vllm.v1.core.kv_cache_block import KVCacheBlock
from vllm.v1.metrics.cache_hit_source import CacheHitSource
from vllm.v1.simple_kv_offload.chain_index import Find
from vllm.v1.simple_kv_offload.metadata import DiskOrder
from vllm.v1.simple_kv_offload.records import DiskCounts, Ledger
from vllm.v1.simple_kv_offload.selection import Selection
from vllm.v1.simple_kv_offload.speed import SpeedCheck
from vllm.v1.simple_kv_offload.store_policy import (
    Stores,
    bind_find_endangered,
    select_endangered,
)
from vllm.v1.simple_kv_offload.tier import Tier
from vllm.v1.simple_kv_offload.transfer import Candidate, StagedKey, StoreTable, Transfer, TransferState
from vllm.v1.simple_kv_offload.unsettled import Unsettled

logger = init_logger(__name__)

FAILED_WRITES_MAX = 3
"""Failed writes in a row after which the disk is not written to any more."""
DEPTH_MAX = 512
"""Slots of the host's order of eviction that are looked at in a step."""
WRITES_PER_STEP = 64


@dataclass(frozen=True, slots=True)
class DiskSettings:
    """``depth``: how many of the host's next victims should be on disk; ``wait_s``: how long a request waits.

    ``is_kept``: the disk outlives the engine, so everything goes down that reaches the host tier.
    """

    hash_block_size: int
    num_ranks: int
    depth: int
    wait_s: float
    is_kept: bool = False


@dataclass(slots=True)
class _Wait:
    """A request for which blocks come up, from its first ask until it was admitted or ended.

    ``leases`` hold, in the host tier, what it found there and what is arriving; empty once a promise holds it.
    """

    since: float
    leases: list[Lease]
    transfers: list[Transfer]
    num_promoted: int
    num_beyond: int
    """Tokens that it asked for behind what the host tier had."""

    @property
    def arrived(self) -> bool:
        return all(transfer.ended for transfer in self.transfers)


class Moves:
    """Copies in one direction: planned, submitted, ended. A target gets only keys that its source still has then."""

    def __init__(self, source: Tier, target: Tier, num_ranks: int) -> None:
        self.source = source
        self.target = target
        self.planned: list[Transfer] = []
        self.table = StoreTable(num_ranks)
        self.ledger = Ledger()

    def plan(self, transfer: Transfer) -> None:
        """The order leaves with the next `submit`."""
        self.planned.append(transfer)
        self.ledger.scheduled += len(transfer)

    def submit(self) -> DiskOrder:
        """The order of this step, and the last event so far."""
        if not self.planned:
            return DiskOrder(issued=self.table.last_event)
        transfers, self.planned = self.planned, []
        event = self.table.submit(transfers)
        return DiskOrder(
            event,
            event,
            [block.block_id for transfer in transfers for block in transfer.device_blocks],
            [block.block_id for transfer in transfers for block in transfer.tier_blocks],
        )

    def report(self, counts: Mapping[int, int], *, ok: bool) -> Iterator[tuple[Transfer, bool]]:
        """Ranks reported events; yields each transfer that is over on all of them, before its blocks are let go."""
        for event, count in sorted(counts.items()):
            complete = self.table.report(event, count, ok=ok)
            for transfer in complete[0] if complete is not None else ():
                assert complete is not None
                yield transfer, complete[1]
                self._end(transfer, complete[1])

    def _end(self, transfer: Transfer, ok: bool) -> None:
        size = len(transfer)
        if transfer.state is TransferState.ABANDONED:
            self.ledger.dropped += size
        elif ok:
            self._commit(transfer)
            self.ledger.done += size
        else:
            self.ledger.failed += size
        transfer.finish(ok=ok)

    def _commit(self, transfer: Transfer) -> None:
        for source, slot, keys in zip(
            transfer.device_blocks, transfer.tier_blocks, transfer.keys, strict=True
        ):
            present = {key for key, _ in self.source.pool.get_keys(source)}
            self.target.commit(
                slot,
                [staged for staged in keys if staged.key in present and not self.target.contains(staged.key)],
            )

    def reset(self) -> bool:
        """Drop what was not sent, abandon what runs; True if nothing runs."""
        planned, self.planned = self.planned, []
        for transfer in planned:
            self.ledger.dropped += len(transfer)
            transfer.discard()
        for transfer in self.table.transfers:
            if transfer.state is TransferState.SUBMITTED:
                transfer.abandon()
        return len(self.table) == 0

    @property
    def live(self) -> list[Transfer]:
        """Planned and submitted ones."""
        return [*self.planned, *self.table.transfers]

    @property
    def num_blocks(self) -> int:
        """Blocks of the live ones."""
        return sum(map(len, self.live))


class DiskChain:
    """The moves between host and disk.

    A block goes down while it is among the host's next victims, and stays in both tiers. Blocks come up only for a
    request that the scheduler is about to admit: it is asked to wait, once, and within ``wait_s``. What is promoted
    for requests that have not read it yet never takes more than half of the host tier.
    """

    def __init__(
        self, host: Tier, disk: Tier, find: Find, settings: DiskSettings, clock: Clock, speed: SpeedCheck
    ) -> None:
        self.host = host
        self.disk = disk
        self.clock = clock
        self.down = Moves(host, disk, settings.num_ranks)
        self.up = Moves(disk, host, settings.num_ranks)
        self.counts = DiskCounts()
        self.writes_off = False
        self._find = find
        self._speed = speed
        self._settings = settings
        self._leaving = make_key_set()
        nothing = Unsettled(disk.group_ids, settings.hash_block_size)
        self._stores = Stores(host.pool, disk, self._leaving, nothing, settings.hash_block_size)
        self._find_endangered = bind_find_endangered(self._stores)
        self._arriving: dict[int, tuple[Transfer, KVCacheBlock]] = {}
        self._waits: dict[str, _Wait] = {}
        # Slots named as bad by a move up of which other ranks have not told the end.
        self._unreadable: set[int] = set()
        self._failed_writes = 0
        # Per move: blocks with a copy that were as near to their eviction as those that it takes down.
        self._older: dict[int, list[tuple[KVCacheBlock, BlockHashWithGroupId]]] = {}
        self._seen = self._state
        # Host slots that may have content the disk lacks, oldest first; only filled if the disk is kept.
        self._fresh: dict[int, None] = {}
        if settings.is_kept:
            host.changed = {}

    # -- coming up ----------------------------------------------------------------------------

    def must_wait(self, request_id: str, hashes: Sequence[BlockHash], max_tokens: int) -> bool:
        """Whether the request should ask again later, because blocks that it can use are coming up.

        At most one time of waiting per admission; after that, what has not arrived counts as a miss.
        """
        wait = self._waits.get(request_id)
        if wait is None:
            is_waiting = self._start(request_id, hashes, max_tokens, self.clock.monotonic()) is not None
            self.counts.waits += is_waiting
            return is_waiting
        if wait.arrived:
            if all(transfer.state is not TransferState.FAILED for transfer in wait.transfers):
                return False
            # What was bad is forgotten by now: the rest can be read.
            self.forget_request(request_id)
            return self._start(request_id, hashes, max_tokens, wait.since) is not None
        if self.clock.monotonic() - wait.since < self._settings.wait_s:
            return True
        self.counts.timeouts += 1
        wait.transfers = []
        return False

    def peek(self, hashes: Sequence[BlockHash], max_tokens: int) -> tuple[int, int]:
        """Tokens that the disk holds by itself, and that both tiers hold together. Nothing is held or moved."""
        return self.disk.find(hashes, max_tokens)[1], self._find(hashes, max_tokens)[1]

    def promised(self, request_id: str) -> None:
        """A promise holds now what the request waited for."""
        wait = self._waits.get(request_id)
        if wait is not None:
            for lease in wait.leases:
                lease.release()
            wait.leases = []

    def tokens_from_disk(self, request_id: str, max_tokens: int, num_accepted: int) -> int:
        """How many of the tokens that the request takes came up for it; it asked for ``max_tokens`` at most."""
        wait = self._waits.get(request_id)
        if wait is None:
            return 0
        return max(0, min(num_accepted, wait.num_beyond - (max_tokens - num_accepted)))

    def forget_request(self, request_id: str) -> None:
        """The request was admitted, or it ended. What is coming up for it still arrives."""
        self.promised(request_id)
        self._waits.pop(request_id, None)

    def _start(
        self, request_id: str, hashes: Sequence[BlockHash], max_tokens: int, since: float
    ) -> _Wait | None:
        affordable = self._affordable(hashes, max_tokens)
        if affordable is None:
            return None
        found, num_tokens, host_tokens = affordable
        missing = self._missing(found)
        gained = num_tokens - host_tokens
        if self._speed.declines_hit(request_id, CacheHitSource.DISK, len(missing), gained):
            return None
        below = {block.block_id for group in found for block in group if block.pool is self.disk.pool}
        arriving = [self._arriving[slot] for slot in sorted(below & self._arriving.keys())]
        owner = f"promotion for {request_id}"
        present = [
            block for group in found for block in group if not block.is_null and block.pool is self.host.pool
        ]
        leases = [Lease(self.host.pool, [*present, *(block for _, block in arriving)], owner)]
        if len(missing) > self.host.num_stageable:
            leases[0].release()
            return None
        transfers = [transfer for transfer, _ in arriving]
        if missing:
            transfer = self._plan_up(missing, owner)
            leases.append(Lease(self.host.pool, transfer.tier_blocks, owner))
            transfers.append(transfer)
        wait = _Wait(since, leases, transfers, len(missing), max_tokens - host_tokens)
        self._waits[request_id] = wait
        return wait

    def _plan_up(self, sources: Sequence[KVCacheBlock], owner: str) -> Transfer:
        keys = [self._keys(self.disk, block) for block in sources]
        self.disk.used(sources)
        self.host.missed(staged.key for entries in keys for staged in entries)
        transfer = Transfer(
            owner,
            Lease(self.disk.pool, sources, owner),
            Lease.adopt(self.host.pool, self.host.stage_for(keys), owner),
            keys,
        )
        for source, slot in zip(sources, transfer.tier_blocks, strict=True):
            self._arriving[source.block_id] = (transfer, slot)
        self.up.plan(transfer)
        return transfer

    def _affordable(
        self, hashes: Sequence[BlockHash], max_tokens: int
    ) -> tuple[tuple[Sequence[KVCacheBlock], ...], int, int] | None:
        """The longest prefix over both tiers that is longer than the host's and fits into the room for it.

        Its blocks and tokens, and the tokens of the host's own.
        """
        host_tokens = self.host.find(hashes, max_tokens)[1]
        promoted = sum(wait.num_promoted for wait in self._waits.values())
        room = min((self.host.num_blocks - 1) // 2 - promoted, self.host.num_stageable // 2)
        while max_tokens > host_tokens:
            blocks, num_tokens = self._find(hashes, max_tokens)
            if num_tokens <= host_tokens:
                return None
            if len(self._missing(blocks)) <= room:
                return blocks, num_tokens, host_tokens
            max_tokens = host_tokens + (num_tokens - host_tokens) // 2
        return None

    def _missing(self, blocks: tuple[Sequence[KVCacheBlock], ...]) -> list[KVCacheBlock]:
        """Those on disk that are not coming up already, each once."""
        below = {block.block_id: block for group in blocks for block in group if block.pool is self.disk.pool}
        return [
            block for block_id, block in below.items() if block_id not in self._arriving and not block.is_null
        ]

    # -- going down ---------------------------------------------------------------------------

    def plan(self) -> None:
        """Plan copies of the host's next victims that have none. At most half of the host's free slots at a time."""
        seen = self._state
        if self.writes_off or (seen == self._seen and not self._fresh):
            return
        self._seen = seen
        half = max(1, (self.host.num_blocks - 1) // 2)
        pending = self.down.num_blocks
        depth = min(self._settings.depth, half, DEPTH_MAX)
        endangered = self._find_endangered(max(0, depth - pending))
        limit = min(WRITES_PER_STEP, self.host.num_stageable // 2, half - pending)
        if limit > 0:
            copied = [(block, key) for block, key in endangered.blocks if self._stores.is_copied(key)]
            chosen = select_endangered(self._stores, endangered, limit)
            self._plan_down(chosen.candidates, copied, to_front=True)
            self._plan_fresh(limit - len(chosen.candidates))

    def _plan_fresh(self, limit: int) -> None:
        """A kept disk gets what reached the host tier, in that order, without waiting for its eviction."""
        if self.host.changed:
            self._fresh.update(self.host.changed)
            self.host.changed.clear()
        chosen = Selection(self.disk)
        chosen.room = min(chosen.room, limit)
        while self._fresh and chosen.has_room_for(None):
            slot = next(iter(self._fresh))
            del self._fresh[slot]
            block = self.host.pool.blocks[slot]
            key = block.block_hash
            if key is not None and key not in chosen.keys and not self._stores.is_copied(key):
                chosen.add(self._stores.candidate(block, None))
        # What the host still has is in use: other content should leave the disk first.
        victims = list(islice(self.disk.victims_after(0), len(chosen.candidates)))
        self.disk.refresh(
            [v for v in victims if v.block_hash is not None and self.host.contains(v.block_hash)]
        )
        self._plan_down(chosen.candidates, [], to_front=False)

    @property
    def _state(self) -> tuple[int, ...]:
        """Changes when there may be something new to write."""
        down = self.down.ledger
        ended = down.scheduled - down.in_flight
        return (self.host.evictions, self.host.commits, self.disk.evictions, down.scheduled, ended)

    def _plan_down(
        self,
        candidates: Sequence[Candidate],
        older: list[tuple[KVCacheBlock, BlockHashWithGroupId]],
        *,
        to_front: bool,
    ) -> None:
        if not candidates:
            return
        owner = "move to disk"
        keys = [candidate.keys for candidate in candidates]
        transfer = Transfer(
            owner,
            Lease(self.host.pool, [candidate.block for candidate in candidates], owner, to_front=to_front),
            Lease.adopt(self.disk.pool, self.disk.stage_for(keys), owner, in_order=to_front),
            keys,
        )
        self._leaving.update(staged.key for keys in transfer.keys for staged in keys)
        self.down.plan(transfer)
        self._older[id(transfer)] = older

    @staticmethod
    def _keys(tier: Tier, block: KVCacheBlock) -> tuple[StagedKey, ...]:
        return tuple(
            StagedKey(key, num_tokens, tier.pool.get_stored_info(block, key))
            for key, num_tokens in tier.pool.get_keys(block)
        )

    # -- reports ------------------------------------------------------------------------------

    def report_down(self, counts: Mapping[int, int], *, ok: bool) -> None:
        """Ranks reported moves to the disk. After some failures in a row the disk is not written to any more."""
        older: dict[int, BlockHashWithGroupId] = {}
        back: set[int] = set()
        for transfer, all_ok in self.down.report(counts, ok=ok):
            older.update((block.block_id, key) for block, key in self._older.pop(id(transfer), ()))
            back.update(block.block_id for block in transfer.device_blocks)
            if transfer.state is TransferState.SUBMITTED:
                self._leaving.difference_update(staged.key for keys in transfer.keys for staged in keys)
            self._failed_writes = 0 if all_ok else self._failed_writes + 1
        self._behind_older(back, older)
        if self._failed_writes >= FAILED_WRITES_MAX and not self.writes_off:
            self.writes_off = True
            logger.error(
                "KV offload: the disk tier is switched off after %d failed writes in a row. The engine goes on "
                "with the host tier; what is on the disk can still be read.",
                self._failed_writes,
            )

    def _behind_older(self, back: set[int], older: Mapping[int, BlockHashWithGroupId]) -> None:
        """What came back from a copy must not be evicted before what needed none.

        It goes behind those that follow it now, and no other block gets another place: while nothing else happens,
        the same contents stay the next victims, so that moves end even where the disk cannot hold many more.
        """
        order: list[KVCacheBlock] = []
        late: list[KVCacheBlock] = []
        has_changed = False
        for block in islice(self.host.victims_after(0), DEPTH_MAX + len(back)) if back and older else ():
            if block.block_id in back:
                late.append(block)
            elif late and block.block_hash is not None and older.get(block.block_id) == block.block_hash:
                order.append(block)
                has_changed = True
            else:
                order += late
                late = []
                order.append(block)
        if has_changed:
            order += late
            self.host.pool.touch(order)
            self.host.pool.free_blocks_to_front(order)

    def report_up(self, counts: Mapping[int, int], *, ok: bool) -> None:
        """Ranks reported moves from the disk. What could not be read is forgotten at once.

        Where the bad slots were named, only those: who waits for the others has them read again.
        """
        for event, count in sorted(counts.items()):
            moved = [block.block_id for t in self.up.table.transfers_of(event) for block in t.device_blocks]
            is_named = not self._unreadable.isdisjoint(moved)
            for transfer, all_ok in self.up.report({event: count}, ok=ok):
                self._unreadable.difference_update(moved)
                for source in transfer.device_blocks:
                    # After a reset of the host tier another move may bring up the same.
                    if self._arriving.get(source.block_id, (None,))[0] is transfer:
                        del self._arriving[source.block_id]
                if not all_ok:
                    self.counts.failed_reads += 1
                    if not is_named:
                        self.disk.evict(block.block_id for block in transfer.device_blocks)

    def report_bad(self, slots: Iterable[int]) -> None:
        """Slots of the disk whose bytes are not what was written; told before the moves that failed for them."""
        bad = set(slots)
        self.counts.bad_blocks += len(bad)
        self._unreadable |= bad & self._arriving.keys()
        self.disk.evict(bad)

    def reset(self) -> bool:
        """Make everything on disk unfindable at once; False if copies were under way. The host tier is emptied too."""
        moves_done = self.give_up_moves()
        return self.disk.invalidate() == 0 and moves_done

    def reset_disk(self) -> bool:
        """As `reset`, but the host tier is left alone: what it holds goes down again, when it would as new content."""
        is_done = self.reset()
        self._seen = ()
        if self._settings.is_kept:
            held = (block for block in self.host.pool.blocks if block.ref_cnt)
            by_age = (*self.host.victims_after(0), *held)
            self._fresh = {block.block_id: None for block in by_age if block.block_hash is not None}
        return is_done

    def give_up_moves(self) -> bool:
        """One of the tiers is about to be emptied: who waits asks anew, copies bring nothing. True if none runs."""
        for request_id in list(self._waits):
            self.forget_request(request_id)
        self._leaving.clear()
        self._arriving.clear()
        self._unreadable.clear()
        self._older.clear()
        self._fresh.clear()
        down_done = self.down.reset()
        return self.up.reset() and down_done

    @property
    def has_work(self) -> bool:
        """Whether a move is planned or under way, or the next step may plan one."""
        if self.down.live or self.up.live:
            return True
        if self.writes_off:
            return False
        fresh = bool(self._fresh) and min(self.host.num_stageable // 2, self.disk.num_stageable) > 0
        return fresh or self._state != self._seen

    @property
    def waiting(self) -> Mapping[str, object]:
        """Requests for which blocks came up and that have neither been admitted nor ended."""
        return self._waits
