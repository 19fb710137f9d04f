"""`OffloadingConnector`: its keys and their translation, which groups and tokens it copies, its figures."""

from __future__ import annotations

from functools import partial
from pathlib import Path
from typing import Any

import pytest
from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram, generate_latest

from tests.helpers.offload_rig import Rig, full, prompt, rig_config, ring, window
from tests.helpers.sched import ManualClock
from vllm.config import KVTransferConfig
from vllm.distributed.kv_transfer.kv_connector.factory import KVConnectorFactory
from vllm.distributed.kv_transfer.kv_connector.v1.base import KVConnectorRole, supports_hma
from vllm.distributed.kv_transfer.kv_connector.v1.multi_connector import MultiConnector
from vllm.distributed.kv_transfer.kv_connector.v1.offloading.metrics import (
    KV_OFFLOAD_CONFIG_INFO,
    OBSERVED_MAX,
    get_connector_metric_definitions,
)
from vllm.distributed.kv_transfer.kv_connector.v1.offloading.options import parse_native_options
from vllm.distributed.kv_transfer.kv_connector.v1.offloading_connector import OffloadingConnector
from vllm.v1.core.kv_cache_view import device_block_bytes
from vllm.v1.kv_cache_interface import KVCacheConfig, KVCacheGroupSpec
from vllm.v1.metrics.cache_hit_source import CacheHitSource

MIB = 1 << 20
TIERING = {"spec_name": "TieringOffloadingSpec"}
FILE = {"type": "fs", "disk_path": "/d/kv"}


def native(**extra: Any) -> KVTransferConfig:
    return KVTransferConfig(
        kv_connector="OffloadingConnector",
        kv_role="kv_both",
        kv_connector_extra_config={"cpu_bytes_to_use": MIB, **extra},
        kv_load_failure_policy="recompute",
    )


def native_rig(specs: Any = (), *, extra: dict[str, Any] | None = None, **changes: Any) -> Rig:
    return Rig(specs, connector_config=native(**(extra or {})), **changes)


def make(config: KVCacheConfig, **extra: Any) -> OffloadingConnector:
    vllm_config = rig_config()
    vllm_config.kv_transfer_config = native(**extra)
    made = KVConnectorFactory.create_connector(vllm_config, KVConnectorRole.SCHEDULER, config)
    assert isinstance(made, OffloadingConnector)
    return made


def metric_types(registry: CollectorRegistry) -> dict[Any, Any]:
    return {kind: partial(kind, registry=registry) for kind in (Gauge, Counter, Histogram)}


def plan(*specs: Any) -> KVCacheConfig:
    return KVCacheConfig(16, [], [KVCacheGroupSpec([f"layer{i}"], spec) for i, spec in enumerate(specs)])


def test_defaults_and_translation() -> None:
    options = parse_native_options({"cpu_bytes_to_use": 4 * MIB}, world_size=2)
    assert (options.machine.cpu_bytes, options.machine.cpu_bytes_server_wide) == (2 * MIB, 4 * MIB)
    assert (options.machine.prompt_only, options.machine.lazy_offload, options.machine.is_disk) == (
        True, False, False,
    )  # fmt: skip
    assert (options.chunk_tokens, options.blocks_per_chunk) == (None, 1)
    more = parse_native_options(
        {
            "cpu_bytes_to_use": MIB, **TIERING, "offload_prompt_only": False, "self_describing_kv_events": True,
            "canonical_layout": False, "blocks_per_chunk": 2,
            "secondary_tiers": [{**FILE, "disk_capacity_bytes": 5 * MIB, "disk_wait_s": 2}],
        },
        world_size=1,
    )  # fmt: skip
    assert not more.machine.prompt_only
    assert (more.machine.disk_tier, more.machine.disk_path) == (True, "/d/kv")
    assert (more.machine.disk_capacity_bytes, more.machine.disk_wait_s) == (5 * MIB, 2.0)


