"""The disk below host memory: what goes down, what comes up, and what happens when the disk misbehaves."""

from __future__ import annotations

import errno
import logging
import os
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.helpers.disk_rig import DiskRig, flip_a_byte
from tests.helpers.offload_rig import full, mamba, prompt, rig_config, window
from vllm.distributed.kv_event_types import MEDIUM_STORAGE, BlockRemoved, BlockStored
from vllm.distributed.kv_transfer.kv_connector.factory import KVConnectorFactory
from vllm.v1.core.sched.output import SchedulerOutput
from vllm.v1.metrics.cache_hit_source import CacheHitSource
from vllm.v1.request import RequestStatus
from vllm.v1.simple_kv_offload.copy_backends import disk_file
from vllm.v1.simple_kv_offload.copy_backends.base import CopyBackend, CopyError, CopyResult, EventsList
from vllm.v1.simple_kv_offload.disk_moves import DiskMoves
from vllm.v1.simple_kv_offload.metadata import (
    DiskOrder,
    SimpleCPUOffloadMetadata,
    SimpleCPUOffloadWorkerMetadata,
)
from vllm.v1.simple_kv_offload.metrics import MetricName


@pytest.fixture
def rig(tmp_path: Path) -> Iterator[DiskRig]:
    rig = DiskRig(tmp_path)
    yield rig
    rig.close()
    assert not list(tmp_path.iterdir()), "the files go with the engine"


def test_what_the_host_evicts_is_served_from_the_disk(rig: DiskRig) -> None:
    first = rig.sink()
    assert rig.on_disk(first) == [0, 1, 2, 3]
    again = rig.generate(prompt(17))
    assert again.num_cached_tokens == 16
    assert rig.chain.up.ledger.done == 4
    assert rig.in_tier(again)[:4] == [0, 1, 2, 3], "what came up stays in the host tier"
    rig.assert_at_rest()


@pytest.mark.parametrize(
    ("tiers", "from_disk", "from_host"),
    [
        ([{"medium": "CPU"}], 0, 16),
        ([{"medium": "STORAGE"}], 0, 0),
        ([], 0, 0),
        ([{"locality": "LOCAL"}], 16, 16),
    ],
)
def test_a_request_loads_only_from_the_tiers_that_it_allows(
    rig: DiskRig, tiers: list[dict[str, str]], from_disk: int, from_host: int
) -> None:
    """What is on disk comes up into host memory first, so a request that is not to use that gets nothing."""
    rig.sink()
    params = {"kv_transfer_params": {"load_tier_filter": tiers}}
    assert rig.generate(prompt(17), extra=params).num_cached_tokens == from_disk
    rig.evict_device()
    assert rig.generate(prompt(17)).num_cached_tokens == 16, "now the host has it in any case"
    rig.evict_device()
    assert rig.generate(prompt(17), extra=params).num_cached_tokens == from_host
    rig.assert_at_rest()


@pytest.mark.parametrize("kinds", [[full(), window()], [full(), mamba()]])
def test_groups_of_other_kinds_come_up_together(tmp_path: Path, kinds: list[Any]) -> None:
    rig = DiskRig(tmp_path, specs=kinds, host_blocks=17, device_blocks=64)
    rig.sink(length=17)
    assert rig.generate(prompt(17)).num_cached_tokens == 16
    rig.assert_at_rest()
    rig.close()


def test_all_ranks_move_their_own_part(tmp_path: Path) -> None:
    rig = DiskRig(tmp_path, ranks=2)
    rig.sink()
    assert rig.generate(prompt(17)).num_cached_tokens == 16
    rig.assert_at_rest()
    rig.close()


def test_a_victim_without_change_is_not_written_twice(rig: DiskRig) -> None:
    rig.sink()
    written = rig.chain.down.ledger.scheduled
    rig.generate(prompt(17), max_tokens=1)
    rig.sink(seed=40)
    keys = {key for block in rig.chain.disk.pool.blocks for key, _ in rig.chain.disk.pool.get_keys(block)}
    assert rig.chain.down.ledger.done == len(keys), "each content once"
    assert rig.chain.down.ledger.scheduled > written


