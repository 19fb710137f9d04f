"""Engines of one node that share a host pool: what one computed the others load, whatever becomes of the first."""

from __future__ import annotations

import asyncio
import os
import random
import signal
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from prometheus_client import REGISTRY

from tests.helpers.engine_configs import async_engine_args, engine_args, offload_settings, prompt_of
from vllm.outputs import RequestOutput
from vllm.sampling_params import SamplingParams
from vllm.v1.engine.async_llm import AsyncLLM
from vllm.v1.engine.exceptions import EngineDeadError
from vllm.v1.engine.llm_engine import LLMEngine

Start = Callable[..., LLMEngine]


@pytest.fixture
def pool() -> Iterator[str]:
    name = f"test-{os.getpid()}-{time.monotonic_ns()}"
    yield name
    for path in segments(name):
        path.unlink()


@pytest.fixture
def start(pool: str) -> Iterator[Start]:
    engines: list[LLMEngine] = []

    def begin(
        name: str = "llama", multiprocessing: bool = True, device_blocks: int | None = None, **extra: Any
    ) -> LLMEngine:
        settings = offload_settings()
        settings["kv_transfer_config"]["kv_connector_extra_config"] |= {"shared_pool": pool, **extra}
        args = engine_args(name, max_model_len=512, num_gpu_blocks_override=device_blocks, **settings)
        engines.append(LLMEngine.from_engine_args(args, enable_multiprocessing=multiprocessing))
        return engines[-1]

    yield begin
    for engine in engines:
        engine.shutdown()


def segments(pool: str) -> list[Path]:
    return sorted(Path("/dev/shm").glob(f"vllm-kv-*-{pool}-*"))


def run(engine: LLMEngine, prompts: dict[str, list[int]], max_tokens: int = 8) -> dict[str, RequestOutput]:
    params = SamplingParams(max_tokens=max_tokens, temperature=0.0, ignore_eos=True)
    for request_id, prompt in prompts.items():
        engine.add_request(request_id, {"prompt_token_ids": prompt}, params)
    done: dict[str, RequestOutput] = {}
    while engine.has_unfinished_requests():
        for output in engine.step():
            if output.finished:
                assert isinstance(output, RequestOutput)
                done[output.request_id] = output
    return done


def tokens(output: RequestOutput) -> list[int]:
    return list(output.outputs[0].token_ids)


@pytest.mark.parametrize("name", ["llama", "glm5_next"])
def test_one_engine_loads_what_another_computed(start: Start, pool: str, name: str) -> None:
    first, second = start(name), start(name)
    assert len(segments(pool)) == 1
    block = first.cache_config.cache_hit_alignment_tokens
    assert block is not None
    prompts = {f"r{seed}": prompt_of(3 * block + 5, seed) for seed in range(4)}
    fresh = run(first, prompts)
    time.sleep(0.3)  # the idle core collects its copies
    shared = run(second, prompts)
    assert [output.num_cached_tokens for output in fresh.values()] == [0] * 4
    assert [shared[key].num_cached_tokens for key in prompts] == [3 * block] * 4
    assert [tokens(shared[key]) for key in prompts] == [tokens(fresh[key]) for key in prompts]
    first.shutdown()
    second.shutdown()
    assert not segments(pool), "the last engine removes the segment"


@pytest.mark.slow
def test_an_engine_killed_while_it_stores_harms_nobody(start: Start, pool: str) -> None:
    prompts = {f"r{seed}": prompt_of(400, seed) for seed in range(24)}
    plain = LLMEngine.from_engine_args(engine_args(max_model_len=512), enable_multiprocessing=False)
    expected = {key: tokens(output) for key, output in run(plain, prompts).items()}
    plain.shutdown()
    survivor = start(num_cpu_blocks=200)
    for delay in (0.02, 0.06, 0.15):
        victim = start(num_cpu_blocks=200)
        pid = victim.engine_core.core_pids[0]
        for request_id, prompt in prompts.items():
            # Far more than it can answer before its end, on a fast machine as well.
            params = SamplingParams(max_tokens=110, temperature=0.0, ignore_eos=True)
            victim.add_request(request_id, {"prompt_token_ids": prompt}, params)
        time.sleep(delay)
        os.kill(pid, signal.SIGKILL)
        with pytest.raises(EngineDeadError):
            run(victim, {})
        outputs = run(survivor, prompts)
        assert {key: tokens(output) for key, output in outputs.items()} == expected
        assert survivor.reset_prefix_cache()
    time.sleep(2.5)  # slots of the dead are free again after a while
    heir = start(num_cpu_blocks=200)
    outputs = run(heir, {"again": prompts["r23"]})
    assert tokens(outputs["again"]) == expected["r23"]
    assert len(segments(pool)) == 1