@pytest.mark.parametrize(
    ("extra", "message"),
    [
        ({}, "cpu_bytes_to_use must be given"),
        ({"cpu_bytes_to_use": 0}, "cpu_bytes_to_use must be a positive whole number, got 0"),
        ({"cpu_byte_to_use": 1}, "'cpu_byte_to_use' .did you mean 'cpu_bytes_to_use'"),
        ({"lazy_offload": True}, "'lazy_offload'"),
        ({"spec_name": "Mine"}, "spec_name must be CPUOffloadingSpec or TieringOffloadingSpec, or .*, got 'Mine'"),
        ({"spec_module_path": None}, "'spec_module_path'"),
        ({"cache_policy_module_path": "mine"}, "cache_policy_module_path='mine' needs a module, and eviction_policy"),
        ({"eviction_policy": "mru"}, "mru"),
        ({"store_threshold": -1}, "store_threshold must be a whole number of at least 0, got -1"),
        ({**TIERING, "backpressure": {}}, "'backpressure' .backpressure between tiers"),
        ({"canonical_layout": True}, "canonical_layout=true"),
        ({"offload_prompt_only": "yes"}, "offload_prompt_only must be true or false, got 'yes'"),
        ({"self_describing_kv_events": 1}, "self_describing_kv_events must be true or false, got 1"),
        ({"block_size": 8, "blocks_per_chunk": 2}, "block_size and blocks_per_chunk both"),
        ({"blocks_per_chunk": 0}, "blocks_per_chunk must be a positive whole number, got 0"),
        ({"block_size": 2.5}, "block_size must be a positive whole number, got 2.5"),
        ({"secondary_tiers": [FILE]}, "secondary_tiers needs spec_name=TieringOffloadingSpec"),
        ({**TIERING, "secondary_tiers": FILE}, "secondary_tiers must be a list of mappings"),
        ({**TIERING, "secondary_tiers": ["fs"]}, "secondary_tiers must be a list of mappings, got 'fs'"),
        ({**TIERING, "secondary_tiers": [FILE, FILE]}, "secondary_tiers may hold one tier in this build, got 2"),
        ({**TIERING, "secondary_tiers": [{"type": "p2p"}]}, "type 'p2p' is not part of this build; use 'fs'"),
        ({**TIERING, "secondary_tiers": [{"type": "tape"}]}, "type 'tape' is unknown; use 'fs'"),
        ({**TIERING, "secondary_tiers": [{"type": "T", "module_path": "m"}]}, "type 'T' is not part of this"),
        ({**TIERING, "secondary_tiers": [{"type": "fs"}]}, "disk_path must name a file"),
        ({**TIERING, "secondary_tiers": [{**FILE, "disk_capacity": 1}]}, "did you mean 'disk_capacity_bytes'"),
    ],
)  # fmt: skip
def test_what_cannot_be_served_is_refused_by_name(extra: dict[str, Any], message: str) -> None:
    given = extra if not extra or "cpu_bytes_to_use" in extra else {"cpu_bytes_to_use": MIB, **extra}
    with pytest.raises(ValueError, match=message):
        parse_native_options(given, world_size=1)


def test_policies_are_the_machines_own() -> None:
    machine = parse_native_options(
        {"cpu_bytes_to_use": MIB, "eviction_policy": "arc", "store_threshold": 2, "max_tracker_size": 9}, 1
    ).machine
    assert (machine.policy.eviction_policy, machine.policy.store_threshold, machine.policy.max_tracker_size) == (
        "arc", 2, 9,
    )  # fmt: skip
    outside = parse_native_options(
        {
            "cpu_bytes_to_use": MIB,
            "cache_policy_module_path": "vllm.v1.simple_kv_offload.arc",
            "eviction_policy": "ArcQueue",
        },
        1,
    ).machine
    assert outside.policy.eviction_policy == "vllm.v1.simple_kv_offload.arc:ArcQueue"


def test_blocks_that_only_one_request_had_are_skipped_and_counted() -> None:
    rig = native_rig(extra={"store_threshold": 2})
    request = rig.generate(prompt(21), max_tokens=1)
    assert rig.in_tier(request) == []
    stats = rig.connector.get_kv_connector_stats()
    assert stats is not None
    assert stats.data["data"]["vllm:kv_offload_stores_skipped_total"][()] > 0
    assert rig.in_tier(rig.generate(prompt(21), max_tokens=1)) == list(range(5))
    rig.assert_at_rest()