def test_events_name_the_medium(tmp_path: Path) -> None:
    rig = DiskRig(tmp_path, events=True, disk_blocks=6)
    rig.sink()
    for seed in range(20, 26):
        rig.generate(prompt(16, seed), max_tokens=1)
    stored = [e for e in rig.publisher.events if isinstance(e, BlockStored) and e.medium == MEDIUM_STORAGE]
    removed = [e for e in rig.publisher.events if isinstance(e, BlockRemoved) and e.medium == MEDIUM_STORAGE]
    assert stored
    assert stored[0].token_ids
    assert removed, "the disk has evicted"
    stats = rig.manager.get_stats()
    assert stats is not None
    assert stats.data["data"][MetricName.DISK_EVICTED_BLOCKS] == {(): rig.chain.disk.evictions}
    assert rig.chain.disk.evictions > 0
    rig.close()


def test_figures_per_tier(rig: DiskRig) -> None:
    rig.sink()
    known = rig.make_request(prompt(17))
    hit = rig.connector.peek_matched_tokens(known, 0)
    assert hit is not None
    assert hit.num_tokens == 16
    assert hit.held == hit.offered == {CacheHitSource.HOST: 0, CacheHitSource.DISK: 16}
    request = rig.generate(prompt(17), max_tokens=1)
    stats = rig.ends[request.request_id].prefill_stats
    assert stats is not None
    assert stats.cached_tokens_by_source == {CacheHitSource.DEVICE: 0, **hit.offered}
    host, disk = rig.connector.get_tier_reports()
    assert (host.pool.tier, disk.pool.tier) == (CacheHitSource.HOST, CacheHitSource.DISK)
    store, load = disk.transfers
    assert store.blocks_done == rig.chain.down.ledger.done > 0
    assert (load.blocks_done, load.blocks_in_flight) == (4, 0)
    told = rig.connector.get_kv_connector_stats()
    assert told is not None
    moved = told.data["data"][MetricName.DISK_MOVED_BLOCKS]
    assert moved["up", "done"] == 4
    assert told.data["data"][MetricName.DISK_ACTIVE] == {(): 1}


def test_tier_01_and_06_a_wrong_byte_costs_one_failed_read_and_a_recompute(
    rig: DiskRig, tmp_path: Path
) -> None:
    first = rig.sink()
    bad = rig.chain.disk.get(rig.key(first, 1))
    assert bad is not None
    flip_a_byte(tmp_path, bad.block_id, full().page_size_bytes)
    request = rig.add(prompt(17))
    steps = rig.run()
    rig.check_output(request)
    assert steps < 15
    assert request.num_cached_tokens == 4, "h0 is used, what follows the bad block is recomputed"
    assert (rig.chain.counts.failed_reads, rig.chain.counts.bad_blocks) == (1, 1)
    assert 1 not in rig.on_disk(first), "forgotten at once"
    assert [i for i in rig.on_disk(first) if i != 1] == [0, 2, 3], "the others were right"
    rig.evict_device()
    rig.generate(prompt(17))
    assert rig.chain.counts.failed_reads == 1
    assert rig.chain.counts.waits == 1
    rig.assert_at_rest()


def test_tier_02_queued_requests_do_not_crowd_the_host_tier(tmp_path: Path) -> None:
    rig = DiskRig(
        tmp_path, host_blocks=9, disk_blocks=260, device_blocks=12, config_changes={"max_num_seqs": 2}
    )
    for seed in range(50):
        rig.generate(prompt(16, seed), max_tokens=1)
    rig.evict_device()
    stored = sum(len(rig.on_disk(rig.requests[f"r{seed}"])) for seed in range(50))
    assert stored > 150
    chain, copied = rig.chain, rig.manager.store_side.ledger.done
    requests = [rig.add(prompt(17, seed), max_tokens=2) for seed in range(50)]
    for _ in range(1000):
        if not rig.scheduler.has_requests():
            break
        rig.step()
        promoted = sum(wait.num_promoted for wait in chain._waits.values())
        assert promoted <= 4, "half of the host tier at most"
        assert len(chain.waiting) <= 4
    for request in requests:
        rig.check_output(request)
    served = rig.manager.load_side.ledger.done
    assert served >= 50
    assert chain.up.ledger.scheduled <= 1.1 * served, "what came up was read before it was evicted"
    assert rig.manager.store_side.ledger.done - copied >= 50, "running requests find room for what they store"
    rig.assert_at_rest()
    rig.close()


class HangingBackend(CopyBackend):
    """Takes every job and finishes none."""

    def __init__(self) -> None:
        self.results: list[CopyResult] = []
        self.closed = False

    def launch_copy(
        self,
        src_blocks: Any,
        dst_blocks: Any,
        is_store: bool,
        event_idx: int,
        events_list: EventsList,
        wait_event: Any = None,
    ) -> None:
        self.results.append(CopyResult())
        events_list.append((event_idx, self.results[-1]))
        if self.closed:
            self.shutdown()

    def shutdown(self) -> None:
        self.closed = True
        for result in self.results:
            result.resolve(CopyError("shut down"))


