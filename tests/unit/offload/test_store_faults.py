"""Fault cases of stores below the device and of their keys; named after their ids."""

from __future__ import annotations

import os
import random
import subprocess
import sys
import threading
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from tests.helpers.kv_core import image, lora
from tests.helpers.offload_rig import BLOCK, Rig, full, mamba, mover_of, prompt, window
from vllm.config import KVTransferConfig
from vllm.distributed.kv_transfer.kv_connector.v1.multi_connector import MultiConnector
from vllm.v1.core.invariants import pool_problems
from vllm.v1.core.sched.output import SchedulerOutput

DISK = {"kv_offload_backend": "disk", "disk_capacity_bytes": 1 << 20, "use_page_cache": True}


def check_pools(rig: Rig) -> None:
    """Free and used blocks of each tier add up, and the queue is as long as its counter says."""
    for pool in (rig.scheduler.kv_cache_manager.block_pool, rig.manager.tier.pool):
        assert pool_problems(pool) == []


def test_off_18_a_siblings_load_never_gets_a_block_with_an_open_store() -> None:
    child = {"kv_connector": "SimpleCPUOffloadConnector", "kv_role": "kv_both"}
    children = [{**child, "kv_connector_extra_config": {"num_cpu_blocks": 32}} for _ in range(2)]
    config = KVTransferConfig(
        kv_connector="MultiConnector",
        kv_role="kv_both",
        kv_connector_extra_config={"connectors": children},
        kv_load_failure_policy="recompute",
    )
    rig = Rig(device_blocks=6, connector_config=config)  # 5 usable
    assert isinstance(rig.connector, MultiConnector)
    worker = rig.workers[0].kv_connector
    assert isinstance(worker, MultiConnector)
    first, second = (mover_of(connector) for connector in worker.sub_connectors)
    rig.generate(prompt(9, seed=1), max_tokens=1)
    rig.evict_device()
    rig.add(prompt(16, seed=2), max_tokens=1)
    rig.step(copies=False)
    rig.step(copies=False)
    first.release()  # the sibling is done, this one still reads four of the five blocks
    (store,) = second.jobs
    loaded = rig.add(prompt(9, seed=1), max_tokens=1)
    for _ in range(4):
        rig.step(copies=False)
        first.release()
    assert all(not set(store.src_blocks) & set(job.dst_blocks) for job in first.launched if not job.is_store)
    rig.run()
    rig.check_output(loaded)
    assert loaded.num_cached_tokens == 8, "served by the sibling"
    assert [job.is_store for job in second.launched].count(False) == 0
    rig.evict_device()
    rig.connector.sub_connectors[0].reset_cache()
    again = rig.generate(prompt(16, seed=2), max_tokens=1)  # reads, and so checks, what was stored
    assert again.num_cached_tokens == 12


def test_pfx_16_a_match_at_the_head_of_the_free_queue_is_claimed_before_anything_moves() -> None:
    rig = Rig(device_blocks=8, host_blocks=3)  # 2 usable slots
    rig.generate(prompt(9), max_tokens=1)
    rig.evict_device()
    matched = rig.add(prompt(9), max_tokens=2)
    rival = rig.add(prompt(9, seed=1), max_tokens=2)  # its stores would take the very slots
    assert rig.manager.tier.num_stageable == 2
    assert rig.manager.get_num_new_matched_tokens(matched, 0)[0] == 8
    assert rig.manager.tier.num_stageable == 0, "claimed with the answer"
    while rig.scheduler.has_requests():
        rig.step()
        check_pools(rig)
    assert matched.num_cached_tokens == 8
    rig.check_output(matched)
    rig.check_output(rival)
    rig.assert_at_rest()


