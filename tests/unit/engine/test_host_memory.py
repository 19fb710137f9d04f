"""Host pools and KV caches of a whole server against the memory of the machine, before any model is loaded."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any, cast

import pytest

from tests.helpers.engine_configs import engine_config
from vllm.platforms.cpu import CpuPlatform
from vllm.v1.engine.core_main import become_replica
from vllm.v1.engine.wiring import build_engine
from vllm.v1.executor.abstract import Executor
from vllm.v1.simple_kv_offload.copy_backends import shared_host

GIB = 1 << 30
FREE = GIB
KV = 16 << 20  # of each rank, see `engine_config`


class Loaded(Exception):
    """The check has passed."""


def no_executor(_: object) -> Executor:
    raise Loaded


@pytest.fixture(autouse=True)
def machine(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(CpuPlatform, "get_available_memory", classmethod(lambda _: FREE))


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Shared memory on a file system of its own."""
    monkeypatch.setattr(shared_host, "DEFAULT_FOLDER", str(tmp_path))
    monkeypatch.setattr(os, "statvfs", lambda _: os.statvfs_result((1, 4096, 0, 0, 1 << 30, 0, 0, 0, 0, 0)))
    return tmp_path


def connector(name: str = "SimpleCPUOffloadConnector", **extra: Any) -> dict[str, Any]:
    return {"kv_connector": name, "kv_role": "kv_both", "kv_connector_extra_config": extra}


def start(transfer: dict[str, Any] | None, **settings: Any) -> None:
    """As replica 0 of this server's engines would."""
    config = engine_config(kv_transfer_config=transfer, **settings)
    if config.parallel_config.data_parallel_size > 1:
        become_replica(config, 0)
    with pytest.raises(Loaded):
        build_engine(config, cast(type[Executor], no_executor), log_stats=False, progress=lambda _: None)


@pytest.mark.parametrize("name", ["SimpleCPUOffloadConnector", "OffloadingConnector"])
@pytest.mark.parametrize(("replicas", "ranks"), [(1, 1), (2, 1), (1, 2), (2, 2)])
def test_cfg_06_private_pools_of_all_replicas_and_kv_caches_of_all_ranks_must_fit(
    name: str, replicas: int, ranks: int
) -> None:
    sizes = {"data_parallel_size": replicas, "tensor_parallel_size": ranks}
    fits = (FREE - replicas * ranks * KV) // replicas
    start(connector(name, cpu_bytes_to_use=fits), **sizes)
    with pytest.raises(ValueError, match=f"cpu_bytes_to_use of at most {fits} bytes(?: each)? would fit"):
        start(connector(name, cpu_bytes_to_use=fits + 1), **sizes)


def test_cfg_06_the_refusal_says_what_each_takes_and_what_would_fit() -> None:
    with pytest.raises(ValueError, match="would take") as refusal:
        start(connector(cpu_bytes_to_use=GIB * 3 // 4), data_parallel_size=2)
    assert str(refusal.value) == (
        "the 2 ranks of this server would take 1.53 GiB of host memory, and 1.00 GiB are available: 2 host pools of "
        "0.75 GiB (cpu_bytes_to_use=805306368) each, KV caches of 0.03 GiB in all (kv_cache_memory_bytes). "
        f"cpu_bytes_to_use of at most {FREE // 2 - KV} bytes each would fit, or one pool for all replicas (shared_pool)"
    )


def test_cfg_06_a_shared_pool_counts_once_and_not_for_what_is_there(folder: Path) -> None:
    size = FREE - 2 * KV
    start(connector(cpu_bytes_to_use=size, shared_pool="pool"), data_parallel_size=2)
    asked = connector(cpu_bytes_to_use=size + 8192, shared_pool="pool")
    with pytest.raises(ValueError, match=f"one pool 'pool' for all of .* at most {size} bytes would fit$"):
        start(asked, data_parallel_size=2)
    (folder / f"vllm-kv-{os.geteuid()}-pool-{'0' * 16}").write_bytes(bytes(8192))
    start(asked, data_parallel_size=2)
    with pytest.raises(ValueError, match=f"are there already, .* at most {size + 8192} bytes would fit$"):
        start(connector(cpu_bytes_to_use=size + 8193, shared_pool="pool"), data_parallel_size=2)


def test_cfg_06_pools_of_several_connectors_are_added_up(folder: Path) -> None:
    def several(size: int, **more: Any) -> dict[str, Any]:
        child = connector(cpu_bytes_to_use=size, **more)
        return connector("MultiConnector", connectors=[child, child])

    start(several((FREE - KV) // 2))
    with pytest.raises(ValueError, match=f"at most {(FREE - KV) // 2} bytes each would fit"):
        start(several(FREE - KV))
    start(several(FREE - KV, shared_pool="one"))


def test_cfg_06_the_default_kv_cache_is_counted_and_one_of_unknown_size_is_not() -> None:
    default = FREE // 2  # of what is free, at most
    start(connector(cpu_bytes_to_use=FREE - default), kv_cache_memory_bytes=None)
    with pytest.raises(ValueError, match=f"at most {FREE - default} bytes would fit"):
        start(connector(cpu_bytes_to_use=FREE - default + 1), kv_cache_memory_bytes=None)
    start(connector(cpu_bytes_to_use=FREE), kv_cache_memory_bytes=None, num_gpu_blocks_override=9)
    with pytest.raises(ValueError, match="The KV caches alone leave nothing; lower kv_cache_memory_bytes"):
        start(connector(cpu_bytes_to_use=1), kv_cache_memory_bytes=FREE + 1)


@pytest.mark.parametrize(
    "transfer",
    [
        None,
        connector(cpu_bytes_to_use=2 * FREE, num_cpu_blocks=8),
        connector(cpu_bytes_to_use=2 * FREE, kv_offload_backend="disk", disk_path="/tmp/kv"),
    ],
    ids=["none", "blocks", "disk"],
)
def test_cfg_06_nothing_is_refused_without_a_host_pool_whose_bytes_are_known(
    transfer: dict[str, Any] | None,
) -> None:
    start(transfer, kv_cache_memory_bytes=2 * FREE)


def test_cfg_06_a_connector_that_is_inactive_takes_nothing() -> None:
    start(connector(cpu_bytes_to_use=2 * FREE), enable_prefix_caching=False)
