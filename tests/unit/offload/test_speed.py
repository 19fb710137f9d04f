"""A tier slower than computing is declined, by a running measure; and what tiers report adds up."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.helpers.offload_rig import Rig, full, prompt
from tests.helpers.sched import ManualClock
from vllm.v1.metrics.cache_hit_source import CacheHitSource
from vllm.v1.request import Request
from vllm.v1.simple_kv_offload.copy_backends.base import CopyError, CopyResult
from vllm.v1.simple_kv_offload.metadata import (
    SimpleCPUOffloadMetadata,
    SimpleCPUOffloadWorkerMetadata,
    Timings,
)
from vllm.v1.simple_kv_offload.metrics import MetricName
from vllm.v1.simple_kv_offload.speed import PROBE_EVERY, SAMPLES_MIN, Rate, SpeedCheck, speed_check
from vllm.v1.simple_kv_offload.timing import StepTimer

HOST, DISK = CacheHitSource.HOST, CacheHitSource.DISK
SLOW_LOAD = Timings(load_seconds=8.0, load_blocks=4, prefill_seconds=0.1, prefill_tokens=100)
FAST_LOAD = Timings(load_seconds=0.001, load_blocks=4, prefill_seconds=0.1, prefill_tokens=100)


def told(check: SpeedCheck, timings: Timings, times: int = SAMPLES_MIN) -> None:
    for _ in range(times):
        check.observe(timings)


# -- the measure ----------------------------------------------------------------------------------


def test_the_mean_is_that_of_the_first_samples_and_follows_later_ones() -> None:
    rate = Rate()
    rate.add(1.0, 0)
    assert rate.samples == 0
    for seconds in (4.0, 6.0):
        rate.add(seconds, 2)
    assert rate.value == 2.5
    for _ in range(30):
        rate.add(1.0, 1)
    assert rate.value == pytest.approx(1.0, abs=0.01)
    rate.add(9.0, 1)
    assert rate.value == pytest.approx(3.0, abs=0.02), "bad news count a quarter"
    rate.add(1.0, 1)
    assert rate.value == pytest.approx(2.0, abs=0.02), "good news count half"


def test_nothing_is_declined_before_both_sides_are_known() -> None:
    check = SpeedCheck(frozenset({HOST}), HOST)
    told(check, Timings(load_seconds=8.0, load_blocks=1))
    assert not check.declines_hit("a", HOST, 1, 16)
    told(check, Timings(prefill_seconds=0.1, prefill_tokens=100), SAMPLES_MIN - 1)
    assert not check.declines_hit("b", HOST, 1, 16)
    told(check, Timings(prefill_seconds=0.1, prefill_tokens=100), 1)
    assert check.declines_hit("c", HOST, 1, 16)


def test_it_is_the_margin_that_decides() -> None:
    check = SpeedCheck(frozenset({HOST}), HOST)
    told(check, Timings(load_seconds=0.02, load_blocks=1, prefill_seconds=0.01, prefill_tokens=10))
    # 1 ms per token and 20 ms per block: at twice the time of computing a block of 10 tokens is just worth it.
    assert not check.declines_hit("even", HOST, 3, 30)
    assert check.declines_hit("short", HOST, 3, 29)
    assert not check.declines_hit("other tier", DISK, 100, 1)


def test_an_answer_stays_until_the_request_is_admitted() -> None:
    check = SpeedCheck(frozenset({HOST}), HOST)
    told(check, SLOW_LOAD)
    for _ in range(3 * PROBE_EVERY):
        assert check.declines_hit("waits", HOST, 1, 16)
    assert check.declines[HOST] == 1, "MET-02: asking again is no new request"
    check.forget_request("waits")
    assert check.num_requests == 0
    assert check.declines_hit("waits", HOST, 1, 16)
    assert check.declines[HOST] == 2


def test_some_requests_read_a_slow_tier_so_that_it_can_recover() -> None:
    check = SpeedCheck(frozenset({HOST}), HOST)
    told(check, SLOW_LOAD)
    assert check.is_slow == {HOST: False}
    read = 0
    for index in range(20 * PROBE_EVERY):
        name = f"r{index}"
        if not check.declines_hit(name, HOST, 4, 64):
            check.observe(FAST_LOAD)  # it was slow for once only
            read += 1
        check.forget_request(name)
        if not check.is_slow[HOST]:
            break
    assert 1 <= read <= 8
    assert check.declines[HOST] == (read - 1) * (PROBE_EVERY - 1), "the last ones found it recovered"
    assert not check.declines_hit("later", HOST, 4, 64)


@pytest.mark.parametrize(
    ("setting", "first", "below", "tiers"),
    [
        ("off", HOST, True, set()),
        ("disk", HOST, False, set()),
        ("disk", HOST, True, {DISK}),
        ("disk", DISK, False, {DISK}),
        ("all", HOST, True, {HOST, DISK}),
    ],
)
def test_which_tiers_are_watched(
    setting: str, first: CacheHitSource, below: bool, tiers: set[CacheHitSource]
) -> None:
    assert speed_check(setting, first, has_disk_below=below).checked == tiers


# -- where it is measured -------------------------------------------------------------------------


def test_steps_and_loads_are_timed_where_they_happen() -> None:
    clock = ManualClock()
    timer = StepTimer(clock, None)
    timer.start(0)
    timer.stop()
    timer.start(64)
    clock.now += 0.5
    timer.stop()
    clock.now += 9.0
    timer.start(32)
    timer.drop()  # a step that failed
    done, failed, silent = CopyResult(), CopyResult(), CopyResult()
    done.begin()
    done.resolve()
    failed.begin()
    failed.resolve(CopyError("no"))
    silent.resolve()
    for result in (done, failed, silent):
        timer.loaded(result, 3)
    taken = timer.take()
    assert taken.prefill_seconds == pytest.approx(0.5)
    assert taken.prefill_tokens == 64
    assert taken.load_blocks == 3
    assert taken.load_seconds == done.seconds
    assert timer.take() == Timings()


def test_ranks_are_added_up() -> None:
    left = SimpleCPUOffloadWorkerMetadata(timings=Timings(1, 2, 3, 4, 5, 6))
    right = SimpleCPUOffloadWorkerMetadata(timings=Timings(1, 1, 1, 1, 1, 1))
    assert left.aggregate(right).timings == Timings(2, 3, 4, 5, 6, 7)


def orders(rig: Rig) -> list[SimpleCPUOffloadMetadata]:
    found = []
    for output in rig.steps:
        assert isinstance(output.kv_connector_metadata, SimpleCPUOffloadMetadata)
        found.append(output.kv_connector_metadata)
    return found


def test_only_prompts_are_timed_and_only_where_it_matters() -> None:
    rig = Rig(held=False, extra={"decline_slow_tier": "all"})
    rig.generate(prompt(33), max_tokens=4)
    assert [order.prefill_tokens for order in orders(rig)][:4] == [33, 0, 0, 0]
    assert rig.manager.speed.prefill.samples == 1
    rig.evict_device()
    rig.generate(prompt(33), max_tokens=1)
    assert rig.manager.speed.loads[HOST].samples == 1
    assert rig.manager.speed.loads[HOST].value > 0
    rig.close()
    unwatched = Rig(held=False)
    unwatched.generate(prompt(33), max_tokens=4)
    assert not any(order.measures or order.prefill_tokens for order in orders(unwatched))
    assert unwatched.manager.speed.prefill.samples == 0
    unwatched.close()


# -- what follows ---------------------------------------------------------------------------------


def test_a_slow_tier_is_not_read_and_says_so() -> None:
    rig = Rig(extra={"decline_slow_tier": "all"})
    rig.generate(prompt(33), max_tokens=1)
    rig.evict_device()
    told(rig.manager.speed, SLOW_LOAD)
    request = rig.generate(prompt(33), max_tokens=1)
    assert request.num_cached_tokens == 0
    figures = totals(rig)
    assert figures[MetricName.TIER_DECLINED_HITS, ("host",)] == 1
    assert figures[MetricName.TIER_SLOW, ("host",)] == 1
    assert figures[MetricName.TIER_LOAD_SECONDS, ("host",)] > 0
    assert figures[MetricName.PREFILL_SECONDS, ()] > 0
    rig.evict_device()
    told(rig.manager.speed, FAST_LOAD, 30)
    assert rig.generate(prompt(33), max_tokens=1).num_cached_tokens == 32
    assert totals(rig)[MetricName.TIER_SLOW, ("host",)] == 0
    rig.assert_at_rest()
    assert rig.manager.speed.num_requests == 0


class DiskRig(Rig):
    """Few host blocks above a disk."""

    def __init__(self, folder: Path, **extra: object) -> None:
        page = full().page_size_bytes
        super().__init__(
            host_blocks=9,
            extra={
                "disk_tier": True,
                "disk_path": str(folder / "kv"),
                "disk_capacity_bytes": 65 * page,
                "decline_slow_tier": "disk",
                **extra,
            },
        )
        assert self.manager.chain is not None
        self.manager.chain.clock = ManualClock()

    def sink(self, seed: int) -> Request:
        request = self.generate(prompt(16, seed), max_tokens=1)
        filler = seed + 500
        while self.in_tier(request):
            self.generate(prompt(16, filler), max_tokens=1)
            filler += 1
        self.evict_device()
        return request


def totals(rig: Rig) -> Counter[tuple[str, tuple[str, ...]]]:
    """Counters and gauges since the last call."""
    stats = rig.manager.get_stats()
    assert stats is not None
    found: Counter[tuple[str, tuple[str, ...]]] = Counter()
    for name, values in stats.data["data"].items():
        for labels, value in values.items():
            found[name, labels] = value
    return found


@pytest.fixture
def disk_rig(tmp_path: Path) -> Iterator[DiskRig]:
    rig = DiskRig(tmp_path)
    yield rig
    rig.close()


def test_a_slow_disk_is_left_alone(disk_rig: DiskRig) -> None:
    rig = disk_rig
    lost = rig.sink(0)
    assert rig.on_disk(lost)
    rig.manager.speed.loads[DISK] = Rate()
    told(rig.manager.speed, Timings(0, 0, 8.0, 4, 0.1, 100))
    again = rig.generate(prompt(16), max_tokens=1)
    assert again.num_cached_tokens == 0
    assert rig.manager.chain is not None
    assert rig.manager.chain.counts.waits == 0
    assert totals(rig)[MetricName.TIER_DECLINED_HITS, ("disk",)] == 1
    rig.assert_at_rest()


def test_with_the_check_off_a_slow_disk_is_read(tmp_path: Path) -> None:
    rig = DiskRig(tmp_path, decline_slow_tier=False)
    lost = rig.sink(0)
    assert rig.on_disk(lost)
    told(rig.manager.speed, Timings(0, 0, 8.0, 4, 0.1, 100))
    assert rig.generate(prompt(16), max_tokens=1).num_cached_tokens == 12
    rig.close()


def test_what_each_tier_is_asked_to_bring_is_what_requests_find(tmp_path: Path) -> None:
    rig = DiskRig(tmp_path, decline_slow_tier="off")
    rig.sink(0)
    rig.sink(1)
    warm = rig.add(prompt(12, 7), max_tokens=1)
    rig.run()
    rig.evict_device()
    totals(rig)

    def hits() -> Counter[CacheHitSource]:
        return Counter({hit.tier: hit.tokens_hit for hit in rig.scheduler.get_kv_cache_report().hits})

    before = hits()
    # One comes up from the disk, one is on the host, one has a prefix on the device, one is new.
    requests = [rig.generate(prompt(16, 0), max_tokens=1)]
    rig.evict_device()
    requests.append(rig.generate(prompt(16, 0), max_tokens=1))
    requests.append(rig.generate([*prompt(16, 0), 9, 9, 9, 9, 9], max_tokens=1))
    requests.append(rig.generate(prompt(16, 1), max_tokens=1))
    requests.append(rig.generate(prompt(16, 40), max_tokens=1))
    del warm
    reported: Counter[CacheHitSource] = Counter()
    for request in requests:
        for source, tokens in rig.ends[request.request_id].prefill_stats.cached_tokens_by_source.items():
            reported[source] += tokens
    found = totals(rig)
    by_tier = {tier: found[MetricName.ACCEPTED_TOKENS, (tier,)] for tier in ("host", "disk")}
    assert by_tier["disk"] > 12, "one prompt of three whole blocks, and more of another"
    assert by_tier == {tier: reported[CacheHitSource(tier)] for tier in by_tier}
    assert hits() - before == reported
    block = full().page_size_bytes
    loaded = found[MetricName.TIER_BYTES, ("host", "load")]
    assert loaded == found[MetricName.LOAD_BLOCKS, ()] * block == sum(by_tier.values()) / 4 * block
    assert found[MetricName.TIER_BYTES, ("disk", "load")] == by_tier["disk"] / 4 * block
    assert found[MetricName.TIER_WAITS, ("disk",)] == 2
    assert found[MetricName.TIER_WAITS, ("host",)] == sum(
        1 for request in requests if rig.ends[request.request_id].prefill_stats.num_external_cached_tokens
    )
    assert found[MetricName.TIER_FAILED_BLOCKS, ("host", "load")] == 0
    rig.close()


def test_met_01_what_a_preempted_request_loads_back_is_no_hit() -> None:
    rig = Rig(device_blocks=16)
    request = rig.add(prompt(13), max_tokens=6)
    for _ in range(3):
        rig.step()
    assert rig.in_tier(request)[:3] == [0, 1, 2]
    rig.scheduler._preempt_request(request, 0.0)
    taken = rig.scheduler.kv_cache_manager.block_pool.get_new_blocks(15)  # nothing of it stays on the device
    rig.scheduler.kv_cache_manager.block_pool.free_blocks(taken)
    rig.run()
    rig.check_output(request)
    assert rig.manager.load_side.ledger.done >= 3, "its own blocks came back from below"
    figures = totals(rig)
    assert figures[MetricName.LOOKUP_TOKENS, ()] == 12
    assert figures[MetricName.ACCEPTED_TOKENS, ("host",)] == 0
    assert figures[MetricName.RESUMED_HIT_TOKENS, ()] >= 12


def test_met_02_waiting_requests_are_counted_once() -> None:
    rig = Rig(device_blocks=8)
    holder = rig.add(prompt(17), max_tokens=8)
    rig.step()
    asker = rig.add(prompt(13, seed=1), max_tokens=1)
    for _ in range(4):
        rig.step()
    assert asker.num_computed_tokens == 0, "it asks in every step and finds no room"
    rig.run()
    assert holder.is_finished()
    assert totals(rig)[MetricName.LOOKUP_TOKENS, ()] == 16 + 12
    assert not rig.manager._asked
