"""`OffloadingConnector` on the real engine: what comes back from host memory and from the file is bit for bit the same."""

from __future__ import annotations

import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.helpers.engine_configs import engine_args, prompt_of
from vllm.outputs import RequestOutput
from vllm.sampling_params import SamplingParams
from vllm.v1.engine.llm_engine import LLMEngine

engines: list[LLMEngine] = []
PATIENCE_S = 60.0
PARAMS = SamplingParams(max_tokens=6, temperature=0.0, ignore_eos=True, logprobs=5)
Answer = tuple[list[int], list[dict[int, float]]]


@pytest.fixture(autouse=True)
def close_engines() -> Iterator[None]:
    yield
    while engines:
        engines.pop().shutdown()


def start(name: str, **settings: Any) -> LLMEngine:
    args = engine_args(name, max_model_len=512, **settings)
    engines.append(LLMEngine.from_engine_args(args, enable_multiprocessing=False))
    return engines[-1]


def empty_all(engine: LLMEngine) -> None:
    """On all tiers, once the copies of what was asked last have ended."""
    deadline = time.monotonic() + PATIENCE_S
    while not engine.reset_prefix_cache(reset_connector=True):
        engine.step()
        assert time.monotonic() < deadline, "something is held for ever"


def native(**extra: Any) -> dict[str, Any]:
    return {
        "kv_transfer_config": {
            "kv_connector": "OffloadingConnector",
            "kv_role": "kv_both",
            "kv_connector_extra_config": extra,
        }
    }


def ask(engine: LLMEngine, request_id: str, prompt: list[int]) -> tuple[Answer, int]:
    """The tokens with all log-probabilities exactly, and how many tokens were cached."""
    engine.add_request(request_id, {"prompt_token_ids": prompt}, PARAMS)
    # A load runs on a thread of its own: steps that only wait for it say nothing about how long it takes.
    deadline = time.monotonic() + PATIENCE_S
    while time.monotonic() < deadline:
        for output in engine.step():
            if output.finished:
                assert isinstance(output, RequestOutput)
                made = output.outputs[0]
                assert made.logprobs is not None
                values = [{token: p.logprob for token, p in place.items()} for place in made.logprobs]
                return (list(made.token_ids), values), output.num_cached_tokens or 0
    raise AssertionError("the engine makes no progress")


OUTSIDE = native(
    cpu_bytes_to_use=1 << 25, spec_name="CPUOffloadingSpec", spec_module_path="vllm.v1.kv_offload.cpu.spec"
)


@pytest.mark.parametrize("settings", [{"kv_offloading_size": 1 / 32}, OUTSIDE], ids=["own", "a spec's"])
@pytest.mark.parametrize("name", ["llama", "glm5_next"])
def test_host_memory_gives_back_the_same_bits(name: str, settings: dict[str, Any]) -> None:
    engine = start(name, **settings)
    transfer = engine.vllm_config.kv_transfer_config
    assert transfer is not None
    assert transfer.kv_connector == "OffloadingConnector"
    block = engine.cache_config.cache_hit_alignment_tokens
    assert block is not None
    prompts = [prompt_of(3 * block + 5, seed) for seed in range(4)]
    fresh = [ask(engine, f"a{i}", prompt) for i, prompt in enumerate(prompts)]
    assert engine.reset_prefix_cache()
    loaded = [ask(engine, f"b{i}", prompt) for i, prompt in enumerate(prompts)]
    assert [cached for _, cached in fresh] == [0] * 4
    assert [cached for _, cached in loaded] == [3 * block] * 4
    # The same blocks from the device, and computed anew, are the yardstick: exact equality of all log-probabilities.
    again = [ask(engine, f"d{i}", prompt) for i, prompt in enumerate(prompts)]
    assert [answer for answer, _ in loaded] == [answer for answer, _ in again]
    assert [answer[0] for answer, _ in loaded] == [answer[0] for answer, _ in fresh]
    empty_all(engine)
    cold = [ask(engine, f"e{i}", prompt) for i, prompt in enumerate(prompts)]
    assert cold == fresh


SIZE_FLAG = {"kv_offloading_size": 1 / 32}


@pytest.mark.parametrize(
    ("settings", "simple", "has_answer"),
    [
        (SIZE_FLAG, "0", True),
        (SIZE_FLAG, "1", True),
        (native(cpu_bytes_to_use=1 << 25), "0", False),
        (OUTSIDE, "0", False),
    ],
    ids=["flag", "flag, simple", "the connector's own default", "a spec's"],
)
@pytest.mark.parametrize("name", ["llama", "glm5_next"])
def test_the_second_turn_of_a_conversation_finds_the_answer_in_host_memory_where_the_flag_asks_for_it(
    name: str, settings: dict[str, Any], simple: str, has_answer: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("VLLM_USE_SIMPLE_KV_OFFLOAD", simple)
    engine = start(name, **settings)
    block = engine.cache_config.cache_hit_alignment_tokens
    assert block is not None
    turns = []
    for seed in range(2):
        first = prompt_of(4 * block - 3, seed)
        (answer, _), _ = ask(engine, f"first {seed}", first)
        turns.append(first + answer + prompt_of(block, 9))
    _, on_device = ask(engine, "device", turns[0])
    assert engine.reset_prefix_cache()
    (told, _), cached = ask(engine, "host", turns[1])
    assert cached == (on_device if has_answer else 3 * block)
    if name == "llama":
        assert on_device == 4 * block, "a recurrent state within the answer is not kept, on no tier"
    empty_all(engine)
    (again, _), cached = ask(engine, "cold", turns[1])
    assert (again, cached) == (told, 0)


@pytest.mark.parametrize("name", ["llama", "glm5_next"])
def test_the_file_below_gives_back_the_same_bits(name: str, tmp_path: Path) -> None:
    tier = {"type": "fs", "disk_path": str(tmp_path / "kv"), "disk_capacity_bytes": 64 << 20}
    probe = start(name, **native(cpu_bytes_to_use=1 << 20))
    block = probe.cache_config.cache_hit_alignment_tokens
    assert block is not None
    assert probe.cache_config.num_gpu_blocks
    block_bytes = (16 << 20) // probe.cache_config.num_gpu_blocks
    engines.pop().shutdown()
    small = native(
        spec_name="TieringOffloadingSpec",
        cpu_bytes_to_use=33 * block_bytes + block_bytes // 2,
        secondary_tiers=[tier],
        decline_slow_tier="off",  # computing is quick with so small a model
    )
    engine = start(name, **small)
    prompts = [prompt_of(3 * block + 5, seed) for seed in range(16)]
    fresh = [ask(engine, f"a{i}", prompt) for i, prompt in enumerate(prompts)]
    assert engine.reset_prefix_cache()
    again = [ask(engine, f"b{i}", prompt) for i, prompt in enumerate(prompts)]
    assert [answer[0] for answer, _ in again] == [answer[0] for answer, _ in fresh]
    assert [cached for _, cached in again] == [3 * block] * len(prompts)
    from_device = [ask(engine, f"c{i}", prompt) for i, prompt in enumerate(prompts[-2:])]
    assert [answer for answer, _ in from_device] == [answer for answer, _ in again[-2:]]
