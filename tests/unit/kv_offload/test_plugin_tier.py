"""The names that a manager's content has in the offload: which slot stands for what, and for how long."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from tests.helpers.offload_rig import Rig, full, window
from tests.helpers.scripted_offload import new_script
from tests.helpers.scripted_rig import half, make
from vllm.distributed.kv_transfer.kv_connector.v1.offloading.plugin_tier import MirrorPool
from vllm.kv_retention import RetentionHint, RetentionLevel
from vllm.v1.core.block_hash import BlockHash
from vllm.v1.core.kv_retention import retention_of
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
