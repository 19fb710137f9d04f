"""Random arrivals, aborts, resets, pauses, failures: every answer equals a run without cache, and nothing is left behind.

The fake worker checks every read of KV memory, so a hit on content that is not there fails at once.
"""

from __future__ import annotations

import random
from dataclasses import dataclass, field
from types import SimpleNamespace

import pytest

from tests.helpers.sched import (
    Driver,
    compressed,
    expected_output,
    full,
    make_scheduler,
    mamba,
    replayed_window,
    ring,
    window,
    with_draft_rows,
)
from tests.helpers.sched_connector import FakeConnector, LoadRunner
from tests.helpers.sched_worker import next_token
from vllm.v1.core.invariants import problems_of
from vllm.v1.core.sched.interface import PauseState
from vllm.v1.core.sched.scheduler import Scheduler
from vllm.v1.kv_cache_interface import KVCacheSpec
from vllm.v1.request import RequestStatus

MODELS = [
    [full()],
    [full(), window()],
    [full(8), mamba(8)],
    [full(), ring(8)],
    [full(16), compressed(16)],
    [window()],
    [full(4), mamba(8)],
    [full(8), mamba(8), window(8, 6)],
    [full(4), full(8)],
    [full(8), replayed_window(8, 8)],
]
TICKS = 150
REQUESTS_MAX = 25
END_CODES = {"kv_cache_too_small", "kv_load_failed", "nan_logits", "step_failed"}


