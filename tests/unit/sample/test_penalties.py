"""Penalties from lists and from kept counts equal a slow reference."""

from __future__ import annotations

import random

import pytest
import torch

from tests.helpers.sampling import penalised
from vllm.utils.torch_utils import make_tensor_with_pad
from vllm.v1.sample.ops.penalties import apply_all_penalties, apply_counted_penalties
from vllm.v1.sample.ops.token_counts import TokenCounter, gather_counts

VOCAB = 40


@pytest.fixture
def case():
    rng = random.Random(1)
    prompts = [[rng.randrange(VOCAB) for _ in range(n)] for n in (5, 0, 12, 1)]
    outputs = [[rng.randrange(VOCAB) for _ in range(n)] for n in (7, 3, 0, 200)]
    logits = torch.randn(4, VOCAB, generator=torch.Generator().manual_seed(2)) * 3
    penalties = [
        torch.tensor([0.0, 1.5, -2.0, 0.5]),
        torch.tensor([0.7, 0.0, 1.0, -0.3]),
        torch.tensor([1.3, 0.8, 2.0, 1.0]),
    ]
    expected = torch.tensor(
        [
            penalised(row.tolist(), prompts[i], outputs[i], *(float(p[i]) for p in penalties))
            for i, row in enumerate(logits)
        ]
    )
    return prompts, outputs, logits, penalties, expected


def test_penalties_from_lists(case) -> None:
    prompts, outputs, logits, (presence, frequency, repetition), expected = case
    padded = make_tensor_with_pad(prompts, VOCAB, torch.int64)
    result = apply_all_penalties(logits.clone(), padded, presence, frequency, repetition, outputs)
    assert torch.allclose(result, expected, atol=1e-5)


def test_penalties_from_counts_kept_token_by_token(case) -> None:
    prompts, outputs, logits, (presence, frequency, repetition), expected = case
    counters = {}
    for row, (prompt, output) in enumerate(zip(prompts, outputs, strict=True)):
        counters[row] = TokenCounter(VOCAB, prompt, output[:2])
        for token in output[2:]:
            counters[row].add(token)
    counted = gather_counts(counters, torch.device("cpu"))
    result = apply_counted_penalties(logits.clone(), counted, presence, frequency, repetition)
    assert torch.allclose(result, expected, atol=1e-5)


def test_rows_without_a_counter_are_left_alone(case) -> None:
    prompts, outputs, logits, (presence, frequency, repetition), expected = case
    counted = gather_counts({2: TokenCounter(VOCAB, prompts[2], outputs[2])}, torch.device("cpu"))
    result = apply_counted_penalties(logits.clone(), counted, presence, frequency, repetition)
    assert torch.allclose(result[2], expected[2], atol=1e-5)
    assert torch.equal(result[[0, 1, 3]], logits[[0, 1, 3]])


def test_unknown_tokens_are_not_counted() -> None:
    counter = TokenCounter(VOCAB, [VOCAB, -1, 3], [])
    counter.add(-1)
    assert len(counter) == 1
    outputs = apply_all_penalties(
        torch.ones(1, VOCAB),
        torch.tensor([[VOCAB, 3]]),
        torch.ones(1),
        torch.ones(1),
        torch.ones(1),
        [[-1, 5]],
    )
    assert outputs[0, 5] == -1.0
    assert outputs[0, [0, 3, VOCAB - 1]].tolist() == [1.0, 1.0, 1.0]
