"""A retention hint on the real engine: what was asked to be kept is still there, bit for bit, after a flood."""

from __future__ import annotations

from typing import Any

import pytest

from tests.helpers.engine_configs import engine_args, prompt_of
from vllm.outputs import RequestOutput
from vllm.sampling_params import SamplingParams
from vllm.v1.engine.llm_engine import LLMEngine


def ask(
    engine: LLMEngine, request_id: str, prompt: list[int], hint: dict[str, Any] | None
) -> tuple[Any, int]:
    extra = None if hint is None else {"kv_retention": hint}
    params = SamplingParams(max_tokens=4, temperature=0.0, ignore_eos=True, logprobs=3, extra_args=extra)
    engine.add_request(request_id, {"prompt_token_ids": prompt}, params)
    for _ in range(500):
        for output in engine.step():
            if output.finished:
                assert isinstance(output, RequestOutput)
                made = output.outputs[0]
                assert made.logprobs is not None
                values = [{token: p.logprob for token, p in place.items()} for place in made.logprobs]
                return (list(made.token_ids), values), output.num_cached_tokens or 0
    raise AssertionError("the engine makes no progress")


@pytest.mark.parametrize("name", ["llama", "glm5_next"])
def test_a_pinned_prompt_is_hit_after_a_flood_and_an_unpinned_one_is_not(name: str) -> None:
    args = engine_args(name, max_model_len=512, num_gpu_blocks_override=60, kv_retention_share=0.5)
    engine = LLMEngine.from_engine_args(args, enable_multiprocessing=False)
    try:
        block = engine.cache_config.cache_hit_alignment_tokens
        assert block is not None
        first = [prompt_of(2 * block + 5, seed) for seed in range(2)]
        _, none = ask(engine, "pinned", first[0], {"pin": True, "ttl": "1h"})
        ask(engine, "plain", first[1], None)
        # From the device, as a hit computes it: the yardstick for what comes after the flood.
        before, cached = ask(engine, "again", first[0], None)
        assert (none, cached) == (0, 2 * block)
        for seed in range(5, 45):
            ask(engine, f"flood{seed}", prompt_of(2 * block + 5, seed), None)
        after, kept = ask(engine, "later", first[0], None)
        _, lost = ask(engine, "lost", first[1], None)
        assert (kept, lost) == (2 * block, 0)
        assert after == before
    finally:
        engine.shutdown()
