"""A real engine whose model is spread over two worker processes: the same answers, whatever the caches do, and its ends."""

from __future__ import annotations

import os
import random
import signal
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import psutil
import pytest

from tests.helpers import rank_faults
from tests.helpers.engine_configs import engine_args, offload_settings, prompt_of
from tests.helpers.faulty_executors import POISON
from tests.helpers.kept_engine import settings as kept_settings
from tests.helpers.rank_faults import NAN
from vllm.model_executor.model_loader.tiny import make_tiny
from vllm.outputs import CompletionOutput, RequestOutput
from vllm.sampling_params import SamplingParams, StructuredOutputsParams
from vllm.v1.engine.exceptions import EngineDeadError
from vllm.v1.engine.llm_engine import LLMEngine

TOLERANCE = 1e-4
CPU_BYTES = 32 << 20
GREEDY = SamplingParams(max_tokens=12, temperature=0.0, ignore_eos=True, logprobs=5)


def start(name: str = "llama", ranks: int = 2, core_process: bool = False, **overrides: Any) -> LLMEngine:
    fields = {"max_model_len": 512, "max_num_batched_tokens": 96, **overrides}
    args = engine_args(name, tensor_parallel_size=ranks, **fields)
    return LLMEngine.from_engine_args(args, enable_multiprocessing=core_process)


def run(engine: LLMEngine, prompts: list[list[int]], params: SamplingParams = GREEDY) -> list[RequestOutput]:
    """All at once; the answers in their order."""
    for index, prompt in enumerate(prompts):
        engine.add_request(str(index), {"prompt_token_ids": prompt}, params)
    done: dict[str, RequestOutput] = {}
    while engine.has_unfinished_requests():
        for output in engine.step():
            if output.finished:
                assert isinstance(output, RequestOutput)
                done[output.request_id] = output
    return [done[str(index)] for index in range(len(prompts))]


def answer(output: RequestOutput) -> CompletionOutput:
    return output.outputs[0]


def values(output: RequestOutput) -> list[dict[int, float]]:
    logprobs = answer(output).logprobs
    assert logprobs is not None
    return [{token: entry.logprob for token, entry in position.items()} for position in logprobs]


def difference(one: RequestOutput, two: RequestOutput) -> float:
    assert answer(one).token_ids == answer(two).token_ids
    pairs = zip(values(one), values(two), strict=True)
    return max(abs(left[t] - right[t]) for left, right in pairs for t in left.keys() & right.keys())


def settle(engine: LLMEngine) -> None:
    """Let stores end: the offload tells of them only in steps."""
    time.sleep(0.2)
    run(engine, [[7]])


def step_to_the_end(engine: LLMEngine) -> None:
    while engine.has_unfinished_requests():
        engine.step()


def wait_until_gone(pids: list[int], seconds: float = 15.0) -> None:
    deadline = time.monotonic() + seconds
    while any(psutil.pid_exists(pid) for pid in pids):
        assert time.monotonic() < deadline
        time.sleep(0.05)


@pytest.fixture(scope="module")
def engine() -> Iterator[LLMEngine]:
    """Two ranks with a pool each; a prompt takes several steps."""
    engine = start(**offload_settings())
    engine.collective_rpc(rank_faults.plant)
    yield engine
    engine.shutdown()


