"""What counts as a token of a request's output: what the request tells of, and nothing else."""

from __future__ import annotations

from typing import Any

import pytest

from tests.helpers.tiny_tokenizers import make_tokenizer
from vllm.sampling_params import SamplingParams
from vllm.v1.engine.output_processor import OutputProcessor
from vllm.v1.messages import EngineCoreOutput, EngineCoreRequest, FinishReason
from vllm.v1.metrics.stats import IterationStats, PrefillStats

TOKENIZER = make_tokenizer("byte_level")
PROMPT = TOKENIZER.encode("hello ")


def processor_of(params: SamplingParams) -> OutputProcessor:
    proc = OutputProcessor(TOKENIZER, log_stats=True)
    request = EngineCoreRequest("r", PROMPT, None, params, None, 0.0, None, None, None)
    proc.add_request(request, None)
    return proc


def out(ids: list[int], finish: FinishReason | None = None, **more: Any) -> EngineCoreOutput:
    return EngineCoreOutput("r", ids, finish_reason=finish, **more)


def test_tokens_behind_a_stop_string_are_not_counted() -> None:
    proc = processor_of(SamplingParams(stop=["b"], max_tokens=9))
    stats = IterationStats(1.0)
    made = proc.process_outputs([out(TOKENIZER.encode("abcd"))], 1.0, stats)
    (output,) = made.request_outputs
    assert (
        len(output.outputs[0].token_ids)  # type: ignore[union-attr]
        == stats.num_generation_tokens
        == stats.finished_requests[0].num_generation_tokens
        == stats.max_num_generation_tokens_iter[0]
        == 2
    )


@pytest.mark.parametrize("completes_prompt", [False, True])
def test_a_token_that_nobody_asked_for_is_no_output(completes_prompt: bool) -> None:
    """It ends the prefill all the same; the last token of a prompt that is made counts with the prompt."""
    params = SamplingParams(max_tokens=1)
    params.score_prompt(completes_prompt)
    proc = processor_of(params)
    prefill = PrefillStats()
    prefill.set(6, 4, 0)
    stats = IterationStats(10.0)
    proc.process_outputs([out([40], FinishReason.LENGTH, prefill_stats=prefill)], 3.0, stats)
    (finished,) = stats.finished_requests
    assert (stats.num_generation_tokens, finished.num_generation_tokens, finished.max_tokens_param) == (
        0,
        0,
        0,
    )
    assert stats.max_num_generation_tokens_iter == [0]
    assert stats.time_to_first_tokens_iter == [10.0]
    assert finished.prefill_time == 3.0
    own = len(PROMPT)
    assert (stats.num_prompt_tokens, finished.num_prompt_tokens) == (
        6 + completes_prompt,
        own + completes_prompt,
    )
