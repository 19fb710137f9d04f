"""The names that a manager's content has in the offload: which slot stands for what, and for how long."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from tests.helpers import scripted_offload
from tests.helpers.offload_rig import Rig, full, window
from tests.helpers.scripted_offload import new_script
from tests.helpers.scripted_rig import TOKENS, half, make, stored
from vllm.distributed.kv_transfer.kv_connector.v1.offloading.plugin_tier import MirrorPool
from vllm.kv_retention import RetentionHint, RetentionLevel
from vllm.v1.core.block_hash import BlockHash
from vllm.v1.core.kv_retention import retention_of
from vllm.v1.core.sched.output import SchedulerOutput
from vllm.v1.kv_offload.base import LookupResult, ReqContext, make_offload_key

ASKS = ReqContext("asks")


def content(number: int) -> BlockHash:
    return BlockHash(number.to_bytes(32, "big"))


@pytest.fixture
def rig() -> Iterator[Rig]:
    new_script(answer=lambda key: LookupResult.HIT)
    rig = make([full(), window()])
    yield rig
    rig.close()


@pytest.fixture
def pool(rig: Rig) -> MirrorPool:
    return half(rig).plugin_tier.mirror


def test_one_question_gives_each_key_a_slot_of_its_own_though_all_others_are_protected(
    rig: Rig, pool: MirrorPool
) -> None:
    count = pool.get_num_free_blocks()
    with pool.asking(ASKS, 0.0):
        pool.find_run([content(number) for number in range(count)], [0])
    retention = retention_of(pool, 1.0, rig.clock)
    assert retention is not None
    everything = [(number + 1, make_offload_key(content(number), 0)) for number in range(count)]
    retention.hold(everything, RetentionHint(RetentionLevel.HIGH), None)

    with pool.asking(ASKS, 0.0):
        ((first,),) = pool.find_run([content(count)], [0])
        ((second,),) = pool.find_run([content(count)], [1])
        keys = [slot.block_hash for slot in (first, second)]
    assert keys == [make_offload_key(content(count), group) for group in (0, 1)]
    assert pool.get_num_free_blocks() == count


def test_the_manager_hears_of_each_key_once_in_a_question(pool: MirrorPool) -> None:
    script = scripted_offload.SCRIPT
    asked = [content(1), content(2)]
    with pool.asking(ASKS, 0.0):
        first = pool.find_run(asked, [0])
        assert script.calls["lookup"] == 2
        assert pool.find_run(asked, [0]) == first
        assert pool.get_cached_block(asked[0], [0]) == [first[0][0]]
        assert script.calls["lookup"] == 2
    with pool.asking(ASKS, 0.0):
        pool.find_run(asked, [0])
    assert script.calls["lookup"] == 4, "what was true in one question need not be in the next"


def test_without_a_question_nothing_is_held_nor_remembered(pool: MirrorPool) -> None:
    script, count = scripted_offload.SCRIPT, pool.get_num_free_blocks()
    (slot,) = pool.get_cached_block(content(1), [0]) or [pool.null_block]
    assert slot.ref_cnt == 0
    assert pool.get_num_free_blocks() == count
    script.answer = lambda key: LookupResult.MISS
    assert pool.get_cached_block(content(1), [0]) is None
    assert slot.block_hash is None, "a name for what is not there any more is given up"


def test_more_content_than_there_are_slots_is_found_as_far_as_they_reach(pool: MirrorPool) -> None:
    count = pool.get_num_free_blocks()
    everything = [content(number) for number in range(count)]
    held = pool.get_new_blocks(count - 5)
    with pool.asking(ASKS, 0.0):
        (found,) = pool.find_run(everything, [0])
        assert [slot.block_hash for slot in found] == [make_offload_key(h, 0) for h in everything[:5]]
        assert pool.get_cached_block(content(count), [0]) is None, "all slots stand for what was found"
        pairs = pool.find_run(everything, [0, 1])
        assert [len(part) for part in pairs] == [0, 0], "no half of a block of two groups"
    pool.free_blocks(held)
    assert pool.get_num_free_blocks() == count


def test_a_load_of_what_the_manager_has_let_go_since_it_was_promised_fails_alone() -> None:
    script = new_script()
    rig = make()
    stored(rig, script)
    manager, request = half(rig), rig.make_request(TOKENS, request_id="late")
    assert manager.get_num_new_matched_tokens(request, 0) == (20, True)
    manager.plugin_tier.let_go(script.manager.drop(sorted(script.manager.ready)[:1]))
    blocks = rig.scheduler.kv_cache_manager
    blocks.allocate_slots(request, 0, num_external_computed_tokens=20, delay_cache_blocks=True)
    manager.update_state_after_alloc(request, blocks.get_blocks("late"), 20)
    orders = manager.build_connector_meta(SchedulerOutput.make_empty())
    (job,) = orders.load_jobs.values()
    assert (job.req_id, job.src_spec) == ("late", None)
    assert not script.calls["prepare_load"]
    rig.close()
