"""What requests report of their prompts, and that the counters count the same."""

from __future__ import annotations

from typing import Any

import pytest

from vllm.outputs import RequestError, RequestOutput
from vllm.sampling_params import RequestOutputKind, SamplingParams
from vllm.v1.engine.output_processor import OutputProcessor
from vllm.v1.engine.parallel_sampling import ParentRequest
from vllm.v1.messages import EngineCoreOutput, EngineCoreRequest, FinishReason
from vllm.v1.metrics.cache_hit_source import CacheHitSource
from vllm.v1.metrics.stats import IterationStats, PrefillStats

DELTA, FINAL = RequestOutputKind.DELTA, RequestOutputKind.FINAL_ONLY


def make_request(request_id: str, params: SamplingParams) -> EngineCoreRequest:
    return EngineCoreRequest(
        request_id, [1] * 20, None, params, None, 0.0, None, None, None, external_req_id=f"ext-{request_id}"
    )


def processor() -> OutputProcessor:
    return OutputProcessor(None, log_stats=True)


def out(request_id: str, token: int, end: FinishReason | None = None, **fields: Any) -> EngineCoreOutput:
    return EngineCoreOutput(request_id, [token], finish_reason=end, **fields)


def outputs_of(made: Any) -> list[RequestOutput]:
    return made.request_outputs


def add_samples(proc: OutputProcessor, n: int, kind: RequestOutputKind) -> None:
    parent = ParentRequest(make_request("p", SamplingParams(n=n, output_kind=kind, detokenize=False)))
    for index in range(n):
        child_id, params = parent.get_child_info(index)
        proc.add_request(make_request(child_id, params), None, parent, index)


def found(device: int, host: int) -> PrefillStats:
    stats = PrefillStats()
    stats.set(20, device, host, {CacheHitSource.HOST: host})
    stats.num_cache_creation_tokens = 16 - device - host
    return stats


@pytest.mark.parametrize("kind", [DELTA, FINAL])
def test_the_samples_of_a_prompt_report_what_the_first_one_found(kind: RequestOutputKind) -> None:
    proc = processor()
    add_samples(proc, 3, kind)
    stats = IterationStats(1.0)
    end = FinishReason.LENGTH
    first = [out("1_p", 40, prefill_stats=found(0, 8)), out("0_p", 41, prefill_stats=found(16, 0))]
    made = outputs_of(proc.process_outputs(first, 1.0, stats))
    last = [out("2_p", 42, end, prefill_stats=found(16, 0)), out("0_p", 4, end), out("1_p", 4, end)]
    made += outputs_of(proc.process_outputs(last, 1.0, stats))
    assert {output.num_cached_tokens for output in made} == {8}
    assert {output.num_cache_creation_tokens for output in made} == {8}
    assert all(output.cached_tokens_by_source == {"device": 0, "host": 8} for output in made)
    assert stats.cached_prompt_tokens_by_source == {CacheHitSource.DEVICE: 0, CacheHitSource.HOST: 8}
    assert (stats.num_prompt_tokens, stats.num_cached_prompt_tokens) == (20, 8)
    assert stats.num_computed_prompt_tokens == 12 + 4 + 4, "work is work"
    told = proc.with_reported({"hits": [{"tier": "host"}, {"tier": "device"}]}, 0)
    assert [hit["tokens_reported"] for hit in told["hits"]] == [8, 0]


def test_what_ends_before_its_first_token_reports_nothing() -> None:
    proc = processor()
    for name in ("aborted", "failed", "fine"):
        proc.add_request(make_request(name, SamplingParams(detokenize=False)), None)
    stats = IterationStats(1.0)
    proc.abort_requests(["aborted"], internal=True)
    error = RequestError("grammar_violated", "no")
    outputs = [
        out("aborted", 40, prefill_stats=found(4, 8)),
        out("failed", 40, FinishReason.ERROR, prefill_stats=found(4, 8), error=error),
        out("fine", 40, FinishReason.LENGTH, prefill_stats=found(8, 4)),
    ]
    made = {o.request_id: o for o in outputs_of(proc.process_outputs(outputs, 1.0, stats, engine_index=1))}
    assert {name: o.cached_tokens_by_source for name, o in made.items()} == {
        "ext-failed": None,
        "ext-fine": {"device": 8, "host": 4},
    }
    assert stats.cached_prompt_tokens_by_source == {CacheHitSource.DEVICE: 8, CacheHitSource.HOST: 4}
    assert stats.num_prompt_tokens == 20
    for engine, count in ((0, 0), (1, 4)):
        (hit,) = proc.with_reported({"hits": [{"tier": "host", "tokens_hit": 9}]}, engine)["hits"]
        assert hit == {"tier": "host", "tokens_hit": 9, "tokens_reported": count}
