"""For every tier, metrics and `/kv_cache/stats` say the sum of what requests report: with loads that fail, aborts at any
moment, several samples of a prompt, preemptions and resets."""

from __future__ import annotations

import random
from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.helpers.engine_configs import engine_args, prompt_of
from tests.helpers.faulty_backend import FaultyBackend
from tests.helpers.scripted_offload import Script, new_script, scripted
from vllm.distributed.kv_transfer.kv_connector.v1.simple_cpu_offload_connector import (
    SimpleCPUOffloadConnector,
)
from vllm.distributed.kv_transfer.kv_transfer_state import get_kv_transfer_group
from vllm.outputs import RequestOutput
from vllm.sampling_params import RequestOutputKind, SamplingParams
from vllm.v1.engine.llm_engine import LLMEngine
from vllm.v1.kv_offload.base import Locality, Medium
from vllm.v1.metrics import reader
from vllm.v1.simple_kv_offload.disk_moves import DiskMoves

BLOCK = 16
PLACES = [
    (Medium.CPU, Locality.LOCAL),
    (Medium.CPU, Locality.REMOTE),
    (Medium.STORAGE, Locality.LOCAL),
    None,
]
engines: list[LLMEngine] = []


@pytest.fixture(autouse=True)
def close_engines() -> Iterator[None]:
    yield
    while engines:
        engines.pop().shutdown()


def start(**settings: Any) -> LLMEngine:
    args = engine_args(
        **{"max_model_len": 192, "max_num_batched_tokens": 64, "num_gpu_blocks_override": 26, **settings}
    )
    engines.append(LLMEngine.from_engine_args(args, enable_multiprocessing=False))
    return engines[-1]


class Traffic:
    """Requests over few prompts, and what they report: of each the first output that says something."""

    def __init__(self, engine: LLMEngine, seed: int, between: Callable[[], None]) -> None:
        self.engine = engine
        self.chance = random.Random(seed)
        self.between = between
        self.roots = [prompt_of(6 * BLOCK, seed) for seed in range(4)]
        self.prompts: dict[str, list[int]] = {}
        self.living: set[str] = set()
        self.reports: dict[str, tuple[dict[str, int], int, int]] = {}
        self.generated: dict[tuple[str, int], int] = {}
        self.kinds: dict[str, RequestOutputKind] = {}
        self.seen: Counter[str] = Counter()

    def run(self, steps: int) -> None:
        for _ in range(steps):
            self.act()
            self.step()
        while self.engine.has_unfinished_requests():
            self.step()

    def act(self) -> None:
        draw = self.chance.random()
        if draw < 0.35 and len(self.living) < 8:
            self.arrive()
        elif draw < 0.40 and self.living:
            name = self.chance.choice(sorted(self.living))
            self.living.discard(name)
            self.seen["aborted early" if name not in self.reports else "aborted late"] += 1
            self.engine.abort_request([name])
        elif draw < 0.5:
            self.engine.reset_prefix_cache(self.chance.random() < 0.2, self.chance.random() < 0.05)

    def arrive(self) -> None:
        name = f"r{len(self.prompts)}"
        length = self.chance.randrange(1, 7) * BLOCK + self.chance.choice([-1, 0, 1])
        prompt = self.chance.choice(self.roots)[:length] + prompt_of(
            self.chance.randrange(3), 50 + len(self.prompts)
        )
        kind = self.chance.choice([RequestOutputKind.DELTA, RequestOutputKind.CUMULATIVE])
        n = self.chance.choice([1, 1, 2, 3])
        self.seen["samples"] += n > 1
        params = SamplingParams(
            n=n, max_tokens=self.chance.choice([1, 3, 30]), ignore_eos=True, output_kind=kind, seed=1
        )
        self.prompts[name], self.kinds[name] = prompt, kind
        self.living.add(name)
        self.engine.add_request(name, {"prompt_token_ids": prompt}, params)

    def step(self) -> None:
        self.between()
        for output in self.engine.step():
            assert isinstance(output, RequestOutput)
            name = output.request_id
            if output.cached_tokens_by_source is not None:
                assert output.num_cached_tokens is not None
                assert output.num_cache_creation_tokens is not None
                told = output.cached_tokens_by_source
                report = (told, output.num_cached_tokens, output.num_cache_creation_tokens)
                assert self.reports.setdefault(name, report) == report, "it stays the same"
                assert sum(told.values()) == output.num_cached_tokens < len(self.prompts[name])
            for sample in output.outputs:
                sofar = self.generated.get((name, sample.index), 0)
                is_delta = self.kinds[name] == RequestOutputKind.DELTA
                self.generated[name, sample.index] = is_delta * sofar + len(sample.token_ids)
            if output.finished:
                self.living.discard(name)

    def check(self) -> Counter[str]:
        """Returns the sums by tier."""
        reported: Counter[str] = Counter()
        for by_tier, _, _ in self.reports.values():
            reported.update(by_tier)
        counted = figures("vllm:prompt_tokens_cached_by_source", "source")
        assert {tier: count for tier, count in counted.items() if count} == dict(+reported)
        total = sum(reported.values())
        prompts = sum(len(self.prompts[name]) for name in self.reports)
        by_source = figures("vllm:prompt_tokens_by_source", "source")
        assert figures("vllm:prompt_tokens_cached") == {"": total}
        assert figures("vllm:prompt_tokens") == {"": prompts}
        assert figures("vllm:generation_tokens") == {"": sum(self.generated.values())}
        assert by_source == {
            "local_compute": prompts - total,
            "local_cache_hit": reported["device"],
            "external_kv_transfer": total - reported["device"],
        }
        below = {tier: count for tier, count in (+reported).items() if tier != "device"}
        hits = figures("vllm:simple_kv_offload_tier_hit_tokens", "tier")
        assert {tier: count for tier, count in hits.items() if count} == below
        assert figures("vllm:simple_kv_offload_hit_tokens") == {"": sum(below.values())}
        told = {hit["tier"]: hit["tokens_reported"] for hit in self.engine.get_kv_cache_report()["hits"]}
        assert {tier: count for tier, count in told.items() if count} == dict(+reported)
        return reported


