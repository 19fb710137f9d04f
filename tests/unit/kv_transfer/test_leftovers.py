"""What a connector removes in the stead of an engine that was killed: its own, and nothing that is in use or kept."""

from __future__ import annotations

import fcntl
from pathlib import Path
from typing import Any

import pytest

from tests.helpers.engine_configs import engine_config
from vllm.distributed.kv_transfer.kv_connector.factory import KVConnectorFactory
from vllm.v1.simple_kv_offload.copy_backends import shared_host


def connector(name: str, **extra: Any) -> dict[str, Any]:
    return {
        "kv_connector": name,
        "kv_role": "kv_both",
        "engine_id": "e",
        "kv_connector_extra_config": {"cpu_bytes_to_use": 1 << 20, **extra},
    }


def nested(child: dict[str, Any]) -> dict[str, Any]:
    example = {"kv_connector": "ExampleConnector", "kv_role": "kv_both"}
    return {**connector("MultiConnector"), "kv_connector_extra_config": {"connectors": [example, child]}}


@pytest.mark.parametrize("is_nested", [False, True])
@pytest.mark.parametrize("persist", [False, True])
def test_files_of_all_ranks_go_and_those_of_others_kept_or_locked_ones_stay(
    is_nested: bool, persist: bool, tmp_path: Path
) -> None:
    stay = {"kv.e.rank_2", "kv.f.rank_0", "kv.e2.rank_0", "kv.kept-0123456789abcdef-0-0", "kv"}
    for name in stay | {"kv.e.rank_0", "kv.e.rank_1"}:
        (tmp_path / name).touch()
    disk = {"disk_tier": True, "disk_path": str(tmp_path / "kv"), "disk_persist": persist}
    child = connector("SimpleCPUOffloadConnector", **disk)
    config = engine_config(kv_transfer_config=nested(child) if is_nested else child)
    with (tmp_path / "kv.e.rank_2").open() as locked:
        fcntl.flock(locked, fcntl.LOCK_EX)
        KVConnectorFactory.remove_leftovers(config)
    assert {path.name for path in tmp_path.iterdir()} == stay


@pytest.mark.parametrize("name", ["SimpleCPUOffloadConnector", "OffloadingConnector"])
def test_segments_of_the_pool_that_nobody_uses_go(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(shared_host, "DEFAULT_FOLDER", str(tmp_path))
    mine = Path(shared_host.segment_path(str(tmp_path), "pool", bytes(8)))
    other = Path(shared_host.segment_path(str(tmp_path), "pool-2", bytes(8)))
    for path in (mine, other):
        path.touch()
    extra = {"shared_pool": "pool"} if name == "SimpleCPUOffloadConnector" else {}
    KVConnectorFactory.remove_leftovers(engine_config(kv_transfer_config=connector(name, **extra)))
    assert mine.exists() == (not extra)
    assert other.exists()


def test_nothing_is_removed_without_a_connector() -> None:
    KVConnectorFactory.remove_leftovers(engine_config())
