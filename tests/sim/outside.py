"""An offloading spec from outside: its manager with stamped places, which defers, declines, drops, fails and keeps books.

Its workers are in `outside_worker.py`. Content is stored in places; memory of these is by rank, as that of a host tier.
"""

from __future__ import annotations

import random
from collections import Counter
from collections.abc import Callable, Collection, Iterable, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

from tests.sim.device import Memory
from tests.sim.marks import Marks
from vllm.distributed.kv_event_types import BlockRemoved
from vllm.v1.core.block_hash import maybe_convert_block_hash
from vllm.v1.kv_offload.base import (
    BlockIDsLoadStoreSpec,
    CanonicalKVCaches,
    LoadStoreSpec,
    LookupResult,
    OffloadingEvent,
    OffloadingManager,
    OffloadingSpec,
    OffloadingWorker,
    OffloadKey,
    OffloadPolicy,
    PrepareStoreOutput,
    ReqContext,
    RequestOffloadingContext,
    get_offload_block_hash,
    get_offload_group_idx,
)

MEDIUM = "SHELF"
FAILING = (
    "lookup",
    "prepare_load",
    "prepare_store",
    "on_new_request",
    "touch",
    "take_events",
    "reset_cache",
    "complete_store",
    "complete_load",
)
"""Methods of which one may raise during an action; those that complete something raise when it is done."""


class ShelfPlaces(BlockIDsLoadStoreSpec):
    """Places by number."""

    @staticmethod
    def medium() -> str:
        return MEDIUM


@dataclass
class Surroundings:
    """What the manager is given once the run round it exists."""

    fault: Callable[[str, random.Random], bool]
    stream: Callable[[str], random.Random]
    marks: Marks
    memories: list[Memory]


@dataclass
class ToldPool:
    """Stands for a pool in the checks of events: what was told, and the removals that will be told next."""

    medium: str
    kv_event_queue: list[BlockRemoved]


@dataclass
class Mood:
    """What goes wrong in one action."""

    failing: str | None = None
    puts_off: int | None = None
    """Keys are answered later whose first byte leaves this rest."""
    declines: int | None = None
    """The same for keys that are not stored."""
    muddles: bool = False
    """Keys to store are named in another order than they were offered in, so that nothing can be stored."""


@dataclass
class Books:
    """What the manager has been asked so far, where it matters."""

    errors: list[str] = field(default_factory=list)
    has_gaps: bool = False
    """Something offered was not taken, or has gone."""
    told: set[OffloadKey] = field(default_factory=set)
    """Whose arrival was told of, and whose end was not."""
    void: set[OffloadKey] = field(default_factory=set)
    """Those of them that a reset withdrew, which the engine is to tell of."""


