"""Top-k and top-p restriction, and drawing a token. Layer: L6.

Owns: which tokens survive and which of them a number in [0, 1) selects. Rules: top-k first, then top-p over what is
left; among equal logits the lower token id goes first, so exactly k tokens survive. A token is drawn by walking the
surviving tokens in id order until their weights exceed the draw. The outcome is a function of the row alone, also in
the way it is computed. Must not know: requests, temperature, where draws come from.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn

from vllm.v1.sample.ops.draws import generator_draws
from vllm.v1.sample.ops.row_max import block_size_of, row_topk

_NEG_INF = -float("inf")
# Candidates looked at before a row is sorted as a whole; a nucleus is nearly always smaller than the first.
_STAGES = (64, 512, 8192)


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


class _Rows:
    """Rows that are restricted, with their limits; a part of a batch."""

    def __init__(self, index: Tensor, logits: Tensor, k: Tensor | None, p: Tensor | None) -> None:
        vocab_size = logits.shape[-1]
        self.index = index
        self.logits = logits if len(index) == logits.shape[0] else logits[index]
        full = torch.full((len(index),), vocab_size, dtype=torch.int64, device=logits.device)
        self.limit = full if k is None else _limits(k, vocab_size)[index]
        self.p = None if p is None else p[index].to(torch.float64)

    def part(self, chosen: Tensor) -> _Rows:
        """The rows where `chosen` is True."""
        part = object.__new__(_Rows)
        part.index, part.logits, part.limit = self.index[chosen], self.logits[chosen], self.limit[chosen]
        part.p = None if self.p is None else self.p[chosen]
        return part


class _Candidates:
    """The most likely tokens of each row in descending order, and how many of them survive.

    `count[r]` tokens of row r survive: those above `values[r, count − 1]`, plus the lowest ids among the equal ones.
    `is_settled[r]`: false if more candidates may survive than were looked at.
    """

    def __init__(self, rows: _Rows, width: int) -> None:
        self.rows = rows
        logits, limit = rows.logits, rows.limit
        vocab_size = logits.shape[-1]
        if width >= vocab_size:
            width = vocab_size
            self.values, self.ids = logits.sort(dim=-1, descending=True, stable=True)
        else:
            self.values, self.ids = row_topk(logits, width)
        self.count = limit.clamp(max=width)
        if rows.p is not None:
            self.count = self._nucleus(rows.p)
        self.is_settled = (self.count < width) | (width == vocab_size)

    def part(self, chosen: Tensor) -> _Candidates:
        """The rows where `chosen` is True."""
        part = object.__new__(_Candidates)
        part.rows = self.rows.part(chosen)
        part.values, part.ids, part.count = self.values[chosen], self.ids[chosen], self.count[chosen]
        part.is_settled = self.is_settled[chosen]
        return part

    def _nucleus(self, p: Tensor) -> Tensor:
        """Tokens that top-p leaves of the first `count`."""
        limit, values = self.rows.limit, self.values
        width, vocab_size = values.shape[1], self.rows.logits.shape[-1]
        weights = torch.exp(values - values[:, :1]).to(torch.float64)
        inside = torch.arange(width, device=values.device) < self.count.unsqueeze(1)
        weights = weights * inside
        running = weights.cumsum(dim=-1)
        total = running[:, -1]
        if width < vocab_size and bool((limit > width).any()):
            # Without top-k the mass of the whole row counts, not that of the candidates.
            whole = torch.exp(self.rows.logits - values[:, :1]).sum(dim=-1, dtype=torch.float64)
            total = torch.where(limit > width, whole, total)
        kept = inside & (running - weights < (p * total).unsqueeze(1))
        # p = 1 keeps everything, whatever rounding says about the last tokens.
        return torch.where(p >= 1.0, self.count, kept.sum(dim=-1).clamp(min=1))

    def threshold(self) -> Tensor:
        """The smallest surviving logit, `[rows, 1]`."""
        return self.values.gather(1, (self.count - 1).unsqueeze(1))

    def cuts_ties(self) -> Tensor:
        """bool `[rows]`: the row drops a token whose logit equals that of a surviving one."""
        width = self.values.shape[1]
        following = self.values.gather(1, self.count.clamp(max=width - 1).unsqueeze(1))
        return (following == self.threshold()).squeeze(1) & (self.count < width)

    def masked(self) -> Tensor:
        """The rows' logits with everything that does not survive at −inf."""
        logits, threshold = self.rows.logits, self.threshold()
        banned = logits < threshold
        if bool(self.cuts_ties().any()):
            equal = logits == threshold
            room = self.count.unsqueeze(1) - (self.values > threshold).sum(dim=-1, keepdim=True)
            banned |= equal & (equal.cumsum(dim=-1) > room)
        return logits.masked_fill(banned, _NEG_INF)

    def draw(self, draws: Tensor) -> Tensor:
        """A surviving token per row, int64 `[rows]`."""
        ties = self.cuts_ties()
        tokens = self._draw_in_id_order(draws)
        if bool(ties.any()):  # which of the equal candidates survive depends on ids outside of the candidates
            tokens[ties] = _pick(_weights(self.masked()[ties]), draws[ties])
        return tokens

    def _draw_in_id_order(self, draws: Tensor) -> Tensor:
        width = int(self.count.max())
        ids, values = self.ids[:, :width], self.values[:, :width]
        outside = torch.arange(width, device=ids.device) >= self.count.unsqueeze(1)
        ids, order = ids.sort(dim=-1)
        values = values.masked_fill(outside, _NEG_INF).gather(1, order)
        running = torch.exp(values - self.values[:, :1]).to(torch.float64).cumsum(dim=-1)
        chosen = torch.searchsorted(running, draws.unsqueeze(1) * running[:, -1:], right=True)
        return ids.gather(1, chosen.clamp_(max=width - 1)).squeeze(1)


