"""A scheduler in miniature that tests steer by hand: it gives out blocks and writes scheduler outputs for a worker.

Blocks come in shuffled order and are poisoned when they are free, so that reading what was never written shows as NaN.
Recurrent-state groups follow the rules of the "align" mode: a state at the end of each chunk, earlier columns null.
"""

from __future__ import annotations

import math
import random
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import torch

from tests.helpers.steps import cached_requests, new_request, step_output
from vllm.config import VllmConfig
from vllm.sampling_params import SamplingParams
from vllm.v1.core.kv_cache_planning import get_global_kv_cache_groups, get_kv_cache_configs
from vllm.v1.core.sched.output import GrammarOutput, SchedulerOutput
from vllm.v1.kv_cache_interface import KVCacheConfig, KVCacheSpec
from vllm.v1.outputs import ModelRunnerOutput
from vllm.v1.worker.cpu_worker import CPUWorker

POISON = -1


def start_worker(config: VllmConfig) -> tuple[CPUWorker, KVCacheConfig]:
    """A CPU worker after its whole start-up, and the plan of its KV cache."""
    worker = CPUWorker(config, 0, 0, "", True)
    worker.init_device()
    worker.load_model()
    specs = [worker.get_kv_cache_spec()]
    groups = get_global_kv_cache_groups(config, specs)
    worker.set_kv_cache_layout("BLHNC", 1)
    plan = get_kv_cache_configs(config, specs, [worker.determine_available_memory()], groups)[0]
    worker.initialize_from_config(plan)
    worker.compile_or_warm_up_model()
    return worker, plan


@dataclass
class Hand:
    """One request: what the scheduler would know about it."""

    req_id: str
    prompt: list[int]
    params: SamplingParams
    outputs: list[int] = field(default_factory=list)
    computed: int = 0
    tables: list[list[int]] = field(default_factory=list)
    is_known: bool = False
    was_preempted: bool = False

    @property
    def tokens(self) -> list[int]:
        return [*self.prompt, *self.outputs]


