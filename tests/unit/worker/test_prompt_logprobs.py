"""Prompt log probabilities are collected over chunks, in bounded pieces, for the positions that were asked for."""

from __future__ import annotations

import math

import pytest
import torch

from vllm.sampling_params import SamplingParams
from vllm.v1.worker import prompt_logprobs
from vllm.v1.worker.prompt_logprobs import PromptLogprobsCollector, wants_prompt_logprobs

VOCAB = 12
PROMPT = [3, 1, 4, 1, 5, 9, 2, 6]
HEAD = torch.randn(5, VOCAB, generator=torch.Generator().manual_seed(0))
HIDDEN = torch.randn(len(PROMPT), 5, generator=torch.Generator().manual_seed(1))


def collect(params: SamplingParams, chunks: list[int], sizes: list[int] | None = None, mode="raw_logprobs"):
    def compute_logits(hidden: torch.Tensor) -> torch.Tensor:
        if sizes is not None:
            sizes.append(hidden.shape[0])
        return hidden @ HEAD

    collector = PromptLogprobsCollector(VOCAB, compute_logits, mode)
    collected = collector.start(params, PROMPT)
    start = 0
    for count in chunks:
        collector.add(collected, params, PROMPT, start, HIDDEN[start : start + count])
        start += count
    return collected


REFERENCE = (HIDDEN @ HEAD).log_softmax(-1)


@pytest.mark.parametrize("chunks", [[8], [3, 5], [1] * 8, [7, 1]])
def test_every_chunking_gives_the_same_rows(chunks) -> None:
    tensors = collect(SamplingParams(prompt_logprobs=2), chunks).tensors
    assert tensors.logprob_token_ids.shape == (7, 3)
    for i, token in enumerate(PROMPT[1:]):
        order = REFERENCE[i].argsort(descending=True).tolist()
        assert tensors.logprob_token_ids[i].tolist() == [token, *order[:2]]
        assert torch.allclose(tensors.logprobs[i], REFERENCE[i, [token, *order[:2]]], atol=1e-6)
        assert tensors.selected_token_ranks[i] == order.index(token) + 1


def test_val_05_scratch_memory_does_not_grow_with_the_prompt(monkeypatch) -> None:
    monkeypatch.setattr(prompt_logprobs, "SCRATCH_BYTES_MAX", 2 * 4 * VOCAB)
    sizes: list[int] = []
    tensors = collect(SamplingParams(prompt_logprobs=-1), [8], sizes).tensors
    assert max(sizes) == 2
    assert tensors.logprobs.shape == (7, VOCAB + 1)
    assert torch.isfinite(tensors.logprobs).all()


def test_chosen_tokens_and_start() -> None:
    params = SamplingParams(prompt_logprob_token_ids=[0, 7], prompt_logprob_start=4)
    assert wants_prompt_logprobs(params)
    assert not wants_prompt_logprobs(SamplingParams())
    collected = collect(params, [2, 6])
    assert collected.tensors is None
    assert torch.allclose(collected.specific, REFERENCE[3:7][:, [0, 7]], atol=1e-6)


def test_raw_logits_mode_reports_logits() -> None:
    tensors = collect(SamplingParams(prompt_logprobs=0), [8], mode="raw_logits").tensors
    expected = (HIDDEN @ HEAD)[torch.arange(7), torch.tensor(PROMPT[1:])]
    assert torch.allclose(tensors.logprobs[:, 0], expected, atol=1e-6)


def test_pfx_13_positions_that_were_not_computed_are_marked() -> None:
    params = SamplingParams(prompt_logprobs=1)
    collector = PromptLogprobsCollector(VOCAB, lambda hidden: hidden @ HEAD)
    collected = collector.start(params, PROMPT)
    collector.add(collected, params, PROMPT, 4, HIDDEN[4:])
    assert collected.tensors.logprob_token_ids[:, 0].tolist() == PROMPT[1:]
    assert all(math.isnan(x) for x in collected.tensors.logprobs[:4, 0])
    assert torch.isfinite(collected.tensors.logprobs[4:]).all()


def test_a_prompt_of_one_token_has_no_rows() -> None:
    collector = PromptLogprobsCollector(VOCAB, lambda hidden: hidden @ HEAD)
    collected = collector.start(SamplingParams(prompt_logprobs=1), [5])
    collector.add(collected, SamplingParams(prompt_logprobs=1), [5], 0, HIDDEN[:1])
    assert collected.tensors.logprobs.shape == (0, 2)
