"""The public interface of logits processors and the record of what changed in the batch. Layer: L6.

Owns: `LogitsProcessor`, `BatchUpdate`. Must not know: a concrete processor, the sampler, the runner.
"""

from __future__ import annotations

import enum
from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass

import torch

from vllm.config import VllmConfig
from vllm.sampling_params import SamplingParams

RemovedRequest = int
AddedRequest = tuple[int, SamplingParams, list[int] | None, list[int]]


class MoveDirectionality(enum.Enum):
    """How two rows trade places."""

    UNIDIRECTIONAL = enum.auto()
    """The request of the first row goes to the second; the first is then unused."""
    SWAP = enum.auto()
    """The two rows exchange their requests."""


MovedRequest = tuple[int, int, MoveDirectionality]


@dataclass(frozen=True)
class BatchUpdate:
    """What changed since the last step, to be applied in the order removed, added, moved.

    `batch_size` rows remain. `added`: (row, parameters, prompt ids, output ids); the list of output ids is live and
    grows with every token, and a row that is still in use is replaced. `moved`: (from, to, directionality).
    """

    batch_size: int
    removed: Sequence[RemovedRequest]
    added: Sequence[AddedRequest]
    moved: Sequence[MovedRequest]


class LogitsProcessor(ABC):
    """Changes logits of a batch, one row per request that samples in this step.

    Each step calls `update_state` (with None if the batch is the same) and then `apply`. Requests are known only by
    their row, so a processor keeps per-row state and follows the updates.
    """

    @classmethod
    def validate_params(cls, sampling_params: SamplingParams) -> None:
        """Raise `ValueError` for parameters this processor cannot work with; called before a request is accepted."""
        return

    @abstractmethod
    def __init__(self, vllm_config: VllmConfig, device: torch.device, is_pin_memory: bool) -> None:
        """`device` is where logits will be."""
        raise NotImplementedError

    @abstractmethod
    def apply(self, logits: torch.Tensor) -> torch.Tensor:
        """`[rows, vocab]` → the same shape; may work in place."""
        raise NotImplementedError

    @abstractmethod
    def is_argmax_invariant(self) -> bool:
        """True if the most likely token stays the most likely one; such a processor is skipped for greedy rows."""
        raise NotImplementedError

    def is_idle(self) -> bool:
        """True only if `apply` would change nothing in this step; then it is not called."""
        return False

    @abstractmethod
    def update_state(self, batch_update: BatchUpdate | None) -> None:
        """Follow the batch; None: no row was added, removed or moved (output ids may still have grown)."""
        raise NotImplementedError
