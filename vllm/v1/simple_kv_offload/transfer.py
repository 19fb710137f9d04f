"""A copy in flight: its state machine, the leases of both sides, and the table of open ones.

Owns when blocks of a copy are let go. It must not know why a copy was chosen. Layer L4.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Iterator, Sequence
from enum import Enum
from typing import NamedTuple, overload

from vllm.utils.checks import InvariantError, check
from vllm.v1.core.block_hash import BlockHashWithGroupId, get_group_id
from vllm.v1.core.block_index import StoredBlockInfo
from vllm.v1.core.block_lease import Lease
from vllm.v1.core.block_ops import NO_TOKENS, TOKEN_COUNT_BYTES, pack_token_counts
from vllm.v1.core.kv_cache_block import KVCacheBlock


class TransferState(Enum):
    """See `Transfer`."""

    __hash__ = object.__hash__  # several look-ups per transfer: the one of enumerations runs in Python

    PLANNED = "planned"
    SUBMITTED = "submitted"
    ABANDONED = "abandoned"
    DONE = "done"
    FAILED = "failed"
    DISCARDED = "discarded"


_LEGAL_MOVES: dict[TransferState, frozenset[TransferState]] = {
    TransferState.PLANNED: frozenset({TransferState.SUBMITTED, TransferState.DISCARDED}),
    TransferState.SUBMITTED: frozenset({TransferState.DONE, TransferState.FAILED, TransferState.ABANDONED}),
    TransferState.ABANDONED: frozenset({TransferState.DISCARDED}),
    TransferState.DONE: frozenset(),
    TransferState.FAILED: frozenset(),
    TransferState.DISCARDED: frozenset(),
}
ENDED = frozenset({TransferState.DONE, TransferState.FAILED, TransferState.DISCARDED})


class StagedKey(NamedTuple):
    """A key that the target block gets when the copy is done, as it was when the copy was planned."""

    key: BlockHashWithGroupId
    num_tokens: int | None
    info: StoredBlockInfo | None


class Contents(Sequence[tuple[StagedKey, ...]]):
    """What blocks hold, as it was when their copy was planned: for each its keys, the primary one first.

    In columns, because most blocks have one key, of which nobody asks what it stands for.
    """

    __slots__ = ("_described", "_primary", "_tokens")

    def __init__(
        self,
        primary: list[BlockHashWithGroupId | None] | None = None,
        tokens: list[int | None] | bytes | None = None,
    ) -> None:
        """Blocks with one key each and the tokens it covers, None or `NO_TOKENS` if unknown, as in `pack_token_counts`.

        The columns are kept.
        """
        self._primary = [] if primary is None else primary
        self._tokens: list[int | None] | bytes = [] if tokens is None else tokens
        # Position → the keys, where that is not one without a description. No other primary key is None.
        self._described: dict[int, tuple[StagedKey, ...]] = {}

    @classmethod
    def of(cls, rows: Sequence[tuple[StagedKey, ...]]) -> Contents:
        """The rows as columns."""
        if isinstance(rows, Contents):
            return rows
        contents = cls()
        for row in rows:
            contents.append(row)
        return contents

    def append(self, row: tuple[StagedKey, ...]) -> None:
        """One more block."""
        if len(row) != 1 or row[0].info is not None:
            self._described[len(self._primary)] = row
        self._append(row[0].key if row else None, row[0].num_tokens if row else None)

    def append_plain(self, key: BlockHashWithGroupId, num_tokens: int | None) -> None:
        """One more block, with this key alone."""
        self._append(key, num_tokens)

    def _append(self, key: BlockHashWithGroupId | None, num_tokens: int | None) -> None:
        self._primary.append(key)
        self._unpacked().append(num_tokens)

    def _unpacked(self) -> list[int | None]:
        """The column of tokens, one object each: nobody asks for it before the copy has ended."""
        if isinstance(self._tokens, bytes):
            self._tokens = list(memoryview(self._tokens).cast("I"))
        return self._tokens

    @property
    def primary_keys(self) -> Sequence[BlockHashWithGroupId | None]:
        """The first key of each block, None where it has none."""
        return self._primary

    def groups(self, default: int) -> list[int]:
        """The group of each block; ``default`` where it has no key any more."""
        return [default if key is None else get_group_id(key) for key in self._primary]

    def all_keys(self) -> Iterable[BlockHashWithGroupId]:
        """All keys of all blocks."""
        if not self._described:
            return self._primary  # type: ignore[return-value]  # without descriptions none is None
        return [staged.key for row in self for staged in row]

    def __len__(self) -> int:
        return len(self._primary)

    def __iter__(self) -> Iterator[tuple[StagedKey, ...]]:
        return (self[i] for i in range(len(self._primary)))

    @overload
    def __getitem__(self, index: int) -> tuple[StagedKey, ...]: ...

    @overload
    def __getitem__(self, index: slice) -> Contents: ...

    def __getitem__(self, index: int | slice) -> tuple[StagedKey, ...] | Contents:
        if isinstance(index, slice):
            part = Contents(self._primary[index], self._unpacked()[index])
            if self._described:
                positions = enumerate(range(len(self))[index])
                part._described = {i: self._described[p] for i, p in positions if p in self._described}
            return part
        position = range(len(self))[index]
        key = self._primary[position]
        if key is None or position in self._described:
            return self._described[position]
        num_tokens = self._unpacked()[position]
        return (StagedKey(key, None if num_tokens == NO_TOKENS else num_tokens, None),)


class Candidate(NamedTuple):
    """A device block and the keys its copy gets."""

    block: KVCacheBlock
    keys: tuple[StagedKey, ...]


class Candidates(Sequence[Candidate]):
    """Device blocks and the keys that their copies get, in columns."""

    __slots__ = ("blocks", "contents")

    def __init__(self, blocks: list[KVCacheBlock] | None = None, contents: Contents | None = None) -> None:
        self.blocks = [] if blocks is None else blocks
        self.contents = Contents() if contents is None else contents

    @classmethod
    def plain(
        cls,
        blocks: list[KVCacheBlock],
        keys: list[BlockHashWithGroupId],
        count: int,
        token_counts: bytes | None = None,
    ) -> Candidates:
        """The first ``count`` of these blocks, which have one key each. The lists belong to the candidates.

        ``token_counts``: as `pack_token_counts` of all of them, where they are known.
        """
        if count < len(keys):
            del blocks[count:], keys[count:]
        if token_counts is None or count * TOKEN_COUNT_BYTES != len(token_counts):
            token_counts = pack_token_counts(blocks)
        return cls(blocks, Contents(keys, token_counts))  # type: ignore[arg-type]

    def __len__(self) -> int:
        return len(self.blocks)

    @overload
    def __getitem__(self, index: int) -> Candidate: ...

    @overload
    def __getitem__(self, index: slice) -> Candidates: ...

    def __getitem__(self, index: int | slice) -> Candidate | Candidates:
        if isinstance(index, slice):
            return Candidates(self.blocks[index], self.contents[index])
        return Candidate(self.blocks[index], self.contents[index])


class Transfer:
    """Blocks of two tiers, pairwise, and the leases that keep them until the copy has ended.

    ::

        PLANNED ──► SUBMITTED ──► DONE | FAILED
           │            └───────► ABANDONED ──► DISCARDED     (still running, result unwanted)
           └────────────────────────────────► DISCARDED

    It ends once, in DONE, FAILED or DISCARDED, and its end releases both leases. ``keys[i]`` are the
    keys that target block i gets (stores only).
    """

    __slots__ = ("_contents", "_device", "_state", "_tier", "owner", "request_id")

    def __init__(
        self,
        owner: str,
        device: Lease,
        tier: Lease,
        keys: Sequence[tuple[StagedKey, ...]] = (),
        *,
        request_id: str | None = None,
    ) -> None:
        count, targets = len(device.blocks), len(tier.blocks)
        if count != targets or len(keys) not in (0, count):
            raise InvariantError(
                f"transfer of {owner}: {count} device blocks, {targets} tier blocks, {len(keys)} key sets"
            )
        self.owner = owner
        self.request_id = request_id
        self._contents = Contents.of(keys)
        self._device = device
        self._tier = tier
        self._state = TransferState.PLANNED

    @property
    def keys(self) -> Contents:
        """The keys that each target block gets."""
        return self._contents

    @keys.setter
    def keys(self, keys: Sequence[tuple[StagedKey, ...]]) -> None:
        self._contents = Contents.of(keys)

    @property
    def state(self) -> TransferState:
        """Where the transfer stands."""
        return self._state

    @property
    def ended(self) -> bool:
        """True once both leases are released."""
        return self._state in ENDED

    @property
    def device_lease(self) -> Lease:
        """What holds the blocks of the device tier."""
        return self._device

    @property
    def device_blocks(self) -> Sequence[KVCacheBlock]:
        """Blocks of the device tier; empty after the end."""
        return self._device.blocks

    @property
    def tier_blocks(self) -> Sequence[KVCacheBlock]:
        """Blocks of the lower tier, in the same order; empty after the end."""
        return self._tier.blocks

    def __len__(self) -> int:
        return len(self._tier.blocks)

    def strip(self, keys: Collection[BlockHashWithGroupId]) -> None:
        """Content under these keys is not to be trusted: its targets get none of them."""
        if any(key in keys for key in self._contents.all_keys()):
            self.keys = [tuple(staged for staged in own if staged.key not in keys) for own in self.keys]

    def trusted_keys(self) -> Iterator[tuple[KVCacheBlock, tuple[StagedKey, ...]]]:
        """Each target with the keys it may get: none if its source's hashes were dropped by id meanwhile.

        A step that computed the source may have failed after the copy was planned, whoever held the block then.
        """
        evicted = self._device.evicted
        for source, target, keys in zip(self._device.blocks, self._tier.blocks, self.keys, strict=True):
            yield target, () if source.block_id in evicted else keys

    def submit(self) -> None:
        """The order left for the workers."""
        self._move(TransferState.SUBMITTED)

    def abandon(self) -> None:
        """Nobody wants the result; the blocks stay held until the copy has ended."""
        self._move(TransferState.ABANDONED)

    def finish(self, *, ok: bool) -> TransferState:
        """The copy is over on all ranks; releases both sides and returns the final state."""
        if self._state is TransferState.ABANDONED:
            return self._end(TransferState.DISCARDED)
        return self._end(TransferState.DONE if ok else TransferState.FAILED)

    def discard(self) -> None:
        """Drop a transfer that was never submitted."""
        check(self._state is TransferState.PLANNED, f"transfer of {self.owner} is {self._state}")
        self._end(TransferState.DISCARDED)

    def _move(self, state: TransferState) -> None:
        if state not in _LEGAL_MOVES[self._state]:
            raise InvariantError(f"transfer of {self.owner} cannot go from {self._state} to {state}")
        self._state = state

    def _end(self, state: TransferState) -> TransferState:
        self._move(state)
        self._tier.release()
        self._device.release()
        return state


class StoreTable:
    """Submitted stores by event, with the reports still missing, and what they have in flight.

    One event covers the transfers of all requests of a step. Bounded by the blocks of the lower
    tier: every transfer holds at least one.
    """

    def __init__(self, expected_reports: int) -> None:
        self.expected_reports = expected_reports
        self._transfers: dict[int, list[Transfer]] = {}
        self._missing: dict[int, int] = {}
        self._failed: set[int] = set()
        self._next_event = 0

    def submit(self, transfers: Sequence[Transfer]) -> int:
        """Enter planned stores under one new event; events rise and are never used again."""
        if not transfers:
            raise InvariantError("a store event needs a transfer")
        event, self._next_event = self._next_event, self._next_event + 1
        for transfer in transfers:
            transfer.submit()
        self._transfers[event] = list(transfers)
        self._missing[event] = self.expected_reports
        return event

    def report(self, event: int, count: int, *, ok: bool) -> tuple[list[Transfer], bool] | None:
        """Count ``count`` ranks. Once none is missing: the transfers and whether all ranks succeeded.

        Reports of unknown events (a peer that reports twice) are ignored.
        """
        if event not in self._transfers:
            return None
        if not ok:
            self._failed.add(event)
        self._missing[event] -= count
        if self._missing[event] > 0:
            return None
        del self._missing[event]
        all_ok = event not in self._failed
        self._failed.discard(event)
        return self._transfers.pop(event), all_ok

    def __iter__(self) -> Iterator[tuple[int, list[Transfer]]]:
        return iter(self._transfers.items())

    def __len__(self) -> int:
        return len(self._transfers)

    def is_open(self, event: int) -> bool:
        """Whether reports are missing yet."""
        return event in self._transfers

    def transfers_of(self, event: int) -> Sequence[Transfer]:
        """What was submitted under this event; nothing once all have reported."""
        return self._transfers.get(event, ())

    @property
    def transfers(self) -> Iterator[Transfer]:
        """All submitted transfers, in order of submission."""
        return (transfer for batch in self._transfers.values() for transfer in batch)

    @property
    def last_event(self) -> int:
        """The event handed out last, -1 before the first."""
        return self._next_event - 1

    @property
    def reports(self) -> dict[int, int]:
        """Reports that arrived so far, per event that has any but not all."""
        return {
            event: self.expected_reports - missing
            for event, missing in self._missing.items()
            if missing < self.expected_reports
        }
