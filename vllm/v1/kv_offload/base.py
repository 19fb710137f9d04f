"""What a module from outside implements to keep offloaded KV: a spec, its manager and its workers.

Owns the contract and the values in it: keys, look-up results, where a transfer reads and writes, events. It must not know
who calls: that is `OffloadingConnectorScheduler` in the scheduler's process, `OffloadingConnectorWorker` on each rank. Layer L2.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Collection, Iterable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from enum import Enum, auto
from typing import Any, Literal

from vllm.v1.core.block_hash import (
    BlockHash,
    BlockHashWithGroupId,
    get_block_hash,
    get_group_id,
    make_block_hash_with_group_id,
)
from vllm.v1.kv_offload.config import OffloadingConfig
from vllm.v1.kv_offload.tier_filter import (
    ALL,
    TIER_FILTER_PARAM,
    Locality,
    Medium,
    TierFilter,
    TierMatcher,
    parse_tier_filter,
)

# Device tensors, which no module of the core looks into.
OpaqueTensor = Any

OffloadKey = BlockHashWithGroupId
"""What a tier below the device finds content by: its hash and the id of its group."""


def make_offload_key(block_hash: BlockHash, group_idx: int) -> OffloadKey:
    """The key of this content in a group."""
    return make_block_hash_with_group_id(block_hash, group_idx)


def get_offload_block_hash(key: OffloadKey) -> BlockHash:
    """The hash in the key."""
    return get_block_hash(key)


def get_offload_group_idx(key: OffloadKey) -> int:
    """The group in the key."""
    return get_group_id(key)


# -- what requests say and what is found ------------------------------------------------------


@dataclass(slots=True)
class ReqContext:
    """A request as a manager sees it. ``kv_hints`` are its retention wishes, if it has any."""

    req_id: str
    kv_transfer_params: Mapping[str, Any] | None = None  # the client's JSON
    kv_hints: Any = None
    load_tier_filter: TierFilter = ALL


class LookupResult(Enum):
    """Whether content can be loaded: no, yes, soon (somebody is bringing it), or ask again."""

    MISS = auto()
    HIT = auto()
    HIT_PENDING = auto()
    RETRY = auto()


class OffloadPolicy(Enum):
    """When a request's content is offered for storing: block by block, or all of it when the request ends.

    What it would lose before that (it is preempted, or a state gives way to a later one) is offered then.
    """

    CHUNK_LEVEL = auto()
    REQUEST_LEVEL = auto()


@dataclass(slots=True)
class RequestOffloadingContext:
    """What a manager wants to be done with a request."""

    policy: OffloadPolicy = OffloadPolicy.CHUNK_LEVEL


@dataclass(slots=True)
class ScheduleEndContext:
    """Requests that a step admitted and preempted."""

    new_req_ids: Collection[str]
    preempted_req_ids: Collection[str]


# -- where bytes are --------------------------------------------------------------------------


class LoadStoreSpec(ABC):
    """One side of a transfer: says to a worker where blocks lie in one medium."""

    @staticmethod
    @abstractmethod
    def medium() -> str:
        """The name of the medium, as in KV events."""


class BlockIDsLoadStoreSpec(LoadStoreSpec):
    """Blocks that are known by numbers; ``block_ids`` in the order of the keys."""

    def __init__(self, block_ids: Iterable[int]) -> None:
        self.block_ids: list[int] = list(block_ids)

    def __eq__(self, other: object) -> bool:
        return type(other) is type(self) and vars(self) == vars(other)

    __hash__ = None  # type: ignore[assignment]  # it can be changed

    def __repr__(self) -> str:
        return f"{type(self).__name__}({self.block_ids})"


class GPULoadStoreSpec(BlockIDsLoadStoreSpec):
    """Blocks of the device's KV cache: those of the first offloaded group, then those of the next, and so on.

    ``group_sizes[i]`` blocks belong to the i-th offloaded group; ``block_indices[i]`` is the position of its first one in
    the request's table. ``ValueError`` if the sizes do not sum up to the blocks, or an index is missing.
    """

    def __init__(
        self, block_ids: Iterable[int], group_sizes: Sequence[int], block_indices: Sequence[int]
    ) -> None:
        super().__init__(block_ids)
        if sum(group_sizes) != len(self.block_ids):
            raise ValueError(
                f"group_sizes={list(group_sizes)} must sum up to {len(self.block_ids)}, the number of block_ids"
            )
        if len(block_indices) != len(group_sizes):
            raise ValueError(
                f"block_indices={list(block_indices)} must have one index for each of {len(group_sizes)} groups"
            )
        self.group_sizes: tuple[int, ...] = tuple(group_sizes)
        self.block_indices: tuple[int, ...] = tuple(block_indices)

    @staticmethod
    def medium() -> str:
        return "GPU"


@dataclass(slots=True)
class PrepareStoreOutput:
    """What of the offered keys is to be stored, where, and what goes for it."""

    keys_to_store: Collection[OffloadKey]
    store_spec: LoadStoreSpec
    evicted_keys: Collection[OffloadKey]


@dataclass(slots=True)
class OffloadingEvent:
    """Content came (``removed`` False) or went. ``metadata_only``: where it is known to be has changed, nothing else."""

    keys: Collection[OffloadKey]
    medium: str
    removed: bool
    locality: Literal["LOCAL", "REMOTE"] | None = None
    ownership: str | None = None
    removal_expected: bool = False
    metadata_only: bool = False


@dataclass(frozen=True, slots=True)
class OffloadingKVEventsConfig:
    """Whether KV events are wanted, and whether those of full attention carry tokens and parents."""

    enable_kv_cache_events: bool
    self_describing_kv_events: bool


# -- figures ----------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class OffloadingCounterMetadata:
    """A counter of a spec's own."""

    documentation: str
    labelnames: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True)
