"""Orders of one step from the offload manager to the workers, and the workers' reports.

Owns records only. It must not know how blocks are chosen nor how bytes move. Layer L4.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from functools import cached_property

from vllm.v1.core.block_hash import BlockHashWithGroupId
from vllm.v1.core.block_ops import pack_block_ids, pack_ids, unpack_block_ids
from vllm.v1.core.kv_cache_block import KVCacheBlock
from vllm.v1.kv_connector_types import (
    KVConnectorHandshakeMetadata,
    KVConnectorMetadata,
    KVConnectorWorkerMetadata,
)

INVALID_JOB_ID = -1

KeptKeys = tuple[tuple[BlockHashWithGroupId, int | None], ...]
"""Keys of a slot, the primary one first, each with the prefix tokens that it covers."""


@dataclass(frozen=True)
class DiskOrder:
    """Blocks to move between host memory and disk in one direction, pairwise; ``issued``: last event so far."""

    event: int = INVALID_JOB_ID
    issued: int = INVALID_JOB_ID
    src_blocks: list[int] = field(default_factory=list)
    dst_blocks: list[int] = field(default_factory=list)


NO_MOVE = DiskOrder()


@dataclass(slots=True)
class Timings:
    """What ranks measured: seconds of copies towards the device with the blocks that they moved, from the tier that the
    device loads from and from the disk below it; of copies the other way; and of steps with the prompt tokens that they
    computed."""

    load_seconds: float = 0.0
    load_blocks: int = 0
    disk_seconds: float = 0.0
    disk_blocks: int = 0
    prefill_seconds: float = 0.0
    prefill_tokens: int = 0
    store_seconds: float = 0.0
    disk_store_seconds: float = 0.0

    def plus(self, other: Timings) -> Timings:
        """The sum, as a new record."""
        return Timings(
            self.load_seconds + other.load_seconds,
            self.load_blocks + other.load_blocks,
            self.disk_seconds + other.disk_seconds,
            self.disk_blocks + other.disk_blocks,
            self.prefill_seconds + other.prefill_seconds,
            self.prefill_tokens + other.prefill_tokens,
            self.store_seconds + other.store_seconds,
            self.disk_store_seconds + other.disk_store_seconds,
        )


@dataclass(frozen=True, slots=True)
class KeptSlot:
    """What a slot of the disk holds; without keys: nothing that may be found."""

    slot: int
    keys: KeptKeys


@dataclass(frozen=True)
class KeptOrder(KVConnectorMetadata):
    """Changes of what the disk keeps for the next start: the state of some slots, complete.

    ``number`` counts the orders with slots, this one included: a rank that missed one notices. A higher ``clears`` than
    before says that everything earlier is to be forgotten.
    """

    clears: int = 0
    number: int = 0
    slots: Sequence[KeptSlot] = ()


NOTHING_KEPT = KeptOrder()


@dataclass
class KeptInventory(KVConnectorHandshakeMetadata):
    """What a rank found on its disk at the start, oldest first."""

    slots: list[KeptSlot]


class PackedStores:
    """The blocks of a step's stores, packed until somebody asks for them: who passes the orders on does not."""

    _packed: list[tuple[bytes, bytes]]
    """Device blocks and slots of each store, as `pack_block_ids` makes them; only if there is one."""

    @cached_property
    def store_gpu_blocks(self) -> list[int]:
        """Of the device."""
        return unpack_block_ids(b"".join([gpu for gpu, _ in self._packed]))

    @cached_property
    def store_cpu_blocks(self) -> list[int]:
        """Of the tier."""
        return unpack_block_ids(b"".join([cpu for _, cpu in self._packed]))

    def add_stores(self, gpu_blocks: Iterable[KVCacheBlock], cpu_blocks: Iterable[KVCacheBlock]) -> None:
        """The blocks of one more store, behind those that are there, whoever has put them there."""
        state = self.__dict__
        if "store_gpu_blocks" in state or "store_cpu_blocks" in state:
            known = pack_ids(self.store_gpu_blocks), pack_ids(self.store_cpu_blocks)
            state["_packed"] = [known] if any(known) else []
            state.pop("store_gpu_blocks")
            state.pop("store_cpu_blocks")
        state["_packed"].append((pack_block_ids(gpu_blocks), pack_block_ids(cpu_blocks)))


