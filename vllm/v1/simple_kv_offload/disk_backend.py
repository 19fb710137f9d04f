"""Public name of the disk backend, and where its file lies. Layer L6."""

from __future__ import annotations

import os

import torch.distributed as dist

from vllm.config import VllmConfig
from vllm.v1.simple_kv_offload.copy_backends.disk import DiskBackend

# Files in a folder that was named as the path begin like this.
FILE_STEM = "kv"


def _stem(disk_path: str) -> str:
    """The beginning of the files' names: the path itself, or, if that is a folder, a name in it."""
    return os.path.join(disk_path, FILE_STEM) if os.path.isdir(disk_path) else disk_path


def disk_file_path(disk_path: str, vllm_config: VllmConfig | None) -> str:
    """The file of this rank of this engine: two engines never share one, whatever devices they see."""
    rank = dist.get_rank() if dist.is_available() and dist.is_initialized() else 0
    transfer_config = None if vllm_config is None else vllm_config.kv_transfer_config
    if transfer_config is None or transfer_config.engine_id is None:
        return f"{_stem(disk_path)}.rank_{rank}"
    return f"{_stem(disk_path)}.{transfer_config.engine_id}.rank_{rank}"


def kept_file_path(disk_path: str, digest: bytes, vllm_config: VllmConfig | None) -> str:
    """The file that the next engine with the same digest, index and rank finds again."""
    rank = dist.get_rank() if dist.is_available() and dist.is_initialized() else 0
    engine = 0 if vllm_config is None else vllm_config.parallel_config.data_parallel_index
    return f"{_stem(disk_path)}.kept-{digest.hex()[:16]}-{engine}-{rank}"


__all__ = ["DiskBackend", "disk_file_path", "kept_file_path"]
