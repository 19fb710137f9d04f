"""Small torch helpers with public names."""

from __future__ import annotations

import random

import numpy as np
import pytest
import torch

from vllm.utils.torch_utils import (
    async_tensor_h2d,
    make_tensor_with_pad,
    set_default_torch_num_threads,
    set_random_seed,
)


def test_rows_are_padded_at_their_ends() -> None:
    padded = make_tensor_with_pad([[1, 2], [], [3]], -1, torch.int32)
    assert padded.tolist() == [[1, 2], [-1, -1], [3, -1]]
    assert padded.dtype == torch.int32
    assert make_tensor_with_pad([[1]], 0, torch.int64, max_len=3, device="cpu").tolist() == [[1, 0, 0]]
    assert make_tensor_with_pad([], 0, torch.int64).shape == (0, 0)
    with pytest.raises(ValueError, match="a row of 2 values does not fit max_len=1"):
        make_tensor_with_pad([[1, 2]], 0, torch.int64, max_len=1)


def test_one_seed_fixes_all_generators() -> None:
    def draw() -> tuple[float, float, float]:
        return random.random(), float(np.random.rand()), float(torch.rand(()))

    set_random_seed(2**40 + 5)
    first = draw()
    set_random_seed(None)
    assert draw() != first
    set_random_seed(2**40 + 5)
    assert draw() == first


def test_host_data_arrives_on_the_device() -> None:
    assert async_tensor_h2d([1, 2], "cpu", torch.int32).tolist() == [1, 2]
    out = torch.zeros(4, dtype=torch.int64)
    view = async_tensor_h2d(np.array([5, 6]), out=out)
    assert view.tolist() == [5, 6]
    assert out.tolist() == [5, 6, 0, 0]


def test_the_number_of_threads_is_restored() -> None:
    before = torch.get_num_threads()
    with set_default_torch_num_threads(1):
        assert torch.get_num_threads() == 1
    assert torch.get_num_threads() == before
