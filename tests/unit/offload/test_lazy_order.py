"""Lazy copies leave the device's order of eviction as it is."""

from __future__ import annotations

import pytest

from tests.helpers.offload_rig import Rig, prompt

PROMPTS = 12


def left_on_device(*, lazy: bool, batched: int) -> list[int]:
    """Blocks of each prompt that are still there after all of them, the oldest prompt first."""
    changes = {"max_num_batched_tokens": batched}
    rig = Rig(device_blocks=41, host_blocks=200, lazy=lazy, config_changes=changes)
    for seed in range(PROMPTS):
        rig.generate(prompt(17, seed), max_tokens=2)
    assert rig.manager.store_side.ledger.done > 0
    pool = rig.scheduler.kv_cache_manager.block_pool
    return [
        sum(
            pool.get_cached_block(key, [0]) is not None
            for key in rig.make_request(prompt(17, seed)).block_hashes
        )
        for seed in range(PROMPTS)
    ]


@pytest.mark.parametrize("batched", [16, 20, 40])
def test_what_a_lazy_copy_gives_back_is_evicted_no_earlier_than_what_was_older(batched: int) -> None:
    """Else the coldest blocks, copied long ago, stay on the device for ever, and warmer ones go in their place."""
    eager = left_on_device(lazy=False, batched=batched)
    assert eager == sorted(eager)
    assert (eager[0], eager[-1]) == (0, 4)
    assert left_on_device(lazy=True, batched=batched) == eager
