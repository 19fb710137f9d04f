"""Public facade: the connector base under its short path. Layer L4."""

from vllm.distributed.kv_transfer.kv_connector.v1.base import (
    KVConnectorBase_V1,
    SupportsHMA,
    supports_hma,
)

KVConnectorBase = KVConnectorBase_V1
KVConnectorBaseType = KVConnectorBase_V1

__all__ = ["KVConnectorBase", "KVConnectorBaseType", "KVConnectorBase_V1", "SupportsHMA", "supports_hma"]
