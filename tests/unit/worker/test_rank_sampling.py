"""Sampling with several ranks: one draws, the others go on with its tokens, and all give up what it could not draw."""

from __future__ import annotations

import contextlib

import pytest
import torch

from vllm.distributed.parallel_state import TPGroup
from vllm.v1.worker.rank_sampling import sample_on_one_rank
from vllm.v1.worker.row_sampler import SampledRows

CPU = torch.device("cpu")


class Told(TPGroup):
    """A rank of two whose partner's message, or whose own, is `message`."""

    message: torch.Tensor | None = None

    def broadcast(self, tensor: torch.Tensor, source: int = 0) -> torch.Tensor:
        assert source == 0
        if self.rank == 0:
            self.message = tensor
        assert self.message is not None
        assert self.message.shape == tensor.shape
        assert self.message.dtype == tensor.dtype
        return self.message


def no_sampling() -> SampledRows:
    raise AssertionError("only rank 0 samples")


def unable() -> SampledRows:
    raise KeyError("no way")


def told_to_others(sample) -> Told:
    first, second = Told(0, 2), Told(1, 2)
    with contextlib.suppress(KeyError):
        sample_on_one_rank(first, CPU, 3, sample)
    second.message = first.message
    return second


def test_alone_a_rank_just_samples() -> None:
    rows = SampledRows([1], None, {})
    assert sample_on_one_rank(TPGroup(), CPU, 1, lambda: rows) is rows


def test_the_others_get_the_tokens_and_nothing_else() -> None:
    rows = SampledRows([7, 8, 9], None, {1: 4})
    assert sample_on_one_rank(Told(0, 2), CPU, 3, lambda: rows) is rows
    other = told_to_others(lambda: rows)
    assert sample_on_one_rank(other, CPU, 3, no_sampling) == SampledRows([7, 8, 9], None, {})


def test_what_rank_0_cannot_sample_fails_on_all() -> None:
    with pytest.raises(KeyError, match="no way"):
        sample_on_one_rank(Told(0, 2), CPU, 3, unable)
    with pytest.raises(RuntimeError, match="rank 0 could not sample"):
        sample_on_one_rank(told_to_others(unable), CPU, 3, no_sampling)
