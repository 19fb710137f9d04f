"""Lets a per-request function serve as a batch-level logits processor. Layer: L6.

Owns: `AdapterLogitsProcessor`. A function that raises costs only its own request: its row becomes NaN, which the
runner reports as a failed request.
"""

from __future__ import annotations

import inspect
from abc import abstractmethod
from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch import Tensor

from vllm.config import VllmConfig
from vllm.logger import init_logger
from vllm.sampling_params import SamplingParams
from vllm.v1.sample.logits_processor.builtin import process_dict_updates
from vllm.v1.sample.logits_processor.interface import BatchUpdate, LogitsProcessor

logger = init_logger(__name__)

# (output ids, logits row) or (prompt ids, output ids, logits row) → logits row
RequestLogitsProcessor = (
    Callable[[list[int], Tensor], Tensor] | Callable[[list[int] | None, list[int], Tensor], Tensor]
)


def _all_nan(row: Tensor) -> Tensor:
    return torch.full_like(row, float("nan"))


class AdapterLogitsProcessor(LogitsProcessor):
    """Base of processors that are written per request.

    A subclass says which function serves a request (`new_req_logits_processor`) and whether it can change the most
    likely token (`is_argmax_invariant`).
    """

    def __init__(self, vllm_config: VllmConfig, device: torch.device, is_pin_memory: bool) -> None:
        self.req_info: dict[int, Callable[[Tensor], Tensor]] = {}

    @abstractmethod
    def new_req_logits_processor(self, params: SamplingParams) -> RequestLogitsProcessor | None:
        """The function for a request with these parameters, or None if it needs none."""
        raise NotImplementedError

    def _new_state(
        self, params: SamplingParams, prompt_ids: list[int] | None, output_ids: list[int]
    ) -> Callable[[Tensor], Tensor] | None:
        function: Any  # either of two signatures
        try:
            function = self.new_req_logits_processor(params)
            if function is None:
                return None
            wants_prompt = len(inspect.signature(function).parameters) == 3
        except Exception:  # foreign code of one request must not end the step of the others
            logger.exception("A logits processor could not be made; its request will end with an error")
            return _all_nan
        return partial(function, prompt_ids, output_ids) if wants_prompt else partial(function, output_ids)

    def update_state(self, batch_update: BatchUpdate | None) -> None:
        process_dict_updates(self.req_info, batch_update, self._new_state)

    def is_idle(self) -> bool:
        return not self.req_info

    def apply(self, logits: Tensor) -> Tensor:
        for row, function in self.req_info.items():
            try:
                before = logits[row]
                after = function(before)
                if after is not before:
                    logits[row] = after
            except Exception:  # foreign code of one request must not end the step of the others
                logger.exception("A logits processor failed; its request will end with an error")
                logits[row] = float("nan")
        return logits