def test_pfx_16_what_is_being_loaded_is_not_given_to_others_meanwhile() -> None:
    rig = Rig(device_blocks=12, host_blocks=3)  # 2 usable slots
    rig.generate(prompt(9), max_tokens=1)
    rig.evict_device()
    matched = rig.add(prompt(9), max_tokens=2)
    rival = rig.add(prompt(9, seed=1), max_tokens=2)
    for _ in range(5):
        rig.step(copies=False)
        assert rig.manager.tier.num_stageable == 0, "the load still reads both"
        rig.mover().release(loads=False)  # stores overtake the load
    rig.run()
    assert matched.num_cached_tokens == 8
    rig.check_output(matched)
    rig.check_output(rival)
    rig.assert_at_rest()


@pytest.mark.parametrize("lazy", [False, True])
@pytest.mark.parametrize("specs", [[full()], [full(), window()], [full(), mamba()]])
def test_pfx_16_and_17_every_hit_carries_its_own_content_and_the_counters_add_up(
    specs: list[Any], lazy: bool
) -> None:
    rig = Rig(specs=specs, device_blocks=16, host_blocks=9, lazy=lazy)
    rng = random.Random(f"{specs} {lazy}")
    hits = 0
    for turn in range(30):
        requests = [rig.add(prompt(rng.choice((9, 13, 21)), rng.randrange(4)), rng.randint(1, 3))]
        if rng.random() < 0.5:
            requests.append(rig.add(prompt(13, rng.randrange(4)), 2))
        while rig.scheduler.has_requests():
            rig.step(copies=rng.random() < 0.6)  # the model checks every byte it reads
            check_pools(rig)
        for request in requests:
            rig.check_output(request)
            hits += request.num_cached_tokens
        if turn % 7 == 6:
            rig.evict_device()
    assert hits > 0
    rig.assert_at_rest()


def test_pfx_14_a_reset_beside_a_transfer_says_so_and_leaves_nothing_to_hit() -> None:
    rig = Rig()
    first = rig.generate(prompt(17), max_tokens=1)
    busy = rig.add(prompt(9, seed=1), max_tokens=1)
    rig.step(copies=False)
    rig.step(copies=False)
    assert rig.scheduler.reset_prefix_cache(reset_connector=True) is False
    report = rig.scheduler.reset_prefix_cache_report
    assert report is not None
    assert report["connector_reset"] is False
    assert "the connector still has transfers under way" in report["reason"]
    assert rig.in_tier(first) == rig.in_tier(busy) == []
    assert rig.scheduler.kv_cache_manager.get_computed_blocks(rig.make_request(prompt(17)))[1] == 0
    rig.run()
    assert rig.in_tier(busy) == [], "what was under way comes to nothing"
    assert rig.scheduler.reset_prefix_cache(reset_connector=True) is True
    assert rig.generate(prompt(17), max_tokens=1).num_cached_tokens == 0
    rig.assert_at_rest()


def test_store_02_blocks_that_found_no_room_are_stored_by_a_later_request() -> None:
    rig = Rig(host_blocks=10)
    tier = rig.manager.tier
    taken = tier.stage(tier.num_stageable - 5)
    first = rig.generate(prompt(32), max_tokens=1)
    assert rig.in_tier(first) == [0, 1, 2, 3, 4], "three of eight found no room"
    rig.evict_device()
    tier.pool.free_blocks(taken)
    assert tier.find(first.block_hashes, 100)[1] == 5 * BLOCK
    again = rig.generate(prompt(32), max_tokens=1)
    assert again.num_cached_tokens == 5 * BLOCK
    assert rig.in_tier(first) == list(range(8))
    rig.assert_at_rest()


@pytest.mark.parametrize("leaves", ["aborted", "preempted"])
def test_what_a_request_found_of_one_that_left_is_stored_when_it_ends(leaves: str) -> None:
    rig = Rig(config_changes={"looks_ahead": True})
    other = rig.add(prompt(16), max_tokens=2)
    first = rig.scheduler.schedule()
    if leaves == "preempted":
        rig.scheduler._preempt_request(other, 0.0)
    finder = rig.add(prompt(17), max_tokens=1)
    second = rig.scheduler.schedule()
    assert second.scheduled_new_reqs[0].num_computed_tokens == 16
    if leaves == "aborted":
        rig.abort(
            other
        )  # its blocks count as unsettled while a step that may have computed them is in flight
    rig.finish_step(first)
    rig.finish_step(second)
    rig.run()
    assert rig.in_tier(finder) == [0, 1, 2, 3], "its own step has been processed, and so have those before it"
    rig.assert_at_rest()


