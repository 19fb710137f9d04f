"""The sampler: order of rules, greedy and mixed batches, log probabilities and ranks, rows that cannot be sampled."""

from __future__ import annotations

import math

import pytest
import torch

from tests.helpers.sampling import NEG_INF, drawn_token, neutral_metadata, surviving_tokens
from vllm.v1.sample.ops.bad_words import apply_bad_words
from vllm.v1.sample.ops.logprobs import batched_count_greater_than
from vllm.v1.sample.sampler import Sampler

VOCAB = 60


def make_logits(rows: int, seed: int = 0) -> torch.Tensor:
    return torch.randn(rows, VOCAB, generator=torch.Generator().manual_seed(seed)) * 2


def random_metadata(rows: int, draws: list[float], **changes):
    values = {
        "temperature": torch.ones(rows),
        "all_greedy": False,
        "all_random": True,
        "draws": torch.tensor(draws, dtype=torch.float64),
    }
    return neutral_metadata(rows, **{**values, **changes})


def test_greedy_rows_take_the_best_token_and_the_lowest_id_among_equals() -> None:
    logits = torch.tensor([[0.0, 2.0, 2.0, 1.0], [5.0, 1.0, 1.0, 1.0]])
    output = Sampler()(logits, neutral_metadata(2))
    assert output.sampled_token_ids.tolist() == [[1], [0]]
    assert output.sampled_token_ids.dtype == torch.int32
    assert output.logprobs_tensors is None


def test_temperature_scales_before_the_draw() -> None:
    logits = make_logits(3)
    temperature = torch.tensor([0.5, 1.0, 1.7])
    draws = [0.1, 0.5, 0.95]
    output = Sampler()(logits.clone(), random_metadata(3, draws, temperature=temperature))
    expected = [
        drawn_token((logits[i] / temperature[i]).tolist(), set(range(VOCAB)), draws[i]) for i in range(3)
    ]
    assert output.sampled_token_ids.flatten().tolist() == expected


def test_greedy_and_random_rows_share_a_batch() -> None:
    logits = make_logits(4, 3)
    metadata = random_metadata(
        4,
        [0.9, 0.3, 0.6, 0.2],
        temperature=torch.tensor([0.0, 1.0, 0.0, 0.8]),
        all_random=False,
        top_k=torch.tensor([VOCAB, 10, VOCAB, VOCAB]),
        top_p=torch.tensor([1.0, 0.9, 1.0, 0.7]),
    )
    tokens = Sampler()(logits.clone(), metadata).sampled_token_ids.flatten().tolist()
    assert tokens[0] == logits[0].argmax()
    assert tokens[2] == logits[2].argmax()
    for row, temperature, k, p, draw in ((1, 1.0, 10, 0.9, 0.3), (3, 0.8, None, 0.7, 0.2)):
        scaled = (logits[row] / temperature).tolist()
        assert tokens[row] == drawn_token(scaled, surviving_tokens(scaled, k, p), draw)


def test_logprobs_are_of_the_untouched_logits_with_ranks() -> None:
    logits = make_logits(3, 5)
    banned = torch.zeros(3, VOCAB, dtype=torch.bool)
    banned[:, logits.argmax(dim=-1)] = True
    metadata = neutral_metadata(3, max_num_logprobs=4, allowed_token_ids_mask=banned)
    output = Sampler()(logits.clone(), metadata)
    tokens = output.sampled_token_ids.flatten().tolist()
    found = output.logprobs_tensors
    for row in range(3):
        reference = [x - math.log(sum(map(math.exp, logits[row].tolist()))) for x in logits[row].tolist()]
        order = sorted(range(VOCAB), key=lambda t: -reference[t])
        ids = found.logprob_token_ids[row].tolist()
        assert ids == [tokens[row], *order[:4]]
        assert found.logprobs[row].tolist() == pytest.approx([reference[t] for t in ids], abs=1e-5)
        assert found.selected_token_ranks[row] == order.index(tokens[row]) + 1


@pytest.mark.parametrize(
    ("mode", "expected"),
    [
        ("raw_logits", lambda raw, scaled: raw),
        ("processed_logits", lambda raw, scaled: scaled),
        ("processed_logprobs", lambda raw, scaled: scaled.log_softmax(-1)),
    ],
)
def test_other_logprobs_modes(mode, expected) -> None:
    logits = make_logits(1, 8)
    metadata = random_metadata(1, [0.4], temperature=torch.tensor([2.0]), max_num_logprobs=2)
    output = Sampler(mode)(logits.clone(), metadata)
    values = expected(logits, logits / 2.0)
    token = output.sampled_token_ids.item()
    assert output.logprobs_tensors.logprobs[0, 0] == pytest.approx(values[0, token].item(), abs=1e-5)
    assert output.logprobs_tensors.logprobs[0, 1] == pytest.approx(values.max().item(), abs=1e-5)


def test_a_row_is_sorted_for_what_it_asks_not_for_what_its_neighbour_asks(monkeypatch) -> None:
    logits = make_logits(4, 5)
    asked: list[tuple[int, int]] = []
    gather = Sampler.gather_logprobs

    def counting(logprobs, num_logprobs, token_ids):
        asked.append((num_logprobs, len(token_ids)))
        return gather(logprobs, num_logprobs, token_ids)

    monkeypatch.setattr(Sampler, "gather_logprobs", staticmethod(counting))
    metadata = neutral_metadata(4, max_num_logprobs=-1, num_logprobs=[None, -1, 2, None])
    found = Sampler()(logits.clone(), metadata).logprobs_tensors
    assert sorted(asked) == [(-1, 1), (2, 1)]
    alone = Sampler()(logits.clone(), neutral_metadata(4, max_num_logprobs=-1)).logprobs_tensors
    assert found is not None
    assert alone is not None
    for row, width in ((1, VOCAB + 1), (2, 3)):
        assert found.logprob_token_ids[row, :width].tolist() == alone.logprob_token_ids[row, :width].tolist()
        assert found.logprobs[row, :width].tolist() == alone.logprobs[row, :width].tolist()
        assert found.selected_token_ranks[row] == alone.selected_token_ranks[row]


