"""Cached tokens by tier: splitting, clamping and adding up."""

from __future__ import annotations

import msgspec
import pytest

from vllm.v1.messages import EngineCoreOutput
from vllm.v1.metrics.cache_hit_source import CacheHitSource, limit_by_source
from vllm.v1.metrics.stats import CacheUse, PrefillStats

DEVICE, HOST, DISK = CacheHitSource.DEVICE, CacheHitSource.HOST, CacheHitSource.DISK
UNKNOWN = CacheHitSource.EXTERNAL_UNSPECIFIED


@pytest.mark.parametrize(
    ("tokens", "limit", "expected"),
    [
        ({HOST: 32, DISK: 16}, 48, {HOST: 32, DISK: 16}),
        ({DISK: 16, HOST: 32}, 40, {HOST: 32, DISK: 8}),
        ({HOST: 32, DISK: 16}, 0, {HOST: 0, DISK: 0}),
        ({HOST: 32}, 40, {HOST: 32, UNKNOWN: 8}),
        ({UNKNOWN: 4}, 6, {UNKNOWN: 6}),
        ({HOST: -3}, 2, {HOST: 0, UNKNOWN: 2}),
        ({}, -1, {}),
    ],
)
def test_inner_tiers_keep_their_tokens_first(
    tokens: dict[CacheHitSource, int], limit: int, expected: dict[CacheHitSource, int]
) -> None:
    assert limit_by_source(tokens, limit) == expected
    assert sum(expected.values()) == max(0, limit)


@pytest.mark.parametrize("external", [None, {HOST: 8448}, {HOST: 0, DISK: 40}])
@pytest.mark.parametrize("figures", [(100, 768, 8448), (100, -5, 40), (40, 32, 4), (8, 0, 0)])
def test_met_04_tiers_add_up_to_the_cached_tokens_and_are_never_negative(
    external: dict[CacheHitSource, int] | None, figures: tuple[int, int, int]
) -> None:
    stats = PrefillStats()
    stats.set(*figures, external)
    assert sum(stats.cached_tokens_by_source.values()) == stats.num_cached_tokens
    assert all(tokens >= 0 for tokens in stats.cached_tokens_by_source.values())
    assert stats.cached_tokens_by_source[DEVICE] == stats.num_local_cached_tokens


def test_tiers_survive_the_wire() -> None:
    stats = PrefillStats()
    stats.set(64, 32, 16, {HOST: 16, DISK: 0})
    sent = msgspec.msgpack.encode(EngineCoreOutput("r", [1], prefill_stats=stats))
    got = msgspec.msgpack.decode(sent, type=EngineCoreOutput).prefill_stats
    assert got == stats
    assert got is not None
    assert got.cached_tokens_by_source == {DEVICE: 32, HOST: 16, DISK: 0}


def test_use_adds_up_over_admissions() -> None:
    use = CacheUse()
    use.record(40, 8, {DEVICE: 32, HOST: 0})
    use.record(40, 40, {DEVICE: 0, HOST: 16})
    assert use == CacheUse(2, 80, 48, {DEVICE: 32, HOST: 16})