def test_chunks_must_fit_the_groups() -> None:
    assert make(plan(full()), block_size=8).scheduler_manager is not None
    assert make(plan(full(), window(8)), blocks_per_chunk=3).scheduler_manager is not None
    with pytest.raises(ValueError, match="block_size=6 must be a multiple of .* 4"):
        make(plan(full()), block_size=6)
    with pytest.raises(ValueError, match=r"block_size=8 needs groups of one block size, .* \[4, 8\]"):
        make(plan(full(), window(8)), block_size=8)


def test_groups_it_can_and_cannot_offload() -> None:
    assert supports_hma(OffloadingConnector)
    with pytest.raises(ValueError, match=r"^KV offloading found no eligible cache groups\.$"):
        make(plan(ring()))
    made = make(plan(ring(), window()))
    assert made.scheduler_manager is not None
    assert list(made.scheduler_manager.prefix_cacheable_group_ids) == [1]


def test_a_model_with_windows_only_is_served() -> None:
    rig = native_rig([window()])
    first = rig.generate(prompt(21), max_tokens=2)
    rig.scheduler.kv_cache_manager.reset_prefix_cache()
    again = rig.generate(prompt(21), max_tokens=2)
    assert (first.num_cached_tokens, again.num_cached_tokens) == (0, 20)
    rig.assert_at_rest()


@pytest.mark.parametrize("specs", [[full()], [full(), window(), ring(6)]], ids=["full", "window-ring"])
@pytest.mark.parametrize(("prompt_only", "stored"), [(True, 3), (False, 5)])
def test_generated_tokens_are_left_out_unless_asked_for(specs: Any, prompt_only: bool, stored: int) -> None:
    rig = native_rig(specs, extra={"offload_prompt_only": prompt_only})
    request = rig.generate(prompt(14), max_tokens=9)
    assert rig.in_tier(request) == list(range(stored))
    # A preempted and resumed request is no prompt either.
    other = rig.add(prompt(14, 5), max_tokens=9)
    for _ in range(7):
        rig.step()
    rig.scheduler._preempt_request(other, 0.0)
    rig.run()
    rig.check_output(other)
    assert rig.in_tier(other) == list(range(stored))
    rig.assert_at_rest()


def test_the_disk_below_is_the_machines_own(tmp_path: Path) -> None:
    tier = {
        "type": "fs",
        "disk_path": str(tmp_path / "kv"),
        "disk_capacity_bytes": MIB,
        "use_page_cache": True,
    }
    config = native(**TIERING, secondary_tiers=[tier], cpu_bytes_to_use=16 * 4 * 8)
    rig = Rig(connector_config=config, held=False)
    prompts = [prompt(13, seed) for seed in range(20)]
    for tokens in prompts:
        rig.generate(tokens, max_tokens=1)
    assert rig.manager.chain is not None
    assert len(rig.manager.chain.disk.pool.cached_block_hash_to_block) > 0
    rig.close()
    assert list(tmp_path.iterdir()) == []


def test_figures_have_both_families_of_names_and_are_true() -> None:
    rig = native_rig(ranks=2, device_blocks=20)
    registry = CollectorRegistry()
    sink = OffloadingConnector.build_prom_metrics(
        rig.config, metric_types(registry), ["model_name", "engine"], {0: ["m", "0"]}
    )
    for _ in range(2):
        rig.generate(prompt(21), max_tokens=1)
        rig.scheduler.kv_cache_manager.reset_prefix_cache()
        stats = rig.connector.get_kv_connector_stats()
        assert stats is not None
        rebuilt = OffloadingConnector.build_kv_connector_stats(stats.data)
        assert rebuilt is not None
        assert not [name for name in rebuilt.reduce() if "kv_offload_" in name]
        sink.observe(stats.data)
    size = device_block_bytes(rig.kv_config, 2)
    page = generate_latest(registry).decode()
    labels = 'engine="0",model_name="m"'
    assert f"vllm:kv_offload_store_bytes_total{{{labels}}} {5 * size:.1f}" in page
    assert f"vllm:kv_offload_load_bytes_total{{{labels}}} {5 * size:.1f}" in page
    assert f'vllm:kv_offload_total_bytes_total{{{labels},transfer_type="CPU_to_GPU"}} {5 * size:.1f}' in page
    usable = rig.manager.tier.num_blocks - 1
    assert f"vllm:kv_offload_cpu_cache_usage_perc{{{labels}}} {5 / usable}" in page
    assert f"vllm:kv_offload_cpu_cache_write_usage_perc{{{labels}}} 0.0" in page
    assert f"vllm:kv_offload_cpu_cache_read_usage_perc{{{labels}}} 0.0" in page
    assert f"vllm:simple_kv_offload_load_blocks_total{{{labels}}} 5.0" in page
    assert f"vllm:kv_offload_load_size_sum{{{labels}}} {5.0 * size}" in page
    assert f"vllm:kv_offload_lookup_sync_delay_seconds_count{{{labels}}} 1.0" in page


