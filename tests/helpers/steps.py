"""Hand-made scheduler outputs."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from vllm.sampling_params import SamplingParams
from vllm.v1.core.sched.output import CachedRequestData, NewRequestData, SchedulerOutput


def new_request(
    req_id: str,
    prompt: list[int] | None,
    block_ids: Sequence[list[int]],
    params: SamplingParams | None = None,
    num_computed: int = 0,
    prefill: list[int] | None = None,
    replay_start: int = 0,
) -> NewRequestData:
    """A request as the workers see it first (or again, with `prefill` = all of its tokens)."""
    return NewRequestData(
        req_id=req_id,
        prompt_token_ids=prompt,
        mm_features=[],
        sampling_params=params or SamplingParams(temperature=0.0),
        pooling_params=None,
        block_ids=tuple(block_ids),
        num_computed_tokens=num_computed,
        lora_request=None,
        prefill_token_ids=prefill,
        replay_start=replay_start,
    )


def cached_requests(rows: Sequence[tuple[str, Sequence[list[int]] | None, int, int]]) -> CachedRequestData:
    """(id, new blocks or None, computed tokens, output tokens) per known request."""
    return CachedRequestData(
        req_ids=[row[0] for row in rows],
        resumed_req_ids=set(),
        new_token_ids=[],
        all_token_ids={},
        new_block_ids=[None if row[1] is None else tuple(row[1]) for row in rows],
        num_computed_tokens=[row[2] for row in rows],
        num_output_tokens=[row[3] for row in rows],
    )


def step_output(
    scheduled: dict[str, int],
    new: Sequence[NewRequestData] = (),
    cached: CachedRequestData | None = None,
    **changes: Any,
) -> SchedulerOutput:
    """One step; `changes` replace further fields."""
    output = SchedulerOutput(
        scheduled_new_reqs=list(new),
        scheduled_cached_reqs=cached or CachedRequestData.make_empty(),
        num_scheduled_tokens=scheduled,
        total_num_scheduled_tokens=sum(scheduled.values()),
        scheduled_spec_decode_tokens={},
        scheduled_encoder_inputs={},
        finished_req_ids=set(),
        free_encoder_mm_hashes=[],
    )
    for name, value in changes.items():
        setattr(output, name, value)
    return output
