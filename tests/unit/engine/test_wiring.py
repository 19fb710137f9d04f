"""What is refused before a model is loaded."""

from __future__ import annotations

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
    [({"cpu_byte_to_use": 1 << 20}, "did you mean"), ({"cpu_bytes_to_use": -1}, "cpu_bytes_to_use")],
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
