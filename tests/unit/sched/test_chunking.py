"""Sizes of prefill chunks: caps, boundaries of recurrent state, cadence."""

from __future__ import annotations

import dataclasses

import pytest

from tests.helpers.sched import kv_config, mamba, sched_config
from vllm.sampling_params import SamplingParams
from vllm.v1.core.sched.chunking import NO_CAP, ChunkLimits, PrefillCadence, fit_chunk, long_prefill_cap
from vllm.v1.core.sched.params import SchedulerParams, params_from_config
from vllm.v1.request import Request


def params(block: int | None = 16, **changes: object) -> SchedulerParams:
    base = params_from_config(sched_config(max_num_batched_tokens=512), kv_config([mamba()], 8), 4, 4)  # type: ignore[arg-type]
    cache = dataclasses.replace(base.cache, state_block_tokens=block)
    return dataclasses.replace(base, cache=cache, **changes)  # type: ignore[arg-type]


def prompt(length: int, outputs: int = 0) -> Request:
    request = Request("r", list(range(length)), SamplingParams(max_tokens=99), None, arrival_time=0.0)
    request.append_output_token_ids(list(range(outputs)))
    return request


def chunks(request: Request, budget: int, settings: SchedulerParams, fine: bool = False) -> list[int]:
    """End positions of all chunks of a prompt."""
    ends, start = [], 0
    limits = ChunkLimits(budget, fine)
    while start < request.num_tokens:
        size = fit_chunk(request, start, min(budget, request.num_tokens - start), settings, limits)
        if size == 0:
            break
        start += size
        ends.append(start)
    return ends


def test_state_boundaries_of_the_worked_example() -> None:
    # b = 16, prompt 50, budget 40: 32 (cut from 40), 48 (last cacheable boundary), 50.
    assert chunks(prompt(50), 40, params()) == [32, 48, 50]


def test_with_a_dropped_draft_block_the_last_stop_is_one_block_earlier() -> None:
    assert chunks(prompt(50), 64, params(drops_eagle_block=True)) == [32, 50]


def test_a_shared_prefix_junction_is_a_stop() -> None:
    request = prompt(50)
    request.shared_prefix_boundary = 16
    assert chunks(request, 64, params()) == [16, 48, 50]


def test_a_chunk_that_starts_inside_a_block_stops_at_the_next_boundary() -> None:
    limits = ChunkLimits(64, True)
    assert fit_chunk(prompt(50), 20, 30, params(), limits) == 12


def test_fine_grained_hits_stop_at_the_prompt_tail() -> None:
    # Hash unit 4: the tail boundary of 50 tokens is 48, that of 46 tokens is 44.
    assert chunks(prompt(46), 64, params(), fine=True) == [32, 44, 46]


def test_too_little_budget_for_a_block_waits_for_another_step() -> None:
    assert fit_chunk(prompt(50), 0, 10, params(), ChunkLimits(64, False)) == 0


def test_a_block_wider_than_any_chunk_is_no_reason_to_wait() -> None:
    assert fit_chunk(prompt(50), 0, 10, params(), ChunkLimits(10, False)) == 10


def test_decodes_are_not_cut() -> None:
    assert fit_chunk(prompt(50, outputs=3), 52, 1, params(), ChunkLimits(64, False)) == 1


def test_a_resumed_request_prefills_its_outputs_too() -> None:
    assert chunks(prompt(20, outputs=30), 64, params()) == [48, 50]


def test_a_drafter_gets_its_lookahead_or_the_whole_prompt() -> None:
    settings = params(block=None, num_prefill_lookahead_tokens=4)
    limits = ChunkLimits(64, False)
    assert fit_chunk(prompt(50), 0, 48, settings, limits) == 46
    assert fit_chunk(prompt(50), 0, 50, settings, limits) == 50
    assert fit_chunk(prompt(50), 0, 40, settings, limits) == 40


@pytest.mark.parametrize(
    ("threshold", "adaptive", "eligible", "cap"),
    [
        (0, False, 5, NO_CAP),
        (32, False, 1, NO_CAP),
        (32, False, 2, 32),
        (32, True, 4, 128),
        (32, True, 100, 32),
    ],
)
def test_long_prefill_cap(threshold: int, adaptive: bool, eligible: int, cap: int) -> None:
    settings = params(
        block=None,
        long_prefill_token_threshold=threshold,
        long_prefill_token_threshold_adaptive=adaptive,
    )
    assert long_prefill_cap(settings, eligible) == cap


def test_a_cap_below_the_state_block_would_stall_and_is_raised() -> None:
    assert long_prefill_cap(params(block=16, long_prefill_token_threshold=8), 3) == 16


def test_cadence_holds_prefills_for_n_executed_steps() -> None:
    cadence = PrefillCadence(3)
    assert not cadence.holds(decode_runs=True)
    cadence.note_step(10, carried_prefill=True, requests_left_waiting=False)
    held = []
    for _ in range(4):
        held.append(cadence.holds(decode_runs=True))
        cadence.note_step(1, carried_prefill=False, requests_left_waiting=False)
    assert held == [True, True, False, False]


def test_cadence_does_not_hold_without_decodes_or_after_a_release_that_left_requests_waiting() -> None:
    cadence = PrefillCadence(3)
    cadence.note_step(10, carried_prefill=True, requests_left_waiting=False)
    assert not cadence.holds(decode_runs=False)
    cadence.note_step(10, carried_prefill=True, requests_left_waiting=True)
    assert not cadence.holds(decode_runs=True)


def test_cadence_does_not_count_empty_steps() -> None:
    cadence = PrefillCadence(2)
    cadence.note_step(10, carried_prefill=True, requests_left_waiting=False)
    cadence.note_step(0, carried_prefill=False, requests_left_waiting=False)
    assert cadence.num_executed_steps == 1
    assert cadence.holds(decode_runs=True)
