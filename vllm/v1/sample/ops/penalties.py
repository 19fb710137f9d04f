"""Repetition, frequency and presence penalties. Layer: L6.

One formula in two forms: from padded token lists (public, rebuilt on each call) and from counts kept between steps.
For a token that occurs in prompt or output, a positive logit is divided by the repetition penalty and a negative one
multiplied; then `frequency · count + presence · (count > 0)` is subtracted, counting produced tokens only.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from vllm.utils.torch_utils import make_tensor_with_pad
from vllm.v1.sample.ops.token_counts import CountedTokens


def token_counts(token_ids: Tensor, vocab_size: int) -> Tensor:
    """`[rows, n]` ids, padded with any value outside the vocabulary → int64 counts `[rows, vocab]`."""
    inside = (token_ids >= 0) & (token_ids < vocab_size)
    counts = torch.zeros(token_ids.shape[0], vocab_size + 1, dtype=torch.int64, device=token_ids.device)
    safe = torch.where(inside, token_ids, vocab_size).to(torch.int64)
    counts.scatter_add_(1, safe, torch.ones_like(safe))
    return counts[:, :vocab_size]


def apply_all_penalties(
    logits: Tensor,
    prompt_token_ids: Tensor,
    presence_penalties: Tensor,
    frequency_penalties: Tensor,
    repetition_penalties: Tensor,
    output_token_ids: Sequence[Sequence[int]],
) -> Tensor:
    """Penalise `[rows, vocab]` logits in place; penalties are `[rows]`, prompts padded with the vocabulary size."""
    vocab_size = logits.shape[-1]
    # Ids that are not known yet (−1 placeholders) count as padding.
    outputs = make_tensor_with_pad(output_token_ids, vocab_size, torch.int64, device=logits.device)
    counts = token_counts(outputs, vocab_size)
    seen = (token_counts(prompt_token_ids.to(logits.device), vocab_size) > 0) | (counts > 0)
    factor = torch.where(seen, repetition_penalties.unsqueeze(1), 1.0)
    logits.copy_(torch.where(logits > 0, logits / factor, logits * factor))
    logits -= frequency_penalties.unsqueeze(1) * counts
    logits -= presence_penalties.unsqueeze(1) * (counts > 0)
    return logits


def apply_counted_penalties(
    logits: Tensor,
    counted: CountedTokens,
    presence_penalties: Tensor,
    frequency_penalties: Tensor,
    repetition_penalties: Tensor,
) -> Tensor:
    """The same from kept counts: touches only logits of tokens that occur."""
    rows, tokens, counts = counted.rows, counted.tokens, counted.counts
    if rows.numel() == 0:
        return logits
    values = logits[rows, tokens]
    factor = repetition_penalties[rows]
    values = torch.where(values > 0, values / factor, values * factor)
    values -= frequency_penalties[rows] * counts
    values -= presence_penalties[rows] * (counts > 0)
    logits[rows, tokens] = values
    return logits