class OffloadingGaugeMetadata:
    """A gauge of a spec's own."""

    documentation: str
    labelnames: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True)
class OffloadingHistogramMetadata:
    """A histogram of a spec's own; without ``buckets`` the metrics library's."""

    documentation: str
    labelnames: tuple[str, ...] = ()
    buckets: tuple[float, ...] = ()


OffloadingMetricMetadata = OffloadingCounterMetadata | OffloadingGaugeMetadata | OffloadingHistogramMetadata

Figures = Mapping[str, Mapping[tuple[str, ...], "float | Sequence[float]"]]
"""Metric name → label values → what a counter grew by, a gauge's value, or what a histogram has observed."""


# -- device memory ----------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class CopyRun:
    """Bytes that lie one behind the other on both sides."""

    src_offset: int
    dst_offset: int
    num_bytes: int


@dataclass(frozen=True, slots=True)
class CanonicalPageMapping:
    """How one block of a tensor lies in a block of the lower tier: byte runs relative to both blocks."""

    runs: tuple[CopyRun, ...]


@dataclass(frozen=True, slots=True)
class CanonicalKVCacheRef:
    """A tensor that holds bytes of a group's blocks, and how they are to lie below."""

    tensor_idx: int
    page_size_bytes: int
    mapping: CanonicalPageMapping


@dataclass(frozen=True, slots=True)
class CanonicalKVCaches:
    """The device's KV caches as int8 tensors ``[num_blocks, bytes]``; each byte of a block is in one of them.

    ``group_data_refs[i]``: the tensors that blocks of the i-th offloaded group have bytes in.
    """

    tensors: Sequence[OpaqueTensor]
    group_data_refs: Sequence[Sequence[CanonicalKVCacheRef]]


# -- the contract -----------------------------------------------------------------------------


class OffloadingManager(ABC):
    """Knows what is kept below the device, in the scheduler's process.

    Between ``prepare_store`` and ``complete_store`` content cannot be found; between ``prepare_load`` and ``complete_load``
    it must not go away. All calls come from one thread, inside ``lock`` but for ``shutdown``; it is entered once and need not
    be one that may be entered again. An exception counts as a miss, a refusal, or nothing.
    """

    @abstractmethod
    def lookup(self, key: OffloadKey, ctx: ReqContext) -> LookupResult:
        """Whether this content can be loaded. May be asked any number of times, and promises nothing."""

    @abstractmethod
    def prepare_load(self, keys: Collection[OffloadKey], ctx: ReqContext) -> LoadStoreSpec:
        """Hold the content and say where it is, in the order of the keys. An exception fails this load alone."""

    @abstractmethod
    def prepare_store(self, keys: Collection[OffloadKey], ctx: ReqContext) -> PrepareStoreOutput | None:
        """Make room for those keys that are to be stored; None if nothing can be."""

    @abstractmethod
    def on_new_request(self, ctx: ReqContext) -> RequestOffloadingContext:
        """A request is looked up for the first time."""

    def get_load_source(self, key: OffloadKey, ctx: ReqContext) -> tuple[Medium, Locality] | None:
        """Where the content would be loaded from; None if that cannot be said. Asked of each block, for figures only."""
        return None

    def touch(self, keys: Collection[OffloadKey], ctx: ReqContext) -> None:
        """A request uses this content, loaded or not."""
        return

    def complete_load(self, keys: Collection[OffloadKey], ctx: ReqContext) -> None:
        """The load is over, well or badly."""
        return

    def complete_store(self, keys: Collection[OffloadKey], ctx: ReqContext, success: bool = True) -> None:
        """The store is over. Without success the content must not be found."""
        return

    def on_request_finished(self, ctx: ReqContext) -> None:
        """The request has ended. Its transfers under way go on."""
        return

    def take_events(self) -> Iterable[OffloadingEvent]:
        """What came and went since the last call."""
        return ()

    def on_schedule_end(self, ctx: ScheduleEndContext) -> None:
        """A step was built."""
        return

    def has_pending_work(self) -> bool:
        """Whether steps are needed even if no request runs."""
        return False

    def reset_cache(self) -> None:
        """Nothing of what is stored now may be found any more.

        What was prepared and not completed never will be: its memory is in use until ``on_reset_flushed``. After an
        exception the manager is not asked, nor offered anything, until a later reset goes well.
        """
        return

    def on_reset_flushed(self) -> None:
        """All transfers from before the last reset have ended."""
        return

    def get_stats(self) -> Figures | None:
        """Figures since the last call, of the metrics that the spec has defined."""
        return None

    def config_info(self) -> Mapping[str, str]:
        """Values of the spec's ``config_info_keys``."""
        return {}

    def shutdown(self) -> None:
        """End threads, release what is held. Idempotent."""
        return

    @property
    def lock(self) -> AbstractContextManager[object]:
        """What the caller enters round its calls, for managers with threads of their own."""
        return nullcontext()


