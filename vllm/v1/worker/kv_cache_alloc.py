"""KV cache memory from the plan: raw pages per layer, and work on whole blocks. Layer: L6.

Owns: the allocation, where each layer's pages lie in it, zeroing and copying of blocks. Must not know: what a page
looks like inside (each cache layer makes its own typed views), requests, connectors.
"""

from __future__ import annotations

import mmap
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field

import torch
from torch import Tensor

from vllm.v1.kv_cache_interface import KVCacheConfig, KVCacheSpec, KVCacheTensor, UniformTypeKVCacheSpecs
from vllm.v1.kv_cache_layout import KVCacheLayout


@dataclass
class _Allocation:
    """One block of memory and the tensors of the plan placed in it."""

    host_resident: bool
    size: int
    num_blocks: int
    tensors: list[KVCacheTensor] = field(default_factory=list)


def layer_specs(kv_cache_config: KVCacheConfig) -> dict[str, KVCacheSpec]:
    """Every layer that owns a cache with its own spec after planning."""
    specs: dict[str, KVCacheSpec] = {}
    for group in kv_cache_config.kv_cache_groups:
        spec = group.kv_cache_spec
        members = spec.kv_cache_specs if isinstance(spec, UniformTypeKVCacheSpecs) else {}
        for name in group.layer_names:
            specs[name] = members.get(name, spec)
    return specs


