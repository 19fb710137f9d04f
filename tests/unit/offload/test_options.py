"""The connector's settings: defaults, bounds, unknown keys; and what happens without prefix caching."""

from __future__ import annotations

import logging
from pathlib import Path
from typing import Any

import pytest

from tests.helpers.offload_rig import Rig, full, prompt, rig_config
from vllm.distributed.kv_transfer.kv_connector.v1.base import KVConnectorRole
from vllm.distributed.kv_transfer.kv_connector.v1.simple_cpu_offload_connector import (
    DEFAULT_CPU_CAPACITY_BYTES,
    VALID_KV_OFFLOAD_BACKENDS,
    SimpleCPUOffloadConnector,
)
from vllm.logger import forget_printed
from vllm.v1.core.kv_cache_blocks import KVCacheBlocks
from vllm.v1.core.sched.output import SchedulerOutput
from vllm.v1.kv_cache_interface import KVCacheConfig, KVCacheGroupSpec
from vllm.v1.outputs import KVConnectorOutput
from vllm.v1.simple_kv_offload.capacity import blocks_for_bytes, choose_num_blocks, gpu_total_bytes
from vllm.v1.simple_kv_offload.disk_backend import disk_file_path, kept_file_path
from vllm.v1.simple_kv_offload.manager import SimpleCPUOffloadScheduler
from vllm.v1.simple_kv_offload.options import parse_options

GIB = 1 << 30


@pytest.fixture
def warnings(caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch) -> pytest.LogCaptureFixture:
    monkeypatch.setattr(logging.getLogger("vllm"), "propagate", True)
    caplog.set_level(logging.WARNING)
    return caplog


def test_defaults() -> None:
    options = parse_options({}, world_size=2)
    assert options.cpu_bytes_server_wide == DEFAULT_CPU_CAPACITY_BYTES == 8 * GIB
    assert options.cpu_bytes == 4 * GIB
    assert (options.num_cpu_blocks, options.lazy_offload, options.backend) == (None, False, "cpu")
    assert VALID_KV_OFFLOAD_BACKENDS == ("cpu", "disk")


def test_disk_defaults() -> None:
    options = parse_options({"kv_offload_backend": "disk", "disk_path": "/d/kv"}, world_size=2)
    assert (options.disk_capacity_bytes, options.disk_buffer_slots, options.use_page_cache) == (
        100 * GIB, 2, False,
    )  # fmt: skip
    assert options.is_disk


def test_bytes_per_rank_win_with_a_warning(warnings: pytest.LogCaptureFixture) -> None:
    extra = {"cpu_bytes_to_use": 4 * GIB, "cpu_bytes_to_use_per_rank": GIB}
    assert parse_options(extra, world_size=2).cpu_bytes == GIB
    assert "cpu_bytes_to_use_per_rank" in warnings.text
    warnings.clear()
    assert parse_options({"cpu_bytes_to_use_per_rank": GIB}, world_size=2).cpu_bytes_server_wide == 2 * GIB
    assert warnings.text == ""


def test_sizes_with_suffixes_as_on_the_command_line() -> None:
    extra = {
        "cpu_bytes_to_use": "64M",
        "disk_tier": True,
        "disk_path": "/d/kv",
        "disk_capacity_bytes": "1.5g",
        "max_pending_store_bytes": "2M",
    }
    options = parse_options(extra, world_size=1)
    assert (options.cpu_bytes, options.disk_capacity_bytes) == (64 << 20, 1_500_000_000)
    assert options.policy.max_pending_store_bytes == 2 << 20


@pytest.mark.parametrize("disk_path", ["{folder}", "{folder}/"])
def test_a_folder_as_disk_path_holds_the_files(tmp_path: Path, disk_path: str) -> None:
    path = disk_path.format(folder=tmp_path)
    assert disk_file_path(path, None) == f"{tmp_path}/kv.rank_0"
    assert kept_file_path(path, bytes(8), None) == f"{tmp_path}/kv.kept-0000000000000000-0-0"
    assert disk_file_path(f"{tmp_path}/name", None) == f"{tmp_path}/name.rank_0"


@pytest.mark.parametrize("value", [8e9, "8000000000", 8_000_000_000])
def test_whole_numbers_in_any_notation(value: Any) -> None:
    assert parse_options({"cpu_bytes_to_use": value}, world_size=1).cpu_bytes == 8_000_000_000


