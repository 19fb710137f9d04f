"""What several offload connectors behind one tell: as much as each would tell alone, and of both together."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import asdict
from pathlib import Path
from typing import Any

import pytest
from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram

from tests.helpers.kept_rig import KeptRig
from tests.helpers.offload_rig import Rig, prompt
from tests.helpers.rank_rig import RankRig
from vllm.config import KVTransferConfig
from vllm.distributed.kv_transfer.kv_connector.v1.metrics import KVConnectorLogging, KVConnectorPrometheus
from vllm.v1.simple_kv_offload.copy_backends import shared_host
from vllm.v1.simple_kv_offload.manager import SimpleCPUOffloadScheduler
from vllm.v1.simple_kv_offload.metrics import MetricName, SimpleCPUOffloadStats

KIND = {"kv_role": "kv_both", "kv_connector": "SimpleCPUOffloadConnector"}
NATIVE = {"kv_role": "kv_both", "kv_connector": "OffloadingConnector"}
LABELS = {"model_name": "m", "engine": "0"}


def both(*children: dict[str, Any]) -> KVTransferConfig:
    return KVTransferConfig(
        kv_connector="MultiConnector",
        kv_role="kv_both",
        kv_connector_extra_config={"connectors": [*children]},
    )


def simple(**extra: Any) -> dict[str, Any]:
    return {**KIND, "kv_connector_extra_config": extra}


class Page:
    """The metrics page of a rig."""

    def __init__(self, rig: Rig) -> None:
        self.rig = rig
        self.registry = CollectorRegistry()

        def tied(kind: type) -> Any:
            return lambda *args, **fields: kind(*args, **{"registry": self.registry, **fields})

        kinds = {kind: tied(kind) for kind in (Gauge, Counter, Histogram)}
        self.sink = KVConnectorPrometheus(rig.config, kinds, list(LABELS), {0: ["m", "0"]})

    def take(self) -> None:
        """What the engine tells with a step."""
        stats = self.rig.connector.get_kv_connector_stats()
        if stats is not None:
            self.sink.observe(stats.to_dict())

    def ask(self) -> None:
        """What an engine that is idle is asked for."""
        self.sink.observe_report(asdict(self.rig.scheduler.get_kv_cache_report()))

    def __getitem__(self, name: str) -> float | None:
        return self.registry.get_sample_value(name, LABELS)


def managers(rig: Rig) -> list[SimpleCPUOffloadScheduler]:
    return [child.scheduler_manager for child in rig.connector.sub_connectors]  # type: ignore[attr-defined]


def in_all(rig: Rig) -> tuple[int, int]:
    """Used slots and findable contents of all connectors."""
    tiers = [manager.tier for manager in managers(rig)]
    entries = [len(tier.pool.cached_block_hash_to_block) for tier in tiers]
    return sum(tier.num_held for tier in tiers), sum(entries)


@pytest.fixture
def two() -> Iterator[Rig]:
    rig = Rig(connector_config=both(simple(num_cpu_blocks=4), simple(num_cpu_blocks=48)))
    yield rig
    rig.close()


def test_a_gauge_of_two_connectors_is_that_of_both(two: Rig) -> None:
    page = Page(two)
    two.generate(prompt(21), max_tokens=1)
    page.take()
    assert in_all(two) == (2, 3 + 5)
    assert (page[MetricName.USED_BLOCKS], page[MetricName.CACHED_ENTRIES]) == in_all(two)


def test_a_gauge_counts_the_connector_without_news_too(two: Rig) -> None:
    page = Page(two)
    two.generate(prompt(21), max_tokens=1)
    page.take()
    first, second = managers(two)
    second.tier.invalidate()
    assert first.get_stats(only_news=True) is None
    page.take()
    assert in_all(two) == (2, 3)
    assert (page[MetricName.USED_BLOCKS], page[MetricName.CACHED_ENTRIES]) == (2, 3)


def test_connectors_of_two_names_share_their_gauges() -> None:
    rig = Rig(
        connector_config=both(
            simple(num_cpu_blocks=48), {**NATIVE, "kv_connector_extra_config": {"cpu_bytes_to_use": 1 << 12}}
        )
    )
    page = Page(rig)
    rig.generate(prompt(21), max_tokens=1)
    page.take()
    used, cached = in_all(rig)
    assert cached == 10
    assert (page[MetricName.USED_BLOCKS], page[MetricName.CACHED_ENTRIES]) == (used, cached)
    usage = page["vllm:kv_offload_cpu_cache_usage_perc"]
    assert usage == 5 / (managers(rig)[1].tier.num_blocks - 1)
    rig.close()


def test_of_what_is_on_or_off_the_off_one_shows() -> None:
    on, off = SimpleCPUOffloadStats(), SimpleCPUOffloadStats()
    for stats, value in ((on, 1), (off, 0)):
        stats.set_gauge(MetricName.SHARED_POOL_ACTIVE, value)
        stats.set_gauge(MetricName.TIER_SLOW, value, ("host",))
        stats.increase_counter(MetricName.LOAD_BLOCKS, 3)
    levels = off.levels()
    assert levels is not None
    on.add_levels(levels)
    assert on.data["data"][MetricName.SHARED_POOL_ACTIVE] == {(): 0}
    assert on.data["data"][MetricName.TIER_SLOW] == {("host",): 1}
    assert on.data["data"][MetricName.LOAD_BLOCKS] == {(): 3}, "what happened is added up elsewhere"


@pytest.mark.parametrize(
    ("children", "wants"),
    [
        ((simple(num_cpu_blocks=8),), False),
        ((simple(num_cpu_blocks=8), simple(num_cpu_blocks=8, shared_pool="p")), True),
        ((simple(num_cpu_blocks=8), simple(disk_tier=True, disk_path="/nowhere", disk_persist=True)), True),
        (
            (
                {
                    **NATIVE,
                    "kv_connector_extra_config": {
                        "spec_name": "TieringOffloadingSpec",
                        "secondary_tiers": [{"type": "fs", "disk_path": "/nowhere", "disk_persist": True}],
                    },
                },
            ),
            True,
        ),
    ],
)
def test_an_idle_engine_is_asked_if_any_of_its_connectors_changes_without_a_step(
    two: Rig, children: tuple[dict[str, Any], ...], wants: bool
) -> None:
    for config in (both(*children), KVTransferConfig(**children[-1])):
        two.config.kv_transfer_config = config
        assert Page(two).sink.wants_reports is wants


def test_a_shared_pool_beside_a_private_one_shows_what_the_others_changed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(shared_host, "DEFAULT_FOLDER", str(tmp_path))
    children = both(simple(num_cpu_blocks=8), simple(num_cpu_blocks=24, shared_pool="pool"))
    idle = RankRig(connector_config=children, engine_id="idle")
    other = RankRig(host_blocks=24, engine_id="other")
    page = Page(idle)
    idle.generate(prompt(9), max_tokens=1)
    page.take()
    assert page[MetricName.CACHED_ENTRIES] == 2 + 2
    other.generate(prompt(21, seed=1), max_tokens=1)
    assert idle.connector.get_kv_connector_stats() is None
    assert page.sink.wants_reports
    page.ask()
    assert page[MetricName.CACHED_ENTRIES] == 2 + 2 + 5
    assert page[MetricName.USED_BLOCKS] == 2
    assert page[MetricName.SHARED_POOL_ACTIVE] == 1
    for rig in (idle, other):
        rig.close()


@pytest.mark.parametrize("is_one_of_two", [False, True])
def test_a_kept_disk_shows_before_the_first_step(tmp_path: Path, *, is_one_of_two: bool) -> None:
    disk = {"disk_tier": True, "disk_path": str(tmp_path / "kv"), "disk_capacity_bytes": 1 << 11}
    kept = simple(num_cpu_blocks=8, decline_slow_tier="off", disk_persist=True, **disk)
    children = both(simple(num_cpu_blocks=8), kept) if is_one_of_two else KVTransferConfig(**kept)
    first = KeptRig(tmp_path, connector_config=children)
    first.generate(prompt(21), max_tokens=1)
    first.close()
    again = KeptRig(tmp_path, connector_config=children)
    page = Page(again)
    assert page.sink.wants_reports
    page.ask()
    assert (page[MetricName.DISK_USED_BLOCKS], page[MetricName.DISK_CACHED_ENTRIES]) == (1, 5)
    hosts = 1 + is_one_of_two
    assert (page[MetricName.USED_BLOCKS], page[MetricName.CACHED_ENTRIES]) == (hosts, 0)
    page.take()
    assert page[MetricName.DISK_CACHED_ENTRIES] == 5, "a step tells the same"
    again.close()


class DirectRig(KeptRig):
    """The disk is in the place of host memory."""

    is_direct = True


def test_a_kept_disk_in_the_place_of_host_memory_shows_before_the_first_step(tmp_path: Path) -> None:
    first = DirectRig(tmp_path)
    first.generate(prompt(21), max_tokens=1)
    first.close()
    again = DirectRig(tmp_path)
    page = Page(again)
    page.ask()
    assert (page[MetricName.USED_BLOCKS], page[MetricName.CACHED_ENTRIES]) == (1, 5)
    again.close()


def test_the_modes_of_both_are_told() -> None:
    rig = Rig(
        connector_config=both(
            simple(num_cpu_blocks=4), simple(num_cpu_blocks=4, lazy_offload=True), simple(num_cpu_blocks=4)
        )
    )
    report = rig.scheduler.get_kv_cache_report()
    assert report.modes == {"host": "eager, lazy"}
    assert [pool.blocks_total for pool in report.pools[1:]] == [3, 3, 3]
    rig.close()


def test_the_log_line_names_what_is_not_zero_only(two: Rig) -> None:
    two.generate(prompt(21), max_tokens=1)
    stats = two.connector.get_kv_connector_stats()
    assert stats is not None
    log = KVConnectorLogging(two.config.kv_transfer_config)
    log.observe(stats.to_dict())
    lines: list[str] = []
    log.log(lambda form, *args: lines.append(form % args))
    (line,) = lines
    figures = dict(part.split("=") for part in line.removeprefix("KV Transfer metrics: ").split(", "))
    assert figures["SimpleCPUOffloadConnector.store_blocks_total.stored"] == "8"
    assert all(float(value) for value in figures.values())
