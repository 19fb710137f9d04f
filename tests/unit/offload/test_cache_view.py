"""Look-ups that leave no trace and say what a request would get; reports whose numbers add up; resets told by tier."""

from __future__ import annotations

import copy
import random
from pathlib import Path
from typing import Any

import pytest

from tests.helpers.offload_rig import BLOCK, Rig, full, mamba, prompt, ring, window
from vllm.config import KVTransferConfig
from vllm.distributed.kv_transfer.kv_connector.v1.base import SchedulerHalf
from vllm.v1.core.block_pool import BlockPool
from vllm.v1.core.invariants import check_invariants, pool_problems
from vllm.v1.kv_cache_report import CacheLookup, KVCacheReport, TransferReport
from vllm.v1.metrics.cache_hit_source import CacheHitSource
from vllm.v1.metrics.stats import PrefixCacheStats
from vllm.v1.request import Request

DEVICE, HOST, DISK = CacheHitSource.DEVICE, CacheHitSource.HOST, CacheHitSource.DISK
SPECS = {"full": [full()], "window": [full(), window()], "state": [full(), mamba()], "ring": [full(), ring()]}


def peek(rig: Rig, tokens: list[int], **fields: Any) -> CacheLookup:
    """Look a prompt up; the request is known to nobody else."""
    request = rig.make_request(tokens, **fields)
    return rig.scheduler.peek_kv_cache(request)


def trace(rig: Rig) -> list[object]:
    """Everything that a look-up must not change."""

    def pool_state(pool: BlockPool) -> object:
        return (
            [block.block_id for block in pool.free_block_queue.get_all_free_blocks()],
            [(block.ref_cnt, block.block_hash) for block in pool.blocks],
            len(pool.leases),
            len(pool.kv_event_queue),
            (pool.index.num_blocks, pool.num_evicted),
        )

    scheduler, manager = rig.scheduler, rig.manager
    return copy.deepcopy(
        [
            pool_state(scheduler.kv_cache_manager.block_pool),
            pool_state(manager.tier.pool),
            [(request_id, promise.num_tokens) for request_id, promise in manager.promises],
            vars(manager.reporter),
            scheduler.kv_cache_manager.prefix_cache_stats,
            scheduler.connector_prefix_cache_stats,
            scheduler.cache_use,
            scheduler.get_request_counts(),
            list(scheduler.requests),
            manager.store_side.ledger,
        ]
    )


def report(rig: Rig) -> KVCacheReport:
    return rig.scheduler.get_kv_cache_report()


def transfers(rig: Rig, tier: CacheHitSource = HOST) -> dict[str, TransferReport]:
    return {t.direction: t for t in report(rig).transfers if t.tier is tier}


def cached(request: Request, rig: Rig) -> dict[CacheHitSource, int]:
    return dict(rig.reported[request.request_id])


class Reporting(Rig):
    """Remembers what every request reported with its first output, and the sums of the interval statistics."""

    def __post_init__(self) -> None:
        super().__post_init__()
        self.reported: dict[str, dict[CacheHitSource, int]] = {}
        self.metrics = {"queries": 0, "hits": 0, "external_queries": 0, "external_hits": 0}
        self.scheduler.log_stats = True
        self.scheduler.kv_cache_manager.prefix_cache_stats = PrefixCacheStats()
        self.scheduler.connector_prefix_cache_stats = PrefixCacheStats()

    def _collect(self, messages: dict[int, Any]) -> None:
        for message in messages.values():
            if message.scheduler_stats is not None:
                local = message.scheduler_stats.prefix_cache_stats
                below = message.scheduler_stats.connector_prefix_cache_stats
                self.metrics["queries"] += local.queries
                self.metrics["hits"] += local.hits
                self.metrics["external_queries"] += below.queries
                self.metrics["external_hits"] += below.hits
            for output in message.outputs:
                if output.prefill_stats is not None:
                    stats = output.prefill_stats
                    assert sum(stats.cached_tokens_by_source.values()) == stats.num_cached_tokens
                    self.reported[output.request_id] = stats.cached_tokens_by_source
        super()._collect(messages)


# --- look-ups -----------------------------------------------------------------------------------------------------