def interval(rig: Rig) -> dict[str, dict[tuple[str, ...], Any]]:
    """The figures since the last call, by name and labels."""
    stats = rig.connector.get_kv_connector_stats()
    assert stats is not None
    values: dict[str, dict[tuple[str, ...], Any]] = stats.data["data"]
    return values


def test_sizes_and_times_are_those_of_the_copies() -> None:
    rig = native_rig(ranks=2, device_blocks=20, held=False)
    assert interval(rig)["vllm:kv_offload_store_size"][()] == []
    rig.generate(prompt(21), max_tokens=1)
    size = device_block_bytes(rig.kv_config, 2)
    stored = interval(rig)
    sizes = stored["vllm:kv_offload_store_size"][()]
    assert sum(sizes) == 5 * size
    assert stored["vllm:kv_offload_size"] == {("CPU_to_GPU",): [], ("GPU_to_CPU",): sizes}
    assert sum(stored["vllm:kv_offload_cpu_allocation_size"][()]) == 5
    assert stored["vllm:kv_offload_store_time_total"][()] > 0
    assert stored["vllm:kv_offload_load_time_total"][()] == 0
    rig.evict_device()
    rig.generate(prompt(21), max_tokens=1)
    loaded = interval(rig)
    assert loaded["vllm:kv_offload_load_size"][()] == [5 * size]
    assert loaded["vllm:kv_offload_load_time_total"][()] > 0
    total = loaded["vllm:kv_offload_total_time_total"]
    assert total[("CPU_to_GPU",)] == loaded["vllm:kv_offload_load_time_total"][()]
    assert len(loaded["vllm:kv_offload_lookup_sync_delay_seconds"][()]) == 1
    assert loaded["vllm:kv_offload_lookup_async_delay_seconds"][()] == []
    rig.close()


def test_nothing_is_collected_while_nobody_asks() -> None:
    rig = native_rig()
    for seed in range(5):
        rig.generate(prompt(21, seed), max_tokens=1)
    assert isinstance(rig.connector, OffloadingConnector)
    assert not rig.connector._observed._values


def test_the_secondary_tier_has_figures_of_its_own(tmp_path: Path) -> None:
    tier = {**FILE, "disk_path": str(tmp_path / "kv"), "disk_capacity_bytes": MIB}
    extra = {**TIERING, "secondary_tiers": [tier], "cpu_bytes_to_use": 9 * full().page_size_bytes}
    rig = native_rig(extra=extra)
    clock = ManualClock()
    rig.manager.clock = clock
    rig.generate(prompt(16), max_tokens=1)
    filler = 1
    while rig.in_tier(rig.make_request(prompt(16))):
        rig.generate(prompt(16, filler), max_tokens=1)
        filler += 1
    rig.evict_device()
    before = interval(rig)
    page = full().page_size_bytes
    assert before["vllm:kv_offload_tiering_bytes_total"][("disk", "store")] >= 4 * page
    assert before["vllm:kv_offload_tiering_time_total"][("disk", "store")] > 0
    assert 0 < before["vllm:kv_offload_tiering_cache_usage_perc"][("disk",)] <= 1
    request = rig.add(prompt(17), max_tokens=1)
    rig.step()
    clock.now += 0.5
    rig.run()
    assert request.num_cached_tokens == 16
    after = interval(rig)
    assert after["vllm:kv_offload_tiering_bytes_total"][("disk", "load")] == 4 * page
    assert after["vllm:kv_offload_tiering_time_total"][("disk", "load")] > 0
    assert after["vllm:kv_offload_tiering_waits_total"] == {("disk",): 1}
    assert after["vllm:kv_offload_tiering_failed_blocks_total"] == {("disk", "store"): 0, ("disk", "load"): 0}
    assert after["vllm:kv_offload_lookup_async_delay_seconds"][()] == [0.5]
    rig.close()