def test_tier_03_a_hanging_read_counts_as_a_miss_after_a_bounded_wait(rig: DiskRig) -> None:
    rig.sink()
    worker = rig.worker()
    assert worker._moves is not None
    worker._moves.shutdown()
    hanging = HangingBackend()
    worker._moves = DiskMoves(hanging)
    request = rig.add(prompt(17))
    for _ in range(5):
        rig.step(copies=False)
        assert not rig.outputs.get(request.request_id)
    rig.disk_clock.now += 5.1
    for _ in range(8):
        rig.step(copies=False)
    assert rig.outputs[request.request_id], "computed without the disk"
    assert rig.chain.counts.timeouts == 1
    hanging.shutdown()
    rig.run()
    rig.check_output(request)
    rig.assert_at_rest()


def test_tier_03_what_is_being_written_is_still_served_by_the_host(rig: DiskRig) -> None:
    request = rig.generate(prompt(8), max_tokens=1)
    rig.evict_device()
    worker = rig.worker()
    assert worker._moves is not None
    worker._moves.shutdown()
    hanging = HangingBackend()
    worker._moves = DiskMoves(hanging)
    rig.write_something()
    assert rig.in_tier(request) == [0, 1]
    again = rig.add(prompt(9), max_tokens=1)
    while rig.scheduler.has_unfinished_requests():
        rig.step(copies=False)
        rig.mover().release()
    assert again.num_cached_tokens == 8
    hanging.shutdown()
    rig.run()
    rig.assert_at_rest()


