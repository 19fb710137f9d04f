"""Which content is in which chunk of host memory: the manager of `CPUOffloadingSpec`.

Owns the chunks, in order of use. It must not know memory or workers. Layer L2.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Collection, Iterable
from dataclasses import dataclass

from vllm.v1.kv_offload.base import (
    Locality,
    LookupResult,
    Medium,
    OffloadingEvent,
    OffloadingManager,
    OffloadKey,
    PrepareStoreOutput,
    ReqContext,
    RequestOffloadingContext,
)
from vllm.v1.kv_offload.cpu.common import CPULoadStoreSpec


@dataclass(slots=True)
class _Chunk:
    """``is_ready``: its bytes have arrived. ``num_readers``: loads under way."""

    number: int
    is_ready: bool = False
    num_readers: int = 0


class CPUOffloadingManager(OffloadingManager):
    """Least recently used content goes first; what is written or read stays."""

    def __init__(self, *, num_chunks: int, enable_events: bool = False) -> None:
        if num_chunks <= 0:
            raise ValueError(f"num_chunks must be positive, got {num_chunks}")
        self._free = list(range(num_chunks - 1, -1, -1))
        self._chunks: OrderedDict[OffloadKey, _Chunk] = OrderedDict()
        # Read or written when a reset came; free when it is flushed.
        self._leaving: list[int] = []
        self._events: list[OffloadingEvent] | None = [] if enable_events else None

    def on_new_request(self, ctx: ReqContext) -> RequestOffloadingContext:
        return RequestOffloadingContext()

    def lookup(self, key: OffloadKey, ctx: ReqContext) -> LookupResult:
        chunk = self._chunks.get(key)
        if chunk is None or not ctx.load_tier_filter.allows(Medium.CPU):
            return LookupResult.MISS
        return LookupResult.HIT if chunk.is_ready else LookupResult.HIT_PENDING

    def get_load_source(self, key: OffloadKey, ctx: ReqContext) -> tuple[Medium, Locality] | None:
        return (Medium.CPU, Locality.LOCAL) if key in self._chunks else None

    def touch(self, keys: Collection[OffloadKey], ctx: ReqContext) -> None:
        for key in reversed(list(keys)):
            if key in self._chunks:
                self._chunks.move_to_end(key)

    def prepare_load(self, keys: Collection[OffloadKey], ctx: ReqContext) -> CPULoadStoreSpec:
        chunks = [self._chunks[key] for key in keys]
        if not all(chunk.is_ready for chunk in chunks):
            raise KeyError("content that is still being stored cannot be loaded")
        for chunk in chunks:
            chunk.num_readers += 1
        return CPULoadStoreSpec(chunk.number for chunk in chunks)

    def complete_load(self, keys: Collection[OffloadKey], ctx: ReqContext) -> None:
        for key in keys:
            self._chunks[key].num_readers -= 1

    def prepare_store(self, keys: Collection[OffloadKey], ctx: ReqContext) -> PrepareStoreOutput | None:
        wanted = [key for key in keys if key not in self._chunks]
        victims = self._victims(len(wanted) - len(self._free), keys)
        if victims is None:
            return None
        for key in victims:
            self._free.append(self._chunks.pop(key).number)
        for key in wanted:
            self._chunks[key] = _Chunk(self._free.pop())
        self._tell(victims, removed=True)
        return PrepareStoreOutput(
            wanted, CPULoadStoreSpec(self._chunks[key].number for key in wanted), victims
        )

    def _victims(self, count: int, needed: Collection[OffloadKey]) -> list[OffloadKey] | None:
        victims: list[OffloadKey] = []
        if count <= 0:
            return victims
        for key, chunk in self._chunks.items():
            if chunk.is_ready and not chunk.num_readers and key not in needed:
                victims.append(key)
                if len(victims) == count:
                    return victims
        return None

    def complete_store(self, keys: Collection[OffloadKey], ctx: ReqContext, success: bool = True) -> None:
        stored = []
        for key in keys:
            if success:
                self._chunks[key].is_ready = True
                stored.append(key)
            else:
                self._free.append(self._chunks.pop(key).number)
        self._tell(stored, removed=False)

    def reset_cache(self) -> None:
        self._tell([key for key, chunk in self._chunks.items() if chunk.is_ready], removed=True)
        for chunk in self._chunks.values():
            is_idle = chunk.is_ready and not chunk.num_readers
            (self._free if is_idle else self._leaving).append(chunk.number)
        self._chunks.clear()

    def on_reset_flushed(self) -> None:
        self._free += self._leaving
        self._leaving.clear()

    def take_events(self) -> Iterable[OffloadingEvent]:
        if self._events is None:
            return ()
        events, self._events = self._events, []
        return events

    def _tell(self, keys: Collection[OffloadKey], *, removed: bool) -> None:
        if self._events is not None and keys:
            self._events.append(
                OffloadingEvent(list(keys), Medium.CPU, removed, locality=Locality.LOCAL.value)
            )
