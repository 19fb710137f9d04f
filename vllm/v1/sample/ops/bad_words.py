"""Bans token sequences. Layer: L6."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from torch import Tensor


def apply_bad_words(
    logits: Tensor,
    bad_words_token_ids: Mapping[int, Sequence[Sequence[int]]],
    output_token_ids: Sequence[Sequence[int]],
) -> Tensor:
    """In row r, ban the last token of each sequence whose other tokens end `output_token_ids[r]`; in place."""
    vocab_size = logits.shape[-1]
    for row, sequences in bad_words_token_ids.items():
        produced = output_token_ids[row]
        banned = []
        for sequence in sequences:
            start = len(produced) - (len(sequence) - 1)
            if (
                start >= 0
                and list(produced[start:]) == list(sequence[:-1])
                and 0 <= sequence[-1] < vocab_size
            ):
                banned.append(sequence[-1])
        if banned:
            logits[row, banned] = -float("inf")
    return logits
