"""Which blocks a kernel copies and which the copy engines, as far as it goes without a device."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch

from vllm import _custom_ops as ops
from vllm.v1.simple_kv_offload import cuda_mem_ops
from vllm.v1.simple_kv_offload.copy_backends import cuda_gather
from vllm.v1.simple_kv_offload.copy_backends.base import CopyJob
from vllm.v1.simple_kv_offload.copy_backends.cuda_dma import Copies
from vllm.v1.simple_kv_offload.copy_backends.cuda_gather import SMALL_BLOCK_BYTES, SmallBlocks, names_of_small

STREAM: Any = SimpleNamespace(cuda_stream=5)


def regions(blocks: int) -> dict[str, torch.Tensor]:
    return {
        "small": torch.zeros(blocks, SMALL_BLOCK_BYTES, dtype=torch.int8),
        "large": torch.zeros(blocks, SMALL_BLOCK_BYTES + 16, dtype=torch.int8),
    }


def driver(shift: int, code: int = 0) -> Any:
    """A driver that shows host memory to the device, moved by so much."""

    def tell(seen: Any, address: Any, flags: Any) -> int:
        seen._obj.value = address.value + shift
        return code

    return SimpleNamespace(cuMemHostGetDevicePointer_v2=tell)


@pytest.mark.parametrize(
    ("is_built", "played", "small"),
    [
        (True, driver(0), {"small"}),
        (False, driver(0), set()),
        (True, driver(4096), set()),
        (True, driver(0, code=1), set()),
    ],
    ids=["seen", "no kernel", "under other addresses", "not pinned"],
)
def test_small_blocks_that_the_device_sees_are_for_the_kernel(
    monkeypatch: pytest.MonkeyPatch, is_built: bool, played: Any, small: set[str]
) -> None:
    monkeypatch.setattr(ops, "can_copy_over_bus", lambda: is_built)
    monkeypatch.setattr(cuda_mem_ops, "_driver", lambda: played)
    assert names_of_small(regions(4), regions(8)) == small


def test_each_region_is_copied_once_by_one_of_them(monkeypatch: pytest.MonkeyPatch) -> None:
    batches: list[tuple[list[int], list[int], list[int]]] = []

    def batch(targets: Any, sources: Any, sizes: Any, params: Any) -> None:
        batches.append((sources.tolist(), targets.tolist(), sizes.tolist()))

    monkeypatch.setattr(cuda_mem_ops, "_batch_copy", lambda: batch)
    monkeypatch.setattr(cuda_gather, "_pinned", lambda ids: torch.tensor(ids))
    source, target = regions(4), regions(8)
    for block in range(4):
        source["small"][block] = block + 1
    ids = Copies(source, target, frozenset({"small"}), STREAM, 3).issue(CopyJob((1, 3), (6, 0), True, 0))
    assert ids is not None
    assert [int(row[0]) for row in target["small"]] == [4, 0, 0, 0, 0, 0, 2, 0]
    ((sources, targets, sizes),) = batches
    size = SMALL_BLOCK_BYTES + 16
    assert sizes == [size, size]
    assert sources == [source["large"].data_ptr() + size, source["large"].data_ptr() + 3 * size]
    assert targets == [target["large"].data_ptr() + 6 * size, target["large"].data_ptr()]
    batches.clear()
    assert Copies(source, target, frozenset(source), STREAM, 3).issue(CopyJob((), (), True, 0)) is None
    assert batches == [], "nothing is left for the copy engines"


def test_ids_stay_until_the_device_has_read_them() -> None:
    copies = SmallBlocks({}, {})
    events: list[Any] = [SimpleNamespace(query=lambda: False), SimpleNamespace(query=lambda: False)]
    for event in events:
        copies.keep(torch.zeros(2), event)
    assert len(copies._ids) == 2
    events[0].query = lambda: True
    copies.keep(None, events[1])
    assert [event for event, _ in copies._ids] == [events[1]]
