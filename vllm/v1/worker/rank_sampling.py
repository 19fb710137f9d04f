"""Sampling where several ranks hold the same logits: one rank draws, all go on with its tokens. Layer: L6.

Owns: that the ranks' requests stay equal token for token, also when sampling fails. Must not know: how tokens are drawn.
"""

from __future__ import annotations

from collections.abc import Callable

import torch

from vllm.distributed.parallel_state import TPGroup
from vllm.v1.worker.row_sampler import SampledRows

SAMPLING_RANK = 0


def sample_on_one_rank(
    group: TPGroup, device: torch.device, num_rows: int, sample: Callable[[], SampledRows]
) -> SampledRows:
    """What `sample` gives on rank 0; other ranks do not call it and get only the tokens of the `num_rows` rows.

    An error of `sample` is raised on every rank, so that all of them give the step up.
    """
    if group.size == 1:
        return sample()
    if group.rank != SAMPLING_RANK:
        message = group.broadcast(torch.empty(1 + num_rows, dtype=torch.int64, device=device), SAMPLING_RANK)
        failed, *tokens = message.tolist()
        if failed:
            raise RuntimeError(f"rank {SAMPLING_RANK} could not sample")
        return SampledRows(tokens, None, {})
    try:
        sampled = sample()
    except BaseException:
        group.broadcast(torch.ones(1 + num_rows, dtype=torch.int64, device=device), SAMPLING_RANK)
        raise
    message = torch.tensor([0, *sampled.tokens], dtype=torch.int64, device=device)
    group.broadcast(message, SAMPLING_RANK)
    return sampled
