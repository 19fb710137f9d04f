"""The table of KV connectors: public name → class, loaded only when it is chosen.

Owns registration, look-up and creation. It must not import any connector. Layer L4.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Sequence
from typing import cast

from vllm.config import KVTransferConfig, VllmConfig
from vllm.distributed.kv_transfer.kv_connector.v1.base import (
    KVConnectorBase_V1,
    KVConnectorRole,
    supports_hma,
)
from vllm.logger import init_logger
from vllm.utils.registry import resolve_object
from vllm.v1.kv_cache_interface import KVCacheConfig
from vllm.v1.kv_connector_types import HostPool

logger = init_logger(__name__)

ConnectorClass = type[KVConnectorBase_V1]
_V1 = "vllm.distributed.kv_transfer.kv_connector.v1"


class KVConnectorFactory:
    """Creates connectors by the name or the module path in a `KVTransferConfig`."""

    _registry: dict[str, Callable[[], ConnectorClass]] = {}

    @classmethod
    def register_connector(cls, name: str, module_path: str, class_name: str) -> None:
        """Add a connector under ``name``; the module loads on first use. ``ValueError`` if it is taken."""
        if name in cls._registry:
            raise ValueError(f"Connector '{name}' is already registered.")

        def load() -> ConnectorClass:
            return cast(ConnectorClass, resolve_object(f"{module_path}:{class_name}"))

        cls._registry[name] = load

    @classmethod
    def get_connector_class_by_name(cls, connector_name: str) -> ConnectorClass:
        """The registered class; ``ValueError`` listing the names if there is none."""
        if connector_name not in cls._registry:
            raise ValueError(
                f"Connector '{connector_name}' is not registered; known: {', '.join(sorted(cls._registry))}"
            )
        return cls._registry[connector_name]()

    @classmethod
    def get_connector_class(cls, kv_transfer_config: KVTransferConfig) -> ConnectorClass:
        """The class a config asks for; a module path wins over the table."""
        connector_name = kv_transfer_config.kv_connector
        if connector_name is None:
            raise ValueError("kv_connector must be set to use a KV connector")
        module_path = kv_transfer_config.kv_connector_module_path
        if module_path is None:
            return cls.get_connector_class_by_name(connector_name)
        connector_cls = cast(ConnectorClass, resolve_object(f"{module_path}:{connector_name}"))
        if "kv_cache_config" not in inspect.signature(connector_cls.__init__).parameters:
            raise ValueError(
                f"Connector class {connector_name} of module {module_path} must accept 'kv_cache_config' "
                "as the third constructor argument"
            )
        return connector_cls

    @classmethod
    def supports_hma_config(cls, kv_transfer_config: KVTransferConfig) -> bool:
        """True if the chosen connector works with several KV cache groups."""
        connector_cls = cls.get_connector_class(kv_transfer_config)
        return connector_cls.supports_hma_config(kv_transfer_config)

    @classmethod
    def check_config(cls, config: VllmConfig) -> None:
        """Refuse a connector's wrong settings with ``ValueError``; nothing without a connector."""
        if config.kv_transfer_config is not None and config.kv_transfer_config.kv_connector is not None:
            cls.get_connector_class(config.kv_transfer_config).check_config(config)

    @classmethod
    def host_pools(cls, config: VllmConfig) -> Sequence[HostPool]:
        """What the connector says of its host memory; nothing without a connector."""
        if config.kv_transfer_config is None or config.kv_transfer_config.kv_connector is None:
            return ()
        return cls.get_connector_class(config.kv_transfer_config).host_pools(config)

    @classmethod
    def remove_leftovers(cls, config: VllmConfig) -> None:
        """Let the connector's class tidy up after a killed engine; nothing without a connector."""
        if config.kv_transfer_config is not None and config.kv_transfer_config.kv_connector is not None:
            cls.get_connector_class(config.kv_transfer_config).remove_leftovers(config)

    @classmethod
    def create_connector(
        cls, config: VllmConfig, role: KVConnectorRole, kv_cache_config: KVCacheConfig | None
    ) -> KVConnectorBase_V1:
        """Build the connector half for ``role``.

        Raises ``ValueError`` if no connector is configured, the name is unknown, or the hybrid
        manager is enabled and the connector cannot handle several groups.
        """
        transfer_config = config.kv_transfer_config
        if transfer_config is None:
            raise ValueError("kv_transfer_config must be set to create a connector")
        connector_cls = cls.get_connector_class(transfer_config)
        handles_groups = supports_hma(connector_cls) and connector_cls.supports_hma_config(transfer_config)
        if not handles_groups:
            cls._refuse_groups(config, connector_cls, kv_cache_config)
        logger.info(
            "Creating connector %s, role %s, engine_id %s",
            connector_cls.__name__,
            role.name.lower(),
            transfer_config.engine_id,
        )
        return connector_cls(config, role, kv_cache_config)

    @staticmethod
    def _refuse_groups(
        config: VllmConfig, connector_cls: ConnectorClass, kv_cache_config: KVCacheConfig | None
    ) -> None:
        disabled = config.scheduler_config.disable_hybrid_kv_cache_manager
        num_groups = 1 if kv_cache_config is None else len(kv_cache_config.kv_cache_groups)
        # Left open (None), the hybrid manager matters only where it makes more than one group.
        if disabled or (disabled is None and num_groups <= 1):
            return
        raise ValueError(
            f"Connector {connector_cls.__name__} does not support HMA but the hybrid KV cache manager "
            "is enabled. Please pass --disable-hybrid-kv-cache-manager."
        )


KVConnectorFactory.register_connector("ExampleConnector", f"{_V1}.example_connector", "ExampleConnector")
KVConnectorFactory.register_connector("MultiConnector", f"{_V1}.multi_connector", "MultiConnector")
KVConnectorFactory.register_connector(
    "OffloadingConnector", f"{_V1}.offloading_connector", "OffloadingConnector"
)
KVConnectorFactory.register_connector(
    "SimpleCPUOffloadConnector", f"{_V1}.simple_cpu_offload_connector", "SimpleCPUOffloadConnector"
)
