"""Reads from the disk below the host tier that fail: what is forgotten, what is read again, and for how long."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.helpers.disk_rig import DiskRig, flip_a_byte
from tests.helpers.offload_rig import full, prompt
from vllm.v1.simple_kv_offload.copy_backends.base import CopyError
from vllm.v1.simple_kv_offload.disk_moves import DiskMoves


@pytest.fixture
def rig(tmp_path: Path) -> Iterator[DiskRig]:
    rig = DiskRig(tmp_path)
    yield rig
    rig.close()


def test_tier_01_a_bad_block_costs_other_requests_of_the_same_step_nothing(tmp_path: Path) -> None:
    rig = DiskRig(tmp_path, host_blocks=33, disk_blocks=129)
    first, second = rig.sink(1), rig.sink(2)
    bad = rig.chain.disk.get(rig.key(first, 0))
    assert bad is not None
    flip_a_byte(tmp_path, bad.block_id, full().page_size_bytes)
    requests = [rig.add(prompt(17, seed)) for seed in (1, 2)]
    rig.run()
    assert [request.num_cached_tokens for request in requests] == [0, 16]
    for request in requests:
        rig.check_output(request)
    assert rig.on_disk(second) == [0, 1, 2, 3]
    assert rig.chain.up.ledger.failed == 8, "one order for both"
    rig.assert_at_rest()
    rig.close()


def test_tier_01_a_read_that_fails_on_one_rank_is_told_when_the_other_ends(rig: DiskRig) -> None:
    first = rig.sink()
    request = rig.add(prompt(17))
    held = rig.hold_disk()
    while not len(held):
        rig.step(copies=False)
    (transfer,) = rig.chain.up.live
    rig.chain.up.table._missing[0] += 1  # as if there were a second rank
    bad = transfer.device_blocks[2].block_id
    held.release(CopyError("checksum", frozenset({bad})))
    rig.step(copies=False)
    assert not transfer.ended
    rig.chain.report_up({0: 1}, ok=True)
    assert rig.on_disk(first) == [0, 1, 3]
    rig.worker()._moves = DiskMoves(held._disk)
    rig.run()
    rig.check_output(request)
    assert request.num_cached_tokens == 8
    rig.assert_at_rest()


def test_a_failed_read_without_a_named_slot_forgets_all_that_it_was_to_bring(rig: DiskRig) -> None:
    first = rig.sink()
    request = rig.add(prompt(17))
    held = rig.hold_disk()
    while not len(held):
        rig.step(copies=False)
    held.release(CopyError("it took too long"))
    rig.worker()._moves = DiskMoves(held._disk)
    rig.step(copies=False)
    assert rig.on_disk(first) == [], "nobody knows what of it can be read"
    rig.run()
    rig.check_output(request)
    assert request.num_cached_tokens == 0
    assert rig.chain.counts.failed_reads == 1
    rig.assert_at_rest()


def test_tier_03_a_read_that_is_made_again_has_only_the_time_that_is_left(rig: DiskRig) -> None:
    rig.sink()
    request = rig.add(prompt(17))
    held = rig.hold_disk()
    while not len(held):
        rig.step(copies=False)
    (transfer,) = rig.chain.up.live
    held.release(CopyError("checksum", frozenset({transfer.device_blocks[3].block_id})))
    rig.disk_clock.now += 4.0
    while not len(held):
        rig.step(copies=False)
    rig.disk_clock.now += 1.5
    for _ in range(8):
        rig.step(copies=False)
    assert rig.outputs[request.request_id], "computed without the disk"
    assert rig.chain.counts.timeouts == 1
    held.release()
    rig.run()
    rig.check_output(request)
    rig.assert_at_rest()
