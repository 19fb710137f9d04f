"""The worker half of this process's connector, reachable by the model runner.

Owns the one global of the connector world; scheduler halves are never kept here. Layer L6.
"""

from __future__ import annotations

from vllm.config import VllmConfig
from vllm.distributed.kv_transfer.kv_connector.factory import KVConnectorFactory
from vllm.distributed.kv_transfer.kv_connector.v1.base import KVConnectorBase_V1, KVConnectorRole
from vllm.v1.kv_cache_interface import KVCacheConfig

_connector: KVConnectorBase_V1 | None = None
_owner: VllmConfig | None = None
"""The engine whose connector it is."""


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
    """Create the worker's connector if one is configured and this engine has none yet.

    ``RuntimeError`` if that of another engine is in its place, which has blocks of other sizes and another model's bytes.
    """
    global _connector, _owner
    transfer_config = vllm_config.kv_transfer_config
    if transfer_config is None or not transfer_config.is_kv_transfer_instance:
        return
    if _connector is not None:
        if _owner is not vllm_config:
            raise RuntimeError(
                "this process already has the KV connector of another engine; shut that engine down first, or run engines "
                "in processes of their own (VLLM_ENABLE_V1_MULTIPROCESSING=1)"
            )
        return
    _connector = KVConnectorFactory.create_connector(vllm_config, KVConnectorRole.WORKER, kv_cache_config)
    _owner = vllm_config


def ensure_kv_transfer_shutdown(vllm_config: VllmConfig | None = None) -> None:
    """Shut the worker's connector down and forget it, unless it is not that of ``vllm_config``. Idempotent."""
    global _connector, _owner
    if vllm_config is not None and _owner is not vllm_config:
        return
    connector, _connector, _owner = _connector, None, None
    if connector is not None:
        connector.shutdown()
