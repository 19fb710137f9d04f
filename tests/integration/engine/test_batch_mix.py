"""What runs beside a request must not show in its answer: solo, then all together in steps too small for them."""

from __future__ import annotations

import random

import pytest

from tests.helpers.engine_configs import engine_args
from vllm.outputs import CompletionOutput
from vllm.platforms.cpu import _cpu_features
from vllm.sampling_params import SamplingParams
from vllm.v1.engine.llm_engine import LLMEngine

# Where the math library cannot fix the order of its sums, layers that amplify rounding show it.
TOLERANCE = 1e-4 if "avx2" in _cpu_features() else 1e-3


def answers(engine: LLMEngine, prompts: list[list[int]], prefix: str) -> list[CompletionOutput]:
    params = SamplingParams(max_tokens=16, temperature=0.0, ignore_eos=True, logprobs=5)
    for i, prompt in enumerate(prompts):
        engine.add_request(f"{prefix}{i}", {"prompt_token_ids": prompt}, params)
    done: dict[str, CompletionOutput] = {}
    while engine.has_unfinished_requests():
        done |= {out.request_id: out.outputs[0] for out in engine.step() if out.finished}
    return [done[f"{prefix}{i}"] for i in range(len(prompts))]


@pytest.mark.parametrize("name", ["llama", "glm5_next", "gemma4"])
def test_the_batch_does_not_show_in_the_answer(name: str) -> None:
    rng = random.Random(0)
    prompts = [[rng.randrange(5, 200) for _ in range(rng.randrange(20, 120))] for _ in range(8)]
    args = engine_args(name, max_num_batched_tokens=96, enable_prefix_caching=False)
    # A process of its own: the order of sums is fixed before the first product.
    engine = LLMEngine.from_engine_args(args, enable_multiprocessing=True)
    try:
        solo = [answers(engine, [prompt], f"solo {i} ")[0] for i, prompt in enumerate(prompts)]
        together = answers(engine, prompts, "all ")
    finally:
        engine.shutdown()
    for alone, mixed in zip(solo, together, strict=True):
        assert alone.token_ids == mixed.token_ids
        assert alone.logprobs is not None
        assert mixed.logprobs is not None
        for left, right in zip(alone.logprobs, mixed.logprobs, strict=True):
            shared = left.keys() & right.keys()
            assert len(shared) >= 4
            assert max(abs(left[t].logprob - right[t].logprob) for t in shared) <= TOLERANCE
