"""An engine in miniature for offload tests: real scheduler, KV manager, connector halves and torch memory.

Only the model is fake: it writes, for every token slot, bytes that depend on the whole prefix, and checks before each
forward that every slot it is to read holds the right ones. Copies happen when the test says so.
"""

from __future__ import annotations

import copy
from collections.abc import Sequence
from dataclasses import dataclass, field
from types import SimpleNamespace
from typing import Any

import torch

from tests.helpers.offload_parts import (
    BLOCK,
    STEP_FAILED,
    Byte,
    Captured,
    HeldMover,
    full,
    mamba,
    next_token,
    prefix_bytes,
    rig_config,
    ring,
    window,
)
from tests.helpers.sched import ManualClock, NoGrammar
from vllm.config import KVTransferConfig, VllmConfig
from vllm.distributed.kv_transfer.kv_connector.factory import KVConnectorFactory
from vllm.distributed.kv_transfer.kv_connector.utils import KVOutputAggregator
from vllm.distributed.kv_transfer.kv_connector.v1.base import KVConnectorBase_V1, KVConnectorRole
from vllm.distributed.kv_transfer.kv_connector.v1.multi_connector import MultiConnector
from vllm.distributed.kv_transfer.kv_connector.v1.simple_cpu_offload_connector import (
    SimpleCPUOffloadConnector,
)
from vllm.sampling_params import SamplingParams
from vllm.utils.hashing import sha256
from vllm.v1.core.block_hash import make_block_hash_with_group_id
from vllm.v1.core.kv_cache_planning import DefaultKVCacheConfigBuilder
from vllm.v1.core.kv_cache_sizes import resolve_cache_hit_alignment_tokens, resolve_kv_cache_block_sizes
from vllm.v1.core.kv_cache_utils import get_request_block_hasher, init_none_hash
from vllm.v1.core.sched.async_scheduler import AsyncScheduler
from vllm.v1.core.sched.output import SchedulerOutput
from vllm.v1.core.sched.scheduler import Scheduler
from vllm.v1.kv_cache_interface import (
    CircularBufferSpec,
    KVCacheGroupSpec,
    KVCacheSpec,
    MambaSpec,
    SlidingWindowSpec,
)
from vllm.v1.outputs import ModelRunnerOutput
from vllm.v1.request import Request, RequestStatus
from vllm.v1.simple_kv_offload.disk_tier import DiskChain
from vllm.v1.simple_kv_offload.manager import SimpleCPUOffloadScheduler
from vllm.v1.simple_kv_offload.worker import SimpleCPUOffloadWorker
from vllm.v1.worker.kv_connector_step import ActiveKVConnector


@dataclass
class _Row:
    """What the fake workers keep of a request."""

    tokens: list[int]
    tables: list[list[int]]


