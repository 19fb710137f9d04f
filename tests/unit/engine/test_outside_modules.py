"""A module from outside that the front end cannot find is told before a core starts."""

from __future__ import annotations

from typing import Any

import pytest

from vllm.config import KVTransferConfig, VllmConfig
from vllm.v1.engine import core_launch
from vllm.v1.engine.outside_modules import check_outside_modules

SPEC = {"kv_connector_extra_config": {"spec_name": "FolderSpec", "spec_module_path": "only_here"}}
CONNECTOR = {"kv_connector_module_path": "only_here.connector"}


def transfer(**settings: Any) -> KVTransferConfig:
    return KVTransferConfig(**{"kv_connector": "OffloadingConnector", "kv_role": "kv_both", **settings})


def multi(*children: Any) -> dict[str, Any]:
    return {"kv_connector": "MultiConnector", "kv_connector_extra_config": {"connectors": list(children)}}


@pytest.fixture(autouse=True)
def no_core_starts(monkeypatch: pytest.MonkeyPatch) -> None:
    def process_class(num_cores: int) -> None:
        raise AssertionError("a core was started")

    monkeypatch.setattr(core_launch, "_process_class", process_class)


@pytest.mark.parametrize(
    ("settings", "named"),
    [
        (SPEC, "^spec_module_path='only_here': .*PYTHONPATH"),
        (CONNECTOR, "^kv_connector_module_path='only_here.connector': .*PYTHONPATH"),
        (multi({"kv_connector": "X"}, SPEC), "^spec_module_path='only_here'"),
        (multi(multi(CONNECTOR)), "^kv_connector_module_path='only_here.connector'"),
    ],
)
def test_a_module_that_is_not_found_is_named_with_its_remedy(settings: dict[str, Any], named: str) -> None:
    config = VllmConfig(kv_transfer_config=transfer(**settings))
    with pytest.raises(ValueError, match=named):
        core_launch.start_cores(config, None, True)


def test_a_module_in_a_folder_of_the_path_is_found_and_not_loaded(
    tmp_path: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "only_here.py").write_text("raise AssertionError('loaded')\n")
    monkeypatch.syspath_prepend(tmp_path)
    check_outside_modules(transfer(**SPEC))
    check_outside_modules(transfer(**multi(CONNECTOR)))


@pytest.mark.parametrize(
    "extra",
    [{"spec_module_path": 3}, {"connectors": 3}, {"connectors": [3, {"kv_connector_extra_config": 3}]}],
)
def test_what_is_no_name_of_a_module_is_left_to_the_connector(extra: dict[str, Any]) -> None:
    check_outside_modules(transfer(kv_connector_extra_config=extra))
    check_outside_modules(None)
