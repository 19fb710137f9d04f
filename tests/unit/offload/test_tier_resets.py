"""Tiers emptied one by one: what of the others stays, what becomes of copies under way, and what the answer says."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.helpers.disk_rig import DiskRig
from tests.helpers.kept_rig import KeptRig, served
from tests.helpers.offload_rig import Rig, mover_of, prompt
from vllm.config import KVTransferConfig
from vllm.distributed.kv_event_types import (
    MEDIUM_CPU,
    MEDIUM_GPU,
    MEDIUM_STORAGE,
    AllBlocksCleared,
    BlockStored,
)
from vllm.distributed.kv_transfer.kv_connector.v1.base import SchedulerHalf
from vllm.v1.kv_cache_report import TierReset
from vllm.v1.metrics.cache_hit_source import CacheHitSource
from vllm.v1.simple_kv_offload.copy_backends.base import CopyError

DEVICE, HOST, DISK = CacheHitSource.DEVICE, CacheHitSource.HOST, CacheHitSource.DISK
OUTSIDE = CacheHitSource.EXTERNAL_UNSPECIFIED


@pytest.fixture
def rig(tmp_path: Path) -> Iterator[DiskRig]:
    rig = DiskRig(tmp_path, events=True)
    yield rig
    rig.close()


def empty(rig: Rig, *tiers: CacheHitSource) -> dict[CacheHitSource, TierReset]:
    """Empty these; the answer by tier. Success is that of all asked."""
    success = rig.scheduler.reset_tiers(tiers)
    report = rig.scheduler.last_reset
    told = {tier.tier: tier for tier in report.tiers}  # type: ignore[union-attr]
    assert [tier for tier in told if told[tier].asked] == sorted(tiers, key=list(CacheHitSource).index)
    assert success == all(told[tier].success for tier in tiers), told
    assert all(told[tier].success is None for tier in told if tier not in tiers)
    assert all((told[tier].reason is None) == bool(told[tier].success) for tier in tiers)
    return told


def cleared(rig: Rig) -> list[str | None]:
    """The media that were told to be empty since the last call."""
    rig.scheduler.flush_events()
    events, rig.publisher.events = rig.publisher.events, []
    return [event.medium or MEDIUM_GPU for event in events if isinstance(event, AllBlocksCleared)]


def told_now(rig: Rig) -> set[str | None]:
    """The media of what a subscriber is told who comes now."""
    return {event.medium for event in rig.scheduler.present_events() if isinstance(event, BlockStored)}


def test_the_disk_serves_what_the_host_tier_lost(rig: DiskRig) -> None:
    """A block lies whole in each tier, so the disk needs nothing of the host tier."""
    first = rig.sink()
    rig.generate(prompt(17))  # comes up: in both tiers now
    rig.evict_device()
    cleared(rig)
    on_disk = rig.on_disk(first)
    told = empty(rig, HOST)
    assert told[HOST].blocks_dropped
    assert (told[HOST].blocks_cached, told[DISK].blocks_dropped) == (0, 0)
    assert told[DISK].blocks_cached
    assert rig.in_tier(first) == []
    assert rig.on_disk(first) == on_disk == [0, 1, 2, 3]
    assert cleared(rig) == [MEDIUM_CPU]
    assert told_now(rig) == {MEDIUM_STORAGE}
    assert rig.connector.take_withdrawal() is None
    assert rig.generate(prompt(17)).num_cached_tokens == 16
    rig.assert_at_rest()


def test_the_host_tier_keeps_what_the_disk_lost(rig: DiskRig) -> None:
    rig.sink()
    again = rig.generate(prompt(17), max_tokens=1)
    rig.evict_device()
    cleared(rig)
    told = empty(rig, DISK)
    assert told[DISK].blocks_dropped
    assert (told[DISK].blocks_cached, told[HOST].blocks_dropped) == (0, 0)
    assert rig.on_disk(again) == []
    assert rig.in_tier(again) == [0, 1, 2, 3]
    assert cleared(rig) == [MEDIUM_STORAGE]
    assert told_now(rig) == {MEDIUM_CPU}
    served = rig.generate(prompt(17), max_tokens=1)
    assert served.num_cached_tokens == 16
    rig.sink(seed=1)
    assert rig.on_disk(served), "what the host tier gives up goes down again"
    rig.assert_at_rest()


def test_the_device_alone_is_what_a_reset_without_tiers_empties(rig: DiskRig) -> None:
    request = rig.generate(prompt(16), max_tokens=1)
    cleared(rig)
    told = empty(rig, DEVICE)
    report = rig.scheduler.reset_prefix_cache_report
    assert (told[DEVICE].blocks_cached, told[HOST].asked) == (0, False)
    assert rig.in_tier(request) == [0, 1, 2, 3]
    assert cleared(rig) == [MEDIUM_GPU]
    rig.scheduler.reset_prefix_cache()
    again = rig.scheduler.reset_prefix_cache_report
    assert report is not None
    assert again is not None
    assert report.keys() == again.keys()
    assert report["connector_reset"] is again["connector_reset"] is None
    assert rig.generate(prompt(17)).num_cached_tokens == 16


@pytest.mark.parametrize("tiers", [(DEVICE, HOST, DISK), (HOST, DISK), (DEVICE, DISK)])
def test_any_choice_of_tiers_leaves_exactly_the_others(
    rig: DiskRig, tiers: tuple[CacheHitSource, ...]
) -> None:
    first = rig.sink()
    rig.generate(prompt(17))
    empty(rig, *tiers)
    rig.evict_device()
    found = {HOST: bool(rig.in_tier(first)), DISK: bool(rig.on_disk(first))}
    assert found == {tier: tier not in tiers for tier in (HOST, DISK)}
    assert rig.generate(prompt(17)).num_cached_tokens == (0 if {HOST, DISK} <= set(tiers) else 16)
    rig.assert_at_rest()


def test_a_load_under_way_from_an_emptied_tier_is_of_no_use() -> None:
    rig = Rig(host_blocks=16)
    rig.generate(prompt(16), max_tokens=1)
    rig.evict_device()
    request = rig.add(prompt(17))
    rig.step(copies=False)
    assert rig.manager.load_side.loads
    told = empty(rig, HOST)
    assert told[HOST].success is False
    assert told[HOST].blocks_held == 4
    assert "4 blocks are held by requests or transfers" in str(told[HOST].reason)
    assert rig.scheduler.reset_prefix_cache_report["reason"].startswith("the connector still has transfers")  # type: ignore[index]
    rig.run()
    rig.check_output(request)
    assert request.num_cached_tokens == 0
    assert rig.scheduler.last_reset is not None
    assert empty(rig, HOST)[HOST].success
    rig.assert_at_rest()


@pytest.mark.parametrize("tiers", [(DEVICE,), (DISK,), (DEVICE, DISK)])
def test_a_load_from_a_tier_that_was_left_goes_on(rig: DiskRig, tiers: tuple[CacheHitSource, ...]) -> None:
    rig.generate(prompt(16), max_tokens=1)
    rig.evict_device()
    request = rig.add(prompt(17))
    rig.step(copies=False)
    assert rig.manager.load_side.loads
    rig.scheduler.reset_tiers(tiers)
    rig.run()
    rig.check_output(request)
    assert request.num_cached_tokens == 16
    rig.assert_at_rest()


@pytest.mark.parametrize("lazy", [False, True])
def test_a_store_under_way_to_an_emptied_tier_is_dropped_and_made_again(lazy: bool) -> None:
    rig = Rig(host_blocks=64, device_blocks=24, lazy=lazy)
    request = rig.add(prompt(16), max_tokens=8)
    while not len(rig.manager.store_side.table):
        rig.step(copies=False)
    empty(rig, HOST)
    assert not rig.manager.store_side.in_flight
    rig.run()
    for seed in range(1, 12):  # lazy copies what is about to go
        rig.generate(prompt(16, seed))
    assert rig.in_tier(request)[:4] == [0, 1, 2, 3]
    ledger = rig.manager.store_side.ledger
    assert ledger.dropped
    assert ledger.scheduled == ledger.done + ledger.dropped + ledger.failed
    rig.assert_at_rest()


def test_what_comes_up_while_the_host_tier_is_emptied_comes_up_anew(tmp_path: Path) -> None:
    rig = DiskRig(tmp_path, host_blocks=17)
    rig.sink()
    disk = rig.hold_disk()
    request = rig.add(prompt(17))
    rig.step(copies=False)
    assert rig.chain.up.live
    assert not empty(rig, HOST)[HOST].success
    assert not rig.chain.waiting
    rig.step(copies=False)
    assert len(rig.chain.up.live) == 2, "the abandoned one and the new one"
    second = rig.add(prompt(18), max_tokens=1)
    disk.release()
    while rig.scheduler.has_requests():
        rig.step()
        disk.release()
    for each, cached in ((request, 16), (second, 16)):
        rig.check_output(each)
        assert each.num_cached_tokens == cached
    assert (rig.chain.up.ledger.done, rig.chain.up.ledger.dropped) == (4, 4)
    rig.assert_at_rest()
    rig.close()


def test_an_abandoned_move_that_ends_first_does_not_hide_the_one_that_followed(tmp_path: Path) -> None:
    rig = DiskRig(tmp_path, host_blocks=33)
    rig.sink()
    disk = rig.hold_disk()
    request = rig.add(prompt(17))
    rig.step(copies=False)
    empty(rig, HOST)
    disk.release()  # the abandoned one has ended, which nobody has been told
    rig.step(copies=False)
    rig.step(copies=False)
    second = rig.add(prompt(18), max_tokens=1)
    rig.step(copies=False)
    assert rig.chain.up.ledger.scheduled == 8, "the second request waits for what comes up for the first"
    while rig.scheduler.has_requests():
        disk.release()
        rig.step()
    assert request.num_cached_tokens == second.num_cached_tokens == 16
    rig.assert_at_rest()
    rig.close()


def test_a_disk_slot_that_an_abandoned_move_could_not_read_is_forgotten(rig: DiskRig) -> None:
    first = rig.sink()
    disk = rig.hold_disk()
    request = rig.add(prompt(17))
    rig.step(copies=False)
    rig.abort(request)
    empty(rig, HOST)
    assert rig.on_disk(first) == [0, 1, 2, 3]
    disk.release(CopyError("cannot read"))
    rig.run()
    assert rig.on_disk(first) == []
    assert rig.chain.counts.failed_reads == 1
    rig.assert_at_rest()


def test_what_is_on_its_way_down_when_one_of_both_is_emptied_gets_nowhere(rig: DiskRig) -> None:
    disk = rig.hold_disk()
    for tier in (HOST, DISK):
        rig.add(prompt(16), max_tokens=1)
        rig.write_something()
        empty(rig, tier)
        entries = len(rig.chain.disk.pool.cached_block_hash_to_block)
        disk.release()
        rig.step(copies=False)
        assert len(rig.chain.disk.pool.cached_block_hash_to_block) == entries
        while rig.scheduler.has_requests():
            disk.release()
            rig.step()
        rig.assert_at_rest()


def test_what_did_not_get_down_goes_down_later(rig: DiskRig) -> None:
    disk = rig.hold_disk()
    rig.add(prompt(16), max_tokens=1)
    rig.write_something()
    leaving = [staged.key for move in rig.chain.down.live for keys in move.keys for staged in keys]
    assert leaving
    empty(rig, DISK)
    while rig.scheduler.has_requests():
        disk.release()
        rig.step()
    assert all(rig.chain.disk.contains(key) for key in leaving)
    rig.assert_at_rest()


def test_a_kept_disk_that_was_left_is_found_by_the_next_engine(tmp_path: Path) -> None:
    rig = KeptRig(tmp_path)
    request = rig.generate(prompt(16), max_tokens=1)
    rig.settle()
    assert rig.on_disk(request) == [0, 1, 2, 3]
    empty(rig, DEVICE, HOST)
    assert rig.withdraw() == [], "nothing on the disk was taken back"
    rig.crash()
    later = KeptRig(tmp_path)
    assert served(later, prompt(17)) == 16
    later.close()


def test_pfx_14_a_kept_disk_that_was_emptied_alone_forgets_for_good(tmp_path: Path) -> None:
    rig = KeptRig(tmp_path)
    request = rig.generate(prompt(16), max_tokens=1)
    rig.settle()
    empty(rig, DISK)
    assert rig.on_disk(request) == []
    assert rig.withdraw() == [None]
    rig.crash()
    later = KeptRig(tmp_path)
    assert served(later, prompt(17)) == 0
    later.close()


def test_a_kept_disk_that_was_emptied_alone_is_filled_again_from_the_host_tier(tmp_path: Path) -> None:
    rig = KeptRig(tmp_path)
    request = rig.generate(prompt(16), max_tokens=1)
    empty(rig, DISK)
    rig.run()
    assert rig.on_disk(request) == rig.in_tier(request) == [0, 1, 2, 3]
    rig.assert_at_rest()
    rig.settle()
    rig.crash()
    later = KeptRig(tmp_path)
    assert served(later, prompt(17)) == 16
    later.close()


def test_the_disk_in_place_of_the_host_tier_has_its_own_name(tmp_path: Path) -> None:
    extra = {
        "kv_offload_backend": "disk",
        "disk_path": str(tmp_path / "kv"),
        "disk_capacity_bytes": 1 << 20,
        "use_page_cache": True,
    }
    rig = Rig(extra=extra, held=False)
    assert rig.scheduler.cache_tiers == (DEVICE, DISK)
    rig.generate(prompt(16), max_tokens=1)
    assert empty(rig, DISK)[DISK].blocks_dropped == 4
    rig.close()


def child(**extra: Any) -> dict[str, Any]:
    return {
        "kv_connector": "SimpleCPUOffloadConnector",
        "kv_role": "kv_both",
        "kv_connector_extra_config": {"num_cpu_blocks": 16, "decline_slow_tier": "off", **extra},
    }


def multi(*children: dict[str, Any]) -> Rig:
    extra = {"connectors": list(children)}
    config = KVTransferConfig(
        kv_connector="MultiConnector",
        kv_role="kv_both",
        kv_connector_extra_config=extra,
        kv_load_failure_policy="recompute",
    )
    return Rig(connector_config=config, events=True)


def test_each_of_several_connectors_empties_the_tiers_it_has(tmp_path: Path) -> None:
    folder = {
        "kv_connector": "ExampleConnector",
        "kv_role": "kv_both",
        "kv_connector_extra_config": {"shared_storage_path": str(tmp_path)},
    }
    rig = multi(child(), folder)
    assert rig.scheduler.cache_tiers == (DEVICE, HOST, OUTSIDE)
    rig.generate(prompt(16), max_tokens=1)
    told = empty(rig, HOST)
    assert told[HOST].blocks_dropped == 4
    assert told[OUTSIDE] == TierReset(OUTSIDE, False, None, None, None, None)
    assert rig.connector.take_withdrawal() is None
    rig.generate(prompt(16), max_tokens=1)
    told = empty(rig, OUTSIDE)
    assert told[OUTSIDE] == TierReset(OUTSIDE, True, True, None, None, None)
    assert rig.connector.take_withdrawal() is not None
    assert told[HOST].blocks_dropped == 0
    rig.close()


def test_several_connectors_with_a_host_tier_empty_it_together() -> None:
    rig = multi(child(), child())
    rig.generate(prompt(16), max_tokens=1)
    told = empty(rig, HOST)
    assert (told[HOST].blocks_dropped, told[HOST].blocks_cached) == (8, 0)
    assert told_now(rig) == {MEDIUM_GPU}
    rig.close()


@pytest.mark.parametrize(("tier", "num_dropped", "cached"), [(HOST, 4, 0), (DISK, 0, 16)])
def test_only_loads_that_read_an_emptied_tier_start_again(
    tier: CacheHitSource, num_dropped: int, cached: int
) -> None:
    rig = multi(child(), child())
    first, second = rig.connector.sub_connectors  # type: ignore[attr-defined]
    second.scheduler_manager.source = second._cache_hit_source = DISK
    rig.generate(prompt(16), max_tokens=1)
    second.scheduler_manager.reset()  # the first child loads, and nothing else can
    rig.evict_device()
    request = rig.add(prompt(17))
    rig.step(copies=False)
    assert mover_of(rig.workers[0].kv_connector.sub_connectors[0]).jobs  # type: ignore[attr-defined]
    rig.scheduler.reset_tiers([tier])
    rig.run()
    rig.check_output(request)
    assert request.num_cached_tokens == cached
    assert first.scheduler_manager.load_side.ledger.dropped == num_dropped
    rig.close()


class TwoTiers(SchedulerHalf):
    """A connector from outside with two tiers that it cannot empty apart."""

    resets = 0

    def get_cache_hit_sources(self) -> tuple[CacheHitSource, ...]:
        return (HOST, DISK)

    def reset_cache(self) -> bool | None:
        self.resets += 1
        return None


def test_a_connector_that_knows_no_parts_is_emptied_as_a_whole_or_not_at_all() -> None:
    connector: Any = TwoTiers.__new__(_concrete(TwoTiers))
    assert connector.reset_tiers([HOST]) is False
    assert connector.reset_tiers([CacheHitSource.P2P]) is None
    assert connector.resets == 0
    assert connector.reset_tiers([DISK, HOST]) is None
    assert connector.resets == 1


def _concrete(cls: type) -> type:
    return type(cls.__name__, (cls,), dict.fromkeys(cls.__abstractmethods__))  # type: ignore[attr-defined]
