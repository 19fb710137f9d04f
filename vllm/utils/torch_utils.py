"""Small torch helpers with public names: padded batches, seeding, host-to-device copies, thread counts. Layer: L6.

Must not know models, batches or workers.
"""

from __future__ import annotations

import random
from collections.abc import Iterator, Sequence
from contextlib import contextmanager

import numpy as np
import torch
from torch import Tensor


def make_tensor_with_pad(
    rows: Sequence[Sequence[float]],
    pad: float,
    dtype: torch.dtype,
    *,
    max_len: int | None = None,
    device: torch.device | str | None = None,
    pin_memory: bool = False,
) -> Tensor:
    """`[len(rows), max_len]` with each row padded at its end.

    `max_len` defaults to the longest row; a longer row raises ValueError.
    """
    longest = max((len(row) for row in rows), default=0)
    width = longest if max_len is None else max_len
    if longest > width:
        raise ValueError(f"a row of {longest} values does not fit max_len={width}")
    padded = torch.full((len(rows), width), pad, dtype=dtype)
    for index, row in enumerate(rows):
        if row:
            padded[index, : len(row)] = torch.as_tensor(row, dtype=dtype)
    if pin_memory:
        padded = padded.pin_memory()
    return padded if device is None else padded.to(device, non_blocking=pin_memory)


def set_random_seed(seed: int | None) -> None:
    """Seed Python, numpy and torch; None leaves them alone."""
    if seed is None:
        return
    random.seed(seed)
    np.random.seed(seed % 2**32)
    torch.manual_seed(seed)


def async_tensor_h2d(
    data: Sequence[float] | np.ndarray | Tensor,
    device: torch.device | str | None = None,
    dtype: torch.dtype | None = None,
    out: Tensor | None = None,
) -> Tensor:
    """Copy host data to `device` (or into the front of `out`) without waiting where the device allows it.

    The source of a pending copy is a fresh pinned tensor, so the caller may reuse `data` at once.
    """
    host = torch.as_tensor(data, dtype=dtype if out is None else out.dtype)
    target = out.device if out is not None else torch.device("cpu" if device is None else device)
    if target.type == "cuda":
        host = host.pin_memory()
    if out is None:
        return host.to(target, non_blocking=True)
    view = out[: host.shape[0]]
    view.copy_(host, non_blocking=True)
    return view


@contextmanager
def set_default_torch_num_threads(num_threads: int) -> Iterator[None]:
    """Run the block with `num_threads` intra-op threads."""
    before = torch.get_num_threads()
    torch.set_num_threads(num_threads)
    try:
        yield
    finally:
        torch.set_num_threads(before)


__all__ = ["async_tensor_h2d", "make_tensor_with_pad", "set_default_torch_num_threads", "set_random_seed"]
