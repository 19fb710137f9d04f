"""The configs of the children of a `MultiConnector`: read from its own, told by their place in it.

Owns what may be in the list. It must not know any concrete child. Layer L4.
"""

from __future__ import annotations

import copy
from difflib import get_close_matches
from typing import Any

from vllm.config import KVTransferConfig, VllmConfig
from vllm.config.error_text import error_text
from vllm.distributed.kv_transfer.kv_connector.factory import ConnectorClass, KVConnectorFactory

CONNECTOR = "MultiConnector"
KEY = "connectors"


def child_transfer_configs(kv_transfer_config: KVTransferConfig) -> list[KVTransferConfig]:
    """The children's configs; one without an engine id takes its parent's.

    ``ValueError`` naming the place if there are none, or for one that is no `KVTransferConfig`.
    """
    children = kv_transfer_config.get_from_extra_config(KEY, None)
    if not isinstance(children, list) or not children:
        raise ValueError(
            f"{CONNECTOR} needs kv_connector_extra_config[{KEY!r}], a list of connector configs, got {children!r}"
        )
    return [_child(value, kv_transfer_config.engine_id, index) for index, value in enumerate(children)]


# The values come from the user's JSON, so anything may be in them.
def _child(value: Any, engine_id: str | None, index: int) -> KVTransferConfig:
    if not isinstance(value, dict):
        raise ValueError(f"{_place(index)}: a connector config must be a mapping, got {value!r}")
    try:
        return KVTransferConfig(**{"engine_id": engine_id, **value})
    except (TypeError, ValueError) as error:
        raise ValueError(f"{_place(index)}: {error_text(error)}") from error


def child_classes(kv_transfer_config: KVTransferConfig) -> list[tuple[ConnectorClass, KVTransferConfig]]:
    """The children's classes with their configs."""
    return [
        (KVConnectorFactory.get_connector_class(child), child)
        for child in child_transfer_configs(kv_transfer_config)
    ]


def child_vllm_config(vllm_config: VllmConfig, child: KVTransferConfig) -> VllmConfig:
    """The engine's config as one child sees it."""
    seen = copy.copy(vllm_config)
    seen.kv_transfer_config = child
    return seen


def check_children(vllm_config: VllmConfig) -> None:
    """``ValueError`` for a key beside the list, and for what any child refuses, at any depth, with its place."""
    transfer_config = vllm_config.kv_transfer_config
    if transfer_config is None:
        return
    for key in transfer_config.kv_connector_extra_config:
        if key != KEY:
            hint = f" (did you mean {KEY!r}?)" if get_close_matches(str(key), [KEY]) else ""
            raise ValueError(
                f"Unknown key in kv_connector_extra_config of {CONNECTOR}: {key!r}{hint}. Known keys: {KEY}"
            )
    for index, child in enumerate(child_transfer_configs(transfer_config)):
        try:
            KVConnectorFactory.check_config(child_vllm_config(vllm_config, child))
        except (ValueError, ImportError, AttributeError) as error:
            raise ValueError(f"{_place(index)} ({child.kv_connector}): {error_text(error)}") from error


def _place(index: int) -> str:
    return f"kv_connector_extra_config[{KEY!r}][{index}]"
