"""The built-in processors: min-p, logit bias, minimum number of tokens. Layer: L6.

Each keeps its rows' state and does nothing, at no cost, while no request uses it. Token ids outside the vocabulary are
ignored here: they are refused in the front end, and must not hurt the other requests if they get this far.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import TypeVar

import numpy as np
import torch
from torch import Tensor

from vllm.config import VllmConfig
from vllm.sampling_params import SamplingParams
from vllm.v1.sample.logits_processor.interface import BatchUpdate, LogitsProcessor, MoveDirectionality

T = TypeVar("T")


def process_dict_updates(
    req_entries: dict[int, T],
    batch_update: BatchUpdate | None,
    new_state: Callable[[SamplingParams, list[int] | None, list[int]], T | None],
) -> bool:
    """Carry a dict row → state through a batch update; True if the dict may have changed.

    `new_state(params, prompt ids, output ids)` makes the state of an added request; None: it needs none.
    """
    if batch_update is None:
        return False
    changed = False
    for row in batch_update.removed:
        changed |= req_entries.pop(row, None) is not None
    for row, params, prompt_ids, output_ids in batch_update.added:
        state = new_state(params, prompt_ids, output_ids)
        if state is None:
            changed |= req_entries.pop(row, None) is not None
        else:
            req_entries[row] = state
            changed = True
    for source, target, direction in batch_update.moved:
        changed |= _move_entry(req_entries, source, target, direction)
    return changed


def _move_entry(req_entries: dict[int, T], source: int, target: int, direction: MoveDirectionality) -> bool:
    moving, displaced = req_entries.pop(source, None), req_entries.pop(target, None)
    if moving is None and displaced is None:
        return False
    if moving is not None:
        req_entries[target] = moving
    if displaced is not None and direction is MoveDirectionality.SWAP:
        req_entries[source] = displaced
    return True


class _FlatIndex:
    """(row, token) pairs as two index tensors, cut to the vocabulary when first used."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self.rows = self.tokens = torch.empty(0, dtype=torch.int64, device=device)
        self.values = torch.empty(0, dtype=torch.float32, device=device)
        self._vocab_size: int | None = None

    def rebuild(
        self, rows: Sequence[int], tokens: Sequence[int], values: Sequence[float] | None = None
    ) -> None:
        self.rows = torch.tensor(rows, dtype=torch.int64, device=self._device)
        self.tokens = torch.tensor(tokens, dtype=torch.int64, device=self._device)
        if values is not None:
            self.values = torch.tensor(values, dtype=torch.float32, device=self._device)
        self._vocab_size = None

    def cut(self, vocab_size: int) -> None:
        """Drop tokens outside the vocabulary, once per rebuild."""
        if self._vocab_size == vocab_size:
            return
        keep = (self.tokens >= 0) & (self.tokens < vocab_size)
        if not bool(keep.all()):
            if self.values.shape[0] == self.tokens.shape[0]:
                self.values = self.values[keep]
            self.rows, self.tokens = self.rows[keep], self.tokens[keep]
        self._vocab_size = vocab_size


class MinPLogitsProcessor(LogitsProcessor):
    """Bans tokens less likely than `min_p` times the most likely one (after temperature)."""

    def __init__(self, vllm_config: VllmConfig, device: torch.device, is_pin_memory: bool) -> None:
        self._device = device
        self._min_p = np.zeros(vllm_config.scheduler_config.max_num_seqs, dtype=np.float32)
        self._log_min_p = torch.empty(0, 1, device=device)
        self.min_p_count = 0

    def is_argmax_invariant(self) -> bool:
        return True

    def get_min_p_by_index(self, index: int) -> float:
        """The value in force for a row; 0 = off."""
        return float(self._min_p[index])

    def update_state(self, batch_update: BatchUpdate | None) -> None:
        if batch_update is None:
            return
        had_any = self.min_p_count > 0
        values = self._grown(batch_update)
        for row in batch_update.removed:
            values[row] = 0.0
        for row, params, _, _ in batch_update.added:
            values[row] = params.min_p
        for source, target, direction in batch_update.moved:
            moving, displaced = values[source], values[target]
            values[target] = moving
            values[source] = displaced if direction is MoveDirectionality.SWAP else 0.0
        self.min_p_count = int(np.count_nonzero(values))
        if had_any or self.min_p_count:
            with np.errstate(divide="ignore"):  # log(0) = -inf: nothing is banned in that row
                logs = np.log(values[: batch_update.batch_size])
            self._log_min_p = torch.from_numpy(logs).to(self._device).unsqueeze(1)

    def _grown(self, batch_update: BatchUpdate) -> np.ndarray:
        rows = [row for row, *_ in batch_update.added] + [
            row for pair in batch_update.moved for row in pair[:2]
        ]
        needed = max([batch_update.batch_size, *(row + 1 for row in rows)])
        if needed > len(self._min_p):
            self._min_p = np.concatenate([self._min_p, np.zeros(needed, dtype=np.float32)])
        return self._min_p

    def is_idle(self) -> bool:
        return not self.min_p_count

    def apply(self, logits: Tensor) -> Tensor:
        if not self.min_p_count:
            return logits
        threshold = logits.amax(dim=-1, keepdim=True) + self._log_min_p
        return logits.masked_fill_(logits < threshold, -float("inf"))