def test_unknown_logprobs_mode_is_refused() -> None:
    with pytest.raises(ValueError, match="logprobs_mode='cooked'"):
        Sampler("cooked")


def test_zero_and_all_logprobs() -> None:
    logprobs = Sampler.compute_logprobs(make_logits(2, 1))
    tokens = torch.tensor([3, 9])
    assert Sampler.gather_logprobs(logprobs, 0, tokens).logprobs.shape == (2, 1)
    everything = Sampler.gather_logprobs(logprobs, -1, tokens)
    assert everything.logprobs.shape == (2, VOCAB + 1)
    assert sorted(everything.logprob_token_ids[0, 1:].tolist()) == list(range(VOCAB))


def test_specific_tokens_replace_the_likely_ones_in_their_rows_only() -> None:
    logits = make_logits(2, 6)
    metadata = neutral_metadata(2, max_num_logprobs=3, logprob_token_ids={1: [7, 11]})
    output = Sampler()(logits.clone(), metadata)
    reference = logits.log_softmax(-1)
    ids, values = output.logprobs_tensors.logprob_token_ids, output.logprobs_tensors.logprobs
    assert ids[0, 1:].tolist() == logits[0].topk(3).indices.tolist()
    assert ids[1, 1:3].tolist() == [7, 11]
    assert torch.allclose(values[1, 1:3], reference[1, [7, 11]])
    assert ids[1, 3] == output.sampled_token_ids[1, 0]


def test_rank_counts_equal_values() -> None:
    x = torch.tensor([[1.0, 3.0, 3.0, 2.0], [0.0, 0.0, 0.0, 0.0]])
    assert batched_count_greater_than(x, torch.tensor([[3.0], [0.0]])).tolist() == [2, 4]


def test_banned_tokens_are_never_sampled() -> None:
    logits = torch.zeros(1, VOCAB)
    banned = torch.ones(1, VOCAB, dtype=torch.bool)
    banned[0, [4, 17]] = False
    seen = {
        Sampler()(
            logits.clone(), random_metadata(1, [d / 10], allowed_token_ids_mask=banned)
        ).sampled_token_ids.item()
        for d in range(10)
    }
    assert seen == {4, 17}


def test_bad_words_ban_the_token_that_would_complete_them() -> None:
    logits = torch.zeros(2, 10)
    words = {0: [[3], [1, 2], [8, 9, 4]], 1: [[5, 6]]}
    apply_bad_words(logits, words, [[8, 9], [5, 5]])
    assert (logits[0] == NEG_INF).nonzero().flatten().tolist() == [3, 4]
    assert (logits[1] == NEG_INF).nonzero().flatten().tolist() == [6]


def test_bad_words_longer_than_the_output_and_outside_the_vocabulary_do_nothing() -> None:
    logits = apply_bad_words(torch.zeros(1, 10), {0: [[1, 2, 3], [99]]}, [[2]])
    assert torch.equal(logits, torch.zeros(1, 10))


def test_draft_tokens_count_as_output_for_the_bonus_token() -> None:
    metadata = neutral_metadata(
        1, output_token_ids=[[1]], spec_token_ids=[[2]], bad_words_token_ids={0: [[1, 2, 3]]}
    )
    logits = torch.zeros(1, 10)
    Sampler().apply_logits_processors(logits, metadata, predict_bonus_token=True)
    assert logits[0, 3] == NEG_INF
    assert Sampler().apply_logits_processors(torch.zeros(1, 10), metadata, False)[0, 3] == 0.0


def test_penalties_apply_in_the_sampler() -> None:
    logits = torch.tensor([[3.0, 2.9, 0.0]])
    metadata = neutral_metadata(
        1,
        no_penalties=False,
        prompt_token_ids=torch.tensor([[3]]),
        frequency_penalties=torch.tensor([1.0]),
        output_token_ids=[[0]],
    )
    assert Sampler()(logits, metadata).sampled_token_ids.item() == 1


def test_val_10_a_nan_row_and_a_row_without_tokens_are_named_and_hurt_nobody() -> None:
    logits = make_logits(4, 2)
    reference = logits.clone()
    logits[1, 5:7] = math.nan
    banned = torch.zeros(4, VOCAB, dtype=torch.bool)
    banned[2] = True
    metadata = random_metadata(4, [0.3] * 4, allowed_token_ids_mask=banned, top_k=torch.full((4,), 9))
    output, bad = Sampler().sample_rows(logits, metadata)
    assert bad == {1: 2, 2: 1}
    clean = Sampler()(reference, random_metadata(4, [0.3] * 4, top_k=torch.full((4,), 9))).sampled_token_ids
    assert output.sampled_token_ids[[0, 3]].tolist() == clean[[0, 3]].tolist()


def test_val_10_small_temperatures_stay_finite() -> None:
    logits = make_logits(1, 4) * 50
    tokens = Sampler()(logits.clone(), random_metadata(1, [0.5], temperature=torch.tensor([0.01])))
    assert tokens.sampled_token_ids.item() == logits.argmax()


def test_missing_inputs_are_named() -> None:
    with pytest.raises(ValueError, match="temperature"):
        Sampler()(make_logits(1), neutral_metadata(1, all_greedy=False))
    with pytest.raises(ValueError, match="prompt_token_ids"):
        Sampler()(make_logits(1), neutral_metadata(1, no_penalties=False))