def test_a_prompt_is_found_on_the_device_then_on_the_host_then_nowhere() -> None:
    rig = Rig()
    tokens = prompt(4 * BLOCK + 1)
    assert peek(rig, tokens) == CacheLookup(17, 0, {DEVICE: 0, HOST: 0}, {DEVICE: 0, HOST: 0})
    rig.generate(tokens)
    assert peek(rig, tokens) == CacheLookup(17, 16, {DEVICE: 16, HOST: 0}, {DEVICE: 16, HOST: 16})
    assert rig.scheduler.reset_prefix_cache()
    assert peek(rig, tokens) == CacheLookup(17, 16, {DEVICE: 0, HOST: 16}, {DEVICE: 0, HOST: 16})
    assert rig.scheduler.reset_prefix_cache(reset_connector=True)
    assert peek(rig, tokens).cached_tokens == 0
    rig.assert_at_rest()


def test_a_prompt_can_lie_on_both_tiers() -> None:
    rig = Rig()
    tokens = prompt(4 * BLOCK + 1)
    rig.generate(tokens)
    rig.scheduler.reset_prefix_cache()
    rig.generate(tokens[: 2 * BLOCK + 1])
    found = peek(rig, tokens)
    assert found.cached_tokens_by_source == {DEVICE: 2 * BLOCK, HOST: 2 * BLOCK}
    assert found.tokens_by_tier == {DEVICE: 2 * BLOCK, HOST: 4 * BLOCK}


def test_salts_keep_prompts_apart() -> None:
    rig = Rig()
    tokens = prompt(3 * BLOCK + 1)
    rig.generate(tokens, cache_salt="a")
    assert peek(rig, tokens, cache_salt="a").cached_tokens == 12
    assert peek(rig, tokens).cached_tokens == peek(rig, tokens, cache_salt="b").cached_tokens == 0


@pytest.mark.parametrize("specs", SPECS)
@pytest.mark.parametrize("lazy", [False, True])
def test_a_look_up_says_what_the_request_then_reports_and_leaves_no_trace(specs: str, lazy: bool) -> None:
    rng = random.Random(f"{specs}{lazy}")
    rig = Reporting(SPECS[specs], device_blocks=24, host_blocks=20, lazy=lazy, events=True)
    seen: set[tuple[bool, bool]] = set()
    for _ in range(60):
        tokens = prompt(rng.randint(1, 6 * BLOCK), seed=rng.randint(0, 2))
        before = trace(rig)
        found = peek(rig, tokens)
        assert trace(rig) == before
        assert found.complete
        assert found.prompt_tokens == len(tokens)
        assert sum(found.cached_tokens_by_source.values()) == found.cached_tokens < len(tokens)
        request = rig.generate(tokens, max_tokens=rng.randint(1, 3))
        assert cached(request, rig) == found.cached_tokens_by_source
        seen.add((found.cached_tokens_by_source[DEVICE] > 0, found.cached_tokens_by_source[HOST] > 0))
        if rng.random() < 0.3:
            rig.scheduler.reset_prefix_cache(reset_connector=rng.random() < 0.2)
    assert {(True, False), (False, False)} <= seen
    assert lazy or (False, True) in seen
    check_invariants(rig.scheduler.kv_cache_manager, at_rest=True)
    assert pool_problems(rig.manager.tier.pool) == []
    rig.assert_at_rest()


def test_a_look_up_beside_running_requests_and_copies_changes_nothing() -> None:
    rig = Rig(device_blocks=24, host_blocks=20)
    rig.generate(prompt(13))
    rig.scheduler.reset_prefix_cache()
    rig.add(prompt(13), 6)
    rig.add(prompt(17, seed=1), 6)
    for _ in range(12):
        output = rig.scheduler.schedule()
        before = trace(rig)
        for seed in (0, 1, 2):
            peek(rig, prompt(21, seed=seed))
        assert trace(rig) == before
        rig.finish_step(output, copies=False)
    rig.run()
    rig.assert_at_rest()


def multi(folder: Path) -> KVTransferConfig:
    child = {"kv_connector": "SimpleCPUOffloadConnector", "kv_role": "kv_both"}
    disk = {"kv_offload_backend": "disk", "disk_path": f"{folder}/kv", "disk_capacity_bytes": 1 << 20}
    children = [{"num_cpu_blocks": 4}, {**disk, "use_page_cache": True, "num_cpu_blocks": 48}]
    connectors = [{**child, "kv_connector_extra_config": extra} for extra in children]
    return KVTransferConfig(
        kv_connector="MultiConnector",
        kv_role="kv_both",
        kv_connector_extra_config={"connectors": connectors},
    )


