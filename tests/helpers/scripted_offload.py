"""An offloading spec from outside that does what a test tells it, and keeps books of what it is asked.

Manager and workers share one `Script`, since ranks are objects here. Jobs run when somebody waits for them, or at `run`.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Collection, Iterable, Mapping
from contextlib import AbstractContextManager
from dataclasses import dataclass, field
from threading import Lock
from typing import Any

import torch

from vllm.config import KVTransferConfig
from vllm.v1.kv_offload.base import (
    BlockIDsLoadStoreSpec,
    CanonicalKVCaches,
    GPULoadStoreSpec,
    LoadStoreSpec,
    Locality,
    LookupResult,
    Medium,
    OffloadingCounterMetadata,
    OffloadingEvent,
    OffloadingGaugeMetadata,
    OffloadingHistogramMetadata,
    OffloadingManager,
    OffloadingMetricMetadata,
    OffloadingSpec,
    OffloadingWorker,
    OffloadKey,
    OffloadPolicy,
    PrepareStoreOutput,
    ReqContext,
    RequestOffloadingContext,
    ScheduleEndContext,
    TransferResult,
)
from vllm.v1.kv_offload.config import OffloadingConfig


class ShelfSpec(BlockIDsLoadStoreSpec):
    @staticmethod
    def medium() -> str:
        return "SHELF"


@dataclass
class Script:
    """What the plug-in is to do, and what it was asked."""

    capacity: int = 64
    policy: OffloadPolicy = OffloadPolicy.CHUNK_LEVEL
    source: tuple[Medium, Locality] | None = None
    raises: set[str] = field(default_factory=set)
    """Methods that raise."""
    answers: dict[str, Any] = field(default_factory=dict)
    """Methods that return this instead."""
    answer: Callable[[OffloadKey], LookupResult | None] = lambda key: None
    """The answer to a look-up; None = the truth."""
    choose: Callable[[list[OffloadKey]], list[OffloadKey]] = lambda keys: keys
    refuses: Callable[[], bool] = lambda: False
    """Whether a worker refuses the job that it is handed."""
    fails: Callable[[], bool] = lambda: False
    """Whether a job fails that is run."""

    calls: Counter[str] = field(default_factory=Counter)
    log: list[tuple[Any, ...]] = field(default_factory=list)
    errors: list[str] = field(default_factory=list)
    configs: list[OffloadingConfig] = field(default_factory=list)
    managers: list[ScriptedManager] = field(default_factory=list)
    workers: list[ScriptedWorker] = field(default_factory=list)

    def enter(self, name: str) -> None:
        self.calls[name] += 1
        if name in self.raises:
            raise RuntimeError(f"{name} was told to fail")

    @property
    def manager(self) -> ScriptedManager:
        (manager,) = self.managers
        return manager


SCRIPT = Script()


def new_script(**what: Any) -> Script:
    """The script of the plug-ins made from now on."""
    global SCRIPT  # specs are made from a name
    SCRIPT = Script(**what)
    return SCRIPT


def scripted(**extra: Any) -> KVTransferConfig:
    return KVTransferConfig(
        kv_connector="OffloadingConnector",
        kv_role="kv_both",
        kv_connector_extra_config={
            "spec_name": "ScriptedSpec",
            "spec_module_path": "tests.helpers.scripted_offload",
            **extra,
        },
        kv_load_failure_policy="recompute",
    )


class ScriptedManager(OffloadingManager):
    """Content by key on numbered places; every pair of calls is checked."""

    def __init__(self, script: Script, *, has_events: bool) -> None:
        self.script = script
        self.has_events = has_events
        self.free = list(range(script.capacity))
        self.ready: dict[OffloadKey, int] = {}
        self.storing: dict[OffloadKey, int] = {}
        self.reading: Counter[OffloadKey] = Counter()
        self.leaving: list[int] = []
        self.live: set[str] = set()
        self.events: list[OffloadingEvent] = []
        self.inner_lock = Lock()
        self.is_down = False

    def enter(self, name: str) -> Any:
        if not self.inner_lock.locked():
            self.script.errors.append(f"{name} outside the lock")
        self.script.enter(name)
        return self.script.answers.get(name, self)

    def tell(self, keys: Iterable[OffloadKey], *, removed: bool) -> None:
        if self.has_events and (told := list(keys)):
            self.events.append(OffloadingEvent(told, "SHELF", removed, locality="REMOTE", ownership="me"))

    def drop(self, keys: Iterable[OffloadKey]) -> list[OffloadKey]:
        """Content goes by itself."""
        gone = [key for key in keys if key in self.ready and not self.reading[key]]
        self.free += [self.ready.pop(key) for key in gone]
        self.tell(gone, removed=True)
        return gone

    def lookup(self, key: OffloadKey, ctx: ReqContext) -> LookupResult:
        if (answer := self.enter("lookup")) is not self:
            return answer
        told = self.script.answer(key)
        if told is not None:
            return told
        if key in self.ready:
            return LookupResult.HIT
        return LookupResult.HIT_PENDING if key in self.storing else LookupResult.MISS

    def prepare_load(self, keys: Collection[OffloadKey], ctx: ReqContext) -> LoadStoreSpec:
        if (answer := self.enter("prepare_load")) is not self:
            return answer
        if not keys:
            self.script.errors.append("a load of nothing")
        places = [self.ready[key] for key in keys]
        self.reading.update(keys)
        self.script.log.append(("prepare_load", tuple(keys), ctx.req_id))
        return ShelfSpec(places)

    def complete_load(self, keys: Collection[OffloadKey], ctx: ReqContext) -> None:
        self.enter("complete_load")
        for key in keys:
            if self.reading[key] <= 0:
                self.script.errors.append("a load completed that was not prepared")
            self.reading[key] -= 1

    def prepare_store(self, keys: Collection[OffloadKey], ctx: ReqContext) -> PrepareStoreOutput | None:
        if (answer := self.enter("prepare_store")) is not self:
            return answer
        self.script.log.append(("prepare_store", tuple(keys), ctx.req_id))
        new = [
            key for key in self.script.choose(list(keys)) if key not in self.ready and key not in self.storing
        ]
        idle = [key for key in self.ready if not self.reading[key] and key not in keys]
        gone = idle[: max(0, len(new) - len(self.free))]
        if len(new) > len(self.free) + len(gone):
            return None
        self.drop(gone)
        for key in new:
            self.storing[key] = self.free.pop()
        return PrepareStoreOutput(new, ShelfSpec(self.storing[key] for key in new), gone)

    def complete_store(self, keys: Collection[OffloadKey], ctx: ReqContext, success: bool = True) -> None:
        self.enter("complete_store")
        self.script.log.append(("complete_store", tuple(keys), success))
        for key in keys:
            if key not in self.storing:
                self.script.errors.append("a store completed that was not prepared")
                continue
            place = self.storing.pop(key)
            if success:
                self.ready[key] = place
            else:
                self.free.append(place)
        if success:
            self.tell(keys, removed=False)

    def on_new_request(self, ctx: ReqContext) -> RequestOffloadingContext:
        if ctx.req_id in self.live:
            self.script.errors.append(f"{ctx.req_id} is new twice")
        if (answer := self.enter("on_new_request")) is not self:
            return answer
        self.live.add(ctx.req_id)
        return RequestOffloadingContext(self.script.policy)

    def on_request_finished(self, ctx: ReqContext) -> None:
        self.live.discard(ctx.req_id)
        self.enter("on_request_finished")

    def get_load_source(self, key: OffloadKey, ctx: ReqContext) -> tuple[Medium, Locality] | None:
        self.enter("get_load_source")
        return self.script.source

    def touch(self, keys: Collection[OffloadKey], ctx: ReqContext) -> None:
        self.enter("touch")

    def take_events(self) -> Iterable[OffloadingEvent]:
        if (answer := self.enter("take_events")) is not self:
            return answer
        events, self.events = self.events, []
        return events

    def on_schedule_end(self, ctx: ScheduleEndContext) -> None:
        self.script.log.append(("step", tuple(ctx.new_req_ids), tuple(ctx.preempted_req_ids)))
        self.enter("on_schedule_end")

    def has_pending_work(self) -> bool:
        self.enter("has_pending_work")
        return False

    def reset_cache(self) -> None:
        self.enter("reset_cache")
        self.tell(self.ready, removed=True)
        for key, place in self.ready.items():
            (self.leaving if self.reading[key] else self.free).append(place)
        self.leaving += self.storing.values()
        self.ready.clear()
        self.storing.clear()
        self.reading.clear()

    def on_reset_flushed(self) -> None:
        self.enter("on_reset_flushed")
        self.free += self.leaving
        self.leaving = []

    def get_stats(self) -> Any:
        if (answer := self.enter("get_stats")) is not self:
            return answer
        return {
            "vllm:shelf_lookups_total": {("some",): 2},
            "vllm:shelf_fill": {(): 0.5},
            "vllm:shelf_waits": {(): [0.1, 3.0]},
            "vllm:shelf_unknown": {(): 1},
        }

    def config_info(self) -> Mapping[str, str]:
        if (answer := self.enter("config_info")) is not self:
            return answer
        return {"shelves": str(self.script.capacity)}

    def shutdown(self) -> None:
        self.enter("shutdown")
        self.is_down = True

    @property
    def lock(self) -> AbstractContextManager[object]:
        return self.inner_lock

    def assert_at_rest(self) -> None:
        assert not self.script.errors
        assert not self.storing
        assert not +self.reading
        assert not self.leaving
        assert not self.live
        assert len(self.free) + len(self.ready) == self.script.capacity


@dataclass
class Job:
    is_store: bool
    blocks: GPULoadStoreSpec
    places: list[int]
    expedited: bool


class ScriptedWorker(OffloadingWorker):
    """Copies whole blocks of all tensors to numbered places of its own."""

    def __init__(self, script: Script, caches: CanonicalKVCaches) -> None:
        self.script = script
        self.caches = caches
        self.shelf: dict[int, list[torch.Tensor]] = {}
        self.jobs: dict[int, Job] = {}
        self.all_jobs: dict[int, Job] = {}
        self.results: list[TransferResult] = []
        self.is_down = False

    def submit_store(self, job_id: int, src: GPULoadStoreSpec, dst: LoadStoreSpec) -> bool:
        return self._submit(job_id, "submit_store", src, dst, False)

    def submit_load(
        self, job_id: int, src: LoadStoreSpec, dst: GPULoadStoreSpec, expedited: bool = False
    ) -> bool:
        return self._submit(job_id, "submit_load", dst, src, expedited)

    def _submit(
        self, job_id: int, name: str, blocks: GPULoadStoreSpec, places: LoadStoreSpec, expedited: bool
    ) -> bool:
        self.script.enter(name)
        assert isinstance(places, ShelfSpec)
        if job_id in self.all_jobs or len(places.block_ids) != len(blocks.block_ids):
            self.script.errors.append(f"job {job_id} is wrong")
        if self.script.refuses():
            return False
        job = Job(name == "submit_store", blocks, places.block_ids, expedited)
        self.jobs[job_id] = self.all_jobs[job_id] = job
        return True

    def run(self, count: int | None = None) -> None:
        for job_id in list(self.jobs)[:count]:
            job = self.jobs.pop(job_id)
            ok = not self.script.fails()
            size = 0
            for block, place in zip(job.blocks.block_ids, job.places, strict=True):
                pages = [tensor[block] for tensor in self.caches.tensors]
                size += sum(page.numel() for page in pages)
                if not ok:
                    continue
                if job.is_store:
                    self.shelf[place] = [page.clone() for page in pages]
                else:
                    for page, kept in zip(pages, self.shelf[place], strict=True):
                        page.copy_(kept)
            self.results.append(TransferResult(job_id, ok, size, 0.25))

    def get_finished(self) -> list[TransferResult]:
        self.script.enter("get_finished")
        if "get_finished" in self.script.answers:
            return self.script.answers["get_finished"]
        ended, self.results = self.results, []
        return ended

    def wait(self, job_ids: Collection[int]) -> None:
        self.script.enter("wait")
        self.run()

    def shutdown(self) -> None:
        self.script.enter("worker_shutdown")
        self.is_down = True


class ScriptedSpec(OffloadingSpec):
    def __init__(self, config: OffloadingConfig) -> None:
        super().__init__(config)
        self.script = SCRIPT
        self.script.configs.append(config)

    def get_manager(self) -> OffloadingManager:
        self.script.managers.append(
            ScriptedManager(self.script, has_events=self.config.enable_kv_cache_events)
        )
        return self.script.managers[-1]

    def get_worker(self, kv_caches: CanonicalKVCaches) -> OffloadingWorker:
        self.script.workers.append(ScriptedWorker(self.script, kv_caches))
        return self.script.workers[-1]

    @classmethod
    def build_metric_definitions(cls, extra: Mapping[str, Any]) -> dict[str, OffloadingMetricMetadata]:
        return {
            "vllm:shelf_lookups_total": OffloadingCounterMetadata("Look-ups.", ("kind",)),
            "vllm:shelf_fill": OffloadingGaugeMetadata("Fill."),
            "vllm:shelf_waits": OffloadingHistogramMetadata("Waits.", buckets=(1.0, 2.0)),
        }

    @classmethod
    def config_info_keys(cls, extra: Mapping[str, Any]) -> tuple[str, ...]:
        return ("shelves",)
