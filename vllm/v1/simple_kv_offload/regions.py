"""Where the bytes of a block lie in the device's KV caches, as flat regions.

Owns the translation from the plan's placement to ``[blocks, bytes]`` views. It must not know copies
or tiers. Layer L6.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TypeAlias

import torch

from vllm.v1.kv_cache_interface import KVCacheConfig, KVCacheTensor, UniformTypeKVCacheSpecs

# A layer's cache, or its parts where the runner splits one page into several tensors.
LayerCache: TypeAlias = torch.Tensor | Sequence[torch.Tensor]


def device_regions(
    kv_cache_config: KVCacheConfig, kv_caches: Mapping[str, LayerCache]
) -> dict[str, torch.Tensor]:
    """int8 views ``[num_blocks, bytes]`` that together hold every byte of every block, each byte once.

    One region overall where blocks are outermost, one per layer (per head where heads are outside
    blocks) where layers are. Layers of several groups that alias the same bytes count once.
    Raises ``ValueError`` if the caches do not fit the plan.
    """
    if not kv_caches:
        raise ValueError("no KV caches to register")
    pages = _page_sizes(kv_cache_config)
    found: dict[tuple[int, int, int], tuple[str, torch.Tensor]] = {}
    for tensor in kv_cache_config.kv_cache_tensors:
        if tensor.host_resident:
            continue
        for name, region in _tensor_regions(kv_cache_config, tensor, kv_caches, pages):
            key = (region.data_ptr(), region.stride(0), region.shape[1])
            found.setdefault(key, (name, region))
    if not kv_cache_config.kv_cache_tensors:
        for name, region in _whole_storages(kv_cache_config.num_blocks, kv_caches):
            found.setdefault((region.data_ptr(), region.stride(0), region.shape[1]), (name, region))
    regions = dict(found.values())
    if not regions:
        raise ValueError(f"none of the planned KV cache tensors is among {sorted(kv_caches)}")
    return regions


def _page_sizes(kv_cache_config: KVCacheConfig) -> dict[str, int]:
    sizes: dict[str, int] = {}
    for group in kv_cache_config.kv_cache_groups:
        spec = group.kv_cache_spec
        for name in group.layer_names:
            layer_spec = spec.kv_cache_specs[name] if isinstance(spec, UniformTypeKVCacheSpecs) else spec
            sizes[name] = layer_spec.page_size_bytes
    return sizes


def _tensor_regions(
    kv_cache_config: KVCacheConfig,
    tensor: KVCacheTensor,
    kv_caches: Mapping[str, LayerCache],
    pages: Mapping[str, int],
) -> list[tuple[str, torch.Tensor]]:
    known = [(i, name) for i, name in enumerate(tensor.layers) if name in kv_caches]
    if not known:
        return []
    first_index, first_name = known[0]
    cache = _first_tensor(kv_caches[first_name])
    flat = _storage_bytes(cache)
    own_start = cache.storage_offset() * cache.element_size()
    base = own_start - tensor.page_start(first_index, 0)
    num_blocks = kv_cache_config.num_blocks_of(tensor)
    page = pages.get(first_name, tensor.block_stride)
    last_page_end = tensor.offset + (len(tensor.layers) - 1) * tensor.layer_stride + page
    if last_page_end <= tensor.block_stride:
        # All layers of a block lie inside it: the block itself is the region.
        return [(first_name, _rows(flat, base, num_blocks, tensor.block_stride, tensor.block_stride))]
    regions = []
    for index, name in known:
        start = base + tensor.page_start(index, 0)
        if page <= tensor.block_stride:
            regions.append((name, _rows(flat, start, num_blocks, page, tensor.block_stride)))
            continue
        for head in range(page // tensor.block_stride):
            head_start = start + head * num_blocks * tensor.block_stride
            rows = _rows(flat, head_start, num_blocks, tensor.block_stride, tensor.block_stride)
            regions.append((f"{name}.head_{head}", rows))
    return regions


def _whole_storages(num_blocks: int, kv_caches: Mapping[str, LayerCache]) -> list[tuple[str, torch.Tensor]]:
    """Without a placement: each allocation is one region whose outermost dimension is the block."""
    regions = []
    for name, layer_cache in kv_caches.items():
        flat = _storage_bytes(_first_tensor(layer_cache))
        if num_blocks <= 0 or flat.numel() % num_blocks != 0:
            raise ValueError(
                f"the cache of {name} has {flat.numel()} bytes, no multiple of {num_blocks} blocks"
            )
        row = flat.numel() // num_blocks
        regions.append((name, _rows(flat, 0, num_blocks, row, row)))
    return regions


def _first_tensor(layer_cache: LayerCache) -> torch.Tensor:
    return layer_cache if isinstance(layer_cache, torch.Tensor) else layer_cache[0]


def _storage_bytes(tensor: torch.Tensor) -> torch.Tensor:
    """The whole allocation behind a tensor, as bytes."""
    flat = torch.empty(0, dtype=torch.int8, device=tensor.device)
    return flat.set_(tensor.untyped_storage())


def _rows(flat: torch.Tensor, start: int, num_rows: int, row_bytes: int, stride: int) -> torch.Tensor:
    end = start + (num_rows - 1) * stride + row_bytes
    if start < 0 or end > flat.numel():
        raise ValueError(
            f"blocks at bytes {start}..{end} lie outside their allocation of {flat.numel()} bytes"
        )
    return flat.as_strided((num_rows, row_bytes), (stride, 1), start)