def test_store_02_a_failed_store_is_tried_again_by_a_later_request() -> None:
    rig = Rig()
    rig.mover().fail_next = [RuntimeError("no space")]
    first = rig.generate(prompt(17), max_tokens=1)
    assert rig.in_tier(first) == []
    rig.generate(prompt(17), max_tokens=1)
    assert rig.in_tier(first) == [0, 1, 2, 3]
    rig.assert_at_rest()


def test_store_03_what_is_listed_but_cannot_be_read_is_a_counted_miss(tmp_path: Path) -> None:
    rig = Rig(held=False, extra={**DISK, "disk_path": f"{tmp_path}/kv"})
    first = rig.generate(prompt(17), max_tokens=1)
    assert rig.in_tier(first) == [0, 1, 2, 3]
    rig.evict_device()
    (file,) = tmp_path.iterdir()
    os.truncate(file, 0)
    again = rig.generate(prompt(17), max_tokens=1)  # recomputed: the output is that of a cold run
    assert again.num_cached_tokens == 0
    assert rig.manager.load_side.failures == 1
    rig.close()


def test_store_05_nothing_unreachable_stays_on_disk_after_a_restart(tmp_path: Path) -> None:
    for _ in range(2):
        rig = Rig(held=False, extra={**DISK, "disk_path": f"{tmp_path}/kv"})
        assert rig.generate(prompt(17), max_tokens=1).num_cached_tokens == 0
        assert len(list(tmp_path.iterdir())) == 1
        rig.close()
        assert list(tmp_path.iterdir()) == []


IDENTITIES: dict[str, tuple[dict[str, Any], dict[str, Any]]] = {
    "adapter": ({"lora_request": lora("A", 1, "/a")}, {"lora_request": lora("B", 2, "/b")}),
    "adapter or none": ({"lora_request": lora("A", 1, "/a")}, {}),
    "adapter or salt": ({"lora_request": lora("A", 1, "/a")}, {"cache_salt": "A"}),
    "image": ({"mm_features": [image("cat", 2, 4)]}, {"mm_features": [image("dog", 2, 4)]}),
    "salt": ({"cache_salt": "a"}, {"cache_salt": "b"}),
}


@pytest.mark.parametrize("case", IDENTITIES)
def test_store_06_other_identities_never_hit_below_the_device(case: str) -> None:
    one, other = IDENTITIES[case]
    rig = Rig(device_blocks=16)
    hits = []
    for identity in (one, other, one):
        hits.append(rig.generate(prompt(17), max_tokens=1, **identity).num_cached_tokens)
        rig.evict_device()
    assert hits == [0, 0, 16]


def test_store_07_processes_started_apart_derive_the_same_keys() -> None:
    script = (
        "from tests.helpers.kv_core import image, lora, request\n"
        "kinds = [{}, {'cache_salt': 's'}, {'lora_request': lora('n', 1, '/p')}, {'mm_features': [image('cat', 2, 4)]}]\n"
        "made = [request('r', range(33), **kind) for kind in kinds]\n"
        "print([h.hex() for r in made for h in r.block_hashes], hash('text'))\n"
    )
    environment = {name: value for name, value in os.environ.items() if name != "PYTHONHASHSEED"}
    # The answer is all of stdout, whatever is logged meanwhile.
    environment |= {"PYTHONPATH": os.pathsep.join(sys.path), "VLLM_LOGGING_STREAM": "stderr"}
    outputs = [
        subprocess.run(
            [sys.executable, "-c", script], env=environment, capture_output=True, check=True
        ).stdout
        for _ in range(2)
    ]
    keys, salts = zip(*(output.decode().rsplit(maxsplit=1) for output in outputs), strict=True)
    assert keys[0] == keys[1]
    assert len(set(keys[0].strip("[]").split(", "))) == 8, "two blocks of each kind"
    assert salts[0] != salts[1], "the interpreters were salted differently"


