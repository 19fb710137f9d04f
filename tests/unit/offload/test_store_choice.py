"""What is copied and what is not: admission by reuse, the bound on stores under way, preempted work first, ARC."""

from __future__ import annotations

from typing import Any

import pytest

from tests.helpers.offload_rig import Rig, full, mamba, mover_of, prompt, window
from vllm.config import KVTransferConfig
from vllm.distributed.kv_transfer.kv_connector.v1.multi_connector import MultiConnector
from vllm.v1.core.sched.output import SchedulerOutput
from vllm.v1.request import Request
from vllm.v1.simple_kv_offload.admission import ReuseFilter
from vllm.v1.simple_kv_offload.arc import ArcQueue
from vllm.v1.simple_kv_offload.metrics import MetricName
from vllm.v1.simple_kv_offload.store_policy import select_endangered


def stored_by(rig: Rig, output: SchedulerOutput) -> list[int]:
    """Device blocks that the step's store order names."""
    assert output.kv_connector_metadata is not None
    return list(output.kv_connector_metadata.store_gpu_blocks)  # type: ignore[attr-defined]


# -- admission by reuse ---------------------------------------------------------------------------


@pytest.mark.parametrize("specs", [[full()], [full(), window()], [full(8), mamba()]])
def test_a_block_is_stored_when_enough_requests_have_had_it(specs: list[Any]) -> None:
    rig = Rig(specs, device_blocks=40, extra={"store_threshold": 3})
    declined = rig.manager.store_side.declines
    for times in (1, 2):
        request = rig.generate(prompt(25), max_tokens=1)
        assert rig.in_tier(request) == []
        assert declined.reuse >= times * 24 // specs[0].block_size
        rig.assert_at_rest()
    request = rig.generate(prompt(25), max_tokens=1)
    assert rig.in_tier(request) == list(range(24 // specs[0].block_size))
    rig.evict_device()
    again = rig.generate(prompt(25), max_tokens=1)
    assert again.num_cached_tokens == 24
    assert rig.manager.store_side.stores.reuse.num_requests == 0
    rig.assert_at_rest()


@pytest.mark.parametrize("threshold", [0, 1])
def test_without_a_threshold_the_first_offer_is_enough(threshold: int) -> None:
    rig = Rig(extra={"store_threshold": threshold})
    assert rig.in_tier(rig.generate(prompt(17), max_tokens=1)) == [0, 1, 2, 3]
    assert rig.manager.store_side.declines.reuse == 0
    assert len(rig.manager.store_side.stores.reuse) == 0, "nothing is counted that nobody asks for"


def test_only_the_shared_part_is_stored() -> None:
    rig = Rig(extra={"store_threshold": 2})
    shared = prompt(8)
    first = rig.generate([*shared, *prompt(9, seed=1)], max_tokens=1)
    second = rig.generate([*shared, *prompt(9, seed=2)], max_tokens=1)
    assert rig.in_tier(first) == rig.in_tier(second) == [0, 1]
    rig.assert_at_rest()


def test_offers_count_once_per_request_whatever_happens_to_it() -> None:
    rig = Rig(device_blocks=16, extra={"store_threshold": 2})
    request = rig.add(prompt(13), max_tokens=6)
    rig.step()
    rig.step()
    rig.scheduler._preempt_request(request, 0.0)
    rig.run()
    rig.check_output(request)
    assert rig.in_tier(request) == [], "its own recomputation is no reuse"
    rig.assert_at_rest()


def test_lazy_mode_copies_what_was_had_often_enough() -> None:
    rig = Rig(device_blocks=12, host_blocks=64, lazy=True, extra={"store_threshold": 2})
    popular = prompt(9)
    once = rig.generate(prompt(9, seed=1), max_tokens=1)
    for _ in range(2):
        again = rig.generate(popular, max_tokens=1)
    for seed in range(2, 9):
        rig.generate(prompt(17, seed), max_tokens=1)
    assert rig.in_tier(again) == [0, 1]
    assert rig.in_tier(once) == []
    assert rig.manager.store_side.declines.reuse > 0
    rig.run()


def test_what_a_lazy_scan_passes_over_stays_in_front_of_younger_copies() -> None:
    """The order of eviction is what it was when all copies have ended, whatever stood between the copied blocks."""
    rig = Rig(device_blocks=101, host_blocks=200, lazy=True)
    for seed in range(30):
        rig.generate(prompt(17, seed), max_tokens=2)
    rig.connector.reset_cache()
    side = rig.manager.store_side
    queue = side.stores.device.free_block_queue
    before = queue.get_all_free_blocks()
    cached = [block for block in before[:32] if block.block_hash is not None]
    passed = cached[1::3]
    for limit in (7, 32):
        side.stores.unsettled.keys.update(block.block_hash for block in passed if block.block_hash)
        found = side.find_endangered(32)
        chosen = select_endangered(side.stores, found, limit)
        assert chosen.candidates.blocks == [block for block in cached if block not in passed][:limit]
        side.plan(chosen.candidates, None, to_front=True)
        submitted = side.submit()
        assert submitted is not None
        assert queue.get_all_free_blocks() == [b for b in before if b not in chosen.candidates.blocks]
        side.report({submitted[0]: 1}, ok=limit == 32)
        assert queue.get_all_free_blocks() == before


def request_with(rig: Rig, tokens: list[int]) -> Request:
    return rig.make_request(tokens)


def test_the_tracker_is_bounded_and_never_admits_a_block_without_those_before_it() -> None:
    rig = Rig()
    reuse = ReuseFilter(threshold=2, max_size=6)
    long, other = request_with(rig, prompt(32)), request_with(rig, prompt(16, seed=1))
    reuse.offer(long, 4)
    reuse.offer(long, 8)  # two steps: the first half is older now and goes first
    assert len(reuse) == 6
    again = request_with(rig, prompt(32))
    reuse.offer(again, 8)
    assert not reuse.admits(again.block_hashes[0]), "forgotten, so this was its first offer"
    assert reuse.admits(again.block_hashes[5])
    assert reuse.num_admitted(again) == 0, "and what lies behind it waits for it"
    reuse.offer(other, 4)
    assert len(reuse) == 6
    # A chain that is offered at once loses its end first.
    fresh = ReuseFilter(threshold=2, max_size=6)
    fresh.offer(long, 8)
    fresh.offer(again, 6)
    assert fresh.num_admitted(again) == 6


# -- two lazy connectors --------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("device_blocks", "slots", "ends"),
    [
        (8, (4, 4), [(0,), (1,)]),
        (8, (5, 5), [(1,), (0,)]),
        (10, (4, 6), [(0,), (1,), (1,), (0,)]),
        (10, (5, 5), [(), (), (0, 1)]),
    ],
)
def test_two_lazy_connectors_come_to_rest(
    device_blocks: int, slots: tuple[int, int], ends: list[tuple[int, ...]]
) -> None:
    """Each copies blocks that the other then does not see; their slots are not free for the taking all the same.

    ``ends``: whose copies end in a step, over and over. Neither has a slot for each block in danger.
    """
    child = {"kv_connector": "SimpleCPUOffloadConnector", "kv_role": "kv_both"}
    children = [
        {**child, "kv_connector_extra_config": {"num_cpu_blocks": count, "lazy_offload": True}}
        for count in slots
    ]
    config = KVTransferConfig(
        kv_connector="MultiConnector", kv_role="kv_both", kv_connector_extra_config={"connectors": children}
    )
    rig = Rig(device_blocks=device_blocks, connector_config=config)
    worker = rig.workers[0].kv_connector
    assert isinstance(worker, MultiConnector)
    movers = [mover_of(connector) for connector in worker.sub_connectors]
    request = rig.add(prompt(4 * (device_blocks - 2) - 3), max_tokens=2)
    for step in range(60):
        if rig.scheduler.has_requests():
            rig.step(copies=False)
            for index in ends[step % len(ends)]:
                movers[index].release()
    assert not rig.scheduler.has_requests(), "an idle engine goes on copying"
    rig.check_output(request)
    for mover in movers:
        assert mover.launched


# -- stores under way -----------------------------------------------------------------------------


def test_stores_under_way_are_bounded_and_go_on_when_some_have_ended() -> None:
    page = full().page_size_bytes
    rig = Rig(device_blocks=40, extra={"max_pending_store_bytes": 3 * page})
    request = rig.add(prompt(33), max_tokens=12)
    side = rig.manager.store_side
    rig.step(copies=False)
    for _ in range(3):
        rig.step(copies=False)
        assert side.num_pending_blocks == 3, "a step never waits for them"
    assert side.declines.cut_plans == 3
    while request.request_id in rig.scheduler.requests:
        rig.step()
        assert side.num_pending_blocks <= 3
    rig.run()
    rig.check_output(request)
    assert rig.in_tier(request) == list(range(11)), "nothing is lost while the request lives"
    rig.assert_at_rest()


@pytest.mark.parametrize("specs", [[full(8), mamba(8)], [full(16), mamba(8)]])
def test_a_prompts_end_inside_a_block_is_stored_when_its_request_ends(specs: list[Any]) -> None:
    rig = Rig(specs, device_blocks=60, host_blocks=60, config_changes={"match_unit": 4})
    rig.generate(prompt(14), max_tokens=1)
    rig.evict_device()
    assert rig.generate([*prompt(14), 7, 7, 7], max_tokens=1).num_cached_tokens == 12
    rig.assert_at_rest()


def test_what_finds_the_queue_full_at_the_end_is_counted() -> None:
    page = full().page_size_bytes
    rig = Rig(device_blocks=40, extra={"max_pending_store_bytes": 2 * page})
    request = rig.generate(prompt(33), max_tokens=1)
    assert rig.in_tier(request) == [0, 1]
    assert rig.manager.store_side.declines.queue == 6
    assert rig.manager.store_side.declines.full == 0
    rig.assert_at_rest()


def test_what_finds_no_slot_at_the_end_is_counted_and_so_is_what_gave_its_slot() -> None:
    rig = Rig(device_blocks=40, host_blocks=4)  # 3 usable
    request = rig.generate(prompt(33), max_tokens=1)
    assert rig.in_tier(request) == [0, 1, 2]
    rig.generate(prompt(9, seed=1), max_tokens=1)
    stats = rig.manager.get_stats()
    assert stats is not None
    told = stats.data["data"]
    declined = told[MetricName.DECLINED_STORE_BLOCKS]
    assert (declined["full",], declined["queue",]) == (5, 0)
    assert told[MetricName.EVICTED_BLOCKS][()] == rig.manager.tier.evictions == 2
    rig.assert_at_rest()


def test_a_load_does_not_wait_behind_stores() -> None:
    rig = Rig(device_blocks=64, host_blocks=64)
    rig.generate(prompt(17), max_tokens=1)
    rig.evict_device()
    rig.add(prompt(33, seed=1), max_tokens=30)
    rig.step(copies=False)
    rig.step(copies=False)
    assert [job.is_store for job in rig.mover().jobs] == [True]
    warm = rig.add(prompt(17), max_tokens=1)
    for _ in range(4):
        rig.step(copies=False)
        rig.mover().release(stores=False)
    assert rig.ends[warm.request_id].finish_reason is not None
    assert warm.num_cached_tokens == 16
    assert [job.is_store for job in rig.mover().jobs[:1]] == [True], "its stores are still to do"
    rig.run()
    rig.assert_at_rest()


# -- preempted work -------------------------------------------------------------------------------


@pytest.mark.parametrize("lazy", [False, True])
def test_preempted_work_is_stored_before_anything_else(lazy: bool) -> None:
    rig = Rig(device_blocks=64, host_blocks=64, lazy=lazy, config_changes={"max_num_batched_tokens": 32})
    second = rig.add(prompt(17, seed=1), max_tokens=6)
    first = rig.add(prompt(13), max_tokens=6)
    rig.step()
    table = rig.scheduler.kv_cache_manager.get_block_ids(first.request_id)[0][:3]
    rig.scheduler._preempt_request(first, 0.0)
    rig.scheduler.waiting.remove_request(first)  # hold it back for a step
    output = rig.step()
    rig.scheduler.waiting.prepend_request(first)
    assert stored_by(rig, output)[:3] == table
    assert len(stored_by(rig, output)) == (3 if lazy else 7)
    rig.run()
    for request in (first, second):
        rig.check_output(request)
    assert rig.in_tier(first)[:3] == [0, 1, 2]
    rig.assert_at_rest()


def test_what_was_not_computed_before_a_preemption_is_not_stored() -> None:
    rig = Rig(device_blocks=64)
    request = rig.add(prompt(13), max_tokens=6)
    output = rig.scheduler.schedule()  # its blocks have hashes now, and no bytes
    rig.scheduler._preempt_request(request, 0.0)
    assert not rig.manager.store_side.planned
    rig.finish_step(output)
    rig.run()
    rig.check_output(request)
    rig.assert_at_rest()


# -- the order of eviction ------------------------------------------------------------------------


def test_arc_keeps_what_comes_back_while_others_pass_by() -> None:
    hits = {}
    for policy in ("lru", "arc"):
        rig = Rig(device_blocks=16, host_blocks=13, extra={"eviction_policy": policy})
        cached = []
        for _ in range(2):  # wanted once, and again
            rig.generate(prompt(17), max_tokens=1)
            rig.evict_device()
        for round_ in range(6):
            popular = rig.generate(prompt(17), max_tokens=1)
            cached.append(popular.num_cached_tokens)
            rig.evict_device()
            for seed in range(3):  # a scan of 12 blocks, as many as the tier has
                rig.generate(prompt(17, 100 + 3 * round_ + seed), max_tokens=1)
                rig.evict_device()
        hits[policy] = sum(cached)
        rig.assert_at_rest()
    # The first round hits in both: nothing has passed by so far.
    assert hits == {"lru": 16, "arc": 6 * 16}


def test_arc_never_evicts_what_was_promised() -> None:
    """OFF-01 under the other policy."""
    rig = Rig(host_blocks=5, extra={"eviction_policy": "arc"})
    rig.generate(prompt(13), max_tokens=1)
    rig.evict_device()
    waiting = rig.make_request(prompt(13))
    assert rig.manager.get_num_new_matched_tokens(waiting, 0) == (12, True)
    other = rig.generate(prompt(17, seed=1), max_tokens=1)
    assert rig.in_tier(other) == [0]
    assert rig.in_tier(waiting) == [0, 1, 2]
    rig.scheduler.add_request(waiting)
    rig.run()
    rig.check_output(waiting)
    assert waiting.num_cached_tokens == 12
    rig.assert_at_rest()


def test_a_reset_makes_arc_forget() -> None:
    rig = Rig(host_blocks=5, extra={"eviction_policy": "arc"})
    for seed in range(3):
        rig.generate(prompt(13, seed), max_tokens=1)
    queue = rig.manager.tier.queue
    assert isinstance(queue, ArcQueue)
    assert queue.sizes[0] == 4
    assert queue.sizes[2] == 0, "content wanted once fills its share: no ghosts"
    assert rig.manager.reset()
    assert queue.sizes == (0, 0, 0, 0)
    assert len(queue.get_all_free_blocks()) == 4
    rig.generate(prompt(13), max_tokens=1)
    rig.assert_at_rest()


@pytest.mark.parametrize(
    ("key", "value"),
    [
        ("eviction_policy", "fifo"),
        ("eviction_policy", 3),
        ("store_threshold", -1),
        ("store_threshold", True),
        ("max_tracker_size", 0),
        ("max_pending_store_bytes", "much"),
        ("decline_slow_tier", "cpu"),
    ],
)
def test_bad_settings_are_refused_by_name(key: str, value: object) -> None:
    with pytest.raises(ValueError, match=key):
        Rig(extra={key: value})


def test_request_records_stay_small() -> None:
    """R12: what is kept per request goes with it, also if it ends in an error."""
    rig = Rig(extra={"store_threshold": 2})
    request = rig.add(prompt(13), max_tokens=4)
    rig.step()
    rig.step(nan=[request.request_id])
    rig.run()
    assert rig.manager.store_side.stores.reuse.num_requests == 0
    rig.assert_at_rest()
