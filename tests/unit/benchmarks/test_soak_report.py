"""The soak run's judgement: memory that grows, blocks that stay held and sums that do not add up are seen."""

from __future__ import annotations

import json
import os
import random
from pathlib import Path
from typing import Any

import pytest

from benchmarks import soak_server
from benchmarks.soak import Soak, parse
from benchmarks.soak_report import Life, Tally, finish, memory_verdict
from benchmarks.soak_server import (
    KEPT,
    REPLICAS,
    SHARED,
    TIERS,
    Knobs,
    check_metrics,
    check_stats,
    pool_name,
    segments,
)
from vllm.v1.simple_kv_offload.options import parse_options


def life(minutes: float, mib_per_min: float, warm_up_mib: float = 0.0) -> Life:
    """One sample per second; the engine grows, by `warm_up_mib` more in the first half minute; allocator noise on top."""
    chance = random.Random(1)
    made = Life("knobs", "SIGTERM")
    for second in range(round(minutes * 60)):
        grown = 300 + mib_per_min * second / 60 + warm_up_mib * min(second, 30) / 30 + chance.random()
        made.samples.append((float(second), 270.0, grown))
    return made


@pytest.mark.parametrize(
    ("minutes", "slope", "fine"), [(12, 0.0, True), (12, 4.9, False), (12, 1.5, False), (4, 60.0, True)]
)
def test_memory_is_judged_after_the_warm_up_of_a_long_life(minutes: float, slope: float, fine: bool) -> None:
    tally = Tally(lives=[life(2, 0.0), life(minutes, slope, warm_up_mib=80.0)])
    good, text = memory_verdict(tally, 1.0)
    assert good is fine
    assert ("not judged" in text) == (minutes == 4)
    slopes = tally.lives[1].slopes()
    assert slopes is None or slopes == (0.0, pytest.approx(slope, abs=0.1))


def test_memory_of_every_long_life_is_judged() -> None:
    shared = life(8, 0.0)
    shared.knobs = "shared pool, eager"
    tally = Tally(lives=[life(12, 0.0), shared, life(2, 50.0)])
    good, text = memory_verdict(tally, 1.0)
    assert good
    assert text.endswith("in 'shared pool'")
    shared.samples = life(8, 3.0).samples
    good, text = memory_verdict(tally, 1.0)
    assert not good


