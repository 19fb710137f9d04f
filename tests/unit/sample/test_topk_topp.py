"""Top-k and top-p: the fast path, the plain path and a slow reference agree; draws follow the surviving weights."""

from __future__ import annotations

import math
import random

import pytest
import torch

from tests.helpers.sampling import drawn_token, surviving_tokens
from vllm.v1.sample.ops.topk_topp_sampler import (
    TopKTopPSampler,
    _pick,
    apply_top_k_top_p,
    apply_top_k_top_p_pytorch,
    random_sample,
)

VOCAB = 1500


def make_logits(rows: int, seed: int, ties: bool = False, vocab: int = VOCAB) -> torch.Tensor:
    generator = torch.Generator().manual_seed(seed)
    logits = torch.randn(rows, vocab, generator=generator) * 2
    return (logits * 2).round() / 2 if ties else logits


def survivors(masked: torch.Tensor) -> list[set[int]]:
    return [set(torch.isfinite(row).nonzero().flatten().tolist()) for row in masked]


@pytest.mark.parametrize("ties", [False, True])
@pytest.mark.parametrize(
    ("ks", "ps"),
    [
        ([1, 5, 40, VOCAB], None),
        ([3, 3, 3, 3], [0.1, 0.5, 0.9, 1.0]),
        (None, [0.01, 0.5, 0.9, 0.999]),
        (None, [0.3, 0.3, 0.3, 1.0]),
        ([0, -1, 700, VOCAB + 5], [0.9, 0.2, 0.7, 0.95]),
        ([VOCAB] * 4, [0.99] * 4),
    ],
)
@pytest.mark.parametrize("apply", [apply_top_k_top_p, apply_top_k_top_p_pytorch])
def test_restriction_matches_slow_reference(apply, ks, ps, ties) -> None:
    logits = make_logits(4, seed=len(str(ks)) + len(str(ps)), ties=ties)
    expected = [
        surviving_tokens(row.tolist(), None if ks is None else ks[i], None if ps is None else ps[i])
        for i, row in enumerate(logits)
    ]
    k = None if ks is None else torch.tensor(ks)
    p = None if ps is None else torch.tensor(ps, dtype=torch.float64)
    masked = apply(logits.clone(), k, p)
    assert survivors(masked) == expected
    kept = torch.isfinite(masked)
    assert torch.equal(masked[kept], logits[kept])


def test_exactly_k_survive_when_all_logits_are_equal() -> None:
    masked = apply_top_k_top_p(torch.zeros(2, 50), torch.tensor([3, 7]), None)
    assert survivors(masked) == [{0, 1, 2}, set(range(7))]


def test_the_best_token_survives_the_smallest_top_p() -> None:
    logits = make_logits(3, 1)
    best = logits.argmax(dim=-1).tolist()
    masked = apply_top_k_top_p(logits.clone(), None, torch.full((3,), 1e-6))
    assert survivors(masked) == [{token} for token in best]


def test_wide_nuclei_are_found_in_stages() -> None:
    vocab = 20000
    logits = make_logits(3, 11, vocab=vocab)
    logits[0] *= 0.3
    logits[0, :3000] += 9.0
    logits[1] *= 0.01
    logits[2, 5] += 30.0
    p = torch.tensor([0.9, 0.999, 0.3], dtype=torch.float64)
    expected = [surviving_tokens(row.tolist(), None, float(p[i])) for i, row in enumerate(logits)]
    assert len(expected[1]) > 8192 > len(expected[0]) > 512 > len(expected[2]) == 1
    assert survivors(apply_top_k_top_p(logits.clone(), None, p)) == expected
    draws = torch.tensor([0.4, 0.99999, 0.2], dtype=torch.float64)
    tokens, _ = TopKTopPSampler()(logits.clone(), {}, None, p, draws)
    wanted = [drawn_token(row.tolist(), expected[i], float(draws[i])) for i, row in enumerate(logits)]
    assert tokens.tolist() == wanted


@pytest.mark.parametrize("vocab", [7, 64, 1000, 4096])
def test_the_ends_of_the_unit_interval_pick_tokens_with_weight(vocab) -> None:
    weights = torch.rand(50, vocab, generator=torch.Generator().manual_seed(0))
    weights[:, :2] = 0.0
    weights[:, -2:] = 0.0
    weights[weights < 0.5] = 0.0
    weights[:, 3] = 1.0
    low = _pick(weights, torch.zeros(50, dtype=torch.float64))
    high = _pick(weights, torch.full((50,), 1.0 - 2.0**-53, dtype=torch.float64))
    positions = [row.nonzero().flatten().tolist() for row in weights]
    assert low.tolist() == [p[0] for p in positions]
    assert high.tolist() == [p[-1] for p in positions]