def figures(name: str, label: str = "") -> dict[str, int]:
    return {
        metric.labels[label] if label else "": metric.value
        for metric in reader.get_metrics_snapshot()
        if metric.name == name and isinstance(metric, reader.Counter)
    }


def one(name: str) -> int:
    return sum(figures(name, "tier" if "accepted" in name else "").values())


def check_that_much_happened(traffic: Traffic, reported: Counter[str]) -> None:
    assert traffic.seen["aborted early"] > 2, traffic.seen
    assert traffic.seen["aborted late"] > 2, traffic.seen
    assert traffic.seen["samples"] > 5, traffic.seen
    assert one("vllm:num_preemptions") > 0
    assert one("vllm:simple_kv_offload_load_failures") > 0
    below = sum(count for tier, count in reported.items() if tier != "device")
    assert one("vllm:simple_kv_offload_accepted_tokens") > below, "orders that nobody reports"
    assert one("vllm:prefix_cache_hits") > reported["device"], "look-ups that nobody reports"


@pytest.mark.parametrize(("seed", "async_scheduling"), [(0, True), (1, False)])
def test_host_memory_and_disk(tmp_path: Path, seed: int, async_scheduling: bool) -> None:
    extra = {
        "cpu_bytes_to_use": 36 * 9216,
        "disk_tier": True,
        "disk_path": str(tmp_path / "kv"),
        "disk_capacity_bytes": 4 << 20,
        "decline_slow_tier": "off",
    }
    config = {
        "kv_connector": "SimpleCPUOffloadConnector",
        "kv_role": "kv_both",
        "kv_connector_extra_config": extra,
        "kv_load_failure_policy": "recompute",
    }
    engine = start(kv_transfer_config=config, async_scheduling=async_scheduling)
    connector = get_kv_transfer_group()
    assert isinstance(connector, SimpleCPUOffloadConnector)
    worker = connector.worker_handler
    assert worker is not None
    assert worker._backend is not None
    worker._backend = FaultyBackend(worker._backend, seed, rate=0.15)
    assert worker._moves is not None
    assert worker._moves.backend is not None
    worker._moves = DiskMoves(FaultyBackend(worker._moves.backend, seed + 1, rate=0.1))
    traffic = Traffic(engine, seed, lambda: None)
    traffic.run(220)
    reported = traffic.check()
    assert reported["device"] > 0
    assert reported["host"] > 0
    check_that_much_happened(traffic, reported)


@pytest.mark.parametrize(("seed", "policy"), [(0, "recompute"), (1, "fail")])
def test_a_manager_from_outside(seed: int, policy: str) -> None:
    script: Script = new_script(capacity=60)
    chance = random.Random(seed)
    script.fails = lambda: chance.random() < 0.1
    config = scripted()
    config.kv_load_failure_policy = policy
    engine = start(kv_transfer_config=config, async_scheduling=False)
    script.manager.get_load_source = lambda key, ctx: chance.choice(PLACES)  # type: ignore[method-assign]

    def between() -> None:
        script.workers[0].run(chance.choice([1, 2, None]))

    traffic = Traffic(engine, seed, between)
    traffic.run(220)
    reported = traffic.check()
    assert {"device", "host", "p2p", "disk", "external_unspecified"} == set(+reported)
    check_that_much_happened(traffic, reported)
