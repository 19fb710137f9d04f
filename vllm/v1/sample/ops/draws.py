"""Chance for sampling: one number in [0, 1) per row, a pure function of the request's seed and position. Layer: L6.

A counter-based generator keeps no state, so a request draws the same numbers whatever its batch mates are, and again
after a preemption or a repeated step.
"""

from __future__ import annotations

import hashlib

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

UInt64Array = npt.NDArray[np.uint64]
Float64Array = npt.NDArray[np.float64]

_GOLDEN = np.uint64(0x9E3779B97F4A7C15)
_MIX_1 = np.uint64(0xBF58476D1CE4E5B9)
_MIX_2 = np.uint64(0x94D049BB133111EB)


def _mix(x: UInt64Array) -> UInt64Array:
    """The finaliser of splitmix64: a bijection of 64-bit words in which each bit depends on all bits."""
    x = (x ^ (x >> np.uint64(30))) * _MIX_1
    x = (x ^ (x >> np.uint64(27))) * _MIX_2
    mixed: UInt64Array = x ^ (x >> np.uint64(31))
    return mixed


def row_draws(seeds: UInt64Array, positions: UInt64Array) -> Float64Array:
    """float64 `[rows]` in [0, 1) for uint64 seeds and positions; equal arguments give equal numbers."""
    with np.errstate(over="ignore"):  # arithmetic modulo 2**64 is meant
        # Mixing the seed first keeps neighbouring seeds (a request's n choices) on unrelated sequences.
        start = _mix(seeds + _GOLDEN)
        words = _mix(start + _GOLDEN * (positions + np.uint64(1)))
    draws: Float64Array = (words >> np.uint64(11)).astype(np.float64) * 2.0**-53
    return draws


def seed_of_request(request_id: str, engine_seed: int) -> int:
    """The seed of a request that brings none: fixed by its id and the engine's seed."""
    digest = hashlib.blake2b(f"{engine_seed}/{request_id}".encode(), digest_size=8).digest()
    return int.from_bytes(digest, "little")


def seed_to_word(seed: int) -> int:
    """Any integer seed as a 64-bit word."""
    return seed % 2**64


def generator_draws(num_rows: int, generators: dict[int, torch.Generator], device: torch.device) -> Tensor:
    """float64 `[num_rows]` from the rows' own generators, and from torch's default one for rows without."""
    draws = torch.empty(num_rows, dtype=torch.float64)
    if len(generators) < num_rows:
        draws = torch.rand(num_rows, dtype=torch.float64)
    for row, generator in generators.items():
        drawn = torch.rand((), generator=generator, dtype=torch.float64, device=generator.device)
        draws[row] = drawn.to(draws.device)
    return draws.to(device)
