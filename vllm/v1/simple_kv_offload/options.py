"""The connector's own settings: read once from the extra config, checked, and frozen.

Owns names, types, bounds and defaults of the keys. It must not know sizes of a model. Layer L4.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass
from difflib import get_close_matches
from typing import Any

from vllm.logger import init_logger
from vllm.v1.simple_kv_offload.policy_options import (
    DEFAULT_POLICY,
    POLICY_KEYS,
    OffloadPolicy,
    number_of_text,
    parse_policy,
)

logger = init_logger(__name__)

DEFAULT_CPU_CAPACITY_BYTES = 8 * 1024**3
DEFAULT_DISK_CAPACITY_BYTES = 100 * 1024**3
DEFAULT_DISK_BUFFER_SLOTS = 2
DEFAULT_TRANSFER_TIMEOUT_S = 60.0
DEFAULT_DISK_WAIT_S = 5.0
VALID_KV_OFFLOAD_BACKENDS = ("cpu", "disk")

DISK_KEYS = ("disk_path", "disk_capacity_bytes", "disk_buffer_slots", "use_page_cache")
KNOWN_KEYS = (
    "cpu_bytes_to_use",
    "cpu_bytes_to_use_per_rank",
    "num_cpu_blocks",
    "lazy_offload",
    "kv_offload_backend",
    *DISK_KEYS,
    "disk_tier",
    "disk_persist",
    "disk_wait_s",
    "transfer_timeout_s",
    "shared_pool",
    *POLICY_KEYS,
)


@dataclass(frozen=True, slots=True)
class OffloadOptions:
    """Checked settings; bytes are per rank unless the name says otherwise."""

    cpu_bytes: int
    cpu_bytes_server_wide: int
    num_cpu_blocks: int | None
    lazy_offload: bool
    backend: str
    disk_path: str | None
    disk_capacity_bytes: int
    disk_buffer_slots: int
    use_page_cache: bool
    transfer_timeout_s: float
    disk_tier: bool = False
    """Whether a file lies below host memory."""
    disk_wait_s: float = DEFAULT_DISK_WAIT_S
    disk_persist: bool = False
    """Whether that file stays for the next start."""
    prompt_only: bool = False
    """Whether generated tokens are left out."""
    any_cacheable_group: bool = False
    """Whether a model without full attention is served too."""
    policy: OffloadPolicy = DEFAULT_POLICY
    shared_pool: str | None = None
    """Name of the pool that this engine shares with others of the node; None = memory of its own."""
    has_default_disk_bytes: bool = False
    """Whether nobody has chosen ``disk_capacity_bytes``: then there may be less of it than that."""

    @property
    def is_disk(self) -> bool:
        """Whether blocks go to a file instead of host memory."""
        return self.backend == "disk"


# The values come from the user's JSON, so anything may be in them.
def parse_options(extra: Mapping[str, Any], world_size: int) -> OffloadOptions:
    """Read ``kv_connector_extra_config``.

    Raises ``ValueError`` naming key and value for unknown keys (with the nearest known one), wrong
    types and values out of bounds.
    """
    _refuse_unknown_keys(extra)
    backend = extra.get("kv_offload_backend", "cpu")
    if backend not in VALID_KV_OFFLOAD_BACKENDS:
        raise ValueError(
            f"kv_offload_backend must be one of {', '.join(VALID_KV_OFFLOAD_BACKENDS)}, got {backend!r}"
        )
    disk_tier = _flag(extra, "disk_tier", default=False)
    if disk_tier and backend == "disk":
        raise ValueError("disk_tier=true puts a disk below host memory: it needs kv_offload_backend='cpu'")
    disk_persist = _flag(extra, "disk_persist", default=False)
    if disk_persist and not disk_tier and backend != "disk":
        raise ValueError(
            "disk_persist=true keeps a disk: it needs disk_tier=true or kv_offload_backend='disk'"
        )
    if backend == "cpu" and not disk_tier:
        ignored = [key for key in (*DISK_KEYS, "disk_wait_s") if key in extra]
        if ignored:
            logger.warning("%s ignored: kv_offload_backend is 'cpu'", ", ".join(ignored))
    is_disk = backend == "disk" or disk_tier
    disk_path = extra.get("disk_path") if is_disk else None
    if is_disk and not (isinstance(disk_path, str) and disk_path):
        mode = "disk_tier=true" if disk_tier else "kv_offload_backend='disk'"
        raise ValueError(f"disk_path must name a file for {mode}, got {disk_path!r}")
    if disk_path is not None and "\0" in disk_path:
        raise ValueError(f"disk_path must not hold a NUL character, got {disk_path!r}")
    server_wide, per_rank = _cpu_bytes(extra, world_size)
    policy = parse_policy(extra)
    return OffloadOptions(
        cpu_bytes=per_rank,
        cpu_bytes_server_wide=server_wide,
        num_cpu_blocks=check_num_cpu_blocks(extra.get("num_cpu_blocks")),
        lazy_offload=_flag(extra, "lazy_offload", default=False),
        backend=backend,
        disk_path=disk_path,
        disk_capacity_bytes=_disk_bytes(extra) if is_disk else 0,
        disk_buffer_slots=_whole(extra, "disk_buffer_slots", DEFAULT_DISK_BUFFER_SLOTS)
        if is_disk
        else DEFAULT_DISK_BUFFER_SLOTS,
        use_page_cache=_flag(extra, "use_page_cache", default=False) if is_disk else False,
        transfer_timeout_s=_seconds(extra, "transfer_timeout_s", DEFAULT_TRANSFER_TIMEOUT_S),
        disk_tier=disk_tier,
        disk_wait_s=_seconds(extra, "disk_wait_s", DEFAULT_DISK_WAIT_S),
        policy=policy,
        shared_pool=_shared_pool(extra, is_disk, policy),
        disk_persist=disk_persist,
        has_default_disk_bytes="disk_capacity_bytes" not in extra,
    )


def _shared_pool(extra: Mapping[str, Any], is_disk: bool, policy: OffloadPolicy) -> str | None:
    name = extra.get("shared_pool")
    if name is None:
        return None
    if not isinstance(name, str) or re.fullmatch(r"[A-Za-z0-9_.-]{1,64}", name) is None:
        raise ValueError(
            f"shared_pool must be a name of 1 to 64 letters, digits, '_', '.', '-', got {name!r}"
        )
    if is_disk:
        raise ValueError(f"shared_pool={name!r} goes with host memory only, not with a disk tier or backend")
    if policy.eviction_policy != DEFAULT_POLICY.eviction_policy:
        raise ValueError(
            f"shared_pool={name!r} has an order of eviction of its own, least recently used of all engines: "
            f"it does not go with eviction_policy={policy.eviction_policy!r}"
        )
    return name


def check_num_cpu_blocks(value: Any) -> int | None:
    """The block count, None if not given; ``ValueError`` for anything but a positive ``int``."""
    if value is None:
        return None
    if type(value) is not int or value <= 0:
        raise ValueError(f"num_cpu_blocks must be a positive int, got {value!r}")
    return value


def _refuse_unknown_keys(extra: Mapping[str, Any]) -> None:
    unknown = [key for key in extra if key not in KNOWN_KEYS]
    if not unknown:
        return
    hints = []
    for key in unknown:
        nearest = get_close_matches(str(key), KNOWN_KEYS, n=1, cutoff=0.4)
        hints.append(f"{key!r} (did you mean {nearest[0]!r}?)" if nearest else repr(key))
    raise ValueError(
        f"Unknown key in kv_connector_extra_config of SimpleCPUOffloadConnector: {', '.join(hints)}. "
        f"Known keys: {', '.join(KNOWN_KEYS)}"
    )


def _cpu_bytes(extra: Mapping[str, Any], world_size: int) -> tuple[int, int]:
    server_wide = _whole(extra, "cpu_bytes_to_use", DEFAULT_CPU_CAPACITY_BYTES)
    shared = server_wide // world_size
    if shared <= 0:
        raise ValueError(f"cpu_bytes_to_use={server_wide} leaves nothing for each of {world_size} ranks")
    if "cpu_bytes_to_use_per_rank" not in extra:
        return server_wide, shared
    per_rank = _whole(extra, "cpu_bytes_to_use_per_rank", shared)
    if "cpu_bytes_to_use" in extra and per_rank != shared:
        logger.warning(
            "cpu_bytes_to_use_per_rank=%d overrides cpu_bytes_to_use=%d (%d per rank)",
            per_rank,
            server_wide,
            shared,
        )
    return per_rank * world_size, per_rank


def _disk_bytes(extra: Mapping[str, Any]) -> int:
    return _whole(extra, "disk_capacity_bytes", DEFAULT_DISK_CAPACITY_BYTES)


def _whole(extra: Mapping[str, Any], key: str, default: int) -> int:
    """A positive whole number; texts such as "8000000000" or "8G" and whole floats (from JSON) are taken too."""
    value = number_of_text(extra.get(key, default))
    number: int | None = None
    if isinstance(value, bool):
        number = None
    elif isinstance(value, int):
        number = value
    elif isinstance(value, float) and value.is_integer():
        number = int(value)
    if number is None or number <= 0:
        hint = '; a size is written as 8000000000, "8G" or "64M"' if isinstance(value, str) else ""
        raise ValueError(f"{key} must be a positive whole number, got {value!r}{hint}")
    return number


def _flag(extra: Mapping[str, Any], key: str, *, default: bool) -> bool:
    value = extra.get(key, default)
    if isinstance(value, bool):
        return value
    if isinstance(value, str) and value.lower() in ("true", "false"):
        return value.lower() == "true"
    raise ValueError(f"{key} must be true or false, got {value!r}")


def _seconds(extra: Mapping[str, Any], key: str, default: float) -> float:
    value = extra.get(key, default)
    if isinstance(value, bool) or not isinstance(value, int | float) or not value > 0:
        raise ValueError(f"{key} must be a positive number of seconds, got {value!r}")
    return float(value)
