"""Retention hints of requests on a whole scheduler with a tier below: what is kept, where, for how long."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from tests.helpers.offload_rig import BLOCK, Rig, full, mamba, prompt, ring, window
from vllm.v1.core.block_retention import BlockRetention
from vllm.v1.core.invariants import pool_problems
from vllm.v1.request import Request

SPECS = {"full": [full()], "hybrid": [full(), window(), mamba(), ring(6)]}


def ask(rig: Rig, tokens: list[int], hint: dict[str, Any] | None = None, max_tokens: int = 1) -> Request:
    """Run one request with a hint."""
    request = rig.make_request(tokens, max_tokens, hint=hint)
    rig.scheduler.add_request(request)
    rig.run()
    rig.check_output(request)
    return request


def device_of(rig: Rig) -> BlockRetention:
    placer = rig.scheduler.kv_cache_manager.block_pool.placer
    assert isinstance(placer, BlockRetention)
    return placer


def tier_of(rig: Rig) -> BlockRetention:
    placer = rig.manager.tier.pool.placer
    assert isinstance(placer, BlockRetention)
    return placer


def cached(rig: Rig, tokens: list[int]) -> dict[str, int]:
    """Tokens that each tier holds of a prompt, seen without touching anything."""
    found = rig.scheduler.peek_kv_cache(rig.make_request(tokens))
    assert found is not None
    return {str(source.value): count for source, count in found.tokens_by_tier.items()}


@pytest.mark.parametrize("specs", list(SPECS))
def test_a_pinned_prompt_outlives_a_flood_in_both_tiers(specs: str) -> None:
    rig = Rig(SPECS[specs], device_blocks=60, host_blocks=60)
    rig.config.cache_config.kv_retention_share = 0.6
    ask(rig, prompt(25), {"pin": True})
    ask(rig, prompt(25, 1))
    for seed in range(2, 12):
        ask(rig, prompt(25, seed))
    assert cached(rig, prompt(25)) == {"device": 24, "host": 24}
    assert cached(rig, prompt(25, 1)) == {"device": 0, "host": 0}
    assert device_of(rig).num_refused == tier_of(rig).num_refused == 0
    rig.assert_at_rest()
    assert not pool_problems(rig.manager.tier.pool)


@pytest.mark.parametrize("below", ["lazy", "disk"])
def test_a_copy_does_not_unpin_what_it_copies(below: str, tmp_path: Path) -> None:
    """Copied blocks go back to the front of the queue, as they are the next to be evicted; what is pinned is not."""
    disk = {
        "disk_tier": True, "disk_path": str(tmp_path / "kv"), "disk_capacity_bytes": 1 << 16, "use_page_cache": True,
    }  # fmt: skip
    rig = Rig(
        device_blocks=30, host_blocks=30, lazy=below == "lazy", held=below == "lazy",
        extra=disk if below == "disk" else {},
    )  # fmt: skip
    rig.config.cache_config.kv_retention_share = 0.6
    for seed in range(2, 5):
        ask(rig, prompt(25, seed))
    ask(rig, prompt(25), {"pin": True})
    for seed in range(6, 9):
        ask(rig, prompt(25, seed))
    found = cached(rig, prompt(25))
    assert (found["device"], found["host"]) == (24, 24)
    rig.close()


def test_pins_never_hold_up_an_admission() -> None:
    rig = Rig(device_blocks=12, host_blocks=12)
    rig.config.cache_config.kv_retention_share = 1.0
    for seed in range(6):
        ask(rig, prompt(25, seed), {"pin": True})
    # Far more than the pool was pinned, and a request that needs all of it runs.
    big = ask(rig, prompt(4 * 10, 9), max_tokens=3)
    assert len(rig.outputs[big.request_id]) == 3
    assert device_of(rig).num_refused == 0
    assert device_of(rig).num_protected <= device_of(rig).limit == 11
    rig.assert_at_rest()


def test_beyond_the_share_pins_are_refused_and_counted() -> None:
    rig = Rig(device_blocks=41, host_blocks=41)
    rig.config.cache_config.kv_retention_share = 0.25
    for seed in range(3):
        ask(rig, prompt(25, seed), {"pin": True})
    report = rig.scheduler.get_kv_cache_report()
    assert report is not None
    assert len(report.pools) == 2
    for pool in report.pools:
        assert (pool.entries_protected, pool.entries_protected_max) == (10, 10)
        assert pool.protections_refused == 8
    for seed in range(5, 15):
        ask(rig, prompt(25, seed))
    assert cached(rig, prompt(25)) == {"device": 24, "host": 24}
    rig.scheduler.log_stats = True
    for refused in (8, 0):
        stats = rig.scheduler.make_stats()
        assert stats is not None
        assert (stats.num_protected_contents, stats.num_protections_refused) == (10, refused)


def test_time_is_that_of_the_schedulers_clock() -> None:
    rig = Rig(device_blocks=30, host_blocks=30)
    rig.config.cache_config.kv_retention_share = 0.5
    rig.manager.clock = rig.clock
    ask(rig, prompt(25), {"priority": "high", "ttl": "1m"})
    for seed in range(1, 6):
        ask(rig, prompt(25, seed))
    assert cached(rig, prompt(25)) == {"device": 24, "host": 24}
    rig.clock.now += 61
    ask(rig, prompt(25, 7))
    assert cached(rig, prompt(25)) == {"device": 0, "host": 0}
    assert cached(rig, prompt(25, 5)) == {"device": 24, "host": 24}


def test_low_priority_makes_room_for_others_first() -> None:
    rig = Rig(device_blocks=26, host_blocks=25)
    for seed in range(3):
        ask(rig, prompt(25, seed), {"priority": "low"} if seed == 2 else None)
    ask(rig, prompt(25, 3))
    ask(rig, prompt(25, 4))
    assert cached(rig, prompt(25, 2)) == {"device": 0, "host": 0}
    assert cached(rig, prompt(25)) == {"device": 24, "host": 24}


def test_low_priority_does_not_degrade_what_was_there_before() -> None:
    rig = Rig(device_blocks=17, host_blocks=17)
    shared = prompt(13)
    ask(rig, shared)
    ask(rig, [*shared, *prompt(8, 2)], {"priority": "low"})
    ask(rig, prompt(25, 3))
    ask(rig, prompt(25, 4))
    assert cached(rig, [*shared, *prompt(8, 2)])["device"] == 12


def test_a_newer_version_frees_the_old_one_at_once() -> None:
    rig = Rig(device_blocks=23, host_blocks=23)
    rig.config.cache_config.kv_retention_share = 1.0
    system = prompt(9)
    ask(rig, [*system, *prompt(16, 1)], {"pin": True, "id": "agent"})
    ask(rig, [*system, *prompt(16, 2)], {"pin": True, "id": "agent"})
    ask(rig, prompt(40, 3))
    ask(rig, prompt(25, 4))
    assert cached(rig, [*system, *prompt(16, 2)]) == {"device": 24, "host": 24}
    assert cached(rig, [*system, *prompt(16, 1)]) == {"device": 8, "host": 8}
    # Two shared blocks and four of the new version.
    assert device_of(rig).num_protected == tier_of(rig).num_protected == 6


def test_requests_that_fail_or_never_ran_keep_nothing() -> None:
    rig = Rig()
    bad = rig.add(prompt(25), max_tokens=2, hint={"pin": True})
    rig.step(nan=[bad.request_id])
    rig.run()
    rig.abort(rig.add(prompt(25, 1), max_tokens=2, hint={"pin": True}))
    rig.run()
    assert rig.scheduler.kv_cache_manager.block_pool.placer is None
    assert rig.manager.tier.pool.placer is None


def test_a_reset_ends_every_claim() -> None:
    rig = Rig()
    ask(rig, prompt(25), {"pin": True})
    assert rig.scheduler.reset_prefix_cache(reset_connector=True)
    assert device_of(rig).num_protected == tier_of(rig).num_protected == 0


def test_without_hints_there_is_nothing() -> None:
    rig = Rig()
    ask(rig, prompt(25))
    assert rig.scheduler.kv_cache_manager.block_pool.placer is None
    assert rig.manager.tier.pool.placer is None
    assert BLOCK == 4


def test_copies_that_arrive_after_the_end_are_kept_too() -> None:
    rig = Rig(device_blocks=40, host_blocks=21)
    rig.config.cache_config.kv_retention_share = 0.5
    request = rig.add(prompt(25), max_tokens=1, hint={"pin": True})
    rig.step(copies=False)
    rig.step(copies=False)
    assert request.is_finished()
    assert rig.in_tier(request) == []
    rig.run()
    for seed in range(1, 8):
        ask(rig, prompt(25, seed))
    assert rig.in_tier(request) == list(range(6))


def test_without_prefix_caching_a_hint_is_about_nothing() -> None:
    rig = Rig(held=False, config_changes={"caching": False})
    rig.add(prompt(25), hint={"pin": True})
    rig.run()
    assert rig.scheduler.kv_cache_manager.block_pool.placer is None
