"""What a request is promised from the tier: held until taken, shortened only where a prefix can end, else refused."""

from __future__ import annotations

import pytest

from tests.helpers.offload_parts import Byte
from tests.helpers.offload_rig import Rig, full, prompt, window
from vllm.config import SpeculativeConfig
from vllm.v1.core.block_hash import make_block_hash_with_group_id
from vllm.v1.kv_cache_interface import ChunkedLocalAttentionSpec


def warm(rig: Rig, length: int = 25) -> None:
    rig.generate(prompt(length), max_tokens=1)
    rig.evict_device()


def test_a_request_that_must_not_read_is_promised_nothing() -> None:
    rig = Rig()
    warm(rig)
    request = rig.make_request(prompt(25))
    request.skip_reading_prefix_cache = True
    assert rig.manager.promises.lookup(request, 0) == 0
    assert rig.manager.peek_matched_tokens(request, 0) == 0
    assert len(rig.manager.promises) == 0


def test_nothing_is_promised_behind_a_prefix_that_ends_inside_a_block() -> None:
    rig = Rig()
    warm(rig)
    request = rig.make_request(prompt(25))
    assert rig.manager.promises.lookup(request, 6) == 0
    assert rig.manager.promises.lookup(request, 24) == 0, "nothing is left to load"
    assert rig.manager.promises.lookup(request, 8) == 16


def test_nothing_is_promised_behind_a_prefix_that_ends_inside_a_chunk() -> None:
    chunked = ChunkedLocalAttentionSpec(
        block_size=4, num_kv_heads=1, head_size=4, dtype=Byte(), attention_chunk_size=8
    )
    rig = Rig([full(), chunked], device_blocks=64, host_blocks=64)
    warm(rig)
    request = rig.make_request(prompt(25))
    promises = rig.manager.promises
    assert [promises.lookup(request, local) for local in (0, 4, 8, 12, 16)] == [24, 0, 16, 0, 8]
    assert [promises.peek(request, local) for local in (0, 4, 8)] == [24, 0, 16]
    assert promises.searchable(request, 4) is None
    promises.withdraw_all()


def test_a_promise_is_held_until_it_is_withdrawn() -> None:
    rig = Rig()
    warm(rig)
    requests = [rig.make_request(prompt(25)) for _ in range(2)]
    for request in requests:
        assert rig.manager.promises.lookup(request, 0) == 24
    pool = rig.manager.cpu_block_pool
    assert len(pool.leases) == 2
    rig.manager.promises.withdraw(requests[0].request_id)
    assert len(pool.leases) == 1
    rig.manager.promises.withdraw_all()
    assert not pool.leases


@pytest.mark.parametrize(("specs", "taken", "delivered"), [("full", 16, True), ("window", 16, False)])
def test_less_than_promised_is_delivered_if_a_prefix_can_end_there(
    specs: str, taken: int, delivered: bool
) -> None:
    rig = Rig([full()] if specs == "full" else [full(), window()])
    warm(rig)
    request = rig.make_request(prompt(25))
    assert rig.manager.promises.lookup(request, 0) == 24
    accepted = rig.manager.promises.accept(request, taken)
    assert (accepted is not None) == delivered, "a window that ends earlier was not kept"
    if accepted is not None:
        plan, lease = accepted
        assert plan.positions == [(0, index) for index in range(taken // 4)]
        lease.release()
    assert not rig.manager.cpu_block_pool.leases


@pytest.mark.parametrize("taken", [4, 8, 14, 16])
def test_of_what_keeps_all_tokens_any_part_is_delivered_also_beside_a_drafter(taken: int) -> None:
    drafter = SpeculativeConfig(method="mtp", num_speculative_tokens=1)
    rig = Rig(config_changes={"speculative": drafter})
    warm(rig)
    request = rig.make_request(prompt(25))
    assert rig.manager.promises.lookup(request, 0) == 20, "the last block is the drafter's"
    accepted = rig.manager.promises.accept(request, taken)
    assert accepted is not None
    plan, lease = accepted
    assert plan.positions == [(0, index) for index in range(-(-taken // 4))]
    wanted = [
        rig.manager.tier.get(make_block_hash_with_group_id(h, 0))
        for h in request.block_hashes[: len(plan.positions)]
    ]
    assert plan.tier_blocks == wanted
    lease.release()
    assert not rig.manager.cpu_block_pool.leases


def test_more_than_promised_is_refused() -> None:
    rig = Rig()
    warm(rig)
    request = rig.make_request(prompt(25))
    rig.manager.promises.lookup(request, 16)
    assert rig.manager.promises.accept(request, 12) is None
    assert rig.manager.promises.accept(request, 8) is None, "the promise is over"
    assert not rig.manager.cpu_block_pool.leases


def test_a_reset_takes_promises_back() -> None:
    rig = Rig()
    warm(rig)
    request = rig.make_request(prompt(25))
    assert rig.manager.get_num_new_matched_tokens(request, 0) == (24, True)
    assert rig.scheduler.reset_prefix_cache(reset_connector=True), "nothing is held any more"
    assert len(rig.manager.promises) == 0
    assert rig.manager.get_num_new_matched_tokens(request, 0) == (0, False)
    rig.manager.request_finished_all_groups(request, ([],))
    rig.assert_at_rest()
