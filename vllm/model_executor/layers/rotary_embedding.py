"""Rotary position embedding: every scaling as one table indexed by position.

Owns: the maths of the scalings and the table of cosines and sines. Must not know: models, batches. Layer L6.

Angles are a pure function of a token's own position, never of the other tokens in the batch. That matters for the
scalings that change with length (`dynamic`, `longrope`): position `p` uses the frequencies of a sequence of `p + 1`
tokens, as if the request were generated one token at a time. So cached keys never go stale, and an output does not
depend on its neighbours or on how a prompt was cut into chunks.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from vllm import _custom_ops as ops
from vllm.v1.attention.backend import StepMeta

__all__ = ["ROPE_FACTORS", "RopeParams", "RotaryEmbedding"]

# Name under which a weight file may carry the divisors of `RotaryEmbedding.divide_frequencies`.
ROPE_FACTORS = "rope_freqs.weight"


@dataclass(frozen=True, slots=True)
class RopeParams:
    """One model's rotary settings. `options` are the checkpoint's scaling values under their own names."""

    kind: str
    theta: float
    rotary_dim: int
    max_positions: int
    interleaved: bool = False
    options: Mapping[str, Any] = field(default_factory=dict)

    @staticmethod
    def from_config(config: Mapping[str, Any], head_dim: int, interleaved: bool = False) -> RopeParams:
        """Reads `rope_parameters` (new) or `rope_theta` + `rope_scaling` (old) of a config.json.

        `ValueError` for an unknown kind or a missing value, naming it.
        """
        if not config.get("max_position_embeddings"):
            raise ValueError("config.json lacks max_position_embeddings")
        options = dict(config.get("rope_scaling") or {})
        options.update(config.get("rope_parameters") or {})
        kind = options.get("rope_type") or options.get("type") or "default"
        if kind not in _FREQUENCIES:
            raise ValueError(
                f"rope_type {kind!r} is not supported; supported: {', '.join(sorted(_FREQUENCIES))}"
            )
        theta = options.get("rope_theta") or config.get("rope_theta") or 10000.0
        partial = options.get("partial_rotary_factor") or config.get("partial_rotary_factor") or 1.0
        options["partial_rotary_factor"] = partial
        if options.get("original_max_position_embeddings") is None:
            original = config.get("original_max_position_embeddings") or config["max_position_embeddings"]
            options["original_max_position_embeddings"] = original
        return RopeParams(
            kind=kind,
            theta=float(theta),
            # Here the share says how many pairs turn at all; the others have the frequency zero.
            rotary_dim=head_dim if kind == "proportional" else int(head_dim * partial),
            max_positions=int(config["max_position_embeddings"]),
            interleaved=interleaved,
            options=options,
        )

    def need(self, name: str) -> Any:
        """The scaling value `name`; `ValueError` if the checkpoint lacks it."""
        value = self.options.get(name)
        if value is None:
            raise ValueError(f"rope_type {self.kind!r} needs {name!r} in the rope settings")
        return value

    @property
    def original_max(self) -> int:
        """Context length before scaling."""
        return int(self.options.get("original_max_position_embeddings") or self.max_positions)

    def exponents(self) -> Tensor:
        """`2i / rotary_dim` in fp32."""
        return torch.arange(0, self.rotary_dim, 2, dtype=torch.float32) / self.rotary_dim


# Each function maps params and the positions [P] of a stretch to inverse frequencies, [F] or [P, F], and the factor
# on cosine and sine.
_Frequencies = tuple[Tensor, float]


def _default(p: RopeParams, positions: Tensor) -> _Frequencies:
    return 1.0 / p.theta ** p.exponents(), 1.0


def _linear(p: RopeParams, positions: Tensor) -> _Frequencies:
    return 1.0 / p.theta ** p.exponents() / float(p.need("factor")), 1.0


def _dynamic(p: RopeParams, positions: Tensor) -> _Frequencies:
    factor = float(p.need("factor"))
    length = (positions + 1).clamp(min=p.max_positions).to(torch.float64)
    growth = (factor * length / p.max_positions - (factor - 1)) ** (p.rotary_dim / (p.rotary_dim - 2))
    base = (p.theta * growth).to(torch.float32)
    return 1.0 / base[:, None] ** p.exponents(), 1.0


def _llama3(p: RopeParams, positions: Tensor) -> _Frequencies:
    factor, low, high = (float(p.need(n)) for n in ("factor", "low_freq_factor", "high_freq_factor"))
    plain = 1.0 / p.theta ** p.exponents()
    turns = p.original_max * plain / (2 * math.pi)
    # Fewer than `low` turns over the original context: stretched. More than `high`: kept. Between: blended.
    keep = ((turns - low) / (high - low)).clamp(0, 1)
    return plain / factor * (1 - keep) + plain * keep, 1.0


def _yarn_mscale(factor: float, mscale: float = 1.0) -> float:
    return 0.1 * mscale * math.log(factor) + 1.0 if factor > 1 else 1.0


def _yarn(p: RopeParams, positions: Tensor) -> _Frequencies:
    options = p.options
    factor = float(options.get("factor") or p.max_positions / p.original_max)
    scale = options.get("attention_factor")
    if scale is None:
        mscale, mscale_all = options.get("mscale"), options.get("mscale_all_dim")
        scale = _yarn_mscale(factor)
        if mscale and mscale_all:
            scale = _yarn_mscale(factor, mscale) / _yarn_mscale(factor, mscale_all)

    def dim_of_turns(turns: float) -> float:
        return p.rotary_dim * math.log(p.original_max / (turns * 2 * math.pi)) / (2 * math.log(p.theta))

    low = dim_of_turns(float(options.get("beta_fast") or 32))
    high = dim_of_turns(float(options.get("beta_slow") or 1))
    if options.get("truncate", True):
        low, high = math.floor(low), math.ceil(high)
    low, high = max(low, 0), min(high, p.rotary_dim - 1)
    if low == high:
        high += 0.001
    ramp = ((torch.arange(p.rotary_dim // 2, dtype=torch.float32) - low) / (high - low)).clamp(0, 1)
    plain = 1.0 / p.theta ** p.exponents()
    return plain / factor * ramp + plain * (1 - ramp), float(scale)


def _longrope(p: RopeParams, positions: Tensor) -> _Frequencies:
    long = torch.tensor(p.need("long_factor"), dtype=torch.float32)
    short = torch.tensor(p.need("short_factor"), dtype=torch.float32)
    for name, factors in (("long_factor", long), ("short_factor", short)):
        if factors.numel() != p.rotary_dim // 2:
            raise ValueError(
                f"rope {name} has {factors.numel()} values, the rotary size {p.rotary_dim} needs {p.rotary_dim // 2}"
            )
    factor = float(p.options.get("factor") or p.max_positions / p.original_max)
    scale = p.options.get("attention_factor")
    if scale is None:
        scale = math.sqrt(1 + math.log(factor) / math.log(p.original_max)) if factor > 1 else 1.0
    is_long = (positions + 1 > p.original_max)[:, None]
    return 1.0 / (torch.where(is_long, long, short) * p.theta ** p.exponents()), float(scale)


def _proportional(p: RopeParams, positions: Tensor) -> _Frequencies:
    frequencies = 1.0 / p.theta ** p.exponents()
    frequencies[int(p.need("partial_rotary_factor") * p.rotary_dim // 2) :] = 0
    return frequencies / float(p.options.get("factor") or 1.0), 1.0


_FREQUENCIES: dict[str, Callable[[RopeParams, Tensor], _Frequencies]] = {
    "default": _default,
    "dynamic": _dynamic,
    "linear": _linear,
    "llama3": _llama3,
    "longrope": _longrope,
    "proportional": _proportional,
    "su": _longrope,
    "yarn": _yarn,
}


class RotaryEmbedding:
    """Table of `cos | sin` rows in fp32, grown by doubling up to what requests really use."""

    def __init__(self, params: RopeParams) -> None:
        self.params = params
        self._table = torch.empty(0, params.rotary_dim)
        self._divisors: Tensor | None = None
        self._key = f"rope:{id(self)}"
        self.rows(1)

    def divide_frequencies(self, divisors: Tensor) -> None:
        """Stretches each frequency by its own factor, `[rotary_dim / 2]`, on top of the params; starts the table anew.

        Some weight files carry a scaling as these numbers instead of naming it. `ValueError` for a wrong count.
        """
        if divisors.numel() != self.params.rotary_dim // 2:
            raise ValueError(
                f"{divisors.numel()} rotary factors do not fit the rotary size {self.params.rotary_dim}"
            )
        self._divisors = divisors.flatten().float()
        self._table = torch.empty(0, self.params.rotary_dim)

    def rows(self, length: int) -> Tensor:
        """The table with at least `length` positions, `[≥ length, rotary_dim]`: half cosines, half sines."""
        have = self._table.shape[0]
        if have < length:
            positions = torch.arange(have, max(length, 2 * have, 1024))
            frequencies, scale = _FREQUENCIES[self.params.kind](self.params, positions)
            if self._divisors is not None:
                frequencies = frequencies / self._divisors
            angles = positions[:, None].to(torch.float32) * frequencies
            fresh = torch.cat([angles.cos(), angles.sin()], dim=-1) * scale
            self._table = torch.cat([self._table, fresh])
        return self._table

    def of_step(self, meta: StepMeta) -> Tensor:
        """The rows of this step's tokens, `[T, rotary_dim]`, picked once per step."""
        found = meta.derived.get(self._key)
        if found is None:
            found = self.rows(max(meta.seq_lens, default=1))[meta.positions]
            meta.derived[self._key] = found
        result: Tensor = found
        return result

    def apply(self, x: Tensor, cos_sin: Tensor) -> Tensor:
        """Rotates the first `rotary_dim` channels of `x [T, H, D]`; in place where x is writable, returns it."""
        return ops.rotary(x, cos_sin, self.params.interleaved)
