"""`--kv-offloading-size` and `--kv-offloading-backend` turned into a connector choice. Layer: L1."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any, Final, Protocol

from vllm import envs
from vllm.config.cache import CacheConfig
from vllm.config.kv_transfer import KVTransferConfig
from vllm.logger import init_logger

logger = init_logger(__name__)

GIB: Final = 1 << 30
NATIVE_CONNECTOR: Final = "OffloadingConnector"
SIMPLE_CONNECTOR: Final = "SimpleCPUOffloadConnector"
SIZE_KEY: Final = "cpu_bytes_to_use"
# Beside the size. An answer is part of the next prompt of its conversation.
CONVERSATION_DEFAULTS: Final[Mapping[str, Mapping[str, bool]]] = {
    NATIVE_CONNECTOR: {"offload_prompt_only": False},
    SIMPLE_CONNECTOR: {},
}


class _TransferHolder(Protocol):
    """The owner of the connector choice."""

    kv_transfer_config: Any


def apply_convenience_flags(cache: CacheConfig | None, holder: _TransferHolder) -> None:
    """Give `holder` the connector that `cache.kv_offloading_size` asks for.

    All content is copied, prompts and answers; what cannot be loaded is computed.
    Raises ValueError if another connector is configured explicitly, if the backend is not built in, or for no size.
    """
    if cache is None or cache.kv_offloading_size is None:
        return
    if cache.kv_offloading_backend != "native":
        raise ValueError(
            f"kv_offloading_backend={cache.kv_offloading_backend!r} is not part of this build; use 'native'"
        )
    size_bytes = int(cache.kv_offloading_size * GIB)
    if size_bytes < 1:
        raise ValueError(f"kv_offloading_size={cache.kv_offloading_size} (GiB) is less than a byte")
    connector = SIMPLE_CONNECTOR if envs.VLLM_USE_SIMPLE_KV_OFFLOAD else NATIVE_CONNECTOR
    present: KVTransferConfig | None = holder.kv_transfer_config
    if present is not None and present.kv_connector is not None:
        if _is_same_choice(present, connector, size_bytes):
            return
        raise ValueError(
            f"kv_offloading_size={cache.kv_offloading_size} would replace the configured "
            f"kv_connector={present.kv_connector!r}; give one of the two, or put {connector} into a MultiConnector"
        )
    if not cache.enable_prefix_caching:
        logger.warning_once(
            "kv_offloading_size has no effect: the host tier copies the prefix cache, which is off"
        )
    # What is given without a connector stays; else a copy that fails costs a computation, not a request.
    base = KVTransferConfig(kv_load_failure_policy="recompute") if present is None else present
    given = base.kv_connector_extra_config
    if given.get(SIZE_KEY, size_bytes) != size_bytes:
        raise ValueError(
            f"kv_offloading_size={cache.kv_offloading_size} is not {SIZE_KEY}={given[SIZE_KEY]}; give one of the two"
        )
    holder.kv_transfer_config = replace(
        base,
        kv_connector=connector,
        kv_role="kv_both",
        kv_connector_extra_config={SIZE_KEY: size_bytes, **CONVERSATION_DEFAULTS[connector], **given},
    )


def _is_same_choice(present: KVTransferConfig, connector: str, size_bytes: int) -> bool:
    """True for what this very flag made earlier, as when a config is copied with `replace`, and for its like."""
    return (
        present.kv_connector == connector
        and present.kv_role == "kv_both"
        and present.kv_connector_extra_config.get(SIZE_KEY) == size_bytes
    )
