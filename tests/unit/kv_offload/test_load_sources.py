"""Where hits of a manager from outside are counted: usage, look-ups and metrics say what `get_load_source` says."""

from __future__ import annotations

from typing import Any

import pytest

from tests.helpers.offload_rig import Rig, full, prompt, window
from tests.helpers.scripted_offload import Script, new_script
from tests.helpers.scripted_rig import TOKENS, half, make, settle, stored
from vllm.distributed.kv_transfer.kv_connector.v1.offloading.load_sources import LoadSources
from vllm.v1.kv_offload.base import Locality, Medium, ReqContext, make_offload_key
from vllm.v1.metrics.cache_hit_source import CacheHitSource
from vllm.v1.request import Request
from vllm.v1.simple_kv_offload.metrics import MetricName

NOWHERE = CacheHitSource.EXTERNAL_UNSPECIFIED
CASES: list[tuple[Any, CacheHitSource]] = [
    (None, NOWHERE),
    ((Medium.CPU, Locality.LOCAL), CacheHitSource.HOST),
    ((Medium.CPU, Locality.REMOTE), CacheHitSource.P2P),
    ((Medium.STORAGE, Locality.LOCAL), CacheHitSource.DISK),
    ((Medium.STORAGE, Locality.REMOTE), CacheHitSource.DISK),
    (("STORAGE", "LOCAL"), CacheHitSource.DISK),
    ("nonsense", NOWHERE),
    (("FLOPPY", "LOCAL"), NOWHERE),
]


def figures(rig: Rig) -> dict[str, float]:
    stats = rig.connector.get_kv_connector_stats()
    assert stats is not None
    by_tier = stats.data["data"][MetricName.ACCEPTED_TOKENS]
    return {labels[0]: count for labels, count in by_tier.items() if count}


def usage(rig: Rig, request: Request) -> dict[CacheHitSource, int]:
    """The external part of what the request's usage says."""
    return rig.connector.get_external_cache_hit_sources(request, 20)


@pytest.mark.parametrize(("told", "tier"), CASES)
@pytest.mark.parametrize("specs", [[full()], [full(), window()]])
def test_figures_say_where_the_manager_says_it_is(specs: list[Any], told: Any, tier: CacheHitSource) -> None:
    script = new_script(source=told)
    rig = make(specs)
    stored(rig, script)
    rig.connector.get_kv_connector_stats()
    request = rig.add(TOKENS)
    peeked = rig.connector.peek_matched_tokens(request, 0)
    assert peeked is not None
    assert (peeked.held, peeked.offered) == ({NOWHERE: 0, tier: 20}, {NOWHERE: 0, tier: 20})
    rig.run()
    rig.check_output(request)
    assert request.num_cached_tokens == 20
    assert usage(rig, request) == {tier: 20}
    assert figures(rig) == {tier.value: 20}
    assert set(rig.connector.get_cache_hit_sources()) == {NOWHERE, tier}
    report = rig.scheduler.get_kv_cache_report()
    hits = {each.tier: each.tokens_hit for each in report.hits}
    assert hits == {CacheHitSource.DEVICE: 0, NOWHERE: 0, tier: 20}
    settle(rig, script)


def test_each_block_counts_where_it_is() -> None:
    script = new_script()
    rig = make()
    stored(rig, script)
    rig.connector.get_kv_connector_stats()
    places = iter([(Medium.CPU, Locality.LOCAL)] * 2 + [(Medium.STORAGE, Locality.REMOTE)] * 2 + [None])
    script.manager.get_load_source = lambda key, ctx: next(places)  # type: ignore[method-assign]
    request = rig.generate(TOKENS)
    assert usage(rig, request) == {CacheHitSource.HOST: 8, CacheHitSource.DISK: 8, NOWHERE: 4}
    assert figures(rig) == {"host": 8, "disk": 8, NOWHERE.value: 4}
    settle(rig, script)


def test_what_no_block_of_the_leading_group_covers_counts_with_the_outermost_block() -> None:
    class Places:
        def get_load_source(self, key: Any, ctx: ReqContext) -> Any:
            return (Medium.STORAGE if key[:1] == b"s" else Medium.CPU), Locality.LOCAL

    def key(name: str, group: int) -> Any:
        return make_offload_key(name.encode().ljust(32, b"_"), group)  # type: ignore[arg-type]

    sources = LoadSources(Places(), 0, 4)  # type: ignore[arg-type]
    ctx = ReqContext("r")
    split = sources.split([key("c", 0), key("c", 0), key("s", 1)], 10, ctx)
    assert split == {NOWHERE: 0, CacheHitSource.HOST: 8, CacheHitSource.DISK: 2}
    assert sources.split([], 6, ctx) == {NOWHERE: 6}
    assert sources.named == (CacheHitSource.HOST, CacheHitSource.DISK, NOWHERE)


def test_a_manager_that_fails_says_nothing() -> None:
    script: Script = new_script(raises={"get_load_source"})
    rig = make()
    stored(rig, script)
    request = rig.generate(TOKENS)
    assert usage(rig, request) == {NOWHERE: 20}
    settle(rig, script)


def test_a_part_of_what_a_manager_has_cannot_be_reset() -> None:
    script = new_script(source=(Medium.STORAGE, Locality.LOCAL))
    rig = make()
    stored(rig, script)
    rig.generate(TOKENS)
    settle(rig, script)
    rig.evict_device()
    assert rig.connector.reset_tiers([CacheHitSource.DISK]) is False
    assert rig.connector.reset_tiers([CacheHitSource.HOST]) is True, "it has none such"
    assert script.calls["reset_cache"] == 0
    assert half(rig).peek_matched_tokens(rig.make_request(TOKENS), 0) == 20
    assert rig.connector.reset_tiers([CacheHitSource.DISK, NOWHERE]) is True
    assert script.calls["reset_cache"] == 1
    assert rig.generate(prompt(22)).num_cached_tokens == 0
    settle(rig, script)
