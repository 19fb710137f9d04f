"""A manager from outside whose faults stay its own: no exception of it reaches the scheduler.

Owns what counts as the answer where there was none. It must not know what the manager does. Layer L4.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Collection, Iterable, Mapping
from contextlib import AbstractContextManager, ExitStack
from dataclasses import replace
from types import TracebackType
from typing import TypeVar

from vllm.logger import init_logger
from vllm.v1.kv_offload.base import (
    Figures,
    LoadStoreSpec,
    Locality,
    LookupResult,
    Medium,
    OffloadingEvent,
    OffloadingManager,
    OffloadKey,
    PrepareStoreOutput,
    ReqContext,
    RequestOffloadingContext,
    ScheduleEndContext,
)

logger = init_logger(__name__)

R = TypeVar("R")
D = TypeVar("D")


class GuardedManager(OffloadingManager):
    """Passes every call on. What fails, or answers with something else than the contract says, is logged and counts as a
    miss, a refusal, or nothing; only a load that cannot be prepared is told, as the exception that it is.

    ``resets_failed``: since the last reset that went well, what was stored before may be found still.
    """

    def __init__(self, manager: OffloadingManager) -> None:
        self.inner = manager
        self.resets_failed = False
        self._faults = _Faults()
        self._turn = _Turn(manager, self._faults)

    def lookup(self, key: OffloadKey, ctx: ReqContext) -> LookupResult:
        if self.resets_failed:
            return LookupResult.MISS
        # As `_guard`, written out: thousands of keys are looked up for one request.
        try:
            answer = self.inner.lookup(key, ctx)
        except Exception as error:  # of a module from outside
            self._faults.tell("lookup", error)
            return LookupResult.MISS
        if type(answer) is LookupResult:
            return answer
        self._faults.tell("lookup", TypeError(f"expected a LookupResult, got {answer!r}"))
        return LookupResult.MISS

    def prepare_load(self, keys: Collection[OffloadKey], ctx: ReqContext) -> LoadStoreSpec:
        source = self.inner.prepare_load(keys, ctx)
        if not isinstance(source, LoadStoreSpec):
            raise TypeError(f"expected a LoadStoreSpec, got {source!r}")
        return source

    def prepare_store(self, keys: Collection[OffloadKey], ctx: ReqContext) -> PrepareStoreOutput | None:
        def prepare() -> PrepareStoreOutput | None:
            made = self.inner.prepare_store(keys, ctx)
            if made is None:
                return None
            target = _a(LoadStoreSpec, made.store_spec)  # type: ignore[type-abstract]
            return PrepareStoreOutput(_keys(made.keys_to_store), target, _keys(made.evicted_keys))

        return None if self.resets_failed else self._faults.guard(None, prepare, "prepare_store")

    def on_new_request(self, ctx: ReqContext) -> RequestOffloadingContext:
        return self._faults.guard(
            RequestOffloadingContext(),
            lambda: _a(RequestOffloadingContext, self.inner.on_new_request(ctx)),
            "on_new_request",
        )

    def get_load_source(self, key: OffloadKey, ctx: ReqContext) -> tuple[Medium, Locality] | None:
        def ask() -> tuple[Medium, Locality] | None:
            answer = self.inner.get_load_source(key, ctx)
            if answer is None:
                return None
            medium, locality = answer
            return Medium(medium), Locality(locality)

        return self._faults.guard(None, ask, "get_load_source")

    def touch(self, keys: Collection[OffloadKey], ctx: ReqContext) -> None:
        self._faults.guard(None, lambda: self.inner.touch(keys, ctx), "touch")

    def complete_load(self, keys: Collection[OffloadKey], ctx: ReqContext) -> None:
        self._faults.guard(None, lambda: self.inner.complete_load(keys, ctx), "complete_load")

    def complete_store(self, keys: Collection[OffloadKey], ctx: ReqContext, success: bool = True) -> None:
        self._faults.guard(None, lambda: self.inner.complete_store(keys, ctx, success), "complete_store")

    def on_request_finished(self, ctx: ReqContext) -> None:
        self._faults.guard(None, lambda: self.inner.on_request_finished(ctx), "on_request_finished")

    def take_events(self) -> Iterable[OffloadingEvent]:
        nothing: tuple[OffloadingEvent, ...] = ()
        return self._faults.guard(
            nothing, lambda: tuple(map(_plain_event, self.inner.take_events())), "take_events"
        )

    def on_schedule_end(self, ctx: ScheduleEndContext) -> None:
        self._faults.guard(None, lambda: self.inner.on_schedule_end(ctx), "on_schedule_end")

    def has_pending_work(self) -> bool:
        return self._faults.guard(False, lambda: bool(self.inner.has_pending_work()), "has_pending_work")

    def reset_cache(self) -> None:
        self.resets_failed = True

        def reset() -> None:
            self.inner.reset_cache()
            self.resets_failed = False

        self._faults.guard(None, reset, "reset_cache")

    def on_reset_flushed(self) -> None:
        self._faults.guard(None, self.inner.on_reset_flushed, "on_reset_flushed")

    def get_stats(self) -> Figures | None:
        return self._faults.guard(None, self.inner.get_stats, "get_stats")

    def config_info(self) -> Mapping[str, str]:
        nothing: Mapping[str, str] = {}
        return self._faults.guard(nothing, lambda: dict(self.inner.config_info()), "config_info")

    def shutdown(self) -> None:
        self._faults.guard(None, self.inner.shutdown, "shutdown")

    @property
    def lock(self) -> AbstractContextManager[object]:
        """May be entered again inside, also where the manager's own may not."""
        return self._turn


class _Faults:
    """Catches exceptions, and tells of the 1st, 2nd, 4th, 8th … of each method: some are called thousands of times a step."""

    def __init__(self) -> None:
        self._counts: Counter[str] = Counter()

    def guard(self, default: D, call: Callable[[], R], name: str) -> R | D:
        """What the call returns, or the default."""
        try:
            return call()
        except Exception as error:  # of a module from outside
            self.tell(name, error)
            return default

    def tell(self, name: str, error: Exception) -> None:
        """The method failed."""
        self._counts[name] += 1
        count = self._counts[name]
        if count & (count - 1) == 0:
            logger.error(
                "KV offload: %s of the offloading manager failed, time %d", name, count, exc_info=error
            )


class _Turn:
    """The manager's lock, entered by the outermost call alone."""

    def __init__(self, manager: OffloadingManager, faults: _Faults) -> None:
        self._manager = manager
        self._faults = faults
        self._depth = 0
        self._held = ExitStack()

    def __enter__(self) -> _Turn:
        if not self._depth:
            self._faults.guard(None, lambda: self._held.enter_context(self._manager.lock), "lock")
        self._depth += 1
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._depth -= 1
        if not self._depth:
            self._faults.guard(None, self._held.close, "lock")


def _a(kind: type[R], answer: R) -> R:
    if not isinstance(answer, kind):
        raise TypeError(f"expected {kind.__name__}, got {answer!r}")
    return answer


def _plain_event(event: OffloadingEvent) -> OffloadingEvent:
    _a(str, _a(OffloadingEvent, event).medium)
    return replace(event, keys=_keys(event.keys))


def _keys(given: Iterable[OffloadKey]) -> list[OffloadKey]:
    keys = list(given)
    for key in keys:
        _a(bytes, key)
    return keys
