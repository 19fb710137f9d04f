"""The group of tensor-parallel ranks: alone for nothing, together with sums that do not depend on the batch."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from tests.helpers.tp_ranks import run_ranks
from vllm.distributed.parallel_state import (
    DeviceTPGroup,
    TPGroup,
    destroy_distributed,
    get_tp_group,
    init_distributed,
    use_tp_group,
)

RANKS = 3


def test_a_lone_rank_gets_back_what_it_gives() -> None:
    group = get_tp_group()
    tensor = torch.randn(3, 4)
    assert (group.rank, group.size, group.calls) == (0, 1, 0)
    assert group.all_reduce(tensor) is tensor
    assert group.all_gather(tensor) is tensor
    assert group.broadcast(tensor) is tensor


def test_one_rank_needs_no_process_group() -> None:
    init_distributed(0, 1, 0, "no meeting place", "no backend")
    assert not torch.distributed.is_initialized()
    assert get_tp_group().size == 1
    destroy_distributed()


def test_a_rank_outside_of_the_world_is_refused() -> None:
    with pytest.raises(ValueError, match="rank=2 is not one of world_size=2 ranks"):
        init_distributed(2, 2, 0, "", "gloo")


def test_another_group_counts_for_a_while() -> None:
    other = TPGroup(1, 2)
    with use_tp_group(other):
        assert get_tp_group() is other
    assert get_tp_group().size == 1


def _values(rank: int) -> torch.Tensor:
    return torch.randn(16, 33, generator=torch.Generator().manual_seed(rank)) * 1000.0**rank


def _work(rank: int) -> dict[str, Any]:
    group, values = get_tp_group(), _values(rank)
    with pytest.raises(RuntimeError, match="belongs to a tensor-parallel group already"):
        init_distributed(rank, RANKS, rank, "", "gloo")
    untouched = values.clone()
    found = {
        "sum": group.all_reduce(values),
        "sums of rows": torch.cat([group.all_reduce(values[i : i + 1]) for i in range(16)]),
        "sum of columns": group.all_reduce(values.t()).t(),
        "half sum": group.all_reduce(values.to(torch.bfloat16)),
        "rows": group.all_gather(values, dim=0),
        "columns": group.all_gather(values),
        "told": group.broadcast(values.clone(), 1),
        "calls": group.calls,
    }
    assert torch.equal(values, untouched)
    # What GPUs use works with any backend, in an order of its own.
    device = DeviceTPGroup(rank, RANKS)
    found |= {
        "device sum": device.all_reduce(values.clone()),
        "device columns": device.all_gather(values.t()).t(),
        "device told": device.broadcast(values.clone(), 2),
        "device calls": device.calls,
    }
    return found


def test_sums_are_those_of_rank_order_whatever_their_shape() -> None:
    parts = [_values(rank) for rank in range(RANKS)]
    in_order = (parts[0] + parts[1]) + parts[2]
    assert not torch.equal(in_order, parts[0] + (parts[1] + parts[2])), "the order must show"
    halves = [part.to(torch.bfloat16).float() for part in parts]
    for found in run_ranks(RANKS, _work):
        assert torch.equal(found["sum"], in_order)
        assert torch.equal(found["sums of rows"], in_order)
        assert torch.equal(found["sum of columns"], in_order)
        assert torch.equal(found["half sum"], ((halves[0] + halves[1]) + halves[2]).to(torch.bfloat16))
        assert torch.equal(found["rows"], torch.cat(parts, dim=0))
        assert torch.equal(found["columns"], torch.cat(parts, dim=1))
        assert torch.equal(found["told"], parts[1])
        assert found["calls"] == 22
        torch.testing.assert_close(found["device sum"], in_order)
        assert torch.equal(found["device columns"], torch.cat(parts, dim=0))
        assert torch.equal(found["device told"], parts[2])
        assert found["device calls"] == 3