class KVCachePages:
    """All pages of one rank.

    `raw[layer]` is int8 `[num_blocks, page bytes]`: a strided view, 64-byte aligned at its first page. Layers of
    different groups overlap, since a block id belongs to one group at a time. `zero_blocks` and `copy_blocks` act on
    all bytes of a block id, whichever layers use them.
    """

    def __init__(
        self,
        kv_cache_config: KVCacheConfig,
        device: torch.device,
        layout: KVCacheLayout = KVCacheLayout.BLHNC,
    ) -> None:
        if not layout.is_block_compact:
            raise ValueError(f"KV cache layout {layout} scatters the page of a block; BLHNC is served")
        self.device = device
        self.raw: dict[str, Tensor] = {}
        self._maps: list[mmap.mmap] = []
        # [num_blocks, bytes] regions that together hold every byte of a device block once.
        self._regions: list[Tensor] = []
        specs = layer_specs(kv_cache_config)
        for allocation in _plan_allocations(kv_cache_config):
            storage = self._allocate(allocation)
            views = _layer_views(allocation, storage, specs)
            self.raw.update(views)
            if not allocation.host_resident:
                self._regions += _block_regions(allocation, storage, views)
        _check_all_placed(kv_cache_config, self.raw)

    def _allocate(self, allocation: _Allocation) -> Tensor:
        if self.device.type != "cpu" and not allocation.host_resident:
            return torch.zeros(allocation.size, dtype=torch.int8, device=self.device)
        # Anonymous pages cost nothing until they are written, and can be given back in place.
        size = max(allocation.size, mmap.PAGESIZE)
        try:
            memory = mmap.mmap(-1, size, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
        except OSError as error:
            raise ValueError(
                f"{size / 2**30:.2f} GiB cannot be reserved for the KV cache: {error.strerror}"
            ) from error
        if hasattr(mmap, "MADV_HUGEPAGE"):
            with suppress(OSError):  # a kernel may have none
                memory.madvise(mmap.MADV_HUGEPAGE)
        self._maps.append(memory)
        return torch.frombuffer(memory, dtype=torch.int8, count=allocation.size)

    def zero_blocks(self, block_ids: Sequence[int]) -> None:
        """Set all bytes of the blocks to zero."""
        if not block_ids:
            return
        index = torch.tensor(block_ids, dtype=torch.int64, device=self.device)
        for region in self._regions:
            region.index_fill_(0, index, 0)

    def copy_blocks(self, pairs: Sequence[tuple[int, int]]) -> None:
        """Copy whole blocks, (source, target); all sources are read before a target is written."""
        if not pairs:
            return
        index = torch.tensor([tuple(pair) for pair in pairs], dtype=torch.int64, device=self.device)
        for region in self._regions:
            region[index[:, 1]] = region[index[:, 0]]

    def release(self) -> None:
        """Give the memory back but keep the views: they read as zeros until they are written again (host memory)."""
        for memory in self._maps:
            memory.madvise(mmap.MADV_DONTNEED)


def _plan_allocations(kv_cache_config: KVCacheConfig) -> list[_Allocation]:
    """Tensors share an allocation unless two layers of one group would then share pages."""
    group_of = {
        name: index
        for index, group in enumerate(kv_cache_config.kv_cache_groups)
        for name in group.layer_names
    }
    allocations: list[_Allocation] = []
    for tensor in kv_cache_config.kv_cache_tensors:
        for allocation in allocations:
            if allocation.host_resident == tensor.host_resident and not _collides(
                tensor, allocation, group_of
            ):
                break
        else:
            blocks = kv_cache_config.num_blocks_of(tensor)
            allocation = _Allocation(tensor.host_resident, 0, blocks)
            allocations.append(allocation)
        allocation.size = max(allocation.size, tensor.size)
        allocation.tensors.append(tensor)
    return allocations


def _check_all_placed(kv_cache_config: KVCacheConfig, raw: dict[str, Tensor]) -> None:
    """A plan without tensors serves a scheduler alone; one with tensors must place every layer."""
    missing = [
        name
        for group in kv_cache_config.kv_cache_groups
        for name in group.layer_names
        if name not in raw and group.kv_cache_spec.has_layer_views
    ]
    if missing and kv_cache_config.kv_cache_tensors:
        raise ValueError(f"the KV cache plan places no tensor for the layers {', '.join(missing)}")


def _first_pages(tensor: KVCacheTensor, group_of: dict[str, int]) -> set[tuple[int | None, int]]:
    return {(group_of.get(name), tensor.page_start(i, 0)) for i, name in enumerate(tensor.layers)}


def _collides(tensor: KVCacheTensor, allocation: _Allocation, group_of: dict[str, int]) -> bool:
    own = _first_pages(tensor, group_of)
    return any(own & _first_pages(other, group_of) for other in allocation.tensors)


def _layer_views(
    allocation: _Allocation, storage: Tensor, specs: dict[str, KVCacheSpec]
) -> dict[str, Tensor]:
    views = {}
    for tensor in allocation.tensors:
        for index, name in enumerate(tensor.layers):
            if name not in specs:
                raise ValueError(f"the KV cache plan places the layer {name}, which is in no group")
            page = specs[name].page_size_bytes
            start = tensor.page_start(index, 0)
            end = tensor.page_start(index, allocation.num_blocks - 1) + page
            if end > allocation.size:
                raise ValueError(
                    f"pages of layer {name} end at byte {end}, beyond the allocation of {allocation.size} bytes"
                )
            views[name] = storage.as_strided(
                (allocation.num_blocks, page), (tensor.block_stride, 1), storage.storage_offset() + start
            )
    return views


def _block_regions(allocation: _Allocation, storage: Tensor, views: dict[str, Tensor]) -> list[Tensor]:
    """The bytes of each block id as `[num_blocks, bytes]` tensors; one dense region where blocks are outermost."""
    strides = {tensor.block_stride for tensor in allocation.tensors}
    stride = max(strides, default=0)
    span = max((view.storage_offset() + view.shape[1] for view in views.values()), default=0)
    if len(strides) == 1 and span - storage.storage_offset() <= stride:
        used = span - storage.storage_offset()
        return [storage.as_strided((allocation.num_blocks, used), (stride, 1), storage.storage_offset())]
    regions: dict[tuple[int, int], Tensor] = {}
    for view in views.values():
        key = (view.storage_offset(), view.stride(0))
        if key not in regions or regions[key].shape[1] < view.shape[1]:
            regions[key] = view
    return list(regions.values())


def allocate_kv_cache(
    kv_cache_config: KVCacheConfig,
    device: torch.device | str,
    layout: KVCacheLayout = KVCacheLayout.BLHNC,
    kernel_block_sizes: Sequence[int] | None = None,
) -> dict[str, Tensor]:
    """Raw pages of every layer, int8 `[num_blocks, page bytes]`, zero-filled; see `KVCachePages`.

    Raw pages do not depend on how kernels cut a block, so `kernel_block_sizes` is only checked.
    """
    if kernel_block_sizes is not None and len(kernel_block_sizes) != len(kv_cache_config.kv_cache_groups):
        raise ValueError(
            f"kernel_block_sizes has {len(kernel_block_sizes)} entries for "
            f"{len(kv_cache_config.kv_cache_groups)} KV cache groups"
        )
    return KVCachePages(kv_cache_config, torch.device(device), layout).raw


def copy_kv_blocks(
    sources: Mapping[str, Tensor],
    targets: Mapping[str, Tensor],
    source_ids: Sequence[int],
    target_ids: Sequence[int],
    direction: str,
) -> None:
    """Copy blocks of every layer between device and host pages; `direction` is "h2d" or "d2h".

    Returns when the bytes have arrived, so that either side may be reused.
    """
    if direction not in ("h2d", "d2h"):
        raise ValueError(f"direction must be 'h2d' or 'd2h', got {direction!r}")
    for name, source in sources.items():
        target = targets[name]
        rows = source[torch.tensor(source_ids, dtype=torch.int64, device=source.device)]
        target[torch.tensor(target_ids, dtype=torch.int64, device=target.device)] = rows.to(target.device)
