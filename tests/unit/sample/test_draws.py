"""Counter-based chance: reproducible, uniform, unrelated between seeds and positions."""

from __future__ import annotations

import numpy as np

from vllm.v1.sample.ops.draws import row_draws, seed_of_request, seed_to_word


def draws(seeds: list[int], positions: list[int]) -> np.ndarray:
    return row_draws(np.array(seeds, dtype=np.uint64), np.array(positions, dtype=np.uint64))


def test_equal_arguments_give_equal_numbers_in_any_batch() -> None:
    alone = draws([5], [17])[0]
    assert draws([1, 5, 9], [3, 17, 17])[1] == alone


def test_numbers_lie_in_the_unit_interval_and_are_uniform() -> None:
    for numbers in (draws([3] * 20000, list(range(20000))), draws(list(range(20000)), [8] * 20000)):
        assert numbers.min() >= 0.0
        assert numbers.max() < 1.0
        counts = np.histogram(numbers, bins=20, range=(0, 1))[0]
        chi_squared = ((counts - 1000.0) ** 2 / 1000.0).sum()
        assert chi_squared < 43.8  # 19 degrees of freedom, one false alarm in a thousand


def test_neighbouring_seeds_and_positions_are_uncorrelated() -> None:
    first = draws([3] * 5000, list(range(5000)))
    other_seed = draws([4] * 5000, list(range(5000)))
    assert abs(np.corrcoef(first, other_seed)[0, 1]) < 0.06
    assert abs(np.corrcoef(first[:-1], first[1:])[0, 1]) < 0.06


def test_any_integer_is_a_seed() -> None:
    assert seed_to_word(-1) == 2**64 - 1
    assert seed_to_word(2**64 + 3) == 3


def test_requests_without_a_seed_get_one_from_their_id_and_the_engine_seed() -> None:
    assert seed_of_request("a", 0) == seed_of_request("a", 0)
    assert len({seed_of_request(r, s) for r in ("a", "b") for s in (0, 1)}) == 4