@dataclass
class Rig:
    """See the module. `host_blocks` counts the null slot; `held=False` copies on real threads instead."""

    specs: Sequence[KVCacheSpec] = ()
    device_blocks: int = 32
    host_blocks: int = 32
    lazy: bool = False
    ranks: int = 1
    held: bool = True
    events: bool = False
    extra: dict[str, Any] = field(default_factory=dict)
    connector_config: KVTransferConfig | None = None
    config_changes: dict[str, Any] = field(default_factory=dict)

    def __post_init__(self) -> None:
        init_none_hash(sha256)
        self.specs = list(self.specs) or [full()]
        # Nothing is computed here, so what a test sees must not depend on which tier a loaded machine finds slow.
        choices = {"lazy_offload": self.lazy, "decline_slow_tier": "off"}
        extra = {"num_cpu_blocks": self.host_blocks, **choices, **self.extra}
        self.config = rig_config(
            ranks=self.ranks,
            block=self.specs[0].block_size,
            events=self.events,
            extra=extra,
            **self.config_changes,
        )
        if self.connector_config is not None:
            self.config.kv_transfer_config = self.connector_config
        self.config.cache_config.num_gpu_blocks = self.device_blocks
        groups = [KVCacheGroupSpec([f"layer{i}"], spec) for i, spec in enumerate(self.specs)]
        self.kv_config = DefaultKVCacheConfigBuilder().get_kv_cache_config_from_groups(
            self.config, groups, self.device_blocks
        )
        block_size, hash_size = resolve_kv_cache_block_sizes(self.kv_config, self.config)
        self.kv_config.hash_block_size = hash_size
        self.kv_config.cache_hit_alignment_tokens = resolve_cache_hit_alignment_tokens(
            self.kv_config, self.config, block_size, hash_size
        )
        self.hash_block_size = hash_size
        self.hasher = get_request_block_hasher(hash_size, sha256)
        self.publisher = Captured()
        self.clock = ManualClock()
        self.memories = [self._allocate() for _ in range(self.ranks)]
        self.workers = [self._make_worker(rank) for rank in range(self.ranks)]
        scheduler_cls = AsyncScheduler if self.config.scheduler_config.async_scheduling else Scheduler
        self.scheduler = scheduler_cls(
            vllm_config=self.config,
            kv_cache_config=self.kv_config,
            structured_output_manager=NoGrammar(),  # type: ignore[arg-type]
            block_size=block_size,
            hash_block_size=hash_size,
            clock=self.clock,
            event_publisher=self.publisher,
        )
        connector = self.scheduler.connector
        assert connector is not None
        self.connector = connector
        self.aggregator = KVOutputAggregator.from_connector(connector, self.ranks)
        self.rows: dict[str, _Row] = {}
        self.requests: dict[str, Request] = {}
        self.outputs: dict[str, list[int]] = {}
        self.ends: dict[str, Any] = {}
        self.steps: list[SchedulerOutput] = []
        self._next_id = 0

    # --- construction ---------------------------------------------------------------------------------------------

    def _allocate(self) -> dict[str, torch.Tensor]:
        """One allocation, and per layer the raw view [blocks, page bytes]."""
        size = self.kv_config.kv_cache_tensors[0].size
        memory = torch.full((size,), -1, dtype=torch.int8)
        views = {}
        for tensor in self.kv_config.kv_cache_tensors:
            for index, name in enumerate(tensor.layers):
                page = self.specs[int(name.removeprefix("layer"))].page_size_bytes
                views[name] = memory.as_strided(
                    (self.device_blocks, page), (tensor.block_stride, 1), tensor.page_start(index, 0)
                )
        return views

    def _rank_config(self, rank: int) -> VllmConfig:
        """The configuration as a rank's process has it."""
        # Ranks are processes, elsewhere; here the engine id keeps their files apart.
        config = copy.copy(self.config)
        assert config.kv_transfer_config is not None
        config.kv_transfer_config = copy.copy(config.kv_transfer_config)
        config.kv_transfer_config.engine_id = f"rig{rank}"
        return config

    def _make_worker(self, rank: int) -> ActiveKVConnector:
        config = self._rank_config(rank)
        connector = KVConnectorFactory.create_connector(config, KVConnectorRole.WORKER, self.kv_config)
        connector.register_kv_caches(self.memories[rank])
        if self.held:
            self._hold(connector)
        return ActiveKVConnector(connector)

    def _hold(self, connector: KVConnectorBase_V1) -> None:
        if isinstance(connector, MultiConnector):
            for child in connector.sub_connectors:
                self._hold(child)
        if isinstance(connector, SimpleCPUOffloadConnector):
            worker = connector.worker_handler
            assert worker is not None
            assert worker._backend is not None
            worker._backend.shutdown()
            worker._backend = HeldMover(worker.gpu_kv_caches, worker.cpu_kv_caches)

    @property
    def manager(self) -> SimpleCPUOffloadScheduler:
        assert isinstance(self.connector, SimpleCPUOffloadConnector)
        assert self.connector.scheduler_manager is not None
        return self.connector.scheduler_manager

    def worker(self, rank: int = 0) -> SimpleCPUOffloadWorker:
        connector = self.workers[rank].kv_connector
        assert isinstance(connector, SimpleCPUOffloadConnector)
        assert connector.worker_handler is not None
        return connector.worker_handler

    def mover(self, rank: int = 0) -> HeldMover:
        return mover_of(self.workers[rank].kv_connector)

    @property
    def chain(self) -> DiskChain:
        """The moves to and from the disk below the tier."""
        assert self.manager.chain is not None
        return self.manager.chain

    # --- requests -------------------------------------------------------------------------------------------------

    def make_request(self, prompt: Sequence[int], max_tokens: int = 4, **fields: Any) -> Request:
        """A request that is not added yet."""
        request_id = fields.pop("request_id", f"r{self._next_id}")
        self._next_id += 1
        hint, extra = fields.pop("hint", None), fields.pop("extra", None)
        if hint is not None:
            extra = {"kv_retention": hint}
        params = SamplingParams(max_tokens=max_tokens, temperature=0.0, extra_args=extra)
        request = Request(
            request_id, list(prompt), params, None, arrival_time=float(self._next_id), block_hasher=self.hasher,
            **fields,
        )  # fmt: skip
        self.requests[request_id] = request
        return request

    def add(self, prompt: Sequence[int], max_tokens: int = 4, **fields: Any) -> Request:
        request = self.make_request(prompt, max_tokens, **fields)
        self.scheduler.add_request(request)
        return request

    def abort(self, request: Request) -> None:
        self.scheduler.finish_requests(request.request_id, RequestStatus.FINISHED_ABORTED)

    # --- steps ----------------------------------------------------------------------------------------------------

    def step(self, *, copies: bool = True, nan: Sequence[str] = ()) -> SchedulerOutput:
        """Schedule, run, and apply one step; with `copies`, all copies ordered so far are carried out first."""
        output = self.scheduler.schedule()
        self.finish_step(output, copies=copies, nan=nan)
        return output

    def finish_step(self, output: SchedulerOutput, *, copies: bool = True, nan: Sequence[str] = ()) -> None:
        """Run and apply a step that was scheduled."""
        self.steps.append(output)
        sampled = self._follow_and_forward(output, copies)
        reports = [active.finish(output.finished_req_ids) for active in self.workers]
        req_ids = list(output.num_scheduled_tokens)
        results: list[ModelRunnerOutput | None] = [
            ModelRunnerOutput(
                req_ids=list(req_ids),
                req_id_to_index={req_id: i for i, req_id in enumerate(req_ids)},
                sampled_token_ids=[list(sampled.get(req_id, [])) for req_id in req_ids],
                num_nans_in_logits={req_id: 7 if req_id in nan else 0 for req_id in req_ids},
                kv_connector_output=report,
            )
            for report in reports
        ]
        result = self.aggregator.aggregate(results)
        assert result is not None
        self._collect(self.scheduler.update_from_output(output, result))

    def fail_step(self, scheduled: SchedulerOutput | None = None) -> SchedulerOutput:
        """A step whose execution raises before the forward, scheduled now or earlier."""
        output = self.scheduler.schedule() if scheduled is None else scheduled
        self.steps.append(output)
        self._follow(output)
        for active in self.workers:
            active.begin(output)
            active.abandon()
        self._collect(self.scheduler.fail_step(output, STEP_FAILED))
        return output

    def run(self, max_steps: int = 200) -> int:
        """Step until the engine is idle; returns the number of steps."""
        for count in range(max_steps):
            if not self.scheduler.has_requests():
                return count
            self.step()
        raise AssertionError(f"still busy after {max_steps} steps: {self.scheduler.requests}")

    def generate(self, prompt: Sequence[int], max_tokens: int = 4, **fields: Any) -> Request:
        """Run one request to its end; its output must be what the model says without any cache."""
        request = self.add(prompt, max_tokens, **fields)
        self.run()
        self.check_output(request)
        return request

    def check_output(self, request: Request) -> None:
        """The finished request's tokens are those of an engine without caches."""
        tokens = list(request.prompt_token_ids or ())
        for token in self.outputs.get(request.request_id, []):
            assert token == next_token(tokens), f"{request.request_id} went astray"
            tokens.append(token)

    def _collect(self, messages: dict[int, Any]) -> None:
        for message in messages.values():
            for output in message.outputs:
                self.outputs.setdefault(output.request_id, []).extend(output.new_token_ids)
                if output.finished:
                    self.ends[output.request_id] = output

    def _carry_out(self, connector: KVConnectorBase_V1) -> None:
        """Let every copy that was ordered happen now."""
        if isinstance(connector, MultiConnector):
            for child in connector.sub_connectors:
                self._carry_out(child)
        if not isinstance(connector, SimpleCPUOffloadConnector) or connector.worker_handler is None:
            return
        mover = connector.worker_handler._backend
        if isinstance(mover, HeldMover):
            mover.release()
        connector.worker_handler.drain()

    # --- the fake model -------------------------------------------------------------------------------------------

    def _follow_and_forward(self, output: SchedulerOutput, copies: bool) -> dict[str, list[int]]:
        self._follow(output)
        for rank, (active, memory) in enumerate(zip(self.workers, self.memories, strict=True)):
            active.begin(output)
            self._work_on_blocks(memory, output)
            active.pre_forward(output, SimpleNamespace(), {})  # type: ignore[arg-type]
            active.wait_for_loads(memory)
            for req_id, start, end in self._spans(output):
                self._forward(memory, rank, self.rows[req_id], start, end)
            active.save_layers(memory, {})
            active.end_forward()
            active.kv_connector.wait_for_save()
        if copies:
            for active in self.workers:
                self._carry_out(active.kv_connector)
        sampled = {}
        for req_id, _, end in self._spans(output):
            row = self.rows[req_id]
            if end == len(row.tokens):
                token = next_token(row.tokens)
                row.tokens.append(token)
                sampled[req_id] = [token]
        return sampled

    def _follow(self, output: SchedulerOutput) -> None:
        for req_id in (*output.finished_req_ids, *(output.preempted_req_ids or ())):
            self.rows.pop(req_id, None)
        for new in output.scheduled_new_reqs:
            tokens = new.prefill_token_ids or new.prompt_token_ids or []
            self.rows[new.req_id] = _Row(list(tokens), [list(ids) for ids in new.block_ids])
        cached = output.scheduled_cached_reqs
        for req_id, kept in zip(cached.req_ids, cached.num_output_tokens, strict=True):
            # The scheduler may not have taken what a step sampled, as after a load within the step that failed.
            del self.rows[req_id].tokens[self.requests[req_id].num_prompt_tokens + kept :]
        for req_id, added in zip(cached.req_ids, cached.new_block_ids, strict=True):
            for table, ids in zip(self.rows[req_id].tables, added or (), strict=False):
                table.extend(ids)

    @staticmethod
    def _spans(output: SchedulerOutput) -> list[tuple[str, int, int]]:
        starts = {new.req_id: new.num_computed_tokens for new in output.scheduled_new_reqs}
        cached = output.scheduled_cached_reqs
        starts |= dict(zip(cached.req_ids, cached.num_computed_tokens, strict=True))
        return [(r, starts[r], starts[r] + count) for r, count in output.num_scheduled_tokens.items()]

    def _work_on_blocks(self, memory: dict[str, torch.Tensor], output: SchedulerOutput) -> None:
        for pages in memory.values():
            for block in output.new_block_ids_to_zero or ():
                pages[block] = 0
            for source, target in output.kv_cache_block_copies or ():
                pages[target] = pages[source]

    def place(self, rank: int, group: int) -> str:
        """Whose part of a group's bytes a rank has; see `prefix_bytes`."""
        return f"shard {self.specs[group].tp_shard(rank, self.ranks, 1)} group {group}"

    def _forward(self, memory: dict[str, torch.Tensor], rank: int, row: _Row, start: int, end: int) -> None:
        for group, spec in enumerate(self.specs):
            pages, table = memory[f"layer{group}"], row.tables[group]
            place = self.place(rank, group)
            if isinstance(spec, CircularBufferSpec):
                continue
            if isinstance(spec, MambaSpec):
                self._run_state(pages, table, spec, row.tokens, (start, end), place)
            else:
                self._run_attention(pages, table, spec, row.tokens, (start, end), place)

    @staticmethod
    def _run_state(
        pages: torch.Tensor, table: list[int], spec: KVCacheSpec, tokens: list[int], span: tuple[int, int],
        place: str,
    ) -> None:  # fmt: skip
        start, end = span
        size = pages.shape[1]
        if start:
            page = pages[table[(start - 1) // spec.block_size]]
            assert torch.equal(page, prefix_bytes(tokens[:start], place, size)), f"wrong state at {start}"
        block = table[(end - 1) // spec.block_size]
        assert block != 0, "the model writes a state to the null block"
        pages[block] = prefix_bytes(tokens[:end], place, size)

    @staticmethod
    def _run_attention(
        pages: torch.Tensor, table: list[int], spec: KVCacheSpec, tokens: list[int], span: tuple[int, int],
        place: str,
    ) -> None:  # fmt: skip
        start, end = span
        size = pages.shape[1] // spec.block_size
        first = max(0, start - spec.sliding_window + 1) if isinstance(spec, SlidingWindowSpec) else 0
        for position in range(first, start):
            block, slot = table[position // spec.block_size], position % spec.block_size
            found = pages[block, slot * size : (slot + 1) * size]
            wanted = prefix_bytes(tokens[: position + 1], place, size)
            assert torch.equal(found, wanted), f"wrong bytes for position {position} in block {block}"
        for position in range(start, end):
            block, slot = table[position // spec.block_size], position % spec.block_size
            assert block != 0, "the model writes to the null block"
            pages[block, slot * size : (slot + 1) * size] = prefix_bytes(tokens[: position + 1], place, size)

    # --- views ----------------------------------------------------------------------------------------------------

    def key(self, request: Request, index: int, group: int = 0) -> Any:
        """The key of block `index` of a group."""
        per_block = self.specs[group].block_size // self.hash_block_size
        return make_block_hash_with_group_id(request.block_hashes[(index + 1) * per_block - 1], group)

    def in_tier(self, request: Request, group: int = 0) -> list[int]:
        """Indices of the request's full blocks that the tier holds."""
        count = request.num_tokens // self.specs[group].block_size
        return [i for i in range(count) if self.manager.tier.contains(self.key(request, i, group))]

    def on_disk(self, request: Request, group: int = 0) -> list[int]:
        """Indices of the request's full blocks that the disk below the tier holds."""
        count = request.num_tokens // self.specs[group].block_size
        return [i for i in range(count) if self.chain.disk.contains(self.key(request, i, group))]

    def assert_at_rest(self) -> None:
        """No reference, lease, transfer or entry is left anywhere."""
        pool, tier = self.scheduler.kv_cache_manager.block_pool, self.manager.tier.pool
        assert not pool.leases
        assert not tier.leases
        assert pool.get_num_free_blocks() == self.device_blocks - 1
        assert tier.get_num_free_blocks() == tier.num_gpu_blocks - 1
        side, loads = self.manager.store_side, self.manager.load_side
        assert not side.states
        assert not side.requests
        assert not side.planned
        assert not side.in_flight
        assert len(side.table) == 0
        assert len(side.patrol) == 0
        assert not loads.loads
        assert not loads.abandoned
        assert len(self.manager.promises) == 0
        chain = self.manager.chain
        if chain is not None:
            assert not chain.disk.pool.leases
            assert not chain.waiting
            assert not chain.has_work
        assert not self.manager.has_pending_work()

    def evict_device(self) -> None:
        """Throw everything out of the device tier (nothing may be held)."""
        assert self.scheduler.kv_cache_manager.reset_prefix_cache()

    def close(self) -> None:
        for active in self.workers:
            active.kv_connector.shutdown()


def mover_of(connector: object) -> HeldMover:
    assert isinstance(connector, SimpleCPUOffloadConnector)
    assert connector.worker_handler is not None
    assert isinstance(connector.worker_handler._backend, HeldMover)
    return connector.worker_handler._backend


def prompt(length: int, seed: int = 0) -> list[int]:
    """Tokens that no other seed shares."""
    return [seed * 1000 + i for i in range(length)]


__all__ = [
    "BLOCK", "STEP_FAILED", "Byte", "HeldMover", "Rig", "full", "mamba", "mover_of", "next_token", "prompt",
    "rig_config", "ring", "window",
]  # fmt: skip