def _settled_candidates(rows: _Rows) -> list[_Candidates]:
    """Candidates of all rows, in parts: a row is looked at more broadly only if it has to be."""
    vocab_size = rows.logits.shape[-1]
    limited = rows.limit[rows.limit < vocab_size]
    narrowest = int(limited.max()) + 1 if limited.numel() else 0
    # One more than top-k leaves, to see whether a tie is cut.
    stages = [narrowest] if limited.numel() == rows.limit.numel() else [max(narrowest, s) for s in _STAGES]
    done: list[_Candidates] = []
    for width in [*stages, vocab_size]:
        candidates = _Candidates(rows, width)
        if bool(candidates.is_settled.all()):
            return [*done, candidates]
        settled = candidates.is_settled
        if bool(settled.any()):
            done.append(candidates.part(settled))
        rows = rows.part(~settled)
    return done


def _is_free(k: Tensor | None, p: Tensor | None, vocab_size: int) -> Tensor:
    """bool `[rows]`: neither top-k nor top-p restricts the row."""
    free = torch.ones_like(k if k is not None else p, dtype=torch.bool)
    if k is not None:
        free &= _limits(k, vocab_size) >= vocab_size
    if p is not None:
        free &= p >= 1.0
    return free


def apply_top_k_top_p(logits: Tensor, k: Tensor | None, p: Tensor | None) -> Tensor:
    """`[rows, vocab]` logits with everything outside top-k and top-p at −inf; in place.

    `k` int `[rows]` (below 1 or beyond the vocabulary: off), `p` float `[rows]`, either may be None. Sorts only as
    many candidates as the rows need.
    """
    if k is None and p is None:
        return logits
    restricted = (~_is_free(k, p, logits.shape[-1])).nonzero().flatten()
    if restricted.numel():
        for candidates in _settled_candidates(_Rows(restricted, logits, k, p)):
            logits[candidates.rows.index] = candidates.masked()
    return logits


def _weights(logits: Tensor) -> Tensor:
    return torch.exp(logits - logits.amax(dim=-1, keepdim=True))


def _pick(weights: Tensor, draws: Tensor) -> Tensor:
    """Per row the first token at which the running sum of weights exceeds `draws[r]` times their total, int64.

    Sums of blocks find the block, then its own running sum the token; a token of weight 0 is never picked.
    """
    rows, width = weights.shape
    size = block_size_of(width) or width
    blocks = weights.view(rows, width // size, size)
    running = blocks.sum(dim=-1).to(torch.float64).cumsum(dim=-1)
    target = draws.unsqueeze(1) * running[:, -1:]
    which = torch.searchsorted(running, target, right=True).clamp_(max=running.shape[1] - 1)
    before = torch.where(which > 0, running.gather(1, (which - 1).clamp(min=0)), 0.0)
    inside = (
        blocks[torch.arange(rows, device=weights.device), which.squeeze(1)].to(torch.float64).cumsum(dim=-1)
    )
    # Sums of a block and of its tokens may round differently; stay below the end of the block.
    end = torch.nextafter(inside[:, -1:], torch.zeros_like(inside[:, -1:]))
    found = torch.searchsorted(inside, torch.minimum(target - before, end), right=True).clamp_(max=size - 1)
    return (which * size + found).squeeze(1)


def random_sample(
    probs: Tensor, generators: dict[int, torch.Generator], use_fp64_gumbel: bool = False
) -> Tensor:
    """A token per row of `[rows, vocab]` weights (they need not sum to 1), int64 `[rows]`.

    Never picks a token of weight 0. Rows named in `generators` draw from their own generator. There is no noise per
    token, so `use_fp64_gumbel` changes nothing.
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
        draws = draws.to(logits.device)
        if not self.logprobs_mode.startswith("processed"):
            return _draw(logits, k, p, draws), None
        logits = apply_top_k_top_p(logits, k, p)
        tokens = _pick(_weights(logits), draws)
        if self.logprobs_mode == "processed_logits":
            return tokens, logits
        return tokens, logits.log_softmax(dim=-1, dtype=torch.float32)


def _draw(logits: Tensor, k: Tensor | None, p: Tensor | None, draws: Tensor) -> Tensor:
    """A token per row; free rows and restricted ones each go their own way, so that mates do not matter."""
    if k is None and p is None:
        return _pick(_weights(logits), draws)
    free = _is_free(k, p, logits.shape[-1])
    tokens = torch.empty(logits.shape[0], dtype=torch.int64, device=logits.device)
    if bool(free.any()):
        tokens[free] = _pick(_weights(logits[free]), draws[free])
    restricted = (~free).nonzero().flatten()
    if restricted.numel():
        for candidates in _settled_candidates(_Rows(restricted, logits, k, p)):
            index = candidates.rows.index
            tokens[index] = candidates.draw(draws[index])
    return tokens
