"""What the sampler is told about the rows of a step. Layer: L6.

Owns: `SamplingMetadata`. Must not know: where the values come from, how they are applied.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from vllm.v1.sample.logits_processor import LogitsProcessors
from vllm.v1.sample.ops.token_counts import CountedTokens


@dataclass
class SamplingMetadata:
    """One row per request that samples; tensors are `[rows]` on the device of the logits unless said otherwise.

    Chance comes from `draws` if given: one number in [0, 1) per row, float64. Otherwise row `r` draws from
    `generators[r]`, or from torch's default generator. Penalties come from `counted_tokens` if given, otherwise from
    `prompt_token_ids` and `output_token_ids`.
    """

    temperature: Tensor | None
    """None if all rows are greedy; below 1e-5 a row is greedy."""
    all_greedy: bool
    all_random: bool
    top_p: Tensor | None
    """None if no row uses it."""
    top_k: Tensor | None
    """None if no row uses it; the vocabulary size (or less than 1) switches it off for a row."""
    generators: dict[int, torch.Generator]
    max_num_logprobs: int | None
    """Most alternatives that a row asks for; 0 = only the sampled token, −1 = whole vocabulary, None = no row asks."""
    no_penalties: bool
    prompt_token_ids: Tensor | None
    """`[rows, longest]`, padded with the vocabulary size."""
    frequency_penalties: Tensor
    presence_penalties: Tensor
    repetition_penalties: Tensor
    output_token_ids: list[list[int]]
    allowed_token_ids_mask: Tensor | None
    """bool `[rows, vocab]`, True = banned."""
    bad_words_token_ids: dict[int, list[list[int]]]
    """row → token sequences; the last token of a sequence is banned where the ones before it were just produced."""
    logitsprocs: LogitsProcessors
    logprob_token_ids: dict[int, list[int]] | None = None
    """row → tokens whose log probability is wanted in place of the most likely ones."""
    spec_token_ids: list[list[int]] | None = None
    thinking_budget_state_holder: Any = None  # a reasoning feature's own object; not used by this sampler
    draws: Tensor | None = None
    counted_tokens: CountedTokens | None = None
    forced_token_ids: dict[int, int] | None = None
    """row → token that is taken instead of a sampled one (replay of a recorded output)."""
    num_logprobs: list[int | None] | None = None
    """What each row asks for, so that no other row is sorted for the one that asks for most; None = all ask for that."""