class ShelfManager(OffloadingManager):
    """Content by key on numbered places; every pair of calls is checked."""

    def __init__(self, capacity: int, *, is_whole: bool, tells_resets: bool) -> None:
        self.capacity = capacity
        self.policy = OffloadPolicy.REQUEST_LEVEL if is_whole else OffloadPolicy.CHUNK_LEVEL
        self.tells_resets = tells_resets
        self.free = list(range(capacity))
        self.ready: dict[OffloadKey, int] = {}
        self.storing: dict[OffloadKey, int] = {}
        self.reading: Counter[OffloadKey] = Counter()
        self.leaving: list[int] = []
        """Places of what was under way at a reset."""
        self.live: set[str] = set()
        self.events: list[OffloadingEvent] = []
        self.books = Books()
        self.has_stale = False
        """A reset failed: what is here is what the engine must not ask for."""
        self.around: Surroundings | None = None
        self._action = "start"
        self._mood: Mood | None = None
        self._is_locked = False

    # -- what the run sees and does -----------------------------------------------------------

    def begin(self, action: str) -> None:
        """From now on what goes wrong is drawn anew."""
        self._action, self._mood = action, None

    def entries(self) -> list[tuple[int, OffloadKey]]:
        """(place, key) of what can be found."""
        return sorted((place, key) for key, place in self.ready.items())

    def told_pool(self) -> tuple[ToldPool, list[tuple[int, OffloadKey]]]:
        """What events have told, and what the engine will say next of itself."""
        removals = [
            BlockRemoved(
                block_hashes=[maybe_convert_block_hash(get_offload_block_hash(key))],
                medium=MEDIUM,
                group_idx=get_offload_group_idx(key),
            )
            for key in sorted(self.books.void)
        ]
        return ToldPool(MEDIUM, removals), [(0, key) for key in sorted(self.books.told - self.books.void)]

    def drop_some(self, rng: random.Random) -> None:
        """Content goes by itself."""
        gone = [key for key in self.ready if not self.reading[key] and rng.random() < 0.4]
        if gone:
            self._drop(gone)
            self._mark("manager loses content")

    def tables(self) -> dict[str, object]:
        """Empty at rest. Who does not hear of an end because a reset failed keeps what had begun."""
        if self.has_stale:
            return {"live": self.live}
        return {
            "storing": self.storing,
            "reading": +self.reading,
            "leaving": self.leaving,
            "live": self.live,
            "lost places": {} if len(self.free) + len(self.ready) == self.capacity else self.free,
        }

    # -- the contract -------------------------------------------------------------------------

    def lookup(self, key: OffloadKey, ctx: ReqContext) -> LookupResult:
        self._enter("lookup")
        if self._is_meant(self._drawn().puts_off, key):
            self._mark("answer put off")
            return LookupResult.RETRY if key[1] % 2 else LookupResult.HIT_PENDING
        if key in self.ready:
            return LookupResult.HIT
        return LookupResult.HIT_PENDING if key in self.storing else LookupResult.MISS

    def prepare_load(self, keys: Collection[OffloadKey], ctx: ReqContext) -> LoadStoreSpec:
        self._enter("prepare_load")
        if not keys:
            self._complain("a load of nothing")
        if self.has_stale:
            self._complain("a load from a manager whose reset failed")
        if any(key in self.storing for key in keys):
            self._complain("a load of what is still being stored")
        places = [self.ready[key] for key in keys]  # what has gone meanwhile is an error, of this load alone
        for place in places:
            if any(memory.page(place).tainted for memory in self._around.memories):
                self._complain(f"{ctx.req_id} loads place {place}, whose content was withdrawn")
        self.reading.update(keys)
        self._mark("load from a manager from outside")
        return ShelfPlaces(places)

    def complete_load(self, keys: Collection[OffloadKey], ctx: ReqContext) -> None:
        for key in keys:
            if self.reading[key] <= 0:
                self._complain("a load completed that was not prepared")
            self.reading[key] -= 1
        self._enter("complete_load")

    def prepare_store(self, keys: Collection[OffloadKey], ctx: ReqContext) -> PrepareStoreOutput | None:
        self._enter("prepare_store")
        if self.has_stale:
            self._complain("an offer to a manager whose reset failed")
        new = [key for key in keys if key not in self.ready and key not in self.storing]
        chosen = [key for key in new if not self._is_meant(self._drawn().declines, key)]
        if len(chosen) < len(new):
            self.books.has_gaps = True
            self._mark("manager takes a part")
        idle = [key for key in self.ready if not self.reading[key] and key not in keys]
        gone = idle[: max(0, len(chosen) - len(self.free))]
        if len(chosen) > len(self.free) + len(gone):
            self.books.has_gaps = True
            self._mark("manager refuses a store")
            return None
        if gone:
            self._mark("manager evicts")
        self._drop(gone)
        for key in chosen:
            self.storing[key] = self.free.pop()
        if chosen:
            self._mark("store with a manager from outside")
        if self._drawn().muddles and len(chosen) > 1:
            self._mark("manager answers out of order")
            chosen.reverse()
        return PrepareStoreOutput(chosen, ShelfPlaces(self.storing[key] for key in chosen), gone)

    def complete_store(self, keys: Collection[OffloadKey], ctx: ReqContext, success: bool = True) -> None:
        for key in keys:
            if key not in self.storing:
                self._complain("a store completed that was not prepared")
                continue
            place = self.storing.pop(key)
            if success:
                self.ready[key] = place
            else:
                self.free.append(place)
        if success and keys:
            self.events.append(OffloadingEvent(list(keys), MEDIUM, False))
        self._enter("complete_store")

    def on_new_request(self, ctx: ReqContext) -> RequestOffloadingContext:
        if ctx.req_id in self.live:
            self._complain(f"{ctx.req_id} is new twice")
        self.live.add(ctx.req_id)
        self._enter("on_new_request")
        if self.policy is OffloadPolicy.REQUEST_LEVEL:
            self._mark("request stored as a whole")
        return RequestOffloadingContext(self.policy)

    def on_request_finished(self, ctx: ReqContext) -> None:
        self._enter("on_request_finished")
        if ctx.req_id not in self.live:
            self._complain(f"{ctx.req_id} ends and was not there")
        self.live.discard(ctx.req_id)

    def touch(self, keys: Collection[OffloadKey], ctx: ReqContext) -> None:
        self._enter("touch")
        for key in keys:
            if key in self.ready:
                self.ready[key] = self.ready.pop(key)

    def take_events(self) -> Iterable[OffloadingEvent]:
        books = self.books
        books.told -= books.void
        books.void.clear()
        self._enter("take_events")
        events, self.events = self.events, []
        for event in events:
            (books.told.difference_update if event.removed else books.told.update)(event.keys)
        return events

    def reset_cache(self) -> None:
        if self.storing or +self.reading:
            self._mark("reset with jobs of a manager under way")
        fails = self._drawn().failing == "reset_cache"
        if fails or not self.tells_resets:
            self.books.void |= self.books.told
            self.events.clear()
        else:
            # The engine says it by itself; that this does too must not be heard twice.
            self._tell_removed(key for key in self.ready if self._is_public(key))
            self.books.void |= self.books.told
        self.has_stale = fails
        if fails:
            self._mark("reset of a manager failed")
        self._enter("reset_cache")
        for key, place in self.ready.items():
            (self.leaving if self.reading[key] else self.free).append(place)
        self.leaving += self.storing.values()
        self.ready.clear()
        self.storing.clear()
        self.reading.clear()

    def on_reset_flushed(self) -> None:
        self._enter("on_reset_flushed")
        self.free += self.leaving
        self.leaving = []

    def get_stats(self) -> Mapping[str, Any] | None:
        return {"vllm:shelf_fill": {(): len(self.ready) / self.capacity}}

    @property
    def lock(self) -> Any:
        return self._locked()

    # -- details ------------------------------------------------------------------------------

    @contextmanager
    def _locked(self) -> Any:
        if self._is_locked:
            self._complain("the lock is entered twice")
        self._is_locked = True
        try:
            yield
        finally:
            self._is_locked = False

    @property
    def _around(self) -> Surroundings:
        assert self.around is not None
        return self.around

    def _drawn(self) -> Mood:
        if self._mood is None:
            around = self._around
            rng = around.stream(f"{self._action}/shelf")
            self._mood = Mood()
            is_reset = self._action.endswith("/reset")
            if around.fault("manager fails", rng) or (is_reset and around.fault("manager fails", rng)):
                self._mood.failing = "reset_cache" if is_reset else rng.choice(FAILING)
            if around.fault("put off", rng):
                self._mood.puts_off = rng.randrange(3)
            if around.fault("declines", rng):
                self._mood.declines = rng.randrange(3)
                self._mood.muddles = rng.random() < 0.4
        return self._mood

    @staticmethod
    def _is_meant(rest: int | None, key: OffloadKey) -> bool:
        return rest is not None and key[0] % 3 == rest

    def _enter(self, name: str) -> None:
        if not self._is_locked:
            self._complain(f"{name} outside the lock")
        if self._drawn().failing == name:
            self._mark("manager fails")
            self.books.has_gaps = True
            raise RuntimeError(f"{name} was drawn to fail")

    def _complain(self, what: str) -> None:
        # An exception would stay with the guard round this manager.
        self.books.errors.append(what)

    def _mark(self, name: str) -> None:
        self._around.marks.hit(name)

    def _drop(self, keys: Iterable[OffloadKey]) -> None:
        gone = list(keys)
        if gone:
            self.books.has_gaps = True
        self._tell_removed(key for key in gone if self._is_public(key))
        self.free += [self.ready.pop(key) for key in gone]

    def _is_public(self, key: OffloadKey) -> bool:
        """Whether the last that was, or will be, told of it is that it came."""
        for event in reversed(self.events):
            if key in event.keys:
                return not event.removed
        return key in self.books.told and key not in self.books.void

    def _tell_removed(self, keys: Iterable[OffloadKey]) -> None:
        if told := list(keys):
            self.events.append(OffloadingEvent(told, MEDIUM, True))


class ShelfSpec(OffloadingSpec):
    """Made by the connector from its name; the worker half of the simulator has workers of its own."""

    def get_manager(self) -> OffloadingManager:
        extra = self.config.extra_config
        return ShelfManager(
            extra["shelf_places"], is_whole=extra["shelf_is_whole"], tells_resets=extra["shelf_tells_resets"]
        )

    def get_worker(self, kv_caches: CanonicalKVCaches) -> OffloadingWorker:
        raise RuntimeError("the simulator makes its workers itself")


__all__ = ["MEDIUM", "ShelfManager", "ShelfPlaces", "ShelfSpec", "Surroundings", "ToldPool"]
