"""Random weights: for profiling, and for tests of everything but the model's quality.

Owns: the fill rule. Must not know: models. Layer L6.

Tensor-parallel ranks get their parts of the numbers that one rank would have: a parameter is filled with consecutive
numbers, and so is a matrix of which a rank keeps a part, it only lets the others go by.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping

import torch
from torch import Tensor, nn

from vllm.model_executor.layers.sharding import WeightSlot

__all__ = ["fill_random"]

# Numbers drawn at once: a large matrix would need a second copy in fp32. A multiple of 16, so that they are the same
# however many are drawn in all.
_DRAWN = 1 << 24


def fill_random(model: nn.Module, seed: int = 0, slots: Mapping[str, WeightSlot] | None = None) -> None:
    """Fills every parameter, the same way for the same model and seed; `slots` say which parts of matrices it holds.

    Matrices get a spread that keeps activations near one; norm weights get ones, other vectors small numbers.
    """
    generator = torch.Generator().manual_seed(seed)
    parts = _Parts(slots or {})
    for name, parameter in model.named_parameters():
        if parameter.dim() == 1 and "norm" in name and name.endswith("weight"):
            parameter.fill_(1.0)
            continue
        held = parts.of(parameter)
        columns = held[0].shape[-1] if held else parameter.shape[-1]
        spread = 0.02 if parameter.dim() == 1 else columns**-0.5
        count = sum(math.prod(slot.shape) for slot in held) if held else parameter.numel()
        drawn = (
            torch.randn(min(_DRAWN, count - start), generator=generator) * spread
            for start in range(0, count, _DRAWN)
        )
        if held:
            _fill_parts(held, _Numbers(drawn))
            continue
        flat = parameter.view(-1)
        for start, numbers in zip(range(0, count, _DRAWN), drawn, strict=True):
            flat[start : start + numbers.numel()].copy_(numbers)


class _Parts:
    """Finds the slots that lie in a parameter and do not hold all of their matrices."""

    def __init__(self, slots: Mapping[str, WeightSlot]) -> None:
        self._of_storage: dict[int, list[WeightSlot]] = {}
        for slot in slots.values():
            self._of_storage.setdefault(_storage(slot.tensor), []).append(slot)

    def of(self, parameter: Tensor) -> list[WeightSlot]:
        """Those slots in the order of memory, or none if the parameter holds all of its matrices."""
        held = self._of_storage.get(_storage(parameter), [])
        if not any(slot.part for slot in held):
            return []
        return sorted(held, key=lambda slot: slot.tensor.storage_offset())


def _storage(tensor: Tensor) -> int:
    address: int = tensor.untyped_storage().data_ptr()
    return address


class _Numbers:
    """A stream of numbers that is drawn piece by piece."""

    def __init__(self, pieces: Iterator[Tensor]) -> None:
        self._pieces = pieces
        self._rest = torch.empty(0)

    def take(self, count: int) -> Tensor:
        """The next `count` numbers."""
        found = [self._rest]
        missing = count - self._rest.numel()
        while missing > 0:
            found.append(next(self._pieces))
            missing -= found[-1].numel()
        joined = torch.cat(found) if len(found) > 1 else found[0]
        self._rest = joined[count:]
        return joined[:count]


def _fill_parts(held: list[WeightSlot], numbers: _Numbers) -> None:
    """Fills each slot with its part of the next numbers, some rows at a time."""
    for slot in held:
        rows, *inner = slot.shape
        width = math.prod(inner)
        kept, *inside = slot.part or (slice(0, rows),)
        step = max(1, _DRAWN // width)
        for low in range(0, rows, step):
            high = min(low + step, rows)
            drawn = numbers.take((high - low) * width).view(high - low, *inner)
            first, end = max(low, kept.start), min(high, kept.stop)
            if first < end:
                part = drawn[(slice(first - low, end - low), *inside)]
                slot.tensor[first - kept.start : end - kept.start].copy_(part)
