"""What is refused before a model is loaded."""

from __future__ import annotations

from pathlib import Path
from typing import Any, cast

import pytest

from tests.helpers.engine_configs import engine_config
from vllm.v1.engine.wiring import build_engine
from vllm.v1.executor.abstract import Executor


def no_executor(_: object) -> Executor:
    raise AssertionError("the model was loaded")


@pytest.mark.parametrize("connector", ["SimpleCPUOffloadConnector", "OffloadingConnector"])
@pytest.mark.parametrize(
    ("extra", "named"),
    [
        ({"cpu_byte_to_use": 1 << 20}, "did you mean"),
        ({"cpu_bytes_to_use": -1}, "cpu_bytes_to_use"),
        ({"cpu_bytes_to_use": 1 << 60}, r"1073741824.00 GiB .* cannot be reserved .*cpu_bytes_to_use"),
        ({"cpu_bytes_to_use": 1 << 70}, "cannot be reserved"),
    ],
)
def test_wrong_settings_of_a_connector_are_told_before_the_model_is_loaded(
    connector: str, extra: dict[str, Any], named: str
) -> None:
    config = engine_config(
        kv_transfer_config={
            "kv_connector": connector,
            "kv_role": "kv_both",
            "kv_connector_extra_config": {"cpu_bytes_to_use": 1 << 20, **extra},
        }
    )
    with pytest.raises(ValueError, match=named):
        build_engine(config, cast(type[Executor], no_executor), log_stats=False, progress=lambda _: None)


def nested(child: object) -> dict[str, Any]:
    return {"kv_connector": "MultiConnector", "kv_role": "kv_both", "kv_connector_extra_config": child}


def child(connector: str, **extra: Any) -> dict[str, Any]:
    sized = {"cpu_bytes_to_use": 1 << 20} if connector != "ExampleConnector" else {}
    return {"kv_connector": connector, "kv_role": "kv_both", "kv_connector_extra_config": {**sized, **extra}}


GOOD = child("SimpleCPUOffloadConnector")


@pytest.mark.parametrize(
    ("extra", "named"),
    [
        ({"connector": [GOOD]}, r"'connector' \(did you mean 'connectors'\?\)"),
        ({"connectors": [GOOD], "lazy_offload": True}, "'lazy_offload'"),
        ({"connectors": []}, r"got \[\]"),
        ({"connectors": {"a": GOOD}}, "a list of connector configs"),
        ({"connectors": [GOOD, 7]}, r"\['connectors'\]\[1\].*got 7"),
        ({"connectors": [{"kv_conector": "X"}]}, r"\['connectors'\]\[0\].*did you mean 'kv_connector'"),
        ({"connectors": [{**GOOD, "kv_role": "kv_all"}]}, r"\['connectors'\]\[0\]: kv_role='kv_all'"),
        ({"connectors": [{**GOOD, "kv_connector": "Simple"}]}, r"\['connectors'\]\[0\].*'Simple'"),
        ({"connectors": [{**GOOD, "kv_connector_module_path": "nosuchmodule"}]}, r"\[0\].*nosuchmodule"),
        (
            {"connectors": [GOOD, child("SimpleCPUOffloadConnector", lazy_ofload=True)]},
            r"\[1\].*'lazy_offload'",
        ),
        (
            {"connectors": [GOOD, child("SimpleCPUOffloadConnector", lazy_offload=3)]},
            r"\[1\].*lazy_offload.*got 3",
        ),
        (
            {"connectors": [child("SimpleCPUOffloadConnector", cpu_bytes_to_use=0)]},
            r"\[0\].*cpu_bytes_to_use.*got 0",
        ),
        ({"connectors": [child("OffloadingConnector", blocks_per_chnk=2)]}, r"\[0\].*'blocks_per_chunk'"),
        ({"connectors": [child("OffloadingConnector", block_size="16")]}, r"\[0\].*block_size.*'16'"),
        (
            {"connectors": [child("OffloadingConnector", cpu_bytes_to_use=0)]},
            r"\[0\].*cpu_bytes_to_use.*got 0",
        ),
        ({"connectors": [child("ExampleConnector", shared_storage=1)]}, r"\[0\].*'shared_storage_path'"),
        (
            {"connectors": [child("ExampleConnector", shared_storage_path=1)]},
            r"\[0\].*shared_storage_path.*got 1",
        ),
    ],
)
@pytest.mark.parametrize("depth", [1, 2])
def test_wrong_settings_of_a_child_are_told_with_its_place_before_the_model_is_loaded(
    extra: dict[str, Any], named: str, depth: int
) -> None:
    transfer_config = nested(extra)
    if depth == 2:
        transfer_config = nested({"connectors": [GOOD, transfer_config]})
        named = r"\['connectors'\]\[1\] \(MultiConnector\): .*" + named
    config = engine_config(kv_transfer_config=transfer_config)
    with pytest.raises(ValueError, match=named):
        build_engine(config, cast(type[Executor], no_executor), log_stats=False, progress=lambda _: None)


def test_good_settings_of_children_come_as_far_as_the_model() -> None:
    children = [GOOD, child("OffloadingConnector"), child("ExampleConnector", shared_storage_path="/tmp/x")]
    config = engine_config(kv_transfer_config=nested({"connectors": [nested({"connectors": children})]}))
    with pytest.raises(AssertionError, match="the model was loaded"):
        build_engine(config, cast(type[Executor], no_executor), log_stats=False, progress=lambda _: None)


@pytest.mark.parametrize("mode", [{"disk_tier": True}, {"kv_offload_backend": "disk"}])
def test_a_disk_path_in_no_folder_is_told_before_the_model_is_loaded(
    mode: dict[str, Any], tmp_path: Path
) -> None:
    def build(path: Path) -> None:
        extra = {"cpu_bytes_to_use": 1 << 20, "disk_path": str(path), **mode}
        transfer = {"kv_connector": "SimpleCPUOffloadConnector", "kv_role": "kv_both"}
        config = engine_config(kv_transfer_config={**transfer, "kv_connector_extra_config": extra})
        build_engine(config, cast(type[Executor], no_executor), log_stats=False, progress=lambda _: None)

    with pytest.raises(ValueError, match=r"disk_path: .*missing is not a folder that exists"):
        build(tmp_path / "missing" / "kv")
    with pytest.raises(AssertionError, match="the model was loaded"):
        build(tmp_path / "kv")