def test_several_tiers_below_are_told_apart(tmp_path: Path) -> None:
    rig = Reporting(connector_config=multi(tmp_path), held=False)
    try:
        tokens = prompt(6 * BLOCK + 1)
        rig.generate(tokens)
        rig.scheduler.reset_prefix_cache()
        found = peek(rig, tokens)
        # The host has room for three blocks; it is asked first and offers what it has.
        assert found.tokens_by_tier == {DEVICE: 0, HOST: 3 * BLOCK, DISK: 6 * BLOCK}
        assert found.cached_tokens_by_source == {DEVICE: 0, HOST: 3 * BLOCK, DISK: 0}
        assert cached(rig.generate(tokens), rig) == found.cached_tokens_by_source
        assert [pool.tier for pool in report(rig).pools] == [DEVICE, HOST, DISK]
        assert [hit.tier for hit in report(rig).hits] == [DEVICE, HOST, DISK]
        assert report(rig).modes == {HOST: "eager", DISK: "eager"}
    finally:
        rig.close()


def test_a_connector_that_cannot_tell_is_said_to_be_missing(monkeypatch: pytest.MonkeyPatch) -> None:
    rig = Rig()
    tokens = prompt(13)
    rig.generate(tokens)
    monkeypatch.setattr(type(rig.connector), "peek_matched_tokens", SchedulerHalf.peek_matched_tokens)
    found = peek(rig, tokens)
    assert found == CacheLookup(13, 12, {DEVICE: 12}, {DEVICE: 12}, complete=False)


# --- reports ------------------------------------------------------------------------------------------------------


def balanced(t: TransferReport) -> bool:
    ended = t.blocks_done + t.blocks_failed + t.blocks_dropped
    return t.blocks_scheduled == t.blocks_in_flight + ended and t.blocks_in_flight >= 0


def test_a_report_counts_blocks_hits_and_bytes() -> None:
    rig = Rig(device_blocks=32, host_blocks=40, ranks=2)
    tokens = prompt(4 * BLOCK + 1)
    rig.generate(tokens, max_tokens=1)
    rig.scheduler.reset_prefix_cache()
    rig.generate(tokens, max_tokens=1)
    told = report(rig)
    device, host = told.pools
    assert (device.tier, device.medium, device.blocks_total) == (DEVICE, "GPU", 31)
    assert (host.tier, host.medium, host.blocks_total, host.blocks_cached) == (HOST, "CPU", 39, 4)
    assert (device.blocks_free, device.blocks_held, device.blocks_cached) == (31, 0, 4)
    assert [(hit.tier, hit.tokens_asked, hit.tokens_hit) for hit in told.hits] == [
        (DEVICE, 34, 0),
        (HOST, 34, 16),
    ]
    page = rig.kv_config.kv_cache_tensors[0].size // 32
    assert device.block_bytes == host.block_bytes == 2 * page
    moved = transfers(rig)
    assert (moved["store"].blocks_done, moved["load"].blocks_done) == (4, 4)
    assert moved["store"].bytes_done == moved["load"].bytes_done == 4 * 2 * page
    assert all(map(balanced, told.transfers))
    assert (told.pending_store_blocks, told.requests.admitted, told.block_size) == (0, 2, BLOCK)
    assert (told.prefix_caching, told.modes) == (True, {HOST: "eager"})


def test_copies_in_flight_are_counted_until_they_end() -> None:
    rig = Rig()
    tokens = prompt(4 * BLOCK + 1)
    rig.add(tokens, 3)
    while not transfers(rig)["store"].blocks_in_flight:
        rig.step(copies=False)
    assert report(rig).pending_store_blocks == transfers(rig)["store"].blocks_in_flight == 4
    assert report(rig).pools[1].blocks_held == 4
    rig.run()
    assert transfers(rig)["store"].blocks_in_flight == 0
    rig.scheduler.reset_prefix_cache()
    rig.add(tokens, 1)
    rig.step(copies=False)
    assert (transfers(rig)["load"].blocks_in_flight, report(rig).requests.loading) == (4, 1)
    rig.run()
    assert (transfers(rig)["load"].blocks_done, report(rig).requests.loading) == (4, 0)


def test_loads_that_nobody_wants_any_more_are_counted_as_dropped() -> None:
    rig = Rig()
    tokens = prompt(4 * BLOCK + 1)
    rig.generate(tokens)
    rig.scheduler.reset_prefix_cache()
    request = rig.add(tokens)
    rig.step(copies=False)
    rig.abort(request)
    rig.scheduler.reset_prefix_cache(reset_connector=True)
    rig.run()
    load = transfers(rig)["load"]
    assert (load.blocks_scheduled, load.blocks_dropped, load.blocks_done) == (4, 4, 0)
    assert balanced(load)


