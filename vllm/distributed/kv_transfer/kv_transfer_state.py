"""The worker half of this process's connector, reachable by the model runner.

Owns the one global of the connector world; scheduler halves are never kept here. Layer L6.
"""

from __future__ import annotations

from vllm.config import VllmConfig
from vllm.distributed.kv_transfer.kv_connector.factory import KVConnectorFactory
from vllm.distributed.kv_transfer.kv_connector.v1.base import KVConnectorBase_V1, KVConnectorRole
from vllm.v1.kv_cache_interface import KVCacheConfig

_connector: KVConnectorBase_V1 | None = None


def get_kv_transfer_group() -> KVConnectorBase_V1:
    """The worker's connector; ``RuntimeError`` if none was initialised."""
    if _connector is None:
        raise RuntimeError("the KV connector of this worker is not initialised")
    return _connector


def has_kv_transfer_group() -> bool:
    """True once the worker's connector exists."""
    return _connector is not None


def is_v1_kv_transfer_group(connector: object | None = None) -> bool:
    """True if the given (or the current) connector implements the contract of this engine."""
    return isinstance(_connector if connector is None else connector, KVConnectorBase_V1)


def ensure_kv_transfer_initialized(
    vllm_config: VllmConfig, kv_cache_config: KVCacheConfig | None = None
) -> None:
    """Create the worker's connector if one is configured and none exists yet."""
    global _connector
    transfer_config = vllm_config.kv_transfer_config
    if transfer_config is None or not transfer_config.is_kv_transfer_instance or _connector is not None:
        return
    _connector = KVConnectorFactory.create_connector(vllm_config, KVConnectorRole.WORKER, kv_cache_config)


def ensure_kv_transfer_shutdown() -> None:
    """Shut the worker's connector down and forget it. Idempotent."""
    global _connector
    connector, _connector = _connector, None
    if connector is not None:
        connector.shutdown()