def test_engines_under_load_answer_as_one_without_a_pool(start: Start) -> None:
    """Aborts, resets and a sudden death among engines that evict each other's blocks."""
    rng = random.Random(1)
    prompts = [prompt_of(180, family)[:length] for family in range(6) for length in (40, 97, 180)]
    cold = LLMEngine.from_engine_args(engine_args(max_model_len=512), enable_multiprocessing=False)
    expected = [
        tokens(run(cold, {f"r{number}": prompt})[f"r{number}"]) for number, prompt in enumerate(prompts)
    ]
    cold.shutdown()
    alive = [start(device_blocks=36, num_cpu_blocks=45) for _ in range(3)]
    victim = alive[2]
    done: dict[str, RequestOutput] = {}
    under_way: dict[str, LLMEngine] = {}
    num_resets = num_aborts = 0
    for turn in range(120):
        engine = rng.choice(alive)
        if rng.random() < 0.5:
            number = rng.randrange(len(prompts))
            params = SamplingParams(max_tokens=8, temperature=0.0, ignore_eos=True)
            engine.add_request(f"{turn}:{number}", {"prompt_token_ids": prompts[number]}, params)
            under_way[f"{turn}:{number}"] = engine
        if rng.random() < 0.1 and under_way:
            gone = rng.choice(sorted(under_way))
            under_way.pop(gone).abort_request([gone])
            num_aborts += 1
        if rng.random() < 0.04:
            engine.reset_prefix_cache(reset_connector=True)
            num_resets += 1
        if turn == 60:
            os.kill(victim.engine_core.core_pids[0], signal.SIGKILL)
            alive.remove(victim)
            under_way = {key: owner for key, owner in under_way.items() if owner is not victim}
        elif engine.has_unfinished_requests():
            note_finished(engine, done)
        under_way = {key: owner for key, owner in under_way.items() if key not in done}
    for engine in alive:
        while engine.has_unfinished_requests():
            note_finished(engine, done)
    assert set(under_way) <= set(done)
    for request_id, output in done.items():
        if output.outputs[0].finish_reason != "abort":
            assert tokens(output) == expected[int(request_id.split(":")[1])], request_id
    assert num_aborts > 3
    assert num_resets > 1
    by_source = [output.cached_tokens_by_source or {} for output in done.values()]
    assert sum(sources.get("host", 0) for sources in by_source) > 100, "loaded from the pool"


def note_finished(engine: LLMEngine, done: dict[str, RequestOutput]) -> None:
    """One step."""
    for output in engine.step():
        if output.finished:
            assert isinstance(output, RequestOutput)
            done[output.request_id] = output


def test_a_reset_of_one_engine_empties_the_pool_for_all(start: Start) -> None:
    first, second = start(), start()
    prompt = prompt_of(100)
    fresh = run(first, {"a": prompt})["a"]
    time.sleep(0.3)
    assert run(second, {"b": prompt})["b"].num_cached_tokens == 96
    assert second.reset_prefix_cache(reset_connector=True)
    assert first.reset_prefix_cache(), "its own device cache"
    again = run(first, {"c": prompt})["c"]
    assert again.num_cached_tokens == 0
    assert tokens(again) == tokens(fresh)


def test_an_idle_engine_tells_what_the_others_changed(start: Start) -> None:
    first, second = start(multiprocessing=False), start()
    prompt = prompt_of(100)

    def told() -> tuple[int, int]:
        host = next(p for p in first.get_kv_cache_report()["pools"] if p["tier"] == "host")
        return first.lookup_kv_cache(prompt)["cached_tokens"], host["blocks_cached"]

    assert told() == (0, 0)
    run(second, {"a": prompt})
    time.sleep(0.3)
    assert told() == (96, 6)
    assert second.reset_prefix_cache(reset_connector=True)
    assert told() == (0, 0)


async def test_the_metrics_of_an_idle_engine_follow_what_the_others_changed(
    pool: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("VLLM_LOG_STATS_INTERVAL", "0.2")
    settings = offload_settings()
    settings["kv_transfer_config"]["kv_connector_extra_config"] |= {"shared_pool": pool}
    idle = AsyncLLM.from_engine_args(async_engine_args(max_model_len=512, **settings))
    # Its figures would be shown in this process too.
    other = LLMEngine.from_engine_args(
        engine_args(max_model_len=512, disable_log_stats=True, **settings), enable_multiprocessing=True
    )
    try:
        params = SamplingParams(max_tokens=2, temperature=0.0)
        async for _ in idle.generate({"prompt_token_ids": prompt_of(9)}, params, "starts"):
            pass
        run(other, {"a": prompt_of(100)})
        await asyncio.sleep(1.0)
        shown = REGISTRY.get_sample_value(
            "vllm:simple_kv_offload_cached_entries",
            {"model_name": idle.vllm_config.model_config.served_model_name, "engine": "0"},
        )
        assert shown == 6
    finally:
        other.shutdown()
        idle.shutdown()


def test_a_pool_left_by_a_killed_engine_serves_the_next(start: Start, pool: str) -> None:
    prompt = prompt_of(200)
    first = start()
    fresh = run(first, {"a": prompt})["a"]
    time.sleep(0.3)
    os.kill(first.engine_core.core_pids[0], signal.SIGKILL)
    second = start()
    again = run(second, {"b": prompt})["b"]
    assert again.num_cached_tokens == 192
    assert tokens(again) == tokens(fresh)
    assert len(segments(pool)) == 1


def test_an_engine_of_another_size_is_told_at_once(start: Start) -> None:
    start(num_cpu_blocks=100)
    with pytest.raises(ValueError, match=r"shared_pool.*100 blocks instead of 90"):
        start(num_cpu_blocks=90, multiprocessing=False)