@dataclass(slots=True)
class TransferResult:
    """The end of a job on one rank; size in bytes and time in seconds where the worker knows them."""

    job_id: int
    success: bool
    transfer_size: int | None = None
    transfer_time: float | None = None


class OffloadingWorker(ABC):
    """Moves blocks on one rank. Nothing here may block, but ``wait``."""

    @abstractmethod
    def submit_store(self, job_id: int, src: GPULoadStoreSpec, dst: LoadStoreSpec) -> bool:
        """Start a copy from the device; False if it cannot be started. The bytes are complete already."""

    @abstractmethod
    def submit_load(
        self, job_id: int, src: LoadStoreSpec, dst: GPULoadStoreSpec, expedited: bool = False
    ) -> bool:
        """Start a copy to the device, behind what the device was given so far; ``expedited``: a step waits for it."""

    @abstractmethod
    def get_finished(self) -> list[TransferResult]:
        """Jobs that have ended since the last call. Each that was started is told once; blocks are held until then.

        One that is not told in time (``transfer_timeout_s``) counts as failed, and so does its copy when it is told later.
        """

    @abstractmethod
    def wait(self, job_ids: Collection[int]) -> None:
        """Return when these jobs have ended."""

    def shutdown(self) -> None:
        """End threads, release memory. Idempotent."""
        return


class OffloadingSpec(ABC):
    """Makes both halves from the settings; ``cls(config)`` in each process. Wrong settings are a ``ValueError``."""

    def __init__(self, config: OffloadingConfig) -> None:
        self.config = config

    @abstractmethod
    def get_manager(self) -> OffloadingManager:
        """The manager; called once, in the scheduler's process."""

    @abstractmethod
    def get_worker(self, kv_caches: CanonicalKVCaches) -> OffloadingWorker:
        """The worker of this rank; called once."""

    @classmethod
    def build_metric_definitions(cls, extra: Mapping[str, Any]) -> dict[str, OffloadingMetricMetadata]:
        """The metrics that the manager reports, by name."""
        return {}

    @classmethod
    def config_info_keys(cls, extra: Mapping[str, Any]) -> tuple[str, ...]:
        """Labels that the manager's ``config_info`` gives values for."""
        return ()


__all__ = [
    "ALL",
    "TIER_FILTER_PARAM",
    "BlockIDsLoadStoreSpec",
    "CanonicalKVCacheRef",
    "CanonicalKVCaches",
    "CanonicalPageMapping",
    "CopyRun",
    "Figures",
    "GPULoadStoreSpec",
    "LoadStoreSpec",
    "Locality",
    "LookupResult",
    "Medium",
    "OffloadKey",
    "OffloadPolicy",
    "OffloadingCounterMetadata",
    "OffloadingEvent",
    "OffloadingGaugeMetadata",
    "OffloadingHistogramMetadata",
    "OffloadingKVEventsConfig",
    "OffloadingManager",
    "OffloadingMetricMetadata",
    "OffloadingSpec",
    "OffloadingWorker",
    "PrepareStoreOutput",
    "ReqContext",
    "RequestOffloadingContext",
    "ScheduleEndContext",
    "TierFilter",
    "TierMatcher",
    "TransferResult",
    "get_offload_block_hash",
    "get_offload_group_idx",
    "make_offload_key",
    "parse_tier_filter",
]
