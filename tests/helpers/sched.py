"""Small real schedulers for tests: partial configs, requests, and drivers that run them against a fake model."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from types import SimpleNamespace
from typing import Any

from tests.helpers.sched_worker import FakeWorker, next_token
from vllm.outputs import RequestError
from vllm.sampling_params import SamplingParams
from vllm.utils.hashing import sha256
from vllm.v1.core.kv_cache_utils import get_request_block_hasher, init_none_hash
from vllm.v1.core.sched.async_scheduler import AsyncScheduler
from vllm.v1.core.sched.output import SchedulerOutput
from vllm.v1.core.sched.scheduler import Scheduler
from vllm.v1.kv_cache_interface import (
    CircularBufferSpec,
    FullAttentionSpec,
    KVCacheConfig,
    KVCacheGroupSpec,
    KVCacheSpec,
    MambaSpec,
    MLAAttentionSpec,
    SlidingWindowMLASpec,
    SlidingWindowSpec,
)
from vllm.v1.messages import EngineCoreOutput
from vllm.v1.outputs import DraftTokenIds
from vllm.v1.request import Request

BLOCK = 4


@dataclass(frozen=True)
class Bytes:
    """Stands for a dtype: the scheduler's side needs only its size."""

    itemsize: int


BF16 = Bytes(2)
STEP_FAILED = RequestError("step_failed", "the step failed")


class ManualClock:
    """A clock that moves only when it is told to."""

    def __init__(self) -> None:
        self.now = 1000.0

    def monotonic(self) -> float:
        return self.now

    def time(self) -> float:
        return self.now


def full(block: int = BLOCK) -> KVCacheSpec:
    return FullAttentionSpec(block_size=block, num_kv_heads=1, head_size=8, dtype=BF16)


def window(block: int = BLOCK, size: int = 8) -> KVCacheSpec:
    return SlidingWindowSpec(block_size=block, num_kv_heads=1, head_size=8, dtype=BF16, sliding_window=size)


def mamba(block: int = BLOCK) -> KVCacheSpec:
    return MambaSpec(block_size=block, shapes=((2, 2),), dtypes=(BF16,), mamba_cache_mode="align")


def with_draft_rows(spec: KVCacheSpec, num_drafts: int) -> KVCacheSpec:
    """The same cache where steps have that many drafts: a state needs a block for each."""
    return replace(spec, num_speculative_blocks=num_drafts) if isinstance(spec, MambaSpec) else spec


def ring(capacity: int = 8) -> KVCacheSpec:
    return CircularBufferSpec(block_size=capacity, num_kv_heads=1, head_size=8, dtype=BF16)


def compressed(block: int = BLOCK, ratio: int = 4) -> KVCacheSpec:
    return MLAAttentionSpec(block_size=block, num_kv_heads=1, head_size=8, dtype=BF16, tokens_per_state=ratio)


def replayed_window(block: int = BLOCK, size: int = 8) -> KVCacheSpec:
    """A window that no cache keeps: it is computed again after a hit."""
    return SlidingWindowMLASpec(
        block_size=block, num_kv_heads=1, head_size=8, dtype=BF16, sliding_window=size, bounded_replay=True
    )


def kv_config(specs: Sequence[KVCacheSpec], num_blocks: int) -> KVCacheConfig:
    groups = [KVCacheGroupSpec([f"layer{i}"], spec) for i, spec in enumerate(specs)]
    return KVCacheConfig(num_blocks=num_blocks, kv_cache_tensors=[], kv_cache_groups=groups)


