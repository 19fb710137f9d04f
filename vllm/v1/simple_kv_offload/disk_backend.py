"""Public name of the disk backend, where its file lies, and how it is opened. Layer L6."""

from __future__ import annotations

import os
from dataclasses import dataclass

import torch
import torch.distributed as dist

from vllm.config import VllmConfig
from vllm.logger import init_logger
from vllm.utils.clock import Clock
from vllm.v1.kv_cache_interface import KVCacheConfig
from vllm.v1.simple_kv_offload.copy_backend import create_copy_backend
from vllm.v1.simple_kv_offload.copy_backends.base import Regions, bytes_per_block
from vllm.v1.simple_kv_offload.copy_backends.disk import DiskBackend
from vllm.v1.simple_kv_offload.copy_backends.disk_file import (
    refuse_place,
    refuse_read_only,
    remove_files_of_ranks,
)
from vllm.v1.simple_kv_offload.copy_backends.kv_digest import kv_digest

logger = init_logger(__name__)

# Files in a folder that was named as the path begin like this.
FILE_STEM = "kv"

Streams = tuple[torch.cuda.Stream | None, torch.cuda.Stream | None]


def _stem(disk_path: str) -> str:
    """The beginning of the files' names: the path itself, or, if that is a folder, a name in it."""
    return os.path.join(disk_path, FILE_STEM) if os.path.isdir(disk_path) else disk_path


def check_disk_path(disk_path: str, *, is_only_tier: bool) -> None:
    """`ValueError` naming `disk_path` if it lies in no folder; its size is checked when the model is known.

    One that is read-only is refused where nothing would be left without it; a disk below host memory is off then.
    """
    refuse_place(_stem(disk_path), num_bytes=0)
    if is_only_tier:
        refuse_read_only(_stem(disk_path))


def disk_file_path(disk_path: str, vllm_config: VllmConfig | None) -> str:
    """The file of this rank of this engine: two engines never share one, whatever devices they see."""
    rank = dist.get_rank() if dist.is_available() and dist.is_initialized() else 0
    transfer_config = None if vllm_config is None else vllm_config.kv_transfer_config
    if transfer_config is None or transfer_config.engine_id is None:
        return f"{_stem(disk_path)}.rank_{rank}"
    return f"{_stem(disk_path)}.{transfer_config.engine_id}.rank_{rank}"


def remove_own_files(disk_path: str, vllm_config: VllmConfig) -> list[str]:
    """Remove the files that are not kept of all ranks of this engine, which is gone."""
    own = disk_file_path(disk_path, vllm_config)
    return remove_files_of_ranks(own.rpartition(".rank_")[0])


def kept_file_path(disk_path: str, digest: bytes, vllm_config: VllmConfig | None) -> str:
    """The file that the next engine with the same digest, index and rank finds again."""
    rank = dist.get_rank() if dist.is_available() and dist.is_initialized() else 0
    engine = 0 if vllm_config is None else vllm_config.parallel_config.data_parallel_index
    return f"{_stem(disk_path)}.kept-{digest.hex()[:16]}-{engine}-{rank}"


@dataclass(frozen=True, slots=True)
class DiskFile:
    """Where the file of this rank lies and how it is used; ``is_kept``: the next engine is to find what is in it."""

    path: str
    buffer_slots: int
    use_page_cache: bool
    is_kept: bool
    clock: Clock
    deadline_s: float

    def open(
        self,
        regions: Regions,
        device: torch.device,
        streams: Streams,
        num_slots: int,
        vllm_config: VllmConfig | None,
        kv_cache_config: KVCacheConfig,
    ) -> DiskBackend:
        """A backend between ``regions`` and the file. A kept file that another engine has is replaced by one of its own.

        ``ValueError`` for impossible sizes or keys that no restart would find, ``OSError`` if no file can be made.
        """
        own = disk_file_path(self.path, vllm_config)
        if self.is_kept and vllm_config is not None:
            digest = kv_digest(vllm_config, kv_cache_config)
            kept = kept_file_path(self.path, digest, vllm_config)
            try:
                return self._backend(regions, device, streams, num_slots, kept, digest)
            except BlockingIOError:
                logger.warning("KV offload: another engine has %s; %s is used and not kept.", kept, own)
        return self._backend(regions, device, streams, num_slots, own, None)

    def _backend(
        self,
        regions: Regions,
        device: torch.device,
        streams: Streams,
        num_slots: int,
        path: str,
        kept_digest: bytes | None,
    ) -> DiskBackend:
        backend = create_copy_backend("disk", self.clock, self.deadline_s)
        backend.init(
            regions,
            device,
            *streams,
            path,
            num_slots,
            bytes_per_block(regions),
            self.buffer_slots,
            self.use_page_cache,
            kept_digest=kept_digest,
        )
        return backend


__all__ = ["DiskBackend", "DiskFile", "disk_file_path", "kept_file_path"]
