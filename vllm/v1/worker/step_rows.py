"""Which request has which row of a step, and which rows sample. Layer: L6.

Owns: the order of rows (decodes first). Must not know: tensors, models, sampling.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from vllm.v1.worker.input_batch import Int64Array, RequestState, RequestStates


@dataclass(slots=True)
class StepRows:
    """Rows of one forward pass. `num_decodes` rows with one new token and a context come first.

    `samples[r]`: the row's last token is the last one known, so the next one is to be sampled.
    """

    req_ids: list[str]
    requests: list[RequestState]
    slots: Int64Array
    query_lens: Int64Array
    context: Int64Array
    samples: npt.NDArray[np.bool_]
    num_decodes: int

    @property
    def sampling_requests(self) -> list[RequestState]:
        """The requests of the rows that sample, in row order."""
        if self.samples.all():
            return self.requests
        return [request for request, samples in zip(self.requests, self.samples, strict=True) if samples]


def order_rows(states: RequestStates, num_scheduled_tokens: Mapping[str, int]) -> StepRows:
    """Decodes first, otherwise in the scheduler's order."""
    req_ids = list(num_scheduled_tokens)
    requests = [states.by_id[req_id] for req_id in req_ids]
    count = len(req_ids)
    slots = np.fromiter((request.slot for request in requests), dtype=np.int64, count=count)
    query_lens = np.fromiter(num_scheduled_tokens.values(), dtype=np.int64, count=count)
    context = states.num_computed[slots]
    is_decode = (query_lens == 1) & (context > 0)
    num_decodes = int(is_decode.sum())
    if num_decodes not in (0, count):
        order = np.argsort(~is_decode, kind="stable")
        slots, query_lens, context = slots[order], query_lens[order], context[order]
        req_ids = [req_ids[i] for i in order]
        requests = [requests[i] for i in order]
    samples = context + query_lens >= states.num_tokens[slots]
    return StepRows(req_ids, requests, slots, query_lens, context, samples, num_decodes)
