"""The shared host pool of an engine: how its ranks and its scheduler come to the same segment.

Owns which file that is, what must hold before there is one, and the clean-up of files that nobody uses. It must not know
what slots hold. Layer L6.
"""

from __future__ import annotations

import hashlib
import os
import re
from collections.abc import Iterable, Mapping

import torch

from vllm.config import VllmConfig
from vllm.logger import init_logger
from vllm.v1.core.kv_cache_sizes import resolve_kv_cache_block_sizes
from vllm.v1.kv_cache_interface import KVCacheConfig
from vllm.v1.simple_kv_offload.copy_backends.kv_digest import kv_digest
from vllm.v1.simple_kv_offload.copy_backends.shared_format import SegmentShape, members_of
from vllm.v1.simple_kv_offload.copy_backends.shared_places import (
    MAX_MEMBERS,
    SCHEDULER,
    remove_if_unused,
)
from vllm.v1.simple_kv_offload.copy_backends.shared_segment import SharedSegment
from vllm.v1.simple_kv_offload.rank_parts import RankParts, count_parts, rank_parts, slot_widths

logger = init_logger(__name__)

DEFAULT_FOLDER = "/dev/shm"


class SharedSlots:
    """A rank's way to the slots: rows of ``regions``, which hold the parts that this rank uses."""

    def __init__(self, segment: SharedSegment, row_bytes: Mapping[str, int], parts: RankParts) -> None:
        self.segment = segment
        self.parts = parts
        self.regions: dict[str, torch.Tensor] = {}
        first, rows = parts.first_part * parts.num_slots, parts.used_parts * parts.num_slots
        for start, (name, size) in zip(segment.shape.region_starts[:-1], row_bytes.items(), strict=True):
            offset = start + first * size
            flat = torch.frombuffer(segment.data, dtype=torch.int8, offset=offset, count=rows * size)
            self.regions[name] = flat.view(rows, size)


def check_shareable(vllm_config: VllmConfig, name: str, num_bytes: int | None = None) -> None:
    """``ValueError`` naming the setting for what cannot be shared; asked before the model is loaded.

    ``num_bytes``: what the pool is to have, if that is known already.
    """
    parallel = vllm_config.parallel_config
    if vllm_config.lora_config is not None:
        raise ValueError(
            "shared_pool does not go with LoRA: an adapter's name says nothing about its weights"
        )
    if parallel.world_size != parallel.tensor_parallel_size:
        raise ValueError(
            f"shared_pool={name!r} goes with tensor parallelism only, not with pipeline_parallel_size="
            f"{parallel.pipeline_parallel_size}, prefill_context_parallel_size="
            f"{parallel.prefill_context_parallel_size}: ranks of a pool have the same layers"
        )
    if parallel.world_size >= MAX_MEMBERS:
        raise ValueError(
            f"shared_pool={name!r} goes with at most {MAX_MEMBERS - 1} ranks, got {parallel.world_size}"
        )
    if not os.path.isdir(DEFAULT_FOLDER) or not os.access(DEFAULT_FOLDER, os.W_OK | os.X_OK):
        raise ValueError(
            f"shared_pool={name!r} needs {DEFAULT_FOLDER}, which does not exist here or is not writable; in a "
            "container mount it (--ipc=host, or --shm-size), or leave shared_pool out"
        )
    info = os.statvfs(DEFAULT_FOLDER)
    room = info.f_bavail * info.f_frsize + bytes_there(name)
    if num_bytes is not None and num_bytes > room:
        raise ValueError(
            f"shared_pool={name!r}: {DEFAULT_FOLDER} has room for {room} bytes, cpu_bytes_to_use asks for "
            f"{num_bytes}; lower it or enlarge that file system (in a container: --ipc=host, or --shm-size)"
        )


def bytes_there(name: str) -> int:
    """Bytes of what lies there under this name: they are used again, or removed if they can be."""
    room = 0
    for path in _segments(_segment_start(DEFAULT_FOLDER, name)):
        try:
            room += os.stat(path, follow_symlinks=False).st_blocks * 512
        except FileNotFoundError:
            continue
    return room


def bytes_per_part(
    vllm_config: VllmConfig | None, kv_cache_config: KVCacheConfig, bytes_per_rank: int
) -> int:
    """What all ranks have together, divided by the parts of a slot instead of by the ranks."""
    if vllm_config is None:
        raise ValueError("shared_pool needs the engine's configuration")
    parallel = vllm_config.parallel_config
    tp_size, dcp_size = parallel.tensor_parallel_size, parallel.decode_context_parallel_size
    return bytes_per_rank * parallel.world_size // count_parts(kv_cache_config, tp_size, dcp_size)