@dataclass
class SimpleCPUOffloadMetadata(PackedStores, KVConnectorMetadata):
    """At most one load order and one store order; an event index of -1 means none.

    ``*_gpu_blocks[i]`` pairs with ``*_cpu_blocks[i]``. Event indices rise per direction and are never
    used again. ``load_event_to_reqs`` names the requests of this step's load only.
    """

    load_event: int = INVALID_JOB_ID
    load_gpu_blocks: list[int] = field(default_factory=list)
    load_cpu_blocks: list[int] = field(default_factory=list)
    load_event_to_reqs: dict[int, list[str]] = field(default_factory=dict)
    store_event: int = INVALID_JOB_ID
    store_gpu_blocks: list[int] = field(default_factory=list)
    store_cpu_blocks: list[int] = field(default_factory=list)
    # References protect the blocks of running copies, so a preemption needs no flush; kept for readers.
    need_flush: bool = False
    load_block_counts: list[int] = field(default_factory=list)
    """Blocks per request of the load, in order; empty = the requests share the whole load."""
    failed_load_reqs: list[str] = field(default_factory=list)
    """Requests whose accepted tokens cannot be delivered; workers report them as failed loads."""
    failed_load_events: dict[int, list[str]] = field(default_factory=dict)
    """Loads that some rank never received; the ranks that lost them report the requests as failed."""
    issued_load_event: int = INVALID_JOB_ID
    """Last load event sent so far, this step's included: a rank that missed one notices. Store alike."""
    issued_store_event: int = INVALID_JOB_ID
    move_down: DiskOrder = NO_MOVE
    """Host → disk. Empty without a disk tier below the host."""
    move_up: DiskOrder = NO_MOVE
    """Disk → host."""
    kept: KeptOrder = NOTHING_KEPT
    measures: bool = False
    """Whether the speed of tiers is watched."""
    prefill_tokens: int = 0
    """Prompt tokens that the step computes, if it is one worth timing."""
    load_groups: list[int] = field(default_factory=list)
    """Group of each block of the load, where ranks must know which part of a slot is theirs; else empty. Store alike."""
    store_groups: list[int] = field(default_factory=list)
    companions: dict[int, tuple[int, ...]] = field(default_factory=dict)
    """Further slots of those in the load and in the store whose blocks take several, in the order of the ranks' parts."""

    def loads_by_request(self) -> Iterator[tuple[tuple[str, ...], slice]]:
        """The load's requests with their part of the block lists; one part for all if none is stated."""
        req_ids = self.load_event_to_reqs.get(self.load_event, [])
        if not self.load_block_counts:
            yield tuple(req_ids), slice(None)
            return
        start = 0
        for req_id, count in zip(req_ids, self.load_block_counts, strict=True):
            yield (req_id,), slice(start, start + count)
            start += count

    def is_empty(self) -> bool:
        """True if the workers have nothing to do."""
        return (
            self.load_event == INVALID_JOB_ID
            and self.store_event == INVALID_JOB_ID
            and not self.failed_load_reqs
            and not self.failed_load_events
            and self.move_down.event == INVALID_JOB_ID
            and self.move_up.event == INVALID_JOB_ID
            and not self.kept.slots
        )


@dataclass
class SimpleCPUOffloadWorkerMetadata(KVConnectorWorkerMetadata):
    """How many ranks reported each store event as completed, or as failed, since the last report.

    ``bad_cpu_blocks`` are source blocks whose content turned out unusable during a load.
    ``lost_load_events`` never reached a rank, because its step failed. ``*_moves_*`` are those between host and disk,
    ``bad_disk_blocks`` their sources with unusable content. ``kept_lost``: a rank wants all of `KeptOrder` again.
    ``disk_missing``: a rank could not open its disk, has said so, and fails every move.
    """

    completed_store_events: dict[int, int] = field(default_factory=dict)
    failed_store_events: dict[int, int] = field(default_factory=dict)
    bad_cpu_blocks: set[int] = field(default_factory=set)
    lost_load_events: set[int] = field(default_factory=set)
    completed_moves_down: dict[int, int] = field(default_factory=dict)
    failed_moves_down: dict[int, int] = field(default_factory=dict)
    completed_moves_up: dict[int, int] = field(default_factory=dict)
    failed_moves_up: dict[int, int] = field(default_factory=dict)
    bad_disk_blocks: set[int] = field(default_factory=set)
    kept_lost: bool = False
    timings: Timings = field(default_factory=Timings)
    disk_missing: bool = False

    def aggregate(self, other: KVConnectorWorkerMetadata) -> SimpleCPUOffloadWorkerMetadata:
        """The sum of both reports, as a new record."""
        if not isinstance(other, SimpleCPUOffloadWorkerMetadata):
            raise TypeError(f"cannot aggregate {type(other).__name__} into a CPU offload report")
        return SimpleCPUOffloadWorkerMetadata(
            _add_counts(self.completed_store_events, other.completed_store_events),
            _add_counts(self.failed_store_events, other.failed_store_events),
            self.bad_cpu_blocks | other.bad_cpu_blocks,
            self.lost_load_events | other.lost_load_events,
            _add_counts(self.completed_moves_down, other.completed_moves_down),
            _add_counts(self.failed_moves_down, other.failed_moves_down),
            _add_counts(self.completed_moves_up, other.completed_moves_up),
            _add_counts(self.failed_moves_up, other.failed_moves_up),
            self.bad_disk_blocks | other.bad_disk_blocks,
            self.kept_lost or other.kept_lost,
            self.timings.plus(other.timings),
            self.disk_missing or other.disk_missing,
        )


def _add_counts(left: dict[int, int], right: dict[int, int]) -> dict[int, int]:
    total = dict(left)
    for event, count in right.items():
        total[event] = total.get(event, 0) + count
    return total
