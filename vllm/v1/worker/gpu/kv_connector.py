"""Public facade: the connector calls of a step under the name outside callers use. Layer: L6."""

from vllm.v1.worker.kv_connector_step import ActiveKVConnector

__all__ = ["ActiveKVConnector"]
