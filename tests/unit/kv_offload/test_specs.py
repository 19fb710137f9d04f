"""Specs by name, what they are told, records of the contract, and the settings that name them."""

from __future__ import annotations

from functools import partial
from typing import Any

import pytest
import torch
from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram, generate_latest

from tests.helpers.offload_rig import Rig, full, prompt, ring
from tests.helpers.scripted_offload import ScriptedSpec, new_script, scripted
from vllm.config import KVTransferConfig
from vllm.distributed.kv_transfer.kv_connector.v1.multi_connector import (
    MultiConnector,
    MultiKVConnectorStats,
)
from vllm.distributed.kv_transfer.kv_connector.v1.offloading.config import build_offloading_config
from vllm.distributed.kv_transfer.kv_connector.v1.offloading.metrics import OffloadPromMetrics
from vllm.distributed.kv_transfer.kv_connector.v1.offloading.options import parse_outside_options
from vllm.distributed.kv_transfer.kv_connector.v1.offloading.scheduler import OffloadingConnectorScheduler
from vllm.distributed.kv_transfer.kv_connector.v1.offloading_connector import OffloadingConnector
from vllm.v1.kv_offload.base import BlockIDsLoadStoreSpec, GPULoadStoreSpec
from vllm.v1.kv_offload.cpu.common import CPULoadStoreSpec
from vllm.v1.kv_offload.cpu.spec import CPUOffloadingSpec
from vllm.v1.kv_offload.factory import OffloadingSpecFactory
from vllm.v1.metrics.cache_hit_source import CacheHitSource

HERE = "tests.helpers.scripted_offload"
NAMED = {"spec_name": "ScriptedSpec", "spec_module_path": HERE}


def test_a_spec_is_found_by_module_and_by_registered_name() -> None:
    assert OffloadingSpecFactory.get_spec_cls({}) is CPUOffloadingSpec
    assert OffloadingSpecFactory.get_spec_cls(NAMED) is ScriptedSpec
    OffloadingSpecFactory.register_spec("TestShelf", HERE, "ScriptedSpec")
    assert OffloadingSpecFactory.get_spec_cls({"spec_name": "TestShelf"}) is ScriptedSpec
    with pytest.raises(ValueError, match="TestShelf"):
        OffloadingSpecFactory.register_spec("TestShelf", HERE, "ScriptedSpec")
    # A registered name needs no module in the settings either.
    script = new_script()
    config = scripted()
    config.kv_connector_extra_config = {"spec_name": "TestShelf"}
    rig = Rig(connector_config=config, held=False)
    rig.generate(prompt(10))
    assert len(script.manager.ready) == 2


