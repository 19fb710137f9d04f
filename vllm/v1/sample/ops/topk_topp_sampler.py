"""Top-k and top-p restriction, and drawing a token. Layer: L6.

Owns: which tokens survive and which of them a number in [0, 1) selects. Rules: top-k first, then top-p over what is
left; among equal logits the lower token id goes first, so exactly k tokens survive and the outcome is a function of
the row alone. A token is drawn by walking the surviving tokens in id order until their weights exceed the draw.
Must not know: requests, temperature, where draws come from.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn

from vllm.v1.sample.ops.draws import generator_draws

_NEG_INF = -float("inf")
# Candidates looked at before a row without top-k is sorted as a whole; a nucleus is nearly always smaller.
_FIRST_CANDIDATES = 512


def apply_top_k_top_p_pytorch(
    logits: Tensor, k: Tensor | None, p: Tensor | None, allow_cpu_sync: bool = False
) -> Tensor:
    """`[rows, vocab]` logits with everything outside the restriction at −inf, by one full sort; in place.

    The plain form of `apply_top_k_top_p`. `k` int `[rows]`, `p` float `[rows]`.
    """
    if k is None and p is None:
        return logits
    vocab_size = logits.shape[-1]
    ordered, order = logits.sort(dim=-1, descending=True, stable=True)
    place = torch.arange(vocab_size, device=logits.device)
    kept = torch.ones_like(logits, dtype=torch.bool)
    if k is not None:
        kept &= place < _limits(k, vocab_size).unsqueeze(1)
    if p is not None:
        weights = torch.exp(ordered - ordered[:, :1]).to(torch.float64) * kept
        before = weights.cumsum(dim=-1) - weights
        kept &= before < p.to(torch.float64).unsqueeze(1) * weights.sum(dim=-1, keepdim=True)
        kept[:, 0] = True
    banned = torch.empty_like(kept).scatter_(1, order, ~kept)
    return logits.masked_fill_(banned, _NEG_INF)


def _limits(k: Tensor, vocab_size: int) -> Tensor:
    """Tokens that top-k leaves per row; values below 1 and beyond the vocabulary mean all."""
    return torch.where((k < 1) | (k > vocab_size), vocab_size, k).to(torch.int64)


class _Candidates:
    """The most likely tokens of each row in descending order, and how many of them survive.

    `count[r]` tokens of row r survive: those above `values[r, count − 1]`, plus the lowest ids among the equal ones.
    """

    def __init__(self, logits: Tensor, k: Tensor | None, p: Tensor | None) -> None:
        vocab_size = logits.shape[-1]
        limit = None if k is None else _limits(k, vocab_size)
        width = min(vocab_size, _FIRST_CANDIDATES if p is not None else 1)
        if limit is not None:
            limited = limit[limit < vocab_size]
            if limited.numel():
                width = max(width, int(limited.max()) + 1)
            if p is None and limited.numel() < limit.numel():
                width = vocab_size
        self._fetch(logits, limit, p, min(width, vocab_size))
        if self.values.shape[1] < vocab_size and bool((self.count >= self.values.shape[1]).any()):
            self._fetch(logits, limit, p, vocab_size)  # the nucleus of some row is wider

    def _fetch(self, logits: Tensor, limit: Tensor | None, p: Tensor | None, width: int) -> None:
        vocab_size = logits.shape[-1]
        if width == vocab_size:
            self.values, self.ids = logits.sort(dim=-1, descending=True, stable=True)
        else:
            self.values, self.ids = logits.topk(width, dim=-1)
        reach = torch.full((logits.shape[0],), vocab_size, device=logits.device) if limit is None else limit
        self.count = reach.clamp(max=width)
        if p is None:
            return
        top = self.values[:, :1]
        weights = torch.exp(self.values - top).to(torch.float64)
        inside = torch.arange(width, device=logits.device) < self.count.unsqueeze(1)
        running = (weights * inside).cumsum(dim=-1)
        total = running[:, -1]
        if width < vocab_size and limit is None:
            total = torch.exp(logits - top).sum(dim=-1, dtype=torch.float64)
        elif width < vocab_size:
            whole = torch.exp(logits - top).sum(dim=-1, dtype=torch.float64)
            total = torch.where(reach >= vocab_size, whole, total)
        before = running - weights * inside
        kept = inside & (before < p.to(torch.float64).unsqueeze(1) * total.unsqueeze(1))
        self.count = kept.sum(dim=-1).clamp(min=1)

    def threshold(self) -> Tensor:
        """The smallest surviving logit, `[rows, 1]`."""
        return self.values.gather(1, (self.count - 1).unsqueeze(1))

    def has_cut_ties(self) -> bool:
        """Whether some row drops a token whose logit equals that of a surviving one."""
        width = self.values.shape[1]
        following = self.values.gather(1, self.count.clamp(max=width - 1).unsqueeze(1))
        return bool(((following == self.threshold()).squeeze(1) & (self.count < width)).any())

    def mask(self, logits: Tensor) -> Tensor:
        """`logits` with everything that does not survive at −inf; in place."""
        threshold = self.threshold()
        banned = logits < threshold
        if self.has_cut_ties():
            equal = logits == threshold
            room = self.count.unsqueeze(1) - (self.values > threshold).sum(dim=-1, keepdim=True)
            banned |= equal & (equal.cumsum(dim=-1) > room)
        return logits.masked_fill_(banned, _NEG_INF)

    def in_id_order(self) -> tuple[Tensor, Tensor]:
        """Ids and logits of the surviving tokens, ascending by id, padded with −inf; wrong if ties were cut."""
        width = int(self.count.max())
        ids, values = self.ids[:, :width], self.values[:, :width]
        values = values.masked_fill(
            torch.arange(width, device=ids.device) >= self.count.unsqueeze(1), _NEG_INF
        )
        ids, order = ids.sort(dim=-1)
        return ids, values.gather(1, order)


def apply_top_k_top_p(logits: Tensor, k: Tensor | None, p: Tensor | None) -> Tensor:
    """`[rows, vocab]` logits with everything outside top-k and top-p at −inf; in place.

    `k` int `[rows]` (below 1 or beyond the vocabulary: off), `p` float `[rows]`, either may be None. Sorts only as
    many candidates as the rows need.
    """
    if k is None and p is None:
        return logits
    return _Candidates(logits, k, p).mask(logits)


def _pick(weights: Tensor, draws: Tensor) -> Tensor:
    """The first index at which the running sum of `weights[r]` exceeds `draws[r]` times their total."""
    running = weights.to(torch.float64).cumsum(dim=-1)
    target = draws.to(running.device).unsqueeze(1) * running[:, -1:]
    return torch.searchsorted(running, target, right=True).squeeze(1).clamp_(max=weights.shape[-1] - 1)


def random_sample(
    probs: Tensor, generators: dict[int, torch.Generator], use_fp64_gumbel: bool = False
) -> Tensor:
    """A token per row of `[rows, vocab]` weights (they need not sum to 1), int64 `[rows]`.

    Never picks a token of weight 0. Rows named in `generators` draw from their own generator. Sums are always in
    float64, so `use_fp64_gumbel` changes nothing.
    """
    return _pick(probs, generator_draws(probs.shape[0], generators, probs.device))


class TopKTopPSampler(nn.Module):
    """Restricts, then draws. `logprobs_mode` `processed_*` also returns what the restriction left."""

    def __init__(self, logprobs_mode: str = "raw_logprobs", use_fp64_gumbel: bool = False) -> None:
        super().__init__()
        self.logprobs_mode = logprobs_mode
        self.use_fp64_gumbel = use_fp64_gumbel

    def forward(
        self,
        logits: Tensor,
        generators: dict[int, torch.Generator],
        k: Tensor | None,
        p: Tensor | None,
        draws: Tensor | None = None,
    ) -> tuple[Tensor, Tensor | None]:
        """Tokens int64 `[rows]`, and the processed logits or log probabilities if the mode wants them."""
        if draws is None:
            draws = generator_draws(logits.shape[0], generators, logits.device)
        candidates = None if k is None and p is None else _Candidates(logits, k, p)
        wants_processed = self.logprobs_mode.startswith("processed")
        if candidates is not None and not wants_processed and not candidates.has_cut_ties():
            ids, values = candidates.in_id_order()
            chosen = _pick(torch.exp(values - candidates.values[:, :1]), draws)
            return ids.gather(1, chosen.unsqueeze(1)).squeeze(1), None
        if candidates is not None:
            logits = candidates.mask(logits)
        tokens = _pick(torch.exp(logits - logits.amax(dim=-1, keepdim=True)), draws)
        if not wants_processed:
            return tokens, None
        if self.logprobs_mode == "processed_logits":
            return tokens, logits
        return tokens, logits.log_softmax(dim=-1, dtype=torch.float32)
