"""The small example connector: whose prefixes its folder takes for equal."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from tests.helpers.kv_core import image, lora
from tests.helpers.offload_rig import rig_config
from tests.helpers.sched import Driver, full, make_scheduler
from vllm.config import KVTransferConfig
from vllm.distributed.kv_transfer.kv_connector.v1.base import KVConnectorRole
from vllm.distributed.kv_transfer.kv_connector.v1.example_connector import ExampleConnector

IDENTITIES: dict[str, tuple[dict[str, Any], dict[str, Any]]] = {
    "salt": ({"cache_salt": "one"}, {"cache_salt": "other"}),
    "salt or none": ({"cache_salt": "one"}, {}),
    "adapter": ({"lora_request": lora("n", 1, "/one")}, {"lora_request": lora("m", 2, "/other")}),
    "adapter or none": ({"lora_request": lora("n", 1, "/one")}, {}),
    "image": ({"mm_features": [image("one", 2, 3)]}, {"mm_features": [image("other", 2, 3)]}),
}


class Engine:
    """Both halves of the connector, with a worker that saves whatever it is told to."""

    def __init__(self, folder: Path) -> None:
        config = rig_config()
        config.cache_config.block_size = 4
        config.kv_transfer_config = KVTransferConfig(
            kv_connector="ExampleConnector",
            kv_role="kv_both",
            kv_connector_extra_config={"shared_storage_path": str(folder)},
        )
        self.worker = ExampleConnector(config, KVConnectorRole.WORKER)
        self.caches = {"layer0": torch.zeros(40, 4)}
        self.worker.register_kv_caches(self.caches)
        connector = ExampleConnector(config, KVConnectorRole.SCHEDULER)
        # Nothing is cached on the device, so that every hit is the connector's.
        scheduler = make_scheduler([full(4)], 40, connector=connector, enable_prefix_caching=False)
        self.driver = Driver(scheduler)

    def offered(self, name: str, **identity: Any) -> int:
        """Tokens that a request of twelve is offered; what it computes is saved."""
        features = identity.pop("mm_features", [])
        scheduler, worker = self.driver.scheduler, self.worker
        request = self.driver.add(name, range(13), max_tokens=1, **identity)
        request.mm_features = features
        output = scheduler.schedule()
        assert output.kv_connector_metadata is not None
        worker.bind_connector_metadata(output.kv_connector_metadata)
        worker.start_load_kv(None)
        worker.save_kv_layer("layer0", self.caches["layer0"], None)
        worker.wait_for_save()
        worker.clear_connector_metadata()
        return request.num_external_computed_tokens


@pytest.mark.parametrize("case", IDENTITIES)
def test_store_06_the_example_connector_keeps_other_identities_apart(case: str, tmp_path: Path) -> None:
    one, other = IDENTITIES[case]
    engine = Engine(tmp_path)
    hits = [engine.offered(f"r{i}", **identity) for i, identity in enumerate((one, other, one, other))]
    assert hits == [0, 0, 12, 12]
    again = Engine(tmp_path)
    assert again.offered("later", **one) == 12