def test_a_full_disk_switches_the_tier_off_and_the_engine_goes_on(
    rig: DiskRig, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(logging.getLogger("vllm"), "propagate", True)
    kept = rig.sink()

    def no_space(fd: int, data: object, at: int) -> int:
        raise OSError(28, "No space left on device")

    with monkeypatch.context() as patched:
        patched.setattr(disk_file.os, "pwrite", no_space)
        for seed in range(100, 110):
            rig.generate(prompt(16, seed), max_tokens=1)
    assert rig.chain.writes_off
    assert "the disk tier is switched off after 3 failed writes" in caplog.text
    scheduled = rig.chain.down.ledger.scheduled
    for seed in range(110, 115):
        rig.generate(prompt(16, seed), max_tokens=1)
    assert rig.chain.down.ledger.scheduled == scheduled
    rig.evict_device()
    assert rig.on_disk(kept) == [0, 1, 2, 3]
    assert rig.generate(prompt(17)).num_cached_tokens == 16, "what is there can be read"
    stats = rig.manager.get_stats()
    assert stats is not None
    assert stats.data["data"][MetricName.DISK_ACTIVE] == {(): 0}
    rig.assert_at_rest()


def test_a_path_that_cannot_be_written_leaves_the_host_tier(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(logging.getLogger("vllm"), "propagate", True)
    (tmp_path / "kv.rig0.rank_0").mkdir()
    rig = DiskRig(tmp_path)
    assert "the disk tier is off" in caplog.text
    for seed in range(8):
        rig.generate(prompt(16, seed), max_tokens=1)
    assert rig.chain.writes_off
    assert "switched off" not in caplog.text, "it never was on, and nothing of it can be read"
    rig.assert_at_rest()
    rig.close()


def test_a_read_only_disk_leaves_the_host_tier_and_is_refused_where_it_is_the_only_one(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(logging.getLogger("vllm"), "propagate", True)
    real_open = os.open

    def read_only(path: Any, flags: int, *more: int) -> int:
        if str(path).startswith(str(tmp_path)) and flags & os.O_CREAT:
            raise OSError(errno.EROFS, "Read-only file system", path)
        return real_open(path, flags, *more)

    monkeypatch.setattr(disk_file.os, "open", read_only)
    monkeypatch.setattr(disk_file.os, "access", lambda path, mode: not (mode & os.W_OK))
    place = {"disk_path": str(tmp_path / "kv"), "disk_capacity_bytes": 1 << 20}
    with pytest.raises(ValueError, match="no files can be made"):
        KVConnectorFactory.check_config(rig_config(extra={"kv_offload_backend": "disk", **place}))
    KVConnectorFactory.check_config(rig_config(extra={"disk_tier": True, **place}))
    rig = DiskRig(tmp_path)
    assert "the disk tier is off" in caplog.text
    assert "Read-only file system" in caplog.text
    rig.generate(prompt(16), max_tokens=1)
    rig.evict_device()
    assert rig.generate(prompt(17), max_tokens=1).num_cached_tokens == 16, "the host tier serves"
    rig.assert_at_rest()
    rig.close()


def test_a_missing_folder_stops_the_start_and_leaves_no_thread(tmp_path: Path) -> None:
    before = threading.active_count()
    with pytest.raises(ValueError, match=r"disk_path: .*missing is not a folder that exists"):
        DiskRig(tmp_path / "missing")
    assert threading.active_count() == before


def test_an_abort_while_blocks_come_up_lets_go_of_them(rig: DiskRig) -> None:
    rig.sink()
    request = rig.add(prompt(17))
    rig.step(copies=False)
    assert request.request_id in rig.chain.waiting
    rig.abort(request)
    assert not rig.chain.waiting
    rig.run()
    assert rig.chain.up.ledger.done == 4
    rig.assert_at_rest()


def test_two_requests_share_one_promotion(rig: DiskRig) -> None:
    rig.sink()
    both = [rig.add(prompt(17), max_tokens=1), rig.add(prompt(18), max_tokens=1)]
    rig.run()
    assert rig.chain.up.ledger.scheduled == 4
    assert [request.num_cached_tokens for request in both] == [16, 16]
    rig.assert_at_rest()


def test_a_reset_makes_the_disk_forget(rig: DiskRig) -> None:
    first = rig.sink()
    request = rig.add(prompt(17))
    rig.step(copies=False)
    assert rig.connector.reset_cache() is False, "a move is under way"
    assert rig.on_disk(first) == []
    rig.run()
    rig.check_output(request)
    assert request.num_cached_tokens == 0
    assert rig.on_disk(request) == [] or rig.chain.up.ledger.done == 0
    rig.assert_at_rest()


def test_a_request_that_ended_in_an_error_is_forgotten_on_the_disk_too(rig: DiskRig) -> None:
    first = rig.sink()
    request = rig.add(prompt(17), max_tokens=8)
    while request.num_output_tokens == 0:
        rig.step()
    rig.step(nan=[request.request_id])
    rig.run()
    assert rig.on_disk(first) == []
    rig.assert_at_rest()


def test_a_request_refused_before_its_first_step_costs_others_nothing(rig: DiskRig) -> None:
    """Found by the simulator (seed 70115): a grammar that could not be compiled emptied the tiers of its prompt."""
    first, second = rig.sink(), rig.generate(prompt(17, seed=1), max_tokens=1)
    for content in (prompt(17), prompt(17, seed=1)):
        refused = rig.add(content, max_tokens=4)
        rig.scheduler.finish_requests(refused.request_id, RequestStatus.FINISHED_ERROR)
    rig.run()
    assert rig.on_disk(first) == [0, 1, 2, 3]
    assert rig.in_tier(second) == [0, 1, 2, 3]
    rig.assert_at_rest()


def test_a_bad_host_block_does_not_go_down(rig: DiskRig) -> None:
    """Its key is gone when the move ends, so the disk does not get it."""
    rig.generate(prompt(16), max_tokens=1)
    rig.write_something()
    (transfer,) = rig.chain.down.live
    victim = transfer.device_blocks[0]
    key = transfer.keys[0][0].key
    rig.manager.tier.pool.evict_blocks([victim.block_id])
    rig.run()
    assert not rig.chain.disk.contains(key)
    rig.assert_at_rest()


def test_lost_orders_end_as_failed() -> None:
    moves = DiskMoves(HangingBackend())
    moves.bind(SimpleCPUOffloadMetadata(move_down=DiskOrder(2, 2, [1], [1]), move_up=DiskOrder(issued=0)))
    moves.drop()
    report = SimpleCPUOffloadWorkerMetadata()
    moves.report_to(report)
    assert report.failed_moves_down == {0: 1, 1: 1, 2: 1}
    assert report.failed_moves_up == {0: 1}
    assert not report.completed_moves_down


def test_the_file_is_private(rig: DiskRig, tmp_path: Path) -> None:
    (path,) = tmp_path.iterdir()
    assert path.name == "kv.rig0.rank_0"
    assert os.stat(path).st_mode & 0o777 == 0o600


def test_steps_go_on_until_the_moves_have_ended(rig: DiskRig) -> None:
    rig.sink()
    request = rig.add(prompt(17))
    rig.step(copies=False)
    rig.abort(request)
    assert rig.connector.has_pending_push_work()
    rig.run()
    assert not rig.connector.has_pending_push_work()
    assert rig.connector.build_connector_meta(SchedulerOutput.make_empty()).is_empty()