def test_a_request_that_ends_while_it_waits_leaves_nothing_behind() -> None:
    rig = native_rig()
    assert isinstance(rig.connector, OffloadingConnector)
    observed = rig.connector._observed
    observed.looked_up("r0", 0.0, 0.1, is_answered=False)
    assert observed.num_put_off == 1
    rig.generate(prompt(5), max_tokens=1)  # request r0
    assert observed.num_put_off == 0


def test_look_ups_of_a_request_that_is_not_admitted_do_not_pile_up() -> None:
    rig = native_rig()
    waiting = rig.make_request(prompt(21))
    told = []
    for _ in range(3 * OBSERVED_MAX):
        rig.connector.get_num_new_matched_tokens(waiting, 0)
        stats = rig.connector.get_kv_connector_stats()
        if stats is not None:
            told.append(len(stats.data["data"]["vllm:kv_offload_lookup_sync_delay_seconds"][()]))
    assert told[0] == 0, "nobody had asked before"
    assert told[1:] == [OBSERVED_MAX] * 2


def test_every_figure_is_defined_and_every_definition_filled() -> None:
    rig = native_rig()
    rig.generate(prompt(21), max_tokens=1)
    told = interval(rig)
    figures = {name for name in told if name.startswith("vllm:kv_offload_")}
    defined = {name for name, *_ in get_connector_metric_definitions()}
    assert figures == {name for name in defined if "tiering" not in name}
    assert told[KV_OFFLOAD_CONFIG_INFO] == {("lru", "0", str(rig.manager.tier.num_blocks), "0"): 1}


def test_shares_of_the_pool_in_use_are_those_of_copies_under_way() -> None:
    rig = native_rig()
    rig.add(prompt(21), max_tokens=4)
    for _ in range(2):
        rig.step(copies=False)
    stats = rig.connector.get_kv_connector_stats()
    assert stats is not None
    usable = rig.manager.tier.num_blocks - 1
    assert stats.data["data"]["vllm:kv_offload_cpu_cache_write_usage_perc"][()] == 5 / usable
    assert stats.data["data"]["vllm:kv_offload_cpu_cache_read_usage_perc"][()] == 0
    rig.run()
    rig.scheduler.kv_cache_manager.reset_prefix_cache()
    request = rig.make_request(prompt(21))
    assert rig.connector.get_num_new_matched_tokens(request, 0) == (20, True)
    stats = rig.connector.get_kv_connector_stats()
    assert stats is not None
    assert stats.data["data"]["vllm:kv_offload_cpu_cache_read_usage_perc"][()] == 5 / usable


def test_both_connectors_side_by_side_share_the_names_they_have_in_common() -> None:
    children = [
        {"kv_connector": name, "kv_role": "kv_both", "kv_connector_extra_config": {"cpu_bytes_to_use": MIB}}
        for name in ("SimpleCPUOffloadConnector", "OffloadingConnector")
    ]
    config = KVTransferConfig(
        kv_connector="MultiConnector", kv_role="kv_both", kv_connector_extra_config={"connectors": children}
    )
    rig = Rig(connector_config=config)
    registry = CollectorRegistry()
    sink = MultiConnector.build_prom_metrics(
        rig.config, metric_types(registry), ["model_name", "engine"], {0: ["m", "0"]}
    )
    rig.generate(prompt(21), max_tokens=1)
    stats = rig.connector.get_kv_connector_stats()
    assert stats is not None
    sink.observe(stats.data)
    page = generate_latest(registry).decode()
    assert 'simple_kv_offload_store_blocks_total{engine="0",model_name="m",result="stored"} 10.0' in page
    tiers = CacheHitSource
    for _ in range(2):
        sink.observe_hits({tiers.DEVICE: 9, tiers.HOST: 8, tiers.DISK: 2, tiers.EXTERNAL_UNSPECIFIED: 4})
    page = generate_latest(registry).decode()
    for count, tier in ((16, "host"), (4, "disk")):
        assert (
            f'vllm:simple_kv_offload_tier_hit_tokens_total{{engine="0",model_name="m",tier="{tier}"}} {count}.0'
            in page
        )
    assert 'vllm:simple_kv_offload_hit_tokens_total{engine="0",model_name="m"} 20.0' in page
