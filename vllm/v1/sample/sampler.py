"""Logits → tokens and log probabilities. Layer: L6.

Owns: the order of the sampling rules. Must not know: requests, rows' histories, models.

Order: log probabilities of the untouched logits (if wanted) → allowed tokens → bad words → processors that can change
the best token (bias, minimum tokens, custom) → penalties → greedy choice, or temperature → other processors (min-p)
→ top-k, top-p → draw. A row may have its token prescribed instead; its log probabilities are reported as usual.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn

from vllm.v1.outputs import LogprobsTensors, SamplerOutput
from vllm.v1.sample.metadata import SamplingMetadata
from vllm.v1.sample.ops.bad_words import apply_bad_words
from vllm.v1.sample.ops.logprobs import batched_count_greater_than
from vllm.v1.sample.ops.penalties import apply_all_penalties, apply_counted_penalties
from vllm.v1.sample.ops.row_max import row_max, row_topk
from vllm.v1.sample.ops.topk_topp_sampler import TopKTopPSampler

LOGPROBS_MODES = ("raw_logprobs", "raw_logits", "processed_logprobs", "processed_logits")
SAMPLING_EPS = 1e-5
"""Temperatures below this are greedy."""


class Sampler(nn.Module):
    """Samples one token per row. Rows do not influence each other; logits may be changed in place."""

    def __init__(self, logprobs_mode: str = "raw_logprobs", use_fp64_gumbel: bool = False) -> None:
        super().__init__()
        if logprobs_mode not in LOGPROBS_MODES:
            raise ValueError(f"logprobs_mode={logprobs_mode!r} must be one of {', '.join(LOGPROBS_MODES)}")
        self.logprobs_mode = logprobs_mode
        self.topk_topp_sampler = TopKTopPSampler(logprobs_mode, use_fp64_gumbel)

    def forward(
        self,
        logits: Tensor,
        sampling_metadata: SamplingMetadata,
        predict_bonus_token: bool = False,
        logprobs_mode_override: str | None = None,
    ) -> SamplerOutput:
        """`[rows, vocab]` → int32 tokens `[rows, 1]` and, if a row asks, log probabilities with ranks."""
        return self.sample_rows(logits, sampling_metadata, predict_bonus_token, logprobs_mode_override)[0]

    def sample_rows(
        self,
        logits: Tensor,
        sampling_metadata: SamplingMetadata,
        predict_bonus_token: bool = False,
        logprobs_mode_override: str | None = None,
    ) -> tuple[SamplerOutput, dict[int, int]]:
        """`forward`, and the rows whose token means nothing with their number of NaN logits, at least 1.

        Such a row has a NaN, an infinite logit, or no token that is not banned.
        """
        mode = logprobs_mode_override or self.logprobs_mode
        wanted = sampling_metadata.max_num_logprobs is not None or bool(sampling_metadata.logprob_token_ids)
        reported: Tensor | None = None
        if wanted and mode == "raw_logprobs":
            reported = self.compute_logprobs(logits)
        elif wanted and mode == "raw_logits":
            reported = logits.to(torch.float32, copy=True)
        logits = logits.to(torch.float32)
        logits = self.apply_logits_processors(logits, sampling_metadata, predict_bonus_token)
        best, greedy = row_max(logits)
        bad = find_nans(logits, ~torch.isfinite(best))
        if bad:
            logits[list(bad)] = 0.0
        sampled, processed = self._sample(logits, sampling_metadata, mode, greedy)
        for row, token in (sampling_metadata.forced_token_ids or {}).items():
            sampled[row] = token
        if processed is not None:
            reported = processed
        tensors = None
        if wanted and reported is not None:
            tensors = self._gather(reported, sampling_metadata, sampled)
        return SamplerOutput(sampled.to(torch.int32).unsqueeze(-1), tensors), bad

    @staticmethod
    def apply_temperature(logits: Tensor, temp: Tensor, all_random: bool) -> Tensor:
        """Divide each row by its temperature, in place; greedy rows (unless `all_random`) stay as they are."""
        if not all_random:
            temp = torch.where(temp < SAMPLING_EPS, 1.0, temp)
        return logits.div_(temp.unsqueeze(1))

    @staticmethod
    def greedy_sample(logits: Tensor) -> Tensor:
        """The most likely token per row, int64; the lowest id among equals."""
        return row_max(logits)[1]

    def sample(
        self, logits: Tensor, sampling_metadata: SamplingMetadata, logprobs_mode_override: str | None = None
    ) -> tuple[Tensor, Tensor | None]:
        """Tokens int64 `[rows]`, and processed logits or log probabilities if the mode wants them."""
        greedy = self.greedy_sample(logits)
        return self._sample(logits, sampling_metadata, logprobs_mode_override or self.logprobs_mode, greedy)

    def _sample(
        self, logits: Tensor, sampling_metadata: SamplingMetadata, mode: str, greedy: Tensor
    ) -> tuple[Tensor, Tensor | None]:
        if sampling_metadata.all_greedy:
            return greedy, _processed(logits, mode)
        if sampling_metadata.temperature is None:
            raise ValueError("temperature must be given unless all rows are greedy")
        logits = self.apply_temperature(logits, sampling_metadata.temperature, sampling_metadata.all_random)
        for processor in sampling_metadata.logitsprocs.argmax_invariant:
            if not processor.is_idle():
                logits = processor.apply(logits)
        self.topk_topp_sampler.logprobs_mode = mode
        drawn, processed = self.topk_topp_sampler(
            logits,
            sampling_metadata.generators,
            sampling_metadata.top_k,
            sampling_metadata.top_p,
            sampling_metadata.draws,
        )
        if sampling_metadata.all_random:
            return drawn, processed
        return torch.where(sampling_metadata.temperature < SAMPLING_EPS, greedy, drawn), processed

    @staticmethod
    def compute_logprobs(logits: Tensor) -> Tensor:
        """Log probabilities in float32."""
        return logits.log_softmax(dim=-1, dtype=torch.float32)

    @staticmethod
    def gather_logprobs(logprobs: Tensor, num_logprobs: int, token_ids: Tensor) -> LogprobsTensors:
        """Per row the given token first, then the `num_logprobs` most likely ones; rank of the given token.

        `token_ids` int64 `[rows]`; −1 as `num_logprobs` means the whole vocabulary.
        """
        chosen = token_ids.to(torch.int64).unsqueeze(-1)
        chosen_logprobs = logprobs.gather(-1, chosen)
        ranks = batched_count_greater_than(logprobs, chosen_logprobs)
        count = logprobs.shape[-1] if num_logprobs == -1 else min(num_logprobs, logprobs.shape[-1])
        values, ids = row_topk(logprobs, count)
        return LogprobsTensors(
            torch.cat([chosen, ids], dim=1).to(torch.int32),
            torch.cat([chosen_logprobs, values], dim=1),
            ranks,
        )

    def _gather(self, reported: Tensor, metadata: SamplingMetadata, sampled: Tensor) -> LogprobsTensors:
        specific = metadata.logprob_token_ids
        widest = metadata.max_num_logprobs or 0
        if metadata.num_logprobs is None:
            tensors = self.gather_logprobs(reported, widest, sampled)
        else:
            tensors = self._gather_each(reported, metadata.num_logprobs, widest, sampled)
        return tensors if not specific else _with_specific_tokens(tensors, reported, specific)

    def _gather_each(
        self, reported: Tensor, counts: list[int | None], widest: int, sampled: Tensor
    ) -> LogprobsTensors:
        """As `gather_logprobs`, with as many alternatives per row as it asks for; the rest of a row means nothing."""
        if all(count == widest for count in counts):
            return self.gather_logprobs(reported, widest, sampled)
        size = (len(counts), 1 + (reported.shape[-1] if widest == -1 else min(widest, reported.shape[-1])))
        device = reported.device
        # Not written where nobody reads: memory that is not touched costs nothing.
        ids = torch.empty(size, dtype=torch.int32, device=device)
        values = torch.empty(size, dtype=torch.float32, device=device)
        ranks = torch.zeros(len(counts), dtype=torch.int64, device=device)
        for count in sorted({count for count in counts if count is not None}):
            rows = [row for row, wanted in enumerate(counts) if wanted == count]
            found = self.gather_logprobs(reported[rows], count, sampled[rows])
            width = found.logprobs.shape[1]
            ids[rows, :width] = found.logprob_token_ids
            values[rows, :width] = found.logprobs
            ranks[rows] = found.selected_token_ranks.to(ranks.dtype)
        return LogprobsTensors(ids, values, ranks)

    def apply_logits_processors(
        self, logits: Tensor, sampling_metadata: SamplingMetadata, predict_bonus_token: bool
    ) -> Tensor:
        """Everything that can change the most likely token; in place."""
        outputs = sampling_metadata.output_token_ids
        if predict_bonus_token and sampling_metadata.spec_token_ids:
            outputs = [[*o, *s] for o, s in zip(outputs, sampling_metadata.spec_token_ids, strict=True)]
        if sampling_metadata.allowed_token_ids_mask is not None:
            logits.masked_fill_(sampling_metadata.allowed_token_ids_mask, -float("inf"))
        if sampling_metadata.bad_words_token_ids:
            apply_bad_words(logits, sampling_metadata.bad_words_token_ids, outputs)
        for processor in sampling_metadata.logitsprocs.non_argmax_invariant:
            if not processor.is_idle():
                logits = processor.apply(logits)
        return self.apply_penalties(logits, sampling_metadata, outputs)

    @staticmethod
    def apply_penalties(
        logits: Tensor, sampling_metadata: SamplingMetadata, output_token_ids: list[list[int]]
    ) -> Tensor:
        """Repetition, frequency and presence penalties; in place."""
        if sampling_metadata.no_penalties:
            return logits
        presence = sampling_metadata.presence_penalties
        frequency = sampling_metadata.frequency_penalties
        repetition = sampling_metadata.repetition_penalties
        if sampling_metadata.counted_tokens is not None:
            return apply_counted_penalties(
                logits, sampling_metadata.counted_tokens, presence, frequency, repetition
            )
        if sampling_metadata.prompt_token_ids is None:
            raise ValueError("penalties need prompt_token_ids")
        return apply_all_penalties(
            logits, sampling_metadata.prompt_token_ids, presence, frequency, repetition, output_token_ids
        )


def find_nans(logits: Tensor, suspects: Tensor) -> dict[int, int]:
    """Row → number of NaN logits, at least 1, of the rows where the bool `suspects[row]` is True."""
    if not bool(suspects.any()):
        return {}
    rows = suspects.nonzero().flatten()
    counts = torch.isnan(logits[rows]).sum(dim=-1).clamp(min=1)
    return dict(zip(rows.tolist(), counts.tolist(), strict=True))


def may_hide_nans(metadata: SamplingMetadata) -> bool:
    """Whether a rule may overwrite logits, so that a NaN must be looked for before the rules run."""
    return (
        metadata.allowed_token_ids_mask is not None
        or bool(metadata.bad_words_token_ids)
        or any(not processor.is_idle() for processor in metadata.logitsprocs.all)
    )


def _processed(logits: Tensor, mode: str) -> Tensor | None:
    if mode == "processed_logits":
        return logits
    if mode == "processed_logprobs":
        return Sampler.compute_logprobs(logits)
    return None


def _with_specific_tokens(
    tensors: LogprobsTensors, reported: Tensor, specific: dict[int, list[int]]
) -> LogprobsTensors:
    """Replace the alternatives of the rows in `specific` by the tokens they name.

    Rows are as wide as the widest; the rest of a shorter row repeats its sampled token.
    """
    width = max(tensors.logprobs.shape[1], 1 + max(len(tokens) for tokens in specific.values()))
    missing = width - tensors.logprobs.shape[1]
    ids, values = tensors.logprob_token_ids, tensors.logprobs
    ids = torch.cat([ids, ids[:, :1].expand(-1, missing)], dim=1)
    values = torch.cat([values, values[:, :1].expand(-1, missing)], dim=1)
    for row, tokens in specific.items():
        wanted = torch.tensor(tokens, dtype=torch.int64, device=reported.device)
        ids[row, 1:], values[row, 1:] = ids[row, 0], values[row, 0]
        ids[row, 1 : 1 + len(tokens)] = wanted.to(ids.dtype)
        values[row, 1 : 1 + len(tokens)] = reported[row, wanted]
    return LogprobsTensors(ids, values, tensors.selected_token_ranks)
