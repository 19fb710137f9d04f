"""The estimator of what offload costs: right where the truth is known, with intervals that say how much it knows."""

import math
import random

import pytest

from benchmarks import paired
from benchmarks.paired import ORDER, by_round, by_step, like_pairs, rounds_of, unlike_pairs

STEPS = (0.6, 0.02, 0.03, 0.02, 0.04)
QUADS = 60


@pytest.fixture(autouse=True)
def few_resamples(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(paired, "RESAMPLES", 300)


def rounds(
    seed: int, loss: float, noise: float = 0.05, drift: float = 0.0, quads: int = QUADS
) -> list[list[float]]:
    """Rounds in turns on a machine that gets slower and whose speed varies; offload takes `loss` of each step."""
    chance = random.Random(seed)
    made = []
    for number in range(len(ORDER) * quads):
        slower = (1 + loss) if ORDER[number % len(ORDER)] == "eager" else 1.0
        speed = slower * (1 + drift * number)
        made.append([step * speed * math.exp(chance.gauss(0, noise)) for step in STEPS])
    return made


def test_neighbours_are_paired_and_each_round_is_in_one_pair_of_each_kind() -> None:
    numbered = [[float(number)] for number in range(8)]
    assert unlike_pairs(numbered) == [([0.0], [1.0]), ([3.0], [2.0]), ([4.0], [5.0]), ([7.0], [6.0])]
    assert like_pairs(numbered) == [([1.0], [2.0]), ([3.0], [4.0]), ([6.0], [5.0])]
    assert rounds_of(numbered, "off") == [[0.0], [3.0], [4.0], [7.0]]
    assert unlike_pairs(numbered[:7]) == [([0.0], [1.0]), ([3.0], [2.0])], "half a group is left out"


@pytest.mark.parametrize("estimate", [by_round, by_step])
@pytest.mark.parametrize("loss", [0.0, 0.03])
def test_intervals_hold_the_truth_about_as_often_as_they_say(estimate, loss: float) -> None:
    truth, held, held_alike = 1 / (1 + loss), 0, 0
    for seed in range(20):
        run = rounds(seed, loss, drift=0.001)
        found, alike = estimate(unlike_pairs(run)), estimate(like_pairs(run))
        assert found.pairs == 2 * QUADS
        held += found.low <= truth <= found.high
        held_alike += alike.low <= 1 <= alike.high
    assert held >= 16
    assert held_alike >= 16


def test_the_interval_tells_one_percent_from_two_with_enough_pairs() -> None:
    run = rounds(1, 0.02, noise=0.02, quads=4 * QUADS)
    found = by_round(unlike_pairs(run))
    assert found.high < 0.99
    assert found.high - found.low < 0.01


@pytest.mark.parametrize("estimate", [by_round, by_step])
def test_rounds_in_which_another_program_had_the_machine_change_little(estimate) -> None:
    run = rounds(3, 0.0, noise=0.01)
    run[5] = [3 * step for step in run[5]]
    assert abs(estimate(unlike_pairs(run)).ratio - 1) < 0.005


def test_what_comes_after_the_last_common_step_counts() -> None:
    long, short = [0.5, 0.25, 0.25], [0.5, 0.5]
    assert by_step([(short, long)] * 4).ratio == pytest.approx(1.0)
    assert by_step([(short, [0.5, 0.25, 0.5])] * 4).ratio < 0.9


def test_one_step_that_another_program_had_does_not_cost_its_round() -> None:
    chance, run = random.Random(4), rounds(4, 0.0, noise=0.005)
    for times in run:
        if chance.random() < 0.3:
            times[chance.randrange(1, len(times))] *= 4
    steps, whole = by_step(unlike_pairs(run)), by_round(unlike_pairs(run))
    assert steps.high - steps.low < (whole.high - whole.low) / 2


@pytest.mark.parametrize("estimate", [by_round, by_step])
def test_what_slows_only_some_rounds_with_offload_is_seen(estimate) -> None:
    run = rounds(5, 0.0, noise=0.005)
    for number, times in enumerate(run):
        if ORDER[number % len(ORDER)] == "eager" and number % 3 == 0:
            times[0] *= 1.06
    assert estimate(unlike_pairs(run)).high < 0.995