@pytest.mark.parametrize(
    ("extra", "message"),
    [
        ({"cpu_byte_to_use": 5}, r"'cpu_byte_to_use' \(did you mean 'cpu_bytes_to_use'\?\)"),
        ({"lazy": True}, r"'lazy' \(did you mean 'lazy_offload'\?\)"),
        ({"zzz": 1}, "'zzz'"),
        ({"cpu_bytes_to_use": 0}, "cpu_bytes_to_use must be a positive whole number, got 0"),
        ({"cpu_bytes_to_use": -3}, "cpu_bytes_to_use .* got -3"),
        ({"cpu_bytes_to_use": True}, "cpu_bytes_to_use .* got True"),
        ({"cpu_bytes_to_use": 1.5}, "cpu_bytes_to_use .* got 1.5"),
        ({"cpu_bytes_to_use": "8 GB"}, "cpu_bytes_to_use .* got '8 GB'"),
        ({"cpu_bytes_to_use": "64MB"}, "cpu_bytes_to_use .* got '64MB'; a size is written as .*\"64M\""),
        (
            {"kv_offload_backend": "disk", "disk_path": "/tmp/a\0b"},
            r"disk_path must not hold a NUL character, got '/tmp/a\\x00b'",
        ),
        ({"max_pending_store_bytes": "much"}, "max_pending_store_bytes .* got 'much'"),
        ({"cpu_bytes_to_use": 1}, "cpu_bytes_to_use=1 leaves nothing for each of 2 ranks"),
        ({"cpu_bytes_to_use_per_rank": 0}, "cpu_bytes_to_use_per_rank .* got 0"),
        ({"num_cpu_blocks": 0}, "num_cpu_blocks must be a positive int, got 0"),
        ({"num_cpu_blocks": True}, "num_cpu_blocks .* got True"),
        ({"num_cpu_blocks": 4.0}, "num_cpu_blocks .* got 4.0"),
        ({"num_cpu_blocks": "4"}, "num_cpu_blocks .* got '4'"),
        ({"lazy_offload": "perhaps"}, "lazy_offload must be true or false, got 'perhaps'"),
        ({"kv_offload_backend": "tape"}, "kv_offload_backend must be one of cpu, disk, got 'tape'"),
        ({"kv_offload_backend": "disk"}, "disk_path must name a file"),
        (
            {"kv_offload_backend": "disk", "disk_path": "/d", "disk_capacity_bytes": 0},
            "disk_capacity_bytes .* got 0",
        ),
        (
            {"kv_offload_backend": "disk", "disk_path": "/d", "disk_buffer_slots": 0},
            "disk_buffer_slots .* got 0",
        ),
        ({"kv_offload_backend": "disk", "disk_path": "/d", "use_page_cache": 1}, "use_page_cache .* got 1"),
        ({"transfer_timeout_s": 0}, "transfer_timeout_s must be a positive number of seconds, got 0"),
    ],
)
def test_cfg_03_wrong_settings_are_named(extra: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        parse_options(extra, world_size=2)


def test_disk_keys_without_the_disk_are_ignored_aloud(warnings: pytest.LogCaptureFixture) -> None:
    options = parse_options({"disk_path": "/d", "use_page_cache": True}, world_size=1)
    assert "disk_path, use_page_cache ignored" in warnings.text
    assert (options.disk_path, options.use_page_cache) == (None, False)


def test_cfg_03_the_connector_refuses_at_start_up() -> None:
    with pytest.raises(ValueError, match="cpu_bytes_to_use"):
        Rig(extra={"cpu_bytes_too_use": 1})


def test_cfg_03_the_log_says_what_the_settings_come_to(caplog: pytest.LogCaptureFixture) -> None:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(logging.getLogger("vllm"), "propagate", True)
        caplog.set_level(logging.INFO)
        Rig(ranks=2, extra={"cpu_bytes_to_use": "64M", "num_cpu_blocks": 12})
        assert "0.06 GiB in total, 0.03 GiB for each of 2 ranks; num_cpu_blocks=12 of it" in caplog.text


@pytest.mark.parametrize("role", list(KVConnectorRole))
def test_cfg_05_without_prefix_caching_one_warning_and_nothing_else(
    role: KVConnectorRole, warnings: pytest.LogCaptureFixture
) -> None:
    forget_printed()
    config = rig_config(caching=False)
    kv = KVCacheConfig(8, [], [KVCacheGroupSpec(["layer0"], full())])
    for _ in range(2):
        connector = SimpleCPUOffloadConnector(config, role, kv)
    assert warnings.text.count("inactive") == 1, "said once per process"
    assert "--enable-prefix-caching" in warnings.text
    assert connector.scheduler_manager is None
    assert connector.worker_handler is None
    request = Rig().make_request(prompt(9))
    connector.register_kv_caches({})
    connector.on_new_request(request)
    assert connector.get_num_new_matched_tokens(request, 0) == (0, False)
    connector.update_state_after_alloc(request, KVCacheBlocks(([],)), 0)
    metadata = connector.build_connector_meta(SchedulerOutput.make_empty())
    connector.handle_preemptions(metadata)
    connector.bind_connector_metadata(metadata)
    connector.start_load_kv(None)
    connector.wait_for_layer_load("layer0")
    connector.save_kv_layer("layer0", None, None)
    connector.wait_for_save()
    assert connector.get_finished(set()) == (None, None)
    assert connector.get_transfer_results(set()).finished_recving is None
    assert connector.build_connector_worker_meta() is None
    connector.clear_connector_metadata()
    connector.update_connector_output(KVConnectorOutput())
    assert connector.request_finished(request, []) == (False, None)
    assert list(connector.take_events()) == []
    assert not connector.has_pending_push_work()
    assert not connector.has_pending_block_frees()
    assert connector.reset_cache() is None
    assert connector.get_kv_connector_stats() is None
    assert connector.get_aligned_num_cpu_blocks() is None
    assert connector.get_loaded_kv_cache_group_ids(request) == ()
    assert connector.get_boundary_store_stats() is None
    connector.unregister_kv_caches()
    connector.restore_kv_caches()
    connector.shutdown()
    assert warnings.text.count("inactive") == 1


def config_of(num_blocks: int = 16) -> KVCacheConfig:
    return KVCacheConfig(num_blocks, [], [KVCacheGroupSpec(["layer0"], full())])


def make_manager(**changes: Any) -> SimpleCPUOffloadScheduler:
    arguments: dict[str, Any] = {
        "cpu_capacity_bytes": 32 * 8,
        "scheduler_block_size": 4,
        "hash_block_size": 4,
    }
    return SimpleCPUOffloadScheduler(rig_config(), config_of(), **{**arguments, **changes})


def test_sizes() -> None:
    assert gpu_total_bytes(config_of()) == 16 * 32
    assert make_manager().num_cpu_blocks == 8
    assert make_manager(cpu_capacity_bytes=1).num_cpu_blocks == 1
    assert make_manager(aligned_num_cpu_blocks=5).num_cpu_blocks == 5
    assert make_manager(aligned_num_cpu_blocks=5, num_cpu_blocks=6).num_cpu_blocks == 6
    assert make_manager(disk_capacity_bytes=32 * 20).num_cpu_blocks == 20
    assert make_manager().cpu_kv_cache_config.num_blocks == 8


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"num_cpu_blocks": 9}, "num_cpu_blocks=9 exceeds the capacity of this rank, 8 blocks"),
        ({"num_cpu_blocks": 0}, "num_cpu_blocks"),
        ({"cpu_capacity_bytes": 0}, "capacity must be positive, got 0 bytes"),
    ],
)
def test_impossible_sizes(changes: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        make_manager(**changes)


def test_a_model_without_full_attention_is_refused() -> None:
    from tests.helpers.offload_rig import window

    config = KVCacheConfig(16, [], [KVCacheGroupSpec(["layer0"], window())])
    with pytest.raises(ValueError, match="full attention"):
        SimpleCPUOffloadScheduler(rig_config(), config, 1 << 20, 4, 4)


def test_an_empty_device_cache_is_refused() -> None:
    with pytest.raises(ValueError, match="0 bytes"):
        blocks_for_bytes(100, 0, 0)
    assert choose_num_blocks(7, None) == 7


def test_a_disk_tier_lies_below_the_host() -> None:
    extra = {"disk_tier": True, "disk_path": "/d/kv", "disk_capacity_bytes": 1 << 20, "disk_wait_s": 0.5}
    options = parse_options(extra, world_size=1)
    assert (options.disk_tier, options.is_disk, options.disk_wait_s) == (True, False, 0.5)
    assert (options.disk_path, options.disk_capacity_bytes) == ("/d/kv", 1 << 20)
    assert not parse_options({}, world_size=1).disk_tier
    assert not options.disk_persist
    assert parse_options({**extra, "disk_persist": True}, world_size=1).disk_persist
    in_place_of_host = {"kv_offload_backend": "disk", "disk_path": "/d/kv", "disk_persist": True}
    assert parse_options(in_place_of_host, world_size=1).disk_persist


@pytest.mark.parametrize(
    ("extra", "message"),
    [
        ({"disk_tier": True}, "disk_path must name a file for disk_tier=true, got None"),
        ({"disk_tier": "yes"}, "disk_tier must be true or false, got 'yes'"),
        (
            {"disk_tier": True, "kv_offload_backend": "disk", "disk_path": "/d/kv"},
            "it needs kv_offload_backend='cpu'",
        ),
        (
            {"disk_tier": True, "disk_path": "/d/kv", "disk_wait_s": 0},
            "disk_wait_s must be a positive number",
        ),
        ({"disk_persist": True}, "disk_persist=true .* needs disk_tier=true or kv_offload_backend='disk'"),
        ({"disk_persist": "yes"}, "disk_persist must be true or false, got 'yes'"),
    ],
)
def test_impossible_disk_tiers_are_refused(extra: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        parse_options(extra, world_size=1)
