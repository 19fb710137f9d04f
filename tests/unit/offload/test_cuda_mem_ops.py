"""The CUDA side as far as it goes without a device: parameters, pinning in pieces, and on one: real copies."""

from __future__ import annotations

import logging
import mmap
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from vllm.v1.simple_kv_offload import cuda_mem_ops
from vllm.v1.simple_kv_offload.copy_backend import DmaCopyBackend
from vllm.v1.simple_kv_offload.cuda_mem_ops import (
    CU_MEMCPY_SRC_ACCESS_ORDER_ANY,
    CU_MEMCPY_SRC_ACCESS_ORDER_STREAM,
    build_params,
    copy_blocks,
    pin_tensor,
    register_in_chunks,
)

STREAM: Any = SimpleNamespace(cuda_stream=5)


def test_parameters_describe_bases_and_strides() -> None:
    wide = torch.zeros(4, 100, dtype=torch.int8)
    src = {"a": wide[:, :64], "b": torch.zeros(4, 32, dtype=torch.int8)}
    dst = {"a": torch.zeros(8, 64, dtype=torch.int8), "b": torch.zeros(8, 32, dtype=torch.int8)}
    params = build_params(src, dst, STREAM, CU_MEMCPY_SRC_ACCESS_ORDER_STREAM)
    assert params.num_layers == 2
    assert params.bpb.tolist() == [64, 32]
    assert params.src_bases.tolist() == [wide.data_ptr(), src["b"].data_ptr()]
    assert params.src_strides is not None
    assert params.src_strides.tolist() == [100, 32]
    assert params.stream_handle == 5
    assert params.attrs.srcAccessOrder == 1
    assert build_params(src, dst, STREAM).attrs.srcAccessOrder == CU_MEMCPY_SRC_ACCESS_ORDER_ANY == 3


def test_sides_that_do_not_match_are_refused() -> None:
    narrow, wide = torch.zeros(2, 4, dtype=torch.int8), torch.zeros(2, 8, dtype=torch.int8)
    with pytest.raises(ValueError, match="differ"):
        build_params({"a": narrow}, {"b": narrow}, STREAM)
    with pytest.raises(ValueError, match="blocks of 4 and 8 bytes"):
        build_params({"a": narrow}, {"a": wide}, STREAM)
    with pytest.raises(ValueError, match="stream per direction"):
        DmaCopyBackend().init({"a": narrow}, {"a": narrow}, torch.device("cpu"))


@pytest.mark.parametrize("batched", [True, False])
def test_every_block_of_every_region_is_copied(monkeypatch: pytest.MonkeyPatch, batched: bool) -> None:
    src = {"a": torch.zeros(4, 64, dtype=torch.int8), "b": torch.zeros(4, 32, dtype=torch.int8)}
    dst = {"a": torch.zeros(8, 64, dtype=torch.int8), "b": torch.zeros(8, 32, dtype=torch.int8)}
    params = build_params(src, dst, STREAM)
    copies: list[tuple[int, int, int]] = []

    def batch(targets: Any, sources: Any, sizes: Any, params: Any) -> None:
        copies.extend(zip(sources.tolist(), targets.tolist(), sizes.tolist(), strict=True))

    def single(target: Any, source: Any, size: Any, stream: Any) -> int:
        copies.append((source.value, target.value, size.value))
        return 0

    monkeypatch.setattr(cuda_mem_ops, "_batch_copy", lambda: batch if batched else None)
    monkeypatch.setattr(cuda_mem_ops, "_driver", lambda: SimpleNamespace(cuMemcpyAsync=single))
    copy_blocks([1, 3], [6, 0], params)
    a, b = src["a"].data_ptr(), src["b"].data_ptr()
    x, y = dst["a"].data_ptr(), dst["b"].data_ptr()
    assert copies == [
        (a + 64, x + 6 * 64, 64), (a + 3 * 64, x, 64), (b + 32, y + 6 * 32, 32), (b + 3 * 32, y, 32),
    ]  # fmt: skip
    copy_blocks([], [], params)
    assert len(copies) == 4


def test_cfg_01_pinning_goes_in_pieces_of_whole_blocks() -> None:
    calls: list[tuple[int, int]] = []
    assert register_in_chunks(1000, 10, 30, lambda at, size: calls.append((at, size)), calls.remove, 100)
    assert calls == [(1000, 90), (1090, 90), (1180, 90), (1270, 30)]


@pytest.mark.parametrize("row_bytes", [4096, 1_000_000, 640, 4097])
def test_no_two_pieces_share_a_page(row_bytes: int) -> None:
    calls: list[tuple[int, int]] = []
    rows, page, chunk = 9000, mmap.PAGESIZE, 4500 * row_bytes
    assert register_in_chunks(
        page, rows, row_bytes, lambda at, size: calls.append((at, size)), lambda _: None, chunk
    )
    assert len(calls) > 1
    assert sum(size for _, size in calls) == rows * row_bytes
    assert all(size <= chunk and size % row_bytes == 0 for _, size in calls)
    assert all(at % page == 0 for at, _ in calls)


def test_cfg_01_a_piece_that_fails_is_told_and_leaves_nothing_pinned(
    caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(logging.getLogger("vllm"), "propagate", True)
    gib = 1 << 30
    pinned: list[int] = []
    asked: list[int] = []

    def register(at: int, size: int) -> None:
        asked.append(size)
        if at > 1000 + 64 * gib:
            raise RuntimeError("CUDA error 2 (out of memory)")
        pinned.append(at)

    rows, row_bytes = 600_000, 1_000_000
    assert not register_in_chunks(1000, rows, row_bytes, register, pinned.remove)
    assert pinned == []
    assert max(asked) < 512 * gib, "a single call of 512 GiB fails"
    assert all(size % row_bytes == 0 for size in asked)
    (record,) = caplog.records
    assert f"{asked[-1] / gib:.2f} GiB" in record.getMessage()
    assert "CUDA error 2 (out of memory)" in record.getMessage()


def test_cfg_01_a_driver_that_refuses_leaves_memory_unpinned_and_no_error_behind(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    calls: list[str] = []
    driver = SimpleNamespace(
        cuMemHostRegister_v2=lambda *_: calls.append("register") or 1,
        cuMemHostUnregister=lambda *_: calls.append("unregister") or 0,
        cuGetErrorString=lambda *_: 0,
    )
    monkeypatch.setattr(cuda_mem_ops, "_driver", lambda: driver)
    assert not pin_tensor(torch.zeros(4, 8))
    assert calls == ["register"], "the driver's calls return their errors; the runtime keeps none of them"


def test_only_contiguous_host_memory_is_pinned() -> None:
    with pytest.raises(ValueError, match="contiguous"):
        pin_tensor(torch.zeros(4, 8)[:, :4])