def test_store_09_a_source_has_one_hold_and_one_release() -> None:
    rig = Rig()
    stored = rig.generate(prompt(13), max_tokens=1)
    rig.evict_device()
    tier = rig.manager.tier
    slots = [tier.get(rig.key(stored, i)) for i in range(3)]

    def holds() -> list[int]:
        return [slot.ref_cnt for slot in slots if slot is not None]

    request = rig.add(prompt(14), max_tokens=1)
    for _ in range(3):
        rig.manager.get_num_new_matched_tokens(request, 0)
        assert holds() == [1, 1, 1], "asking again replaces the hold"
    rig.step(copies=False)
    rig.manager.promises.withdraw(request.request_id)  # released already
    assert holds() == [1, 1, 1], "the load holds its sources"
    free = tier.num_stageable
    assert free == tier.num_blocks - 1 - 3
    rig.run()
    assert holds() == [0, 0, 0]
    rig.manager.promises.withdraw(request.request_id)
    rig.manager.request_finished_all_groups(request, ([],))
    assert holds() == [0, 0, 0]
    with pytest.raises(AssertionError):
        tier.pool.free_blocks([slots[0]])  # type: ignore[list-item]
    rig.assert_at_rest()


class Queue:
    """The compute stream of a device that is behind: what it was given runs when somebody waits for it."""

    def __init__(self) -> None:
        self.work: list[Callable[[], None]] = []

    def run(self, count: int) -> None:
        due, self.work[:count] = self.work[:count], []
        for action in due:
            action()


class Mark:
    """Stands for a device event."""

    def __init__(self) -> None:
        self._queue: Queue | None = None
        self._count = 0

    def record(self, queue: Queue) -> None:
        self._queue, self._count = queue, len(queue.work)

    def synchronize(self) -> None:
        assert self._queue is not None
        self._queue.run(self._count)


def behind(rig: Rig, monkeypatch: pytest.MonkeyPatch) -> Queue:
    """Let the worker take its device for a GPU that is behind. A load runs as soon as its mark allows it."""
    queue = Queue()
    monkeypatch.setattr(torch.cuda, "Event", Mark)
    monkeypatch.setattr(torch.cuda, "current_stream", lambda device: queue)
    rig.worker().device = torch.device("cuda")
    mover = rig.mover()
    launch = mover.launch_copy

    def run_loads_at_once(*arguments: Any) -> None:
        launch(*arguments)
        if mover.launched[-1].is_store:
            return
        if arguments[-1] is not None:
            arguments[-1].synchronize()
        mover.release()

    monkeypatch.setattr(mover, "launch_copy", run_loads_at_once)
    return queue


def start_load(rig: Rig) -> tuple[Any, list[int]]:
    """Send a request whose prompt is below; its load is ordered but not yet given to the device."""
    rig.generate(prompt(17), max_tokens=1)
    rig.evict_device()
    request = rig.add(prompt(17), max_tokens=1)
    output = rig.scheduler.schedule()
    return (request, output), list(rig.manager._reqs_to_load[request.request_id].transfer_meta.gpu_block_ids)


