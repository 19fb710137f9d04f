"""Which KV connector runs, in which role and with which options. Layer: L1.

Knows nothing of the connectors themselves: their option keys are checked by the connector that reads them.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, Literal

from vllm.config.device import detect_device_type
from vllm.config.setting import config, setting
from vllm.utils.ids import random_uuid

KVRole = Literal["kv_producer", "kv_consumer", "kv_both"]


@config
class KVTransferConfig:
    """Connector choice and options (`--kv-transfer-config`)."""

    kv_connector: str | None = setting(
        default=None, doc="Registered connector name, or a class name together with kv_connector_module_path."
    )
    engine_id: str | None = setting(
        default=None, doc="Id of this engine for its peers; a fresh one when not given."
    )
    kv_buffer_device: str | None = setting(
        default=None,
        doc="Device of the transfer buffer: cuda, cpu or xpu; the platform's device when not given.",
    )
    kv_role: KVRole | None = setting(default=None, doc="Side this engine takes; required with kv_connector.")
    kv_port: int = setting(default=14579, doc="First port of connectors that listen.")
    # Connector specific: the connector that is chosen knows keys and types.
    kv_connector_extra_config: dict[str, Any] = setting(
        default_factory=dict, doc="Options of the connector; unknown keys are refused by the connector."
    )
    kv_connector_module_path: str | None = setting(
        default=None, doc="Module that holds the connector class; wins over the registry."
    )
    enable_permute_local_kv: bool = setting(default=False, doc="Permute local KV to the peer's layout.")
    kv_load_failure_policy: Literal["fail", "recompute"] = setting(
        default="fail", doc="What happens to a request whose KV could not be loaded."
    )

    def __post_init__(self) -> None:
        if self.engine_id is None:
            self.engine_id = random_uuid()
        if self.kv_buffer_device is None:
            self.kv_buffer_device = detect_device_type()
        if self.kv_connector_module_path == "":
            raise ValueError("kv_connector_module_path must be a module name or None, not an empty string")
        if self.kv_connector is not None and self.kv_role is None:
            raise ValueError(
                f"kv_connector={self.kv_connector!r} needs kv_role: one of kv_producer, kv_consumer, kv_both"
            )

    @property
    def is_kv_transfer_instance(self) -> bool:
        """Whether a connector with a role is configured."""
        return self.kv_connector is not None and self.kv_role is not None

    @property
    def is_kv_producer(self) -> bool:
        """Whether this engine gives KV to others (or to a cache)."""
        return self.kv_connector is not None and self.kv_role in ("kv_producer", "kv_both")

    @property
    def is_kv_consumer(self) -> bool:
        """Whether this engine takes KV from others (or from a cache)."""
        return self.kv_connector is not None and self.kv_role in ("kv_consumer", "kv_both")

    def get_from_extra_config(self, key: str, default: Any) -> Any:
        """The connector option `key`, or `default`."""
        return self.kv_connector_extra_config.get(key, default)

    def has_connector(self, name: str) -> bool:
        """Whether `name` is the connector or, at any depth, a child of a MultiConnector."""
        if self.kv_connector == name:
            return True
        return any(child.get("kv_connector") == name for child in _children(self.kv_connector_extra_config))

    def has_option(self, key: str) -> bool:
        """Whether the connector or, at any depth, a child of a MultiConnector is given the option `key`."""
        extras = [
            child.get("kv_connector_extra_config") for child in _children(self.kv_connector_extra_config)
        ]
        return any(
            extra and extra.get(key) is not None for extra in [self.kv_connector_extra_config, *extras]
        )


def _children(extra_config: dict[str, Any]) -> Iterator[dict[str, Any]]:
    """The connector configs inside of these options, at any depth."""
    children = extra_config.get("connectors")
    for child in children if isinstance(children, list) else ():
        if isinstance(child, dict):
            yield child
            yield from _children(child.get("kv_connector_extra_config") or {})
