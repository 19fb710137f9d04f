"""The offload rig with a spec from outside that does what a test tells it."""

from __future__ import annotations

from typing import Any

from tests.helpers.offload_rig import Rig, prompt
from tests.helpers.scripted_offload import Script, scripted
from vllm.distributed.kv_transfer.kv_connector.v1.offloading.scheduler import OffloadingConnectorScheduler
from vllm.v1.request import Request

TOKENS = prompt(22)
"""Five full blocks of four tokens, of which a later request can use all."""


def make(specs: Any = (), *, options: dict[str, Any] | None = None, **changes: Any) -> Rig:
    rig = Rig(specs, connector_config=scripted(**(options or {})), held=False, **changes)
    rig.manager.clock = rig.clock
    return rig


def half(rig: Rig) -> OffloadingConnectorScheduler:
    manager = rig.manager
    assert isinstance(manager, OffloadingConnectorScheduler)
    return manager


def settle(rig: Rig, script: Script) -> None:
    for _ in range(50):
        if not rig.manager.has_pending_work():
            break
        rig.step()
    rig.assert_at_rest()
    script.manager.assert_at_rest()


def stored(rig: Rig, script: Script) -> Request:
    """A request whose content is in the manager and no more on the device."""
    request = rig.generate(TOKENS)
    settle(rig, script)
    rig.evict_device()
    return request