def test_xfer_02_a_load_waits_for_the_forward_that_still_reads_its_target(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    rig = Rig()
    (request, output), targets = start_load(rig)
    pages = rig.memories[0]["layer0"]
    pages[targets] = 55  # content of the request that was there before
    queue, seen = behind(rig, monkeypatch), []
    queue.work.append(lambda: seen.append(pages[targets].clone()))
    rig.finish_step(output, copies=False)
    queue.run(len(queue.work))
    assert len(seen) == 1
    assert (seen[0] == 55).all(), "the load overwrote what was still being read"
    rig.run()
    rig.check_output(request)
    assert request.num_cached_tokens == 16


def test_a_store_waits_for_the_forward_that_computes_its_blocks(monkeypatch: pytest.MonkeyPatch) -> None:
    rig = Rig()
    queue = behind(rig, monkeypatch)
    rig.add(prompt(9), max_tokens=1)
    rig.step(copies=False)
    mover, marks = rig.mover(), []
    launch = mover.launch_copy
    monkeypatch.setattr(mover, "launch_copy", lambda *args: (marks.append(args[-1]), launch(*args)))
    computed: list[bool] = []
    queue.work.append(lambda: computed.append(True))
    rig.run()
    assert marks, "the blocks are stored"
    assert not computed, "storing holds up nobody"
    marks[0].synchronize()
    assert computed, "the store reads when the device is through with what it was given before"


def test_xfer_03_a_load_lands_behind_the_zeroing_of_its_target(monkeypatch: pytest.MonkeyPatch) -> None:
    rig = Rig()
    (request, output), targets = start_load(rig)
    pages = rig.memories[0]["layer0"]
    queue = behind(rig, monkeypatch)
    queue.work.append(lambda: pages.__setitem__(targets, 0))  # ordered for a request that was cancelled
    rig.finish_step(output, copies=False)
    queue.run(len(queue.work))
    rig.run()
    rig.check_output(request)  # the model found the right bytes, not zeros
    assert request.num_cached_tokens == 16


def test_before_sleep_every_copy_under_way_ends() -> None:
    rig = Rig()
    rig.add(prompt(9), max_tokens=1)
    while not rig.mover().jobs:
        rig.step(copies=False)
    sleeping = threading.Thread(target=rig.worker().unregister_kv_caches)
    sleeping.start()
    sleeping.join(0.2)
    assert sleeping.is_alive(), "the memory must not go away under a copy"
    rig.mover().release()
    sleeping.join(10.0)
    assert not sleeping.is_alive()
    rig.run()
    rig.assert_at_rest()


def test_a_copy_whose_source_lost_its_hash_while_it_ran_is_never_found() -> None:
    """So it is when the step that was to compute the block has failed."""
    rig = Rig()
    request = rig.add(prompt(17), max_tokens=1)
    while not rig.mover().jobs:
        rig.step(copies=False)
    (store,) = rig.mover().launched
    rig.scheduler.kv_cache_manager.block_pool.evict_blocks({store.src_blocks[1]})
    keys = [rig.key(request, index) for index in range(len(store.src_blocks))]
    rig.mover().release()
    rig.step(copies=False)
    found = [rig.manager.tier.contains(key) for key in keys]
    assert found == [index != 1 for index in range(len(keys))]
    rig.run()


def test_blocks_that_only_a_store_holds_are_on_their_way_back() -> None:
    rig = Rig()
    rig.add(prompt(9), max_tokens=3)
    while not rig.mover().jobs:
        rig.step(copies=False)
        assert not rig.connector.has_pending_block_frees(), "the request has them too"
    while rig.scheduler.running:
        rig.step(copies=False)
    assert rig.connector.has_pending_block_frees()
    rig.mover().release()
    rig.run()
    assert not rig.connector.has_pending_block_frees()


def test_a_table_that_is_told_whole_replaces_what_was_known_of_the_request() -> None:
    rig = Rig()
    request = rig.add(prompt(17), max_tokens=8)
    for _ in range(3):
        rig.step()
    state = rig.manager.store_side.states[request.request_id]
    before, size = [list(ids) for ids in state.block_ids], len(state.block_ids[0])
    assert state.num_stored_blocks[0] > 0
    added = SchedulerOutput.make_empty()
    added.scheduled_cached_reqs.req_ids.append(request.request_id)
    added.scheduled_cached_reqs.new_block_ids.append(([21],))
    rig.manager.store_side.begin_step(added)
    assert state.block_ids == ([*before[0], 21],)
    whole = SchedulerOutput.make_empty()
    whole.scheduled_new_reqs.append(
        SimpleNamespace(req_id=request.request_id, block_ids=([*range(10, 10 + size)],))
    )  # type: ignore[arg-type]
    rig.manager.store_side.begin_step(whole)
    assert state.block_ids == ([*range(10, 10 + size)],)
    assert state.num_stored_blocks == [0], "each of its blocks is looked at again"
