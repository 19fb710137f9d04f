"""The settings of `OffloadingConnector`, translated into those of the one offload machinery there is.

Owns the names, bounds and defaults of its keys, and what of them this build cannot do. It must not size or move
anything. Layer L4.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import dataclass, replace
from difflib import get_close_matches
from typing import Any

from vllm.logger import init_logger
from vllm.v1.kv_offload.factory import OffloadingSpecFactory
from vllm.v1.simple_kv_offload.options import DISK_KEYS, OffloadOptions, parse_options

logger = init_logger(__name__)

CONNECTOR = "OffloadingConnector"
CPU_SPEC = "CPUOffloadingSpec"
TIERING_SPEC = "TieringOffloadingSpec"

# Passed on as they are: the machinery knows them under the same names.
SHARED_KEYS = (
    "cpu_bytes_to_use",
    "eviction_policy",
    "store_threshold",
    "max_tracker_size",
    "decline_slow_tier",
)
OWN_KEYS = (
    "spec_name",
    "cache_policy_module_path",
    "block_size",
    "blocks_per_chunk",
    "offload_prompt_only",
    "self_describing_kv_events",
    "canonical_layout",
    "secondary_tiers",
)
OUTSIDE_KEYS = ("transfer_timeout_s",)
KNOWN_KEYS = (*SHARED_KEYS, *OWN_KEYS)
# Names of the interface whose feature does not exist here.
REFUSED_KEYS = {"backpressure": "backpressure between tiers"}
TIER_KEYS = ("type", *DISK_KEYS, "disk_wait_s", "disk_persist")
# Kinds of tiers that the interface names beside "fs".
OTHER_TIERS = ("example", "kvcr", "obj", "p2p")


@dataclass(frozen=True, slots=True)
class NativeOptions:
    """Checked settings: ``machine`` for the offload itself, the rest is about which blocks take part."""

    machine: OffloadOptions
    chunk_tokens: int | None
    """Tokens of a chunk as asked for; None = ``blocks_per_chunk`` blocks."""
    blocks_per_chunk: int


# The values come from the user's JSON, so anything may be in them.
def has_outside_spec(extra: Mapping[str, Any]) -> bool:
    """Whether the settings name a spec that is no part of the connector itself."""
    spec = extra.get("spec_name", CPU_SPEC)
    named = OffloadingSpecFactory.is_registered(spec) and spec not in (CPU_SPEC, TIERING_SPEC)
    return named or extra.get("spec_module_path") is not None


# The values come from the user's JSON, so anything may be in them.
def parse_outside_options(extra: Mapping[str, Any], world_size: int) -> OffloadOptions:
    """The few keys that are the connector's own where the spec comes from outside; all others are the spec's.

    ``ValueError`` naming key and value for wrong ones, and for a spec that cannot be found.
    """
    OffloadingSpecFactory.get_spec_cls(extra)
    _flag(extra, "self_describing_kv_events", default=False)
    if extra.get("blocks_per_chunk", 1) != 1:
        raise ValueError(
            f"blocks_per_chunk must be 1 with a spec of its own, got {extra['blocks_per_chunk']!r}"
        )
    prompt_only = _flag(extra, "offload_prompt_only", default=True)
    return replace(
        parse_options({key: extra[key] for key in OUTSIDE_KEYS if key in extra}, world_size),
        # The memory is the spec's business: nothing of that is checked here.
        cpu_bytes=0,
        cpu_bytes_server_wide=0,
        prompt_only=prompt_only,
        any_cacheable_group=True,
    )


def check_outside_chunk(extra: Mapping[str, Any], block_sizes: Collection[int]) -> None:
    """``ValueError`` if ``block_size`` is given and is not that of all groups (tokens): a key stands for one block."""
    if "block_size" in extra and {_count(extra, "block_size")} != set(block_sizes):
        raise ValueError(
            f"block_size={extra['block_size']} must be the block size of the KV cache with a spec of its own, "
            f"this model has {sorted(set(block_sizes))}"
        )


# The values come from the user's JSON, so anything may be in them.
def parse_native_options(extra: Mapping[str, Any], world_size: int) -> NativeOptions:
    """Read ``kv_connector_extra_config``.

    Raises ``ValueError`` naming key and value for a missing size, unknown keys (with the nearest known one),
    features that are not part of this build, wrong types and values out of bounds.
    """
    _check_keys(extra, KNOWN_KEYS, f"kv_connector_extra_config of {CONNECTOR}")
    if "cpu_bytes_to_use" not in extra:
        raise ValueError(f"cpu_bytes_to_use must be given in kv_connector_extra_config of {CONNECTOR}")
    spec = extra.get("spec_name", CPU_SPEC)
    if spec not in (CPU_SPEC, TIERING_SPEC):
        raise ValueError(
            f"spec_name must be {CPU_SPEC} or {TIERING_SPEC}, or that of a class in spec_module_path, got {spec!r}"
        )
    if _flag(extra, "canonical_layout", default=False):
        raise ValueError("canonical_layout=true (a topology-free host layout) is not part of this build")
    # Events always say their tokens here, so either value is served.
    _flag(extra, "self_describing_kv_events", default=False)
    translated = {key: extra[key] for key in SHARED_KEYS if key in extra}
    if "cache_policy_module_path" in extra:
        translated["eviction_policy"] = _outside_policy(extra)
    translated |= _disk_keys(extra.get("secondary_tiers", []), spec)
    machine = parse_options(translated, world_size)
    prompt_only = _flag(extra, "offload_prompt_only", default=True)
    if "block_size" in extra and "blocks_per_chunk" in extra:
        raise ValueError("block_size and blocks_per_chunk both set the size of a chunk; give one of them")
    return NativeOptions(
        replace(machine, prompt_only=prompt_only, any_cacheable_group=True),
        _count(extra, "block_size") if "block_size" in extra else None,
        _count(extra, "blocks_per_chunk") if "blocks_per_chunk" in extra else 1,
    )


def check_chunk(options: NativeOptions, block_sizes: Collection[int]) -> None:
    """``ValueError`` for a chunk that does not fit the groups' block sizes (tokens).

    Copies are made block by block and joined where blocks are neighbours: a larger chunk changes no more
    than that hits may end within it.
    """
    chunk = options.chunk_tokens
    if chunk is not None:
        sizes = sorted(set(block_sizes))
        if len(sizes) > 1:
            raise ValueError(
                f"block_size={chunk} needs groups of one block size, this model has {sizes}; use blocks_per_chunk"
            )
        if chunk % sizes[0]:
            raise ValueError(
                f"block_size={chunk} must be a multiple of the block size of the KV cache, {sizes[0]}"
            )
        if chunk == sizes[0]:
            return
    elif options.blocks_per_chunk == 1:
        return
    logger.info(
        "Chunks of several blocks are not needed here: blocks are offloaded one by one, copies are joined"
    )


def _outside_policy(extra: Mapping[str, Any]) -> str:
    """An eviction policy's class in a module of its own, as the machinery spells it."""
    module, name = extra["cache_policy_module_path"], extra.get("eviction_policy")
    if not (isinstance(module, str) and module and isinstance(name, str) and name):
        raise ValueError(
            f"cache_policy_module_path={module!r} needs a module, and eviction_policy the name of a class in it, "
            f"got eviction_policy={name!r}"
        )
    return f"{module}:{name}"


