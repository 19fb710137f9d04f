"""Attention chunks that do not begin with blocks: a request can need a block more than is reckoned."""

from __future__ import annotations

from itertools import product

import pytest

from tests.helpers.kv_core import chunked
from tests.helpers.sched import make_request, make_scheduler
from vllm.v1.outputs import ModelRunnerOutput
from vllm.v1.request import RequestStatus

PROMPT = 90
MAX_TOKENS = 30


def run(block: int, chunk: int, tokens_per_step: int, *, looks_ahead: bool) -> RequestStatus:
    """One request in a pool that is as large as the spec says that it must be."""
    spec = chunked(block, chunk)
    in_flight = tokens_per_step * (2 if looks_ahead else 1)
    scheduler = make_scheduler(
        [spec],
        spec.max_admission_blocks_per_request(in_flight, 512) + 1,
        max_num_batched_tokens=tokens_per_step,
        looks_ahead=looks_ahead,
        enable_prefix_caching=False,
    )
    request = make_request(scheduler, "a", list(range(PROMPT)), MAX_TOKENS)
    scheduler.add_request(request)
    in_flight_steps, computed = [], 0
    for _ in range(4 * (PROMPT + MAX_TOKENS)):
        if request.is_finished():
            break
        output = scheduler.schedule()
        assert not output.preempted_req_ids
        in_flight_steps.append(output)
        if len(in_flight_steps) < 1 + looks_ahead:
            continue
        output = in_flight_steps.pop(0)
        req_ids = list(output.num_scheduled_tokens)
        computed += output.total_num_scheduled_tokens
        sampled = [[7] if computed >= PROMPT else [] for _ in req_ids]
        rows = {req_id: row for row, req_id in enumerate(req_ids)}
        scheduler.update_from_output(
            output, ModelRunnerOutput(req_ids=req_ids, req_id_to_index=rows, sampled_token_ids=sampled)
        )
    assert (
        scheduler.kv_cache_manager.block_pool.get_num_free_blocks()
        == scheduler.kv_cache_config.num_blocks - 1
    )
    return request.status


@pytest.mark.parametrize("looks_ahead", [False, True])
@pytest.mark.parametrize("block", [2, 3, 4, 8])
def test_a_request_that_fits_as_reckoned_comes_to_its_end(block: int, looks_ahead: bool) -> None:
    for chunk, tokens_per_step in product(range(3, 20), (4, 5, 7, 11, 16)):
        if tokens_per_step < block - 1:
            continue  # then one token may need more than all of that
        status = run(block, chunk, tokens_per_step, looks_ahead=looks_ahead)
        assert status is RequestStatus.FINISHED_LENGTH_CAPPED, f"{chunk=} {tokens_per_step=}"
