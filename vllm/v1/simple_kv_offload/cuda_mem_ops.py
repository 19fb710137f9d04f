"""Batched memory copies and page pinning through the CUDA driver, without any extension module.

Owns the calls into the driver library. Imports everywhere; the driver is looked up on first use.
Layer L6.
"""

from __future__ import annotations

import ctypes
import mmap
from collections.abc import Callable, Mapping, Sequence
from functools import cache
from math import gcd
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt
import torch

from vllm.logger import init_logger
from vllm.utils.math_utils import cdiv

logger = init_logger(__name__)

CU_MEMCPY_SRC_ACCESS_ORDER_STREAM = 1
CU_MEMCPY_SRC_ACCESS_ORDER_ANY = 3

# One registration call for hundreds of GiB fails on some systems; several smaller ones do not.
PIN_CHUNK_BYTES = 64 * 1024**3

Addresses = npt.NDArray[np.uint64]


class _MemLocation(ctypes.Structure):
    _fields_ = [("type", ctypes.c_int), ("id", ctypes.c_int)]


class _MemcpyAttributes(ctypes.Structure):
    _fields_ = [
        ("srcAccessOrder", ctypes.c_int),
        ("srcLocHint", _MemLocation),
        ("dstLocHint", _MemLocation),
        ("flags", ctypes.c_uint),
    ]


class BatchMemcpyParams(NamedTuple):
    """What stays the same over all copies of one direction; ``bpb`` = bytes per block of each region."""

    src_bases: Addresses
    dst_bases: Addresses
    bpb: Addresses
    num_layers: int
    attrs: Any  # driver structures, opaque to callers
    attrs_idx: Any
    num_attrs: int
    fail_idx: Any
    stream_handle: int
    src_strides: Addresses | None = None
    dst_strides: Addresses | None = None


def build_params(
    src: Mapping[str, torch.Tensor],
    dst: Mapping[str, torch.Tensor],
    stream: torch.cuda.Stream,
    src_access_order: int = CU_MEMCPY_SRC_ACCESS_ORDER_ANY,
) -> BatchMemcpyParams:
    """Prepare copies from ``src[name]`` to ``dst[name]``, int8 tensors ``[blocks, bytes]``, on a stream.

    ``ValueError`` if the two sides do not have the same regions.
    """
    if list(src) != list(dst):
        raise ValueError(f"source regions {list(src)} and target regions {list(dst)} differ")
    for name, region in src.items():
        if region.shape[1] != dst[name].shape[1]:
            raise ValueError(f"region {name}: blocks of {region.shape[1]} and {dst[name].shape[1]} bytes")
    attrs = _MemcpyAttributes(srcAccessOrder=src_access_order)
    return BatchMemcpyParams(
        src_bases=_addresses([region.data_ptr() for region in src.values()]),
        dst_bases=_addresses([region.data_ptr() for region in dst.values()]),
        bpb=_addresses([region.shape[1] * region.element_size() for region in src.values()]),
        num_layers=len(src),
        attrs=attrs,
        attrs_idx=ctypes.c_size_t(0),
        num_attrs=1,
        fail_idx=ctypes.c_size_t(0),
        stream_handle=stream.cuda_stream,
        src_strides=_addresses([region.stride(0) * region.element_size() for region in src.values()]),
        dst_strides=_addresses([region.stride(0) * region.element_size() for region in dst.values()]),
    )


def copy_blocks(
    src_block_ids: Sequence[int], dst_block_ids: Sequence[int], params: BatchMemcpyParams
) -> None:
    """Put the copies of all regions of these blocks into the stream; ``RuntimeError`` if the driver refuses."""
    if not src_block_ids:
        return
    src_strides = params.bpb if params.src_strides is None else params.src_strides
    dst_strides = params.bpb if params.dst_strides is None else params.dst_strides
    sources = _block_addresses(params.src_bases, src_strides, src_block_ids)
    targets = _block_addresses(params.dst_bases, dst_strides, dst_block_ids)
    sizes = np.repeat(params.bpb, len(src_block_ids)).astype(np.uint64)
    batch = _batch_copy()
    if batch is None:
        _copy_one_by_one(sources, targets, sizes, params.stream_handle)
        return
    batch(targets, sources, sizes, params)


def _addresses(values: Sequence[int]) -> Addresses:
    return np.asarray(values, dtype=np.uint64)


def _block_addresses(bases: Addresses, strides: Addresses, block_ids: Sequence[int]) -> Addresses:
    offsets = np.asarray(block_ids, dtype=np.uint64)[None, :] * strides[:, None]
    flat: Addresses = np.ascontiguousarray((bases[:, None] + offsets).reshape(-1))
    return flat


@cache
def _driver() -> ctypes.CDLL:
    return ctypes.CDLL("libcuda.so.1")


def _checked(code: int, what: str) -> None:
    if code == 0:
        return
    text = ctypes.c_char_p()
    _driver().cuGetErrorString(code, ctypes.byref(text))
    raise RuntimeError(f"{what} failed: CUDA error {code} ({(text.value or b'unknown').decode()})")


BatchCopy = Callable[[Addresses, Addresses, Addresses, BatchMemcpyParams], None]


@cache
def _batch_copy() -> BatchCopy | None:
    """The driver's batched copy, or None on drivers older than CUDA 12.8."""
    library = _driver()
    for symbol, takes_fail_index in (("cuMemcpyBatchAsync_v2", False), ("cuMemcpyBatchAsync", True)):
        try:
            function = library[symbol]
        except AttributeError:
            continue
        return _bind_batch_copy(function, symbol, takes_fail_index)
    logger.warning_once("The CUDA driver has no batched copies; blocks are copied one by one.")
    return None