def _disk_keys(tiers: Any, spec: str) -> dict[str, Any]:
    """The one secondary tier there can be, as keys of the machinery."""
    if not isinstance(tiers, list):
        raise ValueError(f"secondary_tiers must be a list of mappings, got {tiers!r}")
    if not tiers:
        return {}
    if spec != TIERING_SPEC:
        raise ValueError(f"secondary_tiers needs spec_name={TIERING_SPEC}, got spec_name={spec}")
    if len(tiers) > 1:
        raise ValueError(f"secondary_tiers may hold one tier in this build, got {len(tiers)}")
    tier = tiers[0]
    if not isinstance(tier, Mapping):
        raise ValueError(f"secondary_tiers must be a list of mappings, got {tier!r} in it")
    kind = tier.get("type")
    if kind != "fs":
        reason = "is not part of this build" if kind in OTHER_TIERS or "module_path" in tier else "is unknown"
        raise ValueError(f"secondary_tiers: type {kind!r} {reason}; use 'fs', a file below host memory")
    _check_keys(tier, TIER_KEYS, "secondary_tiers")
    return {"disk_tier": True} | {key: value for key, value in tier.items() if key != "type"}


def _check_keys(given: Mapping[str, Any], known: tuple[str, ...], where: str) -> None:
    problems = []
    for key in given:
        if key in REFUSED_KEYS:
            problems.append(f"{key!r} ({REFUSED_KEYS[key]} are not part of this build)")
        elif key not in known:
            nearest = get_close_matches(str(key), known, n=1, cutoff=0.4)
            problems.append(f"{key!r} (did you mean {nearest[0]!r}?)" if nearest else repr(key))
    if problems:
        raise ValueError(f"Unknown key in {where}: {', '.join(problems)}. Known keys: {', '.join(known)}")


def _flag(extra: Mapping[str, Any], key: str, *, default: bool) -> bool:
    value = extra.get(key, default)
    if not isinstance(value, bool):
        raise ValueError(f"{key} must be true or false, got {value!r}")
    return value


def _count(extra: Mapping[str, Any], key: str) -> int:
    value = extra[key]
    if type(value) is not int or value <= 0:
        raise ValueError(f"{key} must be a positive whole number, got {value!r}")
    return value
