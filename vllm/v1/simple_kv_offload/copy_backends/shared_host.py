"""The shared host pool of an engine: both halves of its connector reach the same segment through here.

Owns which segment an engine of this process uses, and its end when both halves have left: the worker half leaves when
its copies have ended, so that slots are not given away under one. It must not know what slots hold. Layer L6.
"""

from __future__ import annotations

import hashlib
import os
import re
from collections.abc import Mapping
from dataclasses import dataclass

import torch

from vllm.config import VllmConfig
from vllm.logger import init_logger
from vllm.v1.core.kv_cache_sizes import resolve_kv_cache_block_sizes
from vllm.v1.kv_cache_interface import KVCacheConfig
from vllm.v1.simple_kv_offload.copy_backends.kv_digest import kv_digest
from vllm.v1.simple_kv_offload.copy_backends.shared_segment import (
    SegmentShape,
    SharedSegment,
    remove_if_unused,
)

logger = init_logger(__name__)

DEFAULT_FOLDER = "/dev/shm"


@dataclass(slots=True)
class _Use:
    segment: SharedSegment
    halves: int = 1
    busy: bool = False


_uses: dict[str, _Use] = {}


def open_shared_pool(
    vllm_config: VllmConfig | None,
    kv_cache_config: KVCacheConfig,
    name: str,
    row_bytes: Mapping[str, int],
    num_slots: int,
) -> SharedSegment:
    """The worker half's way in: attach to the pool ``name`` of this node, or make it.

    ``ValueError`` naming the setting for what cannot be shared, and as `SharedSegment` says.
    """
    if vllm_config is None:
        raise ValueError("shared_pool needs the engine's configuration")
    if vllm_config.lora_config is not None:
        raise ValueError(
            "shared_pool does not go with LoRA: an adapter's name says nothing about its weights"
        )
    if not os.path.isdir(DEFAULT_FOLDER):
        raise ValueError(f"shared_pool needs {DEFAULT_FOLDER}, which does not exist here")
    shape = segment_shape(vllm_config, kv_cache_config, row_bytes, num_slots)
    path = segment_path(DEFAULT_FOLDER, name, shape.digest)
    remove_stale_segments(path)
    segment = SharedSegment(path, shape)
    hold_segment(_engine_id(vllm_config), segment)
    logger.info("KV offload: shared pool %s, used by %d other engines", path, len(segment.attached()))
    return segment


def segment_shape(
    vllm_config: VllmConfig, kv_cache_config: KVCacheConfig, row_bytes: Mapping[str, int], num_slots: int
) -> SegmentShape:
    """What engines must agree on. A slot may have a key per hash unit of its largest group's block."""
    _, hash_block_size = resolve_kv_cache_block_sizes(kv_cache_config, vllm_config)
    dcp = vllm_config.parallel_config.decode_context_parallel_size
    largest = max(group.kv_cache_spec.block_size for group in kv_cache_config.kv_cache_groups) * dcp
    content = hashlib.sha256(kv_digest(vllm_config, kv_cache_config))
    content.update(repr((hash_block_size, list(row_bytes.items()))).encode())
    keys_per_slot = max(1, -(-largest // hash_block_size))
    return SegmentShape(content.digest(), num_slots, keys_per_slot, tuple(row_bytes.values()))


def segment_path(folder: str, name: str, digest: bytes) -> str:
    """Where the pool ``name`` of this user lies for this kind of content."""
    return os.path.join(folder, f"vllm-kv-{os.geteuid()}-{name}-{digest.hex()[:16]}")


def remove_stale_segments(path: str) -> list[str]:
    """Remove segments of the same name that nobody uses and that are of other content than ``path``.

    A file that cannot be looked at is logged and stays.
    """
    folder, own = os.path.split(path)
    pattern = re.compile(re.escape(own[:-16]) + "[0-9a-f]{16}")
    removed = []
    for name in sorted(os.listdir(folder)):
        candidate = os.path.join(folder, name)
        if name == own or pattern.fullmatch(name) is None:
            continue
        try:
            if remove_if_unused(candidate):
                removed.append(candidate)
        except OSError as error:
            logger.warning("KV offload: cannot clean up %s: %s", candidate, error)
    if removed:
        logger.info("KV offload: removed %s, of engines that are gone", ", ".join(removed))
    return removed


def segment_regions(segment: SharedSegment, row_bytes: Mapping[str, int]) -> dict[str, torch.Tensor]:
    """The slots' bytes by region: int8 tensors ``[num_slots, bytes]`` in the shared memory."""
    regions = {}
    for start, (name, size) in zip(segment.shape.region_starts[:-1], row_bytes.items(), strict=True):
        count = segment.num_slots * size
        flat = torch.frombuffer(segment.data, dtype=torch.int8, offset=start, count=count)
        regions[name] = flat.view(segment.num_slots, size)
    return regions


def hold_segment(engine_id: str, segment: SharedSegment) -> None:
    """One half uses this segment; the other finds it with `join_shared_pool`."""
    if engine_id in _uses:
        raise ValueError(f"engine {engine_id} has a shared pool already")
    _uses[engine_id] = _Use(segment)


def join_shared_pool(vllm_config: VllmConfig) -> SharedSegment:
    """The scheduler half's way in. ``ValueError`` if the worker half of this engine is not in this process."""
    use = _uses.get(_engine_id(vllm_config))
    if use is None:
        raise ValueError(
            "shared_pool needs the worker in the process of the engine core; this executor runs it elsewhere"
        )
    use.halves += 1
    return use.segment


def leave_shared_pool(vllm_config: VllmConfig | None, *, busy: bool = False) -> None:
    """One half is done with it. ``busy``: a copy could not be ended, so the slots stay taken while the process lives."""
    engine_id = "" if vllm_config is None else _engine_id(vllm_config)
    use = _uses.get(engine_id)
    if use is None:
        return
    use.halves -= 1
    use.busy |= busy
    if use.halves == 0:
        del _uses[engine_id]
        use.segment.close(busy=use.busy)


def _engine_id(vllm_config: VllmConfig) -> str:
    transfer_config = vllm_config.kv_transfer_config
    return str(None if transfer_config is None else transfer_config.engine_id)
