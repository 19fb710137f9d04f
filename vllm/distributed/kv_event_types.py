"""KV cache events as values, their wire codec, and the aggregation of worker events.

Owns the msgspec classes whose field order and names *are* the wire format, and the count of
events over the workers of one engine. It must not know who produces events (the block index and
the connectors do), nor how they travel (the publishers do). Layer L2.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections import Counter
from typing import Any, Literal

import msgspec

MEDIUM_GPU = "GPU"
MEDIUM_CPU = "CPU"
MEDIUM_STORAGE = "STORAGE"

LOCALITY_LOCAL: Literal["LOCAL"] = "LOCAL"

# A block hash as consumers see it: the last 8 bytes as an unsigned integer, or all bytes.
ExternalBlockHash = bytes | int


class EventBatch(msgspec.Struct, array_like=True, omit_defaults=True, gc=False):
    """Events of one processed step, encoded as the array ``[ts, events, data_parallel_rank]``.

    ``ts`` is wall clock time in seconds. Callers may subclass it with event types of their own.
    """

    ts: float
    events: list[Any]  # open on purpose: subclasses narrow it
    data_parallel_rank: int | None = None


class KVCacheEvent(msgspec.Struct, omit_defaults=True, gc=False, tag=True):
    """Base of all KV cache events: a map with the class name under the key ``type``."""


def _frozen(value: object) -> object:
    """The value with lists turned into tuples at every depth, so that it can be hashed."""
    if isinstance(value, list | tuple):
        return tuple(_frozen(item) for item in value)
    return value


class BlockStored(KVCacheEvent):
    """Blocks became reusable on ``medium``; the hashes form one contiguous run of a chain.

    ``parent_block_hash`` is the hash before the first one (None at block 0), ``token_ids`` are
    the tokens of all listed blocks and ``block_size`` counts tokens per hash.
    """

    block_hashes: list[bytes | int]
    parent_block_hash: bytes | int | None
    token_ids: list[int]
    block_size: int
    lora_id: int | None
    medium: str | None
    lora_name: str | None
    extra_keys: list[tuple[Any, ...] | None] | None = None  # contents are opaque to the engine
    group_idx: int | None = None
    kv_cache_spec_kind: str | None = None
    kv_cache_spec_sliding_window: int | None = None
    locality: Literal["LOCAL", "REMOTE"] | None = None
    ownership: str | None = None
    session_id: str | None = None
    lookahead_token_ids: list[list[int]] | None = None

    def __hash__(self) -> int:
        # The adapter name counts: equal blocks of two adapters must not collapse in aggregators.
        return hash(tuple(_frozen(value) for value in msgspec.structs.astuple(self)))


class BlockRemoved(KVCacheEvent):
    """The listed hashes are no longer reusable on ``medium``."""

    block_hashes: list[bytes | int]
    medium: str | None
    group_idx: int | None = None
    locality: Literal["LOCAL", "REMOTE"] | None = None
    ownership: str | None = None

    def __hash__(self) -> int:
        return hash(tuple(_frozen(value) for value in msgspec.structs.astuple(self)))


class AllBlocksCleared(KVCacheEvent):
    """Everything is gone. Without ``medium`` it speaks of the device tier, as it always did."""

    medium: str | None = None
    group_idx: int | None = None

    def __hash__(self) -> int:
        return hash((self.medium, self.group_idx))


AnyKVCacheEvent = BlockStored | BlockRemoved | AllBlocksCleared


class KVEventBatch(EventBatch):
    """A batch that holds only KV cache events; the type consumers decode into."""

    events: list[BlockStored | BlockRemoved | AllBlocksCleared]


class EventCodec:
    """Encodes batches to msgpack and decodes them; reuses one encoder and decoder."""

    __slots__ = ("_decoder", "_encoder")

    def __init__(self) -> None:
        self._encoder = msgspec.msgpack.Encoder()
        self._decoder = msgspec.msgpack.Decoder(KVEventBatch)

    def encode(self, batch: EventBatch) -> bytes:
        """The msgpack payload of any batch; raises ``TypeError`` for foreign field values."""
        return self._encoder.encode(batch)

    def decode(self, payload: bytes) -> KVEventBatch:
        """The batch in a payload; raises ``msgspec.MsgspecError`` if it is not one."""
        return self._decoder.decode(payload)


class KVEventAggregator:
    """Counts equal events over workers; an event is common once every worker reported it."""

    __slots__ = ("_event_counter", "_num_workers")

    def __init__(self, num_workers: int) -> None:
        if num_workers <= 0:
            raise ValueError(f"num_workers must be greater than zero, got {num_workers}")
        self._event_counter: Counter[KVCacheEvent] = Counter()
        self._num_workers = num_workers

    def add_events(self, events: list[KVCacheEvent]) -> None:
        """Count one worker's events; ``TypeError`` for anything but a list."""
        if not isinstance(events, list):
            raise TypeError(f"events must be a list, got {type(events).__name__}")
        self._event_counter.update(events)

    def get_common_events(self) -> list[KVCacheEvent]:
        """Events that as many workers reported as there are, in order of first report."""
        return [event for event, count in self._event_counter.items() if count == self._num_workers]

    def get_all_events(self) -> list[KVCacheEvent]:
        """Every distinct event seen, in order of first report."""
        return list(self._event_counter)

    def clear_events(self) -> None:
        """Forget all counts."""
        self._event_counter.clear()

    def increment_workers(self, count: int = 1) -> None:
        """Expect ``count`` more workers; ``ValueError`` unless positive."""
        if count <= 0:
            raise ValueError(f"count must be positive, got {count}")
        self._num_workers += count

    def reset_workers(self) -> None:
        """Expect a single worker again."""
        self._num_workers = 1

    def get_number_of_workers(self) -> int:
        """How many workers are expected."""
        return self._num_workers

    def __repr__(self) -> str:
        return f"<KVEventAggregator workers={self._num_workers}, events={len(self._event_counter)}>"


class KVConnectorKVEvents(ABC):
    """Events that workers of a connector report; combined over ranks before publication."""

    @abstractmethod
    def add_events(self, events: list[KVCacheEvent]) -> None:
        """Add the events of one worker."""

    @abstractmethod
    def aggregate(self) -> KVConnectorKVEvents:
        """Reduce to the events that all workers reported and return self."""

    @abstractmethod
    def increment_workers(self, count: int = 1) -> None:
        """Expect ``count`` more workers."""

    @abstractmethod
    def get_all_events(self) -> list[KVCacheEvent]:
        """All events held."""

    @abstractmethod
    def get_number_of_workers(self) -> int:
        """How many workers are expected."""

    @abstractmethod
    def clear_events(self) -> None:
        """Forget all events."""

    def merge(self, other: KVConnectorKVEvents) -> KVConnectorKVEvents:
        """Add the events of ``other`` (of the same kind) to self and return self."""
        self.add_events(other.get_all_events())
        return self
