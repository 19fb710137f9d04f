"""GLM-5.3 on two worker processes: what every rank keeps whole stays equal on all of them, whichever cache it comes from."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from tests.helpers import rank_pages
from tests.helpers.engine_configs import offload_settings, prompt_of
from tests.integration.engine.test_several_ranks import GREEDY, TOLERANCE, difference, run, settle, start
from vllm.outputs import RequestOutput
from vllm.platforms.cpu import _cpu_features
from vllm.v1.engine.llm_engine import LLMEngine

# Where the math library cannot fix the order of its sums, they depend on the batch.
BESIDE_OTHERS = 0.0 if "avx2" in _cpu_features() else 1e-3
# Few blocks: some prompts at once do not fit.
BLOCKS = 28
PROMPTS = [prompt_of(length, length) for length in (100, 37, 150, 64, 129)]


@pytest.fixture(scope="module")
def engine() -> Iterator[LLMEngine]:
    """Two ranks with a pool each."""
    engine = start("glm5_next", num_gpu_blocks_override=BLOCKS, **offload_settings())
    engine.collective_rpc(rank_pages.watch)
    yield engine
    engine.shutdown()


def run_and_look(engine: LLMEngine, prompt: list[int]) -> tuple[RequestOutput, list[dict[str, str]]]:
    """The answer, and what each rank held in the last step."""
    (output,) = run(engine, [prompt])
    return output, engine.collective_rpc(rank_pages.digests)


def test_latents_are_equal_on_all_ranks_and_come_back_as_they_were(engine: LLMEngine) -> None:
    block = engine.cache_config.cache_hit_alignment_tokens
    assert block == 32
    for prompt in PROMPTS[:3]:
        assert engine.reset_prefix_cache(reset_connector=True)
        output, (first, second) = run_and_look(engine, prompt)
        assert output.num_cached_tokens == 0
        assert {name.rpartition(".")[2]: first[name] == second[name] for name in first} == {
            "linear_attn": False,
            "attn": True,
            "k_cache": True,
            "kpool_tail": True,
        }
        settle(engine)
        for tier in ("device", "host"):
            hit, ranks = run_and_look(engine, prompt)
            assert hit.num_cached_tokens == (len(prompt) - 1) // block * block, tier
            assert difference(hit, output) == 0.0
            assert ranks == [first, second], tier
            assert engine.reset_prefix_cache()
    for _, stored, stored_rings in engine.collective_rpc(rank_pages.seen):
        assert stored > 0
        assert stored_rings == 0


def test_an_answer_is_bitwise_the_same_beside_others(engine: LLMEngine) -> None:
    """Each prompt is computed in one step, beside the prompts and the decoding of others."""
    prompts = [prompt_of(length, length) for length in (60, 37, 20)]
    assert engine.reset_prefix_cache(reset_connector=True)
    alone = [run(engine, [prompt])[0] for prompt in prompts]
    assert engine.reset_prefix_cache(reset_connector=True)
    beside: dict[str, RequestOutput] = {}
    for index, prompt in enumerate(prompts):
        engine.add_request(str(index), {"prompt_token_ids": prompt}, GREEDY)
        for output in engine.step():
            assert not output.finished
    while engine.has_unfinished_requests():
        beside |= {o.request_id: o for o in engine.step() if isinstance(o, RequestOutput) and o.finished}
    assert max(difference(beside[str(i)], output) for i, output in enumerate(alone)) <= BESIDE_OTHERS


def test_preempted_and_mixed_requests_get_the_answers_of_one_rank(engine: LLMEngine) -> None:
    assert engine.reset_prefix_cache(reset_connector=True)
    mixed = run(engine, PROMPTS)
    again = run(engine, PROMPTS)
    assert all(preempted > 0 for preempted, _, _ in engine.collective_rpc(rank_pages.seen))
    alone = start("glm5_next", ranks=1)
    reference = run(alone, PROMPTS)
    alone.shutdown()
    for outputs in (mixed, again):
        assert max(map(difference, reference, outputs)) <= TOLERANCE
