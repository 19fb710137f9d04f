"""The list of children behind a MultiConnector: what is refused of it, with its place, before anything is built."""

from __future__ import annotations

from typing import Any

import pytest

from tests.helpers.offload_rig import rig_config
from vllm.config import KVTransferConfig
from vllm.distributed.kv_transfer.kv_connector.factory import KVConnectorFactory
from vllm.distributed.kv_transfer.kv_connector.v1.multi_children import check_children, child_transfer_configs

GOOD = {
    "kv_connector": "SimpleCPUOffloadConnector",
    "kv_role": "kv_both",
    "kv_connector_extra_config": {"cpu_bytes_to_use": 1 << 20},
}


def several(**extra: Any) -> dict[str, Any]:
    return {"kv_connector": "MultiConnector", "kv_role": "kv_both", "kv_connector_extra_config": extra}


def check(config: dict[str, Any] | None) -> None:
    vllm_config = rig_config()
    vllm_config.kv_transfer_config = None if config is None else KVTransferConfig(**config)
    KVConnectorFactory.check_config(vllm_config)


def with_option(**options: Any) -> dict[str, Any]:
    return {**GOOD, "kv_connector_extra_config": {"cpu_bytes_to_use": 1 << 20, **options}}


@pytest.mark.parametrize(
    ("config", "message"),
    [
        (several(), r"needs kv_connector_extra_config\['connectors'\], a list of connector configs, got None"),
        (several(connectors=[]), r"a list of connector configs, got \[\]"),
        (several(connectors=GOOD), r"a list of connector configs, got \{'kv_connector'"),
        (several(connectors=[GOOD, "second"]), r"\['connectors'\]\[1\]: a connector config must be a mapping, got 'second'"),
        (several(connectors=[{**GOOD, "kv_rolle": 1}]), r"\['connectors'\]\[0\]: .*kv_rolle"),
        (several(connectors=[{**GOOD, "kv_role": "kv_nobody"}]), r"\['connectors'\]\[0\]: .*kv_nobody"),
        (several(connektors=[GOOD]), r"'connektors' \(did you mean 'connectors'\?\). Known keys: connectors"),
        (several(connectors=[GOOD], lazy_offload=True), r"of MultiConnector: 'lazy_offload'\. Known keys"),
        (
            several(connectors=[GOOD, with_option(lazy_ofload=True)]),
            r"\['connectors'\]\[1\] \(SimpleCPUOffloadConnector\): .*lazy_ofload",
        ),
        (
            several(connectors=[several(connectors=[GOOD, with_option(eviction_policy="random")])]),
            r"\['connectors'\]\[0\] \(MultiConnector\): .*\['connectors'\]\[1\] \(SimpleCPU.*eviction_policy",
        ),
        (
            several(connectors=[{**GOOD, "kv_connector": "Mine", "kv_connector_module_path": "no.such.module"}]),
            r"\['connectors'\]\[0\] \(Mine\): ",
        ),
    ],
)  # fmt: skip
def test_a_wrong_list_of_children_is_refused_with_the_place_of_the_fault(
    config: dict[str, Any], message: str
) -> None:
    with pytest.raises(ValueError, match=message):
        check(config)


def test_what_is_right_is_not_refused() -> None:
    check(several(connectors=[GOOD, several(connectors=[GOOD])]))
    check(None)
    vllm_config = rig_config()
    vllm_config.kv_transfer_config = None
    check_children(vllm_config)


def test_a_child_has_its_parents_engine_id_unless_it_has_its_own() -> None:
    parent = KVTransferConfig(
        engine_id="parent", **several(connectors=[GOOD, {**GOOD, "engine_id": "of its own"}])
    )
    assert [child.engine_id for child in child_transfer_configs(parent)] == ["parent", "of its own"]