def open_shared_pool(
    vllm_config: VllmConfig | None,
    kv_cache_config: KVCacheConfig,
    name: str,
    row_bytes: Mapping[str, int],
    num_slots: int,
) -> SharedSlots:
    """A rank's way in: attach to the pool ``name`` of this node, or make it. ``ValueError`` as `SharedSegment` says."""
    if vllm_config is None:
        raise ValueError("shared_pool needs the engine's configuration")
    check_shareable(vllm_config, name)
    parallel = vllm_config.parallel_config
    shape = segment_shape(vllm_config, kv_cache_config, row_bytes, num_slots)
    path = segment_path(DEFAULT_FOLDER, name, shape.digest)
    remove_stale_segments(path)
    segment = SharedSegment(path, shape, engine_id=_engine_id(vllm_config), member=1 + parallel.rank)
    logger.info(
        "KV offload: shared pool %s as rank %d, beside %d other engines",
        path,
        parallel.rank,
        segment.num_other_engines(),
    )
    parts = rank_parts(
        kv_cache_config,
        parallel.rank,
        parallel.tensor_parallel_size,
        parallel.decode_context_parallel_size,
        num_slots,
    )
    return SharedSlots(segment, row_bytes, parts)


def join_shared_pool(vllm_config: VllmConfig, name: str) -> SharedSegment:
    """The scheduler's way in: the segment in which all ranks of its engine are. ``ValueError`` if there is none."""
    engine_id, world_size = _engine_id(vllm_config), vllm_config.parallel_config.world_size
    missing = list(range(world_size))
    for path in _segments(_segment_start(DEFAULT_FOLDER, name)):
        try:
            members = members_of(path, engine_id, 1 + world_size)
        except OSError as error:
            logger.warning("KV offload: cannot look into %s: %s", path, error)
            continue
        if members is None:
            continue
        missing = [rank for rank in range(world_size) if 1 + rank not in members]
        if not missing:
            return SharedSegment(path, None, engine_id=engine_id, member=SCHEDULER)
    raise ValueError(
        f"shared_pool={name!r}: ranks {missing} of this engine are not in its pool in {DEFAULT_FOLDER}; all ranks "
        "must run on the node of the scheduler and see the same memory"
    )


def segment_shape(
    vllm_config: VllmConfig, kv_cache_config: KVCacheConfig, row_bytes: Mapping[str, int], num_slots: int
) -> SegmentShape:
    """What engines must agree on, the number of their ranks included."""
    parallel = vllm_config.parallel_config
    _, hash_block_size = resolve_kv_cache_block_sizes(kv_cache_config, vllm_config)
    dcp = parallel.decode_context_parallel_size
    content = hashlib.sha256(kv_digest(vllm_config, kv_cache_config))
    num_parts = count_parts(kv_cache_config, parallel.tensor_parallel_size, dcp)
    widths = slot_widths(kv_cache_config, parallel.tensor_parallel_size, dcp)
    layout = (hash_block_size, list(row_bytes.items()), parallel.world_size, num_parts, widths)
    content.update(repr(layout).encode())
    num_keys = keys_per_slot(vllm_config, kv_cache_config)
    sizes = tuple(row_bytes.values())
    return SegmentShape(content.digest(), num_slots, num_keys, sizes, num_parts, max(widths))


def keys_per_slot(vllm_config: VllmConfig, kv_cache_config: KVCacheConfig) -> int:
    """A slot may have a key per hash unit of its largest group's block."""
    _, hash_block_size = resolve_kv_cache_block_sizes(kv_cache_config, vllm_config)
    dcp = vllm_config.parallel_config.decode_context_parallel_size
    largest = max(group.kv_cache_spec.block_size for group in kv_cache_config.kv_cache_groups) * dcp
    return max(1, -(-largest // hash_block_size))


def segment_path(folder: str, name: str, digest: bytes) -> str:
    """Where the pool ``name`` of this user lies for this kind of content."""
    return _segment_start(folder, name) + digest.hex()[:16]


def _segment_start(folder: str, name: str) -> str:
    return os.path.join(folder, f"vllm-kv-{os.geteuid()}-{name}-")


def remove_stale_segments(path: str) -> list[str]:
    """Remove segments of the same name that nobody uses and that are of other content than ``path``.

    A file that cannot be looked at is logged and stays.
    """
    return _remove_unused([candidate for candidate in _segments(path[:-16]) if candidate != path])


def remove_unused_segments(name: str) -> list[str]:
    """Remove segments of the pool ``name`` that no engine uses, as the last one would have done that ends in order."""
    return _remove_unused(_segments(_segment_start(DEFAULT_FOLDER, name)))


def _remove_unused(candidates: Iterable[str]) -> list[str]:
    removed = []
    for candidate in candidates:
        try:
            if remove_if_unused(candidate):
                removed.append(candidate)
        except OSError as error:
            logger.warning("KV offload: cannot clean up %s: %s", candidate, error)
    if removed:
        logger.info("KV offload: removed %s, of engines that are gone", ", ".join(removed))
    return removed


def _segments(start: str) -> list[str]:
    """Files whose paths are ``start`` and a digest: one pool's, whatever they hold."""
    folder, prefix = os.path.split(start)
    pattern = re.compile(re.escape(prefix) + "[0-9a-f]{16}")
    return [
        os.path.join(folder, name)
        for name in sorted(os.listdir(folder))
        if pattern.fullmatch(name) is not None
    ]


def _engine_id(vllm_config: VllmConfig) -> str:
    transfer_config = vllm_config.kv_transfer_config
    return str(None if transfer_config is None else transfer_config.engine_id)