def test_the_answer_is_the_same_cold_from_each_cache_and_beside_others(engine: LLMEngine) -> None:
    assert len(set(engine.collective_rpc(rank_faults.pid_of)) - {os.getpid()}) == 2
    prompts = [prompt_of(length, length) for length in (100, 37, 150, 64)]
    assert engine.reset_prefix_cache(reset_connector=True)
    cold = [run(engine, [prompt])[0] for prompt in prompts]
    device = [run(engine, [prompt])[0] for prompt in prompts]
    settle(engine)
    assert engine.reset_prefix_cache()
    host = [run(engine, [prompt])[0] for prompt in prompts]
    assert engine.reset_prefix_cache(reset_connector=True)
    mixed = run(engine, prompts)
    hits = [(len(prompt) - 1) // 16 * 16 for prompt in prompts]
    assert [output.num_cached_tokens for output in device] == hits
    assert [output.num_cached_tokens for output in host] == hits
    assert [output.num_cached_tokens for output in [*cold, *mixed]] == [0] * 8
    for others in (device, host):
        assert [values(other) for other in others] == [values(output) for output in cold]
    assert max(map(difference, mixed, cold)) <= TOLERANCE  # prompts are cut elsewhere

    alone = start(ranks=1)
    reference = run(alone, prompts)
    sampling = SamplingParams(max_tokens=12, temperature=0.9, seed=5, top_p=0.95, ignore_eos=True, n=1)
    drawn = [answer(output).token_ids for output in run(alone, prompts, sampling)]
    alone.shutdown()
    assert max(map(difference, reference, cold)) <= TOLERANCE
    assert [answer(output).token_ids for output in run(engine, prompts, sampling)] == drawn


def test_a_failure_of_a_request_ends_it_alone_on_all_ranks(engine: LLMEngine) -> None:
    good = run(engine, [prompt_of(20, 1)])[0]
    for fault in (POISON, NAN):
        (output,) = run(engine, [[5, *fault]])
        assert answer(output).finish_reason == "error"
        assert difference(run(engine, [prompt_of(20, 1)])[0], good) == 0.0
    # Beside others: a NaN costs its own request only.
    spoiled, *others = run(engine, [[5, *NAN], prompt_of(20, 1), prompt_of(20, 2)])
    assert answer(spoiled).finish_reason == "error"
    assert [answer(other).finish_reason for other in others] == ["length", "length"]


def test_what_goes_through_all_ranks_besides_steps(engine: LLMEngine) -> None:
    pattern = StructuredOutputsParams(regex="[a-c]{6}")
    params = SamplingParams(max_tokens=12, temperature=0.0, structured_outputs=pattern)
    (output,) = run(engine, [prompt_of(9, 4)], params)
    assert set(answer(output).text) <= set("abc")
    before = run(engine, [prompt_of(90, 5)])[0]
    engine.sleep(1)
    assert engine.is_sleeping()
    engine.wake_up()
    after = run(engine, [prompt_of(90, 5)])[0]
    assert difference(after, before) == 0.0
    prompt_params = SamplingParams(max_tokens=1, temperature=0.0, prompt_logprobs=2)
    (output,) = run(engine, [prompt_of(120, 6)], prompt_params)
    assert output.prompt_logprobs is not None
    assert len(output.prompt_logprobs) == 120
    assert engine.collective_rpc("check_health") == [None, None]


@pytest.fixture
def pool() -> Iterator[str]:
    name = f"ranks-{os.getpid()}-{time.monotonic_ns()}"
    yield name
    for path in segments(name):
        path.unlink()


def segments(pool: str) -> list[Path]:
    return sorted(Path("/dev/shm").glob(f"vllm-kv-*-{pool}-*"))


def test_ranks_with_one_pool_and_a_rank_killed_while_it_stores(pool: str, tmp_path: Path) -> None:
    model = str(make_tiny("llama", tmp_path / "model", overrides={"num_key_value_heads": 1}))
    fields = offload_settings(CPU_BYTES)
    fields["kv_transfer_config"]["kv_connector_extra_config"] |= {"shared_pool": pool}
    engine = start(model=model, core_process=True, **fields)
    prompts = [prompt_of(3 * 16 + 5, seed) for seed in range(4)]
    cold = [run(engine, [prompt])[0] for prompt in prompts]
    settle(engine)
    assert len(segments(pool)) == 1
    # Both ranks have the same KV head, which is kept once; with its records a block takes less than two copies.
    block_bytes = 2 * 16 * (16 + 16) * 4  # layers, tokens, numbers of a token's key and value, of four bytes
    num_blocks = engine.cache_config.simple_cpu_offload_num_blocks
    assert num_blocks is not None
    assert CPU_BYTES / 1.5 < num_blocks * block_bytes <= CPU_BYTES
    assert engine.reset_prefix_cache()
    host = [run(engine, [prompt])[0] for prompt in prompts]
    assert [output.num_cached_tokens for output in host] == [48] * 4
    assert [difference(one, two) for one, two in zip(cold, host, strict=True)] == [0.0] * 4

    (core,) = engine.engine_core.core_pids
    pids = [child.pid for child in psutil.Process(core).children(recursive=True)]
    assert len(pids) == 2
    for index in range(30):
        engine.add_request(f"late {index}", {"prompt_token_ids": prompt_of(300, 100 + index)}, GREEDY)
    for _ in range(3):
        engine.step()
    os.kill(pids[1], signal.SIGKILL)
    killed = time.monotonic()
    with pytest.raises(EngineDeadError):
        step_to_the_end(engine)
    assert time.monotonic() - killed < 10
    engine.shutdown()
    wait_until_gone([core, *pids])
    assert not segments(pool)


def test_each_rank_keeps_its_part_of_the_disk_over_a_restart(tmp_path: Path) -> None:
    prompts = [prompt_of(3 * 16 + 5, seed) for seed in range(14)]
    outputs = []
    for async_scheduling in (True, False):
        engine = start(async_scheduling=async_scheduling, **kept_settings(str(tmp_path / "kv")))
        outputs.append([run(engine, [prompt])[0] for prompt in prompts])
        settle(engine)
        engine.shutdown()
        kept = {path.name.rpartition("-")[2] for path in tmp_path.iterdir() if path.suffix != ".index"}
        assert kept == {"0", "1"}
    first, second = outputs
    assert [output.num_cached_tokens for output in second] == [48] * 14
    assert [difference(one, two) for one, two in zip(first, second, strict=True)] == [0.0] * 14


def test_a_model_that_cannot_be_split_is_refused_before_anything_is_started() -> None:
    before = psutil.Process().children(recursive=True)
    with pytest.raises(ValueError, match="tensor_parallel_size 3 does not divide num_attention_heads 4"):
        start(ranks=3)
    assert psutil.Process().children(recursive=True) == before


@pytest.mark.slow
def test_tiers_preemptions_aborts_and_resets_change_no_answer(tmp_path: Path) -> None:
    rng = random.Random(11)
    roots = [prompt_of(200, seed) for seed in range(4)]
    prompts = [rng.choice(roots)[: rng.randrange(20, 200)] + prompt_of(9, index) for index in range(50)]
    fields = offload_settings()
    fields["kv_transfer_config"]["kv_connector_extra_config"] = {
        "cpu_bytes_to_use": 1 << 20,
        "disk_tier": True,
        "disk_path": str(tmp_path / "kv"),
        "disk_capacity_bytes": 32 << 20,
        "decline_slow_tier": "off",
    }
    # A tenth of what the requests of a moment would like to have.
    engine = start(kv_cache_memory_bytes=300 << 10, **fields)
    waiting, live, done = list(enumerate(prompts)), set[int](), dict[int, RequestOutput]()
    while waiting or live:
        while waiting and len(live) < 12:
            index, prompt = waiting.pop(0)
            engine.add_request(str(index), {"prompt_token_ids": prompt}, GREEDY)
            live.add(index)
        if rng.random() < 0.03:
            gone = rng.choice(sorted(live))
            engine.abort_request([str(gone)])
            live.discard(gone)
        if rng.random() < 0.02:
            engine.reset_prefix_cache(rng.random() < 0.5, rng.random() < 0.3)
        for output in engine.step():
            if output.finished and int(output.request_id) in live:
                live.discard(int(output.request_id))
                done[int(output.request_id)] = output
    engine.shutdown()
    assert sum(output.num_cached_tokens > 0 for output in done.values()) > len(done) // 2
    alone = start(ranks=1, enable_prefix_caching=False)
    for index, output in done.items():
        assert difference(run(alone, [prompts[index]])[0], output) <= TOLERANCE
    alone.shutdown()
