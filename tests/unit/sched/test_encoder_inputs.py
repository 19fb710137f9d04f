"""Requests whose model reads what an encoder makes of their inputs: cross attention has blocks for all of it."""

from __future__ import annotations

from dataclasses import dataclass

from tests.helpers.sched import BF16, BLOCK, full, make_request, make_scheduler
from vllm.v1.core.sched.scheduler import Scheduler
from vllm.v1.kv_cache_interface import CrossAttentionSpec, EncoderOnlyAttentionSpec
from vllm.v1.outputs import ModelRunnerOutput
from vllm.v1.request import Request

CROSS = CrossAttentionSpec(block_size=BLOCK, num_kv_heads=1, head_size=8, dtype=BF16)
ENCODER = EncoderOnlyAttentionSpec(block_size=BLOCK, num_kv_heads=1, head_size=8, dtype=BF16)


@dataclass(frozen=True)
class Clip:
    """An encoder's input before the prompt."""

    identifier: str
    length: int
    offset: int = 0

    @property
    def mm_position(self) -> Clip:
        return self

    def get_num_embeds(self) -> int:
        return self.length


def add(scheduler: Scheduler, request_id: str, *clips: Clip, prompt: int = 6) -> Request:
    request = make_request(scheduler, request_id, list(range(prompt)), max_tokens=20, mm_features=list(clips))
    scheduler.add_request(request)
    return request


def step(scheduler: Scheduler) -> None:
    output = scheduler.schedule()
    ids = list(output.num_scheduled_tokens)
    tokens = ModelRunnerOutput(
        req_ids=ids, req_id_to_index={r: i for i, r in enumerate(ids)}, sampled_token_ids=[[7]] * len(ids)
    )
    scheduler.update_from_output(output, tokens)


def cross_blocks(scheduler: Scheduler, request_id: str) -> list[int]:
    return scheduler.kv_cache_manager.get_block_ids(request_id)[1]


def test_cross_attention_has_blocks_for_the_whole_encoder_output_from_the_first_step_on() -> None:
    scheduler = make_scheduler([full(), CROSS, ENCODER], 32)
    add(scheduler, "a", Clip("x", 6), Clip("y", 4))
    add(scheduler, "b")
    step(scheduler)
    first = cross_blocks(scheduler, "a")
    assert len(first) == 3  # 10 rows in blocks of 4
    assert cross_blocks(scheduler, "b") == []
    for _ in range(8):
        step(scheduler)
    assert cross_blocks(scheduler, "a") == first
    assert all(not scheduler.kv_cache_manager.get_block_ids(r)[2] for r in ("a", "b"))


def test_a_prefix_is_shared_but_not_the_encoder_output() -> None:
    scheduler = make_scheduler([full(), CROSS], 32)
    add(scheduler, "a", Clip("x", 8))
    step(scheduler)
    same = add(scheduler, "b", Clip("x", 8))
    other = add(scheduler, "c", Clip("y", 8))
    step(scheduler)
    blocks = [cross_blocks(scheduler, r) for r in ("a", "b", "c")]
    assert len({block for ids in blocks for block in ids}) == 6
    assert same.num_cached_tokens == BLOCK
    assert other.num_cached_tokens == 0


def test_an_encoder_output_that_fits_nowhere_ends_its_request_and_no_other() -> None:
    scheduler = make_scheduler([full(), CROSS], 8)
    big = add(scheduler, "big", Clip("x", 40))
    add(scheduler, "small", Clip("y", 4))
    step(scheduler)
    assert big.is_finished()
    assert len(cross_blocks(scheduler, "small")) == 1


def test_a_preempted_request_gets_blocks_for_the_encoder_again() -> None:
    scheduler = make_scheduler([full(), CROSS], 32)
    request = add(scheduler, "a", Clip("x", 10))
    step(scheduler)
    scheduler.reset_prefix_cache(reset_running_requests=True)
    assert request.num_preemptions == 1
    assert scheduler.kv_cache_manager.block_pool.get_num_free_blocks() == 31
    step(scheduler)
    assert len(cross_blocks(scheduler, "a")) == 3