def test_nothing_happens_without_restriction() -> None:
    logits = make_logits(2, 0)
    assert torch.equal(apply_top_k_top_p(logits.clone(), None, None), logits)


@pytest.mark.parametrize("ties", [False, True])
def test_drawn_tokens_match_slow_reference(ties) -> None:
    rng = random.Random(3)
    logits = make_logits(6, 9, ties)
    ks = [4, VOCAB, 30, VOCAB, 1, 900]
    ps = [0.9, 0.5, 1.0, 1.0, 0.7, 0.99]
    draws = [rng.random() for _ in range(6)]
    expected = [
        drawn_token(row.tolist(), surviving_tokens(row.tolist(), ks[i], ps[i]), draws[i])
        for i, row in enumerate(logits)
    ]
    sampler = TopKTopPSampler()
    tokens, processed = sampler(
        logits.clone(),
        {},
        torch.tensor(ks),
        torch.tensor(ps, dtype=torch.float64),
        torch.tensor(draws, dtype=torch.float64),
    )
    assert tokens.tolist() == expected
    assert processed is None


def test_draws_choose_among_the_lowest_ids_where_ties_are_cut() -> None:
    logits = torch.zeros(3, VOCAB)
    logits[2, 700] = 5.0
    k, p = torch.tensor([4, VOCAB, 3]), torch.tensor([1.0, 10.5 / VOCAB, 1.0], dtype=torch.float64)
    seen: list[set[int]] = [set(), set(), set()]
    for step in range(200):
        draws = torch.full((3,), step / 200, dtype=torch.float64)
        for row, token in enumerate(TopKTopPSampler()(logits.clone(), {}, k, p, draws)[0].tolist()):
            seen[row].add(token)
    assert seen == [set(range(4)), set(range(11)), {0, 1, 700}]


def test_a_row_draws_the_same_token_whatever_its_mates_want() -> None:
    logits = make_logits(1, 5)
    draw = torch.tensor([0.73], dtype=torch.float64)
    k, p = torch.tensor([20]), torch.tensor([0.95])
    alone, _ = TopKTopPSampler()(logits.clone(), {}, k, p, draw)
    mates = make_logits(5, 6)
    many, _ = TopKTopPSampler()(
        torch.cat([mates, logits]),
        {},
        torch.tensor([VOCAB, 700, 1, 2, VOCAB, 20]),
        torch.tensor([0.9999, 1.0, 0.1, 0.5, 0.3, 0.95]),
        torch.cat([torch.rand(5, dtype=torch.float64), draw]),
    )
    assert many[-1] == alone[0]


@pytest.mark.parametrize("mode", ["processed_logits", "processed_logprobs"])
def test_processed_modes_report_what_the_restriction_left(mode) -> None:
    logits = make_logits(2, 4)
    tokens, processed = TopKTopPSampler(mode)(
        logits.clone(), {}, torch.tensor([5, 9]), None, torch.tensor([0.2, 0.9], dtype=torch.float64)
    )
    left = apply_top_k_top_p(logits.clone(), torch.tensor([5, 9]), None)
    wanted = left if mode == "processed_logits" else left.log_softmax(-1)
    assert torch.allclose(processed, wanted)
    assert torch.isfinite(processed.gather(1, tokens.unsqueeze(1))).all()


def test_random_sample_never_picks_weight_zero_and_follows_weights() -> None:
    torch.manual_seed(0)
    weights = torch.tensor([0.0, 0.5, 0.0, 0.25, 0.25, 0.0]).repeat(4000, 1)
    counts = torch.bincount(random_sample(weights, {}), minlength=6)
    assert counts[[0, 2, 5]].tolist() == [0, 0, 0]
    for token, share in ((1, 0.5), (3, 0.25), (4, 0.25)):
        assert abs(counts[token].item() / 4000 - share) < 5 * math.sqrt(share * (1 - share) / 4000)


def test_rows_with_a_generator_draw_from_it_alone() -> None:
    probs = torch.full((3, 64), 1 / 64)

    def second(seed_of_others: int) -> list[int]:
        torch.manual_seed(seed_of_others)
        generator = torch.Generator().manual_seed(7)
        return [random_sample(probs, {1: generator})[1].item() for _ in range(5)]

    assert second(1) == second(2)