def _bind_batch_copy(function: Any, symbol: str, takes_fail_index: bool) -> BatchCopy:
    def run(targets: Addresses, sources: Addresses, sizes: Addresses, params: BatchMemcpyParams) -> None:
        arguments: list[Any] = [
            ctypes.c_void_p(targets.ctypes.data),
            ctypes.c_void_p(sources.ctypes.data),
            ctypes.c_void_p(sizes.ctypes.data),
            ctypes.c_size_t(len(sizes)),
            ctypes.byref(params.attrs),
            ctypes.byref(params.attrs_idx),
            ctypes.c_size_t(params.num_attrs),
        ]
        if takes_fail_index:
            arguments.append(ctypes.byref(params.fail_idx))
        _checked(function(*arguments, ctypes.c_void_p(params.stream_handle)), symbol)

    return run


def _copy_one_by_one(sources: Addresses, targets: Addresses, sizes: Addresses, stream_handle: int) -> None:
    copy = _driver().cuMemcpyAsync
    for source, target, size in zip(sources.tolist(), targets.tolist(), sizes.tolist(), strict=True):
        code = copy(
            ctypes.c_void_p(target),
            ctypes.c_void_p(source),
            ctypes.c_size_t(size),
            ctypes.c_void_p(stream_handle),
        )
        _checked(code, "cuMemcpyAsync")


Register = Callable[[int, int], None]
Unregister = Callable[[int], None]


def register_in_chunks(
    address: int,
    num_rows: int,
    row_bytes: int,
    register: Register,
    unregister: Unregister,
    chunk_bytes: int = PIN_CHUNK_BYTES,
) -> bool:
    """Register host memory piece by piece, each piece a whole number of rows.

    A copy never crosses two pieces, since it moves one row. If a piece fails, its size and cause are
    logged, the pieces before it are given back, and False is returned: no half-pinned memory stays.
    """
    done: list[int] = []
    for start, size in _chunks(address, num_rows, row_bytes, chunk_bytes):
        try:
            register(start, size)
        except RuntimeError as error:
            logger.warning(
                "KV offload: pinning %.2f GiB of host memory failed (%s); going on without pinned memory.",
                size / 1024**3,
                error,
            )
            for earlier in done:
                unregister(earlier)
            return False
        done.append(start)
    return True


def _chunks(address: int, num_rows: int, row_bytes: int, chunk_bytes: int) -> list[tuple[int, int]]:
    rows_per_chunk = max(1, chunk_bytes // row_bytes)
    # Whole pages where rows allow it: the driver pins pages, and may refuse one that two pieces share.
    page_rows = mmap.PAGESIZE // gcd(row_bytes, mmap.PAGESIZE)
    if rows_per_chunk > page_rows:
        rows_per_chunk -= rows_per_chunk % page_rows
    return [
        (
            address + i * rows_per_chunk * row_bytes,
            min(rows_per_chunk, num_rows - i * rows_per_chunk) * row_bytes,
        )
        for i in range(cdiv(num_rows, rows_per_chunk))
    ]


def pin_tensor(tensor: torch.Tensor) -> bool:
    """Register a contiguous host tensor ``[blocks, bytes]`` with the device; False if it stays unpinned."""
    num_rows, row_bytes = _shape(tensor)
    return register_in_chunks(tensor.data_ptr(), num_rows, row_bytes, _register, _unregister, PIN_CHUNK_BYTES)


def unpin_tensor(tensor: torch.Tensor) -> None:
    """Undo `pin_tensor`. What a device that has failed refuses is logged: it goes with the process."""
    num_rows, row_bytes = _shape(tensor)
    for start, _ in _chunks(tensor.data_ptr(), num_rows, row_bytes, PIN_CHUNK_BYTES):
        try:
            _unregister(start)
        except RuntimeError as error:
            logger.warning("KV offload: host memory stays pinned: %s", error)


def is_seen_by_device(tensor: torch.Tensor) -> bool:
    """Whether the device sees this pinned tensor, all of it, under the host's addresses."""
    num_rows, row_bytes = _shape(tensor)
    for start, size in _chunks(tensor.data_ptr(), num_rows, row_bytes, PIN_CHUNK_BYTES):
        for address in (start, start + size - 1):
            seen = ctypes.c_void_p()
            code = _driver().cuMemHostGetDevicePointer_v2(
                ctypes.byref(seen), ctypes.c_void_p(address), ctypes.c_uint(0)
            )
            if code != 0 or seen.value != address:
                return False
    return num_rows > 0


def _shape(tensor: torch.Tensor) -> tuple[int, int]:
    if not tensor.is_contiguous() or tensor.device.type != "cpu":
        raise ValueError("only a contiguous tensor in host memory can be pinned")
    num_rows = tensor.shape[0] if tensor.dim() > 1 else 1
    return num_rows, tensor.numel() * tensor.element_size() // max(1, num_rows)


def _register(address: int, size: int) -> None:
    code = _driver().cuMemHostRegister_v2(ctypes.c_void_p(address), ctypes.c_size_t(size), ctypes.c_uint(0))
    _checked(code, "cuMemHostRegister")


def _unregister(address: int) -> None:
    _checked(_driver().cuMemHostUnregister(ctypes.c_void_p(address)), "cuMemHostUnregister")
