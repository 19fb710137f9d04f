"""Log probabilities of prompt tokens, collected chunk by chunk with bounded scratch memory. Layer: L6.

Owns: which prompt positions a step covers, and the growing result of a request. Must not know: steps, slots, models
beyond "hidden states → logits".
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from vllm.sampling_params import SamplingParams
from vllm.v1.outputs import LogprobsTensors
from vllm.v1.sample.sampler import Sampler

# Logits of at most this many bytes exist at once, whatever the length of prompt and chunk.
SCRATCH_BYTES_MAX = 64 * 2**20


def wants_prompt_logprobs(params: SamplingParams) -> bool:
    """Whether anything about prompt tokens is to be reported."""
    return params.prompt_logprobs is not None or bool(params.prompt_logprob_token_ids)


@dataclass(slots=True)
class PromptLogprobs:
    """What one request collected so far; row i is about prompt token `first + i`.

    Rows of positions that were never computed here (a cached prefix) hold the token with a NaN.
    """

    first: int
    tensors: LogprobsTensors | None
    specific: Tensor | None
    """`[rows, ids]`: log probabilities of `prompt_logprob_token_ids` at each position."""


class PromptLogprobsCollector:
    """Fills the results of requests from their hidden states."""

    def __init__(
        self, vocab_size: int, compute_logits: Callable[[Tensor], Tensor], logprobs_mode: str = "raw_logprobs"
    ) -> None:
        self._vocab_size = vocab_size
        self._compute_logits = compute_logits
        self._is_logits = logprobs_mode.endswith("logits")
        self._rows_max = max(1, SCRATCH_BYTES_MAX // (4 * vocab_size))

    def start(self, params: SamplingParams, prompt: list[int]) -> PromptLogprobs:
        """An empty result for a prompt."""
        first = max(1, params.prompt_logprob_start or 0)
        count = max(0, len(prompt) - first)
        tensors = specific = None
        if params.prompt_logprobs is not None:
            wanted = params.prompt_logprobs
            width = 1 + (self._vocab_size if wanted == -1 else min(wanted, self._vocab_size))
            targets = torch.tensor(prompt[first:], dtype=torch.int32).unsqueeze(1)
            tensors = LogprobsTensors(
                targets.repeat(1, width),
                torch.full((count, width), float("nan")),
                torch.zeros(count, dtype=torch.int32),
            )
        if params.prompt_logprob_token_ids:
            specific = torch.full((count, len(params.prompt_logprob_token_ids)), float("nan"))
        return PromptLogprobs(first, tensors, specific)

    def add(
        self, collected: PromptLogprobs, params: SamplingParams, prompt: list[int], start: int, hidden: Tensor
    ) -> None:
        """`hidden[i]` is the state of prompt position `start + i`; it predicts the token after it."""
        begin = max(start, collected.first - 1)
        end = min(start + hidden.shape[0], len(prompt) - 1)
        for low in range(begin, end, self._rows_max):
            high = min(low + self._rows_max, end)
            scores = self._compute_logits(hidden[low - start : high - start])
            if not self._is_logits:
                scores = Sampler.compute_logprobs(scores)
            self._store(collected, params, prompt[low + 1 : high + 1], low + 1 - collected.first, scores)

    @staticmethod
    def _store(
        collected: PromptLogprobs, params: SamplingParams, targets: list[int], row: int, scores: Tensor
    ) -> None:
        rows = slice(row, row + len(targets))
        if collected.tensors is not None and params.prompt_logprobs is not None:
            found = Sampler.gather_logprobs(
                scores, params.prompt_logprobs, torch.tensor(targets, device=scores.device)
            )
            collected.tensors.logprob_token_ids[rows] = found.logprob_token_ids.cpu()
            collected.tensors.logprobs[rows] = found.logprobs.cpu()
            collected.tensors.selected_token_ranks[rows] = found.selected_token_ranks.to("cpu", torch.int32)
        if collected.specific is not None:
            collected.specific[rows] = scores[:, params.prompt_logprob_token_ids].cpu()
