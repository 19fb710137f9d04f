"""Random traffic on a small engine: whatever is evicted, offloaded, aborted or reset, greedy outputs stay those of a cold run."""

import random
from collections.abc import Iterator
from typing import Any

import pytest

from tests.helpers.engine_configs import engine_args, offload_settings
from tests.helpers.faulty_executors import POISON
from vllm.sampling_params import SamplingParams
from vllm.v1.engine.llm_engine import LLMEngine

STEPS = {"llama": 300, "glm5_next": 100, "gemma4": 200}
FLAKY = "tests.helpers.faulty_executors.PoisonedExecutor"


def start(name: str, **settings: Any) -> LLMEngine:
    return LLMEngine.from_engine_args(engine_args(name, **settings), enable_multiprocessing=False)


class Traffic:
    """Prompts from a small tree of shared prefixes, with actions drawn from one seed."""

    def __init__(self, engine: LLMEngine, seed: int, block: int, with_poison: bool) -> None:
        self.engine = engine
        self.chance = random.Random(seed)
        self.block = block
        self.with_poison = with_poison
        self.roots = [[self.chance.randrange(3, 250) for _ in range(6 * block)] for _ in range(3)]
        self.prompts: dict[str, tuple[list[int], int]] = {}
        self.results: dict[str, Any] = {}
        self.poisoned: set[str] = set()
        self.aborted: set[str] = set()

    def run(self, steps: int) -> None:
        for _ in range(steps):
            self._act()
            self._step()
        while self.engine.has_unfinished_requests():
            self._step()

    def _act(self) -> None:
        draw = self.chance.random()
        if draw < 0.22 and len(self.prompts) - len(self.results) - len(self.aborted) < 12:
            self._arrive()
        elif draw < 0.25:
            self._abort()
        elif draw < 0.265:
            self.engine.reset_prefix_cache(self.chance.random() < 0.5, self.chance.random() < 0.5)

    def _arrive(self) -> None:
        name = f"r{len(self.prompts)}"
        length = self.chance.randrange(0, 6) * self.block + self.chance.choice([-1, 0, 1, 5])
        prompt = self.chance.choice(self.roots)[: max(1, length)]
        prompt = prompt + [self.chance.randrange(3, 250) for _ in range(self.chance.randrange(0, 4))]
        tokens = self.chance.choice([1, 2, 5, self.block, 2 * self.block + 3])
        if self.with_poison and self.chance.random() < 0.05:
            prompt = prompt + 2 * POISON  # however it is cut into chunks, one holds it
            self.poisoned.add(name)
        self.prompts[name] = (prompt, tokens)
        self.engine.add_request(name, prompt, greedy(tokens))

    def _abort(self) -> None:
        living = sorted(set(self.prompts) - set(self.results) - self.aborted)
        if living:
            name = self.chance.choice(living)
            self.engine.abort_request([name])
            self.aborted.add(name)

    def _step(self) -> None:
        for output in self.engine.step():
            if output.finished:
                self.results[output.request_id] = output


def greedy(tokens: int) -> SamplingParams:
    return SamplingParams(max_tokens=tokens, temperature=0.0, ignore_eos=True)


@pytest.fixture(scope="module", params=["llama", "glm5_next", "gemma4"])
def reference(request: pytest.FixtureRequest) -> Iterator[tuple[str, Any]]:
    """A model and what it says without any cache."""
    engine = start(request.param, enable_prefix_caching=False, max_model_len=512, async_scheduling=False)
    known: dict[tuple[tuple[int, ...], int], list[int]] = {}

    def answer(prompt: list[int], tokens: int) -> list[int]:
        key = (tuple(prompt), tokens)
        if key not in known:
            engine.add_request("ref", prompt, greedy(tokens))
            while engine.has_unfinished_requests():
                for output in engine.step():
                    if output.finished:
                        known[key] = list(output.outputs[0].token_ids)
        return known[key]

    yield request.param, answer
    engine.shutdown()


@pytest.mark.slow
@pytest.mark.parametrize(
    ("seed", "async_scheduling", "with_poison"),
    [(0, True, False), (1, False, True)],
)
def test_outputs_never_depend_on_caches_tiers_or_neighbours(
    reference: tuple[str, Any], seed: int, async_scheduling: bool, with_poison: bool
) -> None:
    name, answer = reference
    cpu_blocks = 40 if seed % 2 else 400
    engine = start(
        name,
        max_model_len=512,
        max_num_batched_tokens=96,
        num_gpu_blocks_override=40 if name == "llama" else 75,
        async_scheduling=async_scheduling,
        distributed_executor_backend=FLAKY,
        **offload_settings(cpu_blocks * 9216),
    )
    block = engine.cache_config.cache_hit_alignment_tokens
    assert block is not None
    traffic = Traffic(engine, seed, block, with_poison)
    traffic.run(STEPS[name])
    wrong = []
    for request_id, output in traffic.results.items():
        prompt, tokens = traffic.prompts[request_id]
        completion = output.outputs[0]
        if request_id in traffic.poisoned:
            assert completion.finish_reason == "error"
        elif completion.finish_reason == "error":
            assert with_poison, completion.stop_reason
        elif list(completion.token_ids) != answer(prompt, tokens):
            wrong.append(request_id)
    assert not wrong
    assert len(traffic.results) + len(traffic.aborted) >= len(traffic.prompts)
    hits = sum((output.num_cached_tokens or 0) for output in traffic.results.values())
    assert hits >= 4 * block, "the traffic must use the caches"
    assert engine.reset_prefix_cache(reset_connector=True), "nothing is held at rest"
    engine.shutdown()