def test_copies_that_fail_are_counted_as_failed_and_the_second_try_as_done() -> None:
    rig = Reporting()
    tokens = prompt(4 * BLOCK + 1)
    rig.generate(tokens)
    rig.scheduler.reset_prefix_cache()
    rig.mover().fail_next = [RuntimeError("lane died")]
    request = rig.generate(tokens)
    load, store = transfers(rig)["load"], transfers(rig)["store"]
    assert (load.blocks_failed, load.blocks_done, load.blocks_in_flight) == (4, 0, 0)
    assert balanced(load)
    assert balanced(store)
    # The tokens of the failed load were computed after all, and are not reported as cached.
    assert cached(request, rig) == {DEVICE: 0, HOST: 0}


def test_blocks_taken_for_new_content_are_counted_on_both_tiers() -> None:
    rig = Rig(device_blocks=8, host_blocks=8)
    for seed in range(4):
        rig.generate(prompt(5 * BLOCK + 1, seed=seed), max_tokens=1)
    device, host = report(rig).pools
    assert device.blocks_evicted > 0
    assert host.blocks_evicted == rig.manager.tier.evictions > 0


def test_groups_say_what_they_are_for() -> None:
    rig = Rig([full(), window(), ring()])
    groups = report(rig).groups
    assert [(g.group, g.kind, g.use, g.sliding_window) for g in groups] == [
        (0, "full_attention", "cache", None),
        (1, "sliding_window", "cache", 8),
        (2, "unknown", "scratch", None),
    ]
    assert [g.block_size for g in groups] == [spec.block_size for spec in rig.specs]
    assert all(g.num_layers == 1 and g.block_bytes > 0 for g in groups)


@pytest.mark.parametrize("specs", SPECS)
def test_numbers_add_up_after_random_work(specs: str) -> None:
    rng = random.Random(specs)
    rig = Reporting(SPECS[specs], device_blocks=20, host_blocks=14)
    totals: dict[CacheHitSource, int] = {}
    for _ in range(40):
        rig.add(prompt(rng.randint(1, 5 * BLOCK), seed=rng.randint(0, 3)), rng.randint(1, 4))
        for _ in range(rng.randint(0, 3)):
            rig.step(copies=rng.random() < 0.5)
        assert all(map(balanced, report(rig).transfers))
    rig.run()
    for by_source in rig.reported.values():
        for source, tokens in by_source.items():
            totals[source] = totals.get(source, 0) + tokens
    told = report(rig)
    device, host = told.hits
    assert rig.metrics == {
        "queries": device.tokens_asked,
        "hits": device.tokens_hit,
        "external_queries": host.tokens_asked,
        "external_hits": host.tokens_hit,
    }
    assert {hit.tier: hit.tokens_hit for hit in told.hits} == totals
    assert told.requests.admitted == len(rig.reported)
    for pool in told.pools:
        assert pool.blocks_free + pool.blocks_held == pool.blocks_total
        assert pool.blocks_held == 0


# --- resets -------------------------------------------------------------------------------------------------------


def resets(rig: Rig) -> dict[str, dict[str, Any]]:
    told = rig.scheduler.reset_prefix_cache_report
    assert told is not None
    return {tier.pop("tier"): tier for tier in told["tiers"]}


def test_a_reset_says_what_became_of_each_tier() -> None:
    rig = Rig()
    rig.generate(prompt(4 * BLOCK + 1), max_tokens=1)
    assert rig.scheduler.reset_prefix_cache()
    counts = {"blocks_dropped": 0, "blocks_held": 0, "blocks_cached": 4, "reason": None}
    kept = {"asked": False, "success": None, **counts}
    emptied = {"asked": True, "success": True, **counts, "blocks_dropped": 4, "blocks_cached": 0}
    assert resets(rig) == {DEVICE: emptied, HOST: kept}
    assert rig.scheduler.reset_prefix_cache(reset_connector=True)
    assert resets(rig) == {DEVICE: {**emptied, "blocks_dropped": 0}, HOST: emptied}


def test_a_reset_in_flight_says_which_tier_still_holds_blocks() -> None:
    rig = Rig()
    request = rig.add(prompt(4 * BLOCK + 1), 3)
    while not transfers(rig)["store"].blocks_in_flight:
        rig.step(copies=False)
    assert not rig.scheduler.reset_prefix_cache(reset_connector=True)
    told = resets(rig)
    assert (told[HOST]["success"], told[HOST]["blocks_held"], told[HOST]["blocks_cached"]) == (False, 4, 0)
    assert (told[DEVICE]["success"], told[DEVICE]["blocks_cached"]) == (False, 0)
    assert told[DEVICE]["blocks_held"] >= 4
    rig.run()
    rig.check_output(request)
    rig.assert_at_rest()