@pytest.mark.parametrize(
    ("extra", "message"),
    [
        ({"spec_name": "Nobody", "spec_module_path": HERE}, "spec_name='Nobody' of spec_module_path='.*' cannot be loaded"),
        ({"spec_name": "X", "spec_module_path": "no.such.module"}, "cannot be loaded"),
        ({"spec_name": "Script", "spec_module_path": HERE}, "is no OffloadingSpec"),
        ({"spec_name": 3, "spec_module_path": HERE}, "spec_name must be the name of an offloading spec, got 3"),
        ({"spec_name": "X", "spec_module_path": ""}, "spec_module_path must be the name of a module, got ''"),
        ({**NAMED, "blocks_per_chunk": 2}, "blocks_per_chunk must be 1 with a spec of its own, got 2"),
        ({**NAMED, "offload_prompt_only": 1}, "offload_prompt_only must be true or false, got 1"),
        ({**NAMED, "self_describing_kv_events": "x"}, "self_describing_kv_events must be true or false"),
    ],
)  # fmt: skip
def test_wrong_settings_are_refused_by_name(extra: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        parse_outside_options(extra, 1)


def test_the_size_of_a_chunk_is_that_of_a_block() -> None:
    new_script()
    Rig(connector_config=scripted(block_size=4), held=False)
    with pytest.raises(ValueError, match="block_size=8 must be the block size of the KV cache"):
        Rig(connector_config=scripted(block_size=8), held=False)


def test_all_other_settings_are_the_specs() -> None:
    script = new_script()
    rig = Rig(connector_config=scripted(where="there", secondary_tiers=3), held=False)
    assert script.configs[0].extra_config["where"] == "there"
    OffloadingConnector.check_config(rig.config)
    assert not OffloadPromMetrics.changes_without_steps({**NAMED, "secondary_tiers": 3})


def test_no_memory_is_asked_for_that_the_spec_does_not_ask_for() -> None:
    options = parse_outside_options(NAMED, 2)
    assert (options.cpu_bytes, options.cpu_bytes_server_wide) == (0, 0)


def test_what_a_spec_is_told() -> None:
    script = new_script()
    rig = Rig([ring(6), full(), full()], connector_config=scripted(), held=False, ranks=2, events=True)
    config = build_offloading_config(rig.config, rig.kv_config)
    assert len(script.configs) == 3
    assert (config.cache.tokens_per_hash, config.cache.blocks_per_chunk) == (rig.hash_block_size, 1)
    assert [group.layer_names for group in config.groups] == [("layer1",), ("layer2",)]
    assert (config.parallel.world_size, config.enable_kv_cache_events) == (2, True)
    caches = script.workers[0].caches
    assert len(caches.group_data_refs) == 2
    block_bytes = sum(tensor.shape[1] for tensor in caches.tensors)
    assert block_bytes == config.worker_kv_bytes_per_block
    runs = [run for ref in caches.group_data_refs[0] for run in ref.mapping.runs]
    # The pieces of a block lie one behind the other, without a gap.
    assert sum(run.num_bytes for run in runs) == block_bytes
    ends = [run.dst_offset + run.num_bytes for run in runs]
    assert [run.dst_offset for run in runs] == [0, *ends[:-1]]
    for tensor in caches.tensors:
        assert tensor.dtype == torch.int8
        assert tensor.shape[0] == rig.device_blocks


def test_places_of_blocks() -> None:
    assert CPULoadStoreSpec([1, 2]) == CPULoadStoreSpec((1, 2))
    assert CPULoadStoreSpec([1, 2]) != CPULoadStoreSpec([2, 1])
    assert CPULoadStoreSpec([1]) != GPULoadStoreSpec([1], [1], [0])
    assert GPULoadStoreSpec([1], [1], [0]) != GPULoadStoreSpec([1], [1], [5])
    assert (CPULoadStoreSpec.medium(), GPULoadStoreSpec.medium()) == ("CPU", "GPU")
    with pytest.raises(ValueError, match="must sum up to 3"):
        GPULoadStoreSpec([1, 2, 3], [2], [0])
    with pytest.raises(ValueError, match="must have one index for each of 2 groups"):
        GPULoadStoreSpec([1, 2, 3], [2, 1], [0])
    with pytest.raises(TypeError):
        BlockIDsLoadStoreSpec([1])  # type: ignore[abstract]


@pytest.mark.parametrize("size", [None, 0, True, 1.5, 100])
def test_host_memory_refuses_wrong_sizes(size: Any) -> None:
    extra = {"spec_module_path": "vllm.v1.kv_offload.cpu.spec", "cpu_bytes_to_use": size}
    config = KVTransferConfig("OffloadingConnector", kv_role="kv_both", kv_connector_extra_config=extra)
    with pytest.raises(ValueError, match="cpu_bytes_to_use"):
        Rig(connector_config=config, held=False, specs=[full(64)])


def test_a_child_of_several_connectors() -> None:
    script = new_script()
    child = {"kv_connector": "OffloadingConnector", "kv_role": "kv_both", "kv_connector_extra_config": NAMED}
    other = {
        "kv_connector": "SimpleCPUOffloadConnector",
        "kv_role": "kv_both",
        "kv_connector_extra_config": {"num_cpu_blocks": 3},
    }
    config = KVTransferConfig(
        kv_connector="MultiConnector",
        kv_role="kv_both",
        kv_connector_extra_config={"connectors": [other, child]},
        kv_load_failure_policy="recompute",
    )
    rig = Rig(connector_config=config, held=False)
    request = rig.generate(prompt(22))
    for _ in range(5):
        rig.step()
    assert len(script.manager.ready) == 5
    rig.evict_device()
    again = rig.generate(prompt(22))
    assert again.num_cached_tokens
    rig.check_output(request)
    rig.scheduler.reset_prefix_cache(False, True)
    assert not script.manager.ready
    for _ in range(3):
        rig.step()
    script.manager.assert_at_rest()
    assert isinstance(
        rig.connector.sub_connectors[1].scheduler_manager,  # type: ignore[attr-defined]
        OffloadingConnectorScheduler,
    )
    rig.connector.shutdown()
    rig.close()
    assert script.manager.is_down


def test_figures_of_a_child_reach_the_metrics_page() -> None:
    new_script(capacity=9)
    child = {"kv_connector": "OffloadingConnector", "kv_role": "kv_both", "kv_connector_extra_config": NAMED}
    config = KVTransferConfig(
        kv_connector="MultiConnector", kv_role="kv_both", kv_connector_extra_config={"connectors": [child]}
    )
    rig = Rig(connector_config=config, held=False)
    rig.generate(prompt(22))
    registry = CollectorRegistry()
    types: dict[Any, Any] = {kind: partial(kind, registry=registry) for kind in (Gauge, Counter, Histogram)}
    sink = MultiConnector.build_prom_metrics(rig.config, types, ["engine"], {0: ["0"]})
    stats = rig.connector.get_kv_connector_stats()
    assert sink is not None
    assert stats is not None
    sink.observe(stats.to_dict() if isinstance(stats, MultiKVConnectorStats) else stats.data)
    page = generate_latest(registry).decode()
    assert 'vllm:kv_offload_spec_info{engine="0",shelves="9",spec_name="ScriptedSpec"} 1.0' in page
    assert 'vllm:shelf_fill{engine="0"} 0.5' in page
    sink.observe_hits(
        {CacheHitSource.DEVICE: 9, CacheHitSource.P2P: 8, CacheHitSource.EXTERNAL_UNSPECIFIED: 4}
    )
    page = generate_latest(registry).decode()
    assert 'vllm:simple_kv_offload_tier_hit_tokens_total{engine="0",tier="p2p"} 8.0' in page
    assert 'vllm:simple_kv_offload_hit_tokens_total{engine="0"} 12.0' in page
