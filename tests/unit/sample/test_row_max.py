"""The fast maximum equals the plain one, ties and NaN included."""

from __future__ import annotations

import math

import pytest
import torch

from vllm.v1.sample.ops.row_max import block_size_of, row_max, row_topk


@pytest.mark.parametrize("width", [1, 31, 32, 100, 300, 512, 1024, 4100])
def test_values_and_first_indices(width) -> None:
    logits = torch.randint(0, 9, (20, width), generator=torch.Generator().manual_seed(width)).to(
        torch.float32
    )
    values, ids = row_max(logits)
    assert torch.equal(values, logits.amax(-1))
    for row, value, index in zip(logits.tolist(), values.tolist(), ids.tolist(), strict=True):
        assert row.index(value) == index


def test_nan_and_infinities_show() -> None:
    logits = torch.zeros(4, 1024)
    logits[0, 700] = math.nan
    logits[1, 3] = math.inf
    logits[2] = -math.inf
    values, _ = row_max(logits)
    assert math.isnan(values[0])
    assert values[1:].tolist() == [math.inf, -math.inf, 0.0]


def test_block_sizes() -> None:
    assert [block_size_of(w) for w in (49152, 154880, 151936, 100, 33)] == [512, 256, 128, 0, 0]


@pytest.mark.parametrize("ties", [False, True])
@pytest.mark.parametrize(
    ("width", "k"), [(4096, 1), (4096, 15), (4096, 300), (49152, 20), (1000, 5), (300, 300)]
)
def test_top_k(width, k, ties) -> None:
    logits = torch.randn(5, width, generator=torch.Generator().manual_seed(k))
    logits = logits.round() if ties else logits
    values, ids = row_topk(logits, k)
    assert torch.equal(values, logits.topk(k).values)
    assert torch.equal(logits.gather(1, ids), values)
    assert all(len(set(row)) == k for row in ids.tolist())
