"""Sampling metadata for tests: neutral unless said otherwise, and slow plain-Python references of the sampling rules."""

from __future__ import annotations

import math
from typing import Any

import torch

from vllm.v1.sample.logits_processor import LogitsProcessors
from vllm.v1.sample.metadata import SamplingMetadata

NEG_INF = -math.inf


def neutral_metadata(num_rows: int, **changes: Any) -> SamplingMetadata:
    """Greedy rows without any rule; `changes` replace fields."""
    values: dict[str, Any] = {
        "temperature": None,
        "all_greedy": True,
        "all_random": False,
        "top_p": None,
        "top_k": None,
        "generators": {},
        "max_num_logprobs": None,
        "no_penalties": True,
        "prompt_token_ids": None,
        "frequency_penalties": torch.zeros(num_rows),
        "presence_penalties": torch.zeros(num_rows),
        "repetition_penalties": torch.ones(num_rows),
        "output_token_ids": [[] for _ in range(num_rows)],
        "allowed_token_ids_mask": None,
        "bad_words_token_ids": {},
        "logitsprocs": LogitsProcessors(),
    }
    return SamplingMetadata(**{**values, **changes})


def surviving_tokens(logits: list[float], k: int | None, p: float | None) -> set[int]:
    """Top-k, then top-p, lower ids first among equals; by sorting and adding up."""
    order = sorted(range(len(logits)), key=lambda t: (-logits[t], t))
    if k is not None and 0 < k < len(order):
        order = order[:k]
    if p is None:
        return set(order)
    weights = [math.exp(logits[t] - logits[order[0]]) for t in order]
    kept, mass, total = set(), 0.0, sum(weights)
    for token, weight in zip(order, weights, strict=True):
        if kept and mass >= p * total:
            break
        kept.add(token)
        mass += weight
    return kept


def penalised(
    logits: list[float],
    prompt: list[int],
    output: list[int],
    presence: float,
    frequency: float,
    repetition: float,
) -> list[float]:
    """Repetition, frequency and presence penalties on one row."""
    result = list(logits)
    for token in range(len(logits)):
        count = output.count(token)
        if token in prompt or count:
            result[token] = result[token] / repetition if result[token] > 0 else result[token] * repetition
        result[token] -= frequency * count + presence * (count > 0)
    return result


def drawn_token(logits: list[float], allowed: set[int], draw: float) -> int:
    """The token that a draw in [0, 1) selects: walk the allowed ones by id until their weights exceed it."""
    best = max(logits[t] for t in allowed)
    weights = {t: math.exp(logits[t] - best) for t in sorted(allowed)}
    target, mass = draw * sum(weights.values()), 0.0
    for token, weight in weights.items():
        mass += weight
        if mass > target:
            return token
    return max(allowed)
