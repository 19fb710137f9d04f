"""Beam search on top of an engine that samples: one token for every beam per round. Layer: L8."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

from vllm.exceptions import VLLMValidationError
from vllm.inputs import PromptType, TokensPrompt
from vllm.logprobs import LogprobsOnePosition
from vllm.outputs import RequestOutput
from vllm.sampling_params import BeamSearchParams, SamplingParams

Step = Callable[[list[PromptType], SamplingParams], list[RequestOutput]]


@dataclass
class BeamSearchSequence:
    """One beam: prompt and continuation, and the log probabilities of its tokens."""

    tokens: list[int]
    logprobs: list[LogprobsOnePosition] = field(default_factory=list)
    cum_logprob: float = 0.0
    text: str | None = None
    finish_reason: str | None = None
    stop_reason: int | str | None = None


@dataclass
class BeamSearchOutput:
    """The beams of one prompt, best first."""

    sequences: list[BeamSearchSequence]


def beam_score(beam: BeamSearchSequence, prompt_length: int, length_penalty: float) -> float:
    """Mean log probability, by generated length to the power of the penalty."""
    length: float = max(1, len(beam.tokens) - prompt_length) ** length_penalty
    return beam.cum_logprob / length


def check_beam_params(params: BeamSearchParams) -> None:
    """Raises VLLMValidationError naming the field for what no search can do, or this one cannot."""
    for name, number in (("beam_width", params.beam_width), ("max_tokens", params.max_tokens)):
        if isinstance(number, bool) or not isinstance(number, int) or number < 1:
            raise VLLMValidationError(f"{name} must be an integer from 1, got {number!r}", parameter=name)
    for name in ("structured_outputs", "watermarking"):
        if getattr(params, name) is not None:
            raise VLLMValidationError(f"{name} is not supported by beam search", parameter=name)


def beam_search(step: Step, tokenizer: Any, prompt: PromptType, params: BeamSearchParams) -> BeamSearchOutput:
    """The `beam_width` best continuations of one prompt. `step` makes one token for each of several prompts."""
    start = _token_ids(tokenizer, prompt)
    one_token = SamplingParams(
        max_tokens=1,
        temperature=params.temperature,
        logprobs=2 * params.beam_width,
        allowed_token_ids=params.allowed_token_ids,
        ignore_eos=True,
        detokenize=False,
    )
    beams = [BeamSearchSequence(start)]
    finished: list[BeamSearchSequence] = []
    for _ in range(params.max_tokens):
        outputs = step([TokensPrompt(prompt_token_ids=beam.tokens) for beam in beams], one_token)
        grown: list[BeamSearchSequence] = []
        for beam, output in zip(beams, outputs, strict=True):
            for candidate in _grow(beam, output):
                ended = candidate.tokens[-1] == tokenizer.eos_token_id and not params.ignore_eos
                (finished if ended else grown).append(candidate)
        beams = sorted(grown, key=lambda beam: -beam.cum_logprob)[: params.beam_width]
        if not beams:
            break
    for beam in finished:
        beam.finish_reason, beam.stop_reason = "stop", beam.tokens[-1]
    for beam in beams:
        beam.finish_reason = "length"
    best = sorted(finished + beams, key=lambda beam: -beam_score(beam, len(start), params.length_penalty))
    for beam in best[: params.beam_width]:
        shown = beam.tokens[len(start) :]
        if beam.finish_reason == "stop" and not params.include_stop_str_in_output:
            shown = shown[:-1]
        beam.text = tokenizer.decode(shown, skip_special_tokens=params.skip_special_tokens)
    return BeamSearchOutput(best[: params.beam_width])


def _grow(beam: BeamSearchSequence, output: RequestOutput) -> list[BeamSearchSequence]:
    logprobs = output.outputs[0].logprobs
    if not logprobs:
        return []
    position: LogprobsOnePosition = logprobs[0]
    return [
        BeamSearchSequence(
            [*beam.tokens, token_id], [*beam.logprobs, position], beam.cum_logprob + entry.logprob
        )
        for token_id, entry in position.items()
    ]


def _token_ids(tokenizer: Any, prompt: PromptType) -> list[int]:
    if isinstance(prompt, str):
        return list(tokenizer.encode(prompt))
    if isinstance(prompt, Mapping):
        given: Any = prompt
        return (
            list(given["prompt_token_ids"])
            if "prompt_token_ids" in given
            else list(tokenizer.encode(given["prompt"]))
        )
    return list(prompt)