def sched_config(**changes: Any) -> SimpleNamespace:
    """A partial record with what the scheduler reads of a `VllmConfig`; `changes` name single fields."""
    get = changes.pop
    looks_ahead = get("looks_ahead", False)
    config = SimpleNamespace(
        model_config=SimpleNamespace(
            max_model_len=get("max_model_len", 512), hf_config={}, get_vocab_size=lambda: 64
        ),
        scheduler_config=SimpleNamespace(
            policy=get("policy", "fcfs"),
            max_num_seqs=get("max_num_seqs", 16),
            max_num_active_seqs=get("max_num_active_seqs", None),
            max_num_batched_tokens=get("max_num_batched_tokens", 64),
            max_num_scheduled_tokens=get("max_num_scheduled_tokens", None),
            long_prefill_token_threshold=get("long_prefill_token_threshold", 0),
            long_prefill_token_threshold_adaptive=get("adaptive", False),
            enable_chunked_prefill=get("enable_chunked_prefill", True),
            scheduler_reserve_full_isl=get("reserve_full_isl", True),
            watermark=get("watermark", 0.0),
            prefill_schedule_interval=get("prefill_schedule_interval", 1),
            async_scheduling=looks_ahead,
            runner_type="generate",
        ),
        cache_config=SimpleNamespace(
            enable_prefix_caching=get("enable_prefix_caching", True),
            enable_mamba_shared_prefix_checkpoint=False,
        ),
        parallel_config=SimpleNamespace(
            pipeline_parallel_size=1,
            data_parallel_size=1,
            data_parallel_index=0,
            decode_context_parallel_size=1,
            prefill_context_parallel_size=1,
        ),
        observability_config=SimpleNamespace(kv_cache_metrics=False, per_request_spec_decode_metrics="none"),
        structured_outputs_config=SimpleNamespace(backend="auto"),
        kv_transfer_config=get("kv_transfer_config", None),
        kv_events_config=None,
        lora_config=get("lora_config", None),
        speculative_config=get("speculative_config", None),
        max_concurrent_batches=2 if looks_ahead else 1,
        num_speculative_tokens=get("num_speculative_tokens", 0),
        num_lookahead_tokens=get("num_lookahead_tokens", 0),
        num_prefill_lookahead_tokens=0,
        num_hash_lookahead_tokens=0,
        use_v2_model_runner=True,
    )
    config.max_in_flight_tokens = (
        config.max_concurrent_batches * config.scheduler_config.max_num_batched_tokens
    )
    assert not changes, f"unknown settings {sorted(changes)}"
    return config


class NoGrammar:
    """A structured output manager without grammars."""

    def grammar_init(self, request: Request) -> None:
        pass

    def accept_tokens(self, request: Request, token_ids: list[int]) -> bool:
        return True

    def allowed_drafts(self, request: Request, drafts: list[int]) -> list[int]:
        return drafts

    def failure(self, request: Request) -> str | None:
        return None


def make_scheduler(
    specs: Sequence[KVCacheSpec] = (),
    num_blocks: int = 64,
    *,
    connector: Any = None,
    log_stats: bool = False,
    structured: Any = None,
    include_finished_set: bool = False,
    **config: Any,
) -> Scheduler:
    """A scheduler over a real KV cache manager."""
    init_none_hash(sha256)
    specs = specs or [full()]
    kv = kv_config(specs, num_blocks)
    cacheable = [spec.block_size for spec in specs if spec.prefix_cacheable]
    scheduler_block = max(cacheable)
    scheduler_cls = AsyncScheduler if config.get("looks_ahead") else Scheduler
    return scheduler_cls(
        vllm_config=sched_config(**config),  # type: ignore[arg-type]
        kv_cache_config=kv,
        structured_output_manager=structured or NoGrammar(),  # type: ignore[arg-type]
        block_size=scheduler_block,
        hash_block_size=min(cacheable),
        include_finished_set=include_finished_set,
        log_stats=log_stats,
        clock=ManualClock(),
        connector=connector,
    )


def make_request(
    scheduler: Scheduler, request_id: str, prompt: Sequence[int], max_tokens: int = 8, **fields: Any
) -> Request:
    """A request whose blocks are hashed as the scheduler expects; `fields` go to sampling params or the request."""
    own = {
        key: fields.pop(key)
        for key in (
            "priority",
            "arrival_time",
            "client_index",
            "resumable",
            "lora_request",
            "cache_salt",
            "mm_features",
        )
        if key in fields
    }
    own.setdefault("arrival_time", float(len(scheduler.requests)))
    params = SamplingParams(max_tokens=max_tokens, temperature=0.0, **fields)
    hasher = get_request_block_hasher(scheduler.hash_block_size, sha256)
    return Request(request_id, list(prompt), params, None, block_hasher=hasher, **own)