@dataclass
class Run:
    """One seed: the machine under test and what is expected of it."""

    seed: int
    rng: random.Random = field(init=False)
    wanted: dict[str, tuple[list[int], int]] = field(default_factory=dict)
    aborted: set[str] = field(default_factory=set)
    connector: FakeConnector | None = None
    step_failure_rate: float = 0.0

    def __post_init__(self) -> None:
        self.rng = rng = random.Random(self.seed)
        specs = rng.choice(MODELS)
        self.depth = rng.choice([1, 1, 2, 2, 3])
        drafts = rng.choice([0, 0, 2]) if self.depth == 1 else 0
        specs = [with_draft_rows(spec, drafts) for spec in specs]
        self.stems = [[rng.randrange(5) for _ in range(rng.randint(1, 30))] for _ in range(3)]
        transfer = self._draw_connector(specs) if rng.random() < 0.6 else None
        self.scheduler = self._draw_scheduler(specs, transfer, drafts)
        self.driver = Driver(self.scheduler, depth=self.depth, guess=self._guess if drafts else None)
        self.num_drafts = drafts
        if self.connector is None:
            self.step_failure_rate = rng.choice([0.0, 0.0, 0.05])
        else:
            loads = LoadRunner(self.driver.worker, self.connector, random.Random(self.seed + 1))
            loads.fail_rate = rng.choice([0.0, 0.0, 0.3])
            loads.by_block = rng.random() < 0.5

    def _draw_connector(self, specs: list[KVCacheSpec]) -> SimpleNamespace:
        groups = tuple(i for i, spec in enumerate(specs) if spec.prefix_cacheable)
        block = max(specs[i].block_size for i in groups)
        self.connector = FakeConnector(block, groups, load_async=self.rng.random() < 0.7)
        self.connector.delivers = self.rng.random() < 0.2
        self.connector.delay_finish = self.rng.random() < 0.3
        return SimpleNamespace(
            kv_connector=None,
            is_kv_consumer=self.rng.random() < 0.7,
            kv_load_failure_policy=self.rng.choice(["recompute", "recompute", "fail"]),
        )

    def _draw_scheduler(self, specs: list[KVCacheSpec], transfer: object, drafts: int) -> Scheduler:
        rng = self.rng
        return make_scheduler(
            specs,
            rng.randint(16, 40),
            connector=self.connector,
            kv_transfer_config=transfer,
            log_stats=rng.random() < 0.3,
            looks_ahead=self.depth > 1,
            policy=rng.choice(["fcfs", "priority"]),
            max_num_batched_tokens=rng.choice([16, 24, 64]),
            max_num_seqs=rng.choice([2, 4, 8]),
            long_prefill_token_threshold=rng.choice([0, 0, 10]),
            reserve_full_isl=rng.random() < 0.7,
            watermark=rng.choice([0.0, 0.0, 0.05]),
            prefill_schedule_interval=rng.choice([1, 1, 3]),
            num_speculative_tokens=drafts,
            num_lookahead_tokens=rng.choice([0, drafts]),
            max_model_len=120,
        )

    def _guess(self, tokens: list[int]) -> list[int]:
        """Drafts, right more often than not."""
        known, drafts = list(tokens), []
        for _ in range(self.rng.randint(0, self.num_drafts)):
            known.append(next_token(known) if self.rng.random() < 0.7 else 1)
            drafts.append(known[-1])
        return drafts

    # --- actions ----------------------------------------------------------------------------------------------------

    def tick(self) -> None:
        self._disturb()
        if self.driver.in_flight and (len(self.driver.in_flight) >= self.depth or self.rng.random() < 0.3):
            self.driver.apply()
        else:
            self.driver.schedule(fails=self.rng.random() < self.step_failure_rate)
        if (
            not self.scheduler.deferred_frees
        ):  # parked blocks are in no table, which a recount would call a leak
            assert not problems_of(self.scheduler.kv_cache_manager)

    def _disturb(self) -> None:
        rng, scheduler, draw = self.rng, self.scheduler, self.rng.random()
        if draw < 0.35 and len(self.wanted) < REQUESTS_MAX:
            self._arrive()
        elif draw < 0.42 and self.wanted:
            victims = [rng.choice(sorted(self.wanted)), "nobody"]
            ended = scheduler.finish_requests(victims, RequestStatus.FINISHED_ABORTED)
            self.aborted |= {request.request_id for request in ended}
        elif draw < 0.45:
            scheduler.reset_prefix_cache(rng.random() < 0.5, rng.random() < 0.5)
        elif draw < 0.47:
            scheduler.set_pause_state(rng.choice([PauseState.PAUSED_ALL, PauseState.PAUSED_NEW]))
        elif draw < 0.52:
            scheduler.set_pause_state(PauseState.UNPAUSED)
        elif draw < 0.525 and scheduler.running:
            self.driver.worker.corrupt.add(rng.choice(scheduler.running).request_id)
        elif draw < 0.53 and self.connector is not None:
            self.connector.not_ready.add(f"r{len(self.wanted)}")
        elif draw < 0.54 and self.connector is not None:
            self.connector.not_ready.clear()

    def _arrive(self) -> None:
        tokens = self.rng.choice(self.stems) + [self.rng.randrange(5) for _ in range(self.rng.randint(1, 12))]
        name, max_tokens = f"r{len(self.wanted)}", self.rng.randint(1, 20)
        self.wanted[name] = (tokens, max_tokens)
        self.driver.add(name, tokens, max_tokens, priority=self.rng.randrange(3))

    def finish(self) -> None:
        """Faults stop; everything must come to an end, and be right."""
        self.scheduler.set_pause_state(PauseState.UNPAUSED)
        if self.connector is not None:
            self.connector.not_ready.clear()
        self.driver.run(600)
        for name, (tokens, max_tokens) in self.wanted.items():
            if name in self.aborted:
                continue
            end = self.driver.ends[name]
            if end.error is not None:
                assert end.error.code in END_CODES
                continue
            assert self.driver.outputs[name] == expected_output(tokens, max_tokens), name
        self.driver.assert_at_rest()


@pytest.mark.parametrize("first", range(0, 80, 10))
def test_random_schedules(first: int) -> None:
    checks = 0
    for seed in range(first, first + 10):
        run = Run(seed)
        try:
            for _ in range(TICKS):
                run.tick()
            run.finish()
        except BaseException as error:
            error.add_note(f"seed {seed}")
            raise
        checks += run.driver.worker.checks
    assert checks > 10_000, "the fake worker has hardly read anything"
