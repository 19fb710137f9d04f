"""Whose KV bytes these are: a digest of all that decides what a block with a given key holds, byte for byte.

Caches that outlive a process, or that several share, may be used where the digest is equal. It must not know where such
a cache lies. Layer L6.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterator
from pathlib import Path

from vllm.config import VllmConfig
from vllm.model_executor.model_loader.weight_utils import find_safetensors
from vllm.transformers_utils.config import ModelSource, find_gguf_file
from vllm.utils.hashing import get_hash_fn_by_name
from vllm.v1.core.block_hash import is_none_hash_constant, resolve_none_hash_seed
from vllm.v1.kv_cache_interface import KVCacheConfig
from vllm.version import __version__

BYTES_OF_WEIGHTS_READ = 1 << 16
"""Of each weight file: with safetensors, the names, shapes and places of its tensors."""


def kv_digest(vllm_config: VllmConfig, kv_cache_config: KVCacheConfig) -> bytes:
    """32 bytes, equal for engines whose blocks are interchangeable: same model and weights, precision, KV groups,
    layout, parallel sizes, hash function with its root, and version of this package.

    Weight files are known by name, size, time of change and first bytes. ``ValueError`` if keys are not the same in
    two processes: a fast hash function without PYTHONHASHSEED.
    """
    check_keys_are_stable(vllm_config)
    text = json.dumps(list(_facts(vllm_config, kv_cache_config)), default=str)
    return hashlib.sha256(text.encode()).digest()


def check_keys_are_stable(vllm_config: VllmConfig) -> None:
    """``ValueError`` if a restart would give the same tokens another key."""
    algorithm = vllm_config.cache_config.prefix_caching_hash_algo
    if not is_none_hash_constant(get_hash_fn_by_name(algorithm)):
        raise ValueError(
            f"prefix_caching_hash_algo={algorithm!r} starts from a random root, so no block would be found after a "
            "restart or by another engine; set the environment variable PYTHONHASHSEED, or use sha256"
        )


def _facts(vllm_config: VllmConfig, kv_cache_config: KVCacheConfig) -> Iterator[object]:
    cache, parallel = vllm_config.cache_config, vllm_config.parallel_config
    yield __version__
    yield from _model_facts(vllm_config)
    algorithm = cache.prefix_caching_hash_algo
    yield from (algorithm, resolve_none_hash_seed(get_hash_fn_by_name(algorithm)), cache.hash_block_size)
    yield from (vllm_config.device_config.device_type, cache.cache_dtype, cache.kv_cache_layout)
    yield vllm_config.attention_config.backend
    yield (
        parallel.tensor_parallel_size,
        parallel.pipeline_parallel_size,
        parallel.decode_context_parallel_size,
        parallel.prefill_context_parallel_size,
        parallel.cp_kv_cache_interleave_size,
    )
    yield [[group.layer_names, repr(group.kv_cache_spec)] for group in kv_cache_config.kv_cache_groups]
    per_block = max(1, kv_cache_config.num_blocks)
    yield [[tensor.layers, tensor.size // per_block] for tensor in kv_cache_config.kv_cache_tensors]


def _model_facts(vllm_config: VllmConfig) -> Iterator[object]:
    model = vllm_config.model_config
    if model is None:
        return
    record = model.hf_config
    yield None if record is None else record.to_dict()
    yield (str(model.dtype), model.quantization)
    yield from weight_facts(vllm_config)


def weight_facts(vllm_config: VllmConfig) -> Iterator[object]:
    """Name, size, time of change and digest of the first bytes of each weight file; `ValueError` if there is none."""
    model, load = vllm_config.model_config, vllm_config.load_config
    assert model is not None
    if load.load_format == "dummy":
        yield ("dummy", model.seed)
        return
    for path in _weight_files(vllm_config):
        info = path.stat()
        with path.open("rb") as file:
            head = hashlib.sha256(file.read(BYTES_OF_WEIGHTS_READ)).hexdigest()
        yield (path.name, info.st_size, info.st_mtime_ns, head)


def _weight_files(vllm_config: VllmConfig) -> list[Path]:
    model, load = vllm_config.model_config, vllm_config.load_config
    assert model is not None
    gguf = find_gguf_file(model.model)
    if gguf is not None:
        return [gguf]
    return find_safetensors(ModelSource(model.model, model.revision, model.hf_token, load.download_dir))
