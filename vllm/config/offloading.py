"""`--kv-offloading-size` and `--kv-offloading-backend` turned into a connector choice. Layer: L1."""

from __future__ import annotations

from typing import Any, Final, Protocol

from vllm import envs
from vllm.config.cache import CacheConfig
from vllm.config.kv_transfer import KVTransferConfig
from vllm.logger import init_logger

logger = init_logger(__name__)

GIB: Final = 1 << 30
NATIVE_CONNECTOR: Final = "OffloadingConnector"
SIMPLE_CONNECTOR: Final = "SimpleCPUOffloadConnector"


class _TransferHolder(Protocol):
    """The owner of the connector choice."""

    kv_transfer_config: Any


def apply_convenience_flags(cache: CacheConfig | None, holder: _TransferHolder) -> None:
    """Give `holder` the connector that `cache.kv_offloading_size` asks for.

    Raises ValueError if another connector is configured explicitly, or if the backend is not built in.
    """
    if cache is None or cache.kv_offloading_size is None:
        return
    if cache.kv_offloading_backend != "native":
        raise ValueError(
            f"kv_offloading_backend={cache.kv_offloading_backend!r} is not part of this build; use 'native'"
        )
    size_bytes = int(cache.kv_offloading_size * GIB)
    connector = SIMPLE_CONNECTOR if envs.VLLM_USE_SIMPLE_KV_OFFLOAD else NATIVE_CONNECTOR
    wanted = KVTransferConfig(
        kv_connector=connector,
        kv_role="kv_both",
        kv_connector_extra_config={"cpu_bytes_to_use": size_bytes},
    )
    present: KVTransferConfig | None = holder.kv_transfer_config
    if present is not None and present.kv_connector is not None:
        if _same_choice(present, wanted):
            return
        raise ValueError(
            f"kv_offloading_size={cache.kv_offloading_size} would replace the configured "
            f"kv_connector={present.kv_connector!r}; give one of the two, or put {connector} into a MultiConnector"
        )
    if not cache.enable_prefix_caching:
        logger.warning_once(
            "kv_offloading_size has no effect: the host tier copies the prefix cache, which is off"
        )
    holder.kv_transfer_config = wanted


def _same_choice(present: KVTransferConfig, wanted: KVTransferConfig) -> bool:
    """True for the configuration this very flag made earlier, as when a config is copied with `replace`."""
    return (
        present.kv_connector == wanted.kv_connector
        and present.kv_role == wanted.kv_role
        and present.kv_connector_extra_config == wanted.kv_connector_extra_config
    )