def expected_output(prompt: Sequence[int], max_tokens: int) -> list[int]:
    """What the fake model answers, computed without any cache."""
    tokens = list(prompt)
    for _ in range(max_tokens):
        tokens.append(next_token(tokens))
    return tokens[len(prompt) :]


@dataclass
class Driver:
    """Runs a scheduler against a fake worker with up to `depth` steps in flight."""

    scheduler: Scheduler
    depth: int = 1
    outputs: dict[str, list[int]] = field(default_factory=dict)
    ends: dict[str, EngineCoreOutput] = field(default_factory=dict)
    steps: list[SchedulerOutput] = field(default_factory=list)
    guess: Callable[[list[int]], list[int]] | None = None
    """Makes the drafts for what follows these tokens."""

    def __post_init__(self) -> None:
        groups = [group.kv_cache_spec for group in self.scheduler.kv_cache_config.kv_cache_groups]
        self.worker = FakeWorker(groups)
        self.in_flight: deque[tuple[SchedulerOutput, Any]] = deque()

    def add(self, request_id: str, prompt: Sequence[int], max_tokens: int = 8, **fields: Any) -> Request:
        request = make_request(self.scheduler, request_id, prompt, max_tokens, **fields)
        self.scheduler.add_request(request)
        return request

    def schedule(self, fails: bool = False) -> SchedulerOutput:
        """Schedule and execute one step; its result stays in flight."""
        output = self.scheduler.schedule()
        self.steps.append(output)
        result = self.worker.execute(output, fails)
        self.in_flight.append((output, None if fails else result))
        return output

    def apply(self) -> dict[int, Any]:
        """Apply the oldest result."""
        output, result = self.in_flight.popleft()
        if result is None:
            messages = self.scheduler.fail_step(output, STEP_FAILED)
            self.collect(messages)
            return messages
        messages = self.scheduler.update_from_output(output, result)
        self.collect(messages)
        if self.guess is not None:
            ids = [request_id for request_id in output.num_scheduled_tokens if request_id in self.worker.rows]
            drafts = [self.guess(self.worker.rows[request_id].tokens) for request_id in ids]
            self.scheduler.update_draft_token_ids(DraftTokenIds(ids, drafts))
        return messages

    def collect(self, messages: dict[int, Any]) -> None:
        for message in messages.values():
            for output in message.outputs:
                assert output.request_id not in self.ends, f"output after the end of {output.request_id}"
                self.outputs.setdefault(output.request_id, []).extend(output.new_token_ids)
                if output.finished:
                    self.ends[output.request_id] = output

    def step(self) -> SchedulerOutput:
        """One engine step with look-ahead `depth`."""
        output = self.schedule()
        if len(self.in_flight) >= self.depth:
            self.apply()
        return output

    def run(self, max_steps: int = 400) -> int:
        """Step until nothing is left; returns the number of steps (fails if it does not end)."""
        for count in range(max_steps):
            if not self.scheduler.has_requests():
                while self.in_flight:
                    self.apply()
                if not self.scheduler.has_requests():
                    return count
            self.step()
        raise AssertionError(
            f"still busy after {max_steps} steps: running {self.scheduler.running}, "
            f"waiting {list(self.scheduler.waiting)}, holding {list(self.scheduler.kv_holding_waiting)}"
        )

    def free_blocks(self) -> int:
        return self.scheduler.kv_cache_manager.block_pool.get_num_free_blocks()

    def assert_at_rest(self) -> None:
        """Nothing is left of any request."""
        scheduler = self.scheduler
        assert self.free_blocks() == scheduler.kv_cache_config.num_blocks - 1
        assert not scheduler.requests
        assert not scheduler.running
        assert scheduler.get_request_counts() == (0, 0)
        assert not scheduler.deferred_frees
        assert not scheduler._inflight_prefills
        assert not scheduler._kv_fetch_stages
        assert sum(scheduler._kv_fetch_counts.values()) == 0
