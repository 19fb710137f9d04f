"""A manager from outside whose faults stay its own: no exception of it reaches the scheduler.

Owns what counts as the answer where there was none. It must not know what the manager does. Layer L4.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Mapping
from contextlib import AbstractContextManager
from typing import ParamSpec, TypeVar

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

P = ParamSpec("P")
R = TypeVar("R")
D = TypeVar("D")


class GuardedManager(OffloadingManager):
    """Passes every call on. What fails is logged and counts as a miss, a refusal, or nothing; only a load that cannot be
    prepared is told, as the exception that it is."""

    def __init__(self, manager: OffloadingManager) -> None:
        self.inner = manager

    def lookup(self, key: OffloadKey, ctx: ReqContext) -> LookupResult:
        return _guard(LookupResult.MISS, self.inner.lookup, key, ctx)

    def prepare_load(self, keys: Collection[OffloadKey], ctx: ReqContext) -> LoadStoreSpec:
        return self.inner.prepare_load(keys, ctx)

    def prepare_store(self, keys: Collection[OffloadKey], ctx: ReqContext) -> PrepareStoreOutput | None:
        return _guard(None, self.inner.prepare_store, keys, ctx)

    def on_new_request(self, ctx: ReqContext) -> RequestOffloadingContext:
        return _guard(RequestOffloadingContext(), self.inner.on_new_request, ctx)

    def get_load_source(self, key: OffloadKey, ctx: ReqContext) -> tuple[Medium, Locality] | None:
        return _guard(None, self.inner.get_load_source, key, ctx)

    def touch(self, keys: Collection[OffloadKey], ctx: ReqContext) -> None:
        _guard(None, self.inner.touch, keys, ctx)

    def complete_load(self, keys: Collection[OffloadKey], ctx: ReqContext) -> None:
        _guard(None, self.inner.complete_load, keys, ctx)

    def complete_store(self, keys: Collection[OffloadKey], ctx: ReqContext, success: bool = True) -> None:
        _guard(None, self.inner.complete_store, keys, ctx, success)

    def on_request_finished(self, ctx: ReqContext) -> None:
        _guard(None, self.inner.on_request_finished, ctx)

    def take_events(self) -> Iterable[OffloadingEvent]:
        return _guard((), lambda: tuple(self.inner.take_events()))

    def on_schedule_end(self, ctx: ScheduleEndContext) -> None:
        _guard(None, self.inner.on_schedule_end, ctx)

    def has_pending_work(self) -> bool:
        return _guard(False, self.inner.has_pending_work)

    def reset_cache(self) -> None:
        _guard(None, self.inner.reset_cache)

    def on_reset_flushed(self) -> None:
        _guard(None, self.inner.on_reset_flushed)

    def get_stats(self) -> Figures | None:
        return _guard(None, self.inner.get_stats)

    def config_info(self) -> Mapping[str, str]:
        return _guard({}, self.inner.config_info)

    def shutdown(self) -> None:
        _guard(None, self.inner.shutdown)

    @property
    def lock(self) -> AbstractContextManager[object]:
        return self.inner.lock


def _guard(default: D, method: Callable[P, R], *args: P.args, **kwargs: P.kwargs) -> R | D:
    try:
        return method(*args, **kwargs)
    except Exception:  # of a module from outside
        logger.exception("KV offload: %s of the offloading manager failed", method.__name__)
        return default