class LogitBiasLogitsProcessor(LogitsProcessor):
    """Adds `logit_bias[token]` to the logits of the request that asked for it."""

    def __init__(self, vllm_config: VllmConfig, device: torch.device, is_pin_memory: bool) -> None:
        self._biases: dict[int, dict[int, float]] = {}
        self._index = _FlatIndex(device)

    def is_argmax_invariant(self) -> bool:
        return False

    def update_state(self, batch_update: BatchUpdate | None) -> None:
        if not process_dict_updates(
            self._biases, batch_update, lambda params, _, __: params.logit_bias or None
        ):
            return
        triples = [
            (row, int(token), float(bias))
            for row, biases in sorted(self._biases.items())
            for token, bias in biases.items()
        ]
        rows, tokens, values = zip(*triples, strict=True) if triples else ((), (), ())
        self._index.rebuild(rows, tokens, values)

    def is_idle(self) -> bool:
        return not self._biases

    def apply(self, logits: Tensor) -> Tensor:
        if self._biases:
            self._index.cut(logits.shape[-1])
            logits[self._index.rows, self._index.tokens] += self._index.values
        return logits


_MinTokens = tuple[int, Sequence[int], Iterable[int]]


class MinTokensLogitsProcessor(LogitsProcessor):
    """Bans the stop tokens of a request until it has produced `min_tokens` tokens."""

    def __init__(self, vllm_config: VllmConfig, device: torch.device, is_pin_memory: bool) -> None:
        # row → (min_tokens, live output ids, stop tokens)
        self._waiting: dict[int, _MinTokens] = {}
        self._index = _FlatIndex(device)

    def is_argmax_invariant(self) -> bool:
        return False

    @staticmethod
    def _new_state(params: SamplingParams, _: list[int] | None, output_ids: list[int]) -> _MinTokens | None:
        if not params.min_tokens or len(output_ids) >= params.min_tokens or not params.all_stop_token_ids:
            return None
        return params.min_tokens, output_ids, params.all_stop_token_ids

    def update_state(self, batch_update: BatchUpdate | None) -> None:
        changed = process_dict_updates(self._waiting, batch_update, self._new_state)
        reached = [row for row, (least, outputs, _) in self._waiting.items() if len(outputs) >= least]
        for row in reached:
            del self._waiting[row]
        if changed or reached:
            pairs = [
                (row, token) for row, (_, _, stop) in sorted(self._waiting.items()) for token in sorted(stop)
            ]
            self._index.rebuild([row for row, _ in pairs], [token for _, token in pairs])

    def is_idle(self) -> bool:
        return not self._waiting

    def apply(self, logits: Tensor) -> Tensor:
        if self._waiting:
            self._index.cut(logits.shape[-1])
            rows, tokens = self._index.rows, self._index.tokens
            before = logits[rows, tokens]
            logits[rows, tokens] = -float("inf")
            # Where something else, such as a grammar at its end, leaves nothing but stop tokens, they stay.
            waiting = torch.unique(rows)
            empty = torch.zeros(logits.shape[0], dtype=torch.bool, device=logits.device)
            empty[waiting] = torch.isneginf(logits[waiting].amax(dim=-1))
            logits[rows, tokens] = torch.where(empty[rows], before, -float("inf"))
        return logits
