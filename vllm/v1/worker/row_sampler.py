"""Samples the rows of a step so that one bad row costs only its own request. Layer: L6.

Owns: token masks of structured requests, detection of rows that cannot be sampled, the sampler. Must not know: the
forward pass, schedulers.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from vllm.logger import init_logger
from vllm.v1.core.sched.output import GrammarOutput
from vllm.v1.outputs import LogprobsLists
from vllm.v1.sample.metadata import SamplingMetadata
from vllm.v1.sample.sampler import Sampler, find_nans, may_hide_nans
from vllm.v1.worker.sampling_rows import SamplingRows

logger = init_logger(__name__)


@dataclass(slots=True)
class SampledRows:
    """Tokens by row; rows in `failed` (row → number of NaN logits, at least 1) have a token without meaning."""

    tokens: list[int]
    logprobs: LogprobsLists | None
    failed: dict[int, int]


def apply_grammar_bitmask(logits: Tensor, grammar: GrammarOutput, rows: SamplingRows) -> None:
    """Ban what the grammars do not allow: bit t of a request's mask row is 1 where token t is allowed. In place."""
    vocab_size = logits.shape[-1]
    for mask_row, req_id in enumerate(grammar.structured_output_request_ids):
        row = rows.row_of(req_id)
        if row is None:
            continue
        words = np.ascontiguousarray(grammar.grammar_bitmask[mask_row], dtype=np.int32)
        bits = np.unpackbits(words.view(np.uint8), bitorder="little", count=vocab_size)
        # Tokens behind the mask's end are padding of the vocabulary.
        allowed = torch.zeros(vocab_size, dtype=torch.bool)
        allowed[: len(bits)] = torch.from_numpy(bits.view(np.bool_))
        logits[row].masked_fill_(~allowed.to(logits.device), -float("inf"))


class RowSampler:
    """Sampler, masks and checks of one runner."""

    def __init__(self, sampler: Sampler) -> None:
        self.sampler = sampler

    def sample(
        self, logits: Tensor, rows: SamplingRows, metadata: SamplingMetadata, grammar: GrammarOutput | None
    ) -> SampledRows:
        """One token per row of fp32 logits `[rows, vocab]`, which are used up."""
        failed: dict[int, int] = {}
        if grammar is not None or may_hide_nans(metadata):
            # The maximum of a row is NaN exactly if one of its entries is.
            failed = find_nans(logits, torch.isnan(logits.amax(dim=-1)))
            if failed:
                logits[list(failed)] = 0.0
        if grammar is not None:
            apply_grammar_bitmask(logits, grammar, rows)
        output, unsampleable = self.sampler.sample_rows(logits, metadata)
        tensors = output.logprobs_tensors
        tokens: list[int] = output.sampled_token_ids.flatten().tolist()
        return SampledRows(tokens, None if tensors is None else tensors.tolists(), {**unsampleable, **failed})


def describe_failed(req_ids: Sequence[str], failed: dict[int, int]) -> dict[str, int] | None:
    """Request → number of NaN logits, or None if no row failed."""
    if not failed:
        return None
    named = {req_ids[row]: count for row, count in failed.items()}
    logger.warning("No token can be sampled for %s: NaN logits, or every token is banned", ", ".join(named))
    return named