def test_the_verdict_is_the_last_line_and_in_the_file(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    tally = Tally(lives=[life(12, 0.0)])
    assert finish(tally, 1.0, tmp_path, {"seed": 0})
    assert "VERDICT: PASS" in capsys.readouterr().out.splitlines()[-1]
    tally.fault("a block is held")
    assert not finish(tally, 1.0, tmp_path, {"seed": 0})
    assert "VERDICT: FAIL: 1 faults" in capsys.readouterr().out.splitlines()[-1]
    data = json.loads((tmp_path / "soak.json").read_text())
    assert (data["good"], data["faults"]) == (False, ["a block is held"])
    assert (tmp_path / "soak.png").stat().st_size > 0


def idle_stats() -> dict[str, Any]:
    pool = {"tier": "device", "blocks_total": 8, "blocks_free": 8, "blocks_held": 0}
    copies = {
        "blocks_scheduled": 5,
        "blocks_in_flight": 0,
        "blocks_done": 3,
        "blocks_failed": 1,
        "blocks_dropped": 1,
    }
    tier = {"tier": "device", "tokens_asked": 100, "tokens_hit": 64}
    requests = {"running": 0, "waiting": 0, "loading": 0, "admitted": 9}
    parts = {"pools": [pool], "transfers": [copies], "tiers": [tier]}
    return parts | {"pending_store_blocks": 0, "requests": requests}


def test_an_idle_server_that_holds_nothing_is_fine() -> None:
    assert check_stats(idle_stats()) == []


@pytest.mark.parametrize(
    ("part", "changes", "word"),
    [
        ("pools", {"blocks_held": 1, "blocks_free": 7}, "held"),
        ("pools", {"blocks_free": 7}, "add up"),
        ("transfers", {"blocks_done": 4}, "add up"),
        ("transfers", {"blocks_in_flight": 1, "blocks_done": 2}, "never end"),
        ("tiers", {"tokens_hit": 101}, "more hits"),
    ],
)
def test_what_is_wrong_with_an_idle_server_is_told(part: str, changes: dict[str, int], word: str) -> None:
    stats = idle_stats()
    stats[part][0] |= changes
    faults = check_stats(stats)
    assert len(faults) == 1
    assert word in faults[0]


SUMS = {
    "vllm:kv_cache_usage_perc": 0.0,
    "vllm:prompt_tokens_total": 100.0,
    "vllm:prefix_cache_hits_total": 50.0,
    "vllm:prefix_cache_queries_total": 120.0,
    "vllm:external_prefix_cache_hits_total": 20.0,
    "vllm:external_prefix_cache_queries_total": 70.0,
    "vllm:prompt_tokens_cached_total": 48.0,
    "vllm:prompt_tokens_cached_by_source_total": 48.0,
    "vllm:simple_kv_offload_tier_hit_tokens_total": 16.0,
}


@pytest.mark.parametrize(
    ("name", "value", "word"),
    [
        ("", 0, ""),
        ("vllm:kv_cache_usage_perc", 0.1, "usage"),
        ("vllm:prompt_tokens_total", 40, "cached of"),
        ("vllm:prompt_tokens_cached_by_source_total", 64, "by tier 64"),
        ("vllm:prompt_tokens_cached_total", 64, "64 cached tokens"),
        ("vllm:simple_kv_offload_tier_hit_tokens_total", 32, "below the device"),
        ("vllm:external_prefix_cache_hits_total", 71, "external_prefix_cache"),
    ],
)
def test_what_does_not_add_up_is_told(name: str, value: float, word: str) -> None:
    tiers = [{"tier": "device", "tokens_reported": 32}, {"tier": "host", "tokens_reported": 16}]
    faults = check_metrics({**SUMS, name: value}, tiers)
    assert len(faults) == (word != "")
    assert all(word in fault for fault in faults)


@pytest.mark.parametrize("tier", TIERS)
def test_drawn_knobs_are_settings_that_the_connector_takes(tier: str, tmp_path: Path) -> None:
    for seed in range(20):
        flags = Knobs.draw(random.Random(seed), tier).flags(tmp_path / "kv")
        config = json.loads(flags[flags.index("--kv-transfer-config") + 1])
        options = parse_options(config["kv_connector_extra_config"], 1)
        assert options.disk_persist == (tier == KEPT)
        assert options.shared_pool == (pool_name(tmp_path / "kv") if tier in (SHARED, REPLICAS) else None)
        assert ("--data-parallel-size" in flags) == (tier == REPLICAS)
        assert (options.is_disk, options.disk_tier) == (tier == "disk backend", tier in ("disk tier", KEPT))


def test_shared_memory_that_is_left_is_found_by_the_pools_name(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(soak_server, "SHARED_MEMORY", tmp_path)
    mine = tmp_path / f"vllm-kv-0-{pool_name(Path('kv-7'))}-0123456789abcdef"
    for path in (mine, tmp_path / "vllm-kv-0-other-0123456789abcdef"):
        path.touch()
    assert segments(pool_name(Path("kv-7"))) == segments(f"soak-{os.getpid()}-") == [mine]
    assert segments(pool_name(Path("kv-8"))) == []


@pytest.mark.parametrize("minutes", [6.0, 30.0])
def test_every_form_has_a_life_in_a_run_of_this_length(minutes: float, tmp_path: Path) -> None:
    args = parse(["--minutes", str(minutes)])
    soak = Soak(tmp_path, args, tmp_path)
    shares: dict[str, float] = {}
    for turn in range(len(TIERS)):
        knobs = soak.knobs(turn)
        for again in ("", " again") if knobs.tier == KEPT else ("",):
            shares[knobs.tier + again] = soak.share(len(shares), knobs)
            soak.tally.lives.append(Life(str(knobs)))
    assert {name.removesuffix(" again") for name in shares} == set(TIERS)
    assert sum(shares.values()) < 1.0
    lengths = {name: share * minutes * 60 for name, share in shares.items()}
    if minutes == 30.0:
        for name in (KEPT, SHARED):
            samples = [(float(second), 1.0, 1.0) for second in range(int(lengths[name]))]
            assert Life(name, samples=samples).slopes() is not None, "long enough to tell about memory"
    assert min(lengths.values()) >= 20.0
