"""The group of processes that share one model: tensor-parallel ranks and what they tell each other.

Owns the process group and the collective operations on tensors. It must not know models, steps or executors. Layer L6.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from datetime import timedelta

import torch
import torch.distributed as dist

from vllm.distributed.local_mesh import LocalMesh

# How long a rank waits for another inside one operation. Far above the longest step: an executor that watches its
# workers ends them long before. It only keeps a rank that nobody watches any more from waiting for ever.
_OPERATION_TIMEOUT = timedelta(minutes=30)
_HALVES = (torch.float16, torch.bfloat16)


class TPGroup:
    """The tensor-parallel ranks of one model, here a single one: every operation gives its argument back.

    All ranks make the same calls in the same order with tensors of the same shape and dtype. Results never alias what
    another rank still writes; whether they alias the argument is left open. `calls` counts the operations begun: ranks
    whose counts differ are out of step.
    """

    def __init__(self, rank: int = 0, size: int = 1) -> None:
        self.rank = rank
        self.size = size
        self.calls = 0

    def all_reduce(self, tensor: torch.Tensor) -> torch.Tensor:
        """The sum over ranks, on all ranks. On CPU added in rank order: independent of the batch's shape."""
        return tensor

    def all_gather(self, tensor: torch.Tensor, dim: int = -1) -> torch.Tensor:
        """The ranks' tensors side by side along `dim`, in rank order, on all ranks."""
        return tensor

    def broadcast(self, tensor: torch.Tensor, source: int = 0) -> torch.Tensor:
        """The tensor of rank `source`, on all ranks."""
        return tensor

    def close(self) -> None:
        """Leave the group: ranks that wait for this one are told."""
        return


class HostTPGroup(TPGroup):
    """Ranks in processes of their own on one machine, with tensors in host memory."""

    def __init__(self, rank: int, size: int) -> None:
        super().__init__(rank, size)
        self._mesh = LocalMesh(rank, size, _tell_all)

    def all_reduce(self, tensor: torch.Tensor) -> torch.Tensor:
        """See the base class. Each rank adds all parts: a ring's order depends on where in the tensor a value lies."""
        parts = self._gather(tensor)
        exact = torch.float32 if tensor.dtype in _HALVES else tensor.dtype
        total = parts[0].to(exact, copy=True)
        for part in parts[1:]:
            total += part
        return total.to(tensor.dtype)

    def all_gather(self, tensor: torch.Tensor, dim: int = -1) -> torch.Tensor:
        """See the base class."""
        return torch.cat(self._gather(tensor), dim=dim)

    def broadcast(self, tensor: torch.Tensor, source: int = 0) -> torch.Tensor:
        """See the base class."""
        self.calls += 1
        tensor = tensor.contiguous()
        self._mesh.broadcast(tensor, source)
        return tensor

    def _gather(self, tensor: torch.Tensor) -> list[torch.Tensor]:
        self.calls += 1
        return self._mesh.gather(tensor.contiguous())

    def close(self) -> None:
        self._mesh.close()


class DeviceTPGroup(TPGroup):
    """Ranks with a GPU each, connected by NCCL, which adds in an order of its own."""

    def all_reduce(self, tensor: torch.Tensor) -> torch.Tensor:
        """See the base class. In place where it can be."""
        self.calls += 1
        tensor = tensor.contiguous()
        dist.all_reduce(tensor)
        return tensor

    def all_gather(self, tensor: torch.Tensor, dim: int = -1) -> torch.Tensor:
        """See the base class."""
        self.calls += 1
        tensor = tensor.contiguous()
        parts = [torch.empty_like(tensor) for _ in range(self.size)]
        dist.all_gather(parts, tensor)
        return torch.cat(parts, dim=dim)

    def broadcast(self, tensor: torch.Tensor, source: int = 0) -> torch.Tensor:
        """See the base class."""
        self.calls += 1
        tensor = tensor.contiguous()
        dist.broadcast(tensor, src=source)
        return tensor


def _tell_all(message: bytes) -> list[bytes]:
    told: list[bytes | None] = [None] * dist.get_world_size()
    dist.all_gather_object(told, message)
    return [part for part in told if part is not None]


_ALONE = TPGroup()
_group: TPGroup = _ALONE


def get_tp_group() -> TPGroup:
    """This process's tensor-parallel group: of size 1 until `init_distributed` was called."""
    return _group


def init_distributed(rank: int, world_size: int, local_rank: int, init_method: str, backend: str) -> None:
    """Meet the other ranks at `init_method` (a `torch.distributed` URL); with one rank nothing is set up.

    `backend`: "gloo" or "nccl". `local_rank`: the device of this rank with "nccl". `RuntimeError` if there is a group.
    """
    global _group
    if not 0 <= rank < world_size:
        raise ValueError(f"rank={rank} is not one of world_size={world_size} ranks")
    if world_size == 1:
        return
    if _group is not _ALONE:
        raise RuntimeError("this process belongs to a tensor-parallel group already")
    if backend == "nccl":
        torch.cuda.set_device(local_rank)
    dist.init_process_group(
        backend, init_method=init_method, rank=rank, world_size=world_size, timeout=_OPERATION_TIMEOUT
    )
    _group = DeviceTPGroup(rank, world_size) if backend == "nccl" else HostTPGroup(rank, world_size)


def destroy_distributed() -> None:
    """Leave the group, for good. Idempotent."""
    global _group
    if _group is not _ALONE:
        _group.close()
        dist.destroy_process_group()
    _group = _ALONE


@contextmanager
def use_tp_group(group: TPGroup) -> Iterator[None]:
    """`group` as this process's group meanwhile: for callers that bring ranks of their own, as threads say."""
    global _group
    previous, _group = _group, group
    try:
        yield
    finally:
        _group = previous
