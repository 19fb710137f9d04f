"""Questions about the cache, asked of an engine in this process: look-ups agree with what requests report."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest

from tests.helpers.engine_configs import engine_args, offload_settings
from vllm.exceptions import VLLMValidationError
from vllm.outputs import RequestOutput
from vllm.sampling_params import SamplingParams
from vllm.v1.engine.llm_engine import LLMEngine

PROMPT = [5 + 7 * i % 200 for i in range(70)]


def make_engine(**overrides: Any) -> LLMEngine:
    return LLMEngine.from_engine_args(engine_args(**overrides), enable_multiprocessing=False)


@pytest.fixture(scope="module")
def engine() -> Iterator[LLMEngine]:
    made = make_engine(**offload_settings())
    yield made
    made.shutdown()


def run(engine: LLMEngine, name: str, prompt: list[int], **params: Any) -> RequestOutput:
    """The last output of one request."""
    engine.add_request(name, {"prompt_token_ids": prompt}, SamplingParams(max_tokens=2, **params))
    outputs: list[Any] = []
    while engine.has_unfinished_requests():
        outputs += engine.step()
    return outputs[-1]


def test_look_ups_follow_a_prompt_through_the_tiers(engine: LLMEngine) -> None:
    assert engine.lookup_kv_cache(PROMPT)["cached_tokens"] == 0
    first = run(engine, "a", PROMPT)
    assert first.cached_tokens_by_source == {"device": 0, "host": 0}
    found = engine.lookup_kv_cache(PROMPT)
    assert found["cached_tokens_by_source"] == {"device": 64, "host": 0}
    assert found["tokens_by_tier"] == {"device": 64, "host": 64}
    assert engine.reset_prefix_cache()
    found = engine.lookup_kv_cache(PROMPT)
    assert found["cached_tokens_by_source"] == {"device": 0, "host": 64}
    again = run(engine, "b", PROMPT)
    assert again.cached_tokens_by_source == found["cached_tokens_by_source"]
    assert again.num_cached_tokens == found["cached_tokens"] == 64
    assert engine.lookup_kv_cache(PROMPT, cache_salt="s")["cached_tokens"] == 0


def test_reports_count_what_requests_report(engine: LLMEngine) -> None:
    before = {hit["tier"]: hit["tokens_hit"] for hit in engine.get_kv_cache_report()["hits"]}
    told = [run(engine, f"c{i}", [9, *PROMPT]).cached_tokens_by_source for i in range(3)]
    report = engine.get_kv_cache_report()
    for hit in report["hits"]:
        assert hit["tokens_hit"] - before[hit["tier"]] == sum(t[hit["tier"]] for t in told)
    device, host = report["pools"]
    assert device["blocks_free"] + device["blocks_held"] == device["blocks_total"]
    assert host["blocks_total"] * host["block_bytes"] <= 32 << 20
    assert [group["use"] for group in report["groups"]] == ["cache"]


def test_look_ups_are_refused_as_requests_are(engine: LLMEngine) -> None:
    for prompt in ([], [10**6], [5] * 4000):
        with pytest.raises(VLLMValidationError):
            engine.lookup_kv_cache(prompt)
    assert not engine.has_unfinished_requests()


def test_without_a_prefix_cache_nothing_is_found() -> None:
    engine = make_engine(enable_prefix_caching=False)
    try:
        run(engine, "a", PROMPT)
        found = engine.lookup_kv_cache(PROMPT)
        assert (found["cached_tokens"], found["cached_tokens_by_source"]) == (0, {"device": 0})
        report = engine.get_kv_cache_report()
        assert report["prefix_caching"] is False
        assert report["pools"][0]["blocks_cached"] == 0
        assert report["transfers"] == ()
    finally:
        engine.shutdown()