class HandScheduler:
    """`step` schedules tokens of requests, runs the worker and books the sampled tokens."""

    def __init__(self, worker: CPUWorker, plan: KVCacheConfig, seed: int = 0) -> None:
        self.worker = worker
        self.specs: list[KVCacheSpec] = [group.kv_cache_spec.kind_spec for group in plan.kv_cache_groups]
        self.rng = random.Random(seed)
        self.free = list(range(1, plan.num_blocks))
        self.rng.shuffle(self.free)
        self.references: dict[int, int] = {}
        self.requests: dict[str, Hand] = {}
        self.finished: set[str] = set()
        self.preempted: set[str] = set()
        self.last_output: ModelRunnerOutput | None = None
        pages = worker.model_runner.pages
        assert pages is not None
        self.raw = pages.raw
        for block in self.free:
            self._poison(block)

    @property
    def block_unit(self) -> int:
        """Tokens after which every shareable group starts a new block."""
        return math.lcm(*(spec.block_size for spec in self.specs if not self._is_ring(spec)))

    # -- blocks -----------------------------------------------------------------------------------

    def _poison(self, block: int) -> None:
        for tensor in self.raw.values():
            tensor[block] = POISON

    def _take(self) -> int:
        block = self.free.pop()
        self.references[block] = 1
        return block

    def _drop(self, block: int) -> None:
        if block == 0:
            return
        self.references[block] -= 1
        if self.references[block] == 0:
            self._poison(block)
            self.free.insert(self.rng.randrange(len(self.free) + 1), block)

    @staticmethod
    def _is_state(spec: KVCacheSpec) -> bool:
        return not spec.uses_slot_mapping and spec.tokens_per_state <= 0

    @staticmethod
    def _is_ring(spec: KVCacheSpec) -> bool:
        return not spec.uses_slot_mapping and spec.tokens_per_state > 0

    def _grow(self, request: Hand, length: int) -> list[list[int]]:
        """Blocks for `length` tokens; returns what was added per group."""
        added = []
        for spec, table in zip(self.specs, request.tables, strict=True):
            before = len(table)
            wanted = 1 if self._is_ring(spec) else -(-length // spec.block_size)
            if self._is_state(spec):
                table.extend([0] * (wanted - before - 1))
            while len(table) < wanted:
                table.append(self._take())
            added.append(table[before:])
        return added

    def release(self, request: Hand) -> None:
        """Take all blocks away."""
        for table in request.tables:
            for block in table:
                self._drop(block)
        request.tables = []

    # -- requests ---------------------------------------------------------------------------------

    def add(self, req_id: str, prompt: Sequence[int], params: SamplingParams | None = None) -> Hand:
        """A new request; its first `step` introduces it to the worker."""
        request = Hand(req_id, list(prompt), params or SamplingParams(temperature=0.0, max_tokens=None))
        request.tables = [[] for _ in self.specs]
        self.requests[req_id] = request
        return request

    def share_prefix(self, req_id: str, source: str, num_tokens: int) -> None:
        """Start a new request on the blocks that hold the first `num_tokens` tokens of another one."""
        request, owner = self.requests[req_id], self.requests[source]
        assert request.prompt[:num_tokens] == owner.tokens[:num_tokens]
        for index, spec in enumerate(self.specs):
            if self._is_ring(spec):
                continue
            assert num_tokens % spec.block_size == 0
            shared = owner.tables[index][: num_tokens // spec.block_size]
            if self._is_state(spec):
                assert shared[-1] != 0
                shared = [0] * (len(shared) - 1) + shared[-1:]
            for block in shared:
                if block:
                    self.references[block] += 1
            request.tables[index] = list(shared)
        request.computed = num_tokens

    def preempt(self, req_id: str) -> None:
        """Take a request's blocks; the next step tells the worker."""
        request = self.requests[req_id]
        self.release(request)
        request.tables = [[] for _ in self.specs]
        request.computed, request.is_known, request.was_preempted = 0, False, True
        self.preempted.add(req_id)

    def finish(self, req_id: str) -> Hand:
        """End (or abort) a request; the next step tells the worker."""
        request = self.requests.pop(req_id)
        self.release(request)
        if request.is_known or request.was_preempted:
            self.finished.add(req_id)
        return request

    # -- steps ------------------------------------------------------------------------------------

    def build(self, scheduled: dict[str, int], **changes: Any) -> SchedulerOutput:
        """The scheduler output for these tokens; requests count them as computed at once."""
        new, cached = [], []
        for req_id, count in scheduled.items():
            request = self.requests[req_id]
            added = self._grow(request, request.computed + count)
            if not request.is_known:
                prefill = request.tokens if request.was_preempted else None
                tables = [list(table) for table in request.tables]
                new.append(
                    new_request(req_id, request.prompt, tables, request.params, request.computed, prefill)
                )
                request.is_known = True
            else:
                blocks = added if any(added) else None
                cached.append((req_id, blocks, request.computed, len(request.outputs)))
            request.computed += count
        output = step_output(
            scheduled,
            new,
            cached_requests(cached),
            finished_req_ids=self.finished,
            preempted_req_ids=self.preempted or None,
            **changes,
        )
        self.finished, self.preempted = set(), set()
        return output

    def step(
        self, scheduled: dict[str, int], grammar: GrammarOutput | None = None, **changes: Any
    ) -> dict[str, int]:
        """Run one step; the sampled token of every request that sampled."""
        output = self.worker.execute_model(self.build(scheduled, **changes))
        if output is None:
            output = self.worker.sample_tokens(grammar)
        assert output is not None
        self.last_output = output
        sampled = {}
        for req_id, tokens in zip(output.req_ids, output.sampled_token_ids, strict=True):
            request = self.requests[req_id]
            if tokens:
                assert request.computed == len(request.tokens)
                request.outputs += tokens
                sampled[req_id] = tokens[0]
        return sampled

    def run_alone(self, req_id: str, num_tokens: int, chunk: int | None = None) -> list[int]:
        """Decode one request until it has `num_tokens` outputs."""
        request = self.requests[req_id]
        while len(request.outputs) < num_tokens:
            left = len(request.tokens) - request.computed
            self.step({req_id: min(left, chunk or left)})
        return request.outputs


def poison_is_intact(scheduler: HandScheduler) -> bool:
    """Whether nothing was written to free blocks or to the null block."""
    pages = scheduler.raw.values()
    free = torch.tensor(scheduler.free)
    return all(bool((tensor[free] == POISON).all()) for tensor in pages) and not any(
        bool(tensor[0].any()) for tensor in pages
    )
